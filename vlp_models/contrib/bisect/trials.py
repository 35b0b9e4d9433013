"""Train and evaluate the good point with some of the bad one's changes, in a project of its own below .work.

All trials use one folder, and DVC's cache and run-cache of the project: a stage whose params, data and code are those
of any run before is restored, not run. What a trial has scored is kept in `scores/`, so the same command continues.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import yaml

from vlp_models.common.environment import command_environment
from vlp_models.common.io import link_or_copy, read_json_or_none, symlink_or_copy, write_json, write_text
from vlp_models.common.packages import recorded_packages
from vlp_models.common.plugins import PACKAGE
from vlp_models.common.supervise import start_supervised
from vlp_models.common.workspace import dvc_files, dvc_setting, run_git
from vlp_models.contrib.bisect.changes import ACCEPTED, Change, Changes, read_file, read_seed, seed_sections
from vlp_models.contrib.bisect.differences import ABSENT, Find
from vlp_models.contrib.bisect.points import Point, has_code
from vlp_models.errors import DataError, last_words
from vlp_models.pipeline.dvc.dvc_yaml import read_pipeline
from vlp_models.pipeline.dvc.lock_file import LOCK_FILE, drop_former_inputs, read_stages
from vlp_models.pipeline.dvc.repro import REPRO

LEFT_OUT = {"data", "tests", "docs", "benchmarks", "examples", "dvc.lock", "dvc.yaml", "params.yaml", ".dvc", ".github"}
COPIED = ("packages", "plugins", "presets", ".dvcignore")  # of a project without code of its own
ITEMS = "items.parquet"
RAN, RESTORED = "Running stage '", "is cached - skipping run"  # in DVC's log


class OutOfTimeError(Exception):
    """The budget is used up."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training of a trial. scores: its items.parquet; None if it did not run, for the reason.

    kept: an earlier command made it.
    """

    scores: Path | None
    seconds: float
    ran: int = 0
    restored: int = 0
    reason: str = ""
    kept: bool = False  # plain-ok


@dataclass(kw_only=True)
class TrialRunner:
    """Train and evaluate the trials of one comparison.

    folder    their project, scores and logs
    deadline  of `time.monotonic`
    """

    root: Path
    folder: Path
    good: Point
    bad: Point
    changes: Changes
    find: Find
    deadline: float = float("inf")
    durations: list[float] = field(default_factory=list)

    @property
    def project(self) -> Path:
        return self.folder / "project"

    def run(self, trial: frozenset[str], number: int) -> Run:
        """Train and evaluate with the changes of these ids; return what a run before has scored, if any.

        Args:
            number: of the seed, from 1.

        Raises:
            OutOfTimeError: the budget does not suffice for it.
        """
        # After an upgrade of a package, earlier trials are no longer comparable.
        packages = recorded_packages(self.root) | {"torch": importlib.metadata.version("torch")}
        key = hashlib.sha256(json.dumps([sorted(trial), packages]).encode()).hexdigest()[:12] + f"-{number}"
        scores, record = self.folder / "scores" / f"{key}.parquet", self.folder / "scores" / f"{key}.json"
        if scores.exists() and (saved := read_json_or_none(record)):
            return Run(scores=scores, **saved | {"kept": True})
        start = time.monotonic()
        expected = sum(self.durations) / len(self.durations) if self.durations else 0.0
        if start + expected > self.deadline:
            raise OutOfTimeError
        log = self.folder / "logs" / f"{key}.txt"
        reason = self._run(trial, number, log)
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        seconds, restored = round(time.monotonic() - start, 1), text.count(RESTORED)
        items = self.project / "reports" / "eval" / self.good.run / ITEMS
        scores.parent.mkdir(parents=True, exist_ok=True)
        result = Run(
            scores=None if reason else scores,
            seconds=seconds,
            ran=max(0, text.count(RAN) - 1),  # without `plan`, which always runs
            restored=restored,
            reason=reason,
        )
        if not reason:  # else it is tried again by the next command: memory may have been short, for example
            shutil.copyfile(items, scores)
            write_json(record, {name: value for name, value in asdict(result).items() if name != "scores"})
            self.durations.append(seconds)
        return result

    def _run(self, trial: frozenset[str], number: int, log: Path) -> str:
        """Return why it failed; empty if it did not."""
        self.prepare()
        changes = [change for change in self.changes.tried if change.id in trial]
        self._write_code(changes)
        self._write_data(changes)
        raw = trial_params(self.good, self.bad, changes, number)
        write_text(self.project / "params.yaml", yaml.safe_dump(raw, sort_keys=False, allow_unicode=True))
        self._write_lock(changes)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as stream:
            code = self._call([str(Path(sys.executable).parent / "vlp"), "plan"], stream)
            # The trial's own code may be older than this repair in `vlp plan`.
            if lock := drop_former_inputs(self.project, read_pipeline(self.project)):
                write_text(self.project / LOCK_FILE, lock)
            code = code or self._call([*REPRO, self.good.origin.target], stream)
        return f"{last_words(log.read_bytes(), count=2)}; log: {log.relative_to(self.root)}" if code else ""

    def _call(self, command: list[str], log: Any) -> int:
        """Run a command in the trials' project until it ends, or the budget does."""
        environment = command_environment()
        if (self.project / PACKAGE).is_dir():
            # This package's code is the trial's; plugins and vocabularies on the path stay there.
            path = [os.fspath(self.project.absolute()), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        process = start_supervised(command, environment, cwd=self.project, stdout=log, stderr=subprocess.STDOUT)
        try:
            remaining = self.deadline - time.monotonic()
            return process.wait(timeout=None if remaining == float("inf") else max(1.0, remaining))
        except subprocess.TimeoutExpired:
            raise OutOfTimeError from None
        finally:
            # Also after Ctrl-C: a training saves its state, and the same command continues it.
            if process.poll() is None:
                process.terminate()
                process.wait()

    def check_data(self) -> None:
        """
        Raises:
            DataError: raw data of a point is neither in DVC's cache, nor committed, nor here.
        """
        needed = list(self.changes.data.items())
        needed += [(c.name, md5) for c in self.changes.tried if c.kind == "data" for md5 in (c.before, c.after)]
        for path, md5 in needed:
            if ".." in Path(path).parts:  # a trial would write outside of its folder
                raise DataError(f"{path}: outside of the project; trials need an absolute path, or a copy in it")
            if md5 and not Path(path).is_absolute() and self._find_source(path, md5) is None:
                raise DataError(f"{path}: not found, and not in DVC's cache; restore it or `dvc fetch --all-commits`")

    def _find_source(self, path: str, md5: str) -> Path | bytes | None:
        """Return the file in DVC's cache, the content in git, or what is here; None if none has it."""
        if file := self.find(md5):
            return file
        texts = [run_git(self.root, "show", f"{point.commit}:./{path}") for point in (self.good, self.bad)]
        text = next((text for text in texts if text and hashlib.md5(text).hexdigest() == md5), None)
        # DVC hashes what is here: if it has changed since, its stages run again.
        return text or (self.root / path if (self.root / path).exists() else None)

    def prepare(self) -> None:
        """Make the trials' project: the good point's code and files, and DVC's cache of this project."""
        if (self.project / ".dvc" / "config").exists():
            return
        shutil.rmtree(self.project, ignore_errors=True)
        self.project.mkdir(parents=True)
        if has_code(self.root, self.good.commit):
            listed = run_git(self.root, "ls-tree", "--name-only", "-z", self.good.commit, "./") or b""
            names = [name for name in listed.decode().split("\0") if name and name not in LEFT_OUT]
            archive = run_git(self.root, "archive", "--format=tar", self.good.commit, "--", *names)
            if archive is None:
                raise DataError(f"git archive of {self.good.commit} failed")
            with tarfile.open(fileobj=BytesIO(archive)) as files:
                files.extractall(self.project, filter="data")
        else:
            for name in COPIED:
                source = self.root / name
                if source.is_dir():
                    shutil.copytree(source, self.project / name, ignore=shutil.ignore_patterns("__pycache__"))
                elif source.exists():
                    shutil.copyfile(source, self.project / name)
        (self.project / ".dvc").mkdir(exist_ok=True)
        kind = dvc_setting(self.root, "config", "cache.type") or "reflink,hardlink,copy"
        write_text(
            self.project / ".dvc" / "config",
            "[core]\n    no_scm = true\n    analytics = false\n    check_update = false\n    autostage = false\n"
            f'[cache]\n    dir = "{dvc_files(self.root).parents[1].absolute()}"\n    type = "{kind}"\n',
        )

    def _write_code(self, changes: Iterable[Change]) -> None:
        """Make the files of all code changes those of the point that the trial takes them from."""
        applied = {change.id for change in changes}
        for change in (change for change in self.changes.tried if change.kind == "code"):
            point = self.bad if change.id in applied else self.good
            text = run_git(self.root, "show", f"{point.commit}:./{PACKAGE}/{change.name}")
            path = self.project / PACKAGE / change.name
            if text is None:
                path.unlink(missing_ok=True)
            elif not path.exists() or path.read_bytes() != text:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(text)

    def _write_data(self, changes: Iterable[Change]) -> None:
        """Restore raw data; what is there already stays, so that DVC need not hash it again."""
        md5s = dict(self.changes.data)
        applied = {change.id for change in changes}
        for change in (change for change in self.changes.tried if change.kind == "data"):
            md5s[change.name] = change.after if change.id in applied else change.before
        marks = self.folder / "restored.json"
        restored = read_json_or_none(marks) or {}
        for path in sorted(md5s, key=len):
            target, md5 = self.project / path, md5s[path]
            if Path(path).is_absolute() or (restored.get(path) == md5 and (target.exists() or not md5)):
                continue
            if not target.parent.resolve().is_relative_to(self.project.resolve()):
                continue  # in a folder that is a link to this project's: it is there, and stays as it is
            write_json(marks, restored := {**restored, path: None})  # if interrupted, it is restored again
            with suppress(FileNotFoundError):
                shutil.rmtree(target) if target.is_dir() and not target.is_symlink() else target.unlink()
            if md5:
                self._restore(path, md5, target)
            write_json(marks, restored := {**restored, path: md5})
        self._write_batch_files([path for path in md5s if path.startswith(f"{ACCEPTED}/")], md5s)

    def _write_batch_files(self, batches: Iterable[str], md5s: Mapping[str, str]) -> None:
        """Write the batches' .dvc files and .gitignore: DVC counts them as part of the dataset's folder."""
        present = [path for path in batches if md5s[path]]
        for path in batches:
            file = self.project / f"{path}.dvc"
            file.unlink(missing_ok=True)
            if path in present and (content := read_file(self.root, f"{path}.dvc", self.good, self.bad)):
                file.write_bytes(content)
        ignored = read_file(self.root, f"{ACCEPTED}/.gitignore", self.bad, self.good)
        if present and ignored:
            names = {Path(path).name for path in present}
            # One line a batch, in the order in which they arrived.
            lines = [line for line in ignored.decode().splitlines(keepends=True) if line.strip(" /\n") in names]
            (self.project / ACCEPTED / ".gitignore").write_text("".join(lines), encoding="utf-8")

    def _restore(self, path: str, md5: str, target: Path) -> None:
        """
        Raises:
            DataError: DVC's cache lacks a file of a folder.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        source = self._find_source(path, md5)
        if isinstance(source, bytes):
            target.write_bytes(source)
        elif source == self.find(md5) and source is not None and md5.endswith(".dir"):
            for entry in json.loads(source.read_bytes()):
                content = self.find(entry["md5"])
                if content is None:
                    raise DataError(
                        f"{path}: DVC's cache lacks {entry['relpath']}; `dvc fetch --all-commits` may get it"
                    )
                (target / entry["relpath"]).parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(content, target / entry["relpath"])
        elif source == self.find(md5) and source is not None:
            link_or_copy(source, target)
        elif source is not None:
            symlink_or_copy(source.resolve(), target)

    def _write_lock(self, changes: Sequence[Change]) -> None:
        """Give DVC the entries of a point's own dvc.lock: it restores from them what its run-cache may lack."""
        file = self.project / LOCK_FILE
        stages = read_stages(file) or {}  # a damaged one is dropped
        if not changes or not stages:
            stages = {**stages, **self.good.origin.stages}
        elif len(changes) == len(self.changes.tried):
            stages = {**stages, **self.bad.origin.stages}
        write_text(file, yaml.safe_dump({"schema": "2.0", "stages": dict(stages)}, sort_keys=False))


def trial_params(good: Point, bad: Point, changes: Iterable[Change], number: int) -> dict[str, Any]:
    """Return the good point's params with the changes and the seeds of a trial; nothing is logged or registered.

    The seeds are beyond those of both points: their own scores raised the question, and DVC would restore them.
    """
    raw: dict[str, Any] = copy.deepcopy(dict(good.params))
    for change in changes:
        if change.kind == "params":
            set_value(raw, change.path, change.after)
    for section in seed_sections(raw, good.run):
        used = max(read_seed(side, section) for side in (good.params, bad.params))
        raw[section[0]][section[1]]["seed"] = used + number
    raw["tracking"] = {**(raw.get("tracking") or {}), "uri": ""}
    raw["tracking"].pop("sinks", None)
    return raw


def set_value(raw: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set a value below nested mappings; remove the key if the value is absent."""
    for key in path[:-1]:
        if not isinstance(raw.get(key), dict):
            raw[key] = {}
        raw = raw[key]
    if isinstance(value, str) and value == ABSENT:
        raw.pop(path[-1], None)
    else:
        raw[path[-1]] = copy.deepcopy(value)
