"""Promote, roll back and withdraw versions: decide, record the decision in the ledger, let MLflow's aliases follow.

A task has one champion, whichever run and model it came from; the gate judges the best of the newest versions of all
runs. Everything happens under the ledger's lock, so of two promotions at the same time the second one meets the first
one's champion. reconcile.py moves the aliases, completes what a kill interrupted, and refuses if another checkout
decided.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vlp_models.common.log import get_logger
from vlp_models.common.redaction import redact, redacted
from vlp_models.errors import DataError
from vlp_models.params.operations import PromotionParams
from vlp_models.registry.promotion.candidates import (
    Candidate,
    find_candidates,
    get_run_names,
    rank_candidates,
    read_candidate_scores,
)
from vlp_models.registry.promotion.gate import GateOutcome, MetricSpec, Spending, Verdict, count_runs, spend_budget
from vlp_models.registry.promotion.judge import GateCase, GateServices, check_readable, judge
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

    metric: used if the task's gate names none. dataset: the one to measure on; empty: all that versions were scored on.
    runs: the runs whose newest versions compete; if none of them has one, the challenger does.
    version: the version to judge; None: the best of all runs.
    force: the reason, for the ledger, to accept a first champion that the gate refuses; empty: do not accept it.
        Without effect once there is a champion.
    """

    params: PromotionParams
    services: GateServices
    metric: str
    dataset: str = ""
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
    with ctx.ledger.locked():
        try:
            found = reconcile(ctx)
        except LedgerError:
            registry = read_registry(ctx.client, ctx.model)
            if request.version is None or request.version != registry.champion:
                raise
            return _accept(ctx, request.version, registry)
        rule = request.params.gate(ctx.task)
        choice = _choose(ctx, request, found)
        if choice.version is None or choice.skip_reason:
            return _make_decision(ctx, "unchanged", choice, found.champion, [choice.skip_reason])

        def get_spending(test: str, runs: tuple[int, int] | None) -> Spending:
            assert choice.version is not None
            return spend_budget(
                ctx.ledger.entries(),
                request.params,
                model=ctx.model,
                test=test,
                contents=(_content(found.registry, choice.version), _content(found.registry, found.champion)),
                runs=runs,
                confidence=rule.confidence,
                num_candidates=choice.measured if choice.selected_on == request.params.split else 1,
            )

        case = GateCase(
            client=ctx.client,
            task=ctx.task,
            model=ctx.model,
            version=choice.version,
            champion=found.champion,
            spec=choice.spec,
            params=request.params,
            services=request.services,
        )
        verdict = judge(case, lambda test, runs: get_spending(test, runs).alpha)
        if "test" in verdict.numbers:
            spent = get_spending(verdict.numbers["test"], count_runs(verdict.numbers))
            verdict.numbers |= spent.numbers(request.params.error_budget)
            verdict.numbers |= {"selected_on": choice.selected_on} if choice.selected_on else {}
        forced = bool(request.force and found.champion is None and verdict.reasons and verdict.numbers)
        action: Action = "promoted" if verdict.passed or forced else "refused"
        decision = _make_decision(
            ctx,
            action,
            choice,
            found.champion,
            verdict.reasons,
            verdict=verdict,
            force_reason=request.force if forced else "",
        )
        _check_unchanged(ctx, found.registry)
        _append_decision(ctx, decision, found.registry)
        if decision.action == "promoted":
            move_aliases(ctx)
        return decision


