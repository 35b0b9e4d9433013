"""What a training computes in: as asked, as the machine is good at it, and to its end as it began."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from toy_dataset import TRAINER, KilledAt, Toy, same_weights

from vlp_models.common import device
from vlp_models.data.inputs import ModelInputs, RegionInput
from vlp_models.data.pixels import PixelInput
from vlp_models.params import TrainerParams
from vlp_models.training import distributed
from vlp_models.training.distributed import SMALL_MODEL, choose_precision, keep_threads, set_threads


def multiply_bfloat16(patch: pytest.MonkeyPatch, native: bool) -> None:
    """A CPU that does, or does not."""
    patch.setattr(device, "cpu_vendor", lambda: "GenuineIntel")
    patch.setattr(device, "cpu_flags", lambda: frozenset({"amx_bf16"} if native else {"avx512_bf16"}))


@pytest.mark.parametrize("native", [True, False])
def test_bf16_where_native_needs_hardware_support(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    multiply_bfloat16(monkeypatch, native)
    chosen = {
        asked: choose_precision(replace(TRAINER, accelerator="cpu", precision=asked))
        for asked in ("auto", "bf16-where-native", "32-true", "bf16-mixed")
    }
    assert chosen == {
        "auto": "32-true",
        "bf16-where-native": "bf16-mixed" if native else "32-true",
        "32-true": "32-true",
        "bf16-mixed": "bf16-mixed",
    }


@pytest.mark.slow
@pytest.mark.parametrize("native", [True, False])
def test_resumed_run_keeps_its_precision_on_another_machine(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], native: bool
) -> None:
    settings = {"accelerator": "cpu", "precision": "bf16-where-native"}
    began, other = ("bf16-mixed", "32-true") if native else ("32-true", "bf16-mixed")
    multiply_bfloat16(monkeypatch, native)
    whole, result = toy.fit(tmp_path / "whole", **settings)
    assert result.precision == began
    assert capsys.readouterr().err.count(f"toy: precision {began}, native on this machine") == 1
    with pytest.raises(InterruptedError):
        toy.fit(tmp_path / "moved", tracker=KilledAt(tmp_path / "moved", 4), **settings)
    multiply_bfloat16(monkeypatch, not native)
    resumed, result = toy.fit(tmp_path / "moved", **settings)
    assert result.resumed_from == 4 and result.precision == began
    assert (
        f"toy: keeping precision {began} from the start of the run (this machine would use {other})"
        in capsys.readouterr().err
    )
    assert same_weights(whole, resumed)
    fresh, _ = toy.fit(tmp_path / "fresh", **settings)
    assert not same_weights(whole, fresh), "the precision shows in the weights"


REGIONS, PIXELS = ModelInputs(image=RegionInput()), ModelInputs(image=PixelInput(height=8, width=8))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def model(inputs: ModelInputs | None, parameters: int) -> nn.Module:
    """Inside of a task's, as in a fine-tuning."""
    own = nn.Linear(parameters, 1, bias=False, device="meta")
    if inputs is not None:
        own.inputs = inputs  # type: ignore[assignment]
    return nn.ModuleDict({"model": own})


@pytest.mark.parametrize(
    ("inputs", "parameters", "asked", "expected"),
    [
        (REGIONS, SMALL_MODEL - 1, 0, 1),
        (ModelInputs(image=None), SMALL_MODEL - 1, 0, 1),
        (REGIONS, SMALL_MODEL - 1, 2, 2),
        (REGIONS, SMALL_MODEL, 0, 3),
        (PIXELS, 10, 0, 3),
        (None, 10, 0, 3),
    ],
)
def test_number_of_threads(inputs: ModelInputs | None, parameters: int, asked: int, expected: int) -> None:
    set_threads(model(inputs, parameters), TrainerParams(accelerator="cpu", torch_threads=asked))
    assert torch.get_num_threads() == expected


@pytest.mark.parametrize(
    ("saved", "asked", "processors", "expected"), [(1, 0, 3, 1), (2, 0, 3, 2), (1, 3, 3, 3), (8, 0, 3, 3)]
)
def test_a_resumed_run_keeps_its_threads(
    monkeypatch: pytest.MonkeyPatch, saved: int, asked: int, processors: int, expected: int
) -> None:
    """Such as those of one of two parallel fine-tunings, if the other one has finished since."""
    monkeypatch.setattr(distributed, "cpu_count", lambda: processors)
    keep_threads(saved, TrainerParams(accelerator="cpu", torch_threads=asked), "toy")
    assert torch.get_num_threads() == expected


def test_a_killed_runs_threads_are_in_its_resume_point(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlp_models.training.run.set_threads", lambda *_: None)  # one for a toy
    torch.set_num_threads(1)
    settings = {"max_steps": 6, "checkpoint_every_steps": 3, "torch_threads": 0}
    with pytest.raises(InterruptedError):
        toy.fit(tmp_path, tracker=KilledAt(tmp_path, 3), **settings)
    torch.set_num_threads(2)
    toy.fit(tmp_path, **settings)
    assert torch.get_num_threads() == 1


def test_a_larger_model_explains_its_one_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(distributed, "is_portable", lambda: True)
    monkeypatch.setattr(distributed, "cpu_count", lambda: 8)
    with caplog.at_level("INFO", logger=distributed.logger.name):
        set_threads(model(REGIONS, 10), TrainerParams(accelerator="cpu"))
        assert not caplog.messages
        set_threads(model(PIXELS, 10), TrainerParams(accelerator="cpu", devices=2))
    assert "2 of this machine's 8 processors train" in caplog.text
