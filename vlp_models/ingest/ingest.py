"""`vlp ingest`: what has been dropped becomes a batch of the versioned dataset, once.

A drop is read, judged and written beside the dataset; renaming the batch into it is the moment it counts. All else
can be found out again: the index from the batches, whether a drop was dealt with from the batch it became. So a kill
at any point, and a second run, neither lose nor double a pair.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.common.io import write_json
from vlp_models.common.workspace import Workspace, record_timing
from vlp_models.errors import DataError, ParamsError
from vlp_models.ingest.index import MANIFEST
from vlp_models.params import IngestParams, Params

if TYPE_CHECKING:
    from vlp_models.ingest.drops import Drop
    from vlp_models.ingest.index import HashIndex

MOST_BYTES = 200  # of a name that something is added to: a report's, or that of a drop in done/
COUNTS = ("new", "duplicates", "leaks", "withdrawn", "bad")


def run(params: Params, workspace: Workspace, check: bool = False) -> dict[str, Any]:
    """Takes in every finished drop and writes reports/ingest.json; returns what it holds.

    Args:
        check: only look: what lies there, and whether it is finished.

    Raises:
        DataError: a drop has more bad pairs than `ingest.max_bad_fraction`, or no readable listing (others are
            taken in all the same); another ingest is running; DVC failed; a dataset of params.yaml is not there.
        ParamsError: a number that can't be.
    """
    from vlp_models.ingest.drops import find_drops
    from vlp_models.ingest.versioning import fetch, track

    p = params.ingest
    _check(p)
    report: dict[str, Any] = {**dict.fromkeys(COUNTS, 0), "dataset": p.dataset, "drops": [], "notes": []}
    if not p.inbox and not p.fetch:
        print("ingest: ingest.inbox and ingest.fetch are empty, so nothing is taken in (docs/new-data.md)")
        return _finish(report, workspace, p, check)
    dataset = workspace.root / p.dataset
    with _only_one(workspace):
        owned = fetch(workspace.root, p.fetch, only_list=check)
        if not check:
            for path in dataset.parent.glob(f".{dataset.name}.partial-*"):  # of runs that were killed
                shutil.rmtree(path, ignore_errors=True)
            if p.track:
                track(workspace.root, dataset)  # what a killed run left untracked
        drops, report["notes"] = find_drops(workspace.root / p.inbox if p.inbox else None, owned)
        refused: list[str] = []
        if drops:
            refused = _take(drops, params, workspace, report, check)
        _finish(report, workspace, p, check)
    if refused:
        raise DataError("\n".join(refused))
    return report


def _check(p: IngestParams) -> None:
    from vlp_models.curation.duplicates.search import MAX_RADIUS

    if not -1 <= p.max_hash_distance <= MAX_RADIUS or not 0 <= p.max_bad_fraction <= 1 or p.settle_seconds < 0:
        raise ParamsError(
            f"params.yaml: `ingest.max_hash_distance` must be -1 to {MAX_RADIUS}, `max_bad_fraction` 0 to 1, "
            f"`settle_seconds` not below 0; found {p.max_hash_distance}, {p.max_bad_fraction}, {p.settle_seconds}"
        )


def _take(drops: list[Drop], params: Params, workspace: Workspace, report: dict[str, Any], check: bool) -> list[str]:
    from vlp_models.ingest.index import HashIndex
    from vlp_models.ingest.versioning import need_project

    p, keypoints = params.ingest, params.validate.near_duplicates.keypoints
    dataset = workspace.root / p.dataset
    if p.track:
        need_project(workspace.root)
    refused = []
    index = HashIndex(workspace.root / ".work" / "ingest" / "index.sqlite", dataset_name(params), keypoints=keypoints)
    try:
        index.sync_batches(dataset)
        for drop in drops:
            entry: dict[str, Any] = {"name": drop.name, "state": "", "batch": ""}
            report["drops"].append(entry)
            try:
                snapshot = drop.snapshot()
            except OSError as error:
                entry["state"] = "refused"
                refused.append(f"{drop.folder}: can't be read: {error.strerror}: {error.filename}")
                continue
            if index.taken(snapshot.id):
                entry["state"] = "known"
                if not check:
                    report["notes"] += _put_away(drop, snapshot.id, index, workspace.root / p.inbox)
                if drop.owned:
                    report["drops"].remove(entry)  # it stays for ever; nothing to say
            elif not drop.owned and time.time() - snapshot.changed < p.settle_seconds:
                entry["state"] = "unfinished"
            elif check:
                entry |= {"state": "ready", "files": snapshot.files}
            else:
                with record_timing(workspace, "ingest"):
                    problem = _take_one(drop, snapshot.id, entry, report["notes"], index, params, workspace)
                if problem:
                    refused.append(problem)
    finally:
        index.close()
    for name in COUNTS:
        report[name] = sum(entry.get(name, 0) for entry in report["drops"] if entry["state"] == "taken")
    return refused


def _take_one(
    drop: Drop,
    snapshot: str,
    entry: dict[str, Any],
    notes: list[str],
    index: HashIndex,
    params: Params,
    workspace: Workspace,
) -> str:
    """One drop into one batch; returns why it was refused, if it was."""
    from vlp_models.ingest.versioning import track

    p = params.ingest
    dataset = workspace.root / p.dataset
    with _partial(dataset) as partial:
        try:
            name, problem = _judge(drop, snapshot, entry, partial, index, params, workspace)
        except (OSError, sqlite3.OperationalError) as error:  # a full disk
            raise DataError(f"ingest: {error}; nothing of {drop.name} was taken") from error
        if problem:
            entry["state"] = "refused"
            return problem
        if drop.snapshot().id != snapshot:
            entry["state"] = "unfinished"  # it changed while it was read
            return ""
        if entry["new"]:
            try:
                publish(partial, dataset / name)
            except DataError as error:
                entry["state"] = "refused"
                return str(error)
            entry["batch"] = name
            index.sync_batches(dataset)
            if p.track:
                track(workspace.root, dataset)
    entry["state"] = "taken"
    notes += _put_away(drop, snapshot, index, workspace.root / p.inbox)
    return ""


def _judge(
    drop: Drop,
    snapshot: str,
    entry: dict[str, Any],
    partial: Path,
    index: HashIndex,
    params: Params,
    workspace: Workspace,
) -> tuple[str, str]:
    """Makes a batch of the drop in `partial` and adds the counts to `entry`; the batch's name, or why there is none."""
    from vlp_models.curation.duplicates.hashes import HashJob
    from vlp_models.curation.duplicates.search import NearRules
    from vlp_models.curation.duplicates.withdrawn import read_withdrawn
    from vlp_models.ingest import batch as batches
    from vlp_models.ingest.decide import decide
    from vlp_models.ingest.reading import Staging
    from vlp_models.ingest.sources import processes, protect

    p, limits = params.ingest, params.validate
    staging = Staging(workspace.root / ".work" / "ingest" / "drop.sqlite")
    try:
        try:
            staging.read(drop, limits)
        except DataError as error:
            return "", str(error)
        protect(index, params, workspace, evaluates=staging.evaluates())
        near = NearRules(
            max_hash_distance=limits.near_duplicates.max_hash_distance, keypoints=limits.near_duplicates.keypoints
        )
        job = HashJob(
            folder=drop.folder,
            keep=partial,
            max_pixels=limits.max_image_pixels,
            min_side=limits.min_image_side,
            keypoints=near.keypoints,
        )
        staging.hash_images(job, processes(p))
        decide(staging, index, p.max_hash_distance, near, read_withdrawn(workspace.withdrawn, near))
        entry |= staging.counts()
        listed = workspace.reports / "ingest" / f"{_short(drop.name)}.jsonl"
        listed.parent.mkdir(parents=True, exist_ok=True)
        batches.write_quarantine(listed, staging)
        if entry["bad"] > p.max_bad_fraction * entry["rows"] or not entry["rows"]:
            entry["rules"] = batches.rules(staging)
            return "", _refusal(drop, entry, p, listed)
        about = {
            "drop": drop.name,
            "listing": drop.listing.name,
            "snapshot": snapshot,
            "max_hash_distance": p.max_hash_distance,
        }
        return batches.write_batch(partial, staging, about), ""
    finally:
        staging.close()


