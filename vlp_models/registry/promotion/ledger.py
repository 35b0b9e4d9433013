"""The promotion ledger: a JSON Lines file in git, appended to and never rewritten. It is the record of all decisions.

MLflow's aliases follow it (promote.py). Each line holds a hash of itself and of the line before it, so a changed,
inserted or removed line is an error that names the line. One process writes at a time, a line is on disk (fsync) before
anything else happens, and a last line that a kill cut off is moved to a file of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vlp_models.common.io import sync_to_disk
from vlp_models.common.lock import file_lock
from vlp_models.common.log import get_logger
from vlp_models.errors import DataError

logger = get_logger(__name__)

START = "0" * 64  # `previous` of the first line
MOVES = ("promoted", "rolled back", "withdrawn", "accepted")  # actions that move aliases; `refused`, `forgotten` do not
Entry = dict[str, Any]


class LedgerError(DataError):
    """The ledger was changed, or it and MLflow's aliases disagree; the message names the way out."""


@dataclass(frozen=True)
class Promoted:
    """A version as it was promoted. Its content identifies it: a rebuilt registry numbers its versions differently."""

    version: int
    content: str


@dataclass(kw_only=True)
class State:
    """The ledger's record of one model.

    champions: oldest first; a promotion appends one, a rollback removes the last.
    withdrawn: contents of versions that were rolled back or withdrawn and not promoted since.
    moves: hashes of the lines that moved aliases. last_move: the last such line.
    """

    champions: list[Promoted] = field(default_factory=list)
    withdrawn: set[str] = field(default_factory=set)
    moves: list[str] = field(default_factory=list)
    last_move: Entry | None = None

    @property
    def champion(self) -> int | None:
        return self.champions[-1].version if self.champions else None

    @property
    def head(self) -> str:
        """Hash of the last line that moved aliases; empty if none did."""
        return self.moves[-1] if self.moves else ""

    def apply(self, entry: Entry) -> None:
        action, content = entry["action"], entry.get("content", "")
        if action not in MOVES:
            return
        if action == "withdrawn":
            contents = set(entry["contents"])
            self.champions = [promoted for promoted in self.champions if promoted.content not in contents]
            self.withdrawn |= contents
        elif action == "rolled back":
            # The champion goes, and with it earlier ones down to the one that follows it.
            if self.champions:
                self.withdrawn.add(self.champions.pop().content)
            while self.champions and self.champions[-1].content != content:  # champions that no longer exist
                self.champions.pop()
        else:
            # Promoted or accepted; an earlier champion that is accepted again takes its old place.
            earlier = [promoted.content for promoted in self.champions]
            if action == "accepted" and content in earlier:
                del self.champions[earlier.index(content) :]
            self.champions.append(Promoted(entry["version"], content))
            self.withdrawn.discard(content)
        self.moves.append(entry.get("hash", ""))
        self.last_move = entry


