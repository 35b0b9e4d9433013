"""Connecting to MLflow: where it keeps files, concurrent first connections, a database that cannot be opened."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vlp_models.errors import TrackingError
from vlp_models.params import TrackingParams
from vlp_models.registry.client import connect

pytestmark = pytest.mark.usefixtures("no_tracking_uri")


def make_params(artifacts: str = "artifacts") -> TrackingParams:
    return TrackingParams(uri="sqlite:///mlflow.db", artifacts=artifacts, experiment="toy", model_prefix="t", metric={})


@pytest.mark.slow
@pytest.mark.parametrize("address", ["s3://bucket/folder", "gs://bucket", "mlflow-artifacts:/vlp", ""])
def test_artifacts_at_an_address_or_below_the_root(tmp_path: Path, address: str) -> None:
    root = tmp_path / "with space"
    root.mkdir()
    client = connect(make_params(address or "art efacts/mlflow"), root)
    location = client.get_experiment_by_name("toy").artifact_location
    assert location == (address or (root / "art efacts" / "mlflow").as_uri())


@pytest.mark.slow
def test_database_of_another_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, copy, link = tmp_path / "first", tmp_path / "a copy", tmp_path / "link"
    first.mkdir()
    connect(make_params(), first)
    shutil.copytree(first, copy)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with pytest.raises(TrackingError, match=rf"mlflow\.db was created in {first} .*`vlp run register`"):
        connect(make_params(), copy)
    link.symlink_to(first)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    connect(make_params(), link)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    connect(make_params("elsewhere"), first)


@pytest.mark.slow
def test_two_processes_that_connect_first_at_once_both_succeed(tmp_path: Path) -> None:
    """MLflow creates the tables of a new database on first use."""
    code = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_client import make_params
from vlp_models.registry.client import connect
print(connect(make_params(), Path(sys.argv[1])).get_experiment_by_name("toy").name)
"""
    command = [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parent)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=120)[0].splitlines()[-1] for process in started] == ["toy", "toy"]


def test_database_that_cannot_be_opened_is_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").mkdir()
    start = time.monotonic()
    with pytest.raises(TrackingError, match="unable to open database file"):
        connect(make_params(), tmp_path)
    assert time.monotonic() - start < 60, "MLflow alone takes 200 s"
