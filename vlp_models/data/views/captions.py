"""Image-caption pairs."""

from __future__ import annotations

from vlp_models.data.views.base import TEXT, View

VIEW = View(name="captions", id_column="caption_id", columns=(TEXT,))
