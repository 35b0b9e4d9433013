"""The data stages on a real Ray cluster of two nodes, on loopback: lost nodes, other code, folders that are not shared.

Ray starts badly on a busy machine; run these tests alone: `make test-cluster`.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bucket_mount
import pytest
import torch
import yaml
from drawn_workspace import make_workspace
from photos import photo

from vlp_models.common.io import hash_path
from vlp_models.common.packages import describe_own
from vlp_models.common.plugins import active_plugins, import_target, use_plugins
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.launchers.params import ClusterParams
from vlp_models.contrib.launchers.ray_chunks import MAX_RETRIES, RayMapper
from vlp_models.curation.duplicates import hashes, leakage
from vlp_models.data import features as storage
from vlp_models.data.tables import read_table, write_table
from vlp_models.errors import DataError, ParamsError, ProcessLostError
from vlp_models.params import DatasetParams, Params, load_params
from vlp_models.pipeline.stages import detector, features, prepare, shards, validate

ray = pytest.importorskip("ray", reason="an extra: requirements-cluster.lock")

ROOT = Path(__file__).parents[3]
NODE = r"node \S+ \([\d.]+\)"  # name and IP address
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

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        head = {"num_cpus": 0, "object_store_memory": 80_000_000, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args={**head, "ray_client_server_port": port})
        self.client_address = f"ray://127.0.0.1:{port}"
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
    here = f"{ROOT / 'tests' / 'support'}:{Path(__file__).parent}"  # where workers import this file from
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
    return dataclasses.replace(params, sections={"cluster": ClusterParams(address=cluster.address, **settings)})


class KillNode(threading.Thread):
    """Kills a node when a chunk behind the first few is in progress. chunk: its number, then."""

    def __init__(self, cluster: RayCluster, root: Path, after: int) -> None:
        super().__init__(daemon=True)
        self.cluster, self.folder, self.after = cluster, root / ".work" / "cluster", after
        self.chunk = -1
        self.start()

    def run(self) -> None:
        while self.chunk <= self.after:
            marks = (path.name for path in self.folder.glob("*/*"))
            self.chunk = max((int(name) for name in marks if name.isdecimal()), default=-1)
            time.sleep(0.01)
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


def import_plugin(name: str) -> tuple[list[str], str]:
    found = active_plugins("tasks")
    return sorted(found), import_target(found[name]).__module__


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
        while read < 100:
            read += 1
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


def test_plugins_reach_the_workers(cluster: RayCluster, tmp_path: Path) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "guess.py").write_text("class Guess: ...\n")
    use_plugins({"tasks": {"guess": "plugins.guess:Guess"}}, tmp_path)
    try:
        ((names, module),) = RayMapper(cluster.address, tmp_path).map(import_plugin, ["guess"])
    finally:
        use_plugins({}, tmp_path)
    assert names == ["guess"] and module == "plugins.guess"


def test_a_worker_with_other_code_is_an_error(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = describe_own()
    mapper = RayMapper(cluster.address, tmp_path)
    for other, words in (({"code": "0" * 64}, "other code"), ({"version": "99.0"}, f"version {own['version']}")):
        monkeypatch.setattr("vlp_models.common.packages.describe_own", lambda other=other: own | other)
        with pytest.raises(ParamsError, match=rf"{NODE} has another vlp_models \({words}.*install the same"):
            list(mapper.map(double, [1]))


def test_a_folder_that_is_not_shared_is_an_error(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "vlp_models.contrib.launchers.ray_chunks.write_text", lambda path, text: None
    )  # as on another machine
    for root, words in ((tmp_path, "another folder"), (tmp_path / "absent", "no folder")):
        with pytest.raises(ParamsError, match=rf"{NODE} has {words} at {root}; mount the project's folder"):
            list(RayMapper(cluster.address, root).map(double, [1]))
    monkeypatch.undo()
    absent = tmp_path / "images"
    with pytest.raises(ParamsError, match=rf"has no folder {absent}, which the dataset's images are in"):
        list(RayMapper(cluster.address, tmp_path, folders=[absent]).map(double, [1]))


def test_the_client_server_is_an_address_too(cluster: RayCluster, tmp_path: Path) -> None:
    assert list(RayMapper(cluster.client_address, tmp_path).map(double, range(9))) == list(range(0, 18, 2))


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
    monkeypatch.setattr("vlp_models.contrib.launchers.ray_chunks.NODES_SECONDS", 1.0)
    with pytest.raises(ParamsError, match=rf"no node has {words}.* have 2 CPUs and 0 GPUs.*cluster\.gpus"):
        list(RayMapper(cluster.address, tmp_path, cpus=cpus, gpus=gpus).map(double, [1]))


# ---- The stages ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workspace, Params, Path]:
    """A workspace of nine images up to `detector`, and its params.yaml."""
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
    for name, run in runs.items():
        with started() as running:
            shutil.rmtree(getattr(workspace, name))
            kill = KillNode(running, workspace.root, after=2)
            run(on(running, params))
            assert 2 < kill.chunk < 9  # of nine
        assert hash_path(getattr(workspace, name)) == alone[name]


@pytest.fixture
def photographs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Workspace, Params]:
    """24 photos and a copy of each: images hashed two at a time, near-duplicates searched for eight at a time."""
    monkeypatch.setattr(hashes, "SERIAL_LIMIT", 1)
    monkeypatch.setattr(hashes, "CHUNK", 2)
    monkeypatch.setattr(leakage, "INDEXED", 8)
    monkeypatch.setitem(leakage.find_leaks.__kwdefaults__, "indexed", 4)
    raw = tmp_path / "photographs" / "raw"
    raw.mkdir(parents=True)
    for number in range(24):
        photo(number).save(raw / f"{number}.jpg", quality=95)
        photo(number).crop((25, 10, 185, 130)).save(raw / f"{number}-cropped.jpg", quality=60)
    names = sorted(path.name for path in raw.iterdir())
    (raw / "pairs.csv").write_text("\n".join(["image,caption", *(f"{name},a photo" for name in names)]))
    source = DatasetParams.of(format="pairs", root="raw", pairs="pairs.csv", group_near_duplicates=True)
    params = dataclasses.replace(load_params(ROOT / "params.yaml"), data={"own": source})
    return Workspace(raw.parent), params


def prepare_and_validate(params: Params, workspace: Workspace) -> list[str]:
    prepare.run(params, workspace, "own")
    validate.run(params, workspace)
    return [hash_path(workspace.interim("own")), hash_path(workspace.validated)]


def make_features_and_shards(params: Params, workspace: Workspace) -> list[str]:
    features.run(params, workspace)
    shards.run(params, workspace)
    return [hash_path(workspace.features), hash_path(workspace.shards)]


def test_prepare_and_validate_survive_a_killed_node(photographs: tuple[Workspace, Params]) -> None:
    workspace, params = photographs
    alone = prepare_and_validate(params, workspace)
    with started() as cluster:
        kill = KillNode(cluster, workspace.root, after=4)
        assert prepare_and_validate(on(cluster, params), workspace) == alone
        assert not kill.is_alive()
    assert read_table("images", workspace.interim("own")).num_rows == 48


def test_a_mounted_bucket_is_a_shared_folder(
    drawn: tuple[Workspace, Params, Path],
    photographs: tuple[Workspace, Params],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two nodes and the stage's own process, each with its own mount of the bucket that has the project's folder."""
    if reason := bucket_mount.missing():
        pytest.skip(reason)
    monkeypatch.setattr(storage, "CHUNK_IMAGES", 1)
    runs = {
        "photographs": (prepare_and_validate, photographs[1], photographs[0]),
        "drawn": (make_features_and_shards, drawn[1], drawn[0]),
    }
    folder = tmp_path / "bucket"
    with started(nodes=0) as running, bucket_mount.mounted_bucket(tmp_path / "store", folder) as bucket:
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--address={running.address}"]
        for _ in range(2):
            bucket.start_on_machine(folder, [*start, "--num-cpus=1", "--object-store-memory=80000000"])
        for name, (run, params, local) in runs.items():
            shutil.copytree(local.root, folder / name)
            alone = run(params, local)
            workspace = Workspace(folder / name)
            assert run(on(running, params), workspace) == alone
            assert not list(workspace.root.rglob("*.partial"))
        file = workspace.shards / "manifest.json"
        stored = bucket.client.get_object(Bucket=bucket_mount.BUCKET, Key=str(file.relative_to(folder)))
        assert stored["Body"].read() == file.read_bytes()
    for path in (drawn[0].features, drawn[0].shards):
        shutil.rmtree(path)


