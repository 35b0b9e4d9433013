"""Promotion and rollback: the only code that moves `champion` and `previous`.

In this order, so that a kill at any point is mended by the next call: the intent goes to the ledger, `champion` moves
(from here on it is done), `challenger` and `previous` follow, the end goes to the ledger, MLflow's tags mirror it. All
of it, the decision included, happens under the ledger's lock: of promotions at the same time one decides first, and the
next one meets its champion.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vlp_models.errors import DataError, VLPError
from vlp_models.metrics.items import ItemScores, read_items
from vlp_models.params.promotion import PromotionParams
from vlp_models.promotion.gate import (
    Measured,
    NotComparable,
    Verdict,
    Yardstick,
    against,
    by_itself,
    check_comparable,
    measured,
)
from vlp_models.promotion.ledger import Ledger, State
from vlp_models.promotion.moves import mirror, move_champion, put_in_order
from vlp_models.tracking.evaluations import ITEMS, evaluations, log_evaluation, read_lineage, run_of
from vlp_models.tracking.registry import CHALLENGER, bundle_of, by_alias

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

Outcome = Literal["promoted", "refused", "unchanged", "rolled back"]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What the gate needs of the floors above.

    content_of: a bundle's content, as it was registered.
    reevaluate: (bundle, the challenger's lineage) -> the folder with the bundle's scores on today's test data; raises
        VLPError where it can't be done.
    """

    content_of: Callable[[Path], str]
    reevaluate: Callable[[Path, dict[str, Any]], AbstractContextManager[Path]]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """champion: the version that held the place before."""

    outcome: Outcome
    task: str
    model: str
    version: int | None
    champion: int | None
    reasons: list[str]
    numbers: dict[str, Any]
    forced: bool = False

    def plain(self) -> dict[str, Any]:
        return dict(vars(self))


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
    version: int | None = None,
    force_first: bool = False,
) -> Decision:
    """Lets the gate decide on `version` (default: the challenger) and moves the aliases if it may pass.

    Args:
        metric: where the task's gate names none.
        dataset: the one to measure on; empty: all that the versions were scored on.
        force_first: a first champion need not meet floors and validation; without effect once there is a champion.

    Raises:
        LedgerError: the ledger was changed.
        DataError: nothing is registered under `model`.
    """
    with ledger.locked():
        state = put_in_order(client, ledger, task=task, model=model, by=by)
        asked, why_not = _asked_for(client, state, model, version)
        if asked is None or why_not == "":
            reason = why_not or f"version {asked} is the champion already"
            return _decision("unchanged", task, model, asked, state, [reason])
        if why_not:
            verdict = Verdict(reasons=[why_not])
        else:
            yardstick = Yardstick(metric=params.gate(task).metric or metric, split=params.split, dataset=dataset)
            verdict = _judge(client, params, task, model, yardstick, asked, state.champion, bench)
        forced = bool(force_first and state.champion is None and verdict.reasons and verdict.numbers)
        if not verdict.passed and not forced:
            decision = _decision("refused", task, model, asked, state, verdict.reasons, verdict.numbers)
            entry = {"kind": "refused", "action": "promote", "from": state.champion, "decision": decision.plain()}
            ledger.append({**entry, "task": task, "model": model, "version": asked, "by": by})
            mirror(client, ledger, model)
            return decision
        decision = _decision("promoted", task, model, asked, state, verdict.reasons, verdict.numbers, forced=forced)
        move_champion(client, ledger, "promote", task=task, model=model, to=asked, by=by, decision=decision.plain())
        return decision


def rollback(
    client: MlflowClient, ledger: Ledger, *, task: str, model: str, content_of: Callable[[Path], str], by: str
) -> Decision:
    """Gives the place back to the champion before; who held it is promoted again only if asked for by its number.

    Raises:
        LedgerError: the ledger was changed.
        DataError: there is no champion before, or it is not registered any more, or damaged.
    """
    with ledger.locked():
        state = put_in_order(client, ledger, task=task, model=model, by=by)
        if state.previous is None:
            now = f"version {state.champion} is its first" if state.champion else "it has none"
            raise DataError(f"{model}: no earlier champion to go back to; {now} (`vlp history {task}`)")
        version = _version(client, model, state.previous)
        if version is None:
            raise DataError(f"{model}: the earlier champion, version {state.previous}, is not registered any more")
        _check_readable(version, content_of)
        decision = _decision("rolled back", task, model, state.previous, state, [])
        move_champion(
            client, ledger, "rollback", task=task, model=model, to=state.previous, by=by, decision=decision.plain()
        )
        return decision


