"""The GPU slot is a courtesy between runs: without a server, or without the limit, a stage runs all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
CODE = """
from flows.tasks import gpu_slot
with gpu_slot("gpu", print):
    print("ran")
"""


def test_without_a_server_a_stage_runs_all_the_same(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PREFECT_HOME": str(tmp_path)}
    env |= {"PREFECT_API_URL": "http://127.0.0.1:9/api", "PREFECT_CLIENT_MAX_RETRIES": "0"}
    done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("no slot of `gpu`, going on without")
    assert done.stdout.splitlines()[1] == "ran"
