"""Promote and roll back versions: decide, record the decision in the ledger, let MLflow's aliases follow.

A task has one champion, whichever run and model it came from; the gate judges the best of the newest versions of all
runs. Everything happens under the ledger's lock, so of two promotions at the same time the second one meets the first
one's champion. reconcile.py moves the aliases, completes what a kill interrupted, and refuses if another checkout
decided.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vlp_models.common.log import get_logger
from vlp_models.common.redaction import redact, redacted
from vlp_models.errors import DataError
from vlp_models.params.operations import GateParams, PromotionParams
from vlp_models.registry.promotion.candidates import Choice, choose_best
from vlp_models.registry.promotion.error_budget import Spending, count_runs, spend_budget
from vlp_models.registry.promotion.gate import GateOutcome, Verdict
from vlp_models.registry.promotion.gate_rule import MetricSpec
from vlp_models.registry.promotion.judge import GateCase, Reevaluate, check_readable, judge
from vlp_models.registry.promotion.ledger import LedgerError
from vlp_models.registry.promotion.reconcile import (
    PromotionContext,
    Reconciled,
    Registry,
    describe_version,
    describe_way_out,
    move_aliases,
    read_registry,
    reconcile,
)
from vlp_models.registry.versions import find_version_by_number

logger = get_logger(__name__)

Action = Literal["promoted", "refused", "unchanged", "rolled back"]


@dataclass(frozen=True, kw_only=True)
class GateRequest:
    """What to let the gate decide on.

    rule, spec: of the task (gate_rule.py). reevaluate: used if the champion was not scored on the current test.
    runs: the runs whose newest versions compete; if none of them has one, the challenger does.
    version: the version to judge; None: the best of all runs.
    force: the reason, for the ledger, to accept a first champion that the gate refuses; empty: do not accept it.
        Without effect once there is a champion.
    """

    params: PromotionParams
    rule: GateParams
    spec: MetricSpec
    reevaluate: Reevaluate
    runs: Sequence[str] = ()
    version: int | None = None
    force: str = ""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What was decided on `version` of the registered model `model`.

    action: what happened to the aliases. outcome: the gate's; empty if it was not consulted.
    champion: the version that was champion before. run, run_model: the run that made `version`, and its model;
    champion_run, champion_run_model: the same for `champion`. force_reason: the user's, if `forced`.
    candidates: all that were considered, best first. ranking: on which split, and on which the best was judged.
    """

    action: Action
    task: str
    model: str
    version: int | None
    champion: int | None
    reasons: list[str]
    numbers: dict[str, Any]
    outcome: GateOutcome | Literal[""] = ""
    forced: bool = False
    force_reason: str = ""
    run: str = ""
    run_model: str = ""
    champion_run: str = ""
    champion_run_model: str = ""
    candidates: list[dict[str, Any]] = field(default_factory=list)
    ranking: str = ""

    def to_plain(self) -> dict[str, Any]:
        return dict(vars(self))


