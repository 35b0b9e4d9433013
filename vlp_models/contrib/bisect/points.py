"""A point to compare: a registered version, a commit of the project, or a run bundle of `vlp pack`.

Each has a dvc.lock and a params.yaml.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vlp_models.common.packages import FOLDER as PACKAGES
from vlp_models.common.plugins import PACKAGE, Table, import_target
from vlp_models.common.workspace import run_git
from vlp_models.contrib.bisect.differences import Find, Origin, read_origin
from vlp_models.errors import DataError, MissingToolError, VLPError
from vlp_models.metrics.score import ItemScores
from vlp_models.params import Params
from vlp_models.params.load import read_plain
from vlp_models.pipeline.dvc.lock_file import parse_stages
from vlp_models.registry.promotion.gate import Measurement, measure
from vlp_models.registry.promotion.gate_rule import MetricSpec
from vlp_models.tasks.scoring import read_item_scores

BUNDLE = ".run.zip"
BUNDLES = Table("run_bundles", {})  # bundle -> `module:function` of a path that opens it


@dataclass(frozen=True, kw_only=True)
class Point:
    """One side of the comparison.

    name    of the version, commit, tag or file
    commit  whose code and files are used; empty if unknown
    items   a bundle's items.parquet; empty: the scores are in DVC's cache
    is_version  whether the name is that of a registered version
    """

    name: str
    origin: Origin
    commit: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    items: bytes = b""
    is_version: bool = False

    @property
    def run(self) -> str:
        return self.origin.target.partition("@")[2]


def read_points(root: Path, params: Params, names: tuple[str, str], run: str = "") -> list[Point]:
    """Return the two points.

    Args:
        run: the fine-tuning run; default: the version's, or the only one.

    Raises:
        DataError: a point does not exist, or lacks the run; the message names the way out.
    """
    points = [_read_point(root, params, name, run) for name in names]
    # A commit has several runs: the other point's name decides.
    runs = {point.run for point in points if point.run}
    if not runs:
        available = sorted(points[0].params.get("finetune") or {})
        if len(available) != 1:
            raise DataError(f"{names[0]} has several runs: name one with --run: {', '.join(available)}")
        runs = set(available)
    if len(runs) > 1:
        raise DataError(f"the two points are different runs, {' and '.join(sorted(runs))}; compare versions of one run")
    (run,) = runs
    finished = []
    for point in points:
        origin = replace(point.origin, target=f"evaluate@{run}")
        if origin.target not in origin.stages:
            evaluated = sorted(name.partition("@")[2] for name in origin.stages if name.startswith("evaluate@"))
            raise DataError(f"{point.name} has no evaluation of {run}; it has: {', '.join(evaluated) or 'none'}")
        finished.append(replace(point, origin=origin))
    return finished


def _read_point(root: Path, params: Params, name: str, run: str) -> Point:
    if name.endswith(BUNDLE):
        return _read_bundle(root, Path(name))
    commit = (run_git(root, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}") or b"").decode().strip()
    if not commit:
        return _read_version(root, params, name, run)
    texts = {
        file: (run_git(root, "show", f"{commit}:./{file}") or b"").decode() for file in ("dvc.lock", "params.yaml")
    }
    stages, raw = parse_stages(texts["dvc.lock"]), read_plain(texts["params.yaml"], Path(f"{name}:params.yaml")) or {}
    if not stages or not raw:
        missing = "dvc.lock" if not stages else "params.yaml"
        raise DataError(f"commit {name} has no {missing}; a commit after `vlp run`, or by `flow.commit`, has both")
    packages = {}
    for file in (run_git(root, "ls-tree", "--name-only", commit, f"{PACKAGES}/") or b"").decode().splitlines():
        record = json.loads(run_git(root, "show", f"{commit}:./{file}") or b"{}")
        packages[str(record.get("package", file))] = str(record.get("version", ""))
    origin = Origin(target=f"evaluate@{run}", stages=stages, params=raw, packages=packages)
    # A branch and `HEAD~1` name another commit tomorrow; a tag does not.
    full_name = run_git(root, "rev-parse", "--symbolic-full-name", name) or b""
    return Point(
        name=name if full_name.startswith(b"refs/tags/") else commit[:10], origin=origin, commit=commit, params=raw
    )


def _read_bundle(root: Path, path: Path) -> Point:
    if "bundle" not in BUNDLES:
        raise MissingToolError(f"{path}: a run bundle needs vlp_models/contrib/bundles, which is not here")
    bundle = import_target(BUNDLES["bundle"])(path)
    record, raw = bundle.json("lineage.json"), bundle.params()
    origin = Origin(
        target=f"evaluate@{bundle.run}",
        stages=parse_stages(bundle.files["dvc.lock"].decode()) or {},
        params=raw,
        packages=record.get("packages", {}),
    )
    commit = _known_commit(root, str(record.get("git_commit", "")))
    return Point(name=str(path), origin=origin, commit=commit, params=raw, items=bundle.files["items.parquet"])


def _known_commit(root: Path, recorded: str) -> str:
    # `COMMIT+changes` had uncommitted changes; each code file is compared with its recorded hash before it is used.
    commit = recorded.partition("+")[0]
    return "" if run_git(root, "cat-file", "-e", f"{commit}^{{commit}}") is None else commit


def _read_version(root: Path, params: Params, name: str, run: str) -> Point:
    from vlp_models.registry.client import connect, mlflow_errors
    from vlp_models.registry.evaluations import read_lineage
    from vlp_models.registry.versions import resolve_version

    try:
        with mlflow_errors(params):
            client = connect(params.tracking, root)
            version = resolve_version(client, params.tracking, name)
            origin = read_origin(client, version)
            record = read_lineage(client, version) or {}
    except VLPError as error:
        way_out = "`vlp history TASK` and `git log --oneline` list them"
        if "@{" in name:
            way_out = "git's reflog may not reach back so far"
        raise DataError(f"{name}: neither a commit here nor a usable version ({error}); {way_out}") from None
    if run:
        origin = replace(origin, target=f"evaluate@{run}")
    commit = _known_commit(root, str(record.get("git_commit", "")))
    name = f"{version.name}/{version.version}"
    return Point(name=name, origin=origin, commit=commit, params=origin.params, is_version=True)


def read_scores(point: Point, spec: MetricSpec, find: Find) -> Measurement:
    """Return the scores that the point itself has, from its bundle or DVC's cache.

    Raises:
        DataError: they are not there, or lack the metric.
    """
    if point.items:
        return require_measurement(read_item_scores(point.items, name=point.name), spec, point.name)
    folder = point.origin.output(f"reports/eval/{point.run}")
    listing = find(folder)
    entries = json.loads(listing.read_bytes()) if listing else []
    file = next((find(entry["md5"]) for entry in entries if entry["relpath"] == "items.parquet"), None)
    if file is None:
        raise DataError(
            f"{point.name}: its scores are not in DVC's cache; `dvc fetch --all-commits` may get them from the remote"
        )
    return require_measurement(read_item_scores(file.read_bytes(), name=point.name), spec, point.name)


def require_measurement(scores: Sequence[ItemScores], spec: MetricSpec, name: str) -> Measurement:
    """
    Raises:
        DataError: they lack the metric.
    """
    measurement = measure(scores, spec)
    if isinstance(measurement, str):
        raise DataError(f"{name}: {measurement}")
    return measurement


def has_code(root: Path, commit: str) -> bool:
    """Return whether the commit has this package's code, as in a clone of the repository."""
    return bool(commit) and run_git(root, "cat-file", "-e", f"{commit}:./{PACKAGE}/cli") is not None
