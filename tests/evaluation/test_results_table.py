"""The results table on the terminal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vlp_models.cli.results import Scores, print_results, read_scores


def record(split: str, value: float, **changes: Any) -> dict[str, Any]:
    baselines = {"blind baseline": 40.0, "per question text": 41.1}
    return {
        "task": "vqa",
        "metric": "accuracy",
        "headline": True,
        "dataset": "scenes",
        "run": "a-run",
        "model": "tden",
        "note": "",
        "split": split,
        "value": value,
        "low": 1.0,
        "high": 99.0,
        "baselines": baselines,
        "leakage": None,
    } | changes


@pytest.fixture
def printed(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    def show(*records: dict[str, Any], columns: str = "", before: Scores | None = None) -> str:
        monkeypatch.delenv("COLUMNS", raising=False)
        if columns:
            monkeypatch.setenv("COLUMNS", columns)
        (tmp_path / "summary.json").write_text(json.dumps(records))
        print_results(tmp_path / "summary.json", before)
        return capsys.readouterr().out

    return show


def test_only_first_metrics_are_shown_and_torch_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(
        json.dumps([record("test", 52.5), record("test", 61.5, metric="accuracy (what)", headline=False)])
    )
    code = (
        "import sys; from pathlib import Path; from vlp_models.cli.results import print_results; "
        "print_results(Path('summary.json')); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "52.5" in done.stdout and "61.5" not in done.stdout


def test_val_is_shown_only_without_test_scores(printed: Any) -> None:
    both = printed(record("val", 51.5), record("test", 52.5), record("val", 53.5, dataset="photographs"))
    assert "52.5" in both and "53.5" in both and "51.5" not in both
    assert "vqa: scenes test" in both and "vqa: photographs val" in both


def test_column_without_leaked_items_appears_only_if_any_run_has_it(printed: Any) -> None:
    assert "leaked" not in printed(record("test", 52.5))
    leakage = {"without_both": {"value": 47.3, "low": None, "high": None, "n": 30}}
    text = printed(record("test", 52.5), record("test", 50.0, run="another", leakage=leakage))
    assert "leaked" in text and "47.3" in text


def test_highest_baseline_is_shown_and_people_are_none(printed: Any) -> None:
    text = printed(record("test", 52.5, baselines={"human": 99.0, "majority answer": 21.3, "blind baseline": 39.5}))
    assert "39.5 blind baseline" in text and "99.0" not in text.replace("1.0 to 99.0", "") and "21.3" not in text


def test_a_score_that_changed_has_the_previous_one_next_to_it(printed: Any, tmp_path: Path) -> None:
    assert "before" not in printed(record("test", 52.5))
    before = read_scores(tmp_path / "summary.json")
    text = printed(record("test", 61.5), record("test", 44.0, run="another"), before=before)
    assert "before" in text and "52.5" in text
    assert read_scores(tmp_path / "missing.json") == {}


@pytest.mark.parametrize("columns", ["", "80"])
def test_no_cell_is_truncated(printed: Any, columns: str) -> None:
    words = printed(record("test", 52.5, run="a-longer-run-name"), columns=columns).split()
    for word in ("accuracy", "a-longer-run-name", "52.5", "question", "41.1"):
        assert word in words
