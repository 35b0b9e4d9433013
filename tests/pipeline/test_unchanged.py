"""DVC reads params.yaml again when a stage has ended: what it would record must be what was used."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from vlp_models.cli.pipeline import run_stage
from vlp_models.errors import DataError, ParamsError
from vlp_models.pipeline.dvc.consistency import record_params, remove_wrong_entries
from vlp_models.pipeline.stages import prepare, tokenizer

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("edit", "refused"),
    [
        (("min_frequency: 2", "min_frequency: 3"), True),
        (("log_every_steps: 10", "log_every_steps: 11"), False),
        (("", ""), False),
    ],
)
def test_a_stage_fails_if_its_params_were_edited_while_it_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: tuple[str, str], refused: bool
) -> None:
    for name in ("params.yaml", "dvc.yaml"):
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DVC_STAGE", "tokenizer")
    ran = []

    def edits(*_: Any) -> None:
        text = Path("params.yaml").read_text()
        assert edit[0] in text
        Path("params.yaml").write_text(text.replace(*edit))
        ran.append(True)

    monkeypatch.setattr(tokenizer, "run", edits)
    if refused:
        with pytest.raises(ParamsError, match="`tokenizer` was edited while tokenizer ran"):
            run_stage("tokenizer", "", "params.yaml")
    else:
        run_stage("tokenizer", "", "params.yaml")
    assert ran


@pytest.mark.parametrize("what", ["data/withdrawn.jsonl", "data/raw/scenes/batch-2/pairs.csv", "lists/split.json", ""])
def test_prepare_fails_if_what_it_reads_came_while_it_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A picture withdrawn meanwhile would be in the data for good, and a batch never learnt."""
    for name in ("params.yaml", "dvc.yaml"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "data" / "raw" / "scenes" / "batch-1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    text = Path("params.yaml").read_text()
    Path("params.yaml").write_text(text.replace("karpathy: ", "karpathy: ../../../lists/split.json #"))
    monkeypatch.setenv("DVC_STAGE", "prepare@scenes")

    def comes(*_: Any) -> None:
        Path("data/raw/scenes/.partial").mkdir()
        if what:
            Path(what).parent.mkdir(exist_ok=True)
            Path(what).write_text("{}")

    monkeypatch.setattr(prepare, "run", comes)
    if what:
        with pytest.raises(DataError, match=r"was changed while prepare scenes ran, .*Run the same command again"):
            run_stage("prepare", "scenes", "params.yaml")
    else:
        run_stage("prepare", "scenes", "params.yaml")


LOCK = """schema: '2.0'
stages:
  tokenizer:
    cmd: vlp stage tokenizer
    params:
      params.yaml:
        tokenizer:
          min_frequency: {frequency}
          rate: 0.001
    outs:
    - path: data/vocab
      hash: md5
  report:
    cmd: vlp stage report
"""
NOTED = "tokenizer: {min_frequency: 2, rate: 1e-3}\ntrainer: {devices: 1}\n"


@pytest.mark.parametrize(("frequency", "taken"), [(2, []), (3, ["tokenizer"])])
def test_an_edit_behind_a_stages_last_look_is_not_recorded(tmp_path: Path, frequency: int, taken: list[str]) -> None:
    lock, text = tmp_path / "dvc.lock", LOCK.replace("{frequency}", str(frequency))
    lock.write_text(text)
    assert remove_wrong_entries(tmp_path) == []  # no stage has run
    record_params(tmp_path, "tokenizer", NOTED)
    assert remove_wrong_entries(tmp_path) == taken
    head, rest = text.index("  tokenizer"), text.index("  report")
    assert lock.read_text() == (text[:head] + text[rest:] if taken else text)
    lock.write_text(text)
    assert remove_wrong_entries(tmp_path) == []  # notes are of one run


@pytest.mark.parametrize("left", ["", LOCK[:60]], ids=["emptied", "cut off"])
def test_a_lock_file_that_dvc_left_damaged_is_not_touched(tmp_path: Path, left: str) -> None:
    (tmp_path / "dvc.lock").write_text(left)
    record_params(tmp_path, "tokenizer", NOTED)
    assert remove_wrong_entries(tmp_path) == []
    assert (tmp_path / "dvc.lock").read_text() == left
