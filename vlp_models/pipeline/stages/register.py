"""register: register every fine-tuning run as a version in MLflow's registry; a task's best gets alias `challenger`.

registry/promotion/ranking.py ranks the runs; text-only controls are not registered. Each bundle predicts one image
before MLflow is touched. Running the stage again creates no second version unless what predicts has changed: weights,
features, tokenizer, or the code that serves them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.common.io import scratch_directory, write_json
from vlp_models.common.log import get_logger
from vlp_models.common.workspace import SEARCH, Workspace, record_timing, require_output
from vlp_models.data.tables import stream_table
from vlp_models.errors import CheckpointError
from vlp_models.models.checkpoint_info import CheckpointInfo
from vlp_models.params import Params, to_plain
from vlp_models.pipeline.lineage import lineage_files, lineage_record, lineage_tags, training_inputs, variant_hash
from vlp_models.registry.evaluations import ITEMS
from vlp_models.registry.mlflow_run import DataInput, find_training_run, send_unsent
from vlp_models.registry.promotion.ranking import RankedRun, describe_ranking, rank_runs
from vlp_models.serving.bundle import (
    BUNDLE,
    hash_bundle,
    hash_weights,
    read_checkpoint_info,
    why_not_served,
    write_bundle,
)
from vlp_models.serving.predictor import SmokeTest, smoke_test
from vlp_models.tasks.caption_search import CAPTIONS
from vlp_models.tasks.scoring import read_item_scores

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from vlp_models.registry.versions import VersionRecord

logger = get_logger(__name__)

MAX_TEST_IMAGES = 50  # candidates for the smoke test; the first that exists on this disk is used


@dataclass(frozen=True, kw_only=True)
class RunBundle:
    """The bundle of one run, ready to be registered.

    is_challenger: it is the best of its task. not_served: why it cannot predict from an image; empty: it can.
    prediction: what it returned for an image in the smoke test.
    """

    task: str
    candidate: RankedRun
    is_challenger: bool
    bundle: Path
    info: CheckpointInfo
    not_served: str
    prediction: dict[str, Any]


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Register all runs and write reports/registered.json: task -> its versions, the best run's first.

    Raises:
        CheckpointError: a run's model should predict from an image and fails to; nothing is registered then.
        DataError: a run has not been evaluated.
        TrackingError: MLflow does not answer.
    """
    from vlp_models.registry.client import connect, tracking_errors, tracking_uri
    from vlp_models.registry.serving_cache import refresh_serving_cache
    from vlp_models.registry.versions import CHAMPION, find_version_by_alias, register, set_challenger

    with record_timing(workspace, "register"), _make_bundles(params, workspace) as bundles:
        client = connect(params.tracking, workspace.root)
        send_unsent(params.tracking, workspace.root)  # of trainings that ended while MLflow did not answer
        receipts: dict[str, list[dict[str, Any]]] = {}
        with tracking_errors(tracking_uri(params.tracking, workspace.root)):
            for run_bundle in bundles:
                record = _make_record(client, params, workspace, run_bundle)
                version = register(client, record)
                receipt: dict[str, Any] = {"name": version.name, "version": version.version}
                receipt |= {name: record.tags[name] for name in ("run", "model", "family", "variant")}
                receipt |= {"content": record.content, "challenger": run_bundle.is_challenger}
                receipts.setdefault(run_bundle.task, []).append(receipt)
                state = "registered" if version.created else "already registered"
                champion = find_version_by_alias(client, version.name, CHAMPION)
                is_champion = champion is not None and int(champion.version) == version.version
                role = ", the champion" if is_champion else ", the challenger" if run_bundle.is_challenger else ""
                logger.info("%s version %d%s: %s (run %s)", version.name, version.version, role, state, record.run)
            for receipt in (receipt for several in receipts.values() for receipt in several):
                if receipt["challenger"]:
                    set_challenger(client, receipt["name"], receipt["version"])
            refresh_serving_cache(params, workspace.root, receipts)
        write_json(workspace.reports / "registered.json", receipts)


