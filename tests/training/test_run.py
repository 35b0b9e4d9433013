"""The training loop: killed anywhere it goes on bitwise, and nothing it wrote is lost."""

from __future__ import annotations

import math
import resource
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toy_dataset import Keeping, KilledAt, Toy, check_resume, same_weights, untimed

from vlp_models.data.batch import Batch
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.errors import CheckpointError, NonFiniteLossError, ParamsError
from vlp_models.objectives.loss import Loss, WeightedLosses
from vlp_models.params import SnapshotParams
from vlp_models.training.averaging import Snapshots
from vlp_models.training.log import LOG, read_log
from vlp_models.training.resume import clear_resume_points

STEPS = 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accumulate", "ema", "mix", "workers", "muon"),
    [(1, 0.0, "sum", 0, 0.0), (4, 0.9, "alternate", 0, 0.0), (1, 0.0, "sample", 2, 3e-3)],
)
def test_resume_after_kill_is_bitwise_equal(
    toy: Toy, tmp_path: Path, accumulate: int, ema: float, mix: str, workers: int, muon: float
) -> None:
    """Dropout and masking on; kills in mid-epoch, at an epoch's end, and after the last update."""
    settings = {
        "accumulate": accumulate,
        "ema_decay": ema,
        "optimizer": {"muon_lr": muon},
        "mix": mix,
        "checkpoint_every_steps": 1,
        "num_workers": workers,
    }
    steps = (2, 6, 9, STEPS) if accumulate == 1 else (1, 2, 3, 4)
    steps = steps[1:3] if workers else steps  # each fit starts its own worker processes
    _, result = check_resume(partial(toy.fit, **settings), tmp_path, *steps)
    assert result.steps == (STEPS if accumulate == 1 else 4)


@pytest.mark.slow
def test_max_steps_decides_alone_over_as_many_epochs_as_it_takes(toy: Toy, tmp_path: Path) -> None:
    settings = {"objectives": {"mlm": 1.0}, "log_every_steps": 1}
    _, epoch = toy.fit(tmp_path / "epoch", max_epochs=1, **settings)
    _, longer = toy.fit(tmp_path / "longer", max_epochs=1, max_steps=2 * epoch.steps + 1, **settings)
    assert longer.steps == 2 * epoch.steps + 1 and longer.samples > 2 * epoch.samples
    assert [row["epoch"] for row in longer.rows][-1] == 3
    _, shorter = toy.fit(tmp_path / "shorter", max_epochs=9, max_steps=epoch.steps - 1, **settings)
    assert shorter.steps == epoch.steps - 1


def test_batch_norms_added_to_a_built_model_get_right_gradients(toy: Toy, tmp_path: Path) -> None:
    """Such as a task's head; `build_model` fixes those of the model (vlp_models/vision/batch_norm.py)."""
    model = toy.model()
    model.extra = torch.nn.BatchNorm2d(3)
    toy.fit(tmp_path, model, max_epochs=1, objectives={"ism": 1.0})
    assert model.extra._forward_hooks and model.extra._forward_pre_hooks


