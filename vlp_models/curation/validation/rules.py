"""The validation rules, one record each: a column, a check on it, a sentence, and the reason for a bad row.

A rule checks one column, of the table itself or derived (columns.py). Nulls break `Present` and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vlp_models.curation.validation import FLAGS
from vlp_models.curation.validation.columns import text_columns
from vlp_models.data.tables import ID_COLUMN, SPLITS
from vlp_models.data.views import TABLES
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

    column       the column it checks
    reason       a format string over the row's columns
    description  what holds for a valid row, for the validation page
    """

    table: str
    name: str
    column: str
    check: Check
    reason: str
    description: str


REQUIRED = {
    "images": ("source", "split", "path", "width", "height", "sha256"),
    "objects": ("category", "x1", "y1", "x2", "y2"),
}


TEXT_RULES = (  # name and column, reason, description
    ("text_letters", "no letter of any script in {text!r}", "the text has letters"),
    (
        "text_clean",
        "a control or replacement character in {text!r}",
        "the text has no control or replacement character",
    ),
    ("text_not_url", "nothing but a URL: {text!r}", "the text is more than a URL"),
)


FLAGGED = Rule(
    "captions", "flagged", "flagged", EMPTY, "{flagged}", "neither `vlp audit` nor `vlp influence` led to its removal"
)


def passes(check: Check, value: Any) -> bool:
    """Return whether one value passes a check; a null breaks `Present` and nothing else."""
    if isinstance(check, Present):
        # NaN is the one value that differs from itself.
        return value is not None and value == value
    if value is None:
        return True
    if isinstance(check, OneOf):
        return value in check.values
    if isinstance(check, Between):
        low = check.low is None or (value > check.low if check.above else value >= check.low)
        return low and (check.high is None or value <= check.high)
    return re.search(check.pattern, value) is not None


def caption_rules(params: ValidateParams) -> list[Rule]:
    """Return the rules that a caption's text alone decides."""
    return [rule for rule in rules_for("captions", params) if rule.column in ("text", *text_columns(""))]


def broken_rule(text: str, rules: Sequence[Rule]) -> tuple[str, str] | None:
    """Return the name of the first rule that a text breaks, and the reason; None if the text is valid."""
    columns = {"text": text, **text_columns(text)}
    rule = next((rule for rule in rules if not passes(rule.check, columns[rule.column])), None)
    return None if rule is None else (rule.name, rule.reason.format_map(columns))


def rules_for(table: str, params: ValidateParams) -> list[Rule]:
    """Return the rules of one table, in the order in which they are checked and reported."""
    # rules that follow from the table's columns and view come first, its own rules last
    view = TABLES.get(table)
    required = tuple(c.name for c in view.columns if c.required) if view is not None else REQUIRED[table]
    rules = [
        Rule(table, f"{column}_present", column, Present(), f"no {column}", f"{column} is present")
        for column in (ID_COLUMN[table], *required)
    ]
    # braces are filled with the columns of a bad row
    repeated = "its id already belongs to the row read from {id_of}"
    rules.append(Rule(table, "id_unique", "id_of", OneOf(("this row",)), repeated, "the id occurs once"))
    if view is not None and not view.has_image:
        rules.append(_split_rule(table))
    elif table != "images":  # the row names an image
        listed, valid = OneOf(("good", "quarantined")), OneOf(("good", "unknown"))
        unknown, quarantined = "image {image_id} is not in the dataset", "image {image_id} is quarantined"
        rules += [
            Rule(table, "image_known", "image_state", listed, unknown, "its image is in the dataset"),
            Rule(table, "image_good", "image_state", valid, quarantined, "its image is not quarantined"),
        ]
    if view is not None:
        if view.images == "several":
            alone, leak = "it names no image besides {image_id}", "{splits_apart}: one row must not mix splits"
            unknown, bad = "image {other_unknown} is not in the dataset", "image {other_quarantined} is quarantined"
            all_known, all_good = "its other images are in the dataset", "its other images are not quarantined"
            rules += [
                Rule(table, "other_images_present", "other_images", Between(low=1), alone, "it names several images"),
                Rule(table, "other_images_known", "other_unknown", EMPTY, unknown, all_known),
                Rule(table, "other_images_good", "other_quarantined", EMPTY, bad, all_good),
                Rule(table, "images_of_one_split", "splits_apart", EMPTY, leak, "all its images are in one split"),
            ]
        if view.has_text:
            for name, reason, valid_text in TEXT_RULES:
                rules.append(Rule(table, name, name, OneOf((True,)), reason, valid_text))
        # columns whose values are listed in the view
        for column in view.columns:
            if column.values:
                values = ", ".join(filter(None, column.values))
                reason = f"{column.name} {{{column.name}!r}} is not one of {values}"
                check, description = OneOf(column.values), f"{column.name} is one of {values}"
                rules.append(Rule(table, f"{column.name}_known", column.name, check, reason, description))
    if table == "images":
        return rules + _image_rules(params)
    if table == "choices":
        return rules + _choice_rules(params)
    return rules + _own_rules(table, params)


