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

from vlp_models.common.io import hash_file, symlink_or_copy
from vlp_models.common.workspace import Workspace, dvc_files, run_git
from vlp_models.contrib.forgetting.catalog import DatasetImage, ImageCopy, Query, find_copies, read_prepared
from vlp_models.contrib.forgetting.withdrawn import read_withdrawn
from vlp_models.curation.duplicates.search import NearRules
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
    """Looks up data versions. recorded: outputs -> md5, as DVC recorded them at some time."""

    workspace: Workspace
    queries: Sequence[Query]
    copies: Sequence[ImageCopy]
    rules: NearRules
    catalog: Iterable[DatasetImage]
    exact: bool = False
    recorded: list[Mapping[str, str]] = field(default_factory=list)
    _cache: dict[frozenset[tuple[str, str]], DataVersion | None] = field(default_factory=dict)

    def here(self) -> DataVersion | None:
        """Return the version in data/shards; None if the folder is missing."""
        key: frozenset[tuple[str, str]] = frozenset()  # no other version has: their keys are hashes of inputs
        if key not in self._cache:
            version = None
            if (self.workspace.shards / "manifest.json").exists():
                table = self.workspace.validated / "images.parquet"
                count, equal = self._find_equal(table)
                # Complete: the table has rows, the catalog has all of them, and the shards were made from this table.
                complete = count > 0 and self._in_catalog(table) and _shards_are_current(self.workspace)
                # Equal bytes in the table, copies found by fingerprints, and ids that were withdrawn earlier.
                images = equal | self._ids()
                version = DataVersion(shards=self.workspace.shards, images=images, complete=complete)
            self._cache[key] = version
        return self._cache[key]

    def of(self, inputs: Mapping[str, str]) -> DataVersion | None:
        """Return the version that a checkpoint with these `provenance.inputs` was trained on; None if unavailable.

        Files that the checkpoint did not read may be of another version.
        """
        # Equal hashes of the files that it read mean the same version, whatever else changed.
        hashes = {name: inputs[name] for name in trained_on_inputs(inputs)}
        key = frozenset(hashes.items())
        if hashes and key not in self._cache:
            # No file that the checkpoint read has changed: its data is the one in the workspace.
            here = not find_changed_data(self.workspace, hashes)
            self._cache[key] = self.here() if here else next(self._earlier(hashes), None)
        return self._cache[key] if hashes else None

    def at(self, outs: Mapping[str, str]) -> DataVersion | None:
        """Return the version that DVC recorded as these outputs; None if it is not in the cache."""
        md5 = outs.get("data/shards", "")
        files = _cached(self.workspace.root, md5)
        return self._read(md5, files, outs) if files else None

    def _earlier(self, hashes: Mapping[str, str]) -> Iterator[DataVersion]:
        seen = set()
        # Lineages of registered versions first, then commits from the latest back.
        for outs in (*self.recorded, *_committed(self.workspace.root)):
            md5 = outs.get("data/shards", "")
            # The same output may be recorded many times: read it once.
            files = _cached(self.workspace.root, md5) if md5 not in seen else {}
            seen.add(md5)
            if not files:
                continue
            # Hashes of samples are an output of their own, which the provenance names with its folder.
            contents = _cached(self.workspace.root, outs.get(CONTENTS, ""))
            files_read = files | {f"{CONTENTS}/{name}": path for name, path in contents.items()}
            # All hashes match, so this is the version that the checkpoint was trained on.
            if all(name in files_read and hash_file(files_read[name]) == sha256 for name, sha256 in hashes.items()):
                yield self._read(md5, files, outs)

    def _read(self, md5: str, files: Mapping[str, Path], outs: Mapping[str, str]) -> DataVersion:
        """Return the version whose data/shards has these files; `outs` has the other outputs of that time."""
        links = self.workspace.root / ".work" / "forget"
        shards = _linked(links / md5, files, FILES)
        # Equal copies are found by the hashes in the table of images.
        tables = _cached(self.workspace.root, outs.get("data/validated", ""))
        count, images = self._find_equal(tables["images.parquet"]) if "images.parquet" in tables else (0, frozenset())
        complete = count > 0
        # Changed copies are found by the fingerprints of each dataset.
        needed = ("images.parquet", "fingerprints.parquet")
        for out in (name for name in outs if name.startswith("data/interim/")):
            files = _cached(self.workspace.root, outs[out])
            if not files.keys() >= set(needed):
                complete = False
                # Without these files only byte-equal copies can be found.
                continue
            folder = _linked(links / f"{md5}-{Path(out).name}", files, needed)
            try:
                copies = find_copies(self.queries, read_prepared(folder), self.rules, exact=self.exact)
            except DataError:
                complete = False
            else:
                images |= {copy.image.image_id for copy in copies}
        return DataVersion(shards=shards, images=images, complete=complete)

    def _find_equal(self, table: Path) -> tuple[int, frozenset[str]]:
        """Return the number of rows, and the ids with the bytes of a queried image or of a known copy."""
        hashes = {query.sha256 for query in self.queries} | {copy.image.sha256 for copy in self.copies}
        values, count, ids = pa.array(sorted(hashes), pa.string()), 0, set()
        for rows in read_batches([table], BATCH_ROWS, IDENTITY) if table.exists() else ():
            count += len(rows)
            ids.update(rows.filter(pc.is_in(rows["sha256"], value_set=values))["image_id"].to_pylist())
        return count, frozenset(ids)

    def _in_catalog(self, table: Path) -> bool:
        """Return whether every image of a table is in the catalog, with the same bytes."""
        schema = pa.schema([(name, pa.string()) for name in IDENTITY])
        catalog = iter(self.catalog)
        # At most BATCH_ROWS images are in memory at a time.
        # `iter` with a sentinel: pieces until the first empty one.
        pieces = iter(lambda: list(islice(catalog, BATCH_ROWS)), [])
        cataloged = (
            pa.table({name: [getattr(image, name) for image in piece] for name in IDENTITY}, schema=schema)
            for piece in pieces
        )
        with Database.within(self.workspace.root / ".work") as database:
            database.load("images", read_batches([table], BATCH_ROWS, IDENTITY), schema)
            database.load("cataloged", cataloged, schema)
            same = "i.image_id = c.image_id AND i.sha256 IS NOT DISTINCT FROM c.sha256"
            # Rows of the table that no image of the catalog matches; NULL hashes count as equal.
            return database.value(f"SELECT count(*) FROM images i ANTI JOIN cataloged c ON {same}") == 0

    def _ids(self) -> frozenset[str]:
        """Return the ids found here, and those withdrawn earlier that may still be in shards or models."""
        withdrawn = read_withdrawn(self.workspace.withdrawn, self.rules).images
        queries = {digest for query in self.queries for digest in (query.sha256, query.pixels)}
        # An entry names the same image if its bytes or its pixels are equal.
        earlier = {name for entry in withdrawn if {entry.sha256, entry.pixels} & queries for name in entry.images}
        return frozenset(earlier | {copy.image.image_id for copy in self.copies})


