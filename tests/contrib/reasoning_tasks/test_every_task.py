"""What all these tasks have in common: they learn, also with Unified VLP, predict hidden labels, and load again."""

from __future__ import annotations

import pytest
from samples import with_values
from toy_dataset import Toy
from toy_tasks import any_generator, learn, make, predict
from toy_unified_vlp import unified

from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.errors import DataError


@pytest.mark.slow
def test_nlvr_learns_to_judge_statements(toy: Toy) -> None:
    nlvr = make(toy, "nlvr")
    assert learn(nlvr, toy, 200, lr=2e-3) < 0.1
    predictions = predict(nlvr, toy, "train")
    assert sum(p["prediction"] == p["label"] for p in predictions) >= 0.95 * len(predictions)
    first = predictions[0]
    assert set(first) == {"statement_id", "image_id", "group", "label", "prediction", "p_true"}
    assert first["prediction"] is (first["p_true"] > 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["nlvr", "nlvr2", "vcr", "entailment"])
def test_learns_tasks_of_the_fused_feature(toy: Toy, task: str) -> None:
    own = unified(toy)
    made = make(own, task).train()
    first = learn(made, own, 1)
    assert learn(made, own, 80) < 0.5 * first


@pytest.mark.parametrize("task", ["nlvr", "nlvr2", "entailment"])
def test_hidden_labels_are_predicted_but_not_trained_on(toy: Toy, task: str) -> None:
    task_model = make(toy, task)
    sample = with_values(ShardDataset(toy.shards, "test", task_model.view)[0], label=None, gold_label=None)
    batch = task_model.collate([sample])
    assert [row["label"] for row in task_model.predict(batch, [sample])] == [None]
    with pytest.raises(DataError, match="hidden"):
        task_model.loss(batch, generator=any_generator())
