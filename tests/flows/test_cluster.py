"""Features and shards on a real Dask cluster of two workers, on loopback, through a Prefect server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from vlp_models.common.io import hash_path
from vlp_models.data.tables import write_table
from vlp_models.errors import MissingToolError, ParamsError
from vlp_models.flows.cluster import task_runner
from vlp_models.params import ClusterParams, load_params

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "pipeline"))


def test_missing_address_or_package_is_an_error() -> None:
    with pytest.raises(ParamsError, match="address` is empty"):
        task_runner(ClusterParams())
    try:
        import prefect_ray  # noqa: F401
    except ImportError:
        with pytest.raises(MissingToolError, match="needs the package prefect-ray"):
            task_runner(ClusterParams(kind="ray", address="ray://127.0.0.1:1"))


@pytest.mark.long
@pytest.mark.server
@pytest.mark.timeout(600)
def test_dask_cluster_output_equals_that_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("prefect_dask", reason="an extra: requirements-cluster.lock")
    from distributed import LocalCluster
    from drawn_workspace import make_workspace
    from prefect.server.api.server import SubprocessASGIServer

    from vlp_models.pipeline.stages import detector, features, shards

    workspace = make_workspace(tmp_path)
    for name in ("captions", "questions", "statements", "choices"):
        write_table([], name, workspace.validated)
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    raw["detector"] |= {"steps": 3, "batch_size": 2, "feature_dim": 16}
    raw["features"] |= {"min_score": 0.01, "max_regions": 4}
    raw["shards"] |= {"images_per_shard": 2, "pixels": True}
    raw["trainer"]["torch_threads"] = 1
    file = tmp_path / "params.yaml"
    file.write_text(yaml.safe_dump(raw))
    for stage in (detector, features, shards):
        stage.run(load_params(file), workspace)
    alone = hash_path(workspace.features), hash_path(workspace.shards)

    os.environ["PREFECT_HOME"] = str(tmp_path / "prefect")
    os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
    server = SubprocessASGIServer()
    server.start(timeout=150)
    os.environ["PREFECT_API_URL"] = server.api_url
    try:
        with LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None) as cluster:
            raw["cluster"] = {"kind": "dask", "address": cluster.scheduler_address, "workers": 4}
            file.write_text(yaml.safe_dump(raw))
            for name in ("features", "shards"):
                output = getattr(workspace, name)
                output.rename(output.with_name(f"{name}-alone"))
                command = [sys.executable, "-m", "vlp_models.cli.main", "stage", name]
                subprocess.run(command, cwd=tmp_path, check=True, timeout=240)
    finally:
        server.stop()
        del os.environ["PREFECT_API_URL"]
    assert (hash_path(workspace.features), hash_path(workspace.shards)) == alone
