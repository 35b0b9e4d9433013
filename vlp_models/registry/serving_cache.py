"""The version that `vlp caption` and its companions apply, cached while the registry does not change.

MLflow's import takes longer than a prediction. A registry in a SQLite file changes only with that file, so an answer is
valid until the file changes: .work/registry/served.json holds the answers, with the state of the file before they were
read. A version's files may change alone, so a bundle is compared with its hash each time. A server, or files that are
not on this machine, are read every time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.common.io import stat_file, write_json
from vlp_models.common.workspace import project_root
from vlp_models.errors import VLPError
from vlp_models.params import Params, TrackingParams, to_plain
from vlp_models.registry.client import SQLITE, connect, model_name, store_errors, tracking_uri
from vlp_models.registry.promotion.gate import Baseline
from vlp_models.registry.promotion.judge import find_better_neighbors
from vlp_models.registry.versions import check_bundle, download_verified_bundle, is_on_this_machine, resolve_version

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


class ServingCache:
    """Answers of a project's registry, by request.

    The state of the database is read first: what changes during a lookup makes its answer an outdated one.
    """

    def __init__(self, params: TrackingParams, root: Path) -> None:
        self.file = project_root(root) / ".work" / "registry" / "served.json"
        # The database's address and numbers that change with it; empty if it is not a file.
        self._state: list[Any] = []
        uri = tracking_uri(params, root)
        if uri.startswith(SQLITE):
            database = uri.removeprefix(SQLITE).partition("?")[0]
            self._state = [uri]
            for suffix in ("", "-wal", "-journal"):  # SQLite keeps new changes next to the database
                try:
                    self._state.append(list(stat_file(Path(database + suffix).stat())))
                except OSError:
                    self._state.append([])

    def answers(self) -> dict[str, Any]:
        """Return request -> answer; empty after a change of the registry."""
        with suppress(OSError, ValueError, TypeError, KeyError):
            cached = json.loads(self.file.read_text(encoding="utf-8"))
            # The state is empty for a server, whose answers are never valid.
            if self._state and cached["database"] == self._state:
                return dict(cached["answers"])
        return {}

    def add(self, request: str, answer: Any) -> None:
        """Store an answer (plain data), unless the registry is not a file, or the project cannot be written."""
        # `answers` is empty if the registry has changed, so outdated answers are dropped here.
        if self._state:
            with suppress(OSError):
                self.file.parent.mkdir(parents=True, exist_ok=True)
                write_json(self.file, {"database": self._state, "answers": self.answers() | {request: answer}})


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
    cache = ServingCache(params, root)
    answer = cache.answers().get(request, {})
    with suppress(VLPError, KeyError, TypeError):  # files that changed: MLflow's answer below names the reason
        bundle, name = Path(answer["bundle"]), str(answer["version"])
        check_bundle(bundle, name, answer["content"])
        return bundle, name
    version = resolve_version(connect(params, root), params, request)
    return _open_version(cache, request, version)


def _open_version(cache: ServingCache, request: str, version: ModelVersion) -> tuple[Path, str]:
    bundle, name = download_verified_bundle(version), f"{version.name} version {version.version}"
    # A download is removed when the process ends, so its path must not be cached.
    if is_on_this_machine(version):
        cache.add(request, {"version": name, "bundle": str(bundle), "content": version.tags.get("content")})
    return bundle, name


def choose_neighbors(params: Params, root: Path) -> Baseline | None:
    """Return the nearest-neighbor baseline if captioning has no champion because its challenger is not better."""
    cache = ServingCache(params.tracking, root)
    # What the gate reads of params.yaml; the cache itself depends on the registry.
    tracking = [params.tracking.model_prefix, params.tracking.metric, params.tracking.dataset]
    settings = json.dumps([tracking, to_plain(params.promotion)], sort_keys=True)
    request = f"neighbors {hashlib.sha256(settings.encode()).hexdigest()[:16]}"
    with suppress(KeyError, TypeError):
        # A KeyError means no answer; None is an answer, too: there is no such baseline.
        answer = cache.answers()[request]
        return Baseline(**answer) if answer else None
    baseline = find_better_neighbors(params, connect(params.tracking, root))
    cache.add(request, None if baseline is None else vars(baseline))
    return baseline


def refresh_serving_cache(client: MlflowClient, params: TrackingParams, root: Path, tasks: Iterable[str]) -> None:
    """Look up what the commands apply for these tasks, right after it changed, while MLflow is imported anyway.

    What cannot be read is left out: the commands will name the reason. All other answers are dropped, since
    registering again may replace scores without a change of the database.
    """
    cache = ServingCache(params, root)
    cache.file.unlink(missing_ok=True)
    for task in tasks:
        request = model_name(params, task)
        with suppress(*store_errors(VLPError)):
            version = resolve_version(client, params, request)
            if is_on_this_machine(version):
                _open_version(cache, request, version)
