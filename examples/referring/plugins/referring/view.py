"""Expressions that refer to one object of an image, and its box."""

from vlp_models.data.views import TEXT, Column, View
from vlp_models.data.views.choices import scale_boxes

VIEW = View(
    name="expressions",
    id_column="expression_id",
    columns=(
        TEXT,
        # one box, x1, y1, x2, y2: pixels in the table, fractions in a sample; empty if it is hidden
        Column(name="boxes", type="boxes"),
    ),
    to_index=scale_boxes,
)
