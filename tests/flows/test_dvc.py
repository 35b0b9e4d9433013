"""What a flow asks of DVC, against a real DVC project."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.dvc import is_stale, repair, repro
from flows.process import StageFailed


@pytest.mark.pipeline
def test_repro_runs_what_is_stale_once(project: Path) -> None:
    lines: list[str] = []
    assert is_stale(project, ["pretrain@tden"])
    assert repro(project, ["pretrain@tden"], lines.append)
    assert (project / "pretrain-tden").exists()
    assert not (project / "report").exists(), "only the target and what it needs"
    assert any("pretrain" in line for line in lines)
    assert not is_stale(project, ["pretrain@tden"])
    assert not repro(project, ["pretrain@tden"], lines.append), "nothing ran"


@pytest.mark.pipeline
def test_a_failing_stage_is_reported_with_its_output(project: Path) -> None:
    text = (project / "dvc.yaml").read_text()
    (project / "dvc.yaml").write_text(text.replace("open('shards','w')", "sys.exit('disk on fire')"))
    with pytest.raises(StageFailed, match="dvc repro shards ended with"):
        repro(project, ["shards"], lambda line: None)
    assert not (project / "shards").exists()


def test_repair_removes_a_damaged_lock_and_nothing_else(project: Path) -> None:
    lock = project / ".dvc" / "tmp" / "rwlock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.write_text("")  # what a DVC killed in mid-write leaves
    assert repair(project) == ["removed a damaged .dvc/tmp/rwlock: no DVC process is alive"]
    assert not lock.exists()
    lock.write_text("{}")
    assert repair(project) == []
    assert lock.exists()