def rollback(ctx: PromotionContext, hash_bundle: Callable[[Path], str], *, champion_now: int | None = None) -> Decision:
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
        found = reconcile(ctx, allow_missing=True)
        if found.completed is not None and found.completed["action"] == "rolled back":
            logger.warning("%s: completed the rollback that was interrupted; run again for another one", ctx.model)
            return Decision(**found.completed["decision"])
        if champion_now is not None and found.state.champion != champion_now:
            done = found.state.last_move
            if done is not None and (done["action"], done.get("from")) == ("rolled back", champion_now):
                logger.info("%s: version %d was rolled back before", ctx.model, champion_now)
                return Decision(**done["decision"])
            now = describe_version(found.state.champion)
            raise DataError(f"{ctx.model}: version {champion_now} is not the champion by the ledger; {now} is")
        if found.previous is None and (found.champion is not None or not found.state.champions):
            now = f"version {found.champion} is its first" if found.champion else "it has no champion"
            raise DataError(f"{ctx.model}: no earlier champion to go back to; {now} (`vlp history {ctx.task}`)")
        if found.previous is not None:
            version = find_version_by_number(ctx.client, ctx.model, found.previous)
            assert version is not None
            check_readable(version, hash_bundle)
        choice = _Choice(version=found.previous, spec=MetricSpec(metric="", split=""))
        champion = found.state.champion if found.champion is None else found.champion
        decision = _make_decision(ctx, "rolled back", choice, champion, [])
        _append_decision(ctx, decision, found.registry)
        move_aliases(ctx)
        return decision


def withdraw(ctx: PromotionContext, versions: Set[int], reason: str) -> int | None:
    """Remove every alias from these versions; they return only if requested by number. Return the champion afterwards.

    Raises:
        LedgerError: the ledger was changed, or it and MLflow's aliases disagree.
    """
    with ctx.ledger.locked():
        found = reconcile(ctx, allow_missing=True)
        contents = {found.registry.contents[n] for n in versions if found.registry.contents.get(n)}
        ctx.ledger.append(
            {
                "action": "withdrawn",
                "task": ctx.task,
                "model": ctx.model,
                "version": None,
                "from": found.champion,
                "versions": sorted(versions),
                "contents": sorted(contents),
                "reason": reason,
                "by": ctx.user,
            }
        )
        registry = move_aliases(ctx)  # first: an interruption must not leave the model without its champion
        for alias, version in registry.aliases.items():
            if version in versions:
                ctx.client.delete_registered_model_alias(ctx.model, alias)
        return registry.champion


def _accept(ctx: PromotionContext, version: int, registry: Registry) -> Decision:
    """Record MLflow's champion in the ledger, which has another one."""
    choice = _Choice(version=version, spec=MetricSpec(metric="", split=""))
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
            "content": _content(registry, decision.version),
            "from": decision.champion,
            "from_content": _content(registry, decision.champion),
            "by": ctx.user,
            "run": decision.run,
            "run_model": decision.run_model,
            "from_run": decision.champion_run,
            "from_run_model": decision.champion_run_model,
            "decision": decision.to_plain(),
        }
    )


def _content(registry: Registry, version: int | None) -> str:
    return "" if version is None else registry.contents.get(version, "")


def _check_unchanged(ctx: PromotionContext, before: Registry) -> None:
    """Check that no other checkout decided while the gate was at work.

    Raises:
        LedgerError: one did; nothing was recorded here.
    """
    now = read_registry(ctx.client, ctx.model)
    if (now.champion, now.head) != (before.champion, before.head):
        raise LedgerError(f"{ctx.model}: another checkout decided meanwhile: {describe_way_out(ctx, now)}")


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """The version to judge, by `spec`.

    skip_reason: why it need not be judged; empty: it must. selected_on: the split on which it was the best of several;
    empty: there was no choice. measured: of how many. ranking: a sentence on the two splits.
    """

    version: int | None
    spec: MetricSpec
    skip_reason: str = ""
    candidates: list[Candidate] = field(default_factory=list)
    selected_on: str = ""
    measured: int = 1
    ranking: str = ""


