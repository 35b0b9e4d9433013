"""The promotion ledger: JSON lines, only ever appended, each holding the sha256 of the line before it.

A line that was edited, inserted or removed breaks the chain at the next one, which is an error that names it; a last
line cut off by a kill is set aside in a file of its own. One writer at a time (flock); a line is on the disk (fsync)
before anything goes on.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vlp_models.errors import DataError

START = "0" * 64
Entry = dict[str, Any]


class LedgerError(DataError):
    """The ledger is not what was written."""


@dataclass(kw_only=True)
class State:
    """What the ledger says of one model.

    champions: bottom to top; a promotion puts one on, a rollback takes one off.
    pending: an intent whose end is not on record.
    withdrawn: versions that were rolled back and have not been promoted since.
    """

    champions: list[int] = field(default_factory=list)
    pending: Entry | None = None
    withdrawn: set[int] = field(default_factory=set)

    @property
    def champion(self) -> int | None:
        return self.champions[-1] if self.champions else None

    @property
    def previous(self) -> int | None:
        return self.champions[-2] if len(self.champions) > 1 else None


class Ledger:
    """
    Raises (all but `locked`):
        LedgerError: the chain is broken; names the line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held = False

    @contextmanager
    def locked(self, timeout: float = 3600.0) -> Iterator[None]:
        """Exclusive among all processes of this machine; a process that dies lets go.

        Raises:
            DataError: another promotion holds it for longer than `timeout` seconds.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path.with_name(f".{self.path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            deadline, told = time.monotonic() + timeout, False
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        raise DataError(f"{self.path}: held by another promotion for {timeout:.0f} s") from None
                    if not told:
                        print("another promotion is being decided; waiting for it", file=sys.stderr)
                        told = True
                    time.sleep(0.05)
            self._held = True
            self._set_torn_line_aside()
            yield
        finally:
            self._held = False
            os.close(descriptor)

    def append(self, entry: Entry) -> Entry:
        """Writes one line, through to the disk. Only within `locked`. Returns it with its number, time and chain."""
        if not self._held:
            raise RuntimeError("a ledger is appended to under its lock")
        lines = self._lines()[0]
        self._check(lines)
        entry = {
            "seq": len(lines) + 1,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            **entry,
            "previous": hash_line(lines[-1]) if lines else START,
        }
        line = json.dumps(entry, sort_keys=True, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        new = not self.path.exists()
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        before = os.fstat(descriptor).st_size
        try:
            written = os.write(descriptor, line)
            while written < len(line):
                written += os.write(descriptor, line[written:])
            os.fsync(descriptor)
        except OSError:  # a full disk: no half line may stay
            os.ftruncate(descriptor, before)
            raise
        finally:
            os.close(descriptor)
        if new:
            _sync_directory(self.path.parent)
        return entry

    def entries(self) -> list[Entry]:
        """All whole lines, the chain checked. A line being written just now is not among them."""
        return self._check(self._lines()[0])

    def hashes(self) -> list[str]:
        """sha256 of each line."""
        return [hash_line(line) for line in self._lines()[0]]

    def state(self, model: str) -> State:
        return replay(self.entries()).get(model, State())

    def _lines(self) -> tuple[list[bytes], bytes]:
        """The lines, and what follows the last line's end."""
        try:
            *lines, rest = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return [], b""
        return lines, rest

    def _check(self, lines: list[bytes]) -> list[Entry]:
        entries: list[Entry] = []
        previous = START
        for number, line in enumerate(lines, 1):
            where = f"{self.path}, line {number}"
            try:
                entry = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError):
                raise LedgerError(f"{where}: not JSON: the ledger was changed; {WAY_OUT}") from None
            if not isinstance(entry, dict) or entry.get("seq") != number or entry.get("previous") != previous:
                earlier = f"line {number - 1} is not what it was" if number > 1 else "it is not the first line"
                raise LedgerError(f"{where}: the chain is broken here ({earlier}, or lines are missing); {WAY_OUT}")
            entries.append(entry)
            previous = hash_line(line)
        return entries

    def _set_torn_line_aside(self) -> None:
        """A kill in the middle of an append leaves half a line: kept beside the ledger, taken out of it."""
        lines, rest = self._lines()
        if not rest:
            return
        aside = self.path.with_name(f"{self.path.name}.torn-{len(lines) + 1}-{time.time_ns()}")
        aside.write_bytes(rest)
        _sync(aside)
        with self.path.open("r+b") as file:
            file.truncate(sum(len(line) + 1 for line in lines))
            os.fsync(file.fileno())
        print(f"{self.path}: line {len(lines) + 1} was cut off while it was written; now in {aside}", file=sys.stderr)


WAY_OUT = (
    "restore it from your copy; or, to go on without its past, move it away: the next promotion begins a new one "
    "with the registry's present champion"
)


def replay(entries: list[Entry]) -> dict[str, State]:
    """Model -> what its aliases should be, from the ledger alone."""
    states: dict[str, State] = {}
    for entry in entries:
        state = states.setdefault(entry["model"], State())
        match entry["kind"]:
            case "intent":
                state.pending = entry
            case "undone":
                state.pending = None
            case "done":
                state.pending = None
                if entry["action"] == "rollback":
                    state.withdrawn.add(state.champions.pop())
                else:
                    state.champions.append(entry["version"])
                    state.withdrawn.discard(entry["version"])
            case "adopted":
                state.champions = list(entry["champions"])
                if not state.champions:  # a registry begun anew numbers its versions anew
                    state.withdrawn.clear()
                state.pending = None
    return states


def hash_line(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
