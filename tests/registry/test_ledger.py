"""The ledger by itself: lines cut off by a kill, concurrent writers, changed lines, replay."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from vlp_models.registry.promotion.ledger import Ledger, LedgerError, Promoted, replay


def entry(action: str, version: int | None, **more: Any) -> dict[str, Any]:
    content = "" if version is None else f"content-{version}"
    return {"action": action, "model": "m", "task": "vqa", "version": version, "content": content, "from": None, **more}


def fill(path: Path, count: int) -> None:
    ledger = Ledger(path)
    for version in range(count):
        with ledger.locked():
            ledger.append(entry("refused", version))


def test_last_line_cut_off_by_a_kill_is_set_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    fill(ledger.path, 2)
    whole = ledger.path.read_bytes()
    torn = b'{"seq": 3, "action": "ref'
    ledger.path.write_bytes(whole + torn)
    assert len(ledger.entries()) == 2  # readers ignore it: it may be being written
    with ledger.locked():
        ledger.append(entry("refused", 7))
    assert "line 3 was cut off" in capsys.readouterr().err
    (aside,) = tmp_path.glob("ledger.jsonl.torn-3-*")
    assert aside.read_bytes() == torn
    assert [e["version"] for e in ledger.entries()] == [0, 1, 7] and ledger.path.read_bytes().startswith(whole)


def test_concurrent_processes_write_one_chain(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    writers = [multiprocessing.get_context("fork").Process(target=fill, args=(path, 20)) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [e["seq"] for e in Ledger(path).entries()] == list(range(1, 81))


def test_every_changed_byte_and_every_removed_line_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    fill(path, 3)
    whole = path.read_bytes()
    for place in range(0, len(whole) - 1, 7):
        changed = bytearray(whole)
        changed[place] ^= 1
        path.write_bytes(bytes(changed))
        with pytest.raises(LedgerError, match=r"ledger.jsonl, line [123]: "):
            Ledger(path).entries()
    lines = whole.splitlines(keepends=True)
    for kept in ([*lines[1:]], [lines[0], lines[2]], [lines[1], lines[0], lines[2]], [b"<<<<<<< ours\n", *lines]):
        path.write_bytes(b"".join(kept))
        with pytest.raises(LedgerError, match=r"ledger.jsonl, line [12]: .*restore the file with git"):
            Ledger(path).entries()


def test_appending_needs_the_lock(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="only within"):
        Ledger(tmp_path / "ledger.jsonl").append(entry("refused", 1))


def test_replay_gives_champions_and_withdrawn_versions() -> None:
    def champions(*entries: dict[str, Any]) -> list[int]:
        return [promoted.version for promoted in replay(entries)["m"].champions]

    promoted = [entry("promoted", 1), entry("refused", 2), entry("promoted", 3)]
    assert replay(promoted)["m"].champions == [Promoted(1, "content-1"), Promoted(3, "content-3")]
    back = [*promoted, entry("rolled back", 1)]
    assert champions(*back) == [1] and replay(back)["m"].withdrawn == {"content-3"}
    again = [*back, entry("promoted", 3)]
    assert champions(*again) == [1, 3] and not replay(again)["m"].withdrawn
    withdrawn = [*again, entry("withdrawn", None, versions=[1], contents=["content-1"])]
    assert champions(*withdrawn) == [3] and replay(withdrawn)["m"].withdrawn == {"content-1"}
    assert champions(*again, entry("accepted", 9)) == [1, 3, 9]
    assert champions(*again, entry("accepted", 1)) == [1], "an earlier champion is one again"
    assert champions(*again, entry("rolled back", None)) == [], "no earlier champion exists any more"
