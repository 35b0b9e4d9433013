"""The rules, one record each: a column, what must hold for it, and what to say of a row that breaks it.

A rule looks at one column, of the table itself or derived (columns.py). Nulls break `Present` and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vlp_models.data.tables import ID_COLUMN, SPLITS
from vlp_models.data.views import TABLES, View
from vlp_models.params import ValidateParams


@dataclass(frozen=True)
class Present:
    """Not null (and, for a float, a number)."""


@dataclass(frozen=True)
class OneOf:
    values: tuple[str | int | bool, ...]


@dataclass(frozen=True)
class Between:
    """Inclusive, except that `above` excludes its own value. None is no limit."""

    low: float | None = None
    high: float | None = None
    above: bool = False


@dataclass(frozen=True)
class Matches:
    pattern: str


Check = Present | OneOf | Between | Matches


@dataclass(frozen=True, kw_only=True)
class Rule:
    """`reason` is a format string over the row's columns."""

    table: str
    name: str
    column: str
    check: Check
    reason: str


def holds(check: Check, value: Any) -> bool:
    """Whether one value passes; a null breaks `Present` and nothing else."""
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


REQUIRED = {
    "images": ("source", "split", "path", "width", "height", "sha256"),
    **{view.name: tuple(c.name for c in view.columns if c.required) for view in TABLES.values()},
    "objects": ("category", "x1", "y1", "x2", "y2"),
}
ANSWERS_PER_QUESTION = 10
CHOICES = 4  # answers, and rationales, of a VCR question


def rules_for(table: str, params: ValidateParams) -> list[Rule]:
    """The rules of one table, in the order in which they are checked and reported."""
    own = OWN_RULES.get(table, lambda _: [])(params)
    if table == "images":
        return [*_shared(table), *own]
    view = TABLES.get(table)
    dependent = _depends_on_image(table) if view is None or view.has_image else [_split_known(table)]
    if view is not None and view.images == "several":
        dependent += _depends_on_others(table)
    of_view = [] if view is None else [*(_text(table) if view.has_text else []), *_listed(view)]
    return [*_shared(table), *dependent, *of_view, *own]


def _shared(table: str) -> list[Rule]:
    rules = [
        Rule(table=table, name=f"{column}_present", column=column, check=Present(), reason=f"no {column}")
        for column in (ID_COLUMN[table], *REQUIRED[table])
    ]
    return [
        *rules,
        Rule(
            table=table,
            name="id_unique",
            column="id_of",
            check=OneOf(("this row",)),
            reason="its id already belongs to the row read from {id_of}",
        ),
    ]


def _split_known(table: str) -> Rule:
    return Rule(
        table=table,
        name="split_known",
        column="split",
        check=OneOf(SPLITS),
        reason="split {split!r} is none of " + ", ".join(SPLITS),
    )


def _listed(view: View) -> list[Rule]:
    """Of each column whose values are listed: its value is one of them."""
    return [
        Rule(
            table=view.name,
            name=f"{column.name}_known",
            column=column.name,
            check=OneOf(column.values),
            reason=f"{column.name} {{{column.name}!r}} is none of {', '.join(filter(None, column.values))}",
        )
        for column in view.columns
        if column.values
    ]


def _images(params: ValidateParams) -> list[Rule]:
    return [
        _split_known("images"),
        Rule(
            table="images",
            name="split_disjoint",
            column="also_in",
            check=OneOf(("",)),
            reason="the same picture, byte for byte, is in {also_in}: this copy must not be learnt from",
        ),
        Rule(
            table="images",
            name="near_disjoint",
            column="near_in",
            check=OneOf(("",)),
            reason="the same picture is in {near_in}: this copy must not be learnt from",
        ),
        Rule(
            table="images",
            name="image_side",
            column="side",
            check=Between(low=params.min_image_side),
            reason=f"{{width}}x{{height}} pixels; the shorter side must have {params.min_image_side}",
        ),
        Rule(
            table="images",
            name="image_pixels",
            column="pixels",
            check=Between(high=params.max_image_pixels),
            reason=f"{{pixels:,}} pixels; validate.max_image_pixels is {params.max_image_pixels:,}",
        ),
        Rule(
            table="images",
            name="sha256_form",
            column="sha256",
            check=Matches("^[0-9a-f]{64}$"),
            reason="sha256 is {sha256!r}",
        ),
    ]