class Ledger:
    """The ledger file at `path`; it need not exist yet.

    Raises:
        LedgerError: (every method) a line was changed, inserted or removed; names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._locked = False

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude all other writers of this file; a process that dies releases the lock.

        Raises:
            BusyError: another process holds it for more than an hour.
        """
        lock = self.path.with_name(f".{self.path.name}.lock")
        with file_lock(lock, "promotion", wait=3600.0):
            self._locked = True
            try:
                self._set_torn_line_aside()
                yield
            finally:
                self._locked = False

    def append(self, entry: Entry) -> Entry:
        """Write one line through to the disk; only within `locked`. Return it with its number, time and hashes."""
        if not self._locked:
            raise RuntimeError("append to a ledger only within `Ledger.locked`")
        # Read under the lock, so the number and the previous hash are those of the last line.
        entries = self.entries()
        entry = {
            "seq": len(entries) + 1,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            **entry,
            "previous": entries[-1]["hash"] if entries else START,
        }
        entry["hash"] = hash_entry(entry)
        # One write, if the system allows, and on disk before the caller goes on.
        line, is_new = _dump(entry) + b"\n", not self.path.exists()
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        before = os.fstat(descriptor).st_size
        try:
            written = 0
            while written < len(line):
                written += os.write(descriptor, line[written:])
            sync_to_disk(self.path)
        except OSError:  # a full disk: leave no half line
            # Safe under the lock: no other process has appended since.
            os.ftruncate(descriptor, before)
            raise
        finally:
            os.close(descriptor)
        # A new file's name is an entry of the folder, which has to be flushed as well.
        if is_new:
            sync_to_disk(self.path.parent)
        return entry

    def entries(self) -> list[Entry]:
        """Return all complete lines, hashes checked. A line that is being written right now is not among them."""
        return check_lines(self._read()[0], str(self.path))

    def state(self, model: str) -> State:
        return replay(self.entries()).get(model, State())

    def _read(self) -> tuple[list[bytes], bytes]:
        """Return the complete lines, and what follows the last line break."""
        try:
            # After the last line break is nothing, or a line that is incomplete.
            *lines, rest = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return [], b""
        return lines, rest

    def _set_torn_line_aside(self) -> None:
        """Move a last line that a kill cut off to a file next to the ledger."""
        lines, rest = self._read()
        if not rest:
            return
        aside = self.path.with_name(f"{self.path.name}.torn-{len(lines) + 1}-{time.time_ns()}")
        # The torn line is on disk elsewhere before it is cut off here.
        aside.write_bytes(rest)
        sync_to_disk(aside)
        sync_to_disk(aside.parent)
        with self.path.open("r+b") as file:
            # Each complete line and its line break.
            file.truncate(sum(len(line) + 1 for line in lines))
        sync_to_disk(self.path)
        logger.warning("%s: line %d was cut off while it was written; moved to %s", self.path, len(lines) + 1, aside)


def check_lines(lines: Sequence[bytes], name: str) -> list[Entry]:
    """Parse the lines and check every hash.

    Raises:
        LedgerError: a line was changed, inserted or removed; names it.
    """
    entries: list[Entry] = []
    previous = START
    for number, line in enumerate(lines, 1):
        restore = "restore the file with git (`git checkout` or `git pull`); after a merge, keep one side's lines"
        try:
            entry = json.loads(line)
            # Also raises a ValueError for NaN, which JSON does not have.
            is_whole = isinstance(entry, dict) and entry.get("hash") == hash_entry(entry)
        except (ValueError, RecursionError):
            raise LedgerError(f"{name}, line {number}: not valid JSON, the ledger was changed; {restore}") from None
        if isinstance(entry, dict) and "hash" not in entry:
            raise LedgerError(
                f"{name}, line {number}: not a line of this version's ledger; move the file away, then set each "
                "champion with `vlp promote TASK --version N`"
            )
        if not is_whole:
            raise LedgerError(f"{name}, line {number}: the line was changed; {restore}")
        # A removed or inserted line breaks the numbers; a replaced one breaks the chain of hashes.
        if entry.get("seq") != number or entry.get("previous") != previous:
            raise LedgerError(f"{name}, line {number}: lines before it were removed, inserted or changed; {restore}")
        entries.append(entry)
        previous = entry["hash"]
    return entries


def replay(entries: Sequence[Entry]) -> dict[str, State]:
    """Return model -> the ledger's record of it."""
    states: dict[str, State] = {}
    for entry in entries:
        states.setdefault(entry["model"], State()).apply(entry)
    return states


def hash_entry(entry: Mapping[str, Any]) -> str:
    """Return the sha256 of an entry without its own hash."""
    return hashlib.sha256(_dump({key: value for key, value in entry.items() if key != "hash"})).hexdigest()


def _dump(entry: Mapping[str, Any]) -> bytes:
    # Sorted keys: equal entries have equal bytes, and so equal hashes.
    return json.dumps(entry, sort_keys=True, ensure_ascii=False, allow_nan=False).encode()
