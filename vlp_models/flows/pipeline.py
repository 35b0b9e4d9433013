"""Run the parts in order, independent of Prefect: a Prefect task calls `run_part`, `run_without_server` needs none."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from vlp_models.common.io import read_json_or_none, write_json
from vlp_models.common.redaction import redact, without_secrets
from vlp_models.errors import TrackingError
from vlp_models.flows.notify import notify
from vlp_models.flows.parts import DRIFTED, Part
from vlp_models.flows.process import (
    WORTH_A_RETRY,
    Log,
    StageFailed,
    WorkspaceInUse,
    hold_workspace,
    is_stale,
    repro,
    run_supervised,
    update_dvc_yaml,
)
from vlp_models.params import Params, load_params
from vlp_models.pipeline.dvc.lock_file import repair

Slot = Callable[[], AbstractContextManager[None]]
MAX_DETAIL = 500  # characters of an outcome's detail


class DataDrifted(StageFailed):
    """`vlp drift` closed its gate: new data differs too much from the training data."""


@dataclass(frozen=True)
class Outcome:
    """Result of a part; `detail` is the gate's reasons, or the last line of the output."""

    part: str
    state: Literal["ran", "up to date", "skipped", "refused"]
    detail: str = ""
    seconds: float = 0.0


class Run:
    """One run over a held workspace. It remembers whether anything was stale, so that a no-op asks DVC only once."""

    def __init__(self, root: Path, lock_fd: int | None, timeout_hours: Mapping[str, float]) -> None:
        self.root = root
        self.lock_fd = lock_fd
        self.timeout_hours = timeout_hours  # kind of a part -> hours; without an entry there is no limit
        self.outcomes: list[Outcome] = []
        self._all_fresh: bool | None = None  # None: DVC was not asked yet
        self._any_ran = False

    def run_part(self, part: Part, log: Log, slot: Slot) -> Outcome:
        """Bring one part up to date.

        Args:
            slot: context manager that holds a GPU slot; entered by a GPU part that is stale.

        Raises:
            StageFailed or a subclass (flows/process.py). Calling it again is safe: finished work is not repeated.
        """
        start = time.perf_counter()
        if part.skip:
            log(f"{part.name}: skipped, {part.skip}")
            outcome = Outcome(part.name, "skipped", part.skip)
        else:
            state, detail = self._run_targets(part, log, slot) if part.targets else self._run_command(part, log)
            outcome = Outcome(part.name, state, detail, time.perf_counter() - start)
            log(f"{part.name}: {state}" + (f", {detail}" if state == "skipped" else ""))
        self.outcomes.append(outcome)
        return outcome

    def _limits(self, part: Part) -> dict[str, Any]:
        """Return the options of `repro` and `run_supervised` that a part's commands have."""
        return {"timeout": self.timeout_hours.get(part.kind, 0) * 3600, "lock_fd": self.lock_fd}

    def _run_targets(self, part: Part, log: Log, slot: Slot) -> tuple[Literal["ran", "up to date"], str]:
        targets = list(part.targets)
        if self._all_fresh is None:
            # One `dvc status` for all stages: if nothing is stale, no part asks again.
            self._all_fresh = not is_stale(self.root, [])
        # After a part that ran, the next ones count as stale: asking costs as much as running, and the price of a wrong
        # guess is waiting for a slot.
        # A part that needs no slot is left to `dvc repro`, which checks by itself.
        fresh = self._all_fresh or (part.gpu and not self._any_ran and not is_stale(self.root, targets))
        ran = False
        if not fresh:
            with slot() if part.gpu else contextlib.nullcontext():
                ran = repro(self.root, targets, log, **self._limits(part))
            self._any_ran = self._any_ran or ran
        # DVC finds a registration up to date whose versions MLflow has lost: register and judge them again.
        try:
            lost = part.lost(self.root)
        except TrackingError as error:  # a part that is not stale does not require MLflow
            log(f"{part.name}: could not check whether the registry still holds the registered versions: {error}")
            lost = []
        if lost:
            log(f"{part.name}: {', '.join(lost)} lost; running it again")
            for record in (self.root / ".work" / "flow").glob("promote-*.json"):
                record.unlink()  # before: a retry finds nothing lost
        # A report may be up to date for DVC and older than the last decision.
        if lost or (not ran and part.outdated(self.root)):
            # `--single-item`: only this stage is forced, not those that it depends on.
            forced = ["--force", "--single-item", *targets]
            ran = repro(self.root, forced, log, **self._limits(part)) or bool(lost)
        return ("ran" if ran else "up to date"), ""

    def _run_command(self, part: Part, log: Log) -> tuple[Literal["ran", "up to date", "skipped", "refused"], str]:
        evidence = part.evidence(self.root)
        if evidence is None:
            return "skipped", part.nothing
        record = self.root / ".work" / "flow" / f"{part.name.replace(' ', '-')}.json"
        # A command whose inputs have not changed since its last answer would answer the same.
        # The record is written after the command has answered, so a failure is repeated.
        if evidence and read_json_or_none(record) == {"evidence": evidence}:
            return "up to date", "nothing that it depends on has changed since it last ran"
        start = time.time()
        accept = (0,) if part.refusal is None else (0, part.refusal)
        command = ["vlp", *part.command]
        try:
            ended = run_supervised(self.root, command, log, accept=accept, **self._limits(part))
        except StageFailed as error:
            # The exit code is only in the message.
            if part.kind == "drift" and f"exited with code {DRIFTED}:" in str(error):
                raise DataDrifted(
                    f"{error}\nSee reports/drift.json; with `drift.gate: false` it only reports."
                ) from None
            raise
        if evidence:
            write_json(record, {"evidence": evidence})
        return "refused" if ended.code else "ran", _detail(self.root, part, ended.lines, start)