@contextmanager
def _make_bundles(params: Params, workspace: Workspace) -> Iterator[list[RunBundle]]:
    """Yield a bundle of every run to register, the best of each task first; those to be served pass a smoke test."""
    ranked = sorted(rank_runs(params, workspace).items())
    images = _find_test_images(workspace)
    with scratch_directory(workspace.root / ".work" / "bundles") as temporary:
        bundles = []
        for task, runs in ranked:
            if len(runs) > 1:
                scores = {candidate.run: candidate.scores for candidate in runs}
                logger.info("%s", describe_ranking(params, task, scores))
            for rank, candidate in enumerate(runs):
                bundle = temporary / candidate.run / BUNDLE
                bundle.mkdir(parents=True)
                checkpoint = require_output(
                    workspace.checkpoint(f"finetune/{candidate.run}"), f"finetune@{candidate.run}"
                )
                if read_checkpoint_info(checkpoint).detector_id:  # it reads regions
                    require_output(workspace.detector, "detector")
                info = write_bundle(
                    bundle,
                    checkpoint=checkpoint,
                    detector=workspace.detector,
                    features=to_plain(params.features),
                    search=workspace.evaluation(candidate.run) / SEARCH,
                )
                # A model that predicts from an image must do so now, before MLflow is touched.
                reason = why_not_served(bundle)
                trial = SmokeTest() if reason else smoke_test(bundle, images)
                if trial.problem:
                    raise CheckpointError(
                        f"register: run `{candidate.run}` (model `{candidate.model}`, task {task}) cannot be served: "
                        f"{trial.problem}. Nothing was registered"
                    )
                bundles.append(
                    RunBundle(
                        task=task,
                        candidate=candidate,
                        is_challenger=rank == 0 and candidate.value is not None,
                        bundle=bundle,
                        info=info,
                        not_served=reason,
                        prediction=trial.prediction,
                    )
                )
        yield bundles


def _make_record(client: MlflowClient, params: Params, workspace: Workspace, run_bundle: RunBundle) -> VersionRecord:
    from vlp_models.registry.card import make_model_card
    from vlp_models.registry.client import model_name
    from vlp_models.registry.versions import VARIANT_HASH, VersionRecord

    candidate, name = run_bundle.candidate, model_name(params.tracking, run_bundle.task)
    facts = lineage_tags(
        workspace.root,
        params=to_plain(params),
        data=workspace.shards / "manifest.json",
        command=f"dvc repro finetune@{candidate.run}",
    )
    # names that MLflow accepts: letters, digits, `_-. ` (a `/` would make a group in its UI)
    metrics = {}
    for score in candidate.scores:
        if score["value"] is not None:
            metric = f"{score['dataset']}.{score['split']}.{score['metric']}"
            metric = "".join(c if c.isalnum() or c in "_-. " else "_" for c in metric)
            metrics[metric] = float(score["value"])
    names = {"run": candidate.run, "model": candidate.model, "family": candidate.family, "variant": candidate.variant}
    return VersionRecord(
        name=name,
        task=run_bundle.task,
        run=candidate.run,
        bundle=run_bundle.bundle,
        content=hash_bundle(run_bundle.bundle),
        evaluation=workspace.evaluation(candidate.run),
        metrics=metrics,
        tags={
            **facts,
            **names,
            "task": run_bundle.task,
            "weights": hash_weights(run_bundle.bundle),
            "seed": str(candidate.seed),
            VARIANT_HASH: variant_hash(params, workspace, candidate.run),
            "served": f"no: {run_bundle.not_served}" if run_bundle.not_served else "yes",
        },
        card=make_model_card(
            name=name,
            info=run_bundle.info,
            scores=candidate.scores,
            lineage=facts | names,
            not_served=run_bundle.not_served,
            holds_captions=(run_bundle.bundle / SEARCH / CAPTIONS).exists(),
        ),
        prediction=run_bundle.prediction,
        inputs=_find_inputs(params, workspace, run_bundle),
        training_run_id=find_training_run(client, workspace.training(f"finetune/{candidate.run}")),
        lineage=lineage_record(params, workspace, candidate.run),
        lineage_files=lineage_files(workspace),
    )


def _find_inputs(params: Params, workspace: Workspace, run_bundle: RunBundle) -> list[DataInput]:
    """Return the datasets that the run was trained on and scored on."""
    items = read_item_scores(workspace.evaluation(run_bundle.candidate.run) / ITEMS)
    scored = {(s.dataset, s.split, s.test): len(s.items) for s in items}
    uri = workspace.relative(workspace.shards)
    return training_inputs(workspace, params.finetune[run_bundle.candidate.run].sources) + [
        DataInput(name=f"{dataset} {split}", context="evaluation", digest=test, uri=uri, counts={"items": count})
        for (dataset, split, test), count in sorted(scored.items())
    ]


def _find_test_images(workspace: Workspace) -> list[Path]:
    """Return images for the smoke test: those of the test split, then those of val."""
    by_split: dict[str, list[Path]] = {"test": [], "val": []}
    for images in stream_table("images", require_output(workspace.validated, "validate"), ["split", "path"]):
        for split, path in zip(images["split"].to_pylist(), images["path"].to_pylist(), strict=True):
            if split in by_split and len(by_split[split]) < MAX_TEST_IMAGES:
                by_split[split].append(workspace.root / path)
    return [*by_split["test"], *by_split["val"]]
