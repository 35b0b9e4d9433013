"""register: register every fine-tuning run as a version in MLflow's registry; a task's best gets alias `challenger`.

registry/promotion/ranking.py ranks the runs; text-only controls are not registered. Each bundle predicts one image
before MLflow is touched. Running the stage again creates no second version unless what predicts has changed: weights,
features, tokenizer, or the code that serves them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.common.io import scratch_directory, write_json
from vlp_models.common.log import get_logger
from vlp_models.common.plugins import Table, import_target
from vlp_models.common.redaction import redact
from vlp_models.common.workspace import REGISTERED, SEARCH, Workspace, require_output
from vlp_models.data.tables import stream_table
from vlp_models.errors import CheckpointError
from vlp_models.models.checkpoint_info import CheckpointInfo
from vlp_models.params import Params, to_plain
from vlp_models.pipeline.lineage import lineage_files, lineage_record, lineage_tags, training_inputs, variant_hash
from vlp_models.registry.evaluations import ITEMS
from vlp_models.registry.mlflow_run import STATE, DataInput, find_training_run, send_unsent
from vlp_models.registry.promotion.gate_rule import find_best_baseline, gate_rule
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

CARD_FACTS = Table("card_facts", {})  # name -> `module:function` of params, root and run: further lines of a model card
MAX_TEST_IMAGES = 50  # candidates for the smoke test; the first that exists on this disk is used


@dataclass(frozen=True, kw_only=True)
class BundledRun:
    """The bundle of one run, ready to be registered.

    is_challenger: it is the best of its task. not_served: why it cannot predict from an image; empty: it can.
    prediction: what it returned for an image in the smoke test.
    """

    task: str
    ranked: RankedRun
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
    from vlp_models.registry.versions import CHALLENGER, CHAMPION, REGISTERING, find_version_by_alias, register

    with scratch_directory(workspace.root / ".work" / "bundles") as folder:
        bundles = _make_bundles(params, workspace, folder)
        client = connect(params.tracking, workspace.root)
        send_unsent(params.tracking, workspace.root)  # of trainings that ended while MLflow did not answer
        receipts: dict[str, list[dict[str, Any]]] = {}
        # registered model -> version; None: its best run has no value, so it has no challenger
        challengers: dict[str, int | None] = {}
        unfinished = workspace.work("register", "run") / STATE  # for `end_dead_runs`, if this process is killed
        uri = redact(tracking_uri(params.tracking, workspace.root))
        with tracking_errors(tracking_uri(params.tracking, workspace.root)):
            for bundled in bundles:
                record = _make_record(client, params, workspace, bundled)
                write_json(unfinished, {"uri": uri, "tag": REGISTERING, "key": record.content})
                version = register(client, record)
                receipt: dict[str, Any] = {"name": version.name, "version": version.version}
                receipt |= {name: record.tags[name] for name in ("run", "model", "family", "variant")}
                receipt |= {
                    "content": record.content,
                    "challenger": bundled.is_challenger,
                    "facts": record.lineage["facts"],
                }
                receipts.setdefault(bundled.task, []).append(receipt)
                champion = find_version_by_alias(client, version.name, CHAMPION)
                role = ""
                challengers.setdefault(version.name, None)
                if bundled.is_challenger:
                    challengers[version.name], role = version.version, ", the challenger"
                if champion is not None and int(champion.version) == version.version:
                    role = ", the champion"
                state = "registered" if version.created else "already registered"
                logger.info("%s version %d%s: %s (run %s)", version.name, version.version, role, state, record.run)
            # Only after all runs of a task are registered, so that a killed stage moves no alias.
            for name, number in challengers.items():
                if number is not None:
                    client.set_registered_model_alias(name, CHALLENGER, str(number))
                # An alias of an earlier registration would still be served, against registered.json.
                elif find_version_by_alias(client, name, CHALLENGER) is not None:
                    client.delete_registered_model_alias(name, CHALLENGER)
            unfinished.unlink(missing_ok=True)
            refresh_serving_cache(client, params.tracking, workspace.root, receipts)
        write_json(workspace.reports / "registered.json", receipts)
        (workspace.root / REGISTERED).touch()


def _make_bundles(params: Params, workspace: Workspace, folder: Path) -> list[BundledRun]:
    """Write a bundle of every run, the best of each task first; those to be served must predict an image."""
    test_images = _find_test_images(workspace)
    bundles = []
    for task, runs in sorted(rank_runs(params, workspace).items()):
        if len(runs) > 1:
            logger.info("%s", describe_ranking(params, task, {ranked.run: ranked.scores for ranked in runs}))
        for rank, ranked in enumerate(runs):
            bundle = folder / ranked.run / BUNDLE
            bundle.mkdir(parents=True)
            checkpoint = require_output(workspace.checkpoint(f"finetune/{ranked.run}"), f"finetune@{ranked.run}")
            if read_checkpoint_info(checkpoint).detector_id:  # it reads regions
                require_output(workspace.detector, "detector")
            info = write_bundle(
                bundle,
                checkpoint=checkpoint,
                detector=workspace.detector,
                features=to_plain(params.features),
                search=workspace.evaluation(ranked.run) / SEARCH,
            )
            # A model that predicts from an image must do so now, before MLflow is touched.
            not_served = why_not_served(bundle)
            trial = SmokeTest() if not_served else smoke_test(bundle, test_images)
            if trial.problem:
                raise CheckpointError(
                    f"register: run `{ranked.run}` (model `{ranked.model}`, task {task}) cannot be served: "
                    f"{trial.problem}. Nothing was registered"
                )
            bundles.append(
                BundledRun(
                    task=task,
                    ranked=ranked,
                    # A run without a value is not the best, even if it comes first.
                    is_challenger=rank == 0 and ranked.value is not None,
                    bundle=bundle,
                    info=info,
                    not_served=not_served,
                    prediction=trial.prediction,
                )
            )
    return bundles


def _make_record(client: MlflowClient, params: Params, workspace: Workspace, bundled: BundledRun) -> VersionRecord:
    from vlp_models.registry.card import describe_score, make_model_card
    from vlp_models.registry.client import model_name
    from vlp_models.registry.versions import VARIANT_HASH, VersionRecord

    ranked, bundle = bundled.ranked, bundled.bundle
    lineage = lineage_record(params, workspace, ranked.run)
    name = model_name(params.tracking, bundled.task)
    facts = lineage_tags(
        workspace.root,
        params=to_plain(params),
        data=workspace.shards / "manifest.json",
        command=f"dvc repro finetune@{ranked.run}",
    )
    lineage["facts"] = {}
    for target in CARD_FACTS.values():
        lineage["facts"] |= import_target(target)(params, workspace.root, ranked.run)
    names = {"run": ranked.run, "model": ranked.model, "family": ranked.family, "variant": ranked.variant}
    rule, gate_split = gate_rule(params, bundled.task), params.promotion.split
    # The test split first, as MLflow's pages list them; runs are selected on val.
    scores = [score for score in ranked.scores if score["value"] is not None]
    scores.sort(key=lambda score: score["split"] != gate_split)
    metrics: dict[str, float] = {}
    headline = ""
    for score in scores:
        if not headline and (score["metric"], score["split"]) == (rule.metric, gate_split):
            headline = describe_score(score, rule.direction)
            best = find_best_baseline(score, rule.direction)
            # Two columns that the runs of all tasks have in MLflow's table.
            metrics |= {"score": float(score["value"])} | ({"baseline": float(best[1])} if best else {})
    for score in scores:
        # MLflow accepts letters, digits and `_-. ` in a metric's name; a `/` would make a group in its UI.
        key = f"{score['dataset']}.{score['split']}.{score['metric']}"
        metrics["".join(c if c.isalnum() or c in "_-. " else "_" for c in key)] = float(score["value"])
    # The datasets that it was trained on, then those that it was scored on.
    inputs = training_inputs(workspace, params.finetune[ranked.run].sources)
    uri = workspace.relative(workspace.shards)
    items = read_item_scores(workspace.evaluation(ranked.run) / ITEMS)
    counts = {(s.dataset, s.split, s.test): len(s.items) for s in items}
    for (dataset, split, test), count in sorted(counts.items()):
        inputs.append(
            DataInput(name=f"{dataset} {split}", context="evaluation", digest=test, uri=uri, counts={"items": count})
        )
    return VersionRecord(
        name=name,
        task=bundled.task,
        run=ranked.run,
        bundle=bundle,
        content=hash_bundle(bundle),
        evaluation=workspace.evaluation(ranked.run),
        headline=headline,
        metrics=metrics,
        tags={
            **facts,
            **names,
            "task": bundled.task,
            "weights": hash_weights(bundle),
            "seed": str(ranked.seed),
            VARIANT_HASH: variant_hash(params, workspace, ranked.run),
            "served": f"no: {bundled.not_served}" if bundled.not_served else "yes",
        },
        card=make_model_card(
            name=name,
            headline=headline,
            info=bundled.info,
            scores=ranked.scores,
            lineage=facts | names | lineage["facts"],
            vocabulary=lineage["vocabulary"],
            not_served=bundled.not_served,
            holds_captions=(bundle / SEARCH / CAPTIONS).exists(),
        ),
        prediction=bundled.prediction,
        inputs=inputs,
        training_run_id=find_training_run(client, workspace.training(f"finetune/{ranked.run}")),
        lineage=lineage,
        lineage_files=lineage_files(workspace),
    )


def _find_test_images(workspace: Workspace) -> list[Path]:
    """Return images for the smoke test: those of the test split, then those of val."""
    by_split: dict[str, list[Path]] = {"test": [], "val": []}
    for images in stream_table("images", require_output(workspace.validated, "validate"), ["split", "path"]):
        for split, path in zip(images["split"].to_pylist(), images["path"].to_pylist(), strict=True):
            if split in by_split and len(by_split[split]) < MAX_TEST_IMAGES:
                by_split[split].append(workspace.root / path)
    return [*by_split["test"], *by_split["val"]]