def _shards_are_current(workspace: Workspace) -> bool:
    """Return whether data/shards was made from data/validated, by dvc.lock; True without a dvc.lock."""
    stages = read_stages(workspace.root / LOCK_FILE) or {}
    written = {out["path"]: out.get("md5") for out in stages.get("validate", {}).get("outs", [])}
    read = {dep["path"]: dep.get("md5") for dep in stages.get("shards", {}).get("deps", [])}
    # Without a dvc.lock both are None, which are equal.
    return read.get("data/validated") == written.get("data/validated")


def _committed(root: Path) -> Iterator[Mapping[str, str]]:
    """Yield outputs and md5s of the dvc.lock in earlier commits, latest first."""
    # Only commits that changed dvc.lock, at most `COMMITS` of them.
    commits = run_git(root, "rev-list", f"--max-count={COMMITS}", "HEAD", "--", "dvc.lock") or b""
    for commit in commits.decode().split():
        lock_file = run_git(root, "show", f"{commit}:./dvc.lock") or b""
        try:
            yield output_hashes(parse_stages(lock_file.decode(errors="replace")) or {})
        except (AttributeError, KeyError, TypeError):
            continue  # a damaged file was committed


def _cached(root: Path, md5: str) -> dict[str, Path]:
    """Return the files of an output in DVC's cache by their relative path; empty if the output is not cached."""
    cache = dvc_files(root)
    try:
        # DVC stores a folder as a JSON list of files under an md5 that ends with `.dir`; files are in XX/REST of
        # their md5.
        entries = json.loads((cache / md5[:2] / md5[2:]).read_text(encoding="utf-8")) if md5.endswith(".dir") else []
        files = {entry["relpath"]: cache / entry["md5"][:2] / entry["md5"][2:] for entry in entries}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    # Files that `dvc gc` removed, or that were never fetched, are missing from the cache.
    return {name: path for name, path in files.items() if path.exists()}


def _linked(folder: Path, files: Mapping[str, Path], names: Sequence[str]) -> Path:
    """Link some of the files into a folder under their names."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if name in files and not (folder / name).exists():
            symlink_or_copy(files[name], folder / name)
    return folder
