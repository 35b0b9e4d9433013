"""Questions about scenes, in families whose answers a question's text alone does not give away.

A family lists everything it can ask of a scene, with the answer. `choose` takes from these lists so that each
question text gets its possible answers about equally often, as VQA v2's complementary pairs do. Questions are
spelt as in VQA (`color`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from vlp_models.synthetic.scenes.language import Description
from vlp_models.synthetic.scenes.scene import (
    COLOURS,
    MAX_OBJECTS,
    MIN_OBJECTS,
    RELATIONS,
    SHAPES,
    SIZES,
    TEXTURES,
    Scene,
    SceneObject,
    related,
)

YES_NO = ("yes", "no")
REGIONS = ("middle", "top left", "top right", "bottom left", "bottom right")
WHERE = {"left": "left of", "right": "right of", "above": "above", "below": "below"}

_CLEAR = 0.12  # fraction of the side by which positions must differ before a question is asked about them
_TOLERANCE = 0.08  # by how much a text's answer may exceed its equal share
_GRACE = 2.0  # answers beyond that, while a text is rare


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question with its true answer. `options`: what could be answered; `kind`: VQA v2's question_type."""

    text: str
    answer: str
    kind: str
    options: tuple[str, ...]

    @property
    def answer_type(self) -> str:
        if self.answer in YES_NO:
            return "yes/no"
        return "number" if self.answer.isdigit() else "other"


def exists(scene: Scene) -> list[Question]:
    """Is there a red star?"""
    kinds = [Description(shape=shape, colour=colour) for shape in SHAPES for colour in COLOURS]
    return [_yes_no(f"Is there a {k.colour} {k.shape}?", bool(k.among(scene)), "is there a") for k in kinds]


def exists_any(scene: Scene) -> list[Question]:
    """Are there any stars? Are there any red objects?"""
    asked = [(f"{shape}s", Description(shape=shape)) for shape in SHAPES]
    asked += [(f"{colour} objects", Description(colour=colour)) for colour in COLOURS]
    return [_yes_no(f"Are there any {noun}?", bool(what.among(scene)), "are there any") for noun, what in asked]


def verify_colour(scene: Scene) -> list[Question]:
    """Is the star red? Only of a shape that occurs once."""
    return [
        _yes_no(f"Is the {item.shape} {colour}?", item.colour == colour, "is the")
        for item in alone(scene, "shape")
        for colour in COLOURS
    ]


def verify_size(scene: Scene) -> list[Question]:
    """Is the red star large?"""
    return [
        _yes_no(f"Is the {item.category} {size}?", item.size == size, "is the")
        for item in alone(scene, "colour", "shape")
        for size in SIZES
    ]


def size_of(scene: Scene) -> list[Question]:
    """What size is the red star?"""
    kind = "what"
    return [_other(f"What size is the {o.category}?", o.size, kind, SIZES) for o in alone(scene, "colour", "shape")]


def compare(scene: Scene) -> list[Question]:
    """Are there more stars than circles?"""
    counts = {shape: len(Description(shape=shape).among(scene)) for shape in SHAPES}
    return [
        _yes_no(f"Are there more {a}s than {b}s?", counts[a] > counts[b], "are there more")
        for a in SHAPES
        for b in SHAPES
        if a != b and counts[a] + counts[b] > 0
    ]


def verify_relation(scene: Scene) -> list[Question]:
    """Is the star left of the circle? Only where the two differ clearly along that axis."""
    return [
        _yes_no(f"Is the {a.shape} {WHERE[relation]} the {b.shape}?", related(a, relation, b), "is the")
        for a in alone(scene, "shape")
        for b in alone(scene, "shape")
        for relation in RELATIONS
        if a is not b and _apart(a, b, relation)
    ]


def count_shape(scene: Scene) -> list[Question]:
    """How many stars are there? From 0 to 4."""
    return [
        _number(f"How many {shape}s are there?", len(Description(shape=shape).among(scene)), range(5))
        for shape in SHAPES
        if len(Description(shape=shape).among(scene)) <= 4
    ]


