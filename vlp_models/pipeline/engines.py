"""Other machines: a stage's chunks on a cluster, and trainings. The engines are in contrib/launchers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vlp_models.common.executors import Mapper
from vlp_models.common.plugins import Table, import_target
from vlp_models.common.workspace import Workspace
from vlp_models.errors import MissingToolError
from vlp_models.params import Params

ENGINES = Table("engines", {})  # chunks, training -> `module:function`


def cluster_mapper(
    params: Params, workspace: Workspace, *, gpus: float = 0, folders: Sequence[Path] = ()
) -> Mapper | None:
    """Return what runs chunks on params.yaml's cluster; None without an address.

    Args:
        gpus: per worker.
        folders: what workers read besides the project's folder.
    """
    if not params.cluster.address:
        return None
    mapper: Mapper = _engine("chunks", "cluster.address")(params, workspace, gpus=gpus, folders=folders)
    return mapper


def launch_training(params: Params, workspace: Workspace, stage: str, key: str, params_file: str) -> int:
    """Run a training by `trainer.launcher`; return its exit code."""
    code: int = _engine("training", "trainer.launcher")(params, workspace, stage, key, params_file)
    return code


def _engine(work: str, key: str) -> Callable[..., Any]:
    if work not in ENGINES:
        raise MissingToolError(f"params.yaml: `{key}` needs vlp_models/contrib/launchers, which is not installed")
    function: Callable[..., Any] = import_target(ENGINES[work])
    return function
