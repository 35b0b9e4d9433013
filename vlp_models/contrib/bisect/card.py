"""Lines of a model card: what differs between a version and the champion of its task when it is registered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vlp_models.common.io import hash_path
from vlp_models.common.packages import recorded_packages
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.bisect.differences import Difference, Origin, find_cached, find_differences, read_origin
from vlp_models.contrib.bisect.points import require_measurement
from vlp_models.contrib.bisect.slices import SliceGain, compare_slices, describe_slices
from vlp_models.errors import DataError, VLPError, first_line
from vlp_models.metrics.score import ItemScores
from vlp_models.params import Params
from vlp_models.params.load import read_yaml
from vlp_models.pipeline.dvc.lock_file import LOCK_FILE, read_stages
from vlp_models.registry.client import store_errors
from vlp_models.registry.evaluations import ITEMS, read_evaluations
from vlp_models.registry.promotion.gate import measure
from vlp_models.registry.promotion.gate_rule import gate_rule, gate_spec
from vlp_models.tasks.scoring import read_item_scores

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

NAMED = 3  # params, and code files, that are named; of more, the number is stated
SINCE, SLICES = "since the champion", "slices since the champion"


def card_fact(params: Params, root: Path, run: str) -> dict[str, str]:
    """Return how the run differs from the task's champion, and on which slices.

    Nothing without a champion, and if it is this run's present checkpoint.
    """
    from vlp_models.registry.client import connect, model_name
    from vlp_models.registry.versions import CHAMPION, find_version_by_alias

    workspace, task = Workspace(root), params.finetune[run].task
    client = connect(params.tracking, root)
    champion = find_version_by_alias(client, model_name(params.tracking, task), CHAMPION)
    # The tag starts with the 64 hexadecimal digits of the checkpoint's hash.
    if champion is None or champion.tags.get("weights", "")[:64] == hash_path(workspace.checkpoint(f"finetune/{run}")):
        return {}
    now = Origin(
        target=f"evaluate@{run}",
        stages=read_stages(root / LOCK_FILE) or {},
        params=read_yaml(root / "params.yaml"),
        packages=recorded_packages(root),
    )

    def differences() -> str:
        return summarize(find_differences(read_origin(client, champion), now, find_cached(root)))

    def slices() -> str:
        scores = read_item_scores(workspace.evaluation(run) / ITEMS)
        return describe_slices(slices_since(params, client, task, scores, champion))

    facts = {f"{SINCE} (version {champion.version})": differences, f"{SLICES} (version {champion.version})": slices}
    return {name: text for name, describe in facts.items() if (text := _unless_missing(describe))}


def _unless_missing(describe: Callable[[], str]) -> str:
    """Return the description; why it is unknown, if an old champion's data or scores have been deleted."""
    try:
        return describe()
    except store_errors(VLPError) as error:
        return f"unknown: {first_line(error)}"


def slices_since(
    params: Params, client: MlflowClient, task: str, scores: Sequence[ItemScores], earlier: ModelVersion
) -> list[SliceGain]:
    """Return the gain by slice since an earlier version, by the metric of the gate.

    Raises:
        DataError: the earlier version has no scores on this test, or one side lacks the metric.
    """
    rule, spec = gate_rule(params, task), gate_spec(params, task)
    after = require_measurement(scores, spec, "the run")
    # The gate may have evaluated the earlier version on today's test as well.
    measured = [measure(stored, spec) for stored in read_evaluations(client, earlier)]
    usable = [m for m in measured if not isinstance(m, str)]
    before = next((m for m in usable if m.test == after.test), None)
    if before is None:
        raise DataError(f"version {earlier.version} has no scores on this test")
    return compare_slices(after, before, params.promotion, sign=-1.0 if rule.direction == "lower" else 1.0)


def summarize(differences: Sequence[Difference]) -> str:
    """Return what may have changed the scores in a sentence: rows, params, code files, packages."""
    read = [difference for difference in differences if difference.stages]
    return "; ".join(_parts(read)) or "nothing that the run reads"


def _parts(differences: Sequence[Difference]) -> Iterator[str]:
    of_kind = {kind: [d for d in differences if d.kind == kind] for kind in ("data", "params", "code", "packages")}
    yield from (f"{d.name}: {d.before} -> {d.after}" for d in of_kind["data"])
    for kind, noun in (("params", "params"), ("code", "code files"), ("packages", "packages")):
        changed = of_kind[kind]
        if 0 < len(changed) <= NAMED:
            yield from (f"{d.name}: {d.before} -> {d.after}" for d in changed)
        elif changed:
            yield f"{len(changed)} {noun}"
