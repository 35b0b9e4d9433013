"""Outages on a real Prefect setup: the machine of a run or its worker dies, or the server is killed and comes back."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from flow_project import break_stage
from unattended_site import TRAINER, open_site, wait_until

pytestmark = [pytest.mark.server, pytest.mark.long]
# Runs until the file `enough` appears, and records its starts.
LONG_TRAINER = """
import os, pathlib, time
with open("starts", "a") as starts:
    print(os.environ["DVC_STAGE"], file=starts)
for number in range(1200):
    print(f"update {number}")
    if pathlib.Path("enough").exists():
        break
    time.sleep(0.1)
"""
PRETRAININGS = ["pretrain@tden", "pretrain@tden-two-pass"]


@pytest.mark.timeout(900)
def test_dead_run_is_marked_and_reported_and_the_next_one_resumes(tmp_path: Path) -> None:
    with open_site(tmp_path) as site:
        text = (site.project / "dvc.yaml").read_text()
        (site.project / "trainer.py").write_text(TRAINER)
        break_stage(site.project, "pretrain", "import trainer")
        run = site.server.start_run("retrain/weekly")
        wait_until(lambda: (site.project / "started").exists(), 180)
        time.sleep(35)  # at least one heartbeat
        flows = [
            process
            for process in psutil.Process(site.worker.pid).children(recursive=True)
            if "prefect" in " ".join(process.cmdline()) and "common.supervise" not in " ".join(process.cmdline())
        ]
        assert flows
        site.worker.kill()
        for process in flows:
            os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: (site.project / "saved").exists(), 60)
        assert site.server.wait_for(run, "CRASHED", 240)["message"].startswith("no heartbeat for ten minutes")

        (site.project / "dvc.yaml").write_text(text)
        site.worker = site.server.start(["worker", "start", "--pool", "vlp"], site.project)
        assert site.next_message("Crashed", 120)
        site.server.wait_for(site.server.start_run("retrain/weekly"), "COMPLETED", 240)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ends_meanwhile", [False, True], ids=["training continues", "training ends meanwhile"])
def test_training_continues_without_the_server(tmp_path: Path, ends_meanwhile: bool) -> None:
    with open_site(tmp_path) as site:
        (site.project / "trainer.py").write_text(LONG_TRAINER)
        break_stage(site.project, "pretrain", "import trainer")
        run = site.server.start_run("retrain/weekly")
        wait_until(lambda: (site.project / "starts").exists(), 180)
        server = psutil.Process(site.server.process.pid)
        for process in [server, *server.children(recursive=True)]:
            process.kill()
        site.server.process.wait()
        if ends_meanwhile:
            (site.project / "enough").touch()
        time.sleep(45)
        site.server.process = site.server.start(site.server.command)
        wait_until(site.server.is_healthy, 120)
        (site.project / "enough").touch()
        site.server.wait_for(run, "COMPLETED", 150)
        assert (site.project / "starts").read_text().split() == PRETRAININGS
        assert site.next_message("Completed")


@pytest.mark.timeout(600)
def test_flow_continues_without_its_worker_and_the_next_worker_starts_no_second_one(tmp_path: Path) -> None:
    with open_site(tmp_path) as site:
        (site.project / "trainer.py").write_text(LONG_TRAINER)
        break_stage(site.project, "pretrain", "import trainer")
        run = site.server.start_run("retrain/weekly")
        wait_until(lambda: (site.project / "starts").exists(), 180)
        flow = psutil.Process(site.worker.pid).children()
        site.worker.kill()
        site.worker.wait()
        time.sleep(5)  # of output that nobody reads
        site.worker = site.server.start(["worker", "start", "--pool", "vlp"], site.project)
        time.sleep(15)
        assert [entry["id"] for entry in site.server.flow_runs("RUNNING")] == [run]
        (site.project / "enough").touch()
        site.server.wait_for(run, "COMPLETED", 150)
        assert (site.project / "starts").read_text().split() == PRETRAININGS
        assert site.next_message("Completed")
        assert not psutil.wait_procs(flow, timeout=30)[1]
        site.server.wait_for(site.server.start_run("retrain/weekly"), "COMPLETED", 150)
