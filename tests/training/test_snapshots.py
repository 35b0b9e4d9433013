"""The best validations' weights, averaged, killed and resumed or not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_dataset import KilledAt, Toy, same_weights, untimed

from vlp_models.errors import ParamsError
from vlp_models.params import SnapshotParams
from vlp_models.training.averaging import Snapshots
from vlp_models.training.resume import clear_resume_points

SETTINGS: dict[str, Any] = {"max_epochs": 5, "optimizer": {"lr": 0.02}}


class Keeping:
    """A tracker that remembers the weights whenever it is asked."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.seen = module, {}

    def sync(self, log: Path) -> None:
        self.seen[len(log.read_text().splitlines())] = {k: v.clone() for k, v in self.module.state_dict().items()}


def kept(result: Any, count: int, metric: str = "val_loss", sign: int = 1) -> list[int]:
    rows = [row for row in result.rows if metric in row]
    return [row["step"] for row in sorted(rows, key=lambda row: sign * row[metric])[:count]]


@pytest.mark.parametrize("average", [True, False])
def test_the_result_is_what_the_best_validations_had(toy: Toy, tmp_path: Path, average: bool) -> None:
    model = toy.model()
    keeping = Keeping(model)
    snapshots = SnapshotParams(keep=3, metric="val_msg_accuracy", mode="max", average=average)
    _, result = toy.fit(tmp_path, model, tracker=keeping, snapshots=snapshots, checkpoint_every_steps=1, **SETTINGS)
    best = kept(result, 3, "val_msg_accuracy", -1)
    assert len(best) == 3
    for name, value in model.state_dict().items():
        states = [keeping.seen[step][name] for step in (best if average else best[:1])]
        assert torch.allclose(value, torch.stack(states).double().mean(0).to(value.dtype), rtol=0, atol=1e-7), name
    clear_resume_points(tmp_path)
    assert not list(tmp_path.glob("*snapshot*"))


def test_a_validation_that_is_no_number_is_the_worst(tmp_path: Path) -> None:
    for mode, wanted in (("min", [30, 20, 10]), ("max", [20, 30, 10])):
        snapshots = Snapshots(tmp_path, SnapshotParams(keep=3, mode=mode))
        snapshots.load_state_dict({"best": {10: math.nan, 20: 1.0, 30: 0.5}, "saved": []})
        assert snapshots._ranked() == wanted


def test_killed_at_any_time_it_keeps_the_same(toy: Toy, tmp_path: Path) -> None:
    settings = {**SETTINGS, "snapshots": SnapshotParams(keep=2), "checkpoint_every_steps": 4}
    whole, result = toy.fit(tmp_path / "whole", **settings)
    for step in (8, 20, 28):
        work = tmp_path / str(step)
        with pytest.raises(InterruptedError):
            toy.fit(work, tracker=KilledAt(work, step), **settings)
        (work / f"step-{step:08d}.ckpt").write_bytes(b"damaged")  # the resume point before it needs its files, too
        resumed, after = toy.fit(work, **settings)
        assert after.resumed_from == step - 4
        assert untimed(after.rows) == untimed(result.rows)
        assert same_weights(resumed, whole)


def test_what_can_not_be_is_explained(toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=r"snapshots\.metric: val_los`; did you mean `val_loss`"):
        toy.fit(tmp_path / "a", snapshots=SnapshotParams(keep=1, metric="val_los"))
    with pytest.raises(ParamsError, match="set one of them to 0"):
        toy.fit(tmp_path / "b", snapshots=SnapshotParams(keep=1), ema_decay=0.9)
