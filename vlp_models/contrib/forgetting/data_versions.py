"""Find the version of the data that a model was trained on: in the workspace, or in DVC's cache.

A model's provenance has hashes of the samples it read (data/shards/contents.py). If the workspace has other data now,
the md5s that DVC recorded lead to the old version: from the lineage of registered versions, and from dvc.lock in
earlier commits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from vlp_models.common.io import hash_file
from vlp_models.common.workspace import Workspace, dvc_files, run_git
from vlp_models.contrib.forgetting.catalog import DatasetImage, FoundImage, Query, find_copies, read_prepared
from vlp_models.curation.duplicates.search import NearRules
from vlp_models.curation.duplicates.withdrawn import read_withdrawn
from vlp_models.data.joins import Database
from vlp_models.data.shards.contents import CONTENTS, find_changed_data, trained_on_inputs
from vlp_models.data.tables import BATCH_ROWS, read_batches
from vlp_models.errors import DataError
from vlp_models.pipeline.dvc.lock_file import LOCK_FILE, output_hashes, parse_stages, read_stages

IDENTITY = ("image_id", "sha256")
COMMITS = 100  # searched for a dvc.lock
FILES = ("manifest.json", "index-train.parquet", "index-val.parquet", "index-test.parquet")


@dataclass(frozen=True, kw_only=True)
class DataVersion:
    """A version of data/shards.

    shards    a folder with its manifest and indices
    images    ids in it of the queried images and their copies
    complete  no other image in it is a copy. False: its fingerprints are missing, so only byte-equal copies were found
    """

    shards: Path
    images: frozenset[str]
    complete: bool


@dataclass
class DataVersions:
    """Looks up data versions. `known`: outputs -> md5, as DVC recorded them at some time."""

    workspace: Workspace
    queries: Sequence[Query]
    found: Sequence[FoundImage]
    rules: NearRules
    catalog: Iterable[DatasetImage]
    exact: bool = False
    known: list[Mapping[str, str]] = field(default_factory=list)
    _held: dict[frozenset[tuple[str, str]], DataVersion | None] = field(default_factory=dict)

    def here(self) -> DataVersion | None:
        """Return the version in data/shards; None if the folder is missing."""
        key: frozenset[tuple[str, str]] = frozenset()  # no other version has: their keys are hashes of inputs
        if key not in self._held:
            version = None
            if (self.workspace.shards / "manifest.json").exists():
                table = self.workspace.validated / "images.parquet"
                count, equal = self._find_equal(table)
                complete = count > 0 and self._in_catalog(table) and _in_step(self.workspace)
                images = equal | self._ids()
                version = DataVersion(shards=self.workspace.shards, images=images, complete=complete)
            self._held[key] = version
        return self._held[key]

    def of(self, inputs: Mapping[str, str]) -> DataVersion | None:
        """Return the version that a checkpoint with these `provenance.inputs` was trained on; None if unavailable.

        Files that the checkpoint did not read may be of another version.
        """
        hashes = {name: inputs[name] for name in trained_on_inputs(inputs)}
        key = frozenset(hashes.items())
        if hashes and key not in self._held:
            here = not find_changed_data(self.workspace, hashes)
            self._held[key] = self.here() if here else next(self._earlier(hashes), None)
        return self._held[key] if hashes else None

    def at(self, outs: Mapping[str, str]) -> DataVersion | None:
        """Return the version that DVC recorded as these outputs; None if it is not in the cache."""
        md5 = outs.get("data/shards", "")
        files = _cached(self.workspace.root, md5)
        return self._look(self._place(md5, files), outs, md5) if files else None

    def _place(self, md5: str, files: Mapping[str, Path]) -> Path:
        return _linked(self.workspace.root / ".work" / "forget" / md5, files, FILES)

    def _earlier(self, hashes: Mapping[str, str]) -> Iterator[DataVersion]:
        seen = set()
        for outs in (*self.known, *_committed(self.workspace.root)):
            md5 = outs.get("data/shards", "")
            files = _cached(self.workspace.root, md5) if md5 not in seen else {}
            seen.add(md5)
            if not files:
                continue
            contents = _cached(self.workspace.root, outs.get(CONTENTS, ""))
            kept = files | {f"{CONTENTS}/{name}": path for name, path in contents.items()}
            if all(name in kept and hash_file(kept[name]) == sha256 for name, sha256 in hashes.items()):
                yield self._look(self._place(md5, files), outs, md5)

    def _look(self, place: Path, outs: Mapping[str, str], md5: str) -> DataVersion:
        tables = _cached(self.workspace.root, outs.get("data/validated", ""))
        count, images = self._find_equal(tables["images.parquet"]) if "images.parquet" in tables else (0, frozenset())
        complete = count > 0
        for out in (name for name in outs if name.startswith("data/interim/")):
            files = _cached(self.workspace.root, outs[out])
            if not {"images.parquet", "fingerprints.parquet"} <= files.keys():
                complete = False
                continue
            folder = _linked(
                place.parent / f"{md5}-{Path(out).name}", files, ("images.parquet", "fingerprints.parquet")
            )
            try:
                then = list(find_copies(self.queries, read_prepared(folder), self.rules, exact=self.exact))
            except DataError:
                complete = False
            else:
                images |= {one.image.image_id for one in then}
        return DataVersion(shards=place, images=images, complete=complete)

    def _find_equal(self, table: Path) -> tuple[int, frozenset[str]]:
        """Return the number of rows, and the ids with the bytes of a queried image or of a known copy."""
        contents = {one.sha256 for one in self.queries} | {one.image.sha256 for one in self.found}
        wanted, count, found = pa.array(sorted(contents), pa.string()), 0, set()
        for rows in read_batches([table], BATCH_ROWS, IDENTITY) if table.exists() else ():
            count += len(rows)
            found.update(rows.filter(pc.is_in(rows["sha256"], value_set=wanted))["image_id"].to_pylist())
        return count, frozenset(found)

    def _in_catalog(self, table: Path) -> bool:
        """Return whether every image of a table is in the catalog, with the same bytes."""
        schema = pa.schema([(name, pa.string()) for name in IDENTITY])
        catalog = iter(self.catalog)
        pieces = iter(lambda: [(one.image_id, one.sha256) for one in islice(catalog, BATCH_ROWS)], [])
        known = (
            pa.table(dict(zip(IDENTITY, zip(*piece, strict=True), strict=True)), schema=schema) for piece in pieces
        )
        with Database.within(self.workspace.root / ".work") as database:
            database.load("images", read_batches([table], BATCH_ROWS, IDENTITY), schema)
            database.load("known", known, schema)
            same = "i.image_id = k.image_id AND i.sha256 IS NOT DISTINCT FROM k.sha256"
            return database.value(f"SELECT count(*) FROM images i ANTI JOIN known k ON {same}") == 0

    def _ids(self) -> frozenset[str]:
        """Return the ids found here, and those withdrawn earlier that may still be in shards or models."""
        withdrawn = read_withdrawn(self.workspace.withdrawn, self.rules).images
        queries = {one.sha256 for one in self.queries} | {one.pixels for one in self.queries}
        earlier = {name for entry in withdrawn if {entry.sha256, entry.pixels} & queries for name in entry.images}
        return frozenset(earlier | {one.image.image_id for one in self.found})


def _in_step(workspace: Workspace) -> bool:
    """Return whether data/shards was made from data/validated, by dvc.lock; True without a dvc.lock."""
    stages = read_stages(workspace.root / LOCK_FILE) or {}
    made = {out["path"]: out.get("md5") for out in stages.get("validate", {}).get("outs", [])}
    read = {dep["path"]: dep.get("md5") for dep in stages.get("shards", {}).get("deps", [])}
    return read.get("data/validated") == made.get("data/validated")


def _committed(root: Path) -> Iterator[Mapping[str, str]]:
    """Yield outputs and md5s of the dvc.lock in earlier commits, latest first."""
    for commit in _git(root, "rev-list", f"--max-count={COMMITS}", "HEAD", "--", "dvc.lock").split():
        try:
            yield output_hashes(parse_stages(_git(root, "show", f"{commit}:./dvc.lock")) or {})
        except (AttributeError, KeyError, TypeError):
            continue  # a damaged file was committed


def _git(root: Path, *arguments: str) -> str:
    return (run_git(root, *arguments) or b"").decode(errors="replace")


def _cached(root: Path, md5: str) -> dict[str, Path]:
    """Return the files of an output in DVC's cache by their relative path; empty if the output is not cached."""
    cache = dvc_files(root)
    try:
        entries = json.loads((cache / md5[:2] / md5[2:]).read_text(encoding="utf-8")) if md5.endswith(".dir") else []
        files = {entry["relpath"]: cache / entry["md5"][:2] / entry["md5"][2:] for entry in entries}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {name: path for name, path in files.items() if path.exists()}


def _linked(folder: Path, files: Mapping[str, Path], names: Sequence[str]) -> Path:
    """Link some of the files into a folder under their names."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if name in files and not (folder / name).exists():
            (folder / name).symlink_to(files[name].absolute())
    return folder
