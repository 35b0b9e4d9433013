"""The validation rules, one record each: a column, a check on it, and the reason given for a row that breaks it.

A rule checks one column, of the table itself or derived (columns.py). Nulls break `Present` and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vlp_models.data.tables import ID_COLUMN, SPLITS
from vlp_models.data.views import TABLES, View
from vlp_models.params import ValidateParams

ANSWERS_PER_QUESTION = 10
CHOICES = 4  # answers, and rationales, of a VCR question


@dataclass(frozen=True)
class Present:
    """Not null (and not NaN)."""


@dataclass(frozen=True)
class OneOf:
    values: tuple[str | int | bool, ...]


@dataclass(frozen=True)
class Between:
    """Inclusive, except that `above` excludes `low` itself. None is no limit."""

    low: float | None = None
    high: float | None = None
    above: bool = False


@dataclass(frozen=True)
class Matches:
    pattern: str


Check = Present | OneOf | Between | Matches
EMPTY = OneOf(("",))  # of derived columns that describe a problem


@dataclass(frozen=True)
class Rule:
    """One rule of one table.

    column  the column it checks
    reason  a format string over the row's columns
    """

    table: str
    name: str
    column: str
    check: Check
    reason: str


REQUIRED = {
    "images": ("source", "split", "path", "width", "height", "sha256"),
    **{view.name: tuple(c.name for c in view.columns if c.required) for view in TABLES.values()},
    "objects": ("category", "x1", "y1", "x2", "y2"),
}


def passes(check: Check, value: Any) -> bool:
    """Return whether one value passes a check; a null breaks `Present` and nothing else."""
    if isinstance(check, Present):
        return value is not None and value == value
    if value is None:
        return True
    if isinstance(check, OneOf):
        return value in check.values
    if isinstance(check, Between):
        low = check.low is None or (value > check.low if check.above else value >= check.low)
        return low and (check.high is None or value <= check.high)
    return re.search(check.pattern, value) is not None


def rules_for(table: str, params: ValidateParams) -> list[Rule]:
    """Return the rules of one table, in the order in which they are checked and reported."""
    rules = [
        Rule(table, f"{column}_present", column, Present(), f"no {column}")
        for column in (ID_COLUMN[table], *REQUIRED[table])
    ]
    repeated = "its id already belongs to the row read from {id_of}"
    rules.append(Rule(table, "id_unique", "id_of", OneOf(("this row",)), repeated))
    view = TABLES.get(table)
    if table != "images":
        rules += _image_rules(table) if view is None or view.has_image else [_split_rule(table)]
    if view is not None:
        if view.images == "several":
            rules += _other_image_rules(table)
        if view.has_text:
            rules += _text_rules(table)
        rules += _value_rules(view)
    return rules + OWN_RULES.get(table, lambda _: [])(params)


def _split_rule(table: str) -> Rule:
    return Rule(table, "split_known", "split", OneOf(SPLITS), "split {split!r} is not one of " + ", ".join(SPLITS))


def _image_rules(table: str) -> list[Rule]:
    """Rules of a row that names an image."""
    known, good = OneOf(("good", "quarantined")), OneOf(("good", "unknown"))
    return [
        Rule(table, "image_known", "image_state", known, "image {image_id} is not in the dataset"),
        Rule(table, "image_good", "image_state", good, "image {image_id} is quarantined"),
    ]


def _other_image_rules(table: str) -> list[Rule]:
    """Rules of a row that names several images."""
    leak = "{splits_apart}: one row must not mix splits"
    return [
        Rule(table, "other_images_present", "other_images", Between(low=1), "it names no image besides {image_id}"),
        Rule(table, "other_images_known", "other_unknown", EMPTY, "image {other_unknown} is not in the dataset"),
        Rule(table, "other_images_good", "other_quarantined", EMPTY, "image {other_quarantined} is quarantined"),
        Rule(table, "images_of_one_split", "splits_apart", EMPTY, leak),
    ]


def _text_rules(table: str) -> list[Rule]:
    reasons = {
        "text_letters": "no letter of any script in {text!r}",
        "text_clean": "a control or replacement character in {text!r}",
        "text_not_url": "nothing but a URL: {text!r}",
    }
    return [Rule(table, name, name, OneOf((True,)), reason) for name, reason in reasons.items()]


def _value_rules(view: View) -> list[Rule]:
    """Rules of columns whose values are listed in the view."""
    rules = []
    for column in view.columns:
        if column.values:
            reason = f"{column.name} {{{column.name}!r}} is not one of {', '.join(filter(None, column.values))}"
            rules.append(Rule(view.name, f"{column.name}_known", column.name, OneOf(column.values), reason))
    return rules


def _own_image_rules(params: ValidateParams) -> list[Rule]:
    side, pixels = params.min_image_side, params.max_image_pixels
    copy = "the same image, byte for byte, is in {also_in}: this copy would leak into training"
    near = "the same image is in {near_in}: this copy would leak into training"
    small = f"{{width}}x{{height}} pixels; the shorter side must have at least {side}"
    large = f"{{pixels:,}} pixels; validate.max_image_pixels is {pixels:,}"
    return [
        _split_rule("images"),
        Rule("images", "split_disjoint", "also_in", EMPTY, copy),
        Rule("images", "near_disjoint", "near_in", EMPTY, near),
        Rule("images", "image_side", "side", Between(low=side), small),
        Rule("images", "image_pixels", "pixels", Between(high=pixels), large),
        Rule("images", "sha256_form", "sha256", Matches("^[0-9a-f]{64}$"), "sha256 is {sha256!r}"),
    ]


def _caption_rules(params: ValidateParams) -> list[Rule]:
    low, high = params.min_caption_words, params.max_caption_words
    return [
        Rule("captions", "caption_words", "words", Between(low, high), f"{{words}} words, expected {low} to {high}"),
    ]


def _question_rules(params: ValidateParams) -> list[Rule]:
    reason = f"{{labeled_answers}} answers, expected {ANSWERS_PER_QUESTION}, or one correct answer"
    return [Rule("questions", "ten_answers", "labeled_answers", OneOf((ANSWERS_PER_QUESTION, 1)), reason)]


def _choice_rules(params: ValidateParams) -> list[Rule]:
    most, rules = params.max_box_overhang, []
    for kind in ("answer", "rationale"):
        reason = f"{{{kind}_count}} {kind}s, expected {CHOICES}"
        rules.append(Rule("choices", f"four_{kind}s", f"{kind}_count", OneOf((CHOICES,)), reason))
    for kind in ("answer", "rationale"):
        reason = f"{kind}_label is {{{kind}_label}}, expected 0 to {CHOICES - 1}"
        rules.append(Rule("choices", f"{kind}_label_known", f"{kind}_label", Between(0, CHOICES - 1), reason))
    unclean = "an answer or rationale is empty or has a control or replacement character: {unclean_choice}"
    outside = f"the box of one of its objects overhangs the image by {{boxes_overhang:.1f}} pixels; at most {most:g}"
    no_area = "the box of one of its objects has no area"
    return [
        *rules,
        Rule("choices", "choices_clean", "unclean_choice", EMPTY, unclean),
        Rule("choices", "object_box_area", "boxes_shorter_side", Between(low=0, above=True), no_area),
        Rule("choices", "object_box_inside", "boxes_overhang", Between(high=most), outside),
    ]


def _object_rules(params: ValidateParams) -> list[Rule]:
    most = params.max_box_overhang
    no_area = "the box {x1:g},{y1:g},{x2:g},{y2:g} has no area"
    outside = f"the box overhangs its image by {{overhang:.1f}} pixels; at most {most:g}"
    return [
        Rule("objects", "box_area", "shorter_side", Between(low=0, above=True), no_area),
        Rule("objects", "box_inside", "overhang", Between(high=most), outside),
    ]


# Rules of one table only; all others follow from the table's view (data/views.py).
OWN_RULES: dict[str, Callable[[ValidateParams], list[Rule]]] = {
    "images": _own_image_rules,
    "captions": _caption_rules,
    "questions": _question_rules,
    "choices": _choice_rules,
    "objects": _object_rules,
}