def count_colour(scene: Scene) -> list[Question]:
    """How many red objects are there? From 0 to 4."""
    return [
        _number(f"How many {colour} objects are there?", len(Description(colour=colour).among(scene)), range(5))
        for colour in COLOURS
        if len(Description(colour=colour).among(scene)) <= 4
    ]


def count_both(scene: Scene) -> list[Question]:
    """How many red stars are there? From 0 to 3."""
    kinds = [Description(shape=shape, colour=colour) for shape in SHAPES for colour in COLOURS]
    return [
        _number(f"How many {k.colour} {k.shape}s are there?", len(k.among(scene)), range(4))
        for k in kinds
        if len(k.among(scene)) <= 3
    ]


def count_all(scene: Scene) -> list[Question]:
    """How many objects are there?"""
    texts = ("How many objects are there?", "How many shapes are in the picture?")
    return [_number(text, len(scene.objects), range(MIN_OBJECTS, MAX_OBJECTS + 1)) for text in texts]


def colour_of(scene: Scene) -> list[Question]:
    """What color is the star?"""
    kind = "what color is the"
    return [_other(f"What color is the {o.shape}?", o.colour, kind, COLOURS) for o in alone(scene, "shape")]


def colour_of_sized(scene: Scene) -> list[Question]:
    """What color is the large star?"""
    kind, asked = "what color is the", alone(scene, "size", "shape")
    return [_other(f"What color is the {o.size} {o.shape}?", o.colour, kind, COLOURS) for o in asked]


def shape_of(scene: Scene) -> list[Question]:
    """What shape is the red object?"""
    return [_other(f"What shape is the {o.colour} object?", o.shape, "what", SHAPES) for o in alone(scene, "colour")]


def shape_of_sized(scene: Scene) -> list[Question]:
    """What shape is the large red object?"""
    asked = alone(scene, "size", "colour")
    return [_other(f"What shape is the {o.size} {o.colour} object?", o.shape, "what", SHAPES) for o in asked]


def texture_of(scene: Scene) -> list[Question]:
    """Is the red star solid, striped or dotted?"""
    return [
        _other(f"Is the {o.category} solid, striped or dotted?", o.texture, "is the", TEXTURES)
        for o in alone(scene, "colour", "shape")
    ]


def where_is(scene: Scene) -> list[Question]:
    """Where is the star? Only where the region is plain to see."""
    asked = []
    for noun, items in (("shape", alone(scene, "shape")), ("category", alone(scene, "colour", "shape"))):
        for item in items:
            if region := region_of(item):
                asked.append(_other(f"Where is the {getattr(item, noun)}?", region, "where is the", REGIONS))
    return asked


def shape_beside(scene: Scene) -> list[Question]:
    """What shape is left of the star? Only where exactly one object is, and clearly."""
    asked = []
    for item in alone(scene, "shape"):
        for relation in RELATIONS:
            others = [o for o in scene.objects if o is not item]
            there = [o for o in others if related(o, relation, item)]
            if len(there) == 1 and all(_apart(o, item, relation) for o in others):
                text = f"What shape is {WHERE[relation]} the {item.shape}?"
                asked.append(_other(text, there[0].shape, "what", SHAPES))
    return asked


# How often each family is asked. Reading attributes, existence and counting prevail; relations are few.
FAMILIES: dict[Callable[[Scene], list[Question]], float] = {
    exists: 0.14,
    exists_any: 0.10,
    verify_colour: 0.07,
    verify_size: 0.01,
    size_of: 0.01,
    compare: 0.04,
    verify_relation: 0.03,
    count_shape: 0.08,
    count_colour: 0.08,
    count_both: 0.04,
    count_all: 0.04,
    colour_of: 0.15,
    colour_of_sized: 0.03,
    shape_of: 0.15,
    shape_of_sized: 0.03,
    texture_of: 0.02,
    where_is: 0.04,
    shape_beside: 0.02,
}


