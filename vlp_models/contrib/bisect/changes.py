"""What differs between two points, as changes that a trial can make one by one; and what no trial can make."""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vlp_models.common.plugins import PACKAGE
from vlp_models.common.source_hash import hash_source_text
from vlp_models.common.workspace import run_git
from vlp_models.contrib.bisect.differences import (
    ABSENT,
    CODE,
    PLAN,
    VALIDATED,
    Difference,
    Find,
    Origin,
    find_differences,
    overlaps,
    require_cached,
    show,
)
from vlp_models.contrib.bisect.points import Point, has_code
from vlp_models.data.tables import open_parquet
from vlp_models.errors import DataError

ACCEPTED = "data/accepted"


@dataclass(frozen=True, kw_only=True)
class Change:
    """One difference that a trial can make.

    kind           params, data or code
    name           the dotted key, the path in the project, or the file of the package
    before, after  the values of params; the md5 of data, empty if absent; texts of code
    stages         that read it
    path           the key of params as a list, as a name may have a dot
    """

    kind: str
    name: str
    before: Any
    after: Any
    stages: tuple[str, ...]
    path: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return f"{self.kind} {self.name}"

    def describe(self) -> str:
        if self.kind == "params":
            return f"{self.id}: {show(self.before)} -> {show(self.after)}"
        if self.kind == "data":
            return f"{self.id}: " + ("added" if not self.before else "removed" if not self.after else "changed")
        return self.id


@dataclass(frozen=True, kw_only=True)
class Changes:
    """All differences.

    tried    that a trial can make, the cheapest first
    untried  what may matter and no trial makes -> why
    unread   what no stage of the run reads
    data     path -> md5 of what both points read and has not changed
    notes    what else to know, such as a changed test set
    """

    tried: list[Change]
    untried: dict[str, str]
    unread: list[str]
    data: Mapping[str, str]
    notes: list[str] = field(default_factory=list)


def find_changes(root: Path, good: Point, bad: Point, find: Find, split: str) -> Changes:
    """Compare two points.

    Args:
        split: of the test, whose changed rows are noted.

    Raises:
        DataError: DVC's cache lacks what is needed.
    """
    differences = find_differences(good.origin, bad.origin, find)
    read = [difference for difference in differences if difference.stages]
    settings = {d.name.removeprefix("evaluate.") for d in read if d.kind == "params" and d.name.startswith("evaluate.")}
    params, unread = _params(good.origin, bad.origin, settings)
    data, same, untried = _data(root, good, bad, find)
    notes = [
        f"test set: {d.name}: {d.before} -> {d.after}" for d in read if d.kind == "data" and f", {split}" in d.name
    ]
    if notes:
        notes.append("each trial is compared with the good side on the test items that both have")
    code: dict[str, Change] = {}
    sources = [difference for difference in read if difference.kind == "code"]
    if has_code(root, good.commit) and has_code(root, bad.commit):
        sources += _one_sided_code(good.origin, bad.origin, find)
    for difference in sources:
        change = _code(root, good, bad, difference)
        if isinstance(change, str):
            untried[f"code {difference.name}"] = change
        elif change.before != change.after:
            code.setdefault(change.name, change)
    for difference in (d for d in read if d.kind == "packages"):
        untried[f"packages {difference.name}: {difference.before} -> {difference.after}"] = "one environment runs all"
    tried = [*params, *data, *code.values()]
    cost = {change.id: _cost(bad.origin, change) for change in tried}
    # Cheap ones first: the first half is the one that a trial makes. Those of a kind stay together.
    tried.sort(key=lambda change: (cost[change.id], change.kind, change.name))
    unread += [d.name for d in differences if not d.stages and d.kind != "params"]
    return Changes(tried=tried, untried=untried, unread=unread, data=same, notes=notes)


def _cost(origin: Origin, change: Change) -> int:
    """Return how many stages run again after the change: those that read it, and all after them."""
    upstream = origin.upstream()
    stale, grown = set(change.stages), True
    while grown:
        outs = [out["path"] for name in stale for out in origin.stages.get(name, {}).get("outs", [])]
        further = {
            name
            for name in upstream - stale
            if any(overlaps(dep["path"], out) for dep in origin.stages[name].get("deps", []) for out in outs)
        }
        stale, grown = stale | further, bool(further)
    return len(stale)


