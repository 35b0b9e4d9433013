"""Where MLflow keeps files: also after a workspace was moved or copied, and where they lie in a bucket."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vlp_models.registry.moved import follow

from vlp_models.params import TrackingParams
from vlp_models.registry.client import connect


@pytest.fixture(autouse=True)
def no_tracking_uri_but_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")


def params(artifacts: str = "art efacts/mlflow") -> TrackingParams:
    return TrackingParams(uri="sqlite:///mlflow.db", artifacts=artifacts, experiment="toy", model_prefix="t", metric={})


def workspace_with_a_model(root: Path, text: str) -> str:
    """A registered version whose one file holds `text`; returns its run."""
    root.mkdir()
    client = connect(params(), root)
    run = client.create_run(client.get_experiment_by_name("toy").experiment_id)
    client.log_text(run.info.run_id, text, "model/weights")
    client.create_registered_model("toy")
    client.create_model_version("toy", source=f"{run.info.artifact_uri}/model", run_id=run.info.run_id)
    return str(run.info.run_id)


def weights_seen_from(root: Path, run_id: str) -> list[str]:
    """By a new process, as MLflow keeps connections: from the run, and from the registry."""
    code = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from test_places import params
from vlp_models.registry.client import connect
import mlflow.artifacts
root, run_id = Path(sys.argv[1]), sys.argv[2]
client = connect(params(), root)
print(Path(client.download_artifacts(run_id, "model/weights")).read_text())
print((Path(mlflow.artifacts.download_artifacts("models:/toy/1")) / "weights").read_text())
"""
    command = [sys.executable, "-c", code, str(root), run_id, str(Path(__file__).parent)]
    env = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}  # `connect` sets it
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


def test_a_moved_workspace_has_its_models_and_a_copy_has_its_own(tmp_path: Path) -> None:
    first = tmp_path / "first"
    run_id = workspace_with_a_model(first, "original")
    copy = tmp_path / "a copy"
    shutil.copytree(first, copy)
    for file in copy.rglob("weights"):
        file.write_text("copied")
    assert weights_seen_from(copy, run_id) == ["copied", "copied"]
    assert weights_seen_from(first, run_id) == ["original", "original"]
    moved = tmp_path / "moved"
    first.rename(moved)
    assert weights_seen_from(moved, run_id) == ["original", "original"]


def test_a_database_that_came_without_its_files_or_by_another_name_stays(tmp_path: Path, capsys: Any) -> None:
    first = tmp_path / "first"
    workspace_with_a_model(first, "original")
    database = first / "mlflow.db"
    before = database.read_bytes()
    capsys.readouterr()  # what MLflow says of a new database
    (tmp_path / "other").mkdir()
    follow(database, tmp_path / "other", params().artifacts)
    (tmp_path / "link").symlink_to(first)
    follow(database, tmp_path / "link", params().artifacts)
    (first / "elsewhere").mkdir()
    follow(database, first, "elsewhere")  # `tracking.artifacts` was changed: older files stay where they were
    assert database.read_bytes() == before
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("address", ["s3://bucket/folder", "gs://bucket", "mlflow-artifacts:/vlp"])
def test_an_address_is_no_path_below_the_root(tmp_path: Path, address: str) -> None:
    client = connect(params(address), tmp_path)
    assert client.get_experiment_by_name("toy").artifact_location == address


def test_two_that_first_ask_at_once_both_find_the_experiment(tmp_path: Path) -> None:
    """MLflow makes the tables of a new database; two at once got in each other's way."""
    code = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_places import params
from vlp_models.registry.client import connect
print(connect(params(), Path(sys.argv[1])).get_experiment_by_name("toy").name)
"""
    command = [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parent)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=120)[0].splitlines()[-1] for process in started] == ["toy", "toy"]
