"""Groups of four scenes and the sentences about them, so that a sentence alone never gives its label.

As in NLVR, a group holds four scenes: two of them differ from the other two by a rearrangement of the same items or,
closer still, by one small edit. Every sentence stands beside as many scenes it is false of as scenes it is true of.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

from vlp_models.synthetic.boxes import scene as boxes_scene
from vlp_models.synthetic.boxes.scene import MAX_ITEMS, Scene
from vlp_models.synthetic.boxes.sentences import write_sentence

SIMPLE_ITEMS = 2
_TRIES = 60  # sentences tried for each one wanted, before the group is given up


@dataclass
class Example:
    """A scene and what is said of it: (number of the sentence within its group, text, label)."""

    scene: Scene
    said: list[tuple[int, str, bool]] = field(default_factory=list)


def make_group(rng: random.Random, statements: int, *, simple: bool = False) -> list[Example]:
    """Four scenes with about `statements` labelled sentences each, at least one and never more.

    `simple`: few items a box, one fact a sentence.
    """
    while True:
        group = _scenes(rng, SIMPLE_ITEMS if simple else MAX_ITEMS)
        for number in range(_TRIES * statements):
            open_ = [example for example in group if len(example.said) < statements]
            if len(open_) < 2:
                break
            _say(rng, number, open_, simple)
        if all(example.said for example in group):
            return group


def _scenes(rng: random.Random, max_items: int) -> list[Example]:
    kind: Literal["tower", "scatter"] = "tower" if rng.random() < 0.47 else "scatter"
    one, two = (boxes_scene.sample(rng, kind, max_items) for _ in range(2))
    return [Example(scene) for scene in (one, two, _alter(rng, one, max_items), _alter(rng, two, max_items))]


def _alter(rng: random.Random, scene: Scene, max_items: int) -> Scene:
    change = boxes_scene.edit if rng.random() < 0.6 else boxes_scene.rearrange
    return change(rng, scene, max_items)


def _say(rng: random.Random, number: int, examples: list[Example], simple: bool) -> None:
    """Adds one sentence to as many scenes it is true of as it is false of, those with the fewest sentences first."""
    sentence = write_sentence(rng, rng.choice(examples).scene, simple=simple)
    rng.shuffle(examples)
    examples.sort(key=lambda example: len(example.said))
    labels = [(example, sentence.test(example.scene)) for example in examples]
    true = [example for example, label in labels if label]
    false = [example for example, label in labels if not label]
    for with_true, with_false in zip(true, false, strict=False):
        with_true.said.append((number, sentence.text, True))
        with_false.said.append((number, sentence.text, False))
