"""Run the chunks of a stage on a Ray cluster: the `Mapper` of `prepare`, `validate`, `features` and `shards`.

A chunk is a Ray task. The nodes have this package and, under the same path, the project's folder, in which the chunks
are written: tasks carry rows and counts. A worker process checks both before its first chunk. Ray repeats the chunks of
a lost worker or node. docs/guides/scaling.md is the recipe.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import pickle
import shutil
import signal
import socket
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from vlp_models.common.io import write_text
from vlp_models.common.packages import OWN, PIP
from vlp_models.common.plugins import with_plugins
from vlp_models.common.portable import VARIABLES, is_portable
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.launchers.machine import describe_machine, explain_difference
from vlp_models.contrib.launchers.params import ClusterParams
from vlp_models.errors import MissingToolError, ParamsError, ProcessLostError, VLPError, first_line
from vlp_models.params import Params

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_RETRIES = 3  # of a chunk whose worker or node is lost
AHEAD = 4  # chunks that are finished or in progress behind the oldest unfinished one, per chunk in progress
CONNECT_SECONDS = 10.0  # for a port to answer, and again for a Ray server behind it
NODES_SECONDS = 20.0  # for a cluster to have a node that fits a worker
GONE_SECONDS = 60.0  # a cluster without such a node for so long has ended
CHECK_SECONDS = 5.0  # between looks at the nodes


def make_mapper(params: Params, workspace: Workspace, *, gpus: float, folders: Sequence[Path]) -> RayMapper:
    """Return the mapper of params.yaml's cluster; see `pipeline.engines.cluster_mapper`."""
    c = params.section(ClusterParams)
    return RayMapper(c.address, workspace.root, workers=c.workers, cpus=c.cpus, gpus=gpus, folders=folders)


