"""Questions: true answers, no text that gives its answer away, annotators who are right by majority."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest

from vlp_models.synthetic.scenes.questions import (
    ANNOTATORS,
    Balance,
    Question,
    annotate,
    choose,
    exists,
    neighbor_shape,
    where_is,
)
from vlp_models.synthetic.scenes.scene import Scene, SceneObject, sample_scene


def ask(first: int, images: int, per_image: int = 12) -> list[Question]:
    balance = Balance()
    asked = []
    for seed in range(first, first + images):
        scene = sample_scene(np.random.default_rng(seed), image_id="1", split="train", side=64)
        chosen = choose(scene, per_image, balance, np.random.default_rng(seed + 1))
        assert len({question.text for question in chosen}) == len(chosen)
        asked += chosen
    return asked


def official_accuracy(prediction: str, answers: list[str]) -> float:
    """VQA v2: the mean over annotators of min(1, matches among the other nine / 3)."""
    matches = [sum(a == prediction for a in answers[:i] + answers[i + 1 :]) for i in range(len(answers))]
    return float(np.mean([min(1, m / 3) for m in matches]))


@pytest.mark.slow
def test_text_only_model_scores_below_45() -> None:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for question in ask(0, 500):
        counts[question.text][question.answer] += 1
    rng = np.random.default_rng(0)
    scores = []
    for question in ask(10_000, 250):
        answers = [str(a["answer"]) for a in annotate(question, rng)]
        guess = counts[question.text].most_common(1)[0][0] if question.text in counts else "no"
        scores.append(official_accuracy(guess, answers))
    assert 100 * np.mean(scores) < 45


def test_all_three_answer_types_are_frequent() -> None:
    asked = ask(0, 100)
    assert len(asked) == 1200
    types = Counter(question.answer_type for question in asked)
    assert set(types) == {"yes/no", "number", "other"}
    assert min(types.values()) > 0.2 * len(asked)
    assert all(question.answer in question.options for question in asked)


def test_the_majority_of_ten_annotators_is_right_and_some_err() -> None:
    rng = np.random.default_rng(0)
    questions = ask(0, 100)
    slips = 0
    for question in questions:
        answers = annotate(question, rng)
        assert [a["answer_id"] for a in answers] == list(range(1, ANNOTATORS + 1))
        tally = Counter(a["answer"] for a in answers)
        assert tally.most_common(1)[0][0] == question.answer and tally[question.answer] >= 6
        slips += ANNOTATORS - tally[question.answer]
    assert 0.07 < slips / (ANNOTATORS * len(questions)) < 0.09


def test_answers_by_hand() -> None:
    def item(shape: str, color: str, x: float, y: float) -> SceneObject:
        place = {"x": x, "y": y, "radius": 0.08, "angle": 0.0, "visible": 1.0}
        return SceneObject(shape=shape, color=color, size="small", texture="solid", box=(0, 0, 1, 1), **place)

    objects = (item("star", "red", 0.2, 0.2), item("circle", "blue", 0.8, 0.3), item("circle", "red", 0.5, 0.8))
    scene = Scene(image_id="1", split="test", side=128, objects=objects)
    assert {q.text for q in exists(scene) if q.answer == "yes"} == {
        "Is there a red star?",
        "Is there a blue circle?",
        "Is there a red circle?",
    }
    assert {q.text: q.answer for q in where_is(scene)} == {
        "Where is the star?": "top left",
        "Where is the red star?": "top left",
        "Where is the blue circle?": "top right",
    }
    # Two circles lie right of the star and one below it, but the blue one is not clearly above or below.
    assert neighbor_shape(scene) == []
