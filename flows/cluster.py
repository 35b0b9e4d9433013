"""Features and shards on a Dask or Ray cluster, through Prefect's task runners.

`python -m flows.cluster features` does what `vlp stage features` does, its parts as tasks of a flow. `vlp stage` calls
it by itself where params.yaml has a `cluster.address`. The cluster's machines need this package, the project's folder
under the same path, and PREFECT_API_URL of a server that they reach.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.task_runners import TaskRunner

from vlp_models.common.executors import in_flight
from vlp_models.common.workspace import Workspace
from vlp_models.errors import MissingToolError, ParamsError, VLPError
from vlp_models.params import ClusterParams, load_params

Item = TypeVar("Item")
Result = TypeVar("Result")
STAGES = ("features", "shards")


class PrefectMapper:
    """A `Mapper` (vlp_models/common/executors.py) whose parts are tasks of the flow that it is used in."""

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        # A part that a lost worker has left is made anew; its files are whole or absent. Errors of the data are final.
        options = {"retries": 2, "retry_delay_seconds": 5, "cache_policy": NO_CACHE, "persist_result": False}
        part = task(name=self._name, retry_condition_fn=_may_pass, **options)(_plain(function))  # type: ignore[call-overload]
        yield from in_flight(part.submit, items, self._limit)


def _plain(function: Callable[[Item], Result]) -> Callable[[Item], Result]:
    """A plain function: Prefect asks a function for its name, which a partial has not."""

    def make_part(item: Item) -> Result:
        return function(item)

    return make_part


def _may_pass(task_: Any, run: Any, state: Any) -> bool:
    try:
        state.result()
    except VLPError:
        return False
    except Exception:
        return True
    return False


def task_runner(cluster: ClusterParams) -> TaskRunner[Any]:
    """
    Raises:
        MissingToolError: the extra package is not installed.
        ParamsError: no address.
    """
    if not cluster.address:
        raise ParamsError("params.yaml: `cluster.address` is empty; `vlp stage` works without a cluster")
    module, runner = {"dask": ("prefect_dask", "DaskTaskRunner"), "ray": ("prefect_ray", "RayTaskRunner")}[cluster.kind]
    try:
        made: TaskRunner[Any] = getattr(importlib.import_module(module), runner)(address=cluster.address)
    except ImportError:
        package = module.replace("_", "-")
        raise MissingToolError(
            f"params.yaml: `cluster.kind: {cluster.kind}` needs the package {package}; "
            + (
                "`uv pip install --require-hashes -r requirements-cluster.lock`"
                if cluster.kind == "dask"
                else "install it"
            )
        ) from None
    return made


def run_on_cluster(stage: str, params_file: Path, root: Path) -> None:
    """Runs the stage `features` or `shards` of the project in `root`, its parts on the cluster."""
    params = load_params(params_file)
    module = importlib.import_module(f"vlp_models.pipeline.stages.{stage}")

    @flow(name=f"{stage} on {params.cluster.kind}", task_runner=task_runner(params.cluster), retries=0)
    def on_cluster() -> None:
        mapper = PrefectMapper(f"part of {stage}", max(1, params.cluster.workers))
        module.run(params, Workspace(root), mapper=mapper)

    on_cluster()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flows.cluster", description=__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    arguments = parser.parse_args()
    try:
        run_on_cluster(arguments.stage, arguments.params, Path.cwd())
    except VLPError as error:
        print(f"flows.cluster: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
