"""Which version of the data a model learnt from, as far as it can be had: what lies here, or what DVC's cache holds.

A model names its data by hashes of what it read of the shards (workspace/contents.py). Where other data lies here now,
the md5s that DVC had then lead to the old one: from the lineage of registered versions, and from the dvc.lock of
earlier commits.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from vlp_models.common.io import hash_file
from vlp_models.common.workspace import Workspace
from vlp_models.curation.duplicates.search import NearRules
from vlp_models.curation.duplicates.withdrawn import read_withdrawn
from vlp_models.data.shards.contents import CONTENTS, learned_from, no_longer_here
from vlp_models.data.tables import HELD, read_batches
from vlp_models.errors import DataError
from vlp_models.forgetting.pictures import Asked, Found, Known, find, prepared
from vlp_models.pipeline.dvc.lock_file import LOCK_FILE, output_hashes, parse_stages, read_stages

COMMITS = 100  # whose dvc.lock is looked at
FILES = ("manifest.json", "index-train.parquet", "index-val.parquet", "index-test.parquet")


@dataclass(frozen=True, kw_only=True)
class DataVersion:
    """A state of data/shards.

    shards: a folder with manifest and indices.
    images: the ids there of the pictures asked for and of their copies.
    complete: no other picture there is one of them. False: prints of that time are not at hand, and equal bytes decide.
    """

    shards: Path
    images: frozenset[str]
    complete: bool


@dataclass
class DataVersions:
    """The versions that can be had. known: outputs -> md5, as DVC recorded them at some time."""

    workspace: Workspace
    asked: Sequence[Asked]
    found: Sequence[Found]
    rules: NearRules
    catalogue: Iterable[Known]
    exact: bool = False
    known: list[Mapping[str, str]] = field(default_factory=list)
    _held: dict[frozenset[tuple[str, str]], DataVersion | None] = field(default_factory=dict)

    def here(self) -> DataVersion | None:
        """What lies in data/shards; None: nothing does."""
        if (lies := frozenset[tuple[str, str]]()) not in self._held:
            there = (self.workspace.shards / "manifest.json").exists()
            self._held[lies] = self._here() if there else None
        return self._held[lies]

    def of(self, inputs: Mapping[str, str]) -> DataVersion | None:
        """The version that a checkpoint with these `provenance.inputs` learnt from; None: it can't be had. What it did
        not read may be another version's."""
        learnt = {name: inputs[name] for name in learned_from(inputs)}
        key = frozenset(learnt.items())
        if learnt and key not in self._held:
            here = not no_longer_here(self.workspace, learnt)
            self._held[key] = self.here() if here else next(self._earlier(learnt), None)
        return self._held[key] if learnt else None

    def at(self, outs: Mapping[str, str]) -> DataVersion | None:
        """The version that DVC recorded as these outputs, all of it; None: it can't be had."""
        md5 = outs.get("data/shards", "")
        files = _cached(self.workspace.root, md5)
        return self._look(self._place(md5, files), outs, md5) if files else None

    def _place(self, md5: str, files: Mapping[str, Path]) -> Path:
        return _linked(self.workspace.root / ".work" / "forget" / md5, files, FILES)

    def _here(self) -> DataVersion:
        rows = _images(self.workspace.validated / "images.parquet")
        known = {(one.image_id, one.sha256) for one in self.catalogue}
        complete = bool(rows) and rows <= known and _in_step(self.workspace)
        return DataVersion(shards=self.workspace.shards, images=self._equal(rows) | self._ids(), complete=complete)

    def _earlier(self, learnt: Mapping[str, str]) -> Iterator[DataVersion]:
        seen = set()
        for outs in (*self.known, *_committed(self.workspace.root)):
            md5 = outs.get("data/shards", "")
            files = _cached(self.workspace.root, md5) if md5 not in seen else {}
            seen.add(md5)
            if not files:
                continue
            contents = _cached(self.workspace.root, outs.get(CONTENTS, ""))
            kept = files | {f"{CONTENTS}/{name}": path for name, path in contents.items()}
            if all(name in kept and hash_file(kept[name]) == sha256 for name, sha256 in learnt.items()):
                yield self._look(self._place(md5, files), outs, md5)

    def _look(self, place: Path, outs: Mapping[str, str], md5: str) -> DataVersion:
        tables = _cached(self.workspace.root, outs.get("data/validated", ""))
        rows = _images(tables["images.parquet"]) if "images.parquet" in tables else set()
        images, complete = self._equal(rows), bool(rows)
        for out in (name for name in outs if name.startswith("data/interim/")):
            files = _cached(self.workspace.root, outs[out])
            if not {"images.parquet", "fingerprints.parquet"} <= files.keys():
                complete = False
                continue
            folder = _linked(
                place.parent / f"{md5}-{Path(out).name}", files, ("images.parquet", "fingerprints.parquet")
            )
            try:
                then = list(find(self.asked, prepared(folder), self.rules, exact=self.exact))
            except DataError:
                complete = False
            else:
                images |= {one.picture.image_id for one in then}
        return DataVersion(shards=place, images=images, complete=complete)

    def _equal(self, rows: Set[tuple[str, str]]) -> frozenset[str]:
        """Those with the bytes of a picture asked for, or of a copy that is known."""
        contents = {one.sha256 for one in self.asked} | {one.picture.sha256 for one in self.found}
        return frozenset(image for image, sha256 in rows if sha256 in contents)

    def _ids(self) -> frozenset[str]:
        """Of those that lie here, and of those that were withdrawn before but are still in shards or models."""
        withdrawn = read_withdrawn(self.workspace.withdrawn, self.rules).images
        asked = {one.sha256 for one in self.asked} | {one.pixels for one in self.asked}
        earlier = {name for entry in withdrawn if {entry.sha256, entry.pixels} & asked for name in entry.images}
        return frozenset(earlier | {one.picture.image_id for one in self.found})


