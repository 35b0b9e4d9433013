"""What is checked before chunks run on a cluster, without one: the address, and what a worker has."""

from __future__ import annotations

import dataclasses
import pickle
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from drawn_workspace import make_workspace, params_with
from photos import photo

from vlp_models.common.executors import list_chunks
from vlp_models.common.io import hash_path
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.launchers import ray_chunks as cluster
from vlp_models.contrib.launchers.params import ClusterParams
from vlp_models.contrib.launchers.ray_chunks import connected, run_in_worker, shared_setup, worker_task
from vlp_models.curation.duplicates import hashes
from vlp_models.data import features as storage
from vlp_models.data.images import ImageError
from vlp_models.data.tables import read_table
from vlp_models.errors import DataError, MissingToolError, ParamsError
from vlp_models.params import DatasetParams
from vlp_models.pipeline.engines import cluster_mapper
from vlp_models.pipeline.stages import detector, features, prepare
from vlp_models.pipeline.stages.shards import part_name


def fail(item: str) -> None:
    raise {"data": DataError("images/1.png: damaged"), "system": FileNotFoundError(2, "absent", "1.png")}[item]


def run(setup: dict[str, Any], function: Callable[[Any], Any], item: object) -> tuple[str, Any]:
    cluster._check_worker.cache_clear()
    return run_in_worker("gpu7 (10.0.0.7)", setup, pickle.dumps(function), 0, pickle.dumps(item))


# ---- The address --------------------------------------------------------------------------------------------------


def test_without_an_address_there_is_no_cluster(tmp_path: Path) -> None:
    assert cluster_mapper(params_with(), Workspace(tmp_path)) is None


def test_without_ray_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingToolError, match=r"`cluster\.address` needs Ray; run `.*pip install 'vlp-flows\[ray\]'`"):
        connected("auto").__enter__()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "no-such-host.invalid:6379"])
def test_an_address_that_does_not_answer_is_an_error_within_seconds(address: str) -> None:
    start = time.monotonic()
    with pytest.raises(ParamsError, match=rf"cluster\.address: {address}`: no answer \(.*`ray start --head`"):
        cluster._check_answers(address)
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("address", ["head", "tcp://scheduler:8786", "head:x", ":6379", "head:99999"])
def test_an_address_of_another_form_is_an_error(address: str) -> None:
    with pytest.raises(ParamsError, match="expected auto, HOST:PORT or ray://HOST:PORT"):
        cluster._check_answers(address)


