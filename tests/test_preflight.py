"""What DVC leaves half-written is mended before the next run."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlp_models.pipeline.dvc.lock_file import BACKUP, back_up, repair, stage_entry

WHOLE = "schema: '2.0'\nstages:\n  a:\n    cmd: run a\n  b:\n    cmd: run b\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "dvc.lock").write_text(WHOLE)
    back_up(tmp_path)
    return tmp_path


@pytest.mark.parametrize("length", range(len(WHOLE) - 1))
def test_a_lock_file_cut_off_anywhere_is_put_back_or_read_as_far_as_it_goes(root: Path, length: int) -> None:
    (root / "dvc.lock").write_text(WHOLE[:length])
    done = repair(root)
    if WHOLE[:length] == WHOLE[: WHOLE.index("  b:")]:  # a whole file, of one stage
        assert stage_entry(root, "a") == {"cmd": "run a"}
    else:
        assert len(done) == 1 and "restored from" in done[0]
        assert (root / "dvc.lock").read_text() == WHOLE
    assert repair(root) == []


def test_a_whole_lock_file_is_left_alone_and_kept(root: Path) -> None:
    other = WHOLE.replace("run b", "run c")
    (root / "dvc.lock").write_text(other)
    assert repair(root) == []
    back_up(root)
    (root / "dvc.lock").write_text("")
    back_up(root)  # nothing worth keeping
    assert (root / BACKUP).read_text() == other
    repair(root)
    assert (root / "dvc.lock").read_text() == other


def test_a_run_keeps_the_lock_file_before_its_first_stage_begins(tmp_path: Path) -> None:
    (tmp_path / "dvc.lock").write_text(WHOLE)
    assert repair(tmp_path) == []
    (tmp_path / "dvc.lock").write_text("")
    assert "restored from" in repair(tmp_path)[0]
    assert (tmp_path / "dvc.lock").read_text() == WHOLE


@pytest.mark.parametrize("left", [WHOLE[:-1], ""])
def test_without_a_copy_a_damaged_lock_file_is_set_aside(tmp_path: Path, left: str) -> None:
    (tmp_path / "dvc.lock").write_text(left)
    assert "moved to" in repair(tmp_path)[0]
    assert not (tmp_path / "dvc.lock").exists()
