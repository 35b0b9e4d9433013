"""Derived columns: what the rules check besides a table's own columns.

Rows are plain dicts, one batch of a table. Facts that depend on rows outside the batch come from
cross_row_facts.py. `row`, the position in the table, identifies a row whose id is missing or repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from vlp_models.curation.validation.cross_row_facts import CrossFacts
from vlp_models.curation.validation.text import count_words, has_letters, has_text_besides_urls, is_clean
from vlp_models.data.views import OTHER_IMAGES, TABLES

Row = dict[str, Any]


def add_derived_columns(
    table: str, rows: list[Row], facts: CrossFacts, first: int = 0, reasons: Mapping[str, str] | None = None
) -> list[Row]:
    """Return the rows with all columns that the rules of `table` check.

    Args:
        facts: what depends on other rows.
        first: the position of the batch's first row in the table.
        reasons: of images that are copies of evaluation images (duplicates/leakage.py), or of flagged captions, by id.
    """
    # facts of other rows replace these where there are some
    no_facts = {"id_of": THIS_ROW, **NO_CROSS_FACTS.get(table, {})}
    rows = [
        {**row, "row": number, **no_facts, **facts.columns.get(number, {})}
        for number, row in enumerate(rows, start=first)
    ]
    images, quarantined_images, reasons = facts.images, facts.quarantined, reasons or {}
    view = TABLES.get(table)
    if table != "images" and (view is None or view.has_image):
        for row in rows:
            if row["image_id"] in images:
                row["image_state"] = "good"
            else:
                row["image_state"] = "quarantined" if row["image_id"] in quarantined_images else "unknown"
    if view is not None and view.images == "several":
        for row in rows:
            row |= other_images_columns(row, images, quarantined_images)
    if view is not None and view.has_text:
        for row in rows:
            row |= {"flagged": reasons.get(row[view.id_column], ""), **text_columns(row["text"])}
    if table in OWN_COLUMNS:
        OWN_COLUMNS[table](rows, images)
    if table == "questions":
        for row in rows:
            # a question without answers and type is unlabeled, which is valid
            row["labeled_answers"] = len(row["answers"] or ()) if row["answers"] or row["answer_type"] else None
    if table == "images":
        for row in rows:
            # a missing size is reported by its own rules
            sized = row["width"] is not None and row["height"] is not None
            row["side"] = min(row["width"], row["height"]) if sized else None
            row["pixels"] = row["width"] * row["height"] if sized else None
            # one reason is enough: a repeated id or an equal file is reported by its own rule
            reported = row["also_in"] or row["id_of"] != THIS_ROW
            row["near_in"] = "" if reported else reasons.get(row["image_id"], "")
    return rows


# The columns of cross_row_facts.py for a row that depends on no other.
THIS_ROW = "this row"  # value of `id_of`: no earlier row has the id
NO_CROSS_FACTS = {"images": {"also_in": ""}, "captions": {"same_as": ""}}


def other_images_columns(row: Row, images: dict[str, Row], quarantined_images: set[str]) -> Row:
    """Check the second and later images of a row.

    Returns:
        Their number, and the first of them (`""`: none) that is unknown, in quarantine, or in another split than the
        row's first image.
    """
    other_ids = row[OTHER_IMAGES.name] or ()
    # None if the first image is missing, which another rule reports
    split = images[row["image_id"]]["split"] if row["image_id"] in images else None
    unknown, quarantined, apart = [], [], []
    for name in other_ids:
        if name in images:
            other_split = images[name]["split"]
            if split is not None and other_split != split:
                apart.append(f"{row['image_id']} is in {split}, {name} in {other_split}")
        elif name in quarantined_images:
            quarantined.append(name)
        else:
            unknown.append(str(name))
    return {
        "other_images": len(other_ids),
        "other_unknown": next(iter(unknown), ""),
        "other_quarantined": next(iter(quarantined), ""),
        "splits_apart": next(iter(apart), ""),
    }


def text_columns(text: str | None) -> Row:
    """Return the columns that the rules of every text check."""
    if text is None:
        return dict.fromkeys(("words", "text_letters", "text_clean", "text_not_url"))
    return {
        "words": count_words(text),
        "text_letters": has_letters(text),
        "text_clean": is_clean(text),
        "text_not_url": has_text_besides_urls(text),
    }


def _add_choice_columns(rows: list[Row], images: dict[str, Row]) -> None:
    for row in rows:
        answers, rationales = row["answers"] or [], row["rationales"] or []
        row["answer_count"], row["rationale_count"] = len(answers), len(rationales)
        bad = [text for text in (*answers, *rationales) if not text or not text.strip() or not is_clean(text)]
        row["unclean_choice"] = repr(bad[0]) if bad else ""
        # the boxes as rows of `objects`; NaN becomes infinite, so that the box has no area
        objects = []
        for box in row["boxes"] or []:
            sides = [math.inf if math.isnan(value) else value for value in box]
            objects.append({**dict(zip(("x1", "y1", "x2", "y2"), sides, strict=True)), "image_id": row["image_id"]})
        _add_box_columns(objects, images)
        for name, worst in (("shorter_side", min), ("overhang", max)):
            values = [item[name] for item in objects if item[name] is not None]
            row[f"boxes_{name}"] = worst(values) if values else None


def _add_box_columns(rows: list[Row], images: dict[str, Row]) -> None:
    for row in rows:
        box = [row[name] for name in ("x1", "y1", "x2", "y2")]
        row["shorter_side"] = row["overhang"] = None
        if all(value is not None and not math.isnan(value) for value in box):
            x1, y1, x2, y2 = box
            # an infinite box has no area, whatever its sides
            if not all(map(math.isfinite, box)):
                row["shorter_side"] = -math.inf
                continue
            row["shorter_side"] = min(x2 - x1, y2 - y1)
            image = images.get(row["image_id"])
            if image is not None:
                row["overhang"] = max(-x1, -y1, x2 - image["width"], y2 - image["height"], 0.0)


# Columns for the rules of one table only (rules.py); each function adds columns to the rows in place.
OWN_COLUMNS: dict[str, Callable[[list[Row], dict[str, Row]], None]] = {
    "choices": _add_choice_columns,
    "objects": _add_box_columns,
}
