"""`trainer.launcher: ray`: Ray Train on the cluster of `cluster.address`, one Ray worker per node.

Ray Train replaces a lost worker or node and starts all of them again, which resume from the last checkpoint.
"""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchConfig, TorchTrainer

from vlp_models.contrib.launchers.launch import OUTCOME, STOP, Launch, last_line
from vlp_models.contrib.launchers.node import RESTARTS, run_node
from vlp_models.contrib.launchers.params import ClusterParams, LaunchersParams
from vlp_models.contrib.launchers.ray_chunks import connected
from vlp_models.errors import LaunchError
from vlp_models.params import Params


def _train_on_node(config: dict[str, str]) -> None:
    """Run on each of Ray Train's workers."""
    folder, index = Path(config["folder"]), get_context().get_world_rank()  # plain-ok
    endpoint = ""
    if index == 0:
        # The system picks a free port, which torchrun binds after this socket has closed.
        with socket.socket() as free:
            free.bind(("", 0))
            endpoint = f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"
    # All nodes meet at the address of the first.
    endpoint = broadcast_from_rank_zero(endpoint)
    code = run_node(folder, index, endpoint)
    # An outcome explains the exit; without one, Ray Train restarts the workers.
    if code and not (folder / OUTCOME).exists():
        raise RuntimeError(f"{socket.gethostname()}: torchrun exited with {code}")


class RayRun:
    """A run of Ray Train in a thread; see `launch.Job`."""

    def __init__(self, launch: Launch, trainer: TorchTrainer, connection: ExitStack) -> None:
        self._launch, self._connection, self._ended = launch, connection, ""
        self._thread = threading.Thread(target=self._fit, args=(trainer,), daemon=True)
        self._thread.start()

    def _fit(self, trainer: TorchTrainer) -> None:
        try:
            trainer.fit()
            self._ended = "Ray Train has ended"
        except Exception as error:
            self._ended = f"Ray Train gave up after {RESTARTS} restarts: {last_line(error)}"
        finally:
            self._connection.close()

    def end(self) -> str | None:
        return None if self._thread.is_alive() else self._ended

    def cancel(self) -> None:
        (self._launch.folder / STOP).touch()
        self._connection.close()

    def clean_up(self) -> None:
        pass


def start(launch: Launch, params: Params) -> RayRun:
    """Start the run; an error if no cluster answers, or it lacks the CPUs or GPUs."""
    address = params.section(ClusterParams).address or "auto"
    if address.startswith("ray://"):
        raise LaunchError(
            f"params.yaml: `cluster.address: {address}`: Ray Train starts from a machine of the cluster; run it there "
            "with `cluster.address: auto`, or choose another `trainer.launcher`"
        )
    connection = ExitStack()
    connection.enter_context(connected(address))
    cpus = params.section(LaunchersParams).ray.cpus_per_node
    # Each node is one Ray worker that reserves all GPUs of its processes.
    need = {"CPU": float(cpus), **({"GPU": float(launch.devices)} if launch.gpu else {})}
    have = ray.cluster_resources()
    for name, amount in need.items():
        if have.get(name, 0.0) < amount * launch.nodes:
            connection.close()
            raise LaunchError(
                f"{launch.name} needs {amount:g} {name} on each of {launch.nodes} nodes; the Ray cluster at {address} "
                f"has {have.get(name, 0.0):g} in all"
            )
    trainer = TorchTrainer(
        _train_on_node,
        torch_config=TorchConfig(backend="gloo"),  # of Ray's workers, which compute nothing themselves
        train_loop_config={"folder": str(launch.folder)},
        scaling_config=ScalingConfig(
            num_workers=launch.nodes, use_gpu=launch.gpu, resources_per_worker=need, placement_strategy="SPREAD"
        ),
        run_config=RunConfig(
            name=launch.id,
            storage_path=str(launch.folder / "ray"),
            failure_config=FailureConfig(max_failures=RESTARTS),
        ),
    )
    return RayRun(launch, trainer, connection)
