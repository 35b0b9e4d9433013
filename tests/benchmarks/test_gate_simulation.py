"""benchmarks/gate.py: the gate keeps its error where gains are skewed; an interrupted run goes on."""

from __future__ import annotations

import sys
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gate
import gate_decisions
import gate_scenarios

# Gains of equals, as skewed as real ones: a bootstrap with sign flips promotes in 6 to 15% of them.
SKEWED = (
    "exponential, 50",
    "lognormal, 50",
    "rare, 50",
    "rare ties, 50",
    "pope_f1.csv, reversed, 50",
    "size, 50",
    "pareto sizes, 50",
)


class InProcess(Executor):
    """Runs what is submitted at once."""

    def __init__(self) -> None:
        self.calls = 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.calls += 1
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class InterruptedRecords(gate.Records):
    """Ends the run after some records."""

    def __init__(self, path: Path, limit: int) -> None:
        super().__init__(path)
        self.limit = len(self.records) + limit

    def add(self, key: str, value: Any) -> None:
        super().add(key, value)
        if len(self.records) == self.limit:
            raise KeyboardInterrupt


def test_an_interrupted_run_continues_to_equal_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "BATCH", 20)
    names, path = ["exponential, 25", "rare, 50"], tmp_path / "parts.jsonl"

    def simulate(pool: Executor, records: gate.Records) -> list[dict[str, Any]]:
        return list(gate.run_simulation(names, 100, 1, pool, records))

    whole = simulate(first := InProcess(), gate.Records(tmp_path / "whole.jsonl"))
    assert first.calls == 2 + 2 * (5 + 1 + 1)  # setups, and batches of each run
    for limit in (1, 4, 6):  # ends at a setup, in the first scenario and in the second
        with pytest.raises(KeyboardInterrupt):
            simulate(InProcess(), InterruptedRecords(path, limit))
        with path.open("a") as file:
            file.write('["cut o')
    assert simulate(rest := InProcess(), gate.Records(path)) == whole and rest.calls == first.calls - 11
    assert simulate(none := InProcess(), gate.Records(path)) == whole and none.calls == 0


@pytest.mark.parametrize("name", gate_scenarios.SCENARIOS)
def test_equals_have_no_gain_over_many_items(name: str) -> None:
    scenario = gate_scenarios.SCENARIOS[name]
    if scenario.candidates > 1 or scenario.is_limit:
        return  # the best of several looks better than it is; a loss that no test has
    gains = np.concatenate(
        [gate_scenarios.draw(scenario, np.random.default_rng([2, batch]), 0.0, 100).gains() for batch in range(2)]
    )
    assert abs(gains.mean()) < 5 * gains.std() / np.sqrt(len(gains)), name


@pytest.mark.slow
@pytest.mark.parametrize("name", SKEWED)
def test_false_promotions_stay_within_the_error(name: str) -> None:
    """2,000 comparisons between equals of each; `make gate` has more of both."""
    setup = gate_decisions.Setup(critical=0.0, middle=1.0, betters=[0.0], gains=[0.0], deviation=0.0)
    counts = [gate_decisions.simulate(name, 11, "equal", batch, 500, 0.0, 0.0, setup, "") for batch in range(4)]
    percent = 100 * sum(count["promoted"]["gate, shown"] for count in counts) / 2000
    # 5.5, and two standard errors of 2,000 comparisons
    assert percent <= 5.5 + 200 * np.sqrt(0.05 * 0.95 / 2000), name
