"""The data stages on a real Ray cluster of two nodes, on loopback: lost nodes, other code, folders that are not shared.

Ray starts badly on a busy machine; run these tests alone: `make test-cluster`.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from drawn_workspace import make_workspace
from PIL import Image

from vlp_models.common.io import hash_path
from vlp_models.common.workspace import Workspace
from vlp_models.curation.duplicates import hashes
from vlp_models.data import features as storage
from vlp_models.data.tables import write_table
from vlp_models.errors import DataError, MissingToolError, ParamsError, ProcessLostError
from vlp_models.params import Params, load_params
from vlp_models.pipeline.cluster import MAX_RETRIES, RayMapper
from vlp_models.pipeline.stages import detector, features, prepare, shards, validate

ray = pytest.importorskip("ray", reason="an extra: requirements-cluster.lock")

ROOT = Path(__file__).parents[2]
IMAGES = 24
pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(600)]


@contextmanager
def environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


class RayCluster:
    """A head without CPUs, and nodes of one CPU."""

    def __init__(self, nodes: int) -> None:
        from ray.cluster_utils import Cluster

        small = {"object_store_memory": 80_000_000, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
        self.nodes = [self.add() for _ in range(nodes)]
        self.address = self.cluster.address

    def add(self, **settings: Any) -> Any:
        return self.cluster.add_node(**{"num_cpus": 1, "object_store_memory": 80_000_000} | settings)

    def kill(self) -> None:
        """Kill the last node."""
        self.cluster.remove_node(self.nodes.pop(), allow_graceful=False)


@contextmanager
def started(nodes: int = 2) -> Iterator[RayCluster]:
    """Start a cluster. On a busy machine Ray's processes give up waiting for each other: try again."""
    here = f"{ROOT / 'tests'}:{ROOT / 'tests' / 'pipeline'}"  # where workers import this file from
    with environment(RAY_USAGE_STATS_ENABLED="0", PYTHONPATH=here):
        for attempt in range(4):
            try:
                running = RayCluster(nodes)
                break
            except Exception:
                ray.shutdown()
                if attempt == 3:
                    raise
                time.sleep(5)
        try:
            yield running
        finally:
            ray.shutdown()
            running.cluster.shutdown()


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """A cluster for tests that lose no node."""
    with started() as running:
        yield running


def on(cluster: RayCluster, params: Params, **settings: Any) -> Params:
    return dataclasses.replace(
        params, cluster=dataclasses.replace(params.cluster, address=cluster.address, **settings)
    )


class KillNode(threading.Thread):
    """Kills a node when `files` of a pattern exist below a folder."""

    def __init__(self, cluster: RayCluster, folder: Path, pattern: str, files: int) -> None:
        super().__init__(daemon=True)
        self.cluster, self.folder, self.pattern, self.files = cluster, folder, pattern, files
        self.found = -1

    def run(self) -> None:
        while (found := len(list(self.folder.glob(self.pattern)))) < self.files:
            time.sleep(0.02)
        self.found = found
        self.cluster.kill()


# ---- Functions that workers import from this file ---------------------------------------------------------------


def double(item: int) -> int:
    return 2 * item


def process_id(item: int) -> int:
    time.sleep(0.05)
    return os.getpid()


def slow_first(item: int) -> float:
    time.sleep(2 if item == 0 else 0)
    return time.time()


def refuse_three(item: int) -> int:
    if item == 3:
        raise DataError("images/3.png: damaged")
    return item


def open_missing(item: str) -> str:
    return Path(item).read_text()


def die_once(item: tuple[str, int]) -> int:
    folder, number = item
    mark = Path(folder) / f"tried-{number}"
    if number % 3 == 1 and not mark.exists():
        mark.touch()
        os._exit(1)
    return number


def die(item: str) -> None:
    with Path(item).open("a") as file:
        file.write(".")
    os._exit(1)


def test_results_are_in_order_and_workers_are_reused(cluster: RayCluster, tmp_path: Path) -> None:
    mapper = RayMapper(cluster.address, tmp_path)
    assert list(mapper.map(double, range(50))) == [2 * item for item in range(50)]
    assert len(set(mapper.map(process_id, range(20)))) <= 2
    assert not list((tmp_path / ".work" / "cluster").iterdir())  # nothing is left


def test_a_slow_chunk_does_not_stop_the_others(cluster: RayCluster, tmp_path: Path) -> None:
    ended = list(RayMapper(cluster.address, tmp_path).map(slow_first, range(6)))
    assert max(ended[1:]) < ended[0]


