"""Entailment, NLVR2 and VCR on the scenes: questions with one right label.

A question has `ROWS` rows, each a text with an image:

    entailment  the hypothesis                                  labels: entailment, contradiction, neutral
    nlvr2       the statement with its left, its right image    labels: false, true
    vcr         the question with each of four choices          labels: the choices. A question about the answer is
                                                                followed by one about the rationale, given the answer

Half of NLVR2's statements are true of two of four pairs of images (`make_simple_comparisons`), in every split; the
other half need both images. VCR's texts name objects by their shape, and only shapes that a scene has once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vlp_models.data.formats.vcr import write_out
from vlp_models.data.views.hypotheses import ENTAILMENT
from vlp_models.synthetic.scenes.entailment import Balance, make_hypotheses
from vlp_models.synthetic.scenes.image_pairs import make_comparisons, make_simple_comparisons
from vlp_models.synthetic.scenes.scene import Scene
from vlp_models.synthetic.scenes.vcr import make_questions

if TYPE_CHECKING:
    from pretraining_study.data import Texts

ROWS = {"entailment": 1, "nlvr2": 2, "vcr": 4}  # task -> rows of a question
LABELS = {"entailment": len(ENTAILMENT), "nlvr2": 2, "vcr": 4}
PER_IMAGE = {"entailment": 6, "vcr": 2}  # hypotheses; answers, each with its rationale
SENTENCES = 3  # of each kind, of four images, each with its four pairs
SIDE = 2  # left images, and right images, of a set
Rng = Callable[[Scene], np.random.Generator]


@dataclass(frozen=True, kw_only=True)
class Question:
    """rows: the segments of each text, and the number of its image."""

    rows: tuple[tuple[tuple[str, ...], int], ...]
    label: int


@dataclass(frozen=True, kw_only=True)
class Judgments:
    """texts: the rows of all questions in order, `ROWS` of each. labels_Q: int64."""

    texts: Texts
    labels_Q: Tensor

    def __len__(self) -> int:
        return len(self.labels_Q)

    def rows(self, questions_K: Tensor) -> Tensor:
        """Return int64: the rows of these questions."""
        each = len(self.texts) // max(1, len(self))
        return (questions_K[:, None] * each + torch.arange(each)).flatten()


def ask(task: str, scenes: Sequence[Scene], rng: Rng) -> list[Question]:
    """Return questions about the scenes, whose numbers are those of the images."""
    return list({"entailment": _hypotheses, "nlvr2": _statements, "vcr": _choices}[task](scenes, rng))


def _hypotheses(scenes: Sequence[Scene], rng: Rng) -> Iterator[Question]:
    balance: Balance = {}
    for image, scene in enumerate(scenes):
        for text, label in make_hypotheses(scene, PER_IMAGE["entailment"], rng(scene), balance):
            yield Question(rows=(((text,), image),), label=ENTAILMENT.index(label))


def _statements(scenes: Sequence[Scene], rng: Rng) -> Iterator[Question]:
    for first in range(0, len(scenes) - 2 * SIDE + 1, 2 * SIDE):
        images = range(first, first + 2 * SIDE)
        lefts, rights = images[:SIDE], images[SIDE:]
        both = [scenes[i] for i in lefts], [scenes[i] for i in rights]
        own = rng(scenes[first])
        for sentence in chain(make_comparisons(*both, SENTENCES, own), make_simple_comparisons(*both, SENTENCES, own)):
            for left in lefts:
                for right in rights:
                    label = int(sentence.is_true_of(scenes[left], scenes[right]))
                    yield Question(rows=(((sentence.text,), left), ((sentence.text,), right)), label=label)


def _choices(scenes: Sequence[Scene], rng: Rng) -> Iterator[Question]:
    for image, scene in enumerate(scenes):
        names = [item.shape for item in scene.objects]

        def words(tokens: list[Any], names: list[str] = names) -> str:
            return write_out(tokens, names)

        for found in make_questions(scene, PER_IMAGE["vcr"], rng(scene)):
            asked, answers = words(found["question"]), [words(choice) for choice in found["answer_choices"]]
            right = answers[found["answer_label"]]
            rationales = [words(choice) for choice in found["rationale_choices"]]
            yield Question(rows=tuple(((asked, a), image) for a in answers), label=found["answer_label"])
            yield Question(rows=tuple(((asked, right, r), image) for r in rationales), label=found["rationale_label"])
