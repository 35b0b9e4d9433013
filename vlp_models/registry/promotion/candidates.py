"""Which version the gate judges: the best of the newest versions of all runs, measured on the same test.

A candidate that was measured on another test, by another scorer or not at all is listed with the reason and does not
compete. Versions that were rolled back compete only when requested by number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlp_models.errors import VLPError
from vlp_models.metrics.score import ItemScores
from vlp_models.registry.client import raise_if_away, store_errors
from vlp_models.registry.evaluations import read_latest_evaluation
from vlp_models.registry.promotion.gate import (
    Measurement,
    MetricSpec,
    NotComparableError,
    check_comparable,
    find_datasets,
    measure,
)
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


def get_run_names(version: ModelVersion | None) -> tuple[str, str]:
    """Return the run that made a version and that run's model; empty strings if it has no such tags."""
    tags = {} if version is None else version.tags
    return tags.get("run", ""), tags.get("model", "")


def find_candidates(client: MlflowClient, name: str, runs: Iterable[str]) -> list[ModelVersion]:
    """Return the newest version of each run, the challenger first; the challenger alone if no run has a version."""
    challenger = find_version_by_alias(client, name, CHALLENGER)
    found = {int(v.version): v for v in find_run_versions(client, name, runs).values()}
    if not found:
        return [challenger] if challenger is not None else []
    first = int(challenger.version) if challenger is not None else None
    return sorted(found.values(), key=lambda v: int(v.version) != first)


def read_candidate_scores(client: MlflowClient, versions: Sequence[ModelVersion]) -> list[list[ItemScores] | str]:
    """Return each version's latest scores per item, or the reason why there are none.

    Raises:
        TrackingError: the artifact store does not answer.
    """
    found: list[list[ItemScores] | str] = []
    for version in versions:
        try:
            scores = read_latest_evaluation(client, version)
            found.append(scores or "missing metric: no scores per item are stored with the version")
        except store_errors(VLPError) as error:
            raise_if_away(error, f"version {version.version}")
            found.append(f"unreadable scores: {error}")
    return found


def rank_candidates(
    versions: Sequence[ModelVersion],
    scores: Sequence[list[ItemScores] | str],
    spec: MetricSpec,
    direction: str,
    withdrawn: Collection[str],
) -> tuple[list[Candidate], MetricSpec]:
    """Return the versions as candidates, best first, and `spec` narrowed to the datasets that all of them share.

    Candidates without a value come last; equals keep their order.

    Args:
        scores: see `read_candidate_scores`.
        withdrawn: contents of versions that were rolled back or withdrawn.
    """
    spec = _narrow(spec, [found for found in scores if not isinstance(found, str)])
    reference: Measurement | None = None
    candidates = []
    for version, own_scores in zip(versions, scores, strict=True):
        found = own_scores if isinstance(own_scores, str) else measure(own_scores, spec)
        value, reason = None, ""
        is_withdrawn = version.tags.get("content") in withdrawn
        if is_withdrawn:
            reason = "it was rolled back"
        elif isinstance(found, str):
            reason = found
        else:
            reference = reference or found
            try:
                check_comparable(reference, found)
                value = found.value()
            except NotComparableError as error:
                reason = f"not compared: {error}"
        run, run_model = get_run_names(version)
        candidates.append(
            Candidate(
                version=int(version.version),
                run=run,
                run_model=run_model,
                value=value,
                reason=reason,
                withdrawn=is_withdrawn,
            )
        )
    sign = 1.0 if direction == "lower" else -1.0
    return sorted(candidates, key=lambda c: (c.value is None, 0.0 if c.value is None else sign * c.value)), spec


def _narrow(spec: MetricSpec, evaluations: Sequence[Sequence[ItemScores]]) -> MetricSpec:
    """Restrict `spec` to the datasets that all evaluations share, unless it names its own or they share none."""
    sets = [found for scores in evaluations if (found := find_datasets(scores, spec))]
    shared = set.intersection(*sets) if sets else set()
    return spec if spec.datasets or not shared else dataclasses.replace(spec, datasets=tuple(sorted(shared)))
