"""Ten annotators answer each question, and now and then one of them slips."""

from __future__ import annotations

import numpy as np

from vlp_models.synthetic.scenes.questions import YES_NO, Question

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