def promote(ctx: PromotionContext, request: GateRequest) -> Decision:
    """Let the gate decide on a version, and move the aliases if it passes.

    If the requested version is MLflow's champion and the ledger disagrees, it is recorded as champion instead.

    Raises:
        LedgerError: the ledger was changed, or it and MLflow's aliases disagree.
        DataError: nothing is registered under `ctx.model`.
    """
    params = request.params
    with ctx.ledger.locked():
        try:
            agreed = reconcile(ctx)
        except LedgerError:
            # The way out of a disagreement: the user requests the version that MLflow has as champion.
            registry = read_registry(ctx.client, ctx.model)
            if request.version is None or request.version != registry.champion:
                raise
            return _accept(ctx, request.version, registry)
        champion, registry = agreed.champion, agreed.registry
        choice = _choose(ctx, request, agreed)
        # No decision, so nothing is written to the ledger.
        if choice.version is None or choice.skip_reason:
            return _make_decision(ctx, "unchanged", choice, champion, [choice.skip_reason])

        # What the comparison may spend of the task's error budget; the judge asks before it compares, with the numbers
        # of runs, and the decision records the same answer.
        contents = (registry.content(choice.version), registry.content(champion))

        def get_spending(test: str, runs: tuple[int, ...]) -> Spending:
            return spend_budget(
                ctx.ledger.entries(),
                params,
                model=ctx.model,
                test=test,
                contents=contents,
                runs=runs,
                metric=choice.spec.metric,
                rule=request.rule,
                num_candidates=choice.measured if choice.selected_on == params.split else 1,
            )

        case = GateCase(
            client=ctx.client,
            task=ctx.task,
            model=ctx.model,
            version=choice.version,
            champion=champion,
            spec=choice.spec,
            rule=request.rule,
            params=params,
            reevaluate=request.reevaluate,
        )
        verdict = judge(case, lambda test, runs: get_spending(test, runs).alpha)
        # Without a gain, nothing was compared and nothing is spent.
        if runs := count_runs(verdict.numbers):
            verdict.numbers |= get_spending(verdict.numbers["test"], runs).numbers(params.error_budget)
        if "test" in verdict.numbers and choice.selected_on:
            verdict.numbers["selected_on"] = choice.selected_on
        # Only what was measured can be forced, and only as a first champion.
        forced = bool(request.force and champion is None and verdict.reasons and verdict.numbers)
        action: Action = "promoted" if verdict.passed or forced else "refused"
        decision = _make_decision(
            ctx,
            action,
            choice,
            champion,
            verdict.reasons,
            verdict=verdict,
            force_reason=request.force if forced else "",
        )

        # The gate takes minutes, and another checkout has no part in this lock.
        now = read_registry(ctx.client, ctx.model)
        if (now.champion, now.head) != (registry.champion, registry.head):
            raise LedgerError(f"{ctx.model}: another checkout decided meanwhile: {describe_way_out(ctx, now)}")
        # The line first: a kill after it is completed by the next `reconcile`.
        _append_decision(ctx, decision, registry)
        if decision.action == "promoted":
            move_aliases(ctx)
        return decision


def _choose(ctx: PromotionContext, request: GateRequest, agreed: Reconciled) -> Choice:
    """Return the version to judge: the requested one, else the best of all runs."""
    if request.version is not None:
        requested = f"version {request.version}"
        return Choice(
            version=request.version,
            spec=request.spec,
            skip_reason=f"{requested} is already the champion" if request.version == agreed.champion else "",
            ranking=f"{requested} was requested, so nothing was ranked; it is judged on {request.spec.split}",
        )
    return choose_best(
        ctx.client,
        ctx.model,
        request.spec,
        request.params,
        direction=request.rule.direction,
        runs=request.runs,
        champion=agreed.champion,
        withdrawn=agreed.state.withdrawn,
    )


