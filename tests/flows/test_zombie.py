"""A machine that dies leaves no run "Running" for ever: worker and flow are killed, nobody is left to say so."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from flow_project import break_stage
from unattended_site import TRAINER, open_site, wait_until


@pytest.mark.server
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_dead_run_is_marked_and_told_and_the_next_one_goes_on(tmp_path: Path) -> None:
    with open_site(tmp_path) as site:
        text = (site.project / "dvc.yaml").read_text()
        (site.project / "trainer.py").write_text(TRAINER)
        break_stage(site.project, "pretrain", "import trainer")
        run = site.server.start_run("retrain/weekly")
        wait_until(lambda: (site.project / "started").exists(), 180)
        time.sleep(35)  # a heartbeat at least
        flows = [
            process
            for process in psutil.Process(site.worker.pid).children(recursive=True)
            if "prefect" in " ".join(process.cmdline()) and "flows.supervise" not in " ".join(process.cmdline())
        ]
        assert flows
        site.worker.kill()
        for process in flows:
            os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: (site.project / "saved").exists(), 60)
        assert site.server.wait_for(run, "CRASHED", 240)["message"].startswith("no heartbeat for ten minutes")

        (site.project / "dvc.yaml").write_text(text)
        site.worker = site.server.start(["worker", "start", "--pool", "vlp"], site.project)
        assert site.told("Crashed", 120)
        site.server.wait_for(site.server.start_run("retrain/weekly"), "COMPLETED", 240)
