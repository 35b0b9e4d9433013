"""evaluate RUN: predict with one fine-tuned model on its test splits; score with 95% intervals and baselines.

All outputs depend on checkpoint, data and params only, except scores.json, which also has seconds, memory and commit.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from vlp_models.common.io import output_directory, write_json, write_text
from vlp_models.common.log import get_logger
from vlp_models.common.workspace import SEARCH, Workspace, record_timing, require_output, write_manifest
from vlp_models.data.sample import Sample
from vlp_models.data.views import VIEWS
from vlp_models.errors import DataError, ParamsError
from vlp_models.evaluation.contamination import LeakedItems, read_training_data, score_without_leaked
from vlp_models.evaluation.test_set import hash_shards, hash_test_set, slices_of
from vlp_models.metrics.bootstrap import MIN_GROUPS, NO_INTERVAL, interval
from vlp_models.metrics.caption import SharedMeteor
from vlp_models.metrics.extra import load_metric, score_by
from vlp_models.metrics.score import EXTRA, ItemScores, item_scores, write_items
from vlp_models.params import EvaluateParams, Params, to_plain

if TYPE_CHECKING:
    from pathlib import Path

    from vlp_models.metrics.consensus import ConsensusCaptions
    from vlp_models.tasks.base import TaskModel
    from vlp_models.tasks.scoring import EvalContext, TaskScores

logger = get_logger(__name__)

ITEMS = "items.parquet"


def run(
    params: Params, workspace: Workspace, key: str = "", *, search: Path | None = None, as_served: bool = False
) -> None:
    """Write reports/eval/KEY: `predictions-<split>.jsonl`, official result files, `scores.json`, `items.parquet`, and
    the settings and index of the search in `search/`.

    Args:
        search: the search folder of a registered version that is evaluated again, for its index.
        as_served: use the settings in `search` as well, if it has any.

    Raises:
        ParamsError: params.yaml has no such fine-tuning run.
        DataError: shards or checkpoint are missing, or no split has anything to score.
    """
    if key not in params.finetune:
        raise ParamsError(f"evaluate: no run `{key}` in params.yaml's `finetune`; known: {', '.join(params.finetune)}")
    # One METEOR for all datasets and splits: its process takes seconds to start.
    with record_timing(workspace, f"evaluate@{key}"), SharedMeteor() as meteor:
        _evaluate(params, workspace, key, search, as_served, meteor)


def _evaluate(
    params: Params, workspace: Workspace, key: str, search: Path | None, as_served: bool, meteor: SharedMeteor
) -> None:
    from vlp_models.common.device import peak_host_memory_mb
    from vlp_models.data.shards.dataset import ShardDataset
    from vlp_models.evaluation.predict import NearestTrainImages, predict_all
    from vlp_models.pipeline.lineage import git_commit
    from vlp_models.tasks.scoring import EvalContext

    finetune = params.finetune[key]
    model = _load_model(params, workspace, key, search, as_served)
    settings = model.evaluate_settings(params.evaluate, finetune.task)
    facts = {
        "model": model.info.name,
        "family": model.info.family,
        "run": key,
        "variant": finetune.variant or key,
        "task": finetune.task,
        "seed": finetune.seed,
        "git": git_commit(workspace.root),
        "data": hash_shards(workspace.shards),
    }
    sources = dict.fromkeys(finetune.evaluate_on or finetune.sources, 1)  # empty: all datasets
    training_data = read_training_data(params, workspace, key)
    find_nearest = model.reader.flags["regions"]  # the nearest-neighbor baseline is for models that read regions
    with_blind = bool(settings.blind_baseline) and not model.blank_images
    similar: dict[str, NearestTrainImages] = {}
    consensus: dict[str, ConsensusCaptions] = {}
    records: list[dict[str, Any]] = []
    skipped: list[str] = []
    counts: dict[str, int] = {}
    items: list[ItemScores] = []
    with output_directory(workspace.evaluation(key)) as directory:
        for split in settings.splits:
            dataset = ShardDataset(workspace.shards, split, model.prediction_view, sources, **model.reader.flags)
            start = time.perf_counter()
            predictions, samples = predict_all(
                model,
                dataset,
                batch_size=settings.batch_size,
                with_blind=with_blind,
                description=f"{key} on {split}",
            )
            seconds = round(time.perf_counter() - start, 2)
            if not samples:
                skipped.append(f"{split}: no {model.prediction_view} to score {finetune.task} on")
                logger.warning("evaluate %s: %s; skipped", key, skipped[-1])
                continue
            lines = (json.dumps(row, ensure_ascii=False, sort_keys=True) for row in predictions)
            write_text(directory / f"predictions-{split}.jsonl", "".join(f"{line}\n" for line in lines))
            counts[split] = len(predictions)
            for source in sorted({sample.source for sample in samples}):
                chosen = [i for i, sample in enumerate(samples) if sample.source == source]
                own = [predictions[i] for i in chosen]
                scored_samples = [samples[i] for i in chosen]
                nearest = similar.setdefault(source, NearestTrainImages(workspace.shards, source))
                with _status(f"scoring {key} on {source} {split}") as progress:
                    context = EvalContext(
                        source=source,
                        validated=workspace.validated,
                        nearest=partial(nearest.find, split) if find_nearest else lambda image_ids: {},
                        progress=progress,
                        meteor=meteor,
                        consensus=consensus,
                    )
                    model.write_official(own, context, split, directory)
                    scored = model.score(own, scored_samples, context)
                    scored = _with_extra(scored, settings.metrics, model, own, scored_samples)
                items += _items(model, scored, context, split, scored_samples, settings.metrics)
                place = {
                    "dataset": source,
                    "split": split,
                    "seconds": seconds,
                    "peak_memory_mb": round(peak_host_memory_mb(), 1),
                }
                records += _records(
                    scored,
                    settings,
                    facts | place,
                    training_data.find_leaked(scored_samples) if training_data else None,
                )
        if not records:
            splits = ", ".join(settings.splits)
            raise DataError(f"evaluate {key}: nothing to score in {splits}; see `evaluate.splits` in params.yaml")
        model.save_search(directory / SEARCH)
        write_json(directory / "scores.json", records)
        write_items(directory / ITEMS, items)
        shown = {"evaluate": to_plain(settings), "task": finetune.task, "blank_images": finetune.blank_images}
        write_manifest(
            directory, stage=f"evaluate@{key}", params=shown, counts=counts, skipped=skipped, data=facts["data"]
        )
    for (dataset, split), group in groupby(records, key=itemgetter("dataset", "split")):
        known = [r for r in group if r["value"] is not None and r["metric"] in (model.metric, *model.headlines)]
        scores = ", ".join(f"{record['metric']} {record['value']:.2f}" for record in known)
        logger.info("%s: %s %s  %s", key, dataset, split, scores)


def _load_model(params: Params, workspace: Workspace, key: str, search: Path | None, as_served: bool) -> TaskModel:
    """Load the run's fine-tuned checkpoint and set its search."""
    from vlp_models.common.device import pick_device
    from vlp_models.tasks.base import load_task_model

    finetune = params.finetune[key]
    require_output(workspace.shards / "manifest.json", "shards")
    model = load_task_model(
        require_output(workspace.checkpoint(f"finetune/{key}"), f"finetune@{key}"),
        device=pick_device(params.trainer.accelerator, params.trainer.torch_threads),
    )
    if model.task != finetune.task:
        raise DataError(
            f"checkpoints/finetune/{key} has the task {model.task}, but the run {key} the task {finetune.task}; run "
            f"`dvc repro finetune@{key}`"
        )
    if as_served and search is not None and search.is_dir():
        model.load_search(search)
    else:
        model.set_search(model.evaluate_settings(params.evaluate, finetune.task))
        model.prepare_search(workspace.shards, finetune.sources, search)
    return model


