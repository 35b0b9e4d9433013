"""Connecting to MLflow: where it keeps files, concurrent first connections, a database that cannot be opened."""

from __future__ import annotations

import dataclasses
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
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
def test_database_of_another_folder_is_refused(tmp_path: Path) -> None:
    first, copy, link = tmp_path / "first", tmp_path / "a copy", tmp_path / "link"
    first.mkdir()
    connect(make_params(), first)
    shutil.copytree(first, copy)
    with pytest.raises(TrackingError, match=rf"mlflow\.db was created in {first} .*`vlp run register`"):
        connect(make_params(), copy)
    link.symlink_to(first)
    connect(make_params(), link)
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


@pytest.mark.slow
def test_a_database_of_another_version_of_mlflow_is_not_called_damaged(tmp_path: Path) -> None:
    """MLflow's own words and way out; the connection before leaves nothing in the environment that is blamed later."""
    first, later = tmp_path / "first", tmp_path / "later"
    first.mkdir()
    connect(make_params(), first)
    shutil.copytree(first, later)
    with closing(sqlite3.connect(later / "mlflow.db")) as database, database:
        database.execute("update alembic_version set version_num = '0123456789ab'")
    with pytest.raises(TrackingError, match=r"found version 0123456789ab.*mlflow db upgrade") as error:
        connect(make_params(), later)
    assert "damaged" not in str(error.value) and "MLFLOW_TRACKING_URI" not in str(error.value)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"MLFLOW_TRACKING_URI": "http://u:hunter2@127.0.0.1:9"}, r"overrides `tracking\.uri`.* \(connection refused"),
        ({"MLFLOW_TRACKING_URI": "localhost:5000"}, r"overrides `tracking\.uri`.*unsupported URI"),
        ({"MLFLOW_TRACKING_URI": "sqlite://mlflow.db"}, r"overrides `tracking\.uri`.*Invalid SQLite URL"),
        ({"MLFLOW_TRACKING_INSECURE_TLS": "maybe"}, r"MLflow at http://127\.0\.0\.1:9 failed .*INSECURE_TLS.*maybe"),
        ({"http_proxy": "127.0.0.1:9", "no_proxy": "x"}, r"connection refused; the environment names a proxy \(http"),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
def test_what_the_environment_sets_is_not_blamed_on_params_yaml(
    variables: dict[str, str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TrackingError, match=words) as error:
        connect(dataclasses.replace(make_params(), uri="http://127.0.0.1:9"), tmp_path)
    assert "hunter2" not in str(error.value) and "(`tracking.uri` in params.yaml)" not in str(error.value)
