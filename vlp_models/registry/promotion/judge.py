"""A version before the gate: its stored scores, and the champion's on the same test, made anew where it must be."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.errors import DataError, VLPError
from vlp_models.metrics.score import ItemScores
from vlp_models.params.promotion import PromotionParams
from vlp_models.registry.client import check_answered, failures
from vlp_models.registry.evaluations import (
    ITEMS,
    evaluations,
    latest_evaluation,
    log_evaluation,
    read_lineage,
    run_of,
)
from vlp_models.registry.promotion.gate import (
    Measured,
    NotComparable,
    Verdict,
    Yardstick,
    against,
    as_good,
    by_itself,
    check_comparable,
    measured,
)
from vlp_models.registry.versions import COHORT, bundle_of
from vlp_models.tasks.scoring import read_item_scores

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What the gate needs of the floors above.

    content_of: a bundle's content, as it was registered.
    reevaluate: (bundle, the challenger's lineage) -> the folder with the bundle's scores on today's test data; raises
        VLPError where it can't be done.
    """

    content_of: Callable[[Path], str]
    reevaluate: Callable[[Path, dict[str, Any]], AbstractContextManager[Path]]


def judge(
    client: MlflowClient,
    params: PromotionParams,
    task: str,
    model: str,
    yardstick: Yardstick,
    number: int,
    champion: int | None,
    bench: Bench,
    error: Callable[[str, tuple[int, int]], float] | None = None,
) -> Verdict:
    """The gate's verdict on version `number`; of what can't be read or measured it can't tell. A store that does not
    answer is no verdict, nor is another evaluation that goes on: TrackingError, BusyError.

    Args:
        error: of a test, and the runs of either design: the chance of error that this decision may take; default: the
            gate's own.
    """
    rule = params.gate(task)
    version = version_of(client, model, number)
    if version is None:
        return Verdict(reasons=[f"unregistered: {model} has no version {number}"], told=False)
    try:
        check_readable(version, bench.content_of)
        scores = latest_evaluation(client, version)
        lineage = read_lineage(client, version)
    except failures(VLPError) as reason:
        check_answered(reason, f"version {number}")
        return Verdict(reasons=[f"unreadable version: {reason}"], told=False)
    challenger = measured(scores, yardstick) if scores else "missing metric: no scores per item are stored"
    if isinstance(challenger, str):
        return Verdict(reasons=[challenger], told=False)
    verdict = by_itself(challenger, rule, (lineage or {}).get("validation"), params.allow_unvalidated)
    if champion is not None:
        try:
            other, fresh = _champion_on(client, model, champion, challenger, yardstick, bench, lineage or {})
            before = version_of(client, model, champion)
            if _weights(version) and _weights(version) == _weights(before):
                gained = as_good(challenger, other, rule)
            elif before is not None and (cohort := version.tags.get(COHORT)) and cohort == before.tags.get(COHORT):
                gained = Verdict(reasons=["gain: none: it differs from the champion in its seed alone"])
            else:
                ours, theirs = (runs_beside(client, v, challenger, yardstick) for v in (version, before))
                allowed = None if error is None else error(challenger.test, (1 + len(ours), 1 + len(theirs)))
                gained = against(challenger, other, rule, params, error=allowed, beside=(ours, theirs))
            gained.numbers["champion_reevaluated"] = fresh
        except failures(NotComparable, VLPError) as reason:
            check_answered(reason, f"champion, version {champion}")
            said = f"champion, version {champion}, can't be compared with: {reason}"
            gained = Verdict(reasons=[said], told=False)
        verdict.join(gained)
    return verdict


def _weights(version: ModelVersion | None) -> str:
    """Versions registered before the whole bundle was hashed: their content is that of their weights."""
    tags = {} if version is None else version.tags
    return tags.get("weights") or tags.get("content", "")


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
    version = version_of(client, model, number)
    if version is None:
        raise DataError("it is not registered any more")
    why = "no scores of it are stored"
    try:
        stored = evaluations(client, version)
    except failures(VLPError) as error:
        check_answered(error, f"champion, version {number}")
        stored, why = [], str(error)
    for scores in stored:
        try:
            return _comparable(scores, yardstick, challenger), False
        except NotComparable as error:
            why = str(error)
    print(f"{model}: {why}; evaluating version {number} on the present test data", file=sys.stderr)
    check_readable(version, bench.content_of)
    with ExitStack() as stack:
        try:
            directory = stack.enter_context(bench.reevaluate(bundle_of(version), lineage))
        except VLPError:
            raise
        except Exception as error:  # whatever it is: a refusal on record says more than a traceback in the night
            check_answered(error, f"champion, version {number}")
            raise DataError(f"its evaluation failed: {type(error).__name__}: {error}") from error
        found = _comparable(read_item_scores(directory / ITEMS), yardstick, challenger)
        log_evaluation(client, run_of(version), directory)
    return found, True


def _comparable(scores: list[ItemScores], yardstick: Yardstick, challenger: Measured) -> Measured:
    found = measured(scores, yardstick)
    if isinstance(found, str):
        raise NotComparable(found)
    check_comparable(challenger, found)
    return found


def check_readable(version: ModelVersion, content_of: Callable[[Path], str]) -> None:
    """
    Raises:
        DataError: its bundle is gone, or is not what was registered.
        TrackingError: the store does not answer.
    """
    if version.status != "READY":
        raise DataError(f"version {version.version} is {version.status}")
    try:
        content = content_of(bundle_of(version))
    except failures() as error:
        check_answered(error, f"version {version.version}")
        raise DataError(f"version {version.version}: its files can't be had ({str(error).splitlines()[0]})") from None
    if content != version.tags.get("content"):
        raise DataError(f"version {version.version}: its files are not those that were registered")


def version_of(client: MlflowClient, model: str, number: int) -> ModelVersion | None:
    """None where the registry answers that there is no such version; any other failure is raised."""
    found = client.search_model_versions(f"name='{model}'")
    return next((version for version in found if int(version.version) == number), None)


def runs_beside(
    client: MlflowClient, version: ModelVersion | None, like: Measured, yardstick: Yardstick
) -> list[Measured]:
    """The scores of the other runs of the version's cohort on the test of `like`; runs without such are left out.

    Raises:
        TrackingError: a store does not answer: how many runs there are decides, too.
    """
    cohort = version.tags.get(COHORT, "") if version is not None else ""
    if version is None or not cohort:
        return []
    known, found = {version.tags.get("weights")}, []
    others = [v for v in client.search_model_versions(f"name='{version.name}'") if v.tags.get(COHORT) == cohort]
    for other in sorted(others, key=lambda v: -int(v.version)):
        if other.version == version.version or other.tags.get("weights") in known:
            continue
        scores = _on_the_test_of(client, other, like, yardstick)
        if scores is not None:
            known.add(other.tags.get("weights"))
            found.append(scores)
    return found


def _on_the_test_of(
    client: MlflowClient, version: ModelVersion, like: Measured, yardstick: Yardstick
) -> Measured | None:
    try:
        stored = evaluations(client, version)
    except failures(VLPError) as error:
        check_answered(error, f"version {version.version}")
        return None
    for scores in stored:
        found = measured(scores, yardstick)
        if isinstance(found, str):
            continue
        try:
            check_comparable(like, found)
        except NotComparable:
            continue
        return found
    return None
