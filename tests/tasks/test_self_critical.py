"""Self-critical training: samples, rewards, gradients, and a killed run that resumes to the same result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toy_dataset import CLASSES, FEATURE_DIM, TRAINER, KilledAt, Toy, same_weights
from toy_tasks import any_generator

from vlp_models.data.sample import Sample
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.tokenizer import SEP
from vlp_models.errors import ParamsError
from vlp_models.metrics.cider_d import CiderD, DocumentFrequencies
from vlp_models.models.checkpoint import CheckpointInfo
from vlp_models.models.decoding.sampling import sample
from vlp_models.params import OptimizerParams, to_plain
from vlp_models.tasks.base import read_options
from vlp_models.tasks.captioning import Captioning
from vlp_models.tasks.self_critical import FREQUENCIES, SelfCriticalLoss, SelfCriticalParams, self_critical_loss


def captioner(toy: Toy, dropout: float = 0.0, structure: str = "decoupled", **info: Any) -> Captioning:
    model = toy.model(dropout=dropout, attention_dropout=dropout, hidden=32, init_std=0.2, structure=structure)
    facts: dict[str, Any] = {
        "family": "tden",
        "name": "tden",
        "model_config": to_plain(model.config),
        "task": "captioning",
        "max_text_len": 8,
        "max_regions": 4,
        "detector_id": "toy",
        "feature_dim": FEATURE_DIM,
        "classes": tuple(CLASSES),
    }
    config = CheckpointInfo(**(facts | info))
    return Captioning(model, toy.tokenizer, config)


def samples(toy: Toy, view: str, split: str = "train") -> list[Sample]:
    dataset = ShardDataset(toy.shards, split, view)
    return [dataset[i] for i in range(len(dataset))]


def teach(task: Captioning, toy: Toy, steps: int) -> None:
    """Train with cross-entropy first, as self-critical training requires."""
    batch = task.collate(samples(toy, "captions"))
    optimizer = torch.optim.AdamW(task.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        task.loss(batch, generator=any_generator()).mean.backward()
        optimizer.step()


def make(task: Captioning, toy: Toy, work: Path, **params: Any) -> SelfCriticalLoss:
    return self_critical_loss(task, SelfCriticalParams(**params), toy.shards, {}, work)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("baseline", "structure"),
    [("greedy", "decoupled"), ("leave_one_out", "decoupled"), ("greedy", "two_stream"), ("greedy", "single_stream")],
)
def test_loss_equals_that_of_samples_one_by_one(toy: Toy, tmp_path: Path, baseline: str, structure: str) -> None:
    task = captioner(toy, structure=structure)
    teach(task, toy, 12)
    loss_of = make(task, toy, tmp_path, samples=3, baseline=baseline)
    images = samples(toy, "images")[:5]
    batch = task.collate(images)
    loss = loss_of(batch, update=0, generator=generator())

    sep, ends = toy.tokenizer.sep_id, {"max_len": 7, "bos_id": toy.tokenizer.cls_id, "eos_id": toy.tokenizer.sep_id}
    groups = sample(task.model.eval(), batch.image, num_samples=3, generator=generator(), **ends)
    corpus = {s.image_id: [[*c.split(), SEP] for c in s["captions"]] for s in samples(toy, "images")}
    reward = CiderD(DocumentFrequencies.count(corpus.values()), corpus.__getitem__)
    (greedy_captions,) = [[p["greedy"] for p in task.predict(task.collate(images), images)]]
    total, tokens, rewards = 0.0, 0, []
    for i, group in enumerate(groups):
        words = [toy.tokenizer.merge(h.ids) + [SEP] * (len(h.ids) < 7) for h in group]
        scores = reward.score(images[i].image_id, words)
        rewards += scores.tolist()
        own = reward.score(images[i].image_id, [[*greedy_captions[i].split(), SEP]])[0]
        for k, h in enumerate(group):
            others = [s for j, s in enumerate(scores) if j != k]
            advantage = scores[k] - (own if baseline == "greedy" else sum(others) / 2)
            total -= h.score * advantage  # a hypothesis' score is its log-probability, including [SEP]
            tokens += len(h.ids) + (len(h.ids) < 7)
            assert sep not in h.ids
    assert float(loss.mean.detach()) == pytest.approx(total / tokens, rel=1e-4)
    assert float(loss.parts["reward"].mean) == pytest.approx(sum(rewards) / len(rewards), rel=1e-5)
    assert float(loss.parts["sample_length"].mean) == pytest.approx(tokens / 15)
    assert ("reward_greedy" in loss.parts) is (baseline == "greedy")


def test_temperature_is_that_of_samples_and_of_the_gradient(toy: Toy, tmp_path: Path) -> None:
    task = captioner(toy)
    teach(task, toy, 12)
    loss_of = make(task, toy, tmp_path, samples=3, baseline="leave_one_out", temperature=0.5)
    batch = task.collate(samples(toy, "images")[:5])
    loss = loss_of(batch, update=0, generator=generator())

    tokenizer, model = toy.tokenizer, task.model.eval()
    ends = {"max_len": 7, "bos_id": tokenizer.cls_id, "eos_id": tokenizer.sep_id}
    drawn = sample(model, batch.image, num_samples=3, temperature=0.5, generator=generator(), **ends)
    words = [[[*tokenizer.merge(h.ids), *[SEP] * (len(h.ids) < 7)] for h in group] for group in drawn]
    reward = np.stack([loss_of.reward.score(i, group) for i, group in zip(batch.image_ids, words, strict=True)])
    total, tokens = 0.0, 0
    for row, group in enumerate(drawn):
        for k, hypothesis in enumerate(group):
            state = model.start(batch.image.select(torch.tensor([row])), max_len=7)
            advantage = reward[row, k] - (reward[row].sum() - reward[row, k]) / 2
            read = tokenizer.cls_id
            for token in [*hypothesis.ids, tokenizer.sep_id][:7]:
                logits, state = model.step(torch.tensor([read]), state)
                total -= float((logits[0] / 0.5).log_softmax(-1)[token]) * advantage
                tokens, read = tokens + 1, token
    assert float(loss.mean.detach()) == pytest.approx(total / tokens, rel=1e-4)


@pytest.mark.parametrize("structure", ["decoupled", "two_stream", "single_stream"])
def test_texts_sharing_an_image_equal_texts_with_their_own(toy: Toy, structure: str) -> None:
    task = captioner(toy, structure=structure).eval()
    batch = task.collate(samples(toy, "images")[:3])
    texts = toy.tokenizer.encode_batch(["a red star", "a", "the blue circle is red", "star", "green", "what color"], 8)
    owner_N = torch.arange(3).repeat_interleave(2)
    shared = task.model.generation_logits(batch.image, replace(texts, owner_N=owner_N))
    each = task.model.generation_logits(batch.image.select(owner_N), texts)
    torch.testing.assert_close(shared, each, rtol=1e-5, atol=1e-5)


def test_logits_are_computed_only_where_a_word_follows(toy: Toy, tmp_path: Path) -> None:
    """Vocabulary logits take the most memory: none for padding, and none after [SEP]."""
    task = captioner(toy)
    rows: list[int] = []
    task.model.word_head.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0][..., 0].numel()))
    batch = task.collate(samples(toy, "captions")[:5] + samples(toy, "statements")[:3])
    task.loss(batch, generator=any_generator())
    assert rows == [int(batch.text.mask_BT[:, 1:].sum())]
    loss_of = make(task, toy, tmp_path, samples=3)
    loss = loss_of(task.collate(samples(toy, "images")[:4]), update=0, generator=generator())
    assert rows[-1] == round(float(loss.parts["sample_length"].mean) * 12)


@pytest.mark.slow
def test_training_raises_the_reward(toy: Toy, tmp_path: Path) -> None:
    task = captioner(toy)
    teach(task, toy, 12)
    loss_of = make(task, toy, tmp_path, samples=5)
    batch = task.collate(samples(toy, "images"))
    optimizer = torch.optim.AdamW(task.parameters(), lr=1e-3)

    def reward() -> float:
        task.eval()
        value = -float(loss_of(batch, update=None, generator=generator()).mean)
        task.train()
        return value

    before = reward()
    for step in range(40):
        optimizer.zero_grad()
        loss_of(batch, update=step, generator=generator(step)).mean.backward()
        optimizer.step()
    assert reward() > before + 0.5


def test_mixed_precision_keeps_gradients_and_modes_are_restored(toy: Toy, tmp_path: Path) -> None:
    """Weights that autocast cast while sampling must not be reused in the gradient's pass."""
    task = captioner(toy, dropout=0.1).train()
    teach(task, toy, 5)
    batch = task.collate(samples(toy, "images")[:6])
    for dropout in (False, True):
        loss_of = make(task, toy, tmp_path, sampling_dropout=dropout)
        gradients = []
        for enabled in (False, True):
            task.zero_grad()
            torch.manual_seed(0)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                loss = loss_of(batch, update=0, generator=generator())
            loss.mean.backward()
            gradients.append({n for n, p in task.named_parameters() if p.grad is not None and p.grad.any()})
        assert gradients[0] == gradients[1]
        assert any("cross_decoder" in name and "weight" in name for name in gradients[0])
        assert task.training
        assert task.model.training


