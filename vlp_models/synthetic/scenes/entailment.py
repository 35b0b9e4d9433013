"""Hypotheses of SNLI-VE's form about scenes: entailed, contradicted, or about what no picture can tell.

Entailment and contradiction follow from the scene: the same kinds of claim, once true and once false of it. Neutral
ones speak of what is no part of this world at all (who drew the picture, when, what it will hang beside), so that the
picture neither entails nor contradicts them.

A hypothesis's words give some of it away, as in SNLI: a neutral one can be told by its words alone. Entailment and
contradiction can't: in a split each claim is entailed as often as contradicted, give or take one. So text alone reaches
two thirds; the rest needs a look.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vlp_models.data.views import ENTAILMENT
from vlp_models.synthetic.scenes.language import (
    LEXICON,
    NUMBERS,
    AtLeast,
    Claim,
    Colours,
    Description,
    Exactly,
    Located,
)
from vlp_models.synthetic.scenes.scene import COLOURS, PLACES, SHAPES, Scene

FILES = {"train": "snli_ve_train.jsonl", "val": "snli_ve_dev.jsonl", "test": "snli_ve_test.jsonl"}
ANNOTATORS = 5
SLIPS = 0.06  # chance that one annotator's label is another
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


def write_hypotheses(
    pictures: Sequence[tuple[Scene, np.random.Generator, Path]],
    texts: Sequence[Sequence[str]],
    per_image: int,
    directory: Path,
) -> int:
    """Writes `snli_ve_<split>.jsonl`; returns how many hypotheses there are.

    Args:
        pictures: scene, random numbers, image file.
        texts: each picture's captions, the first of which stands as SNLI's premise.
    """
    lines: dict[str, list[str]] = {split: [] for split in FILES}
    balances: dict[str, Balance] = {split: {} for split in FILES}
    for (scene, rng, path), captions in zip(pictures, texts, strict=True):
        for number, (hypothesis, label) in enumerate(ask(scene, per_image, rng, balances[scene.split])):
            record = {
                "Flikr30kID": path.name,
                "annotator_labels": _annotate(label, rng),
                "captionID": f"{path.name}#0",
                "gold_label": label,
                "pairID": f"{path.name}#0r{number}{label[0]}",
                "sentence1": captions[0],
                "sentence1_binary_parse": "",
                "sentence1_parse": "",
                "sentence2": hypothesis,
                "sentence2_binary_parse": "",
                "sentence2_parse": "",
            }
            lines[scene.split].append(json.dumps(record, sort_keys=True) + "\n")
    for split, name in FILES.items():
        (directory / name).write_text("".join(lines[split]), encoding="utf-8")
    return sum(map(len, lines.values()))


def ask(
    scene: Scene, number: int, rng: np.random.Generator, balance: Balance | None = None
) -> Iterator[tuple[str, str]]:
    """Up to `number` different hypotheses with their labels, which take turns from a random one on.

    balance: of the hypotheses before; grows.
    """
    balance = {} if balance is None else balance
    first, said = int(rng.integers(len(ENTAILMENT))), set()
    for turn in range(number):
        label = ENTAILMENT[(first + turn) % len(ENTAILMENT)]
        for _ in range(_TRIES):
            text = _open(rng) if label == "neutral" else _claimed(scene, label, rng, balance)
            if text and text not in said:
                said.add(text)
                if label != "neutral":
                    balance[text][label] += 1
                yield text[0].upper() + text[1:] + ".", label
                break


def _claimed(scene: Scene, label: str, rng: np.random.Generator, balance: Balance) -> str:
    """A claim that was drawn without a look at the scene, if it has the label there and is due to have it."""
    claim, text = _claim(rng)
    counts = balance.setdefault(text, Counter())
    if claim.holds(scene) is not (label == "entailment") or 2 * counts[label] > counts.total():
        return ""
    return text


def _claim(rng: np.random.Generator) -> tuple[Claim, str]:
    colour, shape = str(rng.choice(COLOURS)), str(rng.choice(SHAPES))
    kind = rng.choice(["object", "count", "place", "colour"], p=[0.35, 0.25, 0.25, 0.15])
    if kind == "object":
        return AtLeast(Description(shape=shape, colour=colour)), f"there is a {colour} {shape}"
    if kind == "count":
        count = int(rng.integers(1, 5))
        noun = shape if count == 1 else f"{shape}s"
        framed = f"there is one {noun}" if count == 1 else f"there are {NUMBERS[count]} {noun}"
        return Exactly(Description(shape=shape), count), framed
    if kind == "place":
        place = str(rng.choice(PLACES))
        return Located(Description(shape=shape), place), f"a {shape} is {LEXICON['L'][place][0]}"
    return Colours(frozenset([colour])), f"something {colour} is in the picture"


def _open(rng: np.random.Generator) -> str:
    return str(rng.choice(_OPEN)).format(maker=rng.choice(_MAKERS), day=rng.choice(_DAYS), shape=rng.choice(SHAPES))


def _annotate(label: str, rng: np.random.Generator) -> list[str]:
    """The author's own label first, as in SNLI; the majority always tells the truth."""
    slips = rng.random(ANNOTATORS) < SLIPS
    slips[0] = False
    slips[np.flatnonzero(slips)[ANNOTATORS // 2 :]] = False
    others: list[Any] = [other for other in ENTAILMENT if other != label]
    return [str(rng.choice(others)) if slip else label for slip in slips]
