"""The parts of the unattended run, in order: what each runs, and when it is skipped. Plain data, made from params."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from vlp_models.common.io import read_json_or_none
from vlp_models.common.plugins import Table, import_target
from vlp_models.common.workspace import Workspace
from vlp_models.errors import DataError, MissingToolError, TrackingError
from vlp_models.params import Params, to_plain
from vlp_models.params.operations import PARTS
from vlp_models.pipeline.dvc.graph import STAGES
from vlp_models.registry.receipts import find_lost_versions, is_report_outdated

NO_INBOX = "no inbox"
REFUSED, DRIFTED = 3, 4  # exit codes of `vlp promote` and `vlp drift`
NEW_DATA_PARTS = Table("new_data_parts", {})  # part -> `module:function` that returns it, called with the params
LAST_PARTS = Table("last_parts", {})  # name -> `module:function` that returns a list of parts, called with the params


@dataclass(frozen=True, kw_only=True)
class Part:
    """One step of a run: either DVC targets or a `vlp` command.

    kind: its name in `flow.timeout_hours`.
    gpu: takes a GPU slot when stale.
    refusal: exit code that means "refused", an answer and not a failure.
    evidence: hash of the inputs of the command's answer; the command is not repeated while it stays the same. An
        empty string: always run it. None: there is nothing to run it on.
    lost: for a stage whose result is stored outside of the workspace: the entries that are missing there. DVC cannot
        detect this. The stage runs again, and so do the commands that depend on it.
    outdated: whether the part must run although DVC finds it up to date.
    nothing: why there may be nothing to run a command on.
    skip: why the part is skipped altogether; empty: it is not.
    """

    name: str
    kind: str
    targets: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    gpu: bool = False
    refusal: int | None = None
    evidence: Callable[[Path], str | None] = lambda root: ""
    lost: Callable[[Path], list[str]] = lambda root: []
    outdated: Callable[[Path], bool] = lambda root: False
    nothing: str = "no registered model"
    skip: str = ""


def retrain_parts(params: Params) -> list[Part]:
    """Return all parts, from new data to promoted models."""
    if params.flow.commit and "commit" not in LAST_PARTS:
        raise MissingToolError("params.yaml: `flow.commit` needs vlp_models/contrib/commit, which is not here")
    lost = partial(find_lost_versions, params.tracking)
    register = Part(name="register", kind="register", targets=("register",), lost=lost)
    report = Part(
        name="report", kind="report", targets=("report",), outdated=lambda root: is_report_outdated(root / "reports")
    )
    # Text-only baselines are not registered, so there is nothing to promote.
    tasks = sorted({run.task for run in params.finetune.values() if not run.blank_images})
    # Data, training and scores, registration, promotion, and last the report, which shows the decisions.
    return [
        *_new_data_parts(params),
        *training_parts(params, list(params.finetune)),
        register,
        # With evidence: judged only if something has changed since; the flow `promote` always judges.
        *(replace(promotion_part(task), evidence=partial(_promotion_evidence, params, task)) for task in tasks),
        report,
        *(part for target in LAST_PARTS.values() for part in import_target(target)(params)),
    ]


def training_parts(params: Params, runs: list[str]) -> list[Part]:
    """Return the parts from raw data to scores for some fine-tuning runs, with the pretrainings they start from."""
    checkpoints = {checkpoint for run in runs for checkpoint in params.chain(f"finetune/{run}")}
    if set(runs) == set(params.finetune):  # everything, so also a pretraining that no run starts from
        checkpoints |= {f"pretrain/{name}" for name in params.pretrain}
    parts = [
        Part(name="validate", kind="validate", targets=("validate",)),
        Part(name="features", kind="features", targets=("shards", "tokenizer"), gpu=True),
    ]
    for name, run in params.pretrain.items():
        if f"pretrain/{name}" in checkpoints:
            # Scheduled sampling has a kind of its own: it takes longer.
            plain = run.scheduled_sampling.scheme == "none"
            kind, title = ("pretrain", "pretrain") if plain else ("scheduled_sampling", "scheduled sampling")
            targets = (f"pretrain@{name}", *_statistics(params, f"pretrain/{name}"))
            parts.append(Part(name=f"{title} {name}", kind=kind, targets=targets, gpu=True))
    # Each run after those it starts from.
    # A run's chain is longer than that of every run it starts from.
    for name in sorted(params.finetune, key=lambda name: len(params.chain(f"finetune/{name}"))):
        if f"finetune/{name}" in checkpoints:
            targets = (f"finetune@{name}", *_statistics(params, f"finetune/{name}"))
            parts.append(Part(name=f"finetune {name}", kind="finetune", targets=targets, gpu=True))
    evaluations = tuple(f"evaluate@{run}" for run in runs)
    parts.append(Part(name="evaluate", kind="evaluate", targets=evaluations, gpu=True))
    return parts


def _statistics(params: Params, checkpoint: str) -> tuple[str, ...]:
    """Return the stage that describes a training's data, for the next drift, since no other stage depends on it."""
    has_statistics = "training_stats" in STAGES and checkpoint == params.statistics_run()
    return ("training_stats",) if has_statistics else ()


def promotion_part(task: str) -> Part:
    """Return the part that passes a task's challenger through the gate, even if it was judged before."""
    return Part(name=f"promote {task}", kind="promote", command=("promote", task), refusal=REFUSED)


def _new_data_parts(params: Params) -> list[Part]:
    """Return the parts that ingest and examine new data (contrib/ingest, contrib/drift), in the order of `PARTS`."""
    skip = "" if params.ingest.inbox or params.ingest.fetch else NO_INBOX
    targets = sorted(NEW_DATA_PARTS.items(), key=lambda item: PARTS.index(item[0]))
    return [replace(import_target(target)(params), skip=skip) for _, target in targets]


def _promotion_evidence(params: Params, task: str, root: Path) -> str | None:
    """Return the hash of the registered version, the gate's settings and the scores.

    So a promotion that was rolled back is not repeated on its own. An empty string if MLflow's aliases do not follow
    the ledger, after a kill or in a registry restored from a backup: `vlp promote` moves them.
    """
    from vlp_models.pipeline.promotion_commands import aliases_are_behind

    registered = read_record(root / "reports" / "registered.json").get(task)
    if registered is None:
        return None
    try:
        if aliases_are_behind(params, Workspace(root), task):
            return ""
    except TrackingError:  # MLflow does not answer: nothing can be moved
        pass
    except DataError:  # a damaged ledger, which `vlp promote` reports
        return ""
    # A run without scores counts as well: its first scores change the hash.
    runs = [name for name, run in params.finetune.items() if run.task == task]
    files = [root / "reports" / "eval" / name / "scores.json" for name in runs]
    scores = [hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else "" for file in files]
    # Other lines of its card, such as costs, are no reason to judge a version again.
    judged = [{name: value for name, value in receipt.items() if name != "facts"} for receipt in registered]
    return hash_values(judged, to_plain(params.promotion), to_plain(params.tracking), scores)


def read_record(path: Path) -> dict[str, Any]:
    content = read_json_or_none(path)
    return content if isinstance(content, dict) else {}


def hash_values(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