def _split_rule(table: str) -> Rule:
    reason = "split {split!r} is not one of " + ", ".join(SPLITS)
    return Rule(table, "split_known", "split", OneOf(SPLITS), reason, f"the split is one of {', '.join(SPLITS)}")


def _image_rules(params: ValidateParams) -> list[Rule]:
    side, pixels = params.min_image_side, params.max_image_pixels
    # reasons and descriptions of the rules below, in their order
    copy = "the same image, byte for byte, is in {also_in}: this copy would leak into training"
    near = "the same image is in {near_in}: this copy would leak into training"
    no_copy = "the same file is not in a higher split (train, val, test)"
    no_near = "no near-duplicate is in a higher split (train, val, test)"
    small = f"{{width}}x{{height}} pixels; the shorter side must have at least {side}"
    large = f"{{pixels:,}} pixels; validate.max_image_pixels is {pixels:,}"
    at_least, at_most = f"the shorter side has at least {side} pixels", f"it has at most {pixels:,} pixels"
    digest, is_digest = "sha256 is {sha256!r}", "sha256 is 64 hexadecimal digits"
    return [
        _split_rule("images"),
        Rule("images", "split_disjoint", "also_in", EMPTY, copy, no_copy),
        Rule("images", "near_disjoint", "near_in", EMPTY, near, no_near),
        Rule("images", "image_side", "side", Between(low=side), small, at_least),
        Rule("images", "image_pixels", "pixels", Between(high=pixels), large, at_most),
        Rule("images", "sha256_form", "sha256", Matches("^[0-9a-f]{64}$"), digest, is_digest),
    ]


def _choice_rules(params: ValidateParams) -> list[Rule]:
    limit, rules = params.max_box_overhang, []
    for kind in ("answer", "rationale"):
        reason, valid = f"{{{kind}_count}} {kind}s, expected {CHOICES}", f"it has {CHOICES} {kind}s"
        rules.append(Rule("choices", f"four_{kind}s", f"{kind}_count", OneOf((CHOICES,)), reason, valid))
    for kind in ("answer", "rationale"):
        reason = f"{kind}_label is {{{kind}_label}}, expected 0 to {CHOICES - 1}"
        check, valid = Between(0, CHOICES - 1), f"{kind}_label is 0 to {CHOICES - 1}"
        rules.append(Rule("choices", f"{kind}_label_known", f"{kind}_label", check, reason, valid))
    # of several texts and boxes, the worst decides (columns.py)
    unclean = "an answer or rationale is empty or has a control or replacement character: {unclean_choice}"
    outside = f"the box of one of its objects overhangs the image by {{boxes_overhang:.1f}} pixels; at most {limit:g}"
    no_area = "the box of one of its objects has no area"
    clean = "no answer or rationale is empty or has a control or replacement character"
    area, inside = "the boxes of its objects have an area", f"no box overhangs the image by more than {limit:g} pixels"
    return [
        *rules,
        Rule("choices", "choices_clean", "unclean_choice", EMPTY, unclean, clean),
        Rule("choices", "object_box_area", "boxes_shorter_side", Between(low=0, above=True), no_area, area),
        Rule("choices", "object_box_inside", "boxes_overhang", Between(high=limit), outside, inside),
    ]


def _own_rules(table: str, params: ValidateParams) -> list[Rule]:
    """Return the rules that do not follow from a table's columns and view; most tables have none."""
    if table == "captions":
        low, high = params.min_caption_words, params.max_caption_words
        reason, valid = f"{{words}} words, expected {low} to {high}", f"the text has {low} to {high} words"
        return [Rule(table, "caption_words", "words", Between(low, high), reason, valid), *([FLAGGED] if FLAGS else [])]
    if table == "questions":
        reason = f"{{labeled_answers}} answers, expected {ANSWERS_PER_QUESTION}, or one correct answer"
        valid = f"{ANSWERS_PER_QUESTION} answers, or one correct answer"
        return [Rule(table, "ten_answers", "labeled_answers", OneOf((ANSWERS_PER_QUESTION, 1)), reason, valid)]
    if table == "objects":
        limit = params.max_box_overhang
        no_area = "the box {x1:g},{y1:g},{x2:g},{y2:g} has no area"
        outside = f"the box overhangs its image by {{overhang:.1f}} pixels; at most {limit:g}"
        return [
            Rule(table, "box_area", "shorter_side", Between(low=0, above=True), no_area, "the box has an area"),
            Rule(
                table,
                "box_inside",
                "overhang",
                Between(high=limit),
                outside,
                f"it overhangs its image by at most {limit:g} pixels",
            ),
        ]
    return []
