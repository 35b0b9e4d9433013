"""VQA v2 questions about scenes, and ten answers for each, whose answers the question's text alone does not give away.

A question family lists all its questions about a scene, with answers. `choose` picks from these lists so that each
question text gets its possible answers about equally often, as VQA v2's complementary pairs do. Spelling follows VQA
(`color`). `annotate` adds ten annotators who make occasional mistakes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from vlp_models.synthetic.scenes.scene import (
    COLORS,
    MAX_OBJECTS,
    MIN_OBJECTS,
    RELATIONS,
    SHAPES,
    SIZES,
    TEXTURES,
    Scene,
    SceneObject,
    is_related,
)

YES_NO = ("yes", "no")
REGIONS = ("middle", "top left", "top right", "bottom left", "bottom right")
WHERE = {"left": "left of", "right": "right of", "above": "above", "below": "below"}

_CLEAR = 0.12  # fraction of the side by which positions must differ to ask a question about them
_TOLERANCE = 0.08  # how far the share of an answer may exceed an equal share
_GRACE = 2.0  # extra answers allowed while a text is rare


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question with its true answer. `options`: all possible answers; `kind`: VQA v2's question_type."""

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
    counts = _count(scene, "category")
    kinds = [f"{color} {shape}" for shape in SHAPES for color in COLORS]
    return [_yes_no(f"Is there a {kind}?", counts[kind] > 0, "is there a") for kind in kinds]


def exists_any(scene: Scene) -> list[Question]:
    """Are there any stars? Are there any red objects?"""
    shapes, colors = _count(scene, "shape"), _count(scene, "color")
    counts = [(f"{shape}s", shapes[shape]) for shape in SHAPES]
    counts += [(f"{color} objects", colors[color]) for color in COLORS]
    return [_yes_no(f"Are there any {noun}?", count > 0, "are there any") for noun, count in counts]


def verify_color(scene: Scene) -> list[Question]:
    """Is the star red? Only if the shape occurs once."""
    return [
        _yes_no(f"Is the {item.shape} {color}?", item.color == color, "is the")
        for item in find_unique(scene, "shape")
        for color in COLORS
    ]


def verify_size(scene: Scene) -> list[Question]:
    """Is the red star large?"""
    return [
        _yes_no(f"Is the {item.category} {size}?", item.size == size, "is the")
        for item in find_unique(scene, "color", "shape")
        for size in SIZES
    ]


def size_of(scene: Scene) -> list[Question]:
    """What size is the red star?"""
    items = find_unique(scene, "color", "shape")
    return [_other(f"What size is the {item.category}?", item.size, "what", SIZES) for item in items]


def compare(scene: Scene) -> list[Question]:
    """Are there more stars than circles?"""
    counts = _count(scene, "shape")
    return [
        _yes_no(f"Are there more {a}s than {b}s?", counts[a] > counts[b], "are there more")
        for a in SHAPES
        for b in SHAPES
        if a != b and counts[a] + counts[b] > 0
    ]


def verify_relation(scene: Scene) -> list[Question]:
    """Is the star left of the circle? Only if the two are clearly apart along that axis."""
    return [
        _yes_no(f"Is the {a.shape} {WHERE[relation]} the {b.shape}?", is_related(a, relation, b), "is the")
        for a in find_unique(scene, "shape")
        for b in find_unique(scene, "shape")
        for relation in RELATIONS
        if a is not b and _clearly_apart(a, b, relation)
    ]


def count_shape(scene: Scene) -> list[Question]:
    """How many stars are there? From 0 to 4."""
    counts = _count(scene, "shape")
    shapes = [shape for shape in SHAPES if counts[shape] <= 4]
    return [_number(f"How many {shape}s are there?", counts[shape], range(5)) for shape in shapes]


def count_color(scene: Scene) -> list[Question]:
    """How many red objects are there? From 0 to 4."""
    counts = _count(scene, "color")
    colors = [color for color in COLORS if counts[color] <= 4]
    return [_number(f"How many {color} objects are there?", counts[color], range(5)) for color in colors]


def count_both(scene: Scene) -> list[Question]:
    """How many red stars are there? From 0 to 3."""
    counts = _count(scene, "category")
    kinds = [f"{color} {shape}" for shape in SHAPES for color in COLORS]
    return [_number(f"How many {kind}s are there?", counts[kind], range(4)) for kind in kinds if counts[kind] <= 3]


