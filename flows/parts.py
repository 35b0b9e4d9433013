"""The parts of the unattended run, in order: what each one runs, and when it need not. Plain data, made from params."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from vlp_models.params import Params, to_plain
from vlp_models.registry.receipts import find_lost_versions, is_report_outdated

NO_DROP = "no drop folder"
REFUSED, DRIFTED = 3, 4  # exit codes of `vlp promote` and `vlp drift`


@dataclass(frozen=True, kw_only=True)
class Part:
    """Either DVC targets or a `vlp` command.

    kind: its name in `flow.timeout_hours`. gpu: takes a GPU slot when stale. timeout: seconds; 0: none.
    refusal: the exit code that means "no", an answer and not a failure.
    evidence: what the command's answer depends on; while that stays the same it is not asked again. An empty text:
        always ask. None: there is nothing to ask about.
    lost: of a stage whose result lies elsewhere: what of it is gone there, which DVC can't see; it then runs again, and
        whoever was asked about it is asked anew.
    again: whether it must run although DVC finds it up to date: what it shows has changed where DVC does not look.
    nothing: why there may be nothing to ask about. skip: why there is nothing to do at all; empty: there is.
    """

    name: str
    kind: str
    targets: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    gpu: bool = False
    timeout: float = 0
    refusal: int | None = None
    evidence: Callable[[Path], str | None] = lambda root: ""
    lost: Callable[[Path], list[str]] = lambda root: []
    again: Callable[[Path], bool] = lambda root: False
    nothing: str = "no registered model"
    skip: str = ""


def retrain_parts(params: Params) -> list[Part]:
    """New data to promoted models."""
    training = training_parts(params, list(params.finetune))
    register = Part(
        name="register", kind="register", targets=("register",), lost=partial(find_lost_versions, params.tracking)
    )
    report = Part(
        name="report", kind="report", targets=("report",), again=lambda root: is_report_outdated(root / "reports")
    )
    return [
        *_new_data(params),
        *training,
        _timed(register, params),
        *promotion_parts(params),
        _timed(report, params),
    ]


def training_parts(params: Params, runs: list[str]) -> list[Part]:
    """Raw data to evaluated models, for the given fine-tuning runs and the pretrainings that they start from."""
    chains = [params.chain(f"finetune/{run}") for run in runs]
    wanted = {checkpoint for chain in chains for checkpoint in chain}
    if set(runs) == set(params.finetune):  # all of params.yaml, so also a pretraining that nothing starts from
        wanted |= {f"pretrain/{name}" for name in params.pretrain}
    tuned = [name for name in _in_order(params) if f"finetune/{name}" in wanted]
    parts = [
        Part(name="validate", kind="validate", targets=("validate",)),
        Part(name="features", kind="features", targets=("shards", "tokenizer"), gpu=True),
        *[_pretraining(params, name) for name in params.pretrain if f"pretrain/{name}" in wanted],
        *[Part(name=f"finetune {run}", kind="finetune", targets=(f"finetune@{run}",), gpu=True) for run in tuned],
        Part(name="evaluate", kind="evaluate", targets=tuple(f"evaluate@{run}" for run in runs), gpu=True),
    ]
    return [_timed(part, params) for part in parts]


def _pretraining(params: Params, name: str) -> Part:
    """Two-pass scheduled sampling is a part of its own kind, to be seen as such."""
    single = params.pretrain[name].scheduled_sampling.scheme == "none"
    kind, title = ("pretrain", "pretrain") if single else ("scheduled_sampling", "scheduled sampling")
    return Part(name=f"{title} {name}", kind=kind, targets=(f"pretrain@{name}",), gpu=True)


def _in_order(params: Params) -> list[str]:
    """Fine-tuning runs, each after those that it starts from."""
    return sorted(params.finetune, key=lambda name: len(params.chain(f"finetune/{name}")))


def promotion_parts(params: Params) -> list[Part]:
    """One a task that has a registered model."""
    tasks = sorted({run.task for run in params.finetune.values() if not run.blank_images})
    return [replace(promotion_part(params, task), evidence=_promotion_evidence(params, task)) for task in tasks]


def promotion_part(params: Params, task: str) -> Part:
    part = Part(name=f"promote {task}", kind="promote", command=("promote", task), refusal=REFUSED)
    return _timed(part, params)


def _new_data(params: Params) -> list[Part]:
    section = getattr(params, "ingest", None)
    inbox, fetch = getattr(section, "inbox", ""), getattr(section, "fetch", [])
    skip = "" if inbox or fetch else NO_DROP

    def folder(root: Path) -> str | None:
        return None if inbox and not fetch and not (root / inbox).exists() else ""

    ingest = Part(name="ingest", kind="ingest", command=("ingest",), evidence=folder, nothing=NO_DROP, skip=skip)
    drift = _drift_evidence(params)
    measure = Part(name="drift", kind="drift", command=("drift",), evidence=drift, nothing="no new data", skip=skip)
    return [_timed(ingest, params), _timed(measure, params)]


def _timed(part: Part, params: Params) -> Part:
    hours = params.flow.timeout_hours.get(part.kind, 0)
    return replace(part, timeout=hours * 3600)


def _drift_evidence(params: Params) -> Callable[[Path], str | None]:
    """A refused drift has no record, so it is asked again even when no new data came since."""

    def evidence(root: Path) -> str | None:
        if not (root / "reports" / "ingest.json").exists():
            return None
        content = _read(root / "reports" / "ingest.json").get("content")
        return _hash(content, _section(params, "drift")) if content else ""

    return evidence


def _promotion_evidence(params: Params, task: str) -> Callable[[Path], str | None]:
    """The registered version, the gate and the scores: a promotion that was rolled back is not made again by itself."""

    def evidence(root: Path) -> str | None:
        registered = _read(root / "reports" / "registered.json").get(task)
        if registered is None:
            return None
        runs = [name for name, run in params.finetune.items() if run.task == task]
        scores = [_digest(root / "reports" / "eval" / run / "scores.json") for run in runs]
        return _hash(registered, _section(params, "promotion"), to_plain(params.tracking), scores)

    return evidence


def _section(params: Params, name: str) -> Any:
    return to_plain(getattr(params, name, None))


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def _hash(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
