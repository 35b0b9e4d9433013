"""The year: what is planted, and that its judge finds what is wrong. A real month of it is the long test."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "year"))
import judge
import planting
import summary

YEAR = Path(judge.__file__).parent


def test_a_year_plants_everything_and_a_month_some_of_it() -> None:
    for seed in range(20):
        weeks = planting.plan(seed, 52)
        assert {week.drop for week in weeks} == {planting.CALM, *planting.DROPS}
        assert {week.act for week in weeks} == {"", *planting.ACTS}
        assert {week.fault for week in weeks} == {"", *planting.FAULTS}
        withdrawn = next(week.number for week in weeks if week.act == "forget")
        assert all(week.number > withdrawn for week in weeks if week.drop == "withdrawn again")
        assert not [week for week in weeks if week.drop in planting.REJECTED and week.fault]
        assert weeks[0] == planting.Week(1) and weeks == planting.plan(seed, 52)
        month = planting.plan(seed, 4)
        assert len({week.fault for week in month}) == 4


def make_ledger(project: Path, actions: list[str]) -> None:
    """Write a ledger whose hashes are right."""
    (project / "promotions").mkdir(parents=True, exist_ok=True)
    previous, lines = "0" * 64, []
    for number, action in enumerate(actions, 1):
        entry: dict[str, Any] = {"seq": number, "previous": previous, "action": action, "version": number}
        entry["hash"] = hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()
        previous = entry["hash"]
        lines.append(json.dumps(entry) + "\n")
    (project / "promotions" / "ledger.jsonl").write_text("".join(lines))


@pytest.fixture
def judged(tmp_path: Path) -> judge.Judge:
    week = {"number": 1, "drop": "calm", "act": "", "fault": ""}
    context = {"work": str(tmp_path), "project": str(tmp_path / "project"), "week": 1, "plan": [week]}
    return judge.Judge(
        {**context, "withdrawn": [], "flows": [], "started": 0.0, "reported": {"bucket away": ["dvc push"]}}
    )


def is_right(judged: judge.Judge, name: str) -> bool:
    return next(bool(check["ok"]) for check in reversed(judged.checks) if check["check"] == name)


def test_judge_finds_a_ledger_that_was_changed_or_lost_a_line(judged: judge.Judge, tmp_path: Path) -> None:
    ledger = tmp_path / "project" / "promotions" / "ledger.jsonl"
    make_ledger(tmp_path / "project", ["promoted", "refused"])
    judged.look_at_ledger()
    assert is_right(judged, "ledger")
    whole = ledger.read_text()
    for changed in (whole.replace("refused", "promoted"), whole.splitlines(keepends=True)[0]):
        ledger.write_text(changed)
        judged.look_at_ledger()
        assert not is_right(judged, "ledger")
        (tmp_path / "ledger-before.jsonl").write_text(whole)


def test_judge_finds_images_that_are_lost_twice_or_leaked(judged: judge.Judge, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet as parquet

    images = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("good", "leak", "bad caption")}
    fates = [
        {"week": 1, "image": name, "sha256": sha, "fate": "leak" if name == "leak" else "new"}
        for name, sha in images.items()
    ]
    (tmp_path / "fates.jsonl").write_text("".join(json.dumps(fate) + "\n" for fate in fates))
    batch = tmp_path / "project" / "data" / "accepted" / "batch" / "images"
    batch.mkdir(parents=True)
    for name in ("good", "bad caption"):
        (batch / f"{name}.png").write_bytes(name.encode())

    def write(validated: list[str]) -> None:
        for table, rows in {
            "validated/images": [{"source": "ingested", "sha256": images[name]} for name in validated],
            "validated/quarantine": [{"row_id": "ingested/bad caption"}],
            "interim/ingested/images": [{"image_id": f"ingested/{n}", "sha256": sha} for n, sha in images.items()],
        }.items():
            file = tmp_path / "project" / "data" / f"{table}.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            parquet.write_table(pyarrow.Table.from_pylist(rows), file)

    for validated, right in (
        (["good"], True),
        (["bad caption"], False),  # one is lost
        (["good", "good"], False),
        (["good", "leak"], False),
    ):
        write(validated)
        judged.look_at_data()
        assert is_right(judged, "data") == right, validated
    (batch / "again.png").write_bytes(b"good")
    write(["good"])
    judged.look_at_data()
    assert not is_right(judged, "data")


def test_judge_counts_the_messages_about_a_fault(judged: judge.Judge, tmp_path: Path) -> None:
    judged.week = {"number": 1, "drop": "calm", "act": "", "fault": "bucket away"}
    message = {
        "time": 1.0,
        "state": "Failed",
        "subject": "retrain: Failed",
        "text": "dvc push: no answer",
        "message": "",
    }
    for count, right in ((0, False), (1, True), (2, False)):
        (tmp_path / "messages.jsonl").write_text((json.dumps(message) + "\n") * count)
        judged.look_at_reports()
        assert is_right(judged, "reports") == right
    judged.week["fault"] = ""
    (tmp_path / "messages.jsonl").write_text(json.dumps(message) + "\n")
    judged.look_at_reports()
    assert not is_right(judged, "reports"), "a failure without a planted fault"


def test_growth_is_a_line_through_the_weeks_after_the_first_month() -> None:
    weeks = [
        {"disk": {"cache": 1e6 * (100 + max(0, week - 4))}, "images": 1000 + 10 * max(0, week - 4)}
        for week in range(1, 53)
    ]
    rows = {row["part"]: row for row in summary.growth(weeks, "disk")}
    assert rows["cache"]["month"] == 100 and rows["cache"]["end"] == 148
    assert rows["cache"]["percent"] == pytest.approx(1.0)
    assert rows["bounded, per 1,000 images"]["percent"] == pytest.approx(0.0)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_month_on_the_real_stack(tmp_path: Path) -> None:
    if shutil.which("weed") is None:
        pytest.skip("SeaweedFS is not installed: requirements-year.lock")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    done = subprocess.run(
        [sys.executable, YEAR / "year.py", "--work", tmp_path / "year", "--weeks", "4"],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    weeks = summary.read_weeks(tmp_path / "year")
    wrong = [(week["number"], check) for week in weeks for check in week["checks"] if not check["ok"]]
    assert len(weeks) == 4 and not wrong
