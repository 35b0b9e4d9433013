"""A kill -9 at any point of an ingest, then a second run: no pair is lost or duplicated."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from ingest_project import ROOT, encoded, held, make_project, make_submission, params_of, picture, simple_submission

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.ingest import batch, index, ingest
from vlp_models.contrib.ingest import dvc as dvc_commands
from vlp_models.curation.duplicates import hashes

POINTS: dict[str, tuple[Any, str, int, bool]] = {
    # name: (module, function, at which call, after its work)
    "while images are read": (hashes, "_hash_one", 7, False),
    "before the batch is written": (batch, "write_batch", 1, False),
    "after the batch is written": (batch, "write_batch", 1, True),
    "after the batch is published": (ingest, "publish", 1, True),
    "while the index is written": (index, "read_batch_manifest", 1, True),
    "while DVC runs": (dvc_commands, "_dvc", 1, False),
    "after the batch is tracked": (dvc_commands, "_dvc", 1, True),
    "before the submission moves": (ingest, "_archive", 1, False),
    "after the submission moved": (ingest, "_archive", 1, True),
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def ingest_until(point: str, workspace: Workspace) -> None:
    """Run `vlp ingest` in a child process that kills itself at this point."""
    module, name, call, after = POINTS[point]
    child = os.fork()
    if child == 0:
        try:
            work, calls = getattr(module, name), 0

            def deadly(*arguments: Any, **more: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == call and not after:
                    if name == "_dvc":  # DVC continues without its parent
                        subprocess.Popen([sys.executable, "-m", "dvc", *arguments[1:]], cwd=arguments[0])
                        time.sleep(0.5)
                    die()
                result = work(*arguments, **more)
                if calls == call:
                    die()
                return result

            setattr(module, name, deadly)
            ingest.run(params_of(workspace), workspace)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"{point} was not reached"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("point", POINTS)
def test_second_run_completes_a_killed_one(tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / "site"))
    dvc = "DVC" in point or "tracked" in point
    workspace = make_project(tmp_path / "p", dvc=dvc)
    rows = [(f"{seed}.jpg", f"picture number {seed}", "") for seed in range(1, 13)]
    rows += [("1.jpg", "the same picture, in other words", ""), ("12b.jpg", "a repeated one", "")]
    files = {f"{seed}.jpg": encoded(picture(seed)) for seed in range(1, 13)}
    make_submission(workspace, "submission", rows, files | {"12b.jpg": files["12.jpg"]})
    ingest_until(point, workspace)
    ingest.run(params_of(workspace), workspace)
    check(workspace, [caption for _, caption, _ in rows[:-1]])
    simple_submission(workspace, "after", range(10, 15))
    report = ingest.run(params_of(workspace), workspace)
    assert (report["new"], report["duplicates"]) == (2, 3), "the index has what the killed run ingested"
    if dvc:
        batches = {row["batch"] for row in held(workspace)}
        tracked = {path.stem for path in (workspace.root / "data" / "accepted").glob("*.dvc")}
        assert tracked == batches
        status = [sys.executable, "-m", "dvc", "status", "--json"]
        assert subprocess.run(status, cwd=workspace.root, capture_output=True, text=True).stdout.strip() == "{}"


def check(workspace: Workspace, captions: list[str]) -> None:
    """Assert that the dataset has these pairs once each, and that no submission and no partial batch is left."""
    assert Counter(row["caption"] for row in held(workspace)) == Counter(captions)
    assert not (workspace.root / "data" / "inbox" / "submission").exists()
    assert (workspace.root / "data" / "inbox" / "done" / "submission").exists()
    assert not list((workspace.root / "data").glob(".*.partial*"))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_kills_at_random_moments_with_workers(tmp_path: Path) -> None:
    """Run the command with two workers, and kill it after random times until it completes."""
    workspace = make_project(tmp_path / "p", processes=2)
    seeds = range(1, 601)
    simple_submission(workspace, "submission", seeds)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "vlp_models.cli.main", "ingest"]
    rng = random.Random(5)
    kills = 0
    for attempt in range(40):
        process = subprocess.Popen(command, cwd=workspace.root, env=env, stdout=subprocess.DEVNULL)
        try:
            process.wait(rng.uniform(0.3, 1.0 + attempt / 4))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kills += 1
        else:
            assert process.returncode == 0
            break
    assert kills
    ingest.run(params_of(workspace), workspace)
    check(workspace, [f"picture number {seed}" for seed in seeds])