def count_all(scene: Scene) -> list[Question]:
    """How many objects are there?"""
    texts = ("How many objects are there?", "How many shapes are in the picture?")
    return [_number(text, len(scene.objects), range(MIN_OBJECTS, MAX_OBJECTS + 1)) for text in texts]


def color_of(scene: Scene) -> list[Question]:
    """What color is the star?"""
    kind, items = "what color is the", find_unique(scene, "shape")
    return [_other(f"What color is the {item.shape}?", item.color, kind, COLORS) for item in items]


def color_of_sized(scene: Scene) -> list[Question]:
    """What color is the large star?"""
    kind, items = "what color is the", find_unique(scene, "size", "shape")
    return [_other(f"What color is the {item.size} {item.shape}?", item.color, kind, COLORS) for item in items]


def shape_of(scene: Scene) -> list[Question]:
    """What shape is the red object?"""
    items = find_unique(scene, "color")
    return [_other(f"What shape is the {item.color} object?", item.shape, "what", SHAPES) for item in items]


def shape_of_sized(scene: Scene) -> list[Question]:
    """What shape is the large red object?"""
    items = find_unique(scene, "size", "color")
    return [_other(f"What shape is the {item.size} {item.color} object?", item.shape, "what", SHAPES) for item in items]


def texture_of(scene: Scene) -> list[Question]:
    """Is the red star solid, striped or dotted?"""
    return [
        _other(f"Is the {item.category} solid, striped or dotted?", item.texture, "is the", TEXTURES)
        for item in find_unique(scene, "color", "shape")
    ]


def where_is(scene: Scene) -> list[Question]:
    """Where is the star? Only if its region is clear."""
    nouns = [(item.shape, item) for item in find_unique(scene, "shape")]
    nouns += [(item.category, item) for item in find_unique(scene, "color", "shape")]
    questions = []
    for noun, item in nouns:
        region = find_region(item)
        if region:
            questions.append(_other(f"Where is the {noun}?", region, "where is the", REGIONS))
    return questions


def neighbor_shape(scene: Scene) -> list[Question]:
    """What shape is left of the star? Only if exactly one object clearly is."""
    questions = []
    for item in find_unique(scene, "shape"):
        rest = [other for other in scene.objects if other is not item]
        for relation in RELATIONS:
            related = [other for other in rest if is_related(other, relation, item)]
            # All others are clearly on one side or the other, so the answer is not a matter of a few pixels.
            if len(related) == 1 and all(_clearly_apart(other, item, relation) for other in rest):
                text = f"What shape is {WHERE[relation]} the {item.shape}?"
                questions.append(_other(text, related[0].shape, "what", SHAPES))
    return questions


# Probability of each family: mostly attributes, existence and counting; few relations.
FAMILIES: dict[Callable[[Scene], list[Question]], float] = {
    exists: 0.14,
    exists_any: 0.10,
    verify_color: 0.07,
    verify_size: 0.01,
    size_of: 0.01,
    compare: 0.04,
    verify_relation: 0.03,
    count_shape: 0.08,
    count_color: 0.08,
    count_both: 0.04,
    count_all: 0.04,
    color_of: 0.15,
    color_of_sized: 0.03,
    shape_of: 0.15,
    shape_of_sized: 0.03,
    texture_of: 0.02,
    where_is: 0.04,
    neighbor_shape: 0.02,
}


@dataclass
class Balance:
    """How often each question text got each answer so far; one per split."""

    answers: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))  # question text -> counts

    def excess(self, question: Question) -> float:
        """Return how far one more such question would lift its answer above an equal share; negative: it is due."""
        counts = self.answers[question.text]
        # Because of `_GRACE`, the first two questions with an answer never exceed an equal share.
        share = (counts[question.answer] + 1 - _GRACE) / (counts.total() + 1)
        return share - 1 / len(question.options)

    def add(self, question: Question) -> None:
        self.answers[question.text][question.answer] += 1


