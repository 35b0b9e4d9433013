"""The ledger by itself: what a kill tears, what a crowd writes, what a replay gives."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from vlp_models.registry.promotion.ledger import Ledger, LedgerError, State, replay


def entry(kind: str, version: int, action: str = "promote", **more: Any) -> dict[str, Any]:
    return {"kind": kind, "action": action, "model": "m", "task": "vqa", "version": version, "from": None, **more}


def fill(path: Path, count: int) -> None:
    ledger = Ledger(path)
    for version in range(count):
        with ledger.locked():
            ledger.append(entry("refused", version))


def test_a_torn_last_line_is_set_aside_not_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    fill(ledger.path, 2)
    whole = ledger.path.read_bytes()
    torn = b'{"seq": 3, "kind": "ref'
    ledger.path.write_bytes(whole + torn)
    assert len(ledger.entries()) == 2  # readers look past it: it may be being written
    with ledger.locked():
        ledger.append(entry("refused", 7))
    assert "line 3 was cut off" in capsys.readouterr().err
    (aside,) = tmp_path.glob("ledger.jsonl.torn-3-*")
    assert aside.read_bytes() == torn
    assert [e["version"] for e in ledger.entries()] == [0, 1, 7] and ledger.path.read_bytes().startswith(whole)


def test_a_crowd_of_processes_writes_one_chain(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    crowd = [multiprocessing.get_context("fork").Process(target=fill, args=(path, 20)) for _ in range(4)]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join(60)
    assert [e["seq"] for e in Ledger(path).entries()] == list(range(1, 81))


def test_every_changed_byte_is_noticed_but_in_the_last_line(tmp_path: Path) -> None:
    """The last line has no successor; tests/registry/test_promotion.py shows who watches over it."""
    path = tmp_path / "ledger.jsonl"
    fill(path, 3)
    whole = path.read_bytes()
    for place in range(0, whole.rindex(b"\n", 0, -1), 7):
        changed = bytearray(whole)
        changed[place] ^= 1
        path.write_bytes(bytes(changed))
        with pytest.raises(LedgerError, match=r"ledger.jsonl, line [123]: "):
            Ledger(path).entries()


def test_replay() -> None:
    promoted = [entry("intent", 1), entry("done", 1), entry("refused", 2), entry("intent", 3), entry("done", 3)]
    assert replay(promoted)["m"] == State(champions=[1, 3])
    back = [*promoted, entry("intent", 1, "rollback"), entry("done", 1, "rollback")]
    assert replay(back)["m"] == State(champions=[1], withdrawn={3})
    undone = [*back, entry("intent", 4), entry("undone", 4)]
    assert replay(undone)["m"] == replay(back)["m"]
    pending = replay([*back, entry("intent", 4)])["m"]
    assert pending.pending is not None and pending.champion == 1
    again = replay([*back, entry("intent", 3), entry("done", 3), entry("adopted", 9, champions=[1, 3, 9])])["m"]
    assert again == State(champions=[1, 3, 9]) and again.previous == 3
