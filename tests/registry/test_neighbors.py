"""Whether `vlp caption` uses the nearest-neighbor baseline is decided by what the gate reads of params.yaml."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from vlp_models.cli.predict import describe_neighbors
from vlp_models.params import GateParams, Params, load_params
from vlp_models.registry.promotion import judge
from vlp_models.registry.promotion.judge import find_better_neighbors
from vlp_models.registry.versions import CHALLENGER
from vlp_models.tasks.scoring import NEAREST

ROOT = Path(__file__).parents[2]


def configure(gate: GateParams | None = None, **tracking: Any) -> Params:
    params = load_params(ROOT / "params.yaml")
    promotion = dataclasses.replace(params.promotion, tasks={"captioning": gate or GateParams()})
    tracked = dataclasses.replace(params.tracking, **tracking)
    return dataclasses.replace(params, promotion=promotion, tracking=tracked)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (configure(metric={}), ("CIDEr", 15.0, "scenes")),
        (configure(metric={"captioning": "METEOR"}), None),
        (configure(GateParams(metric="CIDEr"), metric={"captioning": "METEOR"}), ("CIDEr", 15.0, "scenes")),
        (configure(metric={}, dataset={"captioning": "photos"}), None),
        (configure(GateParams(direction="lower"), metric={}), ("CIDEr", 15.0, "photos")),
    ],
)
def test_neighbors_are_compared_by_the_gates_metric_direction_and_dataset(
    params: Params, expected: tuple[str, float, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The challenger loses by CIDEr on scenes only.
    values = (("CIDEr", "scenes", 13.0), ("CIDEr", "photos", 16.0), ("METEOR", "scenes", 20.0))
    records = [
        {"metric": metric, "dataset": dataset, "split": "test", "value": value, "n": 9, "baselines": {NEAREST: 15.0}}
        for metric, dataset, value in values
    ]
    monkeypatch.setattr(judge, "read_scores", lambda client, version: records)
    monkeypatch.setattr(judge, "find_version_by_alias", lambda client, name, alias: alias == CHALLENGER or None)
    baseline = find_better_neighbors(params, client=None)  # type: ignore[arg-type]
    if expected is None:
        assert baseline is None
    else:
        metric, value, dataset = expected
        assert baseline is not None and (baseline.value, baseline.dataset) == (value, dataset)
        assert f"({metric} {value} on {dataset} test" in describe_neighbors(baseline, params)
