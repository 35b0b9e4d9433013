"""dvc.lock: repaired after a kill, consistent with what a stage used; results kept until DVC has recorded them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from vlp_models.cli.pipeline import run_stage
from vlp_models.common.workspace import Workspace
from vlp_models.errors import DataError, ParamsError
from vlp_models.pipeline.dvc.consistency import record_params, remove_wrong_entries
from vlp_models.pipeline.dvc.lock_file import BACKUP, DAMAGED, back_up, repair, stage_entry
from vlp_models.pipeline.stages import prepare, tokenizer
from vlp_models.pipeline.unrecorded import RECORD, restore_unrecorded_result, save_unrecorded_result

ROOT = Path(__file__).parents[2]
INTACT = "schema: '2.0'\nstages:\n  a:\n    cmd: run a\n  b:\n    cmd: run b\n"
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
USED = "tokenizer: {min_frequency: 2, rate: 1e-3}\ntrainer: {devices: 1}\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with an intact dvc.lock and its backup."""
    (tmp_path / "dvc.lock").write_text(INTACT)
    back_up(tmp_path)
    return tmp_path


@pytest.mark.parametrize("length", range(len(INTACT) - 1))
def test_lock_file_truncated_anywhere_is_restored_or_valid(root: Path, length: int) -> None:
    (root / "dvc.lock").write_text(INTACT[:length])
    done = repair(root)
    if INTACT[:length] == INTACT[: INTACT.index("  b:")]:  # a complete file with one stage
        assert stage_entry(root, "a") == {"cmd": "run a"}
    else:
        assert len(done) == 1 and "restored from" in done[0]
        assert (root / "dvc.lock").read_text() == INTACT
        assert (root / DAMAGED).read_text() == INTACT[:length]
    assert repair(root) == []


def test_conflict_markers_are_an_error_and_both_sides_stay(root: Path) -> None:
    ours, theirs = "    cmd: run b\n", "    cmd: run c\n"
    merged = INTACT.replace(ours, f"<<<<<<< HEAD\n{ours}=======\n{theirs}>>>>>>> other\n")
    (root / "dvc.lock").write_text(merged)
    with pytest.raises(DataError, match=r"dvc\.lock:\d+: git's conflict markers; .*git checkout --ours dvc\.lock"):
        repair(root)
    assert (root / "dvc.lock").read_text() == merged


def test_intact_lock_file_is_left_alone_and_backed_up(root: Path) -> None:
    other = INTACT.replace("run b", "run c")
    (root / "dvc.lock").write_text(other)
    assert repair(root) == []
    back_up(root)
    (root / "dvc.lock").write_text("")
    back_up(root)  # keeps the older backup
    assert (root / BACKUP).read_text() == other
    repair(root)
    assert (root / "dvc.lock").read_text() == other


def test_repair_backs_up_the_lock_file_before_the_first_stage(tmp_path: Path) -> None:
    (tmp_path / "dvc.lock").write_text(INTACT)
    assert repair(tmp_path) == []
    (tmp_path / "dvc.lock").write_text("")
    assert "restored from" in repair(tmp_path)[0]
    assert (tmp_path / "dvc.lock").read_text() == INTACT


@pytest.mark.parametrize("content", [INTACT[:-1], ""])
def test_damaged_lock_file_without_a_backup_is_moved_away(tmp_path: Path, content: str) -> None:
    (tmp_path / "dvc.lock").write_text(content)
    assert "moved to dvc.lock.damaged" in repair(tmp_path)[0]
    assert not (tmp_path / "dvc.lock").exists()


