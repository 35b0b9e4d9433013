"""`vlp lineage VERSION --since EARLIER`: print what differs between two registered versions, and their scores."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.bisect.answers import read_answer
from vlp_models.contrib.bisect.card import slices_since
from vlp_models.contrib.bisect.differences import find_cached, find_differences, format_differences, read_origin
from vlp_models.contrib.bisect.slices import SliceGain
from vlp_models.errors import DataError
from vlp_models.params import Params
from vlp_models.registry.client import connect, mlflow_errors
from vlp_models.registry.evaluations import read_latest_evaluation, read_scores
from vlp_models.registry.promotion.gate_rule import MetricSpec, gate_spec
from vlp_models.registry.versions import resolve_version


def print_differences(params: Params, workspace: Workspace, before: str, after: str, *, as_json: bool) -> None:
    """Print what differs between two registered versions, and their scores."""
    with mlflow_errors(params):
        client = connect(params.tracking, workspace.root)
        earlier, later = versions = [resolve_version(client, params.tracking, name) for name in (before, after)]
        if earlier.version == later.version:
            raise DataError(f"{before} and {after} are both version {later.version}")
        old, new = (read_origin(client, version) for version in versions)
        task = str(new.params["finetune"][new.target.partition("@")[2]]["task"])
        spec = gate_spec(params, task)
        scores = [_gate_scores(spec, read_scores(client, version)) for version in versions]
        slices: list[SliceGain] = []
        reason = ""
        try:
            slices = slices_since(params, client, task, read_latest_evaluation(client, later), earlier)
        except DataError as error:
            reason = str(error)
    differences = find_differences(old, new, find_cached(workspace.root))
    names = [f"{version.name}/{version.version}" for version in versions]
    cause = read_answer(later, names[0])
    if as_json:
        record = {"before": names[0], "after": names[1], "differences": [asdict(d) for d in differences]}
        record |= {"scores": scores, "metric": spec.metric, "slices": [asdict(gain) for gain in slices], "cause": cause}
        print(json.dumps(record, indent=2, ensure_ascii=False))
        return
    print(f"{names[1]} since {names[0]}")
    for key, value in scores[1].items():
        if key in scores[0]:
            print(f"score    {key}: {scores[0][key]:z.2f} -> {value:z.2f}")
    if slices:
        print(f"slices   {spec.metric}, with 95% intervals for all slices at once, over test images")
    for gain in slices:
        print(f"slice    {gain.change}: {gain}")
    if reason:
        print(f"slices   unknown: {reason}")
    if cause:
        print(f"cause    {cause}  (vlp bisect, trained again with other seeds)")
    print("\n".join(format_differences(differences)))


def _gate_scores(spec: MetricSpec, scores: list[dict[str, Any]]) -> dict[str, float]:
    """Return dataset and metric -> score, of the metric and split that the gate judges."""
    return {
        f"{score['dataset']} {score['split']} {score['metric']}": score["value"]
        for score in scores
        if (score["metric"], score["split"]) == (spec.metric, spec.split) and score["value"] is not None
    }
