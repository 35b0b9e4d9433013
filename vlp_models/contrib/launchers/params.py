"""The sections `cluster` and `launchers` of params.yaml."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vlp_models.params.schema import NonNegativeInt, PositiveInt, Share


@dataclass(frozen=True, kw_only=True)
class ClusterParams:
    """Where the chunks of `prepare`, `validate`, `features` and `shards` run: this machine, or a running Ray cluster.

    The machines of a cluster have the project folder at the same path and this package installed.

    address  auto, HOST:PORT (of the head, from a machine of the cluster) or ray://HOST:PORT (of its client server, from
             any machine); empty: local processes
    workers  with an address, the number of chunks in progress at once; 0: as many as fit the cluster's CPUs or GPUs.
             Without one, the number of processes; 0: one per CPU for features, one for shards, which are bound by the
             disk
    cpus     reserved for each worker
    gpus     reserved for each worker of `features` with a detector or backbone, 0 to 1: workers share a GPU below 1; 0:
             features are computed on CPUs
    """

    address: str = ""
    workers: NonNegativeInt = 0
    cpus: PositiveInt = 1
    gpus: Share = 0.0


@dataclass(frozen=True, kw_only=True)
class TorchrunParams:
    """
    endpoint  HOST:PORT where several nodes meet: this machine's name, and a free port that the others reach
    """

    endpoint: str = ""


@dataclass(frozen=True, kw_only=True)
class SlurmParams:
    """
    minutes       time limit of a job; one that reaches it is requeued and resumes
    requeues      after time limits, at most; preemptions do not count
    save_seconds  before the time limit, to save the state
    cpus_per_node  0: SLURM's default
    options       further options of sbatch, such as {qos: long, constraint: a100, mem: 200G}
    """

    partition: str = ""
    account: str = ""
    minutes: PositiveInt = 1440
    requeues: NonNegativeInt = 100
    save_seconds: PositiveInt = 120
    cpus_per_node: NonNegativeInt = 0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RayTrainParams:
    """The cluster is that of `cluster.address`; empty: `auto`."""

    cpus_per_node: PositiveInt = 1


@dataclass(frozen=True, kw_only=True)
class KubeflowParams:
    """
    image          with this package (Dockerfile)
    volume         the PersistentVolumeClaim with the project, mountable by several nodes; it is mounted at the path
                   that the project has here
    sub_path       the project's folder in the volume; empty: the whole volume
    runtime        a ClusterTrainingRuntime or TrainingRuntime for torch
    context, namespace  empty: those of the kubeconfig
    memory         of a pod, such as 64Gi; empty: the runtime's
    env            environment variables of the pods, as plain text
    secrets        environment variable -> SECRET/KEY of Kubernetes, e.g. MLFLOW_TRACKING_PASSWORD: vlp-secrets/mlflow
    """

    image: str = ""
    volume: str = ""
    sub_path: str = ""
    runtime: str = "torch-distributed"
    context: str = ""
    namespace: str = ""
    cpus_per_node: NonNegativeInt = 0
    memory: str = ""
    node_selector: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LaunchersParams:
    """Settings of the engines that `trainer.launcher` may name (contrib/launchers)."""

    torchrun: TorchrunParams = field(default_factory=TorchrunParams)
    slurm: SlurmParams = field(default_factory=SlurmParams)
    ray: RayTrainParams = field(default_factory=RayTrainParams)
    kubeflow: KubeflowParams = field(default_factory=KubeflowParams)
