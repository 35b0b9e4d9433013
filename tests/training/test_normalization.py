"""One division: micro-batches of an update are one batch, an epoch's short last window included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import run
from safetensors.torch import load_file
from token_toys import WEIGHTS, Tokens
from toy_dataset import CLASSES, FEATURE_DIM, Toy, check_resume, make_toy, untimed

from vlp_models.objectives.loss import Loss, Part, WeightedLosses
from vlp_models.training.normalization import mean_losses, normalize, total_over_ranks

# 44 samples: updates of 16, 16 and 12
PLAIN = {"optimizer": {"clip_norm": 0.0, "eps": 1e-3, "lr": 0.05}, "max_epochs": 2}


def learn(toy: Toy, work: Path, *, weights: dict[str, float] | None = None, **settings: Any) -> tuple[Tokens, Any]:
    ahead = settings.pop("counts_ahead", False)
    model = Tokens(toy.tokenizer.vocab_size, FEATURE_DIM, len(CLASSES), counts_ahead=ahead)
    _, result = toy.fit(work, model, objectives=weights or WEIGHTS, **{**PLAIN, **settings})
    return model, result


def difference(one: torch.nn.Module, other: dict[str, torch.Tensor]) -> float:
    pairs = [(value, other[name]) for name, value in one.named_parameters()]
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("weights", [WEIGHTS, {"mlm": 1.0}], ids=["several", "one"])
@pytest.mark.parametrize("counts_ahead", [False, True])
def test_micro_batches_match_one_batch(toy: Toy, tmp_path: Path, weights: dict[str, float], counts_ahead: bool) -> None:
    whole, wanted = learn(toy, tmp_path / "1", weights=weights, batch_size=16)
    parted, found = learn(toy, tmp_path / "4", weights=weights, batch_size=4, accumulate=4, counts_ahead=counts_ahead)
    assert [row["step"] for row in found.rows] == [1, 2, 3, 4, 5, 6]
    assert difference(parted, dict(whole.named_parameters())) < 1e-12
    for row, expected in zip(untimed(found.rows), untimed(wanted.rows), strict=True):
        validated = {name: value for name, value in row.items() if name.startswith("val_")}
        assert row == pytest.approx(expected, rel=1e-10)
        assert set(validated) == {name for name in expected if name.startswith("val_")}
    # 2 epochs of windows of 4, 4 and 3 micro-batches, and validation's 2 (or 1) batches an epoch
    trained, looked_ahead = 22, 0 if counts_ahead or len(weights) == 1 else 16
    assert parted.passes == trained + looked_ahead + 2 * 2
    assert found.samples == wanted.samples == 88
    assert int(parted.batches) - 2 * 2 == trained, "looking ahead leaves the buffers alone"


def test_look_ahead_draws_the_same_random_numbers(toy: Toy, tmp_path: Path) -> None:
    """What a model draws by itself, as dropout, may decide what counts."""
    seen: dict[tuple[str, ...], list[float]] = {}

    class Drawing(Tokens):
        def pretraining_losses(self, batch: Any, **asked: Any) -> dict[str, Loss]:
            if self.training:
                seen.setdefault(batch.sample_ids, []).append(float(torch.rand(())))
            return super().pretraining_losses(batch, **asked)

    model = Drawing(toy.tokenizer.vocab_size, FEATURE_DIM, len(CLASSES))
    settings = {**PLAIN, "max_epochs": 1, "batch_size": 4, "accumulate": 4}
    toy.fit(tmp_path / "work", model, objectives=WEIGHTS, **settings)
    assert sorted(len(drawn) for drawn in seen.values()) == [1] * 3 + [2] * 8
    assert all(len(set(drawn)) == 1 for drawn in seen.values())


@pytest.mark.slow
def test_two_processes_with_micro_batches_match_one_batch(tmp_path: Path) -> None:
    """A batch of 4 is 2 rows on each; the last update has three micro-batches."""
    toy = make_toy(tmp_path)
    code, stderr = run(tmp_path, "two", tokens=True, batch_size=4, accumulate=4, **PLAIN)
    assert code == 0, stderr
    whole, result = learn(toy, tmp_path / "one", batch_size=16)
    for rank in (0, 1):
        assert difference(whole, load_file(tmp_path / "two" / f"weights-{rank}.safetensors")) < 1e-12
    _, rows = json.loads((tmp_path / "two" / "rows.json").read_text())
    for row, wanted in zip(rows, untimed(result.rows), strict=True):
        assert row == pytest.approx(wanted, rel=1e-10)


@pytest.mark.slow
def test_alternating_objectives_reuse_one_batch(toy: Toy, tmp_path: Path) -> None:
    """And goes on in the midst of a cycle."""
    seen: list[tuple[str, ...]] = []

    class Watched(Tokens):
        def pretraining_losses(self, batch: Any, *, objectives: Any, **more: Any) -> dict[str, Loss]:
            if self.training:
                seen.append((*objectives, *batch.sample_ids))
            return super().pretraining_losses(batch, objectives=objectives, **more)

    def learn_turns(work: Path, **more: Any) -> tuple[Tokens, Any]:
        model = Watched(toy.tokenizer.vocab_size, FEATURE_DIM, len(CLASSES))
        turns = {"msg": 2.0, "mlm": 1.0}
        settings = {**PLAIN, "mix": "alternate", "reuse_batch": True, "batch_size": 16, "checkpoint_every_steps": 1}
        _, result = toy.fit(work, model, objectives=turns, **settings, **more)
        return model, result

    _, result = check_resume(learn_turns, tmp_path, 4, 8, 9, 11)
    assert result.steps == 2 * 3 * 3 and result.samples == 3 * 88
    assert [names[0] for names in seen[:6]] == ["mlm", "msg", "msg"] * 2
    assert seen[0][1:] == seen[1][1:] == seen[2][1:] != seen[3][1:]
    val = [row["val_loss"] for row in result.rows if "val_loss" in row]
    parts = [(2 * row["val_msg"] + row["val_mlm"]) / 3 for row in result.rows if "val_msg" in row]
    assert val == pytest.approx(parts)

    seen.clear()
    learn_turns(tmp_path / "several", accumulate=2)  # of an epoch's 3 batches one is left out
    assert len(seen) == 2 * 2 * 3
    assert seen[0][1:] == seen[2][1:] == seen[4][1:] != seen[1][1:]


def test_normalization_by_hand() -> None:
    def loss(total: float, count: int) -> Loss:
        value = torch.tensor(total, dtype=torch.float64, requires_grad=True)
        return Loss.of(value, count, a=value)

    first = WeightedLosses(losses={"x": loss(6.0, 3), "y": loss(8.0, 2)}, weights={"x": 1.0, "y": 0.5})
    second = WeightedLosses(losses={"x": loss(4.0, 2), "y": loss(0.0, 0)}, weights={"x": 1.0, "y": 0.5})
    window = [total_over_ranks(first), total_over_ranks(second)]
    assert float(mean_losses(window)["loss"]) == (6 + 4) / (3 + 2) + 0.5 * 8 / 2
    assert float(mean_losses(window)["a"]) == 8 / 2  # of the last loss that has a part of this name
    counts = {name: window[0].counts[name] + window[1].counts[name] for name in "xy"}
    for part in (first, second):
        normalize(part, counts).backward()
    assert [part.losses["x"].sum.grad.item() for part in (first, second)] == [1 / 5, 1 / 5]
    assert [part.losses["y"].sum.grad.item() for part in (first, second)] == [0.25, 0.25]
    nothing = Loss(sum=torch.zeros(()), count=0, parts={"b": Part(sum=torch.zeros(()), count=0)})
    assert {
        name: float(value) for name, value in mean_losses([total_over_ranks(WeightedLosses.of(nothing))]).items()
    } == {"loss": 0.0}
