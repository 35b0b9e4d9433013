"""A Prefect server that is killed in mid-run and comes back a minute later: the trainer never notices."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from flow_project import break_stage
from unattended_site import open_site, wait_until

TRAINER = """
import pathlib, time
with open("starts", "a") as starts:
    starts.write("x")
for _ in range(1200):
    if pathlib.Path("enough").exists():
        break
    time.sleep(0.1)
"""


@pytest.mark.server
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ends_meanwhile", [False, True], ids=["training goes on", "training ends meanwhile"])
def test_training_goes_on_without_the_server(tmp_path: Path, ends_meanwhile: bool) -> None:
    with open_site(tmp_path) as site:
        (site.project / "trainer.py").write_text(TRAINER)
        break_stage(site.project, "pretrain", "import trainer")
        run = site.server.start_run("retrain/weekly")
        wait_until(lambda: (site.project / "starts").exists(), 180)
        gone = psutil.Process(site.server.process.pid)
        for process in [gone, *gone.children(recursive=True)]:
            process.kill()
        site.server.process.wait()
        if ends_meanwhile:
            (site.project / "enough").touch()
        time.sleep(45)
        site.server.process = site.server.start(site.server.command)
        wait_until(site.server.healthy, 120)
        (site.project / "enough").touch()
        site.server.wait_for(run, "COMPLETED", 150)
        assert (site.project / "starts").read_text() == "x"
        assert site.told("Completed")
