"""`vlp ingest`: turn each complete submission in the inbox into a batch of the versioned dataset, exactly once.

A submission is read, checked and written next to the dataset; renaming the new batch into the dataset commits it. All
other state can be rebuilt: the index from the batches, and whether a submission was ingested from its batch. So a kill
at any point, or a second run, neither loses nor duplicates a pair.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import sqlite3
import uuid
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlp_models.common.device import cpu_count
from vlp_models.common.io import write_json
from vlp_models.common.lock import file_lock
from vlp_models.common.log import get_logger
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.ingest.dvc import fetch, require_project, track
from vlp_models.contrib.ingest.index import HashIndex
from vlp_models.contrib.ingest.submissions import DONE, Submission, find_submissions
from vlp_models.data.batches import MANIFEST, PAIRS, batch_folders, ingested_dataset
from vlp_models.data.formats.base import printable
from vlp_models.errors import DataError, explain_system_error
from vlp_models.params import IngestParams, Params

logger = get_logger(__name__)

MAX_NAME = 200  # bytes of a file name that something is appended to; file systems allow 255
COUNTS = ("new", "duplicates", "leaks", "withdrawn", "bad")


def run(params: Params, workspace: Workspace, check: bool = False) -> dict[str, Any]:
    """Ingest every complete submission; write reports/ingest.json and return its content.

    Args:
        check: only list the submissions and whether they are complete.

    Raises:
        DataError: a submission has more bad pairs than `ingest.max_bad_fraction` or no readable listing (the others are
            ingested all the same); another ingest is running; DVC failed; a dataset of params.yaml is missing.
    """
    p = params.ingest
    report: dict[str, Any] = {**dict.fromkeys(COUNTS, 0), "dataset": p.dataset, "submissions": [], "notes": []}
    if not p.inbox and not p.fetch:
        print("ingest: nothing to ingest: `vlp use --set ingest.inbox=data/inbox` names the folder of new data")
        return _finish(report, workspace, params, check)
    dataset = workspace.root / p.dataset
    # One ingest at a time: two would write the index, and ingest the same submission twice.
    with file_lock(workspace.root / ".work" / "ingest" / "lock", "`vlp ingest`"):
        tracked = fetch(workspace.root, p.fetch, only_list=check)
        if not check:
            # clean up after killed runs: unfinished batches, and batches that DVC does not track yet
            for path in dataset.parent.glob(f".{dataset.name}.partial-*"):
                shutil.rmtree(path, ignore_errors=True)
            if p.track:
                track(workspace.root, dataset)
        inbox = workspace.root / p.inbox if p.inbox else None
        submissions, report["notes"] = find_submissions(inbox, tracked)
        problems: list[str] = []
        if submissions:
            problems = _ingest_all(submissions, params, workspace, report, check)
        _finish(report, workspace, params, check)
    if problems:
        raise DataError("\n".join(problems))
    return report


@dataclass(frozen=True)
class _Run:
    """What all submissions of one run share."""

    params: Params
    workspace: Workspace
    index: HashIndex
    notes: list[str]  # of the report

    @property
    def dataset(self) -> Path:
        return self.workspace.root / self.params.ingest.dataset

    @property
    def inbox(self) -> Path:
        return self.workspace.root / self.params.ingest.inbox


def _ingest_all(
    submissions: list[Submission], params: Params, workspace: Workspace, report: dict[str, Any], check: bool
) -> list[str]:
    """Ingest one submission after the other; return why some were rejected.

    An index that turns out to be damaged is deleted, and the rest is done with a new one.
    """
    if params.ingest.track:
        require_project(workspace.root)
    path, keypoints = workspace.root / ".work" / "ingest" / "index.sqlite", params.validate.near_duplicates.keypoints
    entries = [{"name": submission.name, "state": "", "batch": ""} for submission in submissions]
    # a second try, with a new index, goes on with the submission at which the damage was found
    pending, problems = deque(zip(submissions, entries, strict=True)), []
    for is_last_try in (False, True):
        try:
            with closing(HashIndex(path, ingested_dataset(params), keypoints=keypoints)) as index:
                run = _Run(params, workspace, index, report["notes"])
                index.sync_batches(run.dataset)
                while pending:
                    submission, entry = pending[0]
                    if problem := _ingest_one(submission, entry, run, check):
                        problems.append(printable(problem))
                    if entry["state"] != "known" or not submission.dvc_tracked:
                        report["submissions"].append(entry)  # otherwise it stays in place for good: nothing to report
                    pending.popleft()
            break
        except sqlite3.DatabaseError as error:
            if is_last_try or isinstance(error, sqlite3.OperationalError):  # the latter: a full disk
                raise
            logger.warning("%s: damaged (%s); deleted, and rebuilt from the datasets", path, error)
            path.unlink(missing_ok=True)
    for name in COUNTS:
        report[name] = sum(entry.get(name, 0) for entry in report["submissions"] if entry["state"] == "ingested")
    return problems


def _ingest_one(submission: Submission, entry: dict[str, Any], run: _Run, check: bool) -> str:
    """Turn a submission into a batch if it is complete and new; return why it was rejected, if it was.

    Args:
        entry: of the report, in which the state and the counts are set; it has a batch already if the index was found
            damaged after that was written.
    """
    # the state of its files, compared again after they are read
    try:
        snapshot = submission.snapshot()
    except OSError as error:
        entry["state"] = "rejected"
        return f"{submission.folder}: unreadable: {explain_system_error(error)}"
    if run.index.is_ingested(snapshot.id):
        entry["state"] = "ingested" if entry["batch"] else "known"
    elif not submission.dvc_tracked and snapshot.age < run.params.ingest.settle_seconds:
        # A change meanwhile starts the wait again.
        entry |= {"state": "unfinished", "wait": math.ceil(run.params.ingest.settle_seconds - snapshot.age)}
    elif check:
        entry |= {"state": "ready", "files": snapshot.files}
    else:
        with _partial_batch(run.dataset) as partial:
            try:
                name, counts, problem = _make_batch(submission, snapshot.id, partial, run)
            except (OSError, sqlite3.OperationalError) as error:  # a full disk
                reason = printable(explain_system_error(error))
                raise DataError(f"ingest: {reason}; nothing of {submission.name} was ingested") from error
            entry |= counts
            # it changed while it was read
            if not problem and submission.snapshot().id != snapshot.id:
                entry["state"] = "unfinished"
                return ""
            if not problem and entry["new"]:
                # The rename in `publish` commits the batch; all that follows can be repeated by the next run.
                problem = publish(partial, run.dataset / name)
            if problem:
                entry["state"] = "rejected"
                return problem
            if entry["new"]:
                entry["batch"] = name
                if run.params.ingest.track:
                    track(run.workspace.root, run.dataset)
                run.index.sync_batches(run.dataset)
        entry["state"] = "ingested"
    if not check and entry["state"] in ("ingested", "known"):
        _archive(submission, snapshot.id, run)
    return ""


def _make_batch(submission: Submission, snapshot: str, partial: Path, run: _Run) -> tuple[str, dict[str, Any], str]:
    """Write the submission's batch into `partial`.

    Returns:
        The batch's name, its counts, and why the submission is rejected, if it is.
    """
    # here: a run without a new submission needs none of them
    from vlp_models.contrib.ingest import batch as batches
    from vlp_models.contrib.ingest.decide import decide
    from vlp_models.contrib.ingest.reading import Staging
    from vlp_models.curation.duplicates import read_withdrawn
    from vlp_models.curation.duplicates.hashes import HashJob
    from vlp_models.curation.duplicates.search import NearRules

    p, limits, workspace = run.params.ingest, run.params.validate, run.workspace
    with closing(Staging(workspace.root / ".work" / "ingest" / "submission.sqlite")) as staging:
        try:
            staging.read(submission, limits)
        except DataError as error:
            return "", {}, str(error)
        index_datasets(run.index, run.params, workspace, has_held_out=staging.has_held_out())
        near = NearRules.of(limits.near_duplicates)
        job = HashJob(
            folder=submission.folder,
            keep=partial,
            max_pixels=limits.max_image_pixels,
            min_side=limits.min_image_side,
            keypoints=near.keypoints,
        )
        staging.hash_images(job, p.processes or cpu_count())
        decide(staging, run.index, p.max_hash_distance, near, read_withdrawn(workspace.withdrawn, near))
        counts: dict[str, Any] = staging.counts()
        quarantine = workspace.reports / "ingest" / f"{_shorten(submission.name)}.jsonl"
        quarantine.parent.mkdir(parents=True, exist_ok=True)
        batches.write_quarantine(quarantine, staging)
        if not counts["rows"]:
            problem = f"{submission.listing}: has no pairs; complete it, or move it out of the inbox"
            return "", {**counts, "rules": {}}, problem
        if counts["bad"] > p.max_bad_fraction * counts["rows"]:
            rules = batches.count_by_rule(staging)
            worst = ", ".join(f"{rule}: {count:,}" for rule, count in list(rules.items())[:5])
            problem = (
                f"{submission.listing}: {counts['bad']:,} of {counts['rows']:,} pairs are bad, more than "
                f"ingest.max_bad_fraction ({p.max_bad_fraction:.1%}); nothing was ingested. {worst}. Reasons pair by "
                f"pair: {quarantine}. Correct the submission, or raise the limit"
            )
            return "", {**counts, "rules": rules}, problem
        about = {
            "submission": submission.name,
            "listing": submission.listing.name,
            "snapshot": snapshot,
            "max_hash_distance": p.max_hash_distance,
        }
        return batches.write_batch(partial, staging, about), counts, ""


def index_datasets(index: HashIndex, params: Params, workspace: Workspace, *, has_held_out: bool) -> None:
    """Update the index to the evaluation splits of every other dataset of params.yaml.

    Args:
        has_held_out: the submission has evaluation pairs, which must not be in any training split either; so training
            splits are indexed as well.

    Raises:
        DataError: a dataset is missing, so leaks from it could not be found.
    """
    from vlp_models.curation.duplicates.hashes import HashJob, hash_all
    from vlp_models.data.formats import read_source
    from vlp_models.data.formats.base import extracted_in
    from vlp_models.data.tables import SPLITS

    dataset = Path(params.ingest.dataset)
    other_sources = {name: source for name, source in params.data.items() if Path(source.root) != dataset}
    index.remove_other_sources(other_sources)
    job, processes = HashJob.in_place(params.validate), params.ingest.processes or cpu_count()
    for name, source in other_sources.items():
        with_train = has_held_out or index.has_train(name)
        with extracted_in(workspace.interim(name)):
            rows = read_source(name, source, workspace.root)["images"]
        # rows with an unknown split go to quarantine in `prepare`
        listed = [
            (row["image_id"], row["split"], row["path"])
            for row in rows
            if row["split"] in SPLITS and (with_train or row["split"] != "train")
        ]
        unreadable = index.sync_source(name, listed, lambda paths: hash_all(paths, job, processes))
        if unreadable:
            logger.warning(
                "data.%s: %s of %s images are unreadable and were not compared", name, unreadable, len(listed)
            )


def publish(partial: Path, batch: Path) -> str:
    """Commit a batch: flush its content to disk, then rename it into the dataset. Return why it cannot be, if so."""
    # Without it, a power cut could leave the renamed folder with empty files.
    os.sync()
    batch.parent.mkdir(parents=True, exist_ok=True)
    if not batch.exists():
        partial.rename(batch)
    elif not (batch / MANIFEST).exists():  # otherwise it holds the same pairs, by its name
        return (
            f"{batch}: a folder without {MANIFEST}, left by an interrupted removal; delete it and run `vlp ingest` "
            "again. The submission is still in place"
        )
    return ""


def _shorten(name: str) -> str:
    """Shorten a name to at most `MAX_NAME` bytes, a hash included."""
    encoded = os.fsencode(name)
    if len(encoded) <= MAX_NAME:
        return name
    # `ignore`: the cut may go through a character of several bytes.
    return f"{encoded[:MAX_NAME].decode(errors='ignore')}-{hashlib.sha256(encoded).hexdigest()[:12]}"


@contextmanager
def _partial_batch(dataset: Path) -> Iterator[Path]:
    """Yield a new folder next to the dataset. Its name is random: no worker of a killed run writes into it."""
    dataset.parent.mkdir(parents=True, exist_ok=True)
    path = dataset.with_name(f".{dataset.name}.partial-{uuid.uuid4().hex}")
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _archive(submission: Submission, snapshot: str, run: _Run) -> None:
    """Move an ingested submission to `done/` in the inbox, next to earlier ones of its name; one that DVC tracks stays.

    A submission that stays in place is recorded in the index, so that it is not ingested again after its batch was
    removed. One that was moved can be moved back to ingest it again.
    """
    if submission.dvc_tracked:
        run.index.record_submission(snapshot)
        return
    source = submission.listing if submission.loose else submission.folder
    # submissions of one name get numbers from 2
    target, number = run.inbox / DONE / source.name, 1
    try:
        target.parent.mkdir(exist_ok=True)
        while target.exists():
            number += 1
            name = _shorten(source.stem if submission.loose else source.name)
            target = run.inbox / DONE / f"{name}-{number}{source.suffix * submission.loose}"
        source.rename(target)
    except OSError as error:  # for example a folder of another user
        reason = explain_system_error(error)
        run.notes.append(printable(f"{source}: ingested, but cannot be moved to {target.parent}: {reason}"))
        run.index.record_submission(snapshot)


def _finish(report: dict[str, Any], workspace: Workspace, params: Params, check: bool) -> dict[str, Any]:
    """Add the dataset's state to the report, write it and print it."""
    p = params.ingest
    dataset = workspace.root / p.dataset
    names = [batch.name for batch in batch_folders(dataset)]
    report["batches"] = len(names)
    report["content"] = hashlib.sha256("\n".join(names).encode()).hexdigest()[:16] if names else ""
    if not check:
        write_json(workspace.reports / "ingest.json", report)
    for entry in report["submissions"]:
        line = f"{entry['name']}: {entry['state']}"
        if "rows" in entry:
            line += f", {entry['rows']:,} pairs: " + ", ".join(f"{entry[name]:,} {name}" for name in COUNTS)
        if "wait" in entry:
            line += f"; ready in {entry['wait']} s if nothing in it changes"
        print(line + (f" -> {report['dataset']}/{entry['batch']}" if entry["batch"] else ""))
    for note in report["notes"]:
        print(f"skipped: {note}")
    states = Counter(entry["state"] for entry in report["submissions"])
    if check:
        print(f"ingest --check: {states['ready']} ready, {states['unfinished']} unfinished; nothing was changed")
    elif report["new"]:
        batches = f"{report['batches']} batch{'es' * (report['batches'] != 1)}"
        print(f"ingest: {report['new']:,} new pairs; {report['dataset']} has {batches}; {_next_step(params)}")
    else:
        print("ingest: nothing new")
    return report


def _next_step(params: Params) -> str:
    """Return what to do with new batches: who trains on them, and how to commit them."""
    p, name = params.ingest, ingested_dataset(params)
    runs = [*params.pretrain.values(), *params.finetune.values()]
    is_read = any(not run.sources or name in run.sources for run in runs)
    commit = f"commit them with `git add {p.dataset}`; " if p.track else ""
    if name not in params.data:
        is_default = Path(p.dataset) == Path(IngestParams().dataset)
        by_hand = f"add it to `data`: `{name}: {{format: pairs, root: {p.dataset}, pairs: '*/{PAIRS}'}}`"
        way_out = "`vlp use ingest` adds it" if is_default else by_hand
        return f"{commit}params.yaml does not read {p.dataset} yet: {way_out}"
    if not is_read:
        return f"{commit}no run trains on them yet: `vlp use --set finetune.RUN.sources.{name}=1` adds them to one"
    return f"{commit}`vlp run` trains on them"