@pytest.mark.slow
def test_a_server_that_is_not_rays_is_an_error_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("grpc", reason="an extra: requirements-cluster.lock")
    monkeypatch.setattr(cluster, "CONNECT_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ParamsError, match=rf"{address}`: another server than Ray's uses this port"):
            cluster._check_answers(address)


# ---- The worker ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("", r"has no package vlp_models"),
        ("vlp_models/__init__.py", r"has another version of vlp_models in .*__init__\.py .*"),
    ],
    ids=["no package", "an older one"],
)
def test_a_worker_without_this_package_is_an_error(tmp_path: Path, package: str, words: str) -> None:
    """The task is sent as code: it runs in a Python that cannot import this project."""
    import cloudpickle

    installed = tmp_path / "installed"
    shutil.copytree(Path(cloudpickle.__file__).parent, installed / "cloudpickle")
    if package:
        (installed / package).parent.mkdir()
        (installed / package).touch()
    (tmp_path / "task").write_bytes(cloudpickle.dumps(worker_task()))
    code = (
        "import pickle, sys\n"
        "task = pickle.load(open(sys.argv[1], 'rb'))\n"
        "print(*task({'package': {'version': '0.1.0'}}, b'', 0, b''))\n"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, str(tmp_path / "task")],
        cwd=tmp_path,
        env={"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert re.match(rf"refused node \S+ {words}; install vlp-flows ", done.stdout), done.stdout


def test_a_worker_checks_package_versions_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with shared_setup(tmp_path) as setup:
        assert run(setup, abs, -3) == ("done", 3)
        for change, words in (
            ({"package": setup["package"] | {"code": "0" * 64}}, "has another vlp_models (other code, in "),
            ({"package": setup["package"] | {"version": "99.0"}}, "has another vlp_models (version "),
            ({"versions": {"numpy": "1.0"}}, " of numpy, the stage 1.0; install requirements.lock there"),
            ({"token": "of another folder"}, f"has another folder at {tmp_path}; mount the project's folder there"),
            ({"folder": "/absent", "root": "/absent"}, "has no folder at /absent; mount"),
            ({"folders": ["/absent"]}, "has no folder /absent, which the dataset's images are in"),
        ):
            outcome, problem = run(setup | change, abs, -3)
            assert outcome == "refused" and problem.startswith("node gpu7 (10.0.0.7) ") and words in problem
    assert not Path(setup["folder"]).exists()
    assert run(setup, abs, -3)[0] == "refused"  # the stage has ended


def test_errors_of_chunks_name_the_node(tmp_path: Path) -> None:
    with shared_setup(tmp_path) as setup:
        outcome, error = run(setup, fail, "data")
        assert outcome == "failed" and type(error) is DataError
        assert str(error) == "images/1.png: damaged (on node gpu7 (10.0.0.7))"
        outcome, error = run(setup, fail, "system")
        assert outcome == "failed" and error.filename == "1.png"
        assert error.__notes__[0].startswith("on node gpu7 (10.0.0.7):\nTraceback")


# ---- The stages ---------------------------------------------------------------------------------------------------


class InWorker:
    """A mapper that runs chunks as a worker does, in this process."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        with shared_setup(self.root) as setup:
            for item in items:
                outcome, value = run(setup, function, item)
                if outcome != "done":
                    raise value
                yield value


@pytest.mark.slow
def test_features_of_cpus_and_gpus_are_never_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cluster.gpus` decides, not the device of the machine that runs the stage."""
    monkeypatch.setattr(storage, "CHUNK_IMAGES", 4)
    workspace, params = make_workspace(tmp_path), params_with(features={"min_score": 0.01, "max_regions": 4})
    detector.run(params, workspace)
    features.run(params, workspace)
    alone = hash_path(workspace.features)
    shutil.rmtree(tmp_path / ".work")

    def on(gpus: float, accelerator: str = "auto") -> None:
        own = dataclasses.replace(
            params,
            sections={"cluster": ClusterParams(address="head:6379", gpus=gpus)},
            trainer=dataclasses.replace(params.trainer, accelerator=accelerator),
        )
        features.run(own, workspace, mapper=InWorker(tmp_path))

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ParamsError, match=r"torch finds none.*\(on node gpu7 \(10\.0\.0\.7\)\)"):
        on(gpus=1)
    with pytest.raises(
        ParamsError, match=r"cluster\.gpus: 0\.5` reserves GPUs that `trainer\.accelerator: cpu` does not"
    ):
        on(gpus=0.5, accelerator="cpu")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)  # as on a driver with a GPU that is not used
    opened: list[str] = []
    open_source = features._open
    monkeypatch.setattr(features, "_open", lambda *a, **k: opened.append(str(a)) or open_source(*a, **k))
    on(gpus=0)
    assert len(opened) == 2  # once by the stage and once by the worker, which makes three chunks
    assert hash_path(workspace.features) == alone
    works = [path.name for path in (tmp_path / ".work" / "features").iterdir() if path.name != "kept"]
    assert len(works) == 1  # what is left of the attempt with GPUs


def test_an_image_that_only_a_node_cannot_read_is_not_quarantined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashes, "SERIAL_LIMIT", 1)
    (tmp_path / "raw").mkdir()
    for number in range(3):
        photo(number).save(tmp_path / "raw" / f"{number}.jpg")
    (tmp_path / "raw" / "pairs.csv").write_text("image,caption\n0.jpg,a\n1.jpg,b\n2.jpg,c")
    source = DatasetParams.of(format="pairs", root="raw", pairs="pairs.csv", group_near_duplicates=False)
    params, workspace = dataclasses.replace(params_with(), data={"own": source}), Workspace(tmp_path)
    monkeypatch.setattr(prepare, "cluster_mapper", lambda *_, **__: InWorker(tmp_path))
    prepare.run(params, workspace, "own")
    assert len(read_table("images", workspace.interim("own"))) == 3

    def cannot_read(path: Path) -> bytes:
        raise ImageError("image_present", "no such file")

    monkeypatch.setattr(hashes, "read_file", cannot_read)  # what the worker calls
    with pytest.raises(DataError, match=r"0\.jpg: a node of the cluster cannot read it \(no such file\); mount"):
        prepare.run(params, workspace, "own")


def test_finished_chunks_are_found_by_one_listing(tmp_path: Path) -> None:
    for name in (
        "train-00000001",
        "train-00000007",
        "train-00000099",
        "train-texts",
        ".train-00000002.partial",
        "val-1",
    ):
        (tmp_path / name).mkdir()
    assert list_chunks(tmp_path, 8, lambda number: part_name("train", number)) == {1, 7}
