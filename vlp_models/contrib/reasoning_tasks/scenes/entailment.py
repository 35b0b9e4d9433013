"""SNLI-VE hypotheses about scenes: entailed, contradicted or neutral.

Entailment and contradiction follow from the scene: the same kinds of claim, true or false of it. Neutral hypotheses are
about something outside of the image (who drew the picture, when, where it will hang), so that the image neither entails
nor contradicts them.

As in SNLI, the text reveals part of the label: a neutral hypothesis can be recognized by its words. Entailment and
contradiction cannot: in each split every claim is entailed as often as contradicted, up to one. So a text-only model
reaches two thirds; the rest requires the image.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vlp_models.data.views.hypotheses import ENTAILMENT
from vlp_models.params import GeneratorParams
from vlp_models.synthetic.scenes.dataset import Picture
from vlp_models.synthetic.scenes.language import (
    LEXICON,
    NUMBERS,
    AtLeast,
    Claim,
    Colors,
    Description,
    Exactly,
    Located,
)
from vlp_models.synthetic.scenes.scene import COLORS, PLACES, SHAPES, Scene

FILES = {"train": "snli_ve_train.jsonl", "val": "snli_ve_dev.jsonl", "test": "snli_ve_test.jsonl"}
STREAM = 5  # of an image's random numbers
ANNOTATORS = 5
SLIPS = 0.06  # probability that an annotator gives another label
_TRIES = 200
Balance = dict[str, Counter[str]]  # claim -> how often it had each label
_MAKERS = ("a child", "a teacher", "an old painter", "two friends", "somebody in a hurry", "a machine")
_OPEN = (
    "{maker} drew this picture",
    "{maker} will hang the picture on a wall",
    "the picture was made on a {day}",
    "{maker} likes the {shape} best",
    "the {shape}s were drawn before the others",
    "the picture is part of a large collection",
    "{maker} was paid for the picture",
)
_DAYS = ("monday", "friday", "sunday", "rainy day", "holiday")


def write_hypotheses(pictures: Sequence[Picture], params: GeneratorParams, directory: Path) -> dict[str, int]:
    """Write `snli_ve_<split>.jsonl`; return the number of hypotheses."""
    lines: dict[str, list[str]] = {split: [] for split in FILES}
    # Claims are balanced within each split.
    balances: dict[str, Balance] = {split: {} for split in FILES}
    for picture in pictures:
        rng, path = picture.job.rng(STREAM), picture.job.path
        drawn = make_hypotheses(picture.scene, params.hypotheses_per_image, rng, balances[picture.job.split])
        for number, (hypothesis, label) in enumerate(drawn):
            record = {
                "Flikr30kID": path.name,
                "annotator_labels": _annotate(label, rng),
                "captionID": f"{path.name}#0",
                "gold_label": label,
                # As in SNLI: the caption, a number and the first letter of the label.
                "pairID": f"{path.name}#0r{number}{label[0]}",
                "sentence1": picture.captions[0],  # the premise of SNLI
                "sentence1_binary_parse": "",
                "sentence1_parse": "",
                "sentence2": hypothesis,
                "sentence2_binary_parse": "",
                "sentence2_parse": "",
            }
            lines[picture.job.split].append(json.dumps(record, sort_keys=True) + "\n")
    for split, name in FILES.items():
        (directory / name).write_text("".join(lines[split]), encoding="utf-8")
    return {"hypotheses": sum(map(len, lines.values()))}


def make_hypotheses(
    scene: Scene, number: int, rng: np.random.Generator, balance: Balance | None = None
) -> Iterator[tuple[str, str]]:
    """Yield up to `number` different hypotheses with labels; the labels alternate, starting with a random one.

    balance: counts of all earlier hypotheses; updated.
    """
    balance = {} if balance is None else balance
    first, used = int(rng.integers(len(ENTAILMENT))), set()
    for turn in range(number):
        # Labels take turns, so each has a third of the hypotheses.
        label = ENTAILMENT[(first + turn) % len(ENTAILMENT)]
        for _ in range(_TRIES):
            text = _draw_neutral(rng) if label == "neutral" else _draw_claim_for(scene, label, rng, balance)
            # Empty: the claim has another label, or the label is not due. Draw again.
            if text and text not in used:
                used.add(text)
                if label != "neutral":
                    balance[text][label] += 1
                yield text[0].upper() + text[1:] + ".", label
                break


def _draw_claim_for(scene: Scene, label: str, rng: np.random.Generator, balance: Balance) -> str:
    """Return a claim drawn independently of the scene if it has this label there and the label is due; else ""."""
    claim, text = _draw_claim(rng)
    counts = balance.setdefault(text, Counter())
    has_label = claim.is_true_of(scene) is (label == "entailment")
    # At most half of the claim's uses have this label so far, so the two counts never differ by more than one.
    is_due = 2 * counts[label] <= counts.total()
    return text if has_label and is_due else ""


def _draw_claim(rng: np.random.Generator) -> tuple[Claim, str]:
    color, shape = str(rng.choice(COLORS)), str(rng.choice(SHAPES))
    kind = rng.choice(["object", "count", "place", "color"], p=[0.35, 0.25, 0.25, 0.15])
    if kind == "object":
        return AtLeast(Description(shape=shape, color=color)), f"there is a {color} {shape}"
    if kind == "count":
        count = int(rng.integers(1, 5))
        noun = shape if count == 1 else f"{shape}s"
        framed = f"there is one {noun}" if count == 1 else f"there are {NUMBERS[count]} {noun}"
        return Exactly(Description(shape=shape), count), framed
    if kind == "place":
        position = str(rng.choice(PLACES))
        return Located(Description(shape=shape), position), f"a {shape} is {LEXICON['L'][position][0]}"
    return Colors(frozenset([color])), f"something {color} is in the picture"


def _draw_neutral(rng: np.random.Generator) -> str:
    return str(rng.choice(_OPEN)).format(maker=rng.choice(_MAKERS), day=rng.choice(_DAYS), shape=rng.choice(SHAPES))


def _annotate(label: str, rng: np.random.Generator) -> list[str]:
    """Return the author's own label first, as in SNLI; the majority is always right."""
    slips = rng.random(ANNOTATORS) < SLIPS
    slips[0] = False
    # At most two of five slip, so the majority is right.
    slips[np.flatnonzero(slips)[ANNOTATORS // 2 :]] = False
    wrong: list[Any] = [other for other in ENTAILMENT if other != label]
    labels = []
    for slip in slips:
        labels.append(str(rng.choice(wrong)) if slip else label)
    return labels