def publish(partial: Path, batch: Path) -> None:
    """The moment a batch counts. What it holds is on the disk before its name is.

    Raises:
        DataError: a folder of its name is there, and no batch.
    """
    os.sync()
    batch.parent.mkdir(parents=True, exist_ok=True)
    if not batch.exists():
        partial.rename(batch)
    elif not (batch / MANIFEST).exists():  # else the same pairs under the same name
        raise DataError(
            f"{batch}: a folder without {MANIFEST}, as a removal leaves that was cut off; delete it and run `vlp "
            "ingest` again. The drop is where it was"
        )


def _short(name: str) -> str:
    """A file's name is at most 255 bytes long, and a folder's may be so, too."""
    whole = os.fsencode(name)
    if len(whole) <= MOST_BYTES:
        return name
    return f"{whole[:MOST_BYTES].decode(errors='ignore')}-{hashlib.sha256(whole).hexdigest()[:12]}"


def dataset_name(params: Params) -> str:
    """The name under which params.yaml reads the dataset; "ingested" where it does not."""
    root = Path(params.ingest.dataset)
    return next((name for name, source in params.data.items() if Path(source.root) == root), "ingested")


def _refusal(drop: Drop, entry: dict[str, Any], p: IngestParams, listed: Path) -> str:
    worst = ", ".join(f"{rule}: {count:,}" for rule, count in list(entry["rules"].items())[:5])
    return (
        f"{drop.listing}: {entry['bad']:,} of {entry['rows']:,} pairs are bad, more than ingest.max_bad_fraction "
        f"({p.max_bad_fraction:.1%}); nothing of it was taken. {worst}. Each with its reason: {listed}. Correct the "
        "drop, or raise the limit"
    )


