"""`trainer.launcher: kubeflow`: a TrainJob of Kubeflow Trainer, one pod per node.

The pods run `launchers.kubeflow.image` with the project's folder from `volume` (a claim that all nodes can mount) at
the path that it has here. What the cluster's `runtime` sets stays: it is torch's, with a container named `node`.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import Any

from kubeflow.common.types import KubernetesBackendConfig
from kubeflow.trainer import CustomTrainerContainer, TrainerClient
from kubeflow.trainer.options import (
    ContainerPatch,
    JobSetSpecPatch,
    JobSetTemplatePatch,
    JobSpecPatch,
    JobTemplatePatch,
    Labels,
    Name,
    PodSpecPatch,
    PodTemplatePatch,
    ReplicatedJobPatch,
    RuntimePatch,
    TrainerCommand,
    TrainingRuntimeSpecPatch,
)

from vlp_models.common.log import get_logger
from vlp_models.contrib.launchers.launch import Launch
from vlp_models.contrib.launchers.params import LaunchersParams
from vlp_models.errors import LaunchError, first_line
from vlp_models.params import Params

logger = get_logger(__name__)

POLL_EVERY = 5.0  # seconds
COMPLETE, FAILED = "Complete", "Failed"  # states of a TrainJob that has ended
CONTAINER = REPLICATED = "node"  # names in the torch runtimes of Kubeflow Trainer


class TrainJob:
    """A created TrainJob; see `launch.Job`."""

    def __init__(self, client: TrainerClient, name: str) -> None:
        self._client, self.name = client, name
        self._polled, self._logged = 0.0, ""

    def end(self) -> str | None:
        # `_follow` calls this twice a second; the API server is asked less often.
        if time.monotonic() < self._polled + POLL_EVERY:
            return None
        self._polled = time.monotonic()
        try:
            status = self._client.get_job(self.name).status
        except (RuntimeError, TimeoutError):  # the API server does not respond, or the job was deleted
            with suppress(RuntimeError, TimeoutError):
                if all(job.name != self.name for job in self._client.list_jobs()):
                    return f"TrainJob {self.name} was deleted"
            return None
        if status != self._logged:
            logger.info("TrainJob %s: %s", self.name, status)
            self._logged = status
        return f"TrainJob {self.name}: {status}" if status in (COMPLETE, FAILED) else None

    def clean_up(self) -> None:
        """Delete a complete TrainJob with its pods, which Kubernetes keeps; a failed one stays to be examined."""
        # `_logged` is the last state that was read.
        if self._logged == COMPLETE:
            self.cancel()

    def cancel(self) -> None:
        try:
            self._client.delete_job(self.name)
        except (RuntimeError, TimeoutError) as error:
            logger.warning(
                "TrainJob %s was not deleted (%s); run `kubectl delete trainjob %s`",
                self.name,
                first_line(error.__cause__ or error),
                self.name,
            )


def start(launch: Launch, params: Params) -> TrainJob:
    """Create the TrainJob; an error without an image or volume, or if Kubernetes refuses it."""
    p = params.section(LaunchersParams).kubeflow
    for key in ("image", "volume"):
        if not getattr(p, key):
            raise LaunchError(f"params.yaml: `trainer.launcher: kubeflow` needs `launchers.kubeflow.{key}`")
    # The SDK logs every step of its own.
    logging.getLogger("kubeflow").setLevel(logging.ERROR)
    job = f"vlp-{launch.stage}-{launch.id}"
    mount = {"name": "project", "mountPath": launch.root, **({"subPath": p.sub_path} if p.sub_path else {})}
    shared = {"name": "shared-memory", "mountPath": "/dev/shm"}  # of NCCL; the default is 64 MB
    env: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in p.env.items()]
    # SECRET or SECRET/KEY of Kubernetes; the default key is the variable's name.
    for name, secret in p.secrets.items():
        of, _, key = secret.partition("/")
        env.append({"name": name, "valueFrom": {"secretKeyRef": {"name": of, "key": key or name}}})
    pod = PodSpecPatch(
        volumes=[
            {"name": "project", "persistentVolumeClaim": {"claimName": p.volume}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
        containers=[ContainerPatch(name=CONTAINER, volume_mounts=[mount, shared], env=env or None)],
        node_selector=dict(p.node_selector) or None,
    )
    # The patch of the runtime holds that of its pods, five levels deep.
    job_patch = JobTemplatePatch(spec=JobSpecPatch(template=PodTemplatePatch(spec=pod)))
    jobs = [ReplicatedJobPatch(name=REPLICATED, template=job_patch)]
    runtime = TrainingRuntimeSpecPatch(template=JobSetTemplatePatch(spec=JobSetSpecPatch(replicated_jobs=jobs)))
    resources = {"cpu": p.cpus_per_node, "memory": p.memory, **({"gpu": launch.devices} if launch.gpu else {})}
    try:
        client = TrainerClient(KubernetesBackendConfig(namespace=p.namespace or None, context=p.context or None))
        client.train(
            runtime=p.runtime,
            trainer=CustomTrainerContainer(
                image=p.image,
                num_nodes=launch.nodes,
                resources_per_node={key: value for key, value in resources.items() if value},
            ),
            options=[
                Name(job),
                Labels({"vlp-run": f"{launch.stage}-{launch.key}"}),
                TrainerCommand(["python", "-m", "vlp_models.contrib.launchers.node", str(launch.folder)]),
                RuntimePatch(runtime),
            ],
        )
    except Exception as error:  # the SDK, urllib3 and the Kubernetes client each have their own
        cause = error.__cause__ or error
        refusal = str(getattr(cause, "body", None) or "").strip()
        raise LaunchError(
            f"{launch.name}: Kubernetes did not accept the TrainJob: "
            f"{refusal.splitlines()[0] if refusal else first_line(cause)}; check `kubectl get "
            "clustertrainingruntimes`, the context of your kubeconfig, and `launchers.kubeflow` in params.yaml"
        ) from None
    logger.info("%s: TrainJob %s", launch.name, job)
    return TrainJob(client, job)
