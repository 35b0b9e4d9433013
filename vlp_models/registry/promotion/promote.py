"""Promotion and rollback: the only code that moves `champion` and `previous`.

A task has one champion, whichever run and model it came from: of the newest versions of all runs the best one stands
before the gate.

In this order, so that a kill at any point is mended by the next call: the decision goes to the ledger (from here on it
is done), `champion`, `challenger` and `previous` follow, MLflow's tags mirror it. All of it, the decision included,
happens under the ledger's lock: of promotions at the same time one decides first, and the next one meets its champion.
Between checkouts there is no lock: the registry takes one line at a time (promotion/log.py), and who comes second
decides anew.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vlp_models.common.redaction import redacted
from vlp_models.errors import DataError
from vlp_models.params.operations import PromotionParams
from vlp_models.registry.promotion.candidates import Candidate, compared, maker, read_evaluations, versions_to_compare
from vlp_models.registry.promotion.gate import Answer, Spending, Yardstick, runs_of, spending
from vlp_models.registry.promotion.judge import Bench, check_readable, judge, version_of
from vlp_models.registry.promotion.ledger import Ledger, Overtaken, State
from vlp_models.registry.promotion.log import RegistryLog
from vlp_models.registry.promotion.moves import put_in_order, record_decision, unfinished, withdraw_versions

if TYPE_CHECKING:
    from mlflow import MlflowClient

TRIES = 5  # against other checkouts that decide at the same time


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """version: to be judged. why_not: why it needs no judging; empty: it does. yardstick: what it is judged by.
    chosen_on: the split on which it was the best of several; empty: there was no choice. measured: of how many."""

    version: int | None
    yardstick: Yardstick
    why_not: str = ""
    candidates: list[Candidate] = field(default_factory=list)
    chosen_on: str = ""
    measured: int = 1


def promote(
    client: MlflowClient,
    ledger: Ledger,
    params: PromotionParams,
    *,
    task: str,
    model: str,
    metric: str,
    dataset: str = "",
    bench: Bench,
    by: str,
    runs: Sequence[str] = (),
    version: int | None = None,
    force_first: bool = False,
) -> Decision:
    """Lets the gate decide on `version` (default: the best of all runs) and moves the aliases if it may pass.

    Args:
        runs: whose newest versions may become champion; where none of them has one, the challenger may.
        metric: where the task's gate names none.
        dataset: the one to measure on; empty: all that the versions were scored on.
        force_first: a first champion need not meet floors and validation; without effect once there is a champion.

    Raises:
        LedgerError: the ledger was changed.
        DataError: nothing is registered under `model`.
    """
    with ledger.locked(_log(client, ledger)):
        for last in (*[False] * (TRIES - 1), True):
            try:
                return _promote(
                    client, ledger, params, task, model, metric, dataset, bench, by, runs, version, force_first
                )
            except Overtaken as error:
                if last:
                    raise
                print(f"{error}; deciding anew", file=sys.stderr)
                ledger.refresh()
    raise AssertionError("unreachable")


def _promote(
    client: MlflowClient,
    ledger: Ledger,
    params: PromotionParams,
    task: str,
    model: str,
    metric: str,
    dataset: str,
    bench: Bench,
    by: str,
    runs: Sequence[str],
    version: int | None,
    force_first: bool,
) -> Decision:
    state = put_in_order(client, ledger, task=task, model=model, by=by)
    rule = params.gate(task)
    yardstick = Yardstick(metric=rule.metric or metric, split=params.split, datasets=(dataset,) if dataset else ())
    asked = _asked_for(client, state, model, version, runs, yardstick, rule.direction, params.select_on)
    decide = functools.partial(_decision, client, task, model, asked, state)
    if asked.version is None or asked.why_not:
        return decide("unchanged", [asked.why_not])
    choices = asked.measured if asked.chosen_on == params.split else 1

    def spent(test: str, runs: tuple[int, int] | None) -> Spending:
        return spending(
            ledger.entries(),
            params,
            model=model,
            test=test,
            asked=(asked.version or 0, state.champion),
            runs=runs,
            confidence=rule.confidence,
            choices=choices,
        )

    verdict = judge(
        client,
        params,
        task,
        model,
        asked.yardstick,
        asked.version,
        state.champion,
        bench,
        lambda test, runs: spent(test, runs).error,
    )
    if "test" in verdict.numbers:
        verdict.numbers |= spent(verdict.numbers["test"], runs_of(verdict.numbers)).numbers(params.error_budget)
        verdict.numbers |= {"chosen_on": asked.chosen_on} if asked.chosen_on else {}
    forced = bool(force_first and state.champion is None and verdict.reasons and verdict.numbers)
    outcome: Outcome = "promoted" if verdict.passed or forced else "refused"
    decision = decide(outcome, verdict.reasons, verdict.numbers, answer=verdict.answer, forced=forced)
    record_decision(client, ledger, "promote", decision, by)
    return decision


def rollback(
    client: MlflowClient, ledger: Ledger, *, task: str, model: str, content_of: Callable[[Path], str], by: str
) -> Decision:
    """Gives the place back to the champion before; who held it is promoted again only if asked for by its number. A
    rollback that was cut off is ended, and no other one made: whoever tries again means that one.

    Raises:
        LedgerError: the ledger was changed.
        DataError: there is no champion before, or it is not registered any more, or damaged.
    """
    with ledger.locked(_log(client, ledger)):
        begun = unfinished(client, ledger, model) or {}
        state = put_in_order(client, ledger, task=task, model=model, by=by)
        if begun.get("action") == "rollback" and begun["version"] == state.champion and "decision" in begun:
            print(f"{model}: the rollback that was cut off is ended; for another one ask again", file=sys.stderr)
            return Decision(**begun["decision"])
        if state.previous is None:
            now = f"version {state.champion} is its first" if state.champion else "it has none"
            raise DataError(f"{model}: no earlier champion to go back to; {now} (`vlp history {task}`)")
        version = version_of(client, model, state.previous)
        if version is None:
            raise DataError(f"{model}: the earlier champion, version {state.previous}, is not registered any more")
        check_readable(version, content_of)
        asked = _Asked(version=state.previous, yardstick=Yardstick(metric="", split=""))
        decision = _decision(client, task, model, asked, state, "rolled back", [])
        record_decision(client, ledger, "rollback", decision, by)
        return decision


def withdraw(
    client: MlflowClient, ledger: Ledger, *, task: str, model: str, versions: Set[int], why: str, by: str
) -> State:
    """Takes every alias off these versions, `champion` included; they are promoted again only if asked for by their
    number. Returns what the ledger then says.

    Raises:
        LedgerError: the ledger was changed.
    """
    with ledger.locked(_log(client, ledger)):
        state = put_in_order(client, ledger, task=task, model=model, by=by)
        withdraw_versions(client, ledger, state, task=task, model=model, versions=versions, why=why, by=by)
        return ledger.state(model)


def _asked_for(
    client: MlflowClient,
    state: State,
    model: str,
    version: int | None,
    runs: Sequence[str],
    yardstick: Yardstick,
    direction: str,
    select_on: str,
) -> _Asked:
    """The version to judge: the one asked for, else the best of all runs.

    Raises:
        DataError: nothing is registered.
    """
    if version is not None:
        why_not = f"version {version} is the champion already" if version == state.champion else ""
        return _Asked(version=version, yardstick=yardstick, why_not=why_not)
    versions = versions_to_compare(client, model, runs)
    if not versions:
        if state.champion is None:
            raise DataError(f"{model}: no challenger to promote; `dvc repro register` makes one")
        return _Asked(version=None, yardstick=yardstick, why_not="there is no challenger")
    # The best of several by the test itself would be judged on the noise that made it the best.
    read = read_evaluations(client, versions)
    found, yardstick = compared(versions, read, yardstick, direction, state.withdrawn)  # on what they have in common
    on = dataclasses.replace(yardstick, split=select_on)
    chosen, _ = compared(versions, read, on, direction, state.withdrawn)
    if any(c.value is None and c.version not in state.withdrawn for c in chosen):
        on = yardstick
    else:
        found = chosen
    open_to_all = [candidate for candidate in found if candidate.version not in state.withdrawn]
    if not open_to_all:
        number = found[0].version
        why_not = f"version {number} was rolled back; to promote it again, give --version {number}"
        return _Asked(version=number, yardstick=yardstick, why_not=why_not, candidates=found)
    best = open_to_all[0]
    if best.value is None:  # none can be measured: the first that is not champion is refused with its reason
        best = next((c for c in open_to_all if c.version != state.champion), best)
    why_not = ""
    if best.version == state.champion:
        others = f", and the best of {len(open_to_all)} candidates" if len(open_to_all) > 1 else ""
        why_not = f"version {best.version} is the champion already{others}"
    several = max(1, sum(c.value is not None for c in open_to_all))
    chosen_on = on.split if several > 1 else ""
    return _Asked(
        version=best.version,
        yardstick=yardstick,
        why_not=why_not,
        candidates=found,
        chosen_on=chosen_on,
        measured=several,
    )


def _log(client: MlflowClient, ledger: Ledger) -> RegistryLog | None:
    return RegistryLog(client, ledger.name) if ledger.name else None


def _decision(
    client: MlflowClient,
    task: str,
    model: str,
    asked: _Asked,
    state: State,
    outcome: Outcome,
    reasons: list[str],
    numbers: dict[str, Any] | None = None,
    *,
    answer: Answer | Literal[""] = "",
    forced: bool = False,
) -> Decision:
    run, run_model = maker(None if asked.version is None else version_of(client, model, asked.version))
    champion_run, champion_run_model = maker(
        None if state.champion is None else version_of(client, model, state.champion)
    )
    return Decision(
        outcome=outcome,
        task=task,
        model=model,
        version=asked.version,
        champion=state.champion,
        reasons=redacted(reasons),
        numbers=json.loads(json.dumps(numbers or {}, allow_nan=False)),
        answer=answer,
        forced=forced,
        run=run,
        run_model=run_model,
        champion_run=champion_run,
        champion_run_model=champion_run_model,
        candidates=[candidate.plain() for candidate in asked.candidates],
    )


Outcome = Literal["promoted", "refused", "unchanged", "rolled back"]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What was decided on `version` of the registered model `model`.

    outcome: what happened to the aliases. answer: what the gate said: promote, keep (the champion) or cannot tell;
        empty where it was not asked.
    champion: the version that held the place before. run, run_model: which run made `version`, and whose model that
    is; champion_run, champion_run_model: the same of `champion`. candidates: all that were looked at, best first.
    """

    outcome: Outcome
    task: str
    model: str
    version: int | None
    champion: int | None
    reasons: list[str]
    numbers: dict[str, Any]
    answer: Answer | Literal[""] = ""
    forced: bool = False
    run: str = ""
    run_model: str = ""
    champion_run: str = ""
    champion_run_model: str = ""
    candidates: list[dict[str, Any]] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        return dict(vars(self))

    def makers(self) -> dict[str, str]:
        """What every ledger entry says of the two versions' origin."""
        return {
            "run": self.run,
            "run_model": self.run_model,
            "from_run": self.champion_run,
            "from_run_model": self.champion_run_model,
        }
