"""What a training computes in: as asked, as the machine is good at it, and to its end as it began."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from toy_dataset import TRAINER, KilledAt, Toy, same_weights

from vlp_models.training import distributed as precision
from vlp_models.training.distributed import choose_precision


def multiply_bfloat16(patch: pytest.MonkeyPatch, native: bool) -> None:
    """A CPU that does, or does not."""
    patch.setattr(precision, "_cpu_flags", lambda: frozenset({"avx512_bf16"} if native else {"avx512f"}))


@pytest.mark.parametrize("native", [True, False])
def test_a_cpu_has_bfloat16_where_it_is_asked_for_and_native(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
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


@pytest.mark.parametrize("native", [True, False])
def test_resumed_on_another_machine_a_run_ends_in_what_it_began_with(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], native: bool
) -> None:
    settings = {"accelerator": "cpu", "precision": "bf16-where-native"}
    began, other = ("bf16-mixed", "32-true") if native else ("32-true", "bf16-mixed")
    multiply_bfloat16(monkeypatch, native)
    whole, result = toy.fit(tmp_path / "whole", **settings)
    assert result.precision == began
    assert capsys.readouterr().err.count(f"toy: in {began}, which this machine is good at") == 1
    with pytest.raises(InterruptedError):
        toy.fit(tmp_path / "moved", tracker=KilledAt(tmp_path / "moved", 4), **settings)
    multiply_bfloat16(monkeypatch, not native)
    resumed, result = toy.fit(tmp_path / "moved", **settings)
    assert result.resumed_from == 4 and result.precision == began
    assert f"toy: in {began}, as it began; begun on this machine it would be {other}" in capsys.readouterr().err
    assert same_weights(whole, resumed)
    anew, _ = toy.fit(tmp_path / "anew", **settings)
    assert not same_weights(whole, anew), "the precision shows in the weights"