def _with_extra(
    scored: TaskScores, metrics: Sequence[str], model: TaskModel, rows: list[dict[str, Any]], samples: list[Sample]
) -> TaskScores:
    """Return the scores of the task, then those of plugins' metrics, also of the blind baseline if there is one.

    Raises:
        ParamsError: the task computes a metric of the same name.
    """
    from vlp_models.tasks.scoring import BLIND, baselines_by_metric

    if not metrics:
        return scored
    known = {score.metric for score in scored.scores}
    if taken := [name for name in metrics if name in known]:
        where = f"params.yaml: `evaluate.metrics: {taken[0]}`"
        raise ParamsError(f"{where}: {model.task} has a metric of this name itself; rename yours")
    extra = [score_by(load_metric(name), rows, samples) for name in metrics]
    baselines = dict(scored.baselines)
    if model.blind_fields and all(f"{name}_blind" in rows[0] for name in model.blind_fields):
        blind = [{**row, **{name: row[f"{name}_blind"] for name in model.blind_fields}} for row in rows]
        baselines |= baselines_by_metric({BLIND: [score_by(load_metric(name), blind, samples) for name in metrics]})
    return replace(scored, scores=[*scored.scores, *extra], baselines=baselines)


def _records(
    scored: TaskScores, settings: EvaluateParams, facts: dict[str, Any], leaked: LeakedItems | None
) -> list[dict[str, Any]]:
    resampling = {"resamples": settings.bootstrap, "seed": facts["seed"]}
    records = []
    for score in scored.scores:
        found = interval(score.evidence, **resampling)
        ends = {"low": round(found[0], 4), "high": round(found[1], 4)} if found else {"low": None, "high": None}
        notes = [score.note]
        if score.value is not None and score.evidence is not None:
            count = len(set(score.evidence.groups))
            notes += [f"{NO_INTERVAL}: {count} test items, {MIN_GROUPS} are needed"] * (count < MIN_GROUPS)
        records.append(
            {
                **facts,
                "metric": score.metric,
                "value": None if score.value is None else round(score.value, 4),
                **ends,
                "baselines": scored.baselines.get(score.metric, {}),
                "n": score.n,
                "note": "; ".join(filter(None, notes)),
                "leakage": None if leaked is None else score_without_leaked(score, leaked, ends, **resampling),
                **({EXTRA: True} if score.metric in settings.metrics else {}),
            }
        )
    return records


def _items(
    model: TaskModel,
    scored: TaskScores,
    place: EvalContext,
    split: str,
    samples: list[Sample],
    metrics: Sequence[str] = (),
) -> list[ItemScores]:
    """Return scores per item, which the promotion gate compares."""
    test = hash_test_set(samples, VIEWS[model.prediction_view], place.validated)
    slices = slices_of(samples, place.validated, model.slices)
    statistics = {**model.statistics}
    for name in metrics:
        statistics |= load_metric(name).statistics
    found = (
        item_scores(
            score,
            dataset=place.source,
            split=split,
            test=test,
            slices=slices,
            decoding=model.search,
            statistics=statistics,
        )
        for score in scored.scores
    )
    return [scores for scores in found if scores is not None]


@contextmanager
def _status(description: str) -> Iterator[Any]:
    from rich.console import Console

    if not sys.stderr.isatty():
        yield lambda text: None
        return
    with Console(stderr=True).status(description) as status:
        yield lambda text: status.update(f"{description}: {text}")
