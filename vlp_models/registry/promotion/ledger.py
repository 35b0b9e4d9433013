"""The promotion ledger: JSON lines, only ever appended, each holding the sha256 of the line before it.

The registry has it (promotion/log.py): all checkouts that share a registry share its ledger. The file in the work tree
is a copy, to be read and committed; whatever git does to it, the next decision mends it. A line that was edited,
inserted or removed breaks the chain at the next one; a last line cut off by a kill is set aside in a file of its own.
One writer of a file at a time (flock); a line is on the disk (fsync) before anything goes on.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from vlp_models.errors import DataError

START = "0" * 64
Entry = dict[str, Any]


class LedgerError(DataError):
    """The ledger is not what was written."""


class Overtaken(DataError):
    """Another checkout has written to the ledger since it was read: what was to be written was decided on old facts."""


class Log(Protocol):
    """The ledger's lines in the registry."""

    def lines(self) -> list[bytes]:
        """
        Raises:
            LedgerError: they are not what was written.
        """

    def add(self, line: bytes) -> bool:
        """Adds a line that names the last one as its predecessor; whether it still was the last one."""


@dataclass(kw_only=True)
class State:
    """What the ledger says of one model.

    champions: bottom to top; a promotion puts one on, a rollback takes one off.
    pending: an intent whose end is not on record.
    withdrawn: versions that were rolled back, or withdrawn, and have not been promoted since.
    contents: what a version was when it was promoted: a registry that was lost or put back numbers anew.
    moved: number of the last line that made a champion.
    """

    champions: list[int] = field(default_factory=list)
    pending: Entry | None = None
    withdrawn: set[int] = field(default_factory=set)
    contents: dict[int, str] = field(default_factory=dict)
    moved: int = 0

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

    def __init__(self, path: Path, name: str = "") -> None:
        """name: of the ledger in the registry."""
        self.path = path
        self.name = name
        self._held = False
        self._log: Log | None = None

    @contextmanager
    def locked(self, log: Log | None = None, timeout: float = 3600.0) -> Iterator[None]:
        """Exclusive among all processes of this checkout; a process that dies lets go. The file is what `log` has.

        Raises:
            DataError: another promotion holds it for longer than `timeout` seconds.
            LedgerError: the log's chain is broken; or there is no line in it, and the file's is.
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
            self._held, self._log = True, log
            self._set_torn_line_aside()
            if log is not None:
                self._bring_in_step(log)
            yield
        finally:
            self._held, self._log = False, None
            os.close(descriptor)

    def append(self, entry: Entry) -> Entry:
        """Writes one line, through to the disk. Only within `locked`. Returns it with its number, time and chain.

        Raises:
            Overtaken: see there; nothing was written.
        """
        if not self._held:
            raise RuntimeError("a ledger is appended to under its lock")
        lines = self._lines()[0]
        check(lines, str(self.path))
        entry = {
            "seq": len(lines) + 1,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            **entry,
            "previous": hash_line(lines[-1]) if lines else START,
        }
        line = json.dumps(entry, sort_keys=True, ensure_ascii=False, allow_nan=False).encode()
        if self._log is not None and not self._log.add(line):
            raise Overtaken(
                f"{self.path}: another checkout has written to the ledger meanwhile; see `vlp history`, then ask again"
            )
        self._write(line + b"\n")  # killed before: the next call takes the line from the registry
        return entry

    def _write(self, line: bytes) -> None:
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

    def refresh(self) -> bool:
        """Within `locked`: takes over what the registry has; whether that was anything new."""
        before = self._lines()[0]
        if self._log is not None:
            self._bring_in_step(self._log)
        return self._lines()[0] != before

    def entries(self) -> list[Entry]:
        """All whole lines, the chain checked. A line being written just now is not among them."""
        return check(self._lines()[0], str(self.path))

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

    def _bring_in_step(self, log: Log) -> None:
        """The file follows the log, but where the log lacks lines that the file has: a registry from before there was
        one in it, or that was lost or put back to an earlier day."""
        own, kept = self._lines()[0], log.lines()
        if own == kept:
            return
        if own[: len(kept)] == kept and self._goes_on(own, len(kept)):
            print(f"{self.path}: {len(own) - len(kept)} lines that the registry lacks go there", file=sys.stderr)
            for line in own[len(kept) :]:
                log.add(line)
            kept = log.lines()
            if own == kept:
                return
        if kept[: len(own)] != own:
            number = next((n for n, (a, b) in enumerate(zip(own, kept, strict=False), 1) if a != b), len(kept) + 1)
            aside = self.path.with_name(f"{self.path.name}.aside-{time.time_ns()}")
            aside.write_bytes(self.path.read_bytes())
            _sync(aside)
            print(
                f"{self.path}, line {number}: not what the registry has; made anew from there, the old file is {aside}",
                file=sys.stderr,
            )
        elif own:
            print(f"{self.path}: {len(kept) - len(own)} lines taken over from the registry", file=sys.stderr)
        partial = self.path.with_name(f".{self.path.name}.partial")
        partial.write_bytes(b"".join(line + b"\n" for line in kept))
        partial.replace(self.path)
        _sync(self.path)

    def _goes_on(self, lines: list[bytes], kept: int) -> bool:
        """Whether the file's chain holds.

        Raises:
            LedgerError: it does not, and the registry has no line to make it anew from.
        """
        try:
            check(lines, str(self.path))
        except LedgerError:
            if not kept:
                raise
            return False
        return True

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


def check(lines: Sequence[bytes], where: str) -> list[Entry]:
    """The entries, whose chain holds.

    Raises:
        LedgerError: it does not; names the line.
    """
    entries: list[Entry] = []
    previous = START
    for number, line in enumerate(lines, 1):
        place = f"{where}, line {number}"
        try:
            entry = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise LedgerError(f"{place}: not JSON: the ledger was changed; {WAY_OUT}") from None
        if not isinstance(entry, dict) or entry.get("seq") != number or entry.get("previous") != previous:
            earlier = f"line {number - 1} is not what it was" if number > 1 else "it is not the first line"
            raise LedgerError(f"{place}: the chain is broken here ({earlier}, or lines are missing); {WAY_OUT}")
        entries.append(entry)
        previous = hash_line(line)
    return entries


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
                state.moved = entry.get("seq", 0)
                if entry["action"] == "withdraw":
                    state.champions = list(entry["champions"])
                    state.withdrawn |= set(entry["withdrawn"])
                elif entry["action"] == "rollback":
                    state.withdrawn.add(state.champions.pop())
                else:
                    state.champions.append(entry["version"])
                    state.withdrawn.discard(entry["version"])
                if content := entry.get("content"):
                    state.contents[entry["version"]] = content
            case "adopted":
                state.moved = entry.get("seq", 0)
                state.champions = list(entry["champions"])
                if entry.get("renumbered", not state.champions):  # a registry begun anew numbers its versions anew
                    state.withdrawn.clear()
                    state.contents.clear()
                state.contents |= {int(version): c for version, c in entry.get("contents", {}).items() if c}
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
