"""Which version the gate judges: the best of the newest versions of all runs, measured on the same test.

A candidate that was measured on another test, by another scorer or not at all is listed with the reason and does not
compete. Versions that were rolled back compete only when requested by number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vlp_models.errors import DataError, VLPError
from vlp_models.metrics.score import ItemScores
from vlp_models.params.operations import PromotionParams
from vlp_models.registry.client import raise_if_away, store_errors
from vlp_models.registry.evaluations import read_latest_evaluation
from vlp_models.registry.promotion.gate import Measurement, NotComparableError, check_comparable, find_datasets, measure
from vlp_models.registry.promotion.gate_rule import MetricSpec
from vlp_models.registry.promotion.ranking import best_first, describe_splits
from vlp_models.registry.versions import CHALLENGER, find_run_versions, find_version_by_alias

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A version that may become champion.

    value: on the split of the ranking (`select_on`, else `split`); None if it has none, for `reason`.
    withdrawn: it was rolled back or withdrawn.
    """

    version: int
    run: str
    run_model: str
    value: float | None = None
    reason: str = ""
    withdrawn: bool = False

    def to_plain(self) -> dict[str, Any]:
        value = None if self.value is None else round(self.value, 4)
        plain = {"version": self.version, "run": self.run, "run_model": self.run_model, "value": value}
        return plain | ({"reason": self.reason} if self.reason else {})


@dataclass(frozen=True, kw_only=True)
class Choice:
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


def choose_best(
    client: MlflowClient,
    name: str,
    spec: MetricSpec,
    params: PromotionParams,
    *,
    direction: str,
    runs: Iterable[str],
    champion: int | None,
    withdrawn: Collection[str],
) -> Choice:
    """Return the best of the newest versions of all runs.

    Args:
        name: of the registered model.
        runs: if none of them has a version, the challenger is the only candidate.
        withdrawn: contents of versions that were rolled back or withdrawn.

    Raises:
        DataError: nothing is registered.
    """
    versions = _find_versions(client, name, runs)
    if not versions:
        if champion is None:
            raise DataError(f"{name}: no challenger to promote; `dvc repro register` registers one")
        return Choice(version=None, spec=spec, skip_reason="there is no challenger")

    # Select on another split than the test: the best of several on the test is biased upward on that test set.
    scores = [_read_scores(client, version) for version in versions]
    spec = _narrow(spec, scores)
    selected_on: str = params.select_on
    select_spec = dataclasses.replace(spec, split=selected_on)
    # The datasets that all share may be others on this split.
    candidates = _rank(versions, scores, _narrow(select_spec, scores), direction, withdrawn)
    # A withdrawn version does not compete, so its missing value decides nothing.
    unscored = [c.version for c in candidates if c.value is None and not c.withdrawn]
    if unscored:  # not all were scored there: select on the test
        selected_on = spec.split
        candidates = _rank(versions, scores, spec, direction, withdrawn)

    # The best that was not rolled back.
    eligible = [candidate for candidate in candidates if not candidate.withdrawn]
    if not eligible:
        number = candidates[0].version
        skip_reason = f"version {number} was rolled back; to promote it again, pass --version {number}"
        return Choice(version=number, spec=spec, skip_reason=skip_reason, candidates=candidates)
    best = eligible[0]
    if best.value is None:  # none can be measured: refuse the first that is not champion, with its reason
        best = next((c for c in eligible if c.version != champion), best)
    skip_reason = ""
    if best.version == champion:
        skip_reason = f"version {best.version} is already the champion"
        if len(eligible) > 1:
            skip_reason += f", and the best of {len(eligible)} candidates"
    measured = max(1, sum(c.value is not None for c in eligible))
    ranking = f"one candidate was scored, so nothing was ranked; it is judged on {params.split}"
    if measured > 1:
        # Read only if the versions were ranked on the test itself.
        why = f"not all were scored on {params.select_on} (version {', '.join(map(str, unscored))})"
        ranking = describe_splits(f"{measured} candidates", selected_on, spec.metric, params, why)
    return Choice(
        version=best.version,
        spec=spec,
        skip_reason=skip_reason,
        candidates=candidates,
        selected_on=selected_on if measured > 1 else "",
        measured=measured,
        ranking=ranking,
    )


def _find_versions(client: MlflowClient, name: str, runs: Iterable[str]) -> list[ModelVersion]:
    """Return the newest version of each run, the challenger first; the challenger alone if no run has a version."""
    by_number = {int(v.version): v for v in find_run_versions(client, name, runs).values()}  # runs may share a version
    challenger = find_version_by_alias(client, name, CHALLENGER)
    # A challenger of another run than these, such as a removed one, does not compete.
    if challenger is not None and (not by_number or int(challenger.version) in by_number):
        # The challenger comes first: the ranking is stable, so among equals it wins.
        by_number = {int(challenger.version): challenger} | by_number
    return list(by_number.values())


def _read_scores(client: MlflowClient, version: ModelVersion) -> list[ItemScores] | str:
    """Return a version's latest scores per item, or the reason why there are none; a store that is away raises."""
    try:
        scores = read_latest_evaluation(client, version)
        return scores or "missing metric: no scores per item are stored with the version"
    except store_errors(VLPError) as error:
        raise_if_away(error, f"version {version.version}")
        return f"unreadable scores: {error}"


def _narrow(spec: MetricSpec, scores: Sequence[list[ItemScores] | str]) -> MetricSpec:
    """Restrict `spec` to the datasets that all evaluations share, unless it names its own or they share none."""
    if spec.datasets:
        return spec
    # Versions without the metric share nothing and would empty the intersection.
    datasets = [find_datasets(items, spec) for items in scores if not isinstance(items, str)]
    shared = set.intersection(*filter(None, datasets)) if any(datasets) else set()
    return dataclasses.replace(spec, datasets=tuple(sorted(shared)))


def _rank(
    versions: Sequence[ModelVersion],
    scores: Sequence[list[ItemScores] | str],
    spec: MetricSpec,
    direction: str,
    withdrawn: Collection[str],
) -> list[Candidate]:
    """Return the versions as candidates, best first; those without a value come last."""
    reference: Measurement | None = None  # the first that could be measured; the others must be comparable with it
    candidates = []
    for version, items in zip(versions, scores, strict=True):
        measurement = items if isinstance(items, str) else measure(items, spec)
        value, reason = None, ""
        is_withdrawn = version.tags.get("content") in withdrawn
        if is_withdrawn:
            reason = "it was rolled back"
        elif isinstance(measurement, str):
            reason = measurement
        else:
            reference = reference or measurement
            try:
                check_comparable(reference, measurement)
                value = measurement.value()
            except NotComparableError as error:
                reason = f"not compared: {error}"
        candidates.append(
            Candidate(
                version=int(version.version),
                run=version.tags.get("run", ""),
                run_model=version.tags.get("model", ""),
                value=value,
                reason=reason,
                withdrawn=is_withdrawn,
            )
        )
    order = best_first([candidate.value for candidate in candidates], direction)
    return [candidates[position] for position in order]