class RayMapper:
    """Runs chunks as tasks on a running Ray cluster.

    A worker process is reused for many chunks, so what a chunk's function caches in its process is opened once.

    Args:
        address: `auto`, `HOST:PORT` of the head (from a machine of the cluster), or `ray://HOST:PORT` (from any).
        root: the project's folder, which all nodes share.
        workers: chunks in progress at once; 0: as many as fit the cluster.
        cpus, gpus: reserved for each chunk.
        folders: other folders that all nodes need.
    """

    def __init__(
        self,
        address: str,
        root: Path,
        *,
        workers: int = 0,
        cpus: int = 1,
        gpus: float = 0,
        folders: Sequence[Path] = (),
    ) -> None:
        self._address = address
        self._root = root.absolute()
        self._workers, self._cpus, self._gpus = workers, cpus, gpus
        self._folders = folders

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Yield the results in the order of `items`.

        Raises:
            MissingToolError: Ray is not installed.
            ParamsError: the address does not answer, no node fits a worker, or one lacks the package or the folder.
            ProcessLostError: a chunk was lost with its worker four times, or no node is left.
            VLPError: of a chunk; its message names the node.
        """
        with connected(self._address) as ray, shared_setup(self._root, self._folders) as setup:
            nodes = _Nodes(ray, self._address, self._cpus, self._gpus)
            nodes.require()
            options: dict[str, Any] = {"num_cpus": self._cpus, "num_gpus": self._gpus, "max_retries": MAX_RETRIES}
            # A worker needs the same instructions as this process, before it imports NumPy.
            if is_portable():
                options["runtime_env"] = {"env_vars": VARIABLES}
            task = ray.remote(**options)(worker_task())
            # Stored once in the cluster's object store; each task gets a reference.
            shared = ray.put(pickle.dumps(with_plugins(function)))
            # A generator: an item is pickled and submitted only when `_results` asks for it.
            submitted = ((n, task.remote(setup, shared, n, pickle.dumps(item))) for n, item in enumerate(items))
            try:
                yield from self._results(ray, submitted, nodes, Path(setup["folder"]))
            except ConnectionError as error:  # of the client behind ray://
                raise ProcessLostError(
                    f"cluster at {self._address}: the connection to its head was lost ({first_line(error)}). Finished "
                    "chunks are kept: start the cluster again, then run the stage again"
                ) from None

    def _results(self, ray: Any, submitted: Iterator[tuple[int, Any]], nodes: _Nodes, marks: Path) -> Iterator[Any]:
        """Yield the results in order. Chunks are submitted as others end, so that few are in memory."""
        ordered: deque[tuple[int, Any]] = deque()
        unfinished: set[Any] = set()
        try:
            while True:
                # Keep `limit` chunks in progress, but do not run far ahead of the oldest unfinished one.
                limit = self._workers or nodes.slots
                while len(unfinished) < limit and len(ordered) < AHEAD * limit:
                    entry = next(submitted, None)
                    if entry is None:
                        break
                    ordered.append(entry)
                    unfinished.add(entry[1])
                if not ordered:
                    return
                if unfinished:
                    ready, _ = ray.wait(list(unfinished), timeout=CHECK_SECONDS)
                    unfinished.difference_update(ready)
                    nodes.refresh()
                # Results leave in the order of the items.
                while ordered and ordered[0][1] not in unfinished:
                    yield self._result(ray, *ordered.popleft(), marks)
        finally:
            # The consumer has stopped or failed: nobody waits for these chunks.
            for reference in unfinished:
                with suppress(Exception):  # the cluster may be gone
                    ray.cancel(reference, force=True)

    def _result(self, ray: Any, number: int, reference: Any, marks: Path) -> Any:
        try:
            outcome, value = ray.get(reference)
        except ray.exceptions.RayTaskError:  # not of the chunk, whose errors are values: a bug of this file
            raise
        except ray.exceptions.RayError as error:
            attempts = "before it started"
            with suppress(OSError):  # each worker that tried the chunk wrote a line
                nodes = (marks / str(number)).read_text(encoding="utf-8").splitlines()
                attempts = f"{len(nodes)} times, on {', '.join(dict.fromkeys(nodes))}"
            raise ProcessLostError(
                f"cluster at {self._address}: a chunk was lost with its worker {attempts} "
                f"({first_line(error)}). Finished chunks are kept: check memory, disk and "
                "/tmp/ray/session_latest/logs of these nodes, then run the stage again"
            ) from None
        if outcome == "refused":
            raise ParamsError(f"cluster at {self._address}: {value}")
        if outcome == "failed":
            raise value
        return value


class _Nodes:
    """The nodes of a cluster that fit a worker. slots: workers that fit on them at once."""

    def __init__(self, ray: Any, address: str, cpus: int, gpus: float) -> None:
        self._ray, self._address, self._cpus, self._gpus = ray, address, cpus, gpus
        self._last_fit = self._checked = time.monotonic()
        self.slots = self._count()

    def require(self) -> None:
        """Wait a while for a node that fits a worker; an error if none comes in time."""
        deadline = time.monotonic() + NODES_SECONDS
        while not self.slots:
            if time.monotonic() > deadline:
                total = self._ray.cluster_resources()
                gpus = f" and {self._gpus:g} GPUs" if self._gpus else ""
                raise ParamsError(
                    f"cluster at {self._address}: no node has {self._cpus} CPUs{gpus} for a worker; all nodes "
                    f"together have {total.get('CPU', 0):g} CPUs and {total.get('GPU', 0):g} GPUs. Start nodes "
                    "that have them, or change `cluster.cpus` and `cluster.gpus` in params.yaml"
                )
            time.sleep(0.5)
            self.slots = self._count()

    def refresh(self) -> None:
        """Count the nodes again, unless that was done seconds ago; an error if none has been there for a minute."""
        now = time.monotonic()
        if now - self._checked < CHECK_SECONDS:
            return
        self._checked, slots = now, self._count()
        if slots:
            self.slots, self._last_fit = slots, now
        elif now - self._last_fit > GONE_SECONDS:
            dead = [node for node in self._ray.nodes() if not node["Alive"]]
            lost = sorted({f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})" for node in dead})
            raise ProcessLostError(
                f"cluster at {self._address}: no node is left for the workers; lost: {', '.join(lost) or 'none'}. "
                "Finished chunks are kept: start nodes, then run the stage again"
            )

    def _count(self) -> int:
        slots = 0.0
        for node in self._ray.nodes():
            if node["Alive"]:
                cpus, gpus = node["Resources"].get("CPU", 0), node["Resources"].get("GPU", 0)
                # As many workers as CPUs and GPUs both allow; without GPUs only the CPUs count.
                slots += min(cpus // self._cpus, gpus // self._gpus if self._gpus else float("inf"))
        return int(slots)


# ---- The connection ----------------------------------------------------------------------------------------------


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Connect to a Ray cluster, if this process is not connected yet; yield the module `ray`.

    Raises:
        MissingToolError: Ray is not installed.
        ParamsError: nothing answers at the address, or it is not a Ray cluster of this version.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise MissingToolError(f"params.yaml: `cluster.address` needs Ray; run `{PIP} install '{OWN}[ray]'`") from None
    if ray.is_initialized():
        yield ray
        return
    if address != "auto":
        _check_answers(address)
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except Exception as error:
        hint = (
            "start one on this machine with `ray start`, or name its address"
            if address == "auto"
            else "check the address, and that Ray and Python have one version on all machines; HOST:PORT works on a "
            "machine of the cluster, ray://HOST:10001 on any"
        )
        raise ParamsError(f"params.yaml: `cluster.address: {address}`: {first_line(error)}; {hint}") from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray replaces it, and the stage's removes unfinished outputs
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Check that a Ray server answers, which Ray itself tries for minutes."""
    name = f"params.yaml: `cluster.address: {address}`"
    # The last colon separates the port: an IPv6 address has several.
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and "/" not in host and port.isdecimal() and int(port) < 1 << 16):
        raise ParamsError(f"{name}: expected auto, HOST:PORT or ray://HOST:PORT, e.g. ray://head:10001")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ParamsError(
            f"{name}: no answer ({reason}); start the cluster (`ray start --head` on its first machine), check "
            'the host and port, or set `cluster.address: ""` to use this machine'
        ) from None
    try:
        import grpc
    except ImportError:  # an extra of Ray, which ray:// needs
        return
    # The probe below has no certificates, so it would fail.
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=CONNECT_SECONDS)
        except grpc.FutureTimeoutError:
            raise ParamsError(
                f"{name}: another server than Ray's uses this port; HOST:PORT is what `ray start --head` prints "
                "(6379), ray://HOST:PORT the port of its client server (10001)"
            ) from None