@pytest.mark.parametrize("sampling_dropout", [False, True])
def test_frozen_modules_stay_in_eval_mode(toy: Toy, tmp_path: Path, sampling_dropout: bool) -> None:
    """Frozen modules are in eval mode during training (training/optim.py), without dropout."""
    task = captioner(toy, dropout=0.1).train()
    task.model.object_encoder.eval()
    modes = {name: module.training for name, module in task.named_modules()}
    assert set(modes.values()) == {True, False}
    loss_of = make(task, toy, tmp_path, sampling_dropout=sampling_dropout)
    loss_of(task.collate(samples(toy, "images")[:6]), update=0, generator=generator())
    assert {name: module.training for name, module in task.named_modules()} == modes


def test_resume_after_kill_is_bitwise_equal(toy: Toy, tmp_path: Path) -> None:
    """With dropout and sampling; killed within an epoch and at its end."""
    from vlp_models.training.data import LoaderFactory
    from vlp_models.training.log import TIMING
    from vlp_models.training.run import Plan, fit

    def run(work: Path, tracker: Any = None) -> tuple[Captioning, Any]:
        work.mkdir(exist_ok=True)
        task = captioner(toy, dropout=0.1)
        loaders = LoaderFactory(
            toy.shards,
            "images",
            sources={},
            collate=task.collate,
            batch_size=12,
            num_workers=0,
            seed=3,
            captioned=True,
        )
        plan = Plan(seed=1, max_epochs=2, max_steps=0, accumulate=1, optimizer=OptimizerParams(lr=1e-3))
        loss = make(task, toy, work, samples=2)
        trainer = replace(TRAINER, checkpoint_every_steps=1)
        result = fit(task, loss, loaders, plan=plan, trainer=trainer, work=work, title="toy", tracker=tracker)
        return task, result

    def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{k: v for k, v in row.items() if k not in TIMING} for row in rows]

    whole, result = run(tmp_path / "whole")
    assert result.steps == 8
    assert {"reward", "reward_greedy", "zero_rewards", "self_critical", "val_loss"} <= set(result.rows[-1])
    shares = [row["reward_share"] for row in result.rows if "reward_share" in row]
    assert len(shares) == 6, "all but the first step and those after a validation"
    assert all(0 < share < 1 for share in shares)
    for step in (3, 4):
        work = tmp_path / f"killed-{step}"
        with pytest.raises(InterruptedError):
            run(work, KilledAt(work, step))
        resumed, after = run(work)
        assert after.resumed_from == step
        assert same_weights(whole, resumed)
        assert untimed(after.rows) == untimed(result.rows)
        assert (work / FREQUENCIES).read_bytes() == (tmp_path / "whole" / FREQUENCIES).read_bytes()