def _params(good: Origin, bad: Origin, settings: set[str]) -> tuple[list[Change], list[str]]:
    """Return the values that a stage reads, and the keys that none reads; without the seeds that trials vary."""
    run = good.target.partition("@")[2]
    sections = {section for side in (good, bad) for section in seed_sections(side.params, run)}
    varied = {(*section, "seed") for section in sections} | {("defaults", kind, "seed") for kind, _ in sections}
    read = [*good.read_params().items(), *bad.read_params().items()]
    changes, unread = [], []
    for path, before, after in differing(good.params, bad.params):
        key = ".".join(path)
        if path in varied:
            continue
        stages = {stage for name, (_, stages) in read for stage in stages if _is_part(name, key) or _is_part(key, name)}
        if path[0] == "evaluate" and settings.intersection(path[1:]):
            stages.add(bad.target)  # `plan` writes them to a file that the evaluation reads
        if stages:
            readers = tuple(sorted(stages))
            changes.append(Change(kind="params", name=key, before=before, after=after, stages=readers, path=path))
        else:
            unread.append(key)
    return changes, unread


def differing(before: Any, after: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Yield key and both values for each difference: single values, and mappings that only one side has."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in sorted(before.keys() | after.keys(), key=str):
            yield from differing(before.get(key, ABSENT), after.get(key, ABSENT), (*path, str(key)))
    elif before != after:
        yield path, before, after


def seed_sections(raw: Mapping[str, Any], run: str) -> list[tuple[str, str]]:
    """Return the sections whose seeds a trial varies: the run, every pretraining before it, and the initial weights."""
    sections = [("finetune", run)]
    while True:
        section, name = sections[-1]
        entry = (raw.get(section) or {}).get(name)
        if not isinstance(entry, dict) or len(sections) > len(raw.get("pretrain") or {}) + 2:
            return sections[:-1]
        if section == "models":
            return sections
        start = entry.get("start") or f"initial/{entry.get('model', '')}"
        kind, _, name = start.partition("/")
        sections.append(("models" if kind == "initial" else kind, name))


def read_seed(raw: Mapping[str, Any], section: tuple[str, str]) -> int:
    """Return the seed of a section; 0 if it is absent."""
    kind, name = section
    entry = (raw.get(kind) or {}).get(name)
    default = ((raw.get("defaults") or {}).get(kind) or {}).get("seed", 1)
    return int(entry.get("seed", default)) if isinstance(entry, dict) else 0


def _is_part(key: str, section: str) -> bool:
    return f"{key}.".startswith(f"{section}.")


def inputs(origin: Origin) -> dict[str, str]:
    """Return path -> md5 of what the run reads and no stage has made: raw data, lists, weights."""
    made = origin.stages.values()
    outs = [out["path"] for stage in made for out in stage.get("outs", [])]
    return {
        dep["path"]: str(dep.get("md5", ""))
        for name in origin.upstream()
        for dep in origin.stages[name].get("deps", [])
        if not any(overlaps(dep["path"], out) for out in [*outs, PLAN, "packages"])
    }


def _data(root: Path, good: Point, bad: Point, find: Find) -> tuple[list[Change], dict[str, str], dict[str, str]]:
    """Return the changes of raw data, what is unchanged (path -> md5), and what cannot be restored."""
    old, new = inputs(good.origin), inputs(bad.origin)
    changes, same, untried = [], {}, dict[str, str]()
    for path in sorted(old.keys() | new.keys()):
        before, after = old.get(path, ""), new.get(path, "")
        stages = tuple(sorted(_readers(good.origin, path) | _readers(bad.origin, path)))
        if before == after and posixpath.normpath(path) != ACCEPTED:
            same[path] = before
        elif posixpath.normpath(path) == ACCEPTED:
            sides = [_batches(root, point, find) if md5 else {} for point, md5 in ((good, before), (bad, after))]
            for batch in sorted(sides[0].keys() | sides[1].keys()):
                was, now = (side.get(batch, "") for side in sides)
                if was == now or not before or not after:  # a dataset of one side comes and goes with its params
                    same[batch] = was or now
                else:
                    changes.append(Change(kind="data", name=batch, before=was, after=now, stages=stages))
        elif not before or not after:
            same[path] = before or after
        elif posixpath.isabs(path):
            untried[f"data {path}"] = "outside of the project; a trial reads it as it is now"
        elif all(find(md5) or _is_committed(root, point, path, md5) for md5, point in ((before, good), (after, bad))):
            changes.append(Change(kind="data", name=path, before=before, after=after, stages=stages))
        else:
            untried[f"data {path}"] = f"not in DVC's cache; `dvc add {path}` keeps later versions of it"
    return changes, same, untried


def _readers(origin: Origin, path: str) -> set[str]:
    stages = origin.upstream()
    return {name for name in stages if any(dep["path"] == path for dep in origin.stages[name].get("deps", []))}


def _committed(root: Path, point: Point, path: str) -> bytes | None:
    return run_git(root, "show", f"{point.commit}:./{path}") if point.commit else None


def _is_committed(root: Path, point: Point, path: str, md5: str) -> bool:
    """Return whether the point's commit has the file with this content. Of a folder, git shows only the names."""
    return hashlib.md5(_committed(root, point, path) or b"").hexdigest() == md5


def _batches(root: Path, point: Point, find: Find) -> dict[str, str]:
    """Return the batches of `vlp ingest` that the point's images are from: path -> md5.

    Raises:
        DataError: a batch is not tracked.
    """
    listing = find(point.origin.output(VALIDATED))
    entries = json.loads(listing.read_bytes()) if listing else []
    images = next((find(entry["md5"]) for entry in entries if entry["relpath"] == "images.parquet"), None)
    if images is None:
        raise DataError(f"{point.name}: {VALIDATED} is not in DVC's cache; `dvc fetch --all-commits` may get it")
    names = {
        path.split("/")[2]
        for block in open_parquet(images).iter_batches(columns=["path"])
        for path in block["path"].to_pylist()
        if path.startswith(f"{ACCEPTED}/")
    }
    return {f"{ACCEPTED}/{name}": _tracked(root, f"{ACCEPTED}/{name}", point) for name in sorted(names)}


def _tracked(root: Path, path: str, point: Point) -> str:
    """Return the md5 of a folder with a .dvc file, here or in the point's commit; a batch never changes."""
    content = read_file(root, f"{path}.dvc", point)
    if content is None:
        raise DataError(f"{path}: a batch of {point.name} has no .dvc file; set `ingest.track: true` for later ones")
    return str(yaml.safe_load(content)["outs"][0]["md5"])


def read_file(root: Path, path: str, *points: Point) -> bytes | None:
    """Return a file of the project, from the folder or else from the points' commits; None if none has it."""
    if (root / path).is_file():
        return (root / path).read_bytes()
    return next((content for point in points if (content := _committed(root, point, path))), None)


def _one_sided_code(good: Origin, bad: Origin, find: Find) -> Iterator[Difference]:
    """Yield the source files that only one point uses, such as a new model family, whether they differ or not."""
    old, new = good.plan_files(CODE), bad.plan_files(CODE)
    for path in sorted(old.keys() ^ new.keys()):
        md5, stages = (old | new)[path]
        for source, digest in json.loads(require_cached(md5, path, find).read_bytes()).items():
            before, after = (digest, ABSENT) if path in old else (ABSENT, digest)
            yield Difference(kind="code", name=source, before=before, after=after, stages=tuple(sorted(stages)))


def _code(root: Path, good: Point, bad: Point, difference: Difference) -> Change | str:
    """Return the change of a source file, or why it cannot be tried."""
    if not (has_code(root, good.commit) and has_code(root, bad.commit)):
        return "the project has no code of its own in git; all trials run the installed package"
    hashes = []
    for point, recorded in ((good, difference.before), (bad, difference.after)):
        text = _committed(root, point, f"{PACKAGE}/{difference.name}")
        digest = ABSENT if text is None else hash_source_text(text, difference.name)
        # A stage may not have imported a file that was there.
        if recorded not in (ABSENT, digest[: len(recorded)]):
            return f"{point.name} ran a version of it that commit {point.commit[:8]} does not have"
        hashes.append(digest)
    return Change(kind="code", name=difference.name, before=hashes[0], after=hashes[1], stages=difference.stages)