def choose(scene: Scene, number: int, balance: Balance, rng: np.random.Generator) -> list[Question]:
    """Return up to `number` different questions: from randomly drawn families, those that balance the answers best.

    Returns fewer only if every further question would unbalance the answers of its text.
    """
    families = list(FAMILIES)
    weights = np.array([FAMILIES[family] for family in families])
    # The questions of each family in random order, which decides between equally balanced ones.
    remaining: list[list[Question]] = []
    for family in families:
        questions = family(scene)
        remaining.append([questions[i] for i in rng.permutation(len(questions))])
    picked: list[Question] = []
    while len(picked) < number and any(remaining):
        # Families without questions are not drawn any more.
        open_weights = weights * np.array([bool(questions) for questions in remaining])
        index = rng.choice(len(families), p=open_weights / open_weights.sum())
        best = min(remaining[index], key=balance.excess)
        # Even the best question would unbalance its text, so the family is closed for this scene.
        if balance.excess(best) > _TOLERANCE:
            remaining[index] = []
            continue
        remaining[index].remove(best)
        balance.add(best)
        picked.append(best)
    return picked


def _yes_no(text: str, answer: bool, kind: str) -> Question:
    return Question(text=text, answer="yes" if answer else "no", kind=kind, options=YES_NO)


def _number(text: str, answer: int, options: range) -> Question:
    return Question(text=text, answer=str(answer), kind="how many", options=tuple(map(str, options)))


def _other(text: str, answer: str, kind: str, options: tuple[str, ...]) -> Question:
    return Question(text=text, answer=answer, kind=kind, options=options)


def _count(scene: Scene, attribute: str) -> Counter[str]:
    """Return how many objects have each value of an attribute."""
    return Counter(getattr(item, attribute) for item in scene.objects)


def find_unique(scene: Scene, *attributes: str) -> list[SceneObject]:
    """Return the objects whose combination of attributes is unique in the scene, so that `the` can refer to them."""
    combinations = [tuple(getattr(item, name) for name in attributes) for item in scene.objects]
    tally = Counter(combinations)
    return [item for item, values in zip(scene.objects, combinations, strict=True) if tally[values] == 1]


def _clearly_apart(a: SceneObject, b: SceneObject, relation: str) -> bool:
    distance = abs(a.x - b.x) if relation in ("left", "right") else abs(a.y - b.y)
    return distance > _CLEAR


def find_region(item: SceneObject) -> str | None:
    """Return the region of `REGIONS` that the object is in; None if it is between regions."""
    across, down = item.x - 0.5, item.y - 0.5
    if max(abs(across), abs(down)) < _CLEAR:
        return "middle"
    # Near the center along one axis only: between two regions.
    if min(abs(across), abs(down)) < _CLEAR:
        return None
    vertical = "top" if down < 0 else "bottom"
    horizontal = "left" if across < 0 else "right"
    return f"{vertical} {horizontal}"


ANNOTATORS = 10
SLIPS = 0.08  # probability that an annotator gives another plausible answer
MOST_SLIPS = 4  # of ten, so that the majority is always right
_UNSURE = ("maybe", "not sure")


def annotate(question: Question, rng: np.random.Generator) -> list[dict[str, str | int]]:
    """Return VQA v2's `answers`: answer_id 1 to 10, answer, and the annotator's confidence."""
    slips = rng.random(ANNOTATORS) < SLIPS
    slips[np.flatnonzero(slips)[MOST_SLIPS:]] = False
    answers: list[dict[str, str | int]] = []
    for number, slip in enumerate(slips, start=1):
        if slip:
            answer = _other_answer(question, rng)
            confidence = str(rng.choice(["maybe", "no"]))
        else:
            answer = question.answer
            confidence = "yes" if rng.random() < 0.9 else "maybe"
        answers.append({"answer_id": number, "answer": answer, "answer_confidence": confidence})
    return answers


def _other_answer(question: Question, rng: np.random.Generator) -> str:
    """Return a wrong answer: a miscount by one, an unsure word or the opposite, or another possible answer."""
    if question.answer_type == "number":
        count = int(question.answer)
        return str(count + 1 if count == 0 or rng.random() < 0.5 else count - 1)
    if question.answer in YES_NO and rng.random() < 0.6:
        return _UNSURE[rng.integers(len(_UNSURE))]
    wrong = [option for option in question.options if option != question.answer]
    return wrong[rng.integers(len(wrong))]