def test_few_chunks_are_read_ahead(cluster: RayCluster, tmp_path: Path) -> None:
    read = 0

    def items() -> Iterator[int]:
        nonlocal read
        for read in range(1, 101):
            yield read

    results = RayMapper(cluster.address, tmp_path, workers=2).map(double, items())
    assert next(results) == 2 and read <= 2 * 4
    results.close()


def test_errors_arrive_as_themselves_with_the_node(cluster: RayCluster, tmp_path: Path) -> None:
    mapper = RayMapper(cluster.address, tmp_path)
    results = mapper.map(refuse_three, range(9))
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError, match=r"^images/3\.png: damaged \(on node \S+ \([\d.]+\)\)$") as caught:
        next(results)
    assert type(caught.value) is DataError
    with pytest.raises(FileNotFoundError, match="absent"):
        list(mapper.map(open_missing, [str(tmp_path / "absent")]))


def test_a_lost_worker_is_replaced(cluster: RayCluster, tmp_path: Path) -> None:
    items = [(str(tmp_path), number) for number in range(9)]
    assert list(RayMapper(cluster.address, tmp_path).map(die_once, items)) == list(range(9))


def test_a_chunk_that_kills_its_workers_names_their_node(cluster: RayCluster, tmp_path: Path) -> None:
    import platform

    tries = tmp_path / "tries"
    with pytest.raises(ProcessLostError, match=rf"lost with its worker 4 times, on {platform.node()} \([\d.]+\)"):
        list(RayMapper(cluster.address, tmp_path).map(die, [str(tries)]))
    assert len(tries.read_text()) == 1 + MAX_RETRIES


@pytest.mark.parametrize(("cpus", "gpus", "words"), [(1, 1, "1 CPUs and 1 GPUs"), (9, 0, "9 CPUs for")])
def test_a_cluster_that_fits_no_worker_is_an_error(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpus: int, gpus: int, words: str
) -> None:
    monkeypatch.setattr("vlp_models.pipeline.cluster.NODES_SECONDS", 1.0)
    with pytest.raises(ParamsError, match=rf"no node has {words}.* have 2 CPUs and 0 GPUs.*cluster\.gpus"):
        list(RayMapper(cluster.address, tmp_path, cpus=cpus, gpus=gpus).map(double, [1]))


# ---- The stages ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workspace, Params, Path]:
    """A workspace up to `detector`, and its params.yaml: 24 images in chunks of two."""
    root = tmp_path_factory.mktemp("drawn")
    workspace = make_workspace(root)
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    raw["detector"] |= {"steps": 3, "batch_size": 2, "feature_dim": 16}
    raw["features"] |= {"min_score": 0.01, "max_regions": 4}
    raw["shards"] |= {"images_per_shard": 1, "pixels": True}
    raw["trainer"]["torch_threads"] = 1
    file = root / "params.yaml"
    file.write_text(yaml.safe_dump(raw))
    params = load_params(file)
    for name in ("captions", "questions", "statements", "choices"):
        write_table([], name, workspace.validated)
    detector.run(params, workspace)
    return workspace, params, file


def set_aside(path: Path) -> str:
    """Move an output away, so that it is made again; return its hash."""
    found = hash_path(path)
    shutil.rmtree(path)
    return found


def test_features_and_shards_survive_a_killed_node(
    drawn: tuple[Workspace, Params, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace, params, _ = drawn
    monkeypatch.setattr(storage, "CHUNK_IMAGES", 1)
    runs: dict[str, Callable[[Params], None]] = {
        "features": lambda p: features.run(p, workspace),
        "shards": lambda p: shards.run(p, workspace),
    }
    alone = {}
    for name, run in runs.items():
        run(params)
        alone[name] = hash_path(getattr(workspace, name))
    shutil.rmtree(workspace.root / ".work")
    for name, pattern in (("features", "*/features-*.safetensors"), ("shards", "*/*-0*/counts.json")):
        with started() as running:
            shutil.rmtree(getattr(workspace, name))
            kill = KillNode(running, workspace.root / ".work" / name, pattern, files=2)
            kill.start()
            runs[name](on(running, params))
            kill.join(timeout=60)
            assert 2 <= kill.found < 9  # before the stage's end
        assert hash_path(getattr(workspace, name)) == alone[name]