def _images(table: Path) -> set[tuple[str, str]]:
    if not table.exists():
        return set()
    found: set[tuple[str, str]] = set()
    for rows in read_batches([table], HELD, ["image_id", "sha256"]):
        found.update(zip(rows["image_id"].to_pylist(), rows["sha256"].to_pylist(), strict=True))
    return found


def _in_step(workspace: Workspace) -> bool:
    """Whether data/shards was made of data/validated as DVC has it; without a dvc.lock, it is taken for granted."""
    stages = read_stages(workspace.root / LOCK_FILE) or {}
    made = {out["path"]: out.get("md5") for out in stages.get("validate", {}).get("outs", [])}
    read = {dep["path"]: dep.get("md5") for dep in stages.get("shards", {}).get("deps", [])}
    return read.get("data/validated") == made.get("data/validated")


def _committed(root: Path) -> Iterator[Mapping[str, str]]:
    """Outputs and md5s of the dvc.lock of earlier commits, the latest first."""
    for commit in _git(root, "rev-list", f"--max-count={COMMITS}", "HEAD", "--", "dvc.lock").split():
        try:
            yield output_hashes(parse_stages(_git(root, "show", f"{commit}:dvc.lock")) or {})
        except (AttributeError, KeyError, TypeError):
            continue  # a damaged one that was committed


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _cached(root: Path, md5: str) -> dict[str, Path]:
    """The files of an output in DVC's cache, by their place in it; none of one that is not there whole."""
    cache = root / ".dvc" / "cache" / "files" / "md5"
    try:
        entries = json.loads((cache / md5[:2] / md5[2:]).read_text(encoding="utf-8")) if md5.endswith(".dir") else []
        files = {entry["relpath"]: cache / entry["md5"][:2] / entry["md5"][2:] for entry in entries}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {name: path for name, path in files.items() if path.exists()}


def _linked(folder: Path, files: Mapping[str, Path], names: Sequence[str]) -> Path:
    """A folder that shows some of these files under their names."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if name in files and not (folder / name).exists():
            (folder / name).symlink_to(files[name].absolute())
    return folder