def test_batches_without_reward_are_counted_and_warned_about_once(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = captioner(toy)
    loss_of = make(task, toy, tmp_path)
    loss_of.reward = CiderD(DocumentFrequencies.count([]), lambda _: [["unknown", SEP + "!"]])
    batch = task.collate(samples(toy, "images")[:4])
    for update in range(2):
        loss = loss_of(batch, update=update, generator=generator())
        loss.mean.backward()
        assert float(loss.mean) == 0.0
        assert float(loss.parts["zero_rewards"].mean) == 1.0
    assert capsys.readouterr().err.count("contributes no gradient") == 1
    assert not any(p.grad.any() for p in task.parameters() if p.grad is not None)


def test_images_without_captions_are_skipped_and_counted(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    import pyarrow as pa
    import pyarrow.parquet as pq

    shards = shutil.copytree(toy.shards, tmp_path / "shards")
    file = shards / "index-train.parquet"
    rows = pq.read_table(file)
    bare = [row | ({"captions": []} if i < 3 else {}) for i, row in enumerate(rows.to_pylist())]
    pq.write_table(pa.Table.from_pylist(bare, schema=rows.schema), file)
    expected = sum(row["view"] == "images" and not row["captions"] for row in bare)
    assert expected > 0

    loss_of = self_critical_loss(captioner(toy), SelfCriticalParams(), shards, {}, tmp_path)
    assert f"skipping {expected} train images without a caption" in capsys.readouterr().err
    kept = ShardDataset(shards, "train", "images", captioned=True)
    assert len(kept) == len(ShardDataset(shards, "train", "images")) - expected
    assert all(loss_of.reward.score(kept[i].image_id, [["a"]]).shape == (1,) for i in range(len(kept)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"self_critical": {"samples": 1, "baseline": "leave_one_out"}},
            r"`o\.self_critical`: `samples: 1` is too few",
        ),
        ({"self_critical": {"temperature": 0}}, r"`o\.self_critical\.temperature: 0.0` should be greater than 0"),
        ({"self_critical": {}, "label_smoothing": 0.1}, r"`o`: `label_smoothing` does not apply to self-critical"),
        ({"self_critical": {}, "targets": "masked"}, r"`o`: `targets: masked` does not apply to self-critical"),
    ],
)
def test_invalid_settings_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        read_options(Captioning, options, where="o")
