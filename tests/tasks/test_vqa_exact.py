"""DAQUAR through the VQA task: questions with one right answer, scored by exact match and WUPS."""

from __future__ import annotations

from pathlib import Path

import pytest
from samples import with_values
from toy_dataset import Toy
from toy_tasks import make, predict

from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.tasks.scoring import EvalContext


def test_single_right_answer_is_a_full_target_and_scored_exactly(toy: Toy, tmp_path: Path) -> None:
    task_model, dataset = make(toy, "vqa"), ShardDataset(toy.shards, "val", "questions")
    questions = [dataset[i] for i in range(len(dataset))]
    samples = [with_values(sample, answers=(sample["answers"][0],)) for sample in questions]
    targets_BA = task_model.targets(samples)
    assert targets_BA is not None and targets_BA.sum(1).tolist() == [1.0] * len(samples)

    answers = [sample["answers"][0] if i % 2 else "?" for i, sample in enumerate(samples)]
    rows = [row | {"answer": answer} for row, answer in zip(predict(task_model, toy, "val"), answers, strict=True)]
    context = EvalContext(source="toy", validated=tmp_path)
    scored = {score.metric: score for score in task_model.score(rows, samples, context).scores}
    assert scored["accuracy"].value == pytest.approx(100 * (len(rows) // 2) / len(rows))
    for name in ("WUPS@0.9", "WUPS@0.0"):
        assert scored[name].value is not None or scored[name].note.startswith("not computed: needs nltk")
    assert not any(score.metric.startswith("WUPS") for score in task_model.score(rows, questions, context).scores)
