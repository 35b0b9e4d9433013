"""Statements about two images, the left one first."""

from __future__ import annotations

from vlp_models.data.views.base import OTHER_IMAGES, View
from vlp_models.data.views.statements import STATEMENT

VIEW = View(
    name="image_pairs",
    id_column="pair_id",
    images="several",
    columns=(OTHER_IMAGES, *STATEMENT),
)