def summarize(outcomes: Iterable[Outcome]) -> str:
    """Return one line: the parts that ran, and the answers of the commands."""
    ran, answers = [], []
    for outcome in outcomes:
        if outcome.detail and outcome.state in ("ran", "refused"):
            answer = "refused" if outcome.state == "refused" else "done"
            detail = outcome.detail if outcome.detail.startswith(answer) else f"{answer} ({outcome.detail})"
            answers.append(f"{outcome.part}: {detail}")
        elif outcome.state == "ran":
            ran.append(outcome.part)
    return "; ".join([f"ran {', '.join(ran)}" if ran else "nothing was stale; nothing ran", *answers])


@without_secrets()
def run_without_server(root: Path, select: Callable[[Params], list[Part]], *, name: str, log: Log) -> list[Outcome]:
    """Run every part in order, with the flow's retries, lock and notification, but without Prefect and its server.

    Args:
        select: returns the parts; called with params.yaml as it is once the workspace is held, after hours of waiting.
    """
    report = partial(notify, root, log, flow=name, run=f"{name} {time.strftime('%F %T')}")
    try:
        params = load_params(root / "params.yaml")
        # Before the wait for the workspace, which may take hours.
        select(params)  # reports a wrong parameter before the run waits for anything
        with hold_workspace(root, f"{name} without a server", params.flow.wait_minutes * 60, log) as lock_fd:
            for line in repair(root):
                log(line)
            update_dvc_yaml(root, log, lock_fd=lock_fd)
            # Read again: an edit during the wait counts.
            params = load_params(root / "params.yaml")
            run = Run(root, lock_fd, params.flow.timeout_hours)
            for part in select(params):
                _run_with_retries(run, part, params.flow.retry_delays, log)
    except WorkspaceInUse as error:
        report(state="Cancelled", message=str(error), bad=True)  # Prefect's name of the state; plain-ok
        raise
    except KeyboardInterrupt:
        report(state="Cancelled", message="interrupted", bad=True)  # plain-ok
        raise
    except Exception as error:  # a failed stage, a full disk, a bug: the flow may run unattended
        report(state="Failed", message=str(error) or type(error).__name__, bad=True)
        raise
    line = summarize(run.outcomes)
    log(line)
    report(state="Completed", message=line, bad=any(outcome.state == "refused" for outcome in run.outcomes))
    return run.outcomes


def _run_with_retries(run: Run, part: Part, delays: list[int], log: Log) -> None:
    # The last entry, None, is the attempt after which the error is raised.
    for delay in [*delays, None]:
        try:
            run.run_part(part, log, contextlib.nullcontext)
            return
        except WORTH_A_RETRY as error:
            if delay is None:
                raise
            log(f"{part.name}: {type(error).__name__}; trying again in {delay} s")
            time.sleep(delay)


def log_to_terminal(line: str) -> None:
    """Print a line with the time to stderr."""
    print(time.strftime("%H:%M:%S"), redact(line), file=sys.stderr, flush=True)


def _detail(root: Path, part: Part, lines: list[str], start: float) -> str:
    """Return the gate's reasons from the decision that it has just written, else the last line of the output."""
    file = root / "reports" / "promotion" / f"{part.command[-1]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        # The decision's file must be of this call; file times may be coarser than the clock.
        if part.kind == "promote" and file.stat().st_mtime >= start - 1:
            decision = json.loads(file.read_text(encoding="utf-8"))
            outcome = f" ({decision['outcome']})" if decision.get("outcome") else ""
            action = f"{decision['action']}{outcome}: version {decision['version']}"
            return "; ".join([action, *decision["reasons"]])[:MAX_DETAIL]
    return lines[-1].removeprefix(f"{part.name}: ")[:MAX_DETAIL] if lines else ""
