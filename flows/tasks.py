"""The parts as Prefect tasks, and what every flow shares: lock, GPU slot, artifacts, notification."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import prefect.artifacts
from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import FlowRun, State, TaskRun
from prefect.concurrency._asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.sync import concurrency
from prefect.logging import get_logger
from prefect.runtime import flow_run as current
from prefect.states import Cancelled, Completed

from flows.artifacts import artifacts
from flows.dvc import plan, repair
from flows.lock import WorkspaceHeld, hold_workspace
from flows.notify import notify
from flows.parts import Part
from flows.pipeline import Run, summary
from flows.process import WORTH_A_RETRY
from vlp_models.common.redaction import redact, without_secrets
from vlp_models.errors import ParamsError
from vlp_models.params import FlowParams, Params, load_params

# A server on SQLite, asked for a slot in the instant in which it writes down that the task has begun, answers 503, and
# the client then waits two seconds. This is enough for it to have written.
SETTLE = 0.15
STATES = {"ran": "Completed", "up to date": "Up to date", "skipped": "Skipped", "refused": "Refused"}


@without_secrets()  # the server keeps what a run failed with
def run_parts(root: str, *selections: Callable[[Params], list[Part]]) -> State[Any]:
    """The body of every flow: holds the workspace, runs the parts in order, publishes what there is to see.

    The flow's own state keeps its standard name: automations and heartbeats know a finished run by it.

    Args:
        selections: asked in turn, each with the params as they are then: a part may have changed them.

    Raises:
        StageFailed: a part failed; the parts after it were not run, what happened is published.
    """
    folder = Path(root).absolute()
    logger = get_run_logger()
    params = load_params(folder / "params.yaml")
    selections[0](params)  # a wrong parameter is told before anything is waited for
    name = f"{current.get_flow_name()} ({current.get_name()})"
    try:
        with hold_workspace(folder, name, params.flow.wait_minutes * 60, logger.info) as hold:
            prepare_workspace(str(folder))
            run = Run(folder, hold)
            try:
                for select in selections:
                    params = load_params(folder / "params.yaml")
                    for part in select(params):
                        _task(part, params.flow)(run, part, params.flow.gpu_limit)
            finally:
                # Also when a part failed; not when the run is being ended, which leaves 30 s.
                if not _is_ending():
                    publish(run, params)
            line = summary(run.outcomes)
            logger.info(line)
            return Completed(message=line, data={outcome.part: outcome.state for outcome in run.outcomes})
    except WorkspaceHeld as error:
        # Prefect calls no hook for a flow that ends itself as cancelled.
        flow, run_name = str(current.get_flow_name()), str(current.get_name())
        told = {"state": "Cancelled", "message": str(error)}
        notify(params.flow, flow=flow, run=run_name, bad=True, log=logger.warning, **told)
        return Cancelled(message=str(error))


def _is_ending() -> bool:
    error = sys.exc_info()[1]
    return error is not None and not isinstance(error, Exception)


def _task(part: Part, params: FlowParams) -> Any:
    delays: list[float] = [float(delay) for delay in params.retry_delays]
    return bring_up_to_date.with_options(task_run_name=part.name, retries=len(delays), retry_delay_seconds=delays or 0)


def _is_worth_a_retry(task_: Any, run: TaskRun, state: State[Any]) -> bool:
    """Only what waiting can mend: a busy workspace, a preempted trainer, a lost connection."""
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
    """One part of the pipeline; its state's name tells whether it ran, was up to date, or was refused."""
    logger = get_run_logger()
    outcome = run.run_part(part, logger.info, lambda: gpu_slot(gpu_limit, logger.warning))
    return Completed(name=STATES[outcome.state], message=outcome.detail or None)


@contextlib.contextmanager
def gpu_slot(limit: str, log: Callable[[str], None]) -> Iterator[None]:
    """A slot of the Prefect concurrency limit. Goes on without one when there is no such limit, or no server."""
    slot = contextlib.ExitStack()
    if limit:
        time.sleep(SETTLE)
        try:
            slot.enter_context(concurrency(limit, occupy=1, raise_on_lease_renewal_failure=False))
        except ConcurrencySlotAcquisitionError as error:
            log(f"no slot of `{limit}`, going on without: {error}")
    try:
        yield
    finally:
        try:
            slot.close()
        except Exception as error:  # the server is away: the lease runs out by itself
            log(f"the slot of `{limit}` was not given back: {type(error).__name__}")


@task(task_run_name="prepare the workspace", cache_policy=NO_CACHE, persist_result=False)
@without_secrets()
def prepare_workspace(root: str) -> None:
    for line in repair(Path(root)):
        get_run_logger().warning(line)
    plan(Path(root), get_run_logger().info)


@task(task_run_name="publish results", cache_policy=NO_CACHE, persist_result=False)
def publish(run: Run, params: Params) -> None:
    """Artifacts of this run. A server that does not take them fails nothing."""
    for artifact in artifacts(run.root, params, run.outcomes):
        try:
            if artifact.rows is not None:
                prefect.artifacts.create_table_artifact(
                    artifact.rows, key=artifact.key, description=artifact.description
                )
            else:
                prefect.artifacts.create_link_artifact(
                    artifact.link, key=artifact.key, description=artifact.description
                )
        except Exception as error:
            get_run_logger().warning("artifact %s was not published: %s", artifact.key, redact(str(error)))


def tell_webhook(flow: Any, flow_run: FlowRun, state: State[Any]) -> None:
    """State hook of every flow: says how it ended. Never raises. A worker passes its arguments by name."""
    logger = get_logger("flows")
    try:
        params = load_params(Path(str(flow_run.parameters.get("root", "."))) / "params.yaml").flow
    except ParamsError as error:
        logger.warning("no notification: %s", error)
        return
    message = state.message or ""
    notify(
        params,
        flow=flow.name,
        run=flow_run.name or str(flow_run.id),
        state="Cancelled" if state.is_cancelling() else state.name or state.type.value,
        message=message,
        bad=not state.is_completed() or ": refused (" in message,
        log=logger.warning,
    )


# Not on_crashed: who crashed can't speak. The deployment tell/webhook does, told by the server.
HOOKS: dict[str, Any] = {name: [tell_webhook] for name in ("on_completion", "on_failure", "on_cancellation")}