# ---- What runs in a worker ---------------------------------------------------------------------------------------


@contextmanager
def shared_setup(root: Path, folders: Sequence[Path] = ()) -> Iterator[dict[str, Any]]:
    """Yield what a worker must have: the package, the versions of others, and a file in the project's folder.

    The folder that the file is in also has a file per chunk in progress, with the nodes that tried it.
    """
    folder = root / ".work" / "cluster" / uuid.uuid4().hex
    write_text(folder / "token", folder.name)
    try:
        yield {
            "root": str(root),
            "folder": str(folder),
            "token": folder.name,
            "folders": [str(path) for path in folders],
            **describe_machine(),
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def worker_task() -> Callable[[dict[str, Any], bytes, int, bytes], tuple[str, Any]]:
    """Return the function that is a Ray task. It is nested, so that Ray sends its code: the worker may lack ours."""

    def run_chunk(setup: dict[str, Any], function: bytes, number: int, item: bytes) -> tuple[str, Any]:
        import importlib
        import importlib.util
        import platform

        # Only the standard library so far: this function must be able to explain a missing package.
        node = platform.node()
        try:
            import ray

            node = f"{node} ({ray.util.get_node_ip_address()})"
        except ImportError:
            pass
        package = f"vlp-flows {setup['package']['version']}"
        install = f"install {package} there, with the packages of requirements.lock"
        spec = importlib.util.find_spec("vlp_models")
        if spec is None:
            return "refused", f"node {node} has no package vlp_models; {install}"
        try:
            here = importlib.import_module("vlp_models.contrib.launchers.ray_chunks")
        except ImportError as error:
            return "refused", f"node {node} has another version of vlp_models in {spec.origin} ({error}); {install}"
        outcome: tuple[str, Any] = here.run_in_worker(node, setup, function, number, item)
        return outcome

    return run_chunk


def run_in_worker(node: str, setup: dict[str, Any], function: bytes, number: int, item: bytes) -> tuple[str, Any]:
    """Run a chunk; return (`done`, result), (`failed`, exception) or (`refused`, why this worker can run none).

    `function` and `item` are pickled by the stage and sent by Ray, which itself runs any code that a client sends.
    """
    # Serialized, since the cache needs a hashable argument.
    problem = _check_worker(json.dumps(setup))
    if problem:
        return "refused", f"node {node} {problem}"
    mark = Path(setup["folder"]) / str(number)
    try:
        with mark.open("a", encoding="utf-8") as file:
            file.write(f"{node}\n")  # stays if this process dies
        result = _load(function)(pickle.loads(item))
    except Exception as error:
        return "failed", _with_node(error, node)
    mark.unlink(missing_ok=True)
    return "done", result


@functools.lru_cache(maxsize=1)
def _load(function: bytes) -> Callable[[Any], Any]:
    # Cached by the bytes: each process unpickles the function once, not once per chunk.
    loaded: Callable[[Any], Any] = pickle.loads(function)
    return loaded


@functools.lru_cache(maxsize=1)
def _check_worker(setup: str) -> str:
    """Return why this process cannot run chunks; empty if it can. Checked once per process."""
    expected = json.loads(setup)
    if difference := explain_difference(expected):
        return difference
    token = Path(expected["folder"]) / "token"
    try:
        # The token proves that this is the same folder, not just one of the same name.
        shared = token.read_text(encoding="utf-8") == expected["token"]
    except OSError:
        shared = False
    if not shared:
        kind = "another folder" if Path(expected["root"]).is_dir() else "no folder"
        return (
            f"has {kind} at {expected['root']}; mount the project's folder there, under the same path as on the "
            "machine that runs the stage"
        )
    for folder in expected["folders"]:
        if not Path(folder).is_dir():
            return f"has no folder {folder}, which the dataset's images are in; mount it under this path"
    return ""


def _with_node(error: Exception, node: str) -> Exception:
    """Return the error for the driver: the node in a user's message, or the worker's traceback."""
    if isinstance(error, VLPError) and error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]} (on node {node})", *error.args[1:])
    elif not isinstance(error, VLPError):
        error.add_note(f"on node {node}:\n{''.join(traceback.format_exception(error))}")
    try:
        # An error that cannot be unpickled would hide its own message on the driver.
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{error!r}, on node {node}:\n{''.join(traceback.format_exception(error))}")
    return error
