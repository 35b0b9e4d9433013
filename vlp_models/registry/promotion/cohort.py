"""Runs that differ in their seeds alone: what they score tells how much of a score is the seed's luck.

`register` gives each version a tag, one hash over its design, its data, its settings but for seeds, and its code
(runs/provenance.py). Versions of one cohort are runs of one design; of their scores only those on the test in question
count, and the same weights count once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlp_models.errors import VLPError
from vlp_models.registry.evaluations import evaluations
from vlp_models.registry.held import check_answered, failures
from vlp_models.registry.promotion.gate import Measured, NotComparable, Yardstick, check_comparable, measured
from vlp_models.registry.versions import COHORT

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


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