def _choose(ctx: PromotionContext, request: GateRequest, found: Reconciled) -> _Choice:
    """Return the requested version, else the best of all runs.

    Raises:
        DataError: nothing is registered.
    """
    params, rule = request.params, request.params.gate(ctx.task)
    datasets = (request.dataset,) if request.dataset else ()
    spec = MetricSpec(metric=rule.metric or request.metric, split=params.split, datasets=datasets)
    if request.version is not None:
        is_champion = request.version == found.champion
        skip_reason = f"version {request.version} is already the champion" if is_champion else ""
        ranking = f"version {request.version} was requested, so nothing was ranked; it is judged on {params.split}"
        return _Choice(version=request.version, spec=spec, skip_reason=skip_reason, ranking=ranking)
    versions = find_candidates(ctx.client, ctx.model, request.runs)
    if not versions:
        if found.champion is None:
            raise DataError(f"{ctx.model}: no challenger to promote; `dvc repro register` registers one")
        return _Choice(version=None, spec=spec, skip_reason="there is no challenger")
    # Select on another split than the test: the best of several on the test is biased upward on that test set.
    scores, withdrawn = read_candidate_scores(ctx.client, versions), found.state.withdrawn
    candidates, spec = rank_candidates(versions, scores, spec, rule.direction, withdrawn)
    select_spec = dataclasses.replace(spec, split=params.select_on)
    selected, _ = rank_candidates(versions, scores, select_spec, rule.direction, withdrawn)
    if any(c.value is None and not c.withdrawn for c in selected):  # not all were scored there: select on the test
        select_spec = spec
    else:
        candidates = selected
    eligible = [candidate for candidate in candidates if not candidate.withdrawn]
    if not eligible:
        number = candidates[0].version
        skip_reason = f"version {number} was rolled back; to promote it again, pass --version {number}"
        return _Choice(version=number, spec=spec, skip_reason=skip_reason, candidates=candidates)
    best = eligible[0]
    if best.value is None:  # none can be measured: refuse the first that is not champion, with its reason
        best = next((c for c in eligible if c.version != found.champion), best)
    skip_reason = ""
    if best.version == found.champion:
        others = f", and the best of {len(eligible)} candidates" if len(eligible) > 1 else ""
        skip_reason = f"version {best.version} is already the champion{others}"
    measured = max(1, sum(c.value is not None for c in eligible))
    unscored = [c.version for c in selected if c.value is None and not c.withdrawn]
    return _Choice(
        version=best.version,
        spec=spec,
        skip_reason=skip_reason,
        candidates=candidates,
        selected_on=select_spec.split if measured > 1 else "",
        measured=measured,
        ranking=_describe_ranking(spec, params, select_spec.split, measured, unscored),
    )


def _describe_ranking(
    spec: MetricSpec, params: PromotionParams, selected_on: str, measured: int, unscored: Sequence[int]
) -> str:
    """Say on which split the candidates were ranked, and on which the best is judged.

    Args:
        unscored: versions without a value on `params.select_on`.
    """
    if measured < 2:
        return f"one candidate was scored, so nothing was ranked; it is judged on {params.split}"
    ranked = f"{measured} candidates are ranked on {selected_on} by {spec.metric}"
    if selected_on != params.split:
        return f"{ranked}; the best is judged on {params.split}"
    why = (
        f"not all were scored on {params.select_on} (version {', '.join(map(str, unscored))})"
        if params.select_on != params.split
        else f"`promotion.select_on` is {params.select_on}"
    )
    return f"{ranked}, and the best is judged there too ({why}), so its gain is biased upward"


def _make_decision(
    ctx: PromotionContext,
    action: Action,
    choice: _Choice,
    champion: int | None,
    reasons: list[str],
    *,
    verdict: Verdict | None = None,
    force_reason: str = "",
) -> Decision:
    run, run_model = get_run_names(
        None if choice.version is None else find_version_by_number(ctx.client, ctx.model, choice.version)
    )
    champion_run, champion_run_model = get_run_names(
        None if champion is None else find_version_by_number(ctx.client, ctx.model, champion)
    )
    return Decision(
        action=action,
        task=ctx.task,
        model=ctx.model,
        version=choice.version,
        champion=champion,
        reasons=redacted(reasons),
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