def rollback(ctx: PromotionContext, *, champion_now: int | None = None) -> Decision:
    """Make the previous champion champion again; the one rolled back returns only if requested by its number.

    If a kill interrupted a rollback, that one is completed and no other is made.

    Args:
        champion_now: the champion to roll back, by its number in the ledger. If it was rolled back already, nothing is
            done, so that a call whose answer was lost can be repeated. None: whichever is champion.

    Raises:
        LedgerError: the ledger was changed, or it and MLflow's aliases disagree.
        DataError: there is no previous champion, its files are damaged, or another version is champion.
    """
    with ctx.ledger.locked():
        agreed = reconcile(ctx, allow_missing=True)
        state, champion = agreed.state, agreed.champion
        # The completed line is what this call was to do, so its answer is returned.
        if agreed.completed is not None and agreed.completed["action"] == "rolled back":
            logger.warning("%s: completed the rollback that was interrupted; run again for another one", ctx.model)
            return Decision(**agreed.completed["decision"])
        if champion_now is not None and state.champion != champion_now:
            last = state.last_move
            # The requested rollback is the last move, so this call repeats one whose answer was lost.
            if last is not None and (last["action"], last.get("from")) == ("rolled back", champion_now):
                logger.info("%s: version %d was rolled back before", ctx.model, champion_now)
                return Decision(**last["decision"])
            now = describe_version(state.champion)
            raise DataError(f"{ctx.model}: version {champion_now} is not the champion by the ledger; {now} is")
        # If no champion is registered any more, a rollback without an earlier one leaves the task without a champion.
        if agreed.previous is None and (champion is not None or not state.champions):
            now = f"version {champion} is its first" if champion else "it has no champion"
            raise DataError(f"{ctx.model}: no earlier champion to go back to; {now} (`vlp history {ctx.task}`)")
        if agreed.previous is not None:
            version = find_version_by_number(ctx.client, ctx.model, agreed.previous)
            assert version is not None
            check_readable(version)
        # No metric and no split: a rollback measures nothing.
        choice = Choice(version=agreed.previous, spec=MetricSpec(metric="", split=""))
        # A champion that is no longer registered has its number in the ledger only.
        decision = _make_decision(ctx, "rolled back", choice, state.champion if champion is None else champion, [])
        _append_decision(ctx, decision, agreed.registry)
        move_aliases(ctx)
        return decision


def _accept(ctx: PromotionContext, version: int, registry: Registry) -> Decision:
    """Record MLflow's champion in the ledger, which has another one."""
    choice = Choice(version=version, spec=MetricSpec(metric="", split=""))
    before = ctx.ledger.state(ctx.model).champion
    reason = (
        f"version {version} is MLflow's champion; recorded in the ledger, whose champion was {describe_version(before)}"
    )
    decision = _make_decision(ctx, "unchanged", choice, before, [reason])
    _append_decision(ctx, decision, registry, action="accepted")
    move_aliases(ctx)
    return decision


def _append_decision(ctx: PromotionContext, decision: Decision, registry: Registry, action: str = "") -> None:
    ctx.ledger.append(
        {
            "action": action or decision.action,
            "task": decision.task,
            "model": decision.model,
            "version": decision.version,
            "content": registry.content(decision.version),
            "from": decision.champion,
            "from_content": registry.content(decision.champion),
            "by": ctx.user,
            "run": decision.run,
            "run_model": decision.run_model,
            "from_run": decision.champion_run,
            "from_run_model": decision.champion_run_model,
            "decision": decision.to_plain(),
        }
    )


def _make_decision(
    ctx: PromotionContext,
    action: Action,
    choice: Choice,
    champion: int | None,
    reasons: list[str],
    *,
    verdict: Verdict | None = None,
    force_reason: str = "",
) -> Decision:
    made_by = []  # the run that made a version, and its model; empty strings if it has no such tags
    for number in (choice.version, champion):
        version = None if number is None else find_version_by_number(ctx.client, ctx.model, number)
        tags = {} if version is None else version.tags
        made_by.append((tags.get("run", ""), tags.get("model", "")))
    (run, run_model), (champion_run, champion_run_model) = made_by
    return Decision(
        action=action,
        task=ctx.task,
        model=ctx.model,
        version=choice.version,
        champion=champion,
        reasons=redacted(reasons),
        # As the ledger will store it; NaN raises here, before anything is written.
        numbers=json.loads(json.dumps(verdict.numbers if verdict is not None else {}, allow_nan=False)),
        outcome=verdict.outcome if verdict is not None else "",
        forced=bool(force_reason),
        force_reason=redact(force_reason),
        run=run,
        run_model=run_model,
        champion_run=champion_run,
        champion_run_model=champion_run_model,
        candidates=[candidate.to_plain() for candidate in choice.candidates],
        ranking=choice.ranking,
    )
