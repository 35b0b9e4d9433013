"""What differs between two versions: data, params, code, packages; and what of it no stage of the run reads.

Everything is read from the dvc.lock and params.yaml that are stored with a version, and from DVC's cache: a stage's
entry in dvc.lock names exactly what it read. Data is compared row by row as validation has passed it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.common.workspace import dvc_files
from vlp_models.data.tables import ID_COLUMN, SCHEMAS, damage_errors, open_parquet
from vlp_models.errors import DataError
from vlp_models.params.load import read_plain
from vlp_models.pipeline.dvc.lock_file import parse_stages
from vlp_models.registry.evaluations import read_lineage, read_lineage_file

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

PLAN = "data/plan"  # what the stage `plan` writes: for each stage its code, and settings made from several params
CODE, SETTINGS = f"{PLAN}/code/", f"{PLAN}/evaluate/"
ABSENT = "-"

VALIDATED = "data/validated"
PLACES = {"provenance", "path", "width", "height"}  # columns that say where a row is from, not what it is

Find = Callable[[str], Path | None]  # md5 -> the file in DVC's cache; None: it is not there


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a version was made from.

    target    the stage of its scores, such as `evaluate@tden-vqa`
    stages    of its dvc.lock
    params    its params.yaml
    packages  name -> version
    """

    target: str
    stages: Mapping[str, Mapping[str, Any]]
    params: Mapping[str, Any]
    packages: Mapping[str, str]

    def upstream(self) -> set[str]:
        """Return the stages that the target depends on, and itself; without `plan`, which every stage depends on."""
        makers = {out["path"]: name for name, stage in self.stages.items() for out in stage.get("outs", [])}
        reached: set[str] = set()
        pending = [self.target]
        while pending:
            name = pending.pop()
            if name in reached or name not in self.stages:
                continue
            reached.add(name)
            for dependency in self.stages[name].get("deps", []):
                # A stage may depend on a file in another's folder, or on a folder that several stages write into.
                path = dependency["path"]
                pending += [maker for out, maker in makers.items() if overlaps(out, path) and maker != "plan"]
        return reached

    def read_params(self) -> dict[str, tuple[Any, set[str]]]:
        """Return key -> its value and the stages that read it, for every single value that an upstream stage reads."""
        values: dict[str, tuple[Any, set[str]]] = {}
        for name in self.upstream():
            for section, value in (self.stages[name].get("params") or {}).get("params.yaml", {}).items():
                for key, leaf in flatten(value, section):
                    values.setdefault(key, (leaf, set()))[1].add(name)
        return values

    def plan_files(self, folder: str) -> dict[str, tuple[str, set[str]]]:
        """Return path -> md5 and the upstream stages that read it, for the files of `plan` in a folder."""
        read: dict[str, tuple[str, set[str]]] = {}
        for name in self.upstream():
            for dependency in self.stages[name].get("deps", []):
                if dependency["path"].startswith(folder):
                    read.setdefault(dependency["path"], (dependency["md5"], set()))[1].add(name)
        return read

    def output(self, path: str) -> str:
        """Return the md5 of an output; empty if no stage makes it."""
        outs = (out for stage in self.stages.values() for out in stage.get("outs", []) if out["path"] == path)
        return next((str(out.get("md5", "")) for out in outs), "")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One thing that differs. stages: those of the run that read it (data: all of them); none: it cannot matter."""

    kind: str  # data, params, code or packages
    name: str
    before: str
    after: str
    stages: tuple[str, ...]


def overlaps(path: str, other: str) -> bool:
    """Return whether one path is the other, or in it."""
    return f"{path}/".startswith(f"{other}/") or f"{other}/".startswith(f"{path}/")


def flatten(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of every leaf; a list is a leaf."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from flatten(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def find_differences(before: Origin, after: Origin, find: Find) -> list[Difference]:
    """Return what differs, first what a stage of the run reads.

    Raises:
        DataError: DVC's cache lacks what is needed.
    """
    differences = [*_data(before, after, find), *_params(before, after, find), *_code(before, after, find)]
    for name in sorted(before.packages.keys() | after.packages.keys()):
        old, new = before.packages.get(name, ABSENT), after.packages.get(name, ABSENT)
        if old != new:  # any stage may use any package
            stages = tuple(sorted(after.upstream()))
            differences.append(Difference(kind="packages", name=name, before=old, after=new, stages=stages))
    return sorted(differences, key=lambda difference: not difference.stages)


def _data(before: Origin, after: Origin, find: Find) -> Iterator[Difference]:
    """Compare the rows that validation has passed, by table, dataset and split."""
    old_md5, new_md5 = before.output(VALIDATED), after.output(VALIDATED)
    if old_md5 == new_md5:
        return
    readers = tuple(sorted(after.upstream()))
    for table in (name for name in SCHEMAS if name != "quarantine"):
        old, new = (_read_rows(table, md5, find) for md5 in (old_md5, new_md5))
        for group in sorted(old.keys() | new.keys()):
            rows = old.get(group, set()), new.get(group, set())
            if rows[0] != rows[1]:
                change = f"{len(rows[1]):,} (+{len(rows[1] - rows[0]):,} -{len(rows[0] - rows[1]):,})"
                name = f"{table} of {group[0]}, {group[1]}"
                yield Difference(kind="data", name=name, before=f"{len(rows[0]):,}", after=change, stages=readers)


def _read_rows(table: str, md5: str, find: Find) -> dict[tuple[str, str], set[int]]:
    """Return (dataset, split) -> hashes of the rows of a table of data/validated, without their ids and places."""
    files = {entry["relpath"]: entry["md5"] for entry in _read_json(md5, VALIDATED, find)} if md5 else {}
    if f"{table}.parquet" not in files:
        return {}
    images, path = (require_cached(files[f"{name}.parquet"], name, find) for name in ("images", table))
    group_of = {row["image_id"]: (row["source"], row["split"]) for row in _read_columns(images, PLACES)}
    grouped: dict[tuple[str, str], set[int]] = defaultdict(set)
    for row in _read_columns(path, PLACES | {ID_COLUMN[table]} - {"image_id"}):
        # Texts without images name their dataset themselves.
        group = group_of[row["image_id"]] if "image_id" in row else (row["source"], row["split"])
        grouped[group].add(hash(repr(row)))
    return grouped


def _read_columns(path: Path, left_out: Set[str]) -> Iterator[dict[str, Any]]:
    with damage_errors(path):
        file = open_parquet(path)
        columns = [name for name in file.schema_arrow.names if name not in left_out]
        for batch in file.iter_batches(columns=columns):
            yield from batch.to_pylist()


def _params(before: Origin, after: Origin, find: Find) -> Iterator[Difference]:
    old_read, new_read = (side.read_params() | _settings(side, find) for side in (before, after))
    old_all, new_all = dict(flatten(before.params, "")), dict(flatten(after.params, ""))
    for key in sorted(old_read.keys() | new_read.keys() | old_all.keys() | new_all.keys()):
        old_value, old_stages = old_read.get(key, (old_all.get(key, ABSENT), set()))
        new_value, new_stages = new_read.get(key, (new_all.get(key, ABSENT), set()))
        if old_value != new_value:
            stages = tuple(sorted(old_stages | new_stages))
            yield Difference(kind="params", name=key, before=show(old_value), after=show(new_value), stages=stages)


def _settings(side: Origin, find: Find) -> dict[str, tuple[Any, set[str]]]:
    """Return the settings of evaluations, which `plan` writes to a file, as params."""
    values = {}
    for path, (md5, stages) in side.plan_files(SETTINGS).items():
        for name, value in _read_json(md5, path, find).items():
            values[f"evaluate.{name}"] = value, stages
    return values


def _code(before: Origin, after: Origin, find: Find) -> Iterator[Difference]:
    """Compare the source files behind the stages that both have."""
    old, new = before.plan_files(CODE), after.plan_files(CODE)
    changed: dict[
        str, tuple[str, str, set[str]]
    ] = {}  # source file -> hash before, after, the stages that it is behind
    for path in sorted(old.keys() & new.keys()):
        if old[path][0] == new[path][0]:
            continue
        hashes = [_read_json(side[path][0], path, find) for side in (old, new)]
        for source in sorted(hashes[0].keys() | hashes[1].keys()):
            was, now = (side.get(source, ABSENT) for side in hashes)
            if was != now:
                changed.setdefault(source, (was, now, set()))[2].update(new[path][1])
    for source, (was, now, stages) in changed.items():
        yield Difference(kind="code", name=source, before=was[:8], after=now[:8], stages=tuple(sorted(stages)))


def show(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def require_cached(md5: str, name: str, find: Find) -> Path:
    file = find(md5)
    if file is None:
        raise DataError(
            f"{name} of a version is not in DVC's cache; `dvc fetch --all-commits` may get it from the remote"
        )
    return file


def _read_json(md5: str, name: str, find: Find) -> Any:
    file = require_cached(md5, name, find)
    try:
        return json.loads(file.read_bytes())
    except ValueError:
        raise DataError(f"{name}: damaged in DVC's cache ({file})") from None


def format_differences(differences: list[Difference]) -> list[str]:
    """Return a line for each difference that a stage reads, and one for all others."""
    lines = []
    for difference in (d for d in differences if d.stages):
        readers = ", ".join(difference.stages) if len(difference.stages) <= 3 else f"{len(difference.stages)} stages"
        lines.append(f"{difference.kind:9}{difference.name}: {difference.before} -> {difference.after}  ({readers})")
    unread = [d.name for d in differences if not d.stages]
    if unread:
        lines.append(f"{'unread':9}{', '.join(unread)}  (no stage of this run reads them, so they cannot matter)")
    return lines or ["nothing differs"]


def read_origin(client: MlflowClient, version: ModelVersion) -> Origin:
    """Return what a registered version was made from.

    Raises:
        DataError: no lineage is stored with it.
    """
    record = read_lineage(client, version)
    texts = {name: read_lineage_file(client, version, name) for name in ("dvc.lock", "params.yaml")}
    stages = parse_stages(texts["dvc.lock"] or "")
    if record is None or not stages:
        raise DataError(f"{version.name} version {version.version} has no lineage with a dvc.lock")
    return Origin(
        target=f"evaluate@{record['run']}",
        stages=stages,
        params=read_plain(texts["params.yaml"] or "", Path("params.yaml")) or {},
        packages=record.get("packages", {}),
    )


def find_cached(root: Path) -> Find:
    """Return a function from an md5 to the file in the project's DVC cache."""
    folder = dvc_files(root)

    def find(md5: str) -> Path | None:
        file = folder / md5[:2] / md5[2:]
        return file if md5 and file.exists() else None

    return find
