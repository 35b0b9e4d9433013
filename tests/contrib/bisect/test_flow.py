"""The part of the unattended flow that runs `vlp bisect`: if it is on, after a refusal with something to explain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from vlp_models.contrib.bisect.flow import bisect_parts, find_evidence
from vlp_models.flows.parts import retrain_parts
from vlp_models.params import Params, load_params

ROOT = Path(__file__).parents[3]
REFUSED = {
    "action": "refused",
    "run": "tden-vqa",
    "champion_run": "tden-vqa",
    "champion": 1,
    "version": 2,
    "numbers": {"gain": -1.2},
}


def load_with(tmp_path: Path, **bisect: Any) -> Params:
    raw = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    raw["bisect"] |= bisect
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(raw, sort_keys=False), encoding="utf-8")
    return load_params(tmp_path / "params.yaml")


def test_the_flow_has_the_part_of_each_task_only_if_it_is_on(tmp_path: Path) -> None:
    assert bisect_parts(load_with(tmp_path)) == []
    params = load_with(tmp_path, hours=1.5)
    names = [part.name for part in retrain_parts(params)]
    assert names[names.index("report") + 1 :][:3] == ["bisect captioning", "bisect vqa", "report with causes"]
    part = bisect_parts(params)[1]
    options = ("--budget", "1.5h", "--seeds", "5")
    assert part.command == ("bisect", "vqa@champion", "vqa@challenger", *options)


def test_it_runs_once_after_a_refusal_of_a_lower_score_of_the_same_run(tmp_path: Path) -> None:
    file = tmp_path / "reports" / "promotion" / "vqa.json"
    file.parent.mkdir(parents=True)
    assert find_evidence("vqa", tmp_path) is None
    registered = tmp_path / "reports" / "registered.json"
    evidence = []
    for version in (2, 3):
        file.write_text(json.dumps(REFUSED | {"version": version}))
        # The one that was refused is no longer the challenger, or not yet.
        registered.write_text(json.dumps({"vqa": [{"version": 5 - version, "challenger": True}]}))
        assert find_evidence("vqa", tmp_path) is None
        registered.write_text(json.dumps({"vqa": [{"version": version, "challenger": True}]}))
        evidence.append(find_evidence("vqa", tmp_path))
    assert all(evidence) and evidence[0] != evidence[1]
    others: list[dict[str, Any]] = [{"action": "promoted"}, {"run": "vlmo-vqa"}, {"numbers": {"gain": 0.3}}]
    for other in [*others, {"numbers": {}}]:
        file.write_text(json.dumps(REFUSED | {"version": 3} | other))
        assert find_evidence("vqa", tmp_path) is None, other
