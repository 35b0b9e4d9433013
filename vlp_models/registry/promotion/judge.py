"""Judge a registered version: read its scores and the champion's on the same test, and let the gate decide.

If the champion was not scored on that test, it is evaluated again. Runs that differ in their seeds only (tag
`variant_hash`) show the seed variance of a score; they count if they were scored on the same test, and equal
weights count once. Runs of other variants show it, too, and are pooled if the compared ones do not vary more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.common.log import get_logger
from vlp_models.errors import DataError, VLPError, first_line
from vlp_models.metrics.score import ItemScores
from vlp_models.params import Params
from vlp_models.params.operations import GateParams, PromotionParams
from vlp_models.registry.client import mlflow_errors, model_name, raise_if_away, store_errors
from vlp_models.registry.evaluations import (
    ITEMS,
    get_run_id,
    log_evaluation,
    read_evaluations,
    read_latest_evaluation,
    read_lineage,
    read_scores,
)
from vlp_models.registry.promotion.gate import (
    Baseline,
    Measurement,
    NotComparableError,
    Pooled,
    Verdict,
    check_baselines,
    check_comparable,
    check_floors,
    check_non_inferior,
    check_size,
    compare_to_champion,
    find_baselines,
    measure,
    pool_deviations,
)
from vlp_models.registry.promotion.gate_rule import MetricSpec, gate_rule, gate_spec
from vlp_models.registry.versions import (
    CHALLENGER,
    CHAMPION,
    VARIANT_HASH,
    download_bundle,
    find_version_by_alias,
    find_version_by_number,
)
from vlp_models.serving.bundle import hash_bundle
from vlp_models.tasks.judging import judging_of
from vlp_models.tasks.scoring import NEAREST, read_item_scores

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

logger = get_logger(__name__)

PAST_VARIANTS = 10  # their deviation is known well enough then, and each run's scores are a download


# (bundle, the challenger's lineage) -> a folder with the bundle's scores on the current test data; raises a VLPError if
# that is not possible. The stages that do it are above this folder.
Reevaluate = Callable[[Path, dict[str, Any]], AbstractContextManager[Path]]


@dataclass(frozen=True, kw_only=True)
class GateCase:
    """One version to judge.

    version: of the registered model `model`. champion: the version it is compared with; None: the task has no champion.
    rule: with metric and direction.
    """

    client: MlflowClient
    task: str
    model: str
    version: int
    champion: int | None
    spec: MetricSpec
    rule: GateParams
    params: PromotionParams
    reevaluate: Reevaluate


def judge(case: GateCase, get_error: Callable[[str, tuple[int, ...]], float] | None = None) -> Verdict:
    """Return the gate's verdict; `inconclusive` if something cannot be read or measured.

    Args:
        get_error: (test, runs of either variant) -> allowed probability of error; default: the gate's own.

    Raises:
        TrackingError: an artifact store does not answer, which is no verdict.
        BusyError: another evaluation is running, which is none either.
    """
    client, params, rule, number = case.client, case.params, case.rule, case.version

    # The version must be what was registered, with scores on the gate's metric.
    version = find_version_by_number(client, case.model, number)
    if version is None:
        return Verdict(reasons=[f"unregistered: {case.model} has no version {number}"], conclusive=False)
    try:
        check_readable(version)
        scores = read_latest_evaluation(client, version)
        lineage = read_lineage(client, version) or {}
        records = read_scores(client, version)
    except store_errors(VLPError) as error:
        raise_if_away(error, f"version {number}")
        return Verdict(reasons=[f"unreadable version: {error}"], conclusive=False)
    challenger = measure(scores, case.spec) if scores else "missing metric: no scores per item are stored"
    if isinstance(challenger, str):
        spec = case.spec
        # Why `evaluate` could not compute the metric, if it recorded that.
        notes = [r.get("note", "") for r in records if r["metric"] == spec.metric and r["split"] == spec.split]
        reason = "; ".join([challenger, *(f"{spec}: {note}" for note in dict.fromkeys(notes) if note)])
        return Verdict(reasons=[reason], conclusive=False)

    # What is required of every version, and of a first champion.
    verdict = check_floors(challenger, rule, lineage.get("validation"), params.allow_unvalidated)
    size = check_size(challenger, params.min_images)
    if case.champion is None and rule.beat_baselines:
        baselines = find_baselines(records, case.spec, judging_of(case.task).baselines_to_beat)
        against_baselines = check_baselines(baselines, rule, case.spec)
        against_baselines.conclusive = size.passed  # too few images are no evidence for a baseline either
        verdict.merge(against_baselines)
    verdict.merge(size)
    # There is nothing to compare with, or too little to compare on.
    if case.champion is None or not size.passed:
        return verdict

    # The comparison depends on what differs: the serving alone, the seed alone, or the variant.
    try:
        champion, reevaluated = _measure_champion(case, challenger, lineage)
        champion_version = find_version_by_number(client, case.model, case.champion)
        champion_tags = champion_version.tags if champion_version is not None else {}
        weights, variant = version.tags.get("weights"), version.tags.get(VARIANT_HASH)
        # Equal weights: the two differ only in how they are served, so no gain can be expected.
        if weights and weights == champion_tags.get("weights"):
            gained = check_non_inferior(challenger, champion, rule)
        elif variant and variant == champion_tags.get(VARIANT_HASH):
            # Runs that differ in their seeds only are samples of one variant, so none replaces another.
            gained = Verdict(reasons=["gain: none: it differs from the champion in its seed only"])
        else:
            challenger_seeds = measure_other_seeds(client, version, challenger, case.spec)
            champion_seeds = measure_other_seeds(client, champion_version, challenger, case.spec)
            compared = ([challenger, *challenger_seeds], [champion, *champion_seeds])
            pooled = Pooled()
            # Past variants help if there are runs to compare them with.
            if challenger_seeds or champion_seeds:
                variants = {variant, champion_tags.get(VARIANT_HASH)}
                past = measure_past_variants(client, case.model, variants, challenger, case.spec)
                pooled = pool_deviations(compared, past)
            runs = (1 + len(challenger_seeds), 1 + len(champion_seeds), pooled.degrees)
            # Asked only now, because the allowed error depends on how many runs are compared.
            alpha = None if get_error is None else get_error(challenger.test, runs)
            gained = compare_to_champion(
                challenger,
                champion,
                rule,
                params,
                alpha=alpha,
                other_seeds=(challenger_seeds, champion_seeds),
                pooled=(pooled.squares, pooled.degrees),
            )
            gained.numbers |= pooled.numbers()
        gained.numbers["champion_reevaluated"] = reevaluated
    except store_errors(NotComparableError, VLPError) as error:
        raise_if_away(error, f"champion, version {case.champion}")
        reason = f"cannot compare with the champion, version {case.champion}: {error}"
        gained = Verdict(reasons=[reason], conclusive=False)
    verdict.merge(gained)
    return verdict


def _measure_champion(case: GateCase, challenger: Measurement, lineage: dict[str, Any]) -> tuple[Measurement, bool]:
    """Return the champion's scores on the challenger's test, and whether they were made (and stored) just now.

    NotComparableError if the workspace holds neither version's test data, DataError if it cannot be evaluated here.
    """
    assert case.champion is not None
    name = f"champion, version {case.champion}"
    version = find_version_by_number(case.client, case.model, case.champion)
    if version is None:
        raise DataError("it is no longer registered")
    # Stored scores on the challenger's test, else new ones, which are stored for the next decision.
    reason = "no scores of the champion are stored"
    try:
        stored = read_evaluations(case.client, version)
    except store_errors(VLPError) as error:
        raise_if_away(error, name)
        stored, reason = [], str(error)
    # The current evaluation comes first; the first one on the challenger's test counts.
    for scores in stored:
        try:
            return _measure_like(scores, case.spec, challenger), False
        except NotComparableError as error:
            reason = str(error)
    logger.info("%s: %s; evaluating version %d on the current test data", case.model, reason, case.champion)
    check_readable(version)
    with ExitStack() as stack:
        try:
            directory = stack.enter_context(case.reevaluate(download_bundle(version), lineage))
        except VLPError:
            raise
        except Exception as error:  # any failure: a refusal on record is more useful than a traceback at night
            raise_if_away(error, name)
            raise DataError(f"its evaluation failed: {type(error).__name__}: {error}") from error
        # The folder exists only within the stack.
        measurement = _measure_like(read_item_scores(directory / ITEMS), case.spec, challenger)
        log_evaluation(case.client, get_run_id(version), directory)
    return measurement, True


def measure_other_seeds(
    client: MlflowClient, version: ModelVersion | None, like: Measurement, spec: MetricSpec
) -> list[Measurement]:
    """Return the scores, on the test of `like`, of the other runs of the version's variant.

    Raises:
        TrackingError: a store does not answer; the number of runs matters for the decision, so none is skipped.
    """
    variant = version.tags.get(VARIANT_HASH, "") if version is not None else ""
    if version is None or not variant:
        return []
    others = [v for v in _find_variants(client, version.name).get(variant, []) if v.version != version.version]
    return _measure_runs(client, others, like, spec, {version.tags.get("weights")})


def measure_past_variants(
    client: MlflowClient, model: str, compared: Set[str | None], like: Measurement, spec: MetricSpec
) -> list[list[Measurement]]:
    """Return the runs of the newest variants but the compared ones, of those with two or more on the test of `like`.

    Raises:
        TrackingError: a store does not answer.
    """
    variants: list[list[Measurement]] = []
    for variant, versions in _find_variants(client, model).items():
        # One run shows no deviation; its scores need not be read.
        if variant in compared or len({version.tags.get("weights") for version in versions}) < 2:
            continue
        runs = _measure_runs(client, versions, like, spec, set())
        variants += [runs] if len(runs) > 1 else []
        if len(variants) == PAST_VARIANTS:
            break
    return variants


def _find_variants(client: MlflowClient, model: str) -> dict[str, list[ModelVersion]]:
    """Return variant hash -> its versions, both newest first."""
    variants: dict[str, list[ModelVersion]] = {}
    for version in sorted(client.search_model_versions(f"name='{model}'"), key=lambda v: -int(v.version)):
        if variant := version.tags.get(VARIANT_HASH):
            variants.setdefault(variant, []).append(version)
    return variants


def _measure_runs(
    client: MlflowClient,
    versions: Sequence[ModelVersion],
    like: Measurement,
    spec: MetricSpec,
    measured_weights: set[str | None],
) -> list[Measurement]:
    """Return the versions' scores on the test of `like`; weights that were measured are a run registered again."""
    measurements: list[Measurement] = []
    for version in versions:
        if version.tags.get("weights") in measured_weights:
            continue
        try:
            stored = read_evaluations(client, version)
        except store_errors(VLPError) as error:
            raise_if_away(error, f"version {version.version}")
            continue
        for scores in stored:
            try:
                measurements.append(_measure_like(scores, spec, like))
                measured_weights.add(version.tags.get("weights"))
                break
            except NotComparableError:  # an evaluation on another test
                continue
    return measurements