@pytest.mark.parametrize(
    ("edit", "refused"),
    [
        (("min_frequency: 2", "min_frequency: 3"), True),
        (("log_every_steps: 10", "log_every_steps: 11"), False),
        (("", ""), False),
    ],
)
def test_stage_fails_if_its_params_are_edited_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: tuple[str, str], refused: bool
) -> None:
    for name in ("params.yaml", "dvc.yaml"):
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DVC_STAGE", "tokenizer")
    ran = []

    def edit_params(*_: Any) -> None:
        text = Path("params.yaml").read_text()
        assert edit[0] in text
        Path("params.yaml").write_text(text.replace(*edit))
        ran.append(True)

    monkeypatch.setattr(tokenizer, "run", edit_params)
    if refused:
        with pytest.raises(ParamsError, match="`tokenizer` was edited while tokenizer ran"):
            run_stage("tokenizer", "", "params.yaml")
    else:
        run_stage("tokenizer", "", "params.yaml")
    assert ran


@pytest.mark.parametrize("path", ["data/withdrawn.jsonl", "data/raw/scenes/batch-2/pairs.csv", "lists/split.json", ""])
def test_prepare_fails_if_its_inputs_change_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Otherwise an image withdrawn meanwhile would stay in the data, and a new batch would never be used."""
    for name in ("params.yaml", "dvc.yaml"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "data" / "raw" / "scenes" / "batch-1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    text = Path("params.yaml").read_text()
    Path("params.yaml").write_text(text.replace("karpathy: ", "karpathy: ../../../lists/split.json #"))
    monkeypatch.setenv("DVC_STAGE", "prepare@scenes")

    def add_file(*_: Any) -> None:
        Path("data/raw/scenes/.partial").mkdir()
        if path:
            Path(path).parent.mkdir(exist_ok=True)
            Path(path).write_text("{}")

    monkeypatch.setattr(prepare, "run", add_file)
    if path:
        with pytest.raises(DataError, match=r"changed while prepare scenes ran, .*Run the same command again"):
            run_stage("prepare", "scenes", "params.yaml")
    else:
        run_stage("prepare", "scenes", "params.yaml")


def test_unknown_stage_is_an_error_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ParamsError, match=r"no stage `pretain`; did you mean `pretrain`\?"):
        run_stage("pretain", "", "params.yaml")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("frequency", "removed"), [(2, []), (3, ["tokenizer"])])
def test_edit_after_a_stages_last_check_is_not_recorded(tmp_path: Path, frequency: int, removed: list[str]) -> None:
    lock, text = tmp_path / "dvc.lock", LOCK.replace("{frequency}", str(frequency))
    lock.write_text(text)
    assert remove_wrong_entries(tmp_path) == []  # no stage has run
    record_params(tmp_path, "tokenizer", USED)
    assert remove_wrong_entries(tmp_path) == removed
    head, rest = text.index("  tokenizer"), text.index("  report")
    assert lock.read_text() == (text[:head] + text[rest:] if removed else text)
    lock.write_text(text)
    assert remove_wrong_entries(tmp_path) == []  # a record is of one run


@pytest.mark.parametrize("content", ["", LOCK[:60]], ids=["empty", "truncated"])
def test_damaged_lock_file_is_left_to_repair(tmp_path: Path, content: str) -> None:
    (tmp_path / "dvc.lock").write_text(content)
    record_params(tmp_path, "tokenizer", USED)
    assert remove_wrong_entries(tmp_path) == []
    assert (tmp_path / "dvc.lock").read_text() == content


@pytest.mark.parametrize("record", [None, "", "{}", "[]", '{"files": 3, "recorded": ""}'])
def test_unrecorded_result_is_restored_unless_its_record_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: str | None
) -> None:
    monkeypatch.setenv("DVC_STAGE", "tokenizer")
    workspace = Workspace(tmp_path)
    work, output = workspace.work("tokenizer", "0123"), tmp_path / "data" / "vocab.txt"
    output.parent.mkdir()
    output.write_text("a\nb\n")
    save_unrecorded_result(workspace, work, "tokenizer", [output])
    output.unlink()
    if record is not None:
        (work / RECORD).write_text(record)
    assert restore_unrecorded_result(workspace, work, "tokenizer") == output.exists() == (record is None)
    assert record is None or not (work / RECORD).exists()
