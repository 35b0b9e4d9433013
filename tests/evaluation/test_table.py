"""The results table on the terminal: what of all records is shown, and nothing cut off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vlp_models.evaluation.report.table import print_results


def record(split: str, value: float, **changes: Any) -> dict[str, Any]:
    told: dict[str, Any] = {"task": "vqa", "metric": "accuracy", "dataset": "scenes"}
    told |= {"run": "a-run", "model": "tden", "note": ""}
    baselines = {"image blanked": 40.0, "per question text": 41.1}
    return (
        told
        | {"split": split, "value": value, "low": 1.0, "high": 99.0, "baselines": baselines, "seen": None}
        | changes
    )


@pytest.fixture
def printed(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    def show(*records: dict[str, Any], columns: str = "") -> str:
        monkeypatch.delenv("COLUMNS", raising=False)
        if columns:
            monkeypatch.setenv("COLUMNS", columns)
        (tmp_path / "summary.json").write_text(json.dumps(records))
        print_results(tmp_path / "summary.json")
        return capsys.readouterr().out

    return show


def test_what_runs_were_chosen_on_is_shown_where_it_is_all_there_is(printed: Any) -> None:
    both = printed(record("val", 51.5), record("test", 52.5), record("val", 53.5, dataset="photographs"))
    assert "52.5" in both and "53.5" in both and "51.5" not in both
    assert "vqa: scenes test" in both and "vqa: photographs val" in both


def test_scores_without_what_was_seen_stand_beside_where_there_are_any(printed: Any) -> None:
    assert "unseen" not in printed(record("test", 52.5))
    seen = {"without_both": {"value": 47.3, "low": None, "high": None, "n": 30}}
    shown = printed(record("test", 52.5), record("test", 50.0, run="another", seen=seen))
    assert "unseen" in shown and "47.3" in shown


@pytest.mark.parametrize("columns", ["", "80"])
def test_nothing_is_cut_off(printed: Any, columns: str) -> None:
    words = printed(record("test", 52.5, model="unified-vlp", run="a-run"), columns=columns).split()
    for word in ("accuracy", "a-run", "unified-vlp", "52.5", "blanked", "40.0", "question", "41.1"):
        assert word in words
