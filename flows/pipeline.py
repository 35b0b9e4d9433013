"""Runs the parts in order, without Prefect: `run_part` is what a Prefect task calls, `run_plainly` needs no server."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flows.dvc import is_stale, plan, repair, repro
from flows.lock import WorkspaceHeld, hold_workspace
from flows.notify import notify
from flows.parts import DRIFTED, Part
from flows.process import WORTH_A_RETRY, StageFailed, supervised
from vlp_models.common.redaction import redact, without_secrets
from vlp_models.errors import TrackingError
from vlp_models.params import FlowParams

Log = Callable[[str], None]
LONGEST = 500  # characters of an outcome's detail


class DataDrifted(StageFailed):
    """`vlp drift` closed its gate: the new data differs too much from what the models learned from."""


@dataclass(frozen=True)
class Outcome:
    """What became of a part; `detail` is its last words."""

    part: str
    state: Literal["ran", "up to date", "skipped", "refused"]
    detail: str = ""
    seconds: float = 0.0


class Run:
    """One run over a held workspace: remembers whether DVC found anything stale, so that a no-op asks it once."""

    def __init__(self, root: Path, hold: int | None) -> None:
        self.root = root
        self.hold = hold
        self.outcomes: list[Outcome] = []
        self._all_fresh: bool | None = None  # None: not asked yet
        self._something_ran = False

    def run_part(self, part: Part, log: Log, slot: Callable[[], AbstractContextManager[None]]) -> Outcome:
        """Brings one part up to date.

        Args:
            slot: holds a GPU slot; entered by a GPU part that is stale.

        Raises:
            StageFailed: and its kinds (flows/process.py). Calling it again is safe: what was finished is not repeated.
        """
        began = time.perf_counter()
        if part.skip:
            log(f"{part.name}: skipped, {part.skip}")
            outcome = Outcome(part.name, "skipped", part.skip)
        else:
            state, detail = self._bring_up_to_date(part, log, slot) if part.targets else self._ask(part, log)
            if part.targets and (self._put_back(part, log) or (state == "up to date" and self._again(part, log))):
                state = "ran"
            outcome = Outcome(part.name, state, detail, time.perf_counter() - began)
            log(f"{part.name}: {state}" + (f", {detail}" if state == "skipped" else ""))
        self.outcomes.append(outcome)
        return outcome

    def _bring_up_to_date(
        self, part: Part, log: Log, slot: Callable[[], AbstractContextManager[None]]
    ) -> tuple[Literal["ran", "up to date"], str]:
        targets = list(part.targets)
        if self._all_fresh is None:
            self._all_fresh = not is_stale(self.root, [])
        # What follows a part that ran is taken to be stale: asking costs as much as running, a mistake a slot's wait.
        if self._all_fresh or (part.gpu and not self._something_ran and not is_stale(self.root, targets)):
            return "up to date", ""
        with slot() if part.gpu else contextlib.nullcontext():
            ran = repro(self.root, targets, log, timeout=part.timeout, hold=self.hold)
        self._something_ran = self._something_ran or ran
        return ("ran", "") if ran else ("up to date", "")

    def _put_back(self, part: Part, log: Log) -> bool:
        """Runs the part again if what it made is gone from where DVC does not look; whether it did."""
        try:
            gone = part.lost(self.root)
        except TrackingError as error:  # what is not stale needs no MLflow
            log(f"{part.name}: whether the registry holds what was registered is not known: {error}")
            return False
        if not gone:
            return False
        log(f"{part.name}: {', '.join(gone)} lost; running it again")
        targets = ["--force", "--single-item", *part.targets]
        repro(self.root, targets, log, timeout=part.timeout, hold=self.hold)
        for record in (self.root / ".work" / "flow").glob("promote-*.json"):
            record.unlink()
        return True

    def _again(self, part: Part, log: Log) -> bool:
        if part.again(self.root):
            targets = ["--force", "--single-item", *part.targets]
            return repro(self.root, targets, log, timeout=part.timeout, hold=self.hold)
        return False

    def _ask(self, part: Part, log: Log) -> tuple[Literal["ran", "up to date", "skipped", "refused"], str]:
        evidence = part.evidence(self.root)
        if evidence is None:
            return "skipped", part.nothing
        began = time.time()
        record = self.root / ".work" / "flow" / f"{part.name.replace(' ', '-')}.json"
        if evidence and _recorded(record) == evidence:
            return "up to date", "nothing it depends on has changed since it was last asked"
        accept = (0,) if part.refusal is None else (0, part.refusal)
        try:
            ended = supervised(
                self.root, ["vlp", *part.command], log, accept=accept, timeout=part.timeout, hold=self.hold
            )
        except StageFailed as error:
            if part.kind == "drift" and f"ended with {DRIFTED}:" in str(error):
                raise DataDrifted(f"{error}\nSee reports/drift.json; `drift.gate: false` only reports.") from None
            raise
        if evidence:
            _write(record, evidence)
        return "refused" if ended.code else "ran", _last_words(self.root, part, ended.lines, began)


def summary(outcomes: Iterable[Outcome]) -> str:
    """One line: what ran, and what the gate said."""
    outcomes = list(outcomes)
    said = [f"{o.part}: {'refused' if o.state == 'refused' else 'done'} ({o.detail})" for o in outcomes if _spoke(o)]
    ran = [o.part for o in outcomes if o.state == "ran" and not _spoke(o)]
    return "; ".join([f"ran {', '.join(ran)}" if ran else "nothing was stale; nothing ran", *said])


def _spoke(outcome: Outcome) -> bool:
    return bool(outcome.detail) and outcome.state in ("ran", "refused")


@without_secrets()
def run_plainly(root: Path, parts: list[Part], params: FlowParams, *, name: str, log: Log) -> list[Outcome]:
    """Every part in order, with the flow's own retries, lock and notification; no Prefect and no server.

    Raises:
        WorkspaceHeld: another run has the workspace.
        StageFailed: a part failed; the parts after it were not run.
    """
    label = f"{name} {time.strftime('%F %T')}"

    def tell(state: str, message: str, bad: bool) -> None:
        notify(params, flow=name, run=label, state=state, message=message, bad=bad, log=log)

    try:
        with hold_workspace(root, f"{name} without a server", params.wait_minutes * 60, log) as hold:
            for line in repair(root):
                log(line)
            plan(root, log, hold=hold)
            run = Run(root, hold)
            for part in parts:
                _with_retries(run, part, params.retry_delays, log)
    except WorkspaceHeld as error:
        tell("Cancelled", str(error), True)
        raise
    except KeyboardInterrupt:
        tell("Cancelled", "interrupted", True)
        raise
    except Exception as error:  # a stage that failed, a full disk, a bug: nobody may be watching
        tell("Failed", str(error) or type(error).__name__, True)
        raise
    line = summary(run.outcomes)
    log(line)
    tell("Completed", line, any(outcome.state == "refused" for outcome in run.outcomes))
    return run.outcomes


def _with_retries(run: Run, part: Part, delays: list[int], log: Log) -> None:
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
    print(time.strftime("%H:%M:%S"), redact(line), file=sys.stderr, flush=True)


def _last_words(root: Path, part: Part, lines: list[str], began: float) -> str:
    """The gate's reasons from the decision it has just written, else the last line of output."""
    decision = root / "reports" / "promotion" / f"{part.command[-1]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if part.kind == "promote" and decision.stat().st_mtime >= began - 1:
            said = json.loads(decision.read_text(encoding="utf-8"))
            answer = f" ({said['answer']})" if said.get("answer") else ""
            return "; ".join([f"{said['outcome']}{answer}: version {said['version']}", *said["reasons"]])[:LONGEST]
    return lines[-1][:LONGEST] if lines else ""


def _recorded(path: Path) -> str:
    try:
        return str(json.loads(path.read_text())["evidence"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _write(path: Path, evidence: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"evidence": evidence}))
    temporary.replace(path)
