"""Launched trainings: what one has saved, its processes; SLURM with two nodes and a stand-in for Kubernetes' API.

The stand-in accepts a TrainJob, checks it against Kubeflow's own models, and runs each pod's command as a process.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil

API, CREATED = "trainer.kubeflow.org/v1alpha1", "2026-01-01T00:00:00Z"
SLURM_COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue")
SLURM_CONF = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=10
MinJobAge=600
JobRequeue=1
SlurmdParameters=config_overrides
{gpus}
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=1 RealMemory=4000 {gres} State=UNKNOWN
NodeName={host}-b NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=1 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes={host},{host}-b Default=YES MaxTime=INFINITE State=UP
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def slurm(folder: Path, gpus: int = 0) -> Iterator[dict[str, str]]:
    """Start SLURM with two nodes of one CPU on this host; yield the environment that its commands need.

    Args:
        gpus: 1: the first node has this machine's first GPU.
    """
    folder.mkdir()
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    host = socket.gethostname()
    ports = {"control": free_port(), "first": free_port(), "second": free_port()}
    config = folder / "slurm.conf"
    kinds, gres = ("GresTypes=gpu", "Gres=gpu:1") if gpus else ("", "")
    config.write_text(SLURM_CONF.format(folder=folder, host=host, gpus=kinds, gres=gres, **ports))
    (folder / "gres.conf").write_text(f"NodeName={host} Name=gpu File=/dev/nvidia0\n" if gpus else "")
    env = {**os.environ, "SLURM_CONF": str(config)}
    munge = [f"--{name}={folder}/munge.{end}" for name, end in (
        ("key-file", "key"), ("socket", "sock"), ("pid-file", "pid"), ("log-file", "log"), ("seed-file", "seed")
    )]  # fmt: skip
    subprocess.run(["munged", *munge, "--force"], check=True)
    daemons = [
        subprocess.Popen([*command], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for command in (["slurmctld", "-D", "-c"], ["slurmd", "-D", "-N", host], ["slurmd", "-D", "-N", f"{host}-b"])
    ]
    try:
        wait_until(lambda: squeue_nodes(env) == 2, 60)
        yield env
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)
        os.kill(int((folder / "munge.pid").read_text()), 15)


def squeue_nodes(env: dict[str, str]) -> int:
    command = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    return int(done.stdout.split()[0]) if done.returncode == 0 and done.stdout.strip() else 0


def has_slurm() -> bool:
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
    return all(shutil.which(command, path=path) for command in SLURM_COMMANDS) and os.geteuid() == 0


def wait_until(condition: Any, seconds: float) -> None:
    """Wait for a condition; fail the test if it does not hold in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain"
        time.sleep(0.2)


def step(project: Path) -> int:
    """Return the last update that a training has saved."""
    found = (project / ".work").glob("pretrain-tden/*/step-*.ckpt")
    return max((int(path.stem.removeprefix("step-")) for path in found), default=0)


def workers(project: Path) -> list[psutil.Process]:
    """Return the processes of a launched training, the newest last."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            if "vlp_models.contrib.launchers.worker" in command and str(project) in " ".join(command):
                found.append(process)
    return sorted(found, key=lambda process: process.create_time())


class Kubernetes:
    """The parts of Kubernetes' API that Kubeflow's SDK calls; `jobs` are the TrainJobs that it was given."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, list[subprocess.Popen[bytes]]] = {}
        self.refusal = ""  # a message with which the next TrainJob is refused
        self._environment = environment
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(*outer.get(self.path.partition("?")[0]))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._answer(*outer.create(body))

            def do_DELETE(self) -> None:
                self._answer(*outer.delete(self.path.partition("?")[0].rpartition("/")[2]))

            def _answer(self, status: int, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def write_kubeconfig(self, path: Path) -> None:
        cluster = {"server": f"http://127.0.0.1:{self._server.server_port}"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": cluster}],
            "users": [{"name": "me", "user": {}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me", "namespace": "training"}}],
            "current-context": "here",
        }
        path.write_text(json.dumps(config))

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        *_, kind, name = ["", *path.strip("/").split("/")]
        if kind == "clustertrainingruntimes" and name == "torch-distributed":
            return 200, RUNTIME
        if kind == "trainjobs" and name in self.jobs:
            return 200, self._with_status(name)
        if name == "trainjobs":
            jobs = [self._with_status(job) for job in self.jobs]
            return 200, {"apiVersion": API, "kind": "TrainJobList", "metadata": {}, "items": jobs}
        if name == "pods":
            return 200, {"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": []}
        return 404, {"kind": "Status", "status": "Failure", "message": f"{path} not found", "code": 404}

    def create(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        from kubeflow_trainer_api import models

        if self.refusal:
            return 403, {"kind": "Status", "status": "Failure", "message": self.refusal, "code": 403}
        parsed = models.TrainerV1alpha1TrainJob.from_dict(body)
        assert parsed is not None and parsed.to_dict() == body, "not a TrainJob of Kubeflow's API"
        name, trainer = body["metadata"]["name"], body["spec"]["trainer"]
        body["metadata"] |= {"namespace": "training", "creationTimestamp": CREATED}
        self.jobs[name] = body
        master = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
        more = {entry["name"]: entry.get("value", "") for entry in trainer.get("env", [])}
        common = {**self._environment, **more, **master, "PET_NNODES": str(trainer["numNodes"])}
        self.pods[name] = [
            subprocess.Popen(trainer["command"], env={**common, "PET_NODE_RANK": str(rank)}, cwd="/")
            for rank in range(trainer["numNodes"])
        ]
        return 201, body

    def delete(self, name: str) -> tuple[int, dict[str, Any]]:
        for pod in self.pods.pop(name, []):
            pod.terminate()
            pod.wait(30)
        self.jobs.pop(name, None)
        return 200, {"kind": "Status", "status": "Success"}

    def _with_status(self, name: str) -> dict[str, Any]:
        codes = [pod.poll() for pod in self.pods[name]]
        conditions = []
        if None not in codes:
            kind = "Failed" if any(codes) else "Complete"
            condition = {"type": kind, "status": "True", "reason": "JobsDone", "message": ""}
            conditions = [condition | {"lastTransitionTime": CREATED}]
        return {**self.jobs[name], "status": {"conditions": conditions}}

    def close(self) -> None:
        for name in list(self.jobs):
            self.delete(name)
        self._server.shutdown()
        self._server.server_close()


PODS = {"spec": {"template": {"spec": {"containers": [{"name": "node", "image": "pytorch"}]}}}}
STEP = {"metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}}
RUNTIME = {
    "apiVersion": API,
    "kind": "ClusterTrainingRuntime",
    "metadata": {"name": "torch-distributed", "labels": {"trainer.kubeflow.org/framework": "torch"}},
    "spec": {
        "mlPolicy": {"numNodes": 1, "torch": {}},
        "template": {"spec": {"replicatedJobs": [{"name": "node", "template": STEP | PODS}]}},
    },
}
