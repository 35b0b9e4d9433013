"""A campaign continues with what an earlier session did not inject, and a fixed fault counts as fixed."""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import campaign
import pytest
from ground import CAPTIONING, Command, Ground, hash_as_dvc
from injure import GROUPS, KINDS, draw
from moments import Outcome, expect_message

STAGES = ["validate", "shards", "features", "pretrain@tden", "finetune@tden-vqa", CAPTIONING, "register", "report"]


def options(folder: Path, **changes: Any) -> argparse.Namespace:
    settings = {"seed": 1, "count": 5, "only": None, "kind": None, "minutes": 0, "lanes": 2, "reports": folder}
    return argparse.Namespace(**{**settings, **changes})


def session(
    options: argparse.Namespace,
    monkeypatch: pytest.MonkeyPatch,
    lost: tuple[int, ...] = (),
    missed: tuple[int, ...] = (),
    most: int = 99,
) -> list[int]:
    """Run a session that ends after `most` faults; return the numbers that it injected."""
    numbers: list[int] = []

    def inflict(ground: Ground, fault: Any) -> Outcome:
        numbers.append(fault.number)
        outcome = Outcome(fault, hit=fault.number not in missed, seconds=1.0)
        outcome.blame("lost", *["work was repeated"] * (fault.number in lost))
        return outcome

    monkeypatch.setattr(Ground, "stages", STAGES)
    monkeypatch.setattr(campaign, "inflict", inflict)
    monkeypatch.setattr(campaign.Session, "late", lambda self: len(numbers) >= most)
    campaign.Session(options, [Ground(options.reports, lane) for lane in range(options.lanes)]).run()
    return sorted(numbers)


def test_campaign_continues_and_ends_with_enough_hits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_lane = options(tmp_path, lanes=1)
    assert session(one_lane, monkeypatch, missed=(1,), most=3) == [0, 1, 2]
    file = tmp_path / campaign.FILE
    file.write_text(file.read_text() + '{"seed": 1, "num')  # killed while writing
    assert session(options(tmp_path), monkeypatch) == [3, 4, 5], "five in all; one came too late"
    assert session(options(tmp_path), monkeypatch) == []
    assert session(options(tmp_path, count=7), monkeypatch, missed=(6,)) == [6, 7, 8], "another one for 6"
    assert session(options(tmp_path, seed=2, count=2), monkeypatch) == [0, 1], "another seed starts at 0"
    numbers = sorted((record["seed"], record["number"]) for record in campaign.read(file))
    assert numbers == [*((1, number) for number in range(9)), (2, 0), (2, 1)]


def test_fault_that_another_lane_left_out_is_injected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session(options(tmp_path), monkeypatch)
    file = tmp_path / campaign.FILE
    file.write_text("".join(line for line in file.open() if json.loads(line)["number"] != 1))
    assert session(options(tmp_path), monkeypatch) == [1]


def test_loss_counts_until_the_same_fault_is_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session(options(tmp_path, count=2), monkeypatch, lost=(1,))
    file = tmp_path / campaign.FILE
    assert [record["number"] for record in campaign.still_lost(campaign.read(file))] == [1]
    assert session(options(tmp_path, only=1), monkeypatch) == [1]
    assert campaign.still_lost(campaign.read(file)) == []
    page = (tmp_path / "faults.md").read_text()
    assert "3 faults injected: 2 survived, 0 silent, 1 lost, 0 endless; of the last three, 1 were fixed" in page
    assert "## Not survived" in page
    summary = json.loads((tmp_path / "faults.json").read_text())
    assert summary["total"] == {"injected": 2, "survived": 2, "silent": 0, "lost": 0, "endless": 0}, "the last one of 1"
    assert session(options(tmp_path, count=3), monkeypatch) == [2], "a fault injected alone does not count"


def test_each_kind_is_in_one_group() -> None:
    assert sorted(itertools.chain.from_iterable(GROUPS.values())) == sorted(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_drawn_and_can_be_requested(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {draw(1, number, STAGES).kind for number in range(2 * len(KINDS))}
    assert kind in kinds
    (number,) = session(options(tmp_path, kind=kind, count=1), monkeypatch)
    assert draw(1, number, STAGES).kind == kind
    assert draw(1, number, STAGES) == draw(1, number, STAGES)
    assert json.loads((tmp_path / campaign.FILE).read_text())["alone"] is True


@pytest.mark.parametrize(
    ("script", "verdict"),
    [
        ("echo 'a loader process has ended; set trainer.num_workers: 0'; exit 2", "survived"),
        ("echo 'Traceback (most recent call last)'; echo 'a loader process'; exit 1", "silent"),
        ("echo 'stage failed'; exit 2", "silent"),
        ("exit 0", "survived"),
    ],
)
def test_end_needs_a_message_that_names_the_cause(script: str, verdict: str, tmp_path: Path) -> None:
    run = Command("true", tmp_path, wrap=["sh", "-c", script])
    outcome = Outcome(draw(1, 0, STAGES), exit_code=run.wait())
    expect_message(outcome, run, "loader")
    assert outcome.verdict == verdict


def test_command_that_does_nothing_is_endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ground.IDLE", 1)
    run = Command("true", tmp_path, wrap=["sh", "-c", "exec sleep 600"])
    with pytest.raises(subprocess.TimeoutExpired):
        run.wait()
    run.process.kill()


def test_folder_has_the_hash_that_dvc_records(tmp_path: Path) -> None:
    (tmp_path / "data" / "sub").mkdir(parents=True)
    (tmp_path / "data" / "sub" / "ä.txt").write_text("1")
    (tmp_path / "data" / "b.txt").write_text("2")
    script = "from dvc.repo import Repo; print(Repo.init('.', no_scm=True).add('data')[0].outs[0].hash_info.value)"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert hash_as_dvc(tmp_path / "data") == done.stdout.split()[-1]