def test_the_command_line_uses_the_cluster(cluster: RayCluster, drawn: tuple[Workspace, Params, Path]) -> None:
    """Workers compute with the instructions of `trainer.reproducible`, as the command alone does."""
    workspace, _, file = drawn
    before = file.read_text()
    raw = yaml.safe_load(before)
    assert raw["trainer"]["reproducible"] == "portable"
    found = []
    for address in ("", cluster.address, cluster.client_address):
        file.write_text(yaml.safe_dump(raw | {"cluster": {"address": address}}))
        command = [sys.executable, "-m", "vlp_models.cli.main", "stage", "features"]
        done = subprocess.run(command, cwd=workspace.root, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        found.append(hash_path(workspace.features))
        shutil.rmtree(workspace.features)
        shutil.rmtree(workspace.root / ".work")
    assert found == [found[0]] * 3
    file.write_text(before)


def test_a_worker_without_the_gpu_is_an_error(drawn: tuple[Workspace, Params, Path]) -> None:
    """A node that Ray counts a GPU for, where torch finds none; the driver's own device does not matter."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    workspace, params, _ = drawn
    with started(nodes=0) as running:
        running.add(num_gpus=1)
        words = r"cluster\.gpus: 1` makes features on GPUs, and torch finds none.*\(on node \S+ \([\d.]+\)\)"
        with pytest.raises(ParamsError, match=words):
            features.run(on(running, params, gpus=1), workspace)
