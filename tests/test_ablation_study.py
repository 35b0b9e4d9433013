"""benchmarks/ablations_tden.py: every row has its command, and the verdicts are what their words say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def study() -> ModuleType:
    folder = str(Path(__file__).parent.parent / "benchmarks")
    sys.path.insert(0, folder)
    try:
        import ablations_tden
    finally:
        sys.path.remove(folder)
    return ablations_tden


def test_every_row_is_a_command_of_the_docs_and_gives_stages(study: ModuleType) -> None:
    fine_tuning = [[stage, task] for task in study.TASKS for stage in ("finetune", "evaluate")]
    for name, row in study.ROWS.items():
        params = study.params_of(row, seed=2, share=0.1)
        two_pass = name.startswith("two-pass")
        assert study.stages_of(params) == [["scheduled_sampling"] if two_pass else ["pretrain"], *fine_tuning], name
        assert (study.command_of(row) == []) == (name == "all-four")
        for task in params["finetune"].values():
            assert task["init"] == ("scheduled_sampling" if two_pass else "pretrain"), name
            assert task.get("scratch", False) == (name == "no-pretraining"), name
            assert (task["seed"], task["max_epochs"]) == (2, 1)


def test_the_data_are_made_once_in_order(study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    real = study.subprocess.run

    def stage(command: list[str], **options: Any) -> Any:
        if "stage" not in command:
            return real(command, **options)
        ran.append(" ".join(command[command.index("stage") + 1 :]))
        if ran[-1] == "features" and ran.count("features") == 1:
            raise subprocess.CalledProcessError(1, command)
        return None

    monkeypatch.setattr(study.subprocess, "run", stage)
    with pytest.raises(subprocess.CalledProcessError):
        study.make_data(tmp_path / "data")
    assert study.make_data(tmp_path / "data") == tmp_path / "data" / "data"
    study.make_data(tmp_path / "data")
    before = ["generate scenes", "prepare scenes", "prepare scenes_vcr", "validate", "detector"]
    assert ran == [*before, "features", "features", "tokenizer", "shards"]
    (tmp_path / "data" / "sections.yaml").write_text("others\n")
    with pytest.raises(SystemExit, match=f"move {tmp_path} away"):
        study.make_data(tmp_path / "data")


def test_what_is_finished_is_nothing_at_first(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "WORK", tmp_path)
    monkeypatch.setattr(study, "TABLE", tmp_path / "table.md")
    monkeypatch.setattr(sys, "argv", ["ablations_tden.py", "--finished", "--rows", "all-four"])
    with pytest.raises(SystemExit, match="nothing is finished"):
        study.main()
    assert not list(tmp_path.iterdir())


def test_an_order_is_called_only_where_the_interval_leaves_out_zero(study: ModuleType) -> None:
    assert study.verdict(1.0, [2.0, 2.1, 1.9]) == "agrees"
    assert study.verdict(-1.0, [2.0, 2.1, 1.9]) == "disagrees"
    assert study.verdict(1.0, [2.0, -2.1, 1.9]) == "open"
    assert study.verdict(1.0, [2.0]) == "open"
    assert study.verdict(0.0, [2.0, 2.1, 1.9]) == "open"


def test_the_table_states_disagreements(study: ModuleType) -> None:
    values = {
        "all-four": {"captioning": [90.0, 91.0, 92.0], "vqa": [80.0, 81.0, 82.0], "retrieval": [9.0, 7.0, 8.0]},
        "no-pretraining": {"captioning": [95.0, 96.0, 97.0], "vqa": [70.0, 71.0, 72.0], "retrieval": [8.0, 9.0, 7.0]},
    }
    for tasks in values.values():
        tasks["vcr"] = [30.0, 31.0, 32.0]
    text = study.table(values, "note")
    assert (
        "| all four, one pass | 3 | 132.4 | 91.0 +- 2.5 | 72.1 | 81.0 +- 2.5 | 62.5 | 8.0 +- 2.5 | 57.3 | 31.0 +- 2.5 |"
        in text
    )
    assert "- CIDEr disagrees with the paper's: all-four over no-pretraining." in text
    assert "- accuracy agrees with the paper's: all-four over no-pretraining." in text
    counts = ["| CIDEr | 0 | 1 | 0 |", "| accuracy | 1 | 0 | 0 |", "| R@1 | 0 | 0 | 1 |", "| Q->AR | 0 | 0 | 1 |"]
    assert "\n" + "\n".join(counts) + "\n" in text, "one table, unbroken"
