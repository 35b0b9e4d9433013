"""What stages cost: measured in real processes, and added up."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.costs.costs import (
    add_up,
    card_fact,
    describe,
    history_notes,
    last_runs,
    make_table,
    read_costs,
    report_section,
    week_of,
)
from vlp_models.contrib.costs.meter import FILE, Cost, EnergyMeter, measure, read_energy
from vlp_models.evaluation.report import ReportContext
from vlp_models.params import load_params

DEFAULTS = Path(__file__).parents[3] / "params.yaml"
# 2026-11-02 was a Monday.
MONDAY = 1_793_577_600.0
ONE = Cost(stage="features", started=MONDAY, seconds=3600.0, cpu=7200.0, memory=2e9, read=1e9, written=5e8, joules=36e3)

BURN = """
import os, subprocess, sys, time
from pathlib import Path
from vlp_models.common.workspace import Workspace
from vlp_models.pipeline.guard import guarded

def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

with guarded(Workspace(Path.cwd()), "features"):
    burn(0.6)
    child = "import time; [0 for _ in iter(lambda: time.process_time() < 0.6, False)]"
    subprocess.run([sys.executable, "-c", child])
    memory = bytearray(300_000_000)
    Path("file").write_bytes(os.urandom(5_000_000))
    descriptor = os.open("file", os.O_RDONLY)
    os.fsync(descriptor)
    if sys.argv[1:]:
        raise SystemExit("failed")
"""


def write(root: Path, *costs: Cost) -> None:
    (root / FILE).parent.mkdir(exist_ok=True)
    (root / FILE).write_text("".join(json.dumps(cost.to_plain()) + "\n" for cost in costs))


def test_a_stage_s_process_and_its_children_are_measured_also_if_it_fails(tmp_path: Path) -> None:
    for arguments in ([], ["fail"]):
        done = subprocess.run([sys.executable, "-c", BURN, *arguments], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == len(arguments), done.stderr
    assert [cost.completed for cost in read_costs(tmp_path)] == [True, False]
    for cost in read_costs(tmp_path):
        assert cost.stage == "features" and cost.started == pytest.approx(time.time(), abs=60)
        assert 1.2 <= cost.cpu <= 20 and cost.seconds >= 1.2
        assert 3e8 <= cost.memory <= 2e9 and 5e6 <= cost.written <= 1e8
    assert len(read_costs(tmp_path)) == 2


def test_two_stages_in_one_process_do_not_count_the_same_time_twice(tmp_path: Path) -> None:
    (tmp_path / ".work").mkdir()
    for name in ("first", "second"):
        with measure(tmp_path, name):
            pass
    assert read_costs(tmp_path)[1].cpu < 0.5


def test_energy_counters_of_all_packages_are_added_and_may_wrap(tmp_path: Path) -> None:
    """As Linux lays them out; parts of a package and the platform count the same energy again."""
    zones = {"intel-rapl:0": "package-0", "intel-rapl:0:0": "core", "intel-rapl:1": "package-1", "intel-rapl:2": "psys"}

    def write_counters(**counters: int) -> None:
        for zone, name in zones.items():
            (tmp_path / zone).mkdir(exist_ok=True)
            (tmp_path / zone / "name").write_text(f"{name}\n")
            (tmp_path / zone / "energy_uj").write_text(f"{counters[name.replace('-', '_')]}\n")
            (tmp_path / zone / "max_energy_range_uj").write_text("999999\n")

    write_counters(package_0=999_000, core=1, package_1=500_000, psys=1)
    meter = EnergyMeter(tmp_path)
    write_counters(package_0=1_000, core=9_999, package_1=700_000, psys=9_999)
    meter.read()  # as the thread does each minute
    write_counters(package_0=2_000, core=99_999, package_1=600_000, psys=99_999)
    assert meter.stop() == pytest.approx(0.002 + 0.001 + 0.2 + 0.9)
    assert read_energy(tmp_path / "absent") == {} and EnergyMeter(tmp_path / "absent").stop() is None
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
    assert EnergyMeter(tmp_path).stop() is None


def test_the_attempts_of_an_interrupted_training_are_one_run() -> None:
    stages = [("a", True), ("b", True), ("a", False), ("a", False), ("a", True), ("a", False)]
    costs = [dataclasses.replace(ONE, stage=stage, completed=completed) for stage, completed in stages]
    assert {cost.stage: cost.cpu / ONE.cpu for cost in last_runs(costs)} == {"a": 3.0, "b": 1.0}


def test_costs_add_up_and_the_memory_is_the_largest(tmp_path: Path) -> None:
    other = dataclasses.replace(ONE, stage="report", cpu=1800.0, memory=3e9)
    total = add_up([ONE, other])
    assert total is not None and (total.cpu, total.memory, total.joules) == (9000.0, 3e9, 72e3)
    assert describe(total) == "2.50 CPU hours, 3.0 GB of memory, 20.0 Wh"
    unknown = dataclasses.replace(ONE, joules=None)
    assert describe(add_up([ONE, unknown]) or ONE) == "4.00 CPU hours, 2.0 GB of memory"
    write(tmp_path, ONE, other)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"stage": "cut o')
    rows = make_table(read_costs(tmp_path), lambda cost: cost.stage)
    assert list(rows) == ["features", "report", "all"]
    assert list(rows["all"].values()) == ["2", "2.00", "2.50", "3.00", "2.00", "1.00", "20.0"]


def test_weeks_begin_on_monday() -> None:
    days = [dataclasses.replace(ONE, started=MONDAY + 86400 * day) for day in (-0.01, 0, 6.99, 7)]
    assert [week_of(cost)[8:] for cost in days] == ["2026-10-26", "2026-11-02", "2026-11-02", "2026-11-09"]


def test_a_card_has_the_cost_of_its_chain_and_the_history_of_the_time_between_decisions(tmp_path: Path) -> None:
    params = load_params(DEFAULTS)
    chain = [f"{kind}@{name}" for kind, name in (c.split("/") for c in params.chain("finetune/tden-vqa"))]
    stages = [*chain, "evaluate@tden-vqa", "evaluate@tden-captioning", chain[0]]  # the last: trained again
    write(tmp_path, *(dataclasses.replace(ONE, stage=stage, started=MONDAY + n) for n, stage in enumerate(stages)))
    hours = 2.0 * (len(chain) + 1)
    assert next(iter(card_fact(params, tmp_path, "tden-vqa").values())).startswith(f"{hours:.2f} CPU hours")
    assert card_fact(params, tmp_path / "absent", "tden-vqa") == {}
    times = ("2026-11-02T00:00:02+00:00", "2026-11-02T00:00:03+00:00", "2026-11-02T00:00:03+00:00")
    notes = history_notes(tmp_path, [{"seq": seq, "time": text} for seq, text in enumerate(times, 1)])
    assert [note[:24] for note in notes] == ["line 1: 4.00 CPU hours, ", "line 2: 2.00 CPU hours, "]
    assert notes[0].endswith(" until then") and notes[1].endswith(" since the task's line before")


def test_the_report_has_a_table_by_stage_and_one_by_week(tmp_path: Path) -> None:
    context = ReportContext(params=load_params(DEFAULTS), workspace=Workspace(tmp_path), records=[], missing=[])
    assert report_section(context).below == ""
    removed = dataclasses.replace(ONE, stage="finetune@removed")
    write(tmp_path, ONE, removed, dataclasses.replace(ONE, started=MONDAY + 7 * 86400))
    page = report_section(context).below
    assert "week of 2026-11-02" in page and "week of 2026-11-09" in page and page.count("<td>features</td>") == 1
    assert "finetune@removed" not in page
