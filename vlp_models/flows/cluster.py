"""Run `features` and `shards` on a Dask or Ray cluster, through Prefect's task runners.

`python -m vlp_models.flows.cluster features` does the same as `vlp stage features`, with its chunks as tasks of a flow.
`vlp stage` calls it if params.yaml has a `cluster.address`. The machines of the cluster need this package, the
project's folder under the same path, and the PREFECT_API_URL of a server that they can reach.
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

from vlp_models.common.executors import bounded_results
from vlp_models.common.log import configure_logging
from vlp_models.common.plugins import with_plugins
from vlp_models.common.workspace import Workspace
from vlp_models.errors import MissingToolError, ParamsError, VLPError
from vlp_models.params import ClusterParams, load_params

Item = TypeVar("Item")
Result = TypeVar("Result")
STAGES = ("features", "shards")


class PrefectMapper:
    """A `Mapper` (vlp_models/common/executors.py) whose chunks are tasks of the current flow."""

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        # The chunk of a lost worker is repeated: its files are complete or absent. Errors of the data are final.
        options = {"retries": 2, "retry_delay_seconds": 5, "cache_policy": NO_CACHE, "persist_result": False}

        function = with_plugins(function)

        def run_chunk(item: Item) -> Result:  # Prefect needs `__name__`, which a partial lacks
            return function(item)

        chunk = task(name=self._name, retry_condition_fn=_is_worth_a_retry, **options)(run_chunk)  # type: ignore[call-overload]
        yield from bounded_results(chunk.submit, items, self._limit)


def _is_worth_a_retry(task_: Any, run: Any, state: Any) -> bool:
    """Return False if the chunk failed because of its data."""
    try:
        state.result()
    except VLPError:
        return False
    except Exception:
        return True
    return False


def task_runner(cluster: ClusterParams) -> TaskRunner[Any]:
    """Return Prefect's task runner for the cluster of params.yaml.

    Raises:
        MissingToolError: the extra package is not installed.
        ParamsError: `cluster.address` is empty.
    """
    if not cluster.address:
        raise ParamsError("params.yaml: `cluster.address` is empty; `vlp stage` runs without a cluster")
    module, runner = {"dask": ("prefect_dask", "DaskTaskRunner"), "ray": ("prefect_ray", "RayTaskRunner")}[cluster.kind]
    try:
        made: TaskRunner[Any] = getattr(importlib.import_module(module), runner)(address=cluster.address)
    except ImportError:
        package = module.replace("_", "-")
        install = "--require-hashes -r requirements-cluster.lock" if cluster.kind == "dask" else package
        raise MissingToolError(
            f"params.yaml: `cluster.kind: {cluster.kind}` needs the package {package}; run `uv pip install {install}`"
        ) from None
    return made


def run_on_cluster(stage: str, params_file: Path, root: Path) -> None:
    """Run the stage `features` or `shards` of the project in `root`, with its chunks on the cluster."""
    params = load_params(params_file)
    module = importlib.import_module(f"vlp_models.pipeline.stages.{stage}")

    @flow(name=f"{stage} on {params.cluster.kind}", task_runner=task_runner(params.cluster), retries=0)
    def on_cluster() -> None:
        mapper = PrefectMapper(f"chunk of {stage}", max(1, params.cluster.workers))
        module.run(params, Workspace(root), mapper=mapper)

    on_cluster()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m vlp_models.flows.cluster", description=__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    arguments = parser.parse_args()
    configure_logging()
    try:
        run_on_cluster(arguments.stage, arguments.params, Path.cwd())
    except VLPError as error:
        print(f"vlp_models.flows.cluster: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