@pytest.mark.slow
def test_damaged_checkpoint_falls_back_to_the_previous_one(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, _ = toy.fit(tmp_path / "whole")
    work = tmp_path / "damaged"
    with pytest.raises(InterruptedError):
        toy.fit(work, tracker=KilledAt(work, 8))
    assert sorted(p.name for p in work.glob("*.ckpt")) == ["step-00000006.ckpt", "step-00000008.ckpt"]
    newest = work / "step-00000008.ckpt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    resumed, result = toy.fit(work)
    logged = capsys.readouterr().err
    assert "step-00000008.ckpt: damaged" in logged
    assert result.resumed_from == 6
    assert same_weights(whole, resumed)
    assert [row["step"] for row in result.rows] == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_full_disk_leaves_earlier_checkpoints_intact(toy: Toy, tmp_path: Path) -> None:
    whole, _ = toy.fit(tmp_path / "whole")
    work = tmp_path / "full"
    with pytest.raises(InterruptedError):
        toy.fit(work, tracker=KilledAt(work, 4))
    before = {p.name: p.read_bytes() for p in work.glob("step-*")}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # no larger file can be written, as on a full disk
    try:
        with pytest.raises(CheckpointError, match="free some space"):
            toy.fit(work)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {p.name: p.read_bytes() for p in work.glob("step-*")} == before
    assert not list(work.glob(".*.partial"))
    resumed, _ = toy.fit(work)
    assert same_weights(whole, resumed)


class SpoiledLoss:
    """A loss that is not finite at update 3: by itself, or only in its gradient."""

    def __init__(self, model: torch.nn.Module, kind: str) -> None:
        self.weight = next(model.parameters())
        self.kind = kind

    def __call__(self, batch: Batch, *, update: int | None, generator: torch.Generator) -> WeightedLosses:
        total = (self.weight**2).sum()
        if update == 3 and self.kind == "loss":
            total = total * float("nan")
        if update == 3 and self.kind == "gradient":
            total = total + (self.weight * 0).abs().sqrt().sum()  # 0 * inf in the backward pass
        return WeightedLosses.of(Loss(sum=total, count=1, parts={}))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_non_finite_loss_stops_before_the_update(toy: Toy, tmp_path: Path, kind: str) -> None:
    model = toy.model()
    with pytest.raises(NonFiniteLossError) as caught:
        toy.fit(tmp_path / "work", model, loss=SpoiledLoss(model, kind))
    assert caught.value.exit_code == 3

    untouched = toy.model()  # the same, stopped after update 3 with a loss that stays finite
    with pytest.raises(InterruptedError):
        toy.fit(
            tmp_path / "fine",
            untouched,
            loss=SpoiledLoss(untouched, "none"),
            tracker=KilledAt(tmp_path / "fine", 3),
            checkpoint_every_steps=1,
        )
    assert same_weights(model, untouched)

    (file,) = (tmp_path / "work").glob("non-finite-step-3.json")
    assert str(file) in str(caught.value)
    first_of_batch = str(caught.value).partition("Samples: ")[2].partition(",")[0]
    assert first_of_batch.startswith("toy/train")
    assert first_of_batch in file.read_text()


def test_non_finite_input_is_named(toy: Toy, tmp_path: Path) -> None:
    model = toy.model()

    def loss(batch: Batch, *, update: int | None, generator: torch.Generator) -> WeightedLosses:
        batch.image.features_BRF[1, 0, 0] = float("inf")  # what a broken feature file would bring
        total = model.embed_image(batch.image).sum()
        return WeightedLosses.of(Loss(sum=total, count=1, parts={}))

    with pytest.raises(NonFiniteLossError, match=r"Input that is itself not finite: toy/train\d+/c\."):
        toy.fit(tmp_path / "work", model, loss=loss)


def test_non_finite_inputs_in_batches_without_image_or_text() -> None:
    """What the message about a broken input reads."""
    from vlp_models.data.batch import Pixels
    from vlp_models.training.module import _non_finite_inputs

    pixels = torch.zeros(2, 3, 4, 4)
    pixels[1, 0, 0, 0] = float("nan")
    targets = torch.tensor([float("inf"), 1.0])

    def named(**parts: Any) -> list[str]:
        given = {"image": None, "text": None, "targets": None, **parts}
        return _non_finite_inputs(Batch(sample_ids=("a", "b"), image_ids=("a", "b"), **given))

    assert named() == []
    assert named(image=Pixels(pixels_B3HW=pixels)) == ["b"]
    assert named(targets=targets) == ["a"]


class Counting(torch.nn.Module):
    """A weight, and two buffers that every forward pass moves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(()))
        self.objectives = ("mlm",)

    def loss(self, batch: Batch, *, update: int | None, generator: torch.Generator) -> WeightedLosses:
        if update is not None:
            self.passes += 1
            self.mean.lerp_(torch.full((), 10.0), 0.5)
        total = self.weight * (float("nan") if self.passes == 7 else 1.0)
        return WeightedLosses.of(Loss(sum=total, count=1, parts={}))


def test_non_finite_loss_restores_buffers(toy: Toy, tmp_path: Path) -> None:
    model = Counting()
    with pytest.raises(NonFiniteLossError, match=r"step 3: .*weights and buffers are unchanged"):
        toy.fit(tmp_path / "work", model, loss=model.loss, accumulate=2, objectives={"mlm": 1.0})
    assert int(model.passes) == 6  # of the window's two passes neither is left
    assert float(model.mean) == 10 - 10 / 2**6


def test_ema_copies_buffers_without_averaging(toy: Toy, tmp_path: Path) -> None:
    settings = {"objectives": {"mlm": 1.0}, "max_epochs": 1}
    last, average = Counting(), Counting()
    toy.fit(tmp_path / "last", last, loss=last.loss, **settings)
    toy.fit(tmp_path / "average", average, loss=average.loss, ema_decay=0.9, **settings)
    assert torch.equal(last.mean, average.mean) and torch.equal(last.passes, average.passes)
    assert float((1 - average.weight).detach().abs()) < 0.5 * float((1 - last.weight).detach().abs())


@pytest.mark.slow
def test_validation_is_equal_in_each_epoch(toy: Toy, tmp_path: Path) -> None:
    """Masks are drawn for it, too, but the same ones each time: what differs between epochs is the model."""
    _, result = toy.fit(tmp_path / "still", max_epochs=3, optimizer={"lr": 0.0})
    values = [row["val_loss"] for row in result.rows if "val_loss" in row]
    assert len(values) == 3
    assert values == [values[0]] * 3


@pytest.mark.slow
def test_log_records_the_share_of_time_waiting_for_data(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, slept = ShardDataset.__getitem__, []

    def slow(self: ShardDataset, number: int) -> Any:
        began = time.perf_counter()
        time.sleep(0.005)
        slept.append(time.perf_counter() - began)
        return plain(self, number)

    _, fast = toy.fit(tmp_path / "fast")
    monkeypatch.setattr(ShardDataset, "__getitem__", slow)
    _, result = toy.fit(tmp_path / "slow")
    assert untimed(result.rows) == untimed(fast.rows)
    shares = [row["waiting_share"] for row in result.rows]
    assert all(0 < share <= 1 for share in shares)
    waited = sum(np.diff([0.0, *(row["seconds"] for row in result.rows)]) * shares)
    validations = 0.5  # at most this part of the batches is for validation; reading them is not counted as waiting
    assert waited > (1 - validations) * sum(slept)


def test_truncated_log_line_is_dropped(tmp_path: Path) -> None:
    (tmp_path / LOG).write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read_log(tmp_path / LOG) == [{"step": 1}, {"step": 2}]


def test_unknown_accelerator_is_refused(toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match="does not fit this machine"):
        toy.fit(tmp_path / "c", accelerator="abacus")


SETTINGS: dict[str, Any] = {"max_epochs": 5, "optimizer": {"lr": 0.02}}


def kept_steps(result: Any, count: int, metric: str = "val_loss", sign: int = 1) -> list[int]:
    rows = [row for row in result.rows if metric in row]
    return [row["step"] for row in sorted(rows, key=lambda row: sign * row[metric])[:count]]


@pytest.mark.slow
@pytest.mark.parametrize("average", [True, False])
def test_result_is_the_average_of_the_best_snapshots(toy: Toy, tmp_path: Path, average: bool) -> None:
    model = toy.model()
    keeping = Keeping(model)
    snapshots = SnapshotParams(keep=3, metric="val_msg_accuracy", mode="max", average=average)
    _, result = toy.fit(tmp_path, model, tracker=keeping, snapshots=snapshots, checkpoint_every_steps=1, **SETTINGS)
    best = kept_steps(result, 3, "val_msg_accuracy", -1)
    assert len(best) == 3
    for name, value in model.state_dict().items():
        states = [keeping.seen[step][name] for step in (best if average else best[:1])]
        assert torch.allclose(value, torch.stack(states).double().mean(0).to(value.dtype), rtol=0, atol=1e-7), name
    clear_resume_points(tmp_path)
    assert not list(tmp_path.glob("*snapshot*"))


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["a bit", "its end", "all of it"])
def test_damaged_snapshot_is_named(toy: Toy, tmp_path: Path, damage: str) -> None:
    settings = {**SETTINGS, "snapshots": SnapshotParams(keep=2), "checkpoint_every_steps": 4}
    with pytest.raises(InterruptedError):
        toy.fit(tmp_path, tracker=KilledAt(tmp_path, 28), **settings)
    for file in tmp_path.glob("snapshot-*.safetensors"):
        content = bytearray(file.read_bytes())
        content[-3] ^= 4
        file.write_bytes({"a bit": content, "its end": content[:-20], "all of it": bytes(len(content))}[damage])
    with pytest.raises(CheckpointError, match=r"snapshot-\d+\.safetensors: .*damaged .* delete"):
        toy.fit(tmp_path, **settings)


@pytest.mark.parametrize("every", [1, 4, 1000])
def test_the_last_update_is_logged(toy: Toy, tmp_path: Path, every: int) -> None:
    _, result = toy.fit(tmp_path, max_steps=5, log_every_steps=every)
    assert result.rows[-1]["step"] == result.steps == 5


def test_nan_validation_ranks_last(tmp_path: Path) -> None:
    for mode, wanted in (("min", [30, 20, 10]), ("max", [20, 30, 10])):
        snapshots = Snapshots(tmp_path, SnapshotParams(keep=3, mode=mode))
        snapshots.load_state_dict({"best": {10: math.nan, 20: 1.0, 30: 0.5}, "listed": []})
        assert snapshots._ranked() == wanted


@pytest.mark.slow
def test_snapshots_after_resume_are_equal(toy: Toy, tmp_path: Path) -> None:
    settings = {**SETTINGS, "snapshots": SnapshotParams(keep=2), "checkpoint_every_steps": 4}
    whole, result = toy.fit(tmp_path / "whole", **settings)
    for step in (8, 28):
        work = tmp_path / str(step)
        with pytest.raises(InterruptedError):
            toy.fit(work, tracker=KilledAt(work, step), **settings)
        (work / f"step-{step:08d}.ckpt").write_bytes(b"damaged")  # the resume point before it needs its files, too
        resumed, after = toy.fit(work, **settings)
        assert after.resumed_from == step - 4
        assert untimed(after.rows) == untimed(result.rows)
        assert same_weights(resumed, whole)


def test_invalid_snapshot_settings_are_refused(toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=r"snapshots\.metric: val_los`: .* did you mean `val_loss`"):
        toy.fit(tmp_path / "a", snapshots=SnapshotParams(keep=1, metric="val_los"), log_every_steps=1)
    assert read_log(tmp_path / "a" / LOG) == []  # before the first update, not at the end of the first epoch
