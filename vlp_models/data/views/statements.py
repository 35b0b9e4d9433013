"""Statements about an image, true or false."""

from __future__ import annotations

from vlp_models.data.views.base import TEXT, Column, View

STATEMENT = (
    TEXT,
    Column(name="label", type="bool"),  # null if hidden
    # id of the sentence: NLVR's and NLVR2's consistency is counted per group
    Column(name="group", type="string", required=True),
)
VIEW = View(name="statements", id_column="statement_id", columns=STATEMENT)