def _asked_for(client: MlflowClient, state: State, model: str, version: int | None) -> tuple[int | None, str | None]:
    """The version to judge, and why it needs no judging: "" where it is the champion, None where it must be judged."""
    if version is None:
        challenger = by_alias(client, model, CHALLENGER)
        if challenger is None:
            if state.champion is None:
                raise DataError(f"{model}: no challenger to promote; `dvc repro register` makes one")
            return None, "there is no challenger"
        version = int(challenger.version)
        if version in state.withdrawn:
            return version, f"version {version} was rolled back; to promote it again, give --version {version}"
    if version == state.champion:
        return version, ""
    return version, None


def _judge(
    client: MlflowClient,
    params: PromotionParams,
    task: str,
    model: str,
    yardstick: Yardstick,
    number: int,
    champion: int | None,
    bench: Bench,
) -> Verdict:
    """The gate's verdict on version `number`; whatever can't be read is a reason to refuse."""
    rule = params.gate(task)
    version = _version(client, model, number)
    if version is None:
        return Verdict(reasons=[f"unregistered: {model} has no version {number}"])
    try:
        _check_readable(version, bench.content_of)
        found = [measured(scores, yardstick) for scores in evaluations(client, version)[:1]]
        lineage = read_lineage(client, version)
    except (VLPError, OSError) as error:
        return Verdict(reasons=[f"unreadable version: {error}"])
    challenger = found[0] if found else "missing metric: no scores per item are stored with the version"
    if isinstance(challenger, str):
        return Verdict(reasons=[challenger])
    verdict = by_itself(challenger, rule, (lineage or {}).get("validation"), params.allowed_unvalidated)
    if champion is not None:
        try:
            other, fresh = _champion_on(client, model, champion, challenger, yardstick, bench, lineage or {})
            gained = against(challenger, other, rule, params)
            verdict.numbers |= {**gained.numbers, "champion_reevaluated": fresh}
            verdict.reasons += gained.reasons
        except (VLPError, OSError, NotComparable) as error:
            verdict.reasons.append(f"champion, version {champion}, can't be compared with: {error}")
    return verdict


def _champion_on(
    client: MlflowClient,
    model: str,
    number: int,
    challenger: Measured,
    yardstick: Yardstick,
    bench: Bench,
    lineage: dict[str, Any],
) -> tuple[Measured, bool]:
    """The champion's scores on the challenger's test, stored or made now (and stored). True: made now.

    Raises:
        NotComparable: the scores made now are of another test: the workspace holds neither version's test data.
        DataError: the champion is not registered, not readable, or can't be evaluated here.
    """
    version = _version(client, model, number)
    if version is None:
        raise DataError("it is not registered any more")
    why = "no scores of it are stored"
    try:
        stored = evaluations(client, version)
    except DataError as error:
        stored, why = [], str(error)
    for scores in stored:
        try:
            return _comparable(scores, yardstick, challenger), False
        except NotComparable as error:
            why = str(error)
    print(f"{model}: {why}; evaluating version {number} on the present test data", file=sys.stderr)
    _check_readable(version, bench.content_of)
    with ExitStack() as stack:
        try:
            directory = stack.enter_context(bench.reevaluate(bundle_of(version), lineage))
        except VLPError:
            raise
        except Exception as error:  # whatever it is: a refusal on record says more than a traceback in the night
            raise DataError(f"its evaluation failed: {type(error).__name__}: {error}") from error
        found = _comparable(read_items(directory / ITEMS), yardstick, challenger)
        log_evaluation(client, run_of(version), directory)
    return found, True


def _comparable(scores: list[ItemScores], yardstick: Yardstick, challenger: Measured) -> Measured:
    found = measured(scores, yardstick)
    if isinstance(found, str):
        raise NotComparable(found)
    check_comparable(challenger, found)
    return found


def _check_readable(version: ModelVersion, content_of: Callable[[Path], str]) -> None:
    """
    Raises:
        DataError: its bundle is gone, or is not what was registered.
    """
    from mlflow.exceptions import MlflowException

    if version.status != "READY":
        raise DataError(f"version {version.version} is {version.status}")
    try:
        content = content_of(bundle_of(version))
    except (MlflowException, OSError) as error:
        raise DataError(f"version {version.version}: its files can't be had ({str(error).splitlines()[0]})") from None
    if content != version.tags.get("content"):
        raise DataError(f"version {version.version}: its files are not those that were registered")


def _version(client: MlflowClient, model: str, number: int) -> ModelVersion | None:
    """None where the registry answers that there is no such version; any other failure is raised."""
    found = client.search_model_versions(f"name='{model}'")
    return next((version for version in found if int(version.version) == number), None)


def _decision(
    outcome: Outcome,
    task: str,
    model: str,
    version: int | None,
    state: State,
    reasons: list[str],
    numbers: dict[str, Any] | None = None,
    *,
    forced: bool = False,
) -> Decision:
    return Decision(
        outcome=outcome,
        task=task,
        model=model,
        version=version,
        champion=state.champion,
        reasons=reasons,
        numbers=json.loads(json.dumps(numbers or {}, allow_nan=False)),
        forced=forced,
    )
