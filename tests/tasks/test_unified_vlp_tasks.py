"""Unified VLP learns every task that it supports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from toy_dataset import COLORS, Toy
from toy_tasks import any_generator, learn, make, predict
from toy_unified_vlp import unified

from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.errors import ParamsError
from vlp_models.objectives.generation import self_critical
from vlp_models.tasks.self_critical import SelfCriticalParams, self_critical_loss


def truth(toy: Toy, split: str) -> dict[str, str]:
    dataset = ShardDataset(toy.shards, split, "captions")
    return {dataset[i].image_id: dataset[i].text for i in range(len(dataset))}


@pytest.mark.slow
@pytest.mark.parametrize("targets", ["all", "masked"])
def test_learns_to_caption(toy: Toy, targets: str) -> None:
    """From every word at once, and from masked words as in the paper; greedy and beam search are both right."""
    own = unified(toy)
    task = make(own, "captioning", options={"targets": targets, "mask_probability": 0.4})
    learn(task.train(), own, 150 if targets == "all" else 400)
    task.beam_size = 3
    rows, wanted = predict(task, own, "val"), truth(own, "val")
    right = [row["caption"] == wanted[row["image_id"]] for row in rows]
    assert sum(right) >= 7, rows
    assert sum(row["greedy"] == wanted[row["image_id"]] for row in rows) >= 7


def test_validation_is_on_every_word(toy: Toy) -> None:
    own = unified(toy)
    masked, every = (make(own, "captioning", options={"targets": t}) for t in ("masked", "all"))
    dataset = ShardDataset(own.shards, "val", "captions")
    batch = masked.collate([dataset[i] for i in range(8)])
    losses = [task.eval().loss(batch, generator=any_generator()) for task in (masked, every)]
    assert losses[0].count == losses[1].count == int(batch.text.has_next_BT.sum())
    assert torch.equal(losses[0].sum, losses[1].sum)
    in_training = masked.train().loss(batch, generator=any_generator())
    assert in_training.count < losses[0].count and set(in_training.parts) == set(losses[0].parts)


def test_learns_to_answer(toy: Toy) -> None:
    own = unified(toy)
    task = make(own, "vqa")
    learn(task.train(), own, 150)
    dataset = ShardDataset(own.shards, "val", "questions")
    wanted = {dataset[i].sample_id: dataset[i]["answers"][0] for i in range(len(dataset))}
    rows = predict(task, own, "val")
    assert {row["answer"] for row in rows} <= set(COLORS)
    assert sum(row["answer"] == wanted[row["question_id"]] for row in rows) >= 7


def test_unsupported_task_is_an_error(toy: Toy) -> None:
    with pytest.raises(ParamsError, match="retrieval"):
        make(unified(toy), "retrieval")


def test_masked_targets_need_a_masked_language_model(toy: Toy) -> None:
    with pytest.raises(ParamsError, match="does not generate by masked words; set `targets: all`"):
        make(toy, "captioning", options={"targets": "masked"})
    with pytest.raises(ParamsError, match="does not apply to self-critical training"):
        make(unified(toy), "captioning", options={"targets": "masked", "self_critical": {"samples": 2}})
    with pytest.raises(ParamsError, match="mask_probability"):
        make(unified(toy), "captioning", options={"mask_probability": 0.0})


@pytest.mark.slow
def test_self_critical_training_raises_the_reward(toy: Toy, tmp_path: Path) -> None:
    """The loss also equals that of the samples, each with its own image."""
    own = unified(toy)
    task = make(own, "captioning")
    learn(task.train(), own, 25)
    loss = self_critical_loss(task, SelfCriticalParams(samples=5), own.shards, {}, tmp_path)
    dataset = ShardDataset(own.shards, "train", "images")
    batch = task.collate([dataset[i] for i in range(16)])

    sampled, greedy_captions = loss._sample(batch, torch.Generator().manual_seed(2))
    (summed,) = loss(batch, update=0, generator=torch.Generator().manual_seed(2)).losses.values()
    reward, greedy = (
        loss._rewards(batch.image_ids, sampled),
        loss._rewards(batch.image_ids, [[h] for h in greedy_captions]),
    )
    total, tokens = torch.zeros(()), 0
    for i, group in enumerate(sampled):
        for k, hypothesis in enumerate(group):
            text = loss._as_text([hypothesis], torch.device("cpu"))
            at = text.has_next_BT
            logits = task.model.generation_logits(batch.image.select(torch.tensor([i])), text, at)
            advantage = (reward[i, k] - greedy[i, 0]).expand(len(logits))
            total = total + self_critical(logits, text.next_tokens(at), advantage).sum
            tokens += len(logits)
    assert tokens == summed.count
    torch.testing.assert_close(summed.sum, total, rtol=1e-4, atol=1e-4)

    optimizer, rewards = torch.optim.AdamW(task.parameters(), lr=1e-3), []
    for step in range(40):
        result = loss(batch, update=step, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        result.mean.backward()
        optimizer.step()
        rewards.append(result.parts["reward"].mean.item())
    assert sum(rewards[-10:]) > 1.1 * sum(rewards[:10])


def test_resume_after_kill_is_bitwise_equal(toy: Toy, tmp_path: Path) -> None:
    """With dropout, objectives drawn per sample, and two micro-batches per update."""
    from toy_dataset import KilledAt, same_weights, untimed

    own = unified(toy)
    settings = {
        "objectives": {"seq2seq": 0.75, "bidirectional": 0.25},
        "mix": "sample",
        "batch_size": 4,
        "accumulate": 2,
    }
    whole, result = own.fit(tmp_path / "whole", own.model(dropout=0.1), **settings)
    with pytest.raises(InterruptedError):
        own.fit(
            tmp_path / "broken",
            own.model(dropout=0.1),
            tracker=KilledAt(tmp_path / "broken", 6),
            **settings,
        )
    again, resumed = own.fit(tmp_path / "broken", own.model(dropout=0.1), **settings)
    assert same_weights(whole, again)
    assert untimed(result.rows) == untimed(resumed.rows)