def _measure_like(scores: list[ItemScores], spec: MetricSpec, like: Measurement) -> Measurement:
    """Measure `scores`; NotComparableError if they are of another test than `like`, or lack the metric."""
    measurement = measure(scores, spec)
    if isinstance(measurement, str):
        raise NotComparableError(measurement)
    check_comparable(like, measurement)
    return measurement


def check_readable(version: ModelVersion) -> None:
    """Check that the version's bundle is what was registered.

    Raises:
        DataError: it is missing or was changed.
        TrackingError: the store does not answer.
    """
    # Another status is that of an upload that has not finished or has failed.
    if version.status != "READY":
        raise DataError(f"version {version.version} is {version.status}")
    try:
        content = hash_bundle(download_bundle(version))
    except store_errors(VLPError) as error:  # a store may also answer with fewer files
        raise_if_away(error, f"version {version.version}")
        raise DataError(f"version {version.version}: cannot read its files ({first_line(error)})") from None
    if content != version.tags.get("content"):
        raise DataError(f"version {version.version}: its files are not those that were registered")


def find_better_neighbors(params: Params, client: MlflowClient) -> Baseline | None:
    """Return the nearest-neighbor baseline of captioning if there is no champion because the challenger loses to it.

    None if there is a champion, nothing is registered, or the gate does not compare with baselines.

    Raises:
        TrackingError: MLflow or a store does not answer.
    """
    rule, name = gate_rule(params, "captioning"), model_name(params.tracking, "captioning")
    if not rule.beat_baselines:
        return None
    with mlflow_errors(params):
        challenger = find_version_by_alias(client, name, CHALLENGER)
        if challenger is None or find_version_by_alias(client, name, CHAMPION) is not None:
            return None
        records = read_scores(client, challenger)
    spec = gate_spec(params, "captioning")
    for baseline in find_baselines(records, spec, [NEAREST]):
        if check_baselines([baseline], rule, spec).reasons:
            return baseline
    return None
