"""The version that `vlp caption` and its companions apply, remembered while the registry does not change.

MLflow's import takes longer than a prediction. A registry in a SQLite file changes only with that file, so what was
looked up in it stays true until the file does change: .work/registry/served.json holds the answers, with the state of
the file before they were read. Files of a version may change alone: bundles are compared with their hash, scores with
their state. A server, or files that are not on this machine, are read every time.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from vlp_models.common.io import stat_file, write_json
from vlp_models.common.workspace import project_root
from vlp_models.errors import VLPError
from vlp_models.params import Params, TrackingParams, to_plain
from vlp_models.registry.client import SQLITE, connect, mlflow_errors, model_name, store_errors, tracking_uri
from vlp_models.registry.evaluations import CURRENT_EVALUATION, EVALUATIONS, SCORES, get_run_id, read_scores
from vlp_models.registry.promotion.gate import Baseline, MetricSpec, check_baselines, find_baselines
from vlp_models.registry.versions import (
    CHALLENGER,
    CHAMPION,
    check_bundle,
    download_verified_bundle,
    find_served_version,
    find_version_by_alias,
    is_on_this_machine,
    resolve_version,
)
from vlp_models.tasks.judging import judging_of
from vlp_models.tasks.scoring import NEAREST

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

LOGS = ("-wal", "-journal")  # where SQLite keeps changes that are not in the database yet


class ServedVersions:
    """Answers of the registry of a project, by what was asked for.

    The state of the database is read first: what changes during a lookup makes its answer one of the past.
    """

    def __init__(self, params: TrackingParams, root: Path) -> None:
        uri = tracking_uri(params, root)
        self._file = project_root(root) / ".work" / "registry" / "served.json"
        self._state = _database_state(uri)

    def find(self, request: str) -> Any:
        """Return the remembered answer; None if it is missing, or the registry has changed."""
        return self._answers().get(request)

    def keep(self, request: str, answer: Any) -> None:
        """Remember an answer (plain data); nothing if the registry is no file, or the project cannot be written."""
        if self._state:
            with suppress(OSError):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                write_json(self._file, {"database": self._state, "answers": self._answers() | {request: answer}})

    def find_bundle(self, request: str) -> tuple[Path, str] | None:
        """Return the bundle of a remembered version and the version's name.

        None if it is not what was registered, for MLflow to explain.
        """
        answer = self.find(request)
        with suppress(VLPError, KeyError, TypeError):
            bundle, name = Path(answer["bundle"]), str(answer["version"])
            check_bundle(bundle, name, answer["content"])
            return bundle, name
        return None

    def open_bundle(self, request: str, version: ModelVersion) -> Path:
        """Return the verified bundle of a version, and remember it if its files are on this machine.

        Raises:
            DataError: the files are missing, damaged or not those that were registered.
        """
        bundle = download_verified_bundle(version)
        if is_on_this_machine(version):
            name = f"{version.name} version {version.version}"
            self.keep(request, {"version": name, "bundle": str(bundle), "content": version.tags.get("content")})
        return bundle

    def _answers(self) -> dict[str, Any]:
        with suppress(OSError, ValueError, TypeError, KeyError):
            kept = json.loads(self._file.read_text(encoding="utf-8"))
            if self._state and kept["database"] == self._state:
                return dict(kept["answers"])
        return {}


def open_served_bundle(params: TrackingParams, root: Path, request: str) -> tuple[Path, str]:
    """Return the verified bundle of a version and the version's name, such as `vlp-vqa version 3`.

    Needs no MLflow if the registry has not changed since the last time.

    Args:
        request: a registered model, whose champion is used (before the first promotion: its challenger), or a version
            such as `vlp-vqa/3` or `vlp-vqa@challenger`.

    Raises:
        DataError: there is no such version, or its files are missing, damaged or not those that were registered.
        TrackingError: MLflow does not answer.
    """
    served = ServedVersions(params, root)
    known = served.find_bundle(request)
    if known is not None:
        return known
    client = connect(params, root)
    by_name = "/" not in request and "@" not in request
    version = find_served_version(client, request) if by_name else resolve_version(client, params, request)
    return served.open_bundle(request, version), f"{version.name} version {version.version}"


def remember_served_version(client: MlflowClient, params: Params, root: Path, task: str) -> None:
    """Remember what the commands apply for a task now, right after it changed, while MLflow is imported anyway.

    Nothing if there is no such version, or its files cannot be read: the commands will say so.
    """
    name, served = model_name(params.tracking, task), ServedVersions(params.tracking, root)
    with suppress(*store_errors(VLPError)):
        version = find_served_version(client, name)
        if is_on_this_machine(version):
            served.open_bundle(name, version)


def _database_state(uri: str) -> list[Any]:
    """Return numbers that change with the database, after its address; empty if it is not a file."""
    if not uri.startswith(SQLITE):
        return []
    file = uri.removeprefix(SQLITE).partition("?")[0]
    states = [_stat(Path(file + suffix)) for suffix in ("", *LOGS)]
    return [uri, *states] if states[0] else []


def _stat(file: Path) -> list[int]:
    try:
        return list(stat_file(file.stat()))
    except OSError:
        return []


# ---- Captioning without a champion ----------------------------------------------------------------------------------


def find_better_neighbors(params: Params, root: Path) -> Baseline | None:
    """Return the nearest-neighbor baseline if captioning has no champion because its challenger is not better.

    None if there is a champion, nothing is registered, or the gate does not compare with baselines.
    """
    served = ServedVersions(params.tracking, root)
    settings = json.dumps([params.tracking.model_prefix, to_plain(params.promotion)], sort_keys=True)
    request = f"neighbors {hashlib.sha256(settings.encode()).hexdigest()[:16]}"
    known = served.find(request)
    with suppress(KeyError, TypeError):
        if not known["scores"] or _stat(Path(known["scores"])) == known["state"]:
            return Baseline(**known["baseline"]) if known["baseline"] else None
    baseline, scores, state = _compare_neighbors(params, root)
    if scores is None or state:  # scores on another machine may change unnoticed
        plain = None if baseline is None else vars(baseline)
        served.keep(request, {"baseline": plain, "scores": str(scores or ""), "state": state})
    return baseline


def _compare_neighbors(params: Params, root: Path) -> tuple[Baseline | None, Path | None, list[int]]:
    """Return the baseline, the file of scores that decided (None: only the registry did), and its state before."""
    rule = params.promotion.gate("captioning")
    if not rule.beat_baselines:
        return None, None, []
    client, name = connect(params.tracking, root), model_name(params.tracking, "captioning")
    with mlflow_errors(params):
        if find_version_by_alias(client, name, CHAMPION) is not None:
            return None, None, []
        version = find_version_by_alias(client, name, CHALLENGER)
        if version is None:
            return None, None, []
        folder = urlsplit(client.get_run(get_run_id(version)).info.artifact_uri)
        file = Path(unquote(folder.path)) if folder.scheme in ("", "file") else Path()
        scores = file / EVALUATIONS / version.tags.get(CURRENT_EVALUATION, "") / SCORES
        state = _stat(scores)
        records = read_scores(client, version)
    spec = MetricSpec(metric=rule.metric or judging_of("captioning").metric, split=params.promotion.split)
    baselines = find_baselines(records, spec, [NEAREST])
    lost = (baseline for baseline in baselines if check_baselines([baseline], rule, spec).reasons)
    return next(lost, None), scores, state