def _depends_on_image(table: str) -> list[Rule]:
    return [
        Rule(
            table=table,
            name="image_known",
            column="image_state",
            check=OneOf(("good", "quarantined")),
            reason="image {image_id} is not in the dataset",
        ),
        Rule(
            table=table,
            name="image_good",
            column="image_state",
            check=OneOf(("good", "unknown")),
            reason="image {image_id} is in quarantine itself",
        ),
    ]


def _depends_on_others(table: str) -> list[Rule]:
    say = {
        "other_unknown": ("other_images_known", "image {other_unknown} is not in the dataset"),
        "other_quarantined": ("other_images_good", "image {other_quarantined} is in quarantine itself"),
        "splits_apart": ("images_of_one_split", "{splits_apart}: what is tested on must not be learnt from"),
    }
    return [
        Rule(
            table=table,
            name="other_images_present",
            column="other_images",
            check=Between(low=1),
            reason="it names no image beside {image_id}",
        ),
        *(
            Rule(table=table, name=name, column=column, check=OneOf(("",)), reason=reason)
            for column, (name, reason) in say.items()
        ),
    ]


def _text(table: str) -> list[Rule]:
    say = {
        "text_letters": "no letter of any script in {text!r}",
        "text_clean": "a control or replacement character in {text!r}",
        "text_not_url": "nothing but an address: {text!r}",
    }
    return [
        Rule(table=table, name=name, column=name, check=OneOf((True,)), reason=reason) for name, reason in say.items()
    ]


def _captions(params: ValidateParams) -> list[Rule]:
    low, high = params.min_caption_words, params.max_caption_words
    return [
        Rule(
            table="captions",
            name="caption_words",
            column="words",
            check=Between(low=low, high=high),
            reason=f"{{words}} words, expected {low} to {high}",
        ),
        Rule(
            table="captions",
            name="caption_unique",
            column="same_as",
            check=OneOf(("",)),
            reason="the image already has this caption, as {same_as}",
        ),
    ]


def _questions(params: ValidateParams) -> list[Rule]:
    return [
        Rule(
            table="questions",
            name="ten_answers",
            column="labelled_answers",
            check=OneOf((ANSWERS_PER_QUESTION, 1)),
            reason=f"{{labelled_answers}} answers, expected {ANSWERS_PER_QUESTION}, or the one that is right",
        ),
    ]


def _choices(params: ValidateParams) -> list[Rule]:
    most = params.max_box_overhang
    rules = [
        Rule(
            table="choices",
            name=f"four_{kind}s",
            column=f"{kind}_count",
            check=OneOf((CHOICES,)),
            reason=f"{{{kind}_count}} {kind}s, expected {CHOICES}",
        )
        for kind in ("answer", "rationale")
    ]
    rules += [
        Rule(
            table="choices",
            name=f"{kind}_label_known",
            column=f"{kind}_label",
            check=Between(low=0, high=CHOICES - 1),
            reason=f"{kind}_label is {{{kind}_label}}, expected 0 to {CHOICES - 1}",
        )
        for kind in ("answer", "rationale")
    ]
    return [
        *rules,
        Rule(
            table="choices",
            name="choices_clean",
            column="unclean_choice",
            check=OneOf(("",)),
            reason="an answer or rationale is empty or holds a control or replacement character: {unclean_choice}",
        ),
        Rule(
            table="choices",
            name="object_box_area",
            column="boxes_shorter_side",
            check=Between(low=0, above=True),
            reason="the box of one of its objects has no area",
        ),
        Rule(
            table="choices",
            name="object_box_inside",
            column="boxes_overhang",
            check=Between(high=most),
            reason=f"the box of one of its objects sticks out by {{boxes_overhang:.1f}} pixels, allowed are {most:g}",
        ),
    ]


def _objects(params: ValidateParams) -> list[Rule]:
    most = params.max_box_overhang
    return [
        Rule(
            table="objects",
            name="box_area",
            column="shorter_side",
            check=Between(low=0, above=True),
            reason="the box {x1:g},{y1:g},{x2:g},{y2:g} has no area",
        ),
        Rule(
            table="objects",
            name="box_inside",
            column="overhang",
            check=Between(high=most),
            reason=f"the box sticks out of its image by {{overhang:.1f}} pixels, allowed are {most:g}",
        ),
    ]


# What only one table needs; a view without an entry has the rules that follow from its record in data/views.py.
OWN_RULES: dict[str, Callable[[ValidateParams], list[Rule]]] = {
    "images": _images,
    "captions": _captions,
    "questions": _questions,
    "choices": _choices,
    "objects": _objects,
}
