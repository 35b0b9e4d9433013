"""The parts as Prefect tasks, and what all flows share: lock, GPU slot, artifacts, notification."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import FlowRun, State, TaskRun
from prefect.concurrency._asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.sync import concurrency
from prefect.logging import get_logger
from prefect.runtime import flow_run as current
from prefect.states import Cancelled, Completed  # plain-ok
from prefect.utilities.urls import url_for

from vlp_models.common.plugins import Table, import_target
from vlp_models.common.redaction import without_secrets
from vlp_models.flows.notify import notify
from vlp_models.flows.parts import Part
from vlp_models.flows.pipeline import Run, summarize
from vlp_models.flows.process import WORTH_A_RETRY, WorkspaceInUse, hold_workspace, outlive_worker, update_dvc_yaml
from vlp_models.params import Params, load_params
from vlp_models.pipeline.dvc.lock_file import repair

# A server on SQLite that is asked for a slot while it stores the start of the task responds with 503, and the client
# then waits for two seconds. After this delay (s) the start is stored.
SETTLE = 0.15
PUBLISHERS = Table("publishers", {})  # name -> `module:function` of a run's folder, params and outcomes
STATES = {"ran": "Completed", "up to date": "Up to date", "skipped": "Skipped", "refused": "Refused"}


@without_secrets()  # the server stores the exception of a failed run
def run_parts(root: str, *selections: Callable[[Params], list[Part]], hold: bool = True) -> State[Any]:
    """Run the body of every flow: hold the workspace, run the parts in order, publish artifacts.

    The flow's own state keeps its standard name: automations and heartbeats identify a finished run by it.

    Args:
        selections: functions from params to parts; each is called with the current params, because an earlier part may
            have changed them.
        hold: False for parts that change no file that another run uses: they do not wait for it.

    Raises:
        StageFailed: a part failed; the parts after it did not run, and artifacts of the others are published.
    """
    outlive_worker()
    folder = Path(root).absolute()
    logger = get_run_logger()
    params = load_params(folder / "params.yaml")
    # The first selection checks the flow's own parameters.
    selections[0](params)  # reports a wrong parameter before the run waits for anything
    # Another run may use the workspace for hours. A rollback changes only the ledger, which has a lock of its own.
    flow, name = str(current.get_flow_name()), str(current.get_name())
    wait = params.flow.wait_minutes * 60
    workspace: contextlib.AbstractContextManager[int | None] = (
        hold_workspace(folder, f"{flow} ({name})", wait, logger.info) if hold else contextlib.nullcontext()
    )
    try:
        with workspace as lock_fd:
            if hold:
                prepare_workspace(str(folder))
            run = Run(folder, lock_fd, params.flow.timeout_hours)
            delays: list[float] = [float(delay) for delay in params.flow.retry_delays]
            retries: dict[str, Any] = {"retries": len(delays), "retry_delay_seconds": delays or 0}
            try:
                for select in selections:
                    params = load_params(folder / "params.yaml")  # edited meanwhile, or by `vlp use` of an earlier part
                    for part in select(params):
                        # A task per part, with its own retries and state in Prefect's UI.
                        bring_up_to_date.with_options(task_run_name=part.name, **retries)(
                            run, part, params.flow.gpu_limit
                        )
            finally:
                # Also if a part failed. Not if the run is being canceled, which leaves it 30 s.
                error = sys.exc_info()[1]
                # A cancellation raises a BaseException that is no Exception.
                if error is None or isinstance(error, Exception):
                    publish(run, params)
            line = summarize(run.outcomes)
            logger.info(line)
            return Completed(message=line, data={outcome.part: outcome.state for outcome in run.outcomes})
    except WorkspaceInUse as error:
        # Prefect calls no hook for a flow that returns this state itself.
        notify(folder, logger.warning, flow=flow, run=name, state="Cancelled", message=str(error), bad=True)  # plain-ok
        return Cancelled(message=str(error))  # plain-ok


def _is_worth_a_retry(task_: Any, run: TaskRun, state: State[Any]) -> bool:
    """Return whether waiting can help: a busy workspace, a preempted trainer, a lost connection."""
    # The result of a failed state is its exception, which is raised here.
    try:
        state.result()
    except WORTH_A_RETRY:
        return True
    except Exception:
        return False
    return False


@task(cache_policy=NO_CACHE, persist_result=False, retry_condition_fn=_is_worth_a_retry)
@without_secrets()
def bring_up_to_date(run: Run, part: Part, gpu_limit: str) -> State[Any]:
    """Run one part of the pipeline; the name of its state is whether it ran, was up to date, or was refused."""
    logger = get_run_logger()
    outcome = run.run_part(part, logger.info, lambda: gpu_slot(gpu_limit, logger.warning))
    # `refused (inconclusive): version 3`: the gate found no gain, and excluded none.
    is_inconclusive = outcome.state == "refused" and outcome.detail.startswith("refused (inconclusive)")
    return Completed(name="Inconclusive" if is_inconclusive else STATES[outcome.state], message=outcome.detail or None)


@contextlib.contextmanager
def gpu_slot(limit: str, log: Callable[[str], None]) -> Iterator[None]:
    """Hold a slot of the Prefect concurrency limit. Run without one if there is no such limit, or no server."""
    slot = contextlib.ExitStack()
    if limit:
        time.sleep(SETTLE)
        # A lease that cannot be renewed must not stop a training.
        try:
            slot.enter_context(concurrency(limit, occupy=1, raise_on_lease_renewal_failure=False))
        except ConcurrencySlotAcquisitionError as error:
            log(f"no slot of `{limit}`, running without one: {error}")
    try:
        yield
    finally:
        try:
            slot.close()
        except Exception as error:  # the server is away: the lease expires
            log(f"the slot of `{limit}` was not released: {type(error).__name__}")


@task(task_run_name="prepare the workspace", cache_policy=NO_CACHE, persist_result=False)
@without_secrets()
def prepare_workspace(root: str) -> None:
    """Repair what a killed DVC left, and update dvc.yaml."""
    for line in repair(Path(root)):
        get_run_logger().warning(line)
    update_dvc_yaml(Path(root), get_run_logger().info)


@task(task_run_name="publish results", cache_policy=NO_CACHE, persist_result=False)
def publish(run: Run, params: Params) -> None:
    """Let contrib publish the run's results, such as artifacts in Prefect's UI."""
    for target in PUBLISHERS.values():
        import_target(target)(run.root, params, run.outcomes)


def report_end(flow: Any, flow_run: FlowRun, state: State[Any]) -> None:
    """Notify people of the end of a run (state hook of every flow). Never raise.

    The parameter names are Prefect's: a worker passes them by name.
    """
    message = state.message or ""
    notify(
        Path(str(flow_run.parameters.get("root", "."))),
        get_logger("flows").warning,
        flow=flow.name,
        run=flow_run.name or str(flow_run.id),
        state="Cancelled" if state.is_cancelling() else state.name or state.type.value,  # plain-ok
        message=message,
        # Completed, but with a refused promotion: a person may want to look.
        bad=not state.is_completed() or ": refused" in message,
        link=url_for("flow-run", obj_id=flow_run.id) or "",
    )


# Not on_crashed: a crashed run executes no hooks. The server starts the deployment notify/webhook instead.
HOOKS: dict[str, Any] = {name: [report_end] for name in ("on_completion", "on_failure", "on_cancellation")}