@dataclass
class Balance:
    """How often each text got each answer so far; one for each split."""

    given: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def excess(self, question: Question) -> float:
        """How far one more such question would lift its answer above an equal share; negative: it is due."""
        counts = self.given[question.text]
        share = (counts[question.answer] + 1 - _GRACE) / (counts.total() + 1)
        return share - 1 / len(question.options)

    def add(self, question: Question) -> None:
        self.given[question.text][question.answer] += 1


def choose(scene: Scene, number: int, balance: Balance, rng: np.random.Generator) -> list[Question]:
    """Up to `number` different questions about a scene, the most balancing ones of randomly drawn families.

    Fewer only where every further question would unbalance the answers of its text.
    """
    families = list(FAMILIES)
    weights = np.array([FAMILIES[family] for family in families])
    left = [_shuffled(family(scene), rng) for family in families]
    chosen: list[Question] = []
    while len(chosen) < number and any(left):
        open_weights = weights * np.array([bool(questions) for questions in left])
        pick = rng.choice(len(families), p=open_weights / open_weights.sum())
        best = min(left[pick], key=balance.excess)
        if balance.excess(best) > _TOLERANCE:
            left[pick] = []
            continue
        left[pick].remove(best)
        balance.add(best)
        chosen.append(best)
    return chosen


def _shuffled(questions: list[Question], rng: np.random.Generator) -> list[Question]:
    return [questions[i] for i in rng.permutation(len(questions))]


def _yes_no(text: str, answer: bool, kind: str) -> Question:
    return Question(text=text, answer="yes" if answer else "no", kind=kind, options=YES_NO)


def _number(text: str, answer: int, options: range) -> Question:
    return Question(text=text, answer=str(answer), kind="how many", options=tuple(map(str, options)))


def _other(text: str, answer: str, kind: str, options: tuple[str, ...]) -> Question:
    return Question(text=text, answer=answer, kind=kind, options=options)


def alone(scene: Scene, *attributes: str) -> list[SceneObject]:
    """The objects that share these attributes with no other one, so that `the` names them."""
    tally = Counter(tuple(getattr(o, a) for a in attributes) for o in scene.objects)
    return [o for o in scene.objects if tally[tuple(getattr(o, a) for a in attributes)] == 1]


def _apart(a: SceneObject, b: SceneObject, relation: str) -> bool:
    return (abs(a.x - b.x) if relation in ("left", "right") else abs(a.y - b.y)) > _CLEAR


def region_of(item: SceneObject) -> str | None:
    across, down = item.x - 0.5, item.y - 0.5
    if max(abs(across), abs(down)) < _CLEAR:
        return "middle"
    if min(abs(across), abs(down)) < _CLEAR:
        return None
    return f"{'top' if down < 0 else 'bottom'} {'left' if across < 0 else 'right'}"


ANNOTATORS = 10
SLIPS = 0.08  # chance that one annotator's answer is another, plausible one
MOST_SLIPS = 4  # of ten, so that the majority always tells the truth
_UNSURE = ("maybe", "not sure")


def annotate(question: Question, rng: np.random.Generator) -> list[dict[str, str | int]]:
    """VQA v2's `answers`: answer_id 1 to 10, answer, and how confident the annotator was."""
    slips = rng.random(ANNOTATORS) < SLIPS
    slips[np.flatnonzero(slips)[MOST_SLIPS:]] = False
    return [
        {
            "answer_id": number + 1,
            "answer": _other_answer(question, rng) if slip else question.answer,
            "answer_confidence": str(rng.choice(["maybe", "no"]))
            if slip
            else ("yes" if rng.random() < 0.9 else "maybe"),
        }
        for number, slip in enumerate(slips)
    ]


def _other_answer(question: Question, rng: np.random.Generator) -> str:
    """A miscount by one, an unsure word or the opposite, or another of the possible answers."""
    if question.answer_type == "number":
        count = int(question.answer)
        return str(count + 1 if count == 0 or rng.random() < 0.5 else count - 1)
    if question.answer in YES_NO and rng.random() < 0.6:
        return _UNSURE[rng.integers(len(_UNSURE))]
    others = [option for option in question.options if option != question.answer]
    return others[rng.integers(len(others))]
