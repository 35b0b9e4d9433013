"""Other machines: a stage's chunks on a cluster, and trainings. The engines are in contrib/launchers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vlp_models.common.executors import Mapper
from vlp_models.common.plugins import Table, import_target
from vlp_models.common.workspace import Workspace
from vlp_models.params import Params

ENGINES = Table("engines", {})  # chunks, training -> `module:function`


class Cluster(NamedTuple):
    """What stages read of the section `cluster`, which is contrib/launchers'; without that folder these values."""

    address: str = ""  # empty: this machine
    workers: int = 0
    gpus: float = 0.0


def cluster_of(params: Params) -> Cluster:
    """Return the section `cluster`."""
    cluster: Cluster = params.sections.get("cluster", Cluster())
    return cluster


def cluster_mapper(
    params: Params, workspace: Workspace, *, gpus: float = 0, folders: Sequence[Path] = ()
) -> Mapper | None:
    """Return what runs chunks on params.yaml's cluster; None without an address.

    Args:
        gpus: per worker.
        folders: what workers read besides the project's folder.
    """
    if not cluster_of(params).address:
        return None
    mapper: Mapper = import_target(ENGINES["chunks"])(params, workspace, gpus=gpus, folders=folders)
    return mapper


def launch_training(params: Params, workspace: Workspace, stage: str, key: str, params_file: str) -> int:
    """Run a training by `trainer.launcher`; return its exit code."""
    code: int = import_target(ENGINES["training"])(params, workspace, stage, key, params_file)
    return code
