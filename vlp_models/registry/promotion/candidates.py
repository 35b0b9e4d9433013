"""Which version the gate looks at: the best of the newest versions of all runs, measured on the same test.

A candidate that was measured on another test, by another scorer or not at all is listed with the reason, and does not
compete. Versions that were rolled back compete only when asked for by their number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlp_models.errors import VLPError
from vlp_models.metrics.score import ItemScores
from vlp_models.registry.client import check_answered, failures
from vlp_models.registry.evaluations import latest_evaluation
from vlp_models.registry.promotion.gate import (
    Measured,
    NotComparable,
    Yardstick,
    check_comparable,
    datasets_of,
    measured,
)
from vlp_models.registry.versions import CHALLENGER, by_alias, versions_of_runs

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A version that may become champion. value: on the common test; None where `note` says why there is none."""

    version: int
    run: str
    run_model: str
    value: float | None = None
    note: str = ""

    def plain(self) -> dict[str, Any]:
        value = None if self.value is None else round(self.value, 4)
        return {"version": self.version, "run": self.run, "run_model": self.run_model, "value": value} | (
            {"note": self.note} if self.note else {}
        )


def maker(version: ModelVersion | None) -> tuple[str, str]:
    """The run that made a version and that run's model; empty where it was registered without saying so."""
    tags = {} if version is None else version.tags
    return tags.get("run", ""), tags.get("model", "")


def versions_to_compare(client: MlflowClient, name: str, runs: Iterable[str]) -> list[ModelVersion]:
    """The newest version of each run, the challenger first; the challenger alone where no run has one (versions
    registered before runs were told apart)."""
    challenger = by_alias(client, name, CHALLENGER)
    found = {int(v.version): v for v in versions_of_runs(client, name, runs).values()}
    if not found:
        return [challenger] if challenger is not None else []
    first = int(challenger.version) if challenger is not None else None
    return sorted(found.values(), key=lambda v: int(v.version) != first)


def evaluations(client: MlflowClient, versions: Sequence[ModelVersion]) -> list[list[ItemScores] | str]:
    """Of each version its latest scores per item, or why there are none."""
    return [_read(client, version) for version in versions]


def compared(
    versions: Sequence[ModelVersion],
    read: Sequence[list[ItemScores] | str],
    by: Yardstick,
    direction: str,
    withdrawn: Iterable[int],
) -> tuple[list[Candidate], Yardstick]:
    """The versions as candidates, those with a value first and the best of them in front (equals stay in order); and
    the yardstick on the datasets that they share.

    read: see `evaluations`.
    """
    by = narrowed(by, [found for found in read if not isinstance(found, str)])
    reference: Measured | None = None
    candidates = []
    for version, scores in zip(versions, read, strict=True):
        found = scores if isinstance(scores, str) else measured(scores, by)
        value, note = None, ""
        if int(version.version) in withdrawn:
            note = "it was rolled back"
        elif isinstance(found, str):
            note = found
        else:
            reference = reference or found
            try:
                check_comparable(reference, found)
                value = found.value()
            except NotComparable as error:
                note = f"not compared: {error}"
        run, run_model = maker(version)
        candidates.append(Candidate(version=int(version.version), run=run, run_model=run_model, value=value, note=note))
    sign = -1.0 if direction == "higher" else 1.0
    return sorted(candidates, key=lambda c: (c.value is None, 0.0 if c.value is None else sign * c.value)), by


def narrowed(by: Yardstick, several: Sequence[Sequence[ItemScores]]) -> Yardstick:
    """The yardstick on the datasets that all of `several` evaluations have its metric on; as it is where it names its
    own, or where they share none."""
    sets = [found for scores in several if (found := datasets_of(scores, by))]
    shared = set.intersection(*sets) if sets else set()
    return by if by.datasets or not shared else dataclasses.replace(by, datasets=tuple(sorted(shared)))


def _read(client: MlflowClient, version: ModelVersion) -> list[ItemScores] | str:
    try:
        return latest_evaluation(client, version) or "missing metric: no scores per item are stored with the version"
    except failures(VLPError) as error:
        check_answered(error, f"version {version.version}")
        return f"unreadable scores: {error}"