@contextmanager
def _partial(dataset: Path) -> Iterator[Path]:
    """A folder beside the dataset for a batch in the making. No worker of a killed run knows its name."""
    dataset.parent.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix=f".{dataset.name}.partial-", dir=dataset.parent))
    try:
        path.chmod(0o755)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _put_away(drop: Drop, snapshot: str, index: HashIndex, folder: Path) -> list[str]:
    """What stays where it is is remembered: its batch may be taken out, and must not come back by itself. What is moved
    can be put back."""
    moved, notes = _move_away(drop, folder)
    if not moved:
        index.remember(snapshot)
    return notes


def _move_away(drop: Drop, folder: Path) -> tuple[bool, list[str]]:
    """To `done/`, beside what is there already; a folder that DVC owns stays. Whether it was moved; why it can't be."""
    from vlp_models.ingest.drops import DONE

    if drop.owned:
        return False, []
    source = drop.listing if drop.loose else drop.folder
    target, number = folder / DONE / source.name, 1
    try:
        target.parent.mkdir(exist_ok=True)
        while target.exists():
            number += 1
            name = _short(source.stem if drop.loose else source.name)
            target = folder / DONE / f"{name}-{number}{source.suffix * drop.loose}"
        source.rename(target)
    except OSError as error:  # somebody else's folder, say
        said = f"{source}: taken in, but can't be moved to {target.parent}: {error.strerror}; it is not read again"
        return False, [said]
    return True, []


@contextmanager
def _only_one(workspace: Workspace) -> Iterator[None]:
    folder = workspace.root / ".work" / "ingest"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lets go of it when this process dies
        except BlockingIOError:
            raise DataError("ingest: another `vlp ingest` is at work in this folder; run it again later") from None
        yield


def _finish(report: dict[str, Any], workspace: Workspace, p: IngestParams, check: bool) -> dict[str, Any]:
    dataset = workspace.root / p.dataset
    names = sorted(path.parent.name for path in dataset.glob("*/manifest.json") if path.parent.name[0] != ".")
    report["batches"] = len(names)
    report["content"] = hashlib.sha256("\n".join(names).encode()).hexdigest()[:16] if names else ""
    if not check:
        path = workspace.reports / "ingest.json"
        write_json(path, report)
    _say(report, check)
    return report


def _say(report: dict[str, Any], check: bool) -> None:
    for entry in report["drops"]:
        line = f"{entry['name']}: {entry['state']}"
        if "rows" in entry:
            line += f", {entry['rows']:,} pairs: " + ", ".join(f"{entry[name]:,} {name}" for name in COUNTS)
        print(line + (f" -> {report['dataset']}/{entry['batch']}" if entry["batch"] else ""))
    for note in report["notes"]:
        print(f"left alone: {note}")
    states = Counter(entry["state"] for entry in report["drops"])
    if check:
        print(f"ingest --check: {states['ready']} ready, {states['unfinished']} unfinished; nothing was changed")
    elif report["new"]:
        print(f"ingest: {report['new']:,} new pairs; {report['dataset']} has {report['batches']} batches")
        print(f"        git add {report['dataset']} versions it; `dvc repro` learns from it")
    else:
        print("ingest: nothing new")
