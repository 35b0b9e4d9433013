"""evaluate RUN: predict with one fine-tuned model on its test splits; score with 95% intervals and baselines.

All outputs depend on checkpoint, data and params only, except scores.json, which also has seconds, memory and commit.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from vlp_models.common.io import output_directory, write_json, write_text
from vlp_models.common.log import get_logger
from vlp_models.common.plugins import import_target
from vlp_models.common.workspace import SEARCH, Workspace, require_output, write_manifest
from vlp_models.data.sample import Sample
from vlp_models.data.views import VIEWS
from vlp_models.errors import DataError, ParamsError
from vlp_models.evaluation.contamination import read_training_data
from vlp_models.evaluation.test_set import hash_shards, hash_test_set, slices_of
from vlp_models.metrics.bootstrap import MIN_GROUPS, NO_INTERVAL, interval
from vlp_models.metrics.caption import SharedMeteor
from vlp_models.metrics.extra import load_metric, score_by
from vlp_models.metrics.score import EXTRA, ItemScores, Score, item_scores, write_items
from vlp_models.metrics.unseen import score_unseen
from vlp_models.models import BASELINES, baseline_models
from vlp_models.params import EvaluateParams, Params, to_plain

if TYPE_CHECKING:
    from pathlib import Path

    from vlp_models.evaluation.predict import NearestTrainImages
    from vlp_models.metrics.consensus import ConsensusCaptions
    from vlp_models.tasks.base import TaskModel
    from vlp_models.tasks.scoring import TaskScores

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
    from vlp_models.data.shards.dataset import ShardDataset
    from vlp_models.evaluation.predict import predict_all

    if key not in params.finetune:
        raise ParamsError(f"evaluate: no run `{key}` in params.yaml's `finetune`; known: {', '.join(params.finetune)}")
    finetune = params.finetune[key]
    skipped: list[str] = []
    counts: dict[str, int] = {}  # split -> predictions
    # One METEOR for all datasets and splits: its process takes seconds to start.
    with SharedMeteor() as meteor:
        model = _load_model(params, workspace, key, search, as_served)
        settings = model.evaluate_settings(params.evaluate, finetune.task)
        scorer = _Scorer(params, workspace, key, model, settings, meteor)
        sources = dict.fromkeys(finetune.evaluate_on or finetune.sources, 1)  # empty: all datasets
        with output_directory(workspace.evaluation(key)) as directory:
            for split in settings.splits:
                dataset = ShardDataset(workspace.shards, split, model.prediction_view, sources, **model.reader.flags)
                start = time.perf_counter()
                predictions, samples = predict_all(
                    model,
                    dataset,
                    batch_size=settings.batch_size,
                    # A model trained on blank images is a blind baseline itself.
                    with_blind=bool(settings.blind_baseline) and not model.blank_images,
                    description=f"{key} on {split}",
                )
                seconds = round(time.perf_counter() - start, 2)
                if not samples:
                    skipped.append(f"{split}: no {model.prediction_view} to score {finetune.task} on")
                    logger.warning("evaluate %s: %s; skipped", key, skipped[-1])
                    continue
                # Sorted keys, so that equal predictions give equal bytes.
                lines = (json.dumps(row, ensure_ascii=False, sort_keys=True) for row in predictions)
                write_text(directory / f"predictions-{split}.jsonl", "".join(f"{line}\n" for line in lines))
                counts[split] = len(predictions)
                # The datasets of a split are predicted together, and scored one by one.
                for source in sorted({sample.source for sample in samples}):
                    numbers = [i for i, sample in enumerate(samples) if sample.source == source]
                    rows = [predictions[i] for i in numbers]
                    row_samples = [samples[i] for i in numbers]
                    scorer.score(source, split, rows, row_samples, seconds, directory)
            if not scorer.records:
                splits = ", ".join(settings.splits)
                raise DataError(f"evaluate {key}: nothing to score in {splits}; see `evaluate.splits` in params.yaml")
            model.save_search(directory / SEARCH)
            write_json(directory / "scores.json", scorer.records)
            write_items(directory / ITEMS, scorer.items)
            write_manifest(
                directory,
                stage=f"evaluate@{key}",
                params={"evaluate": to_plain(settings), "task": finetune.task, "blank_images": finetune.blank_images},
                counts=counts,
                skipped=skipped,
                data=scorer.facts["data"],
            )
    headlines = (model.metric, *model.headlines)
    # Records of one dataset and split are adjacent, as `groupby` needs.
    for (source, split), group in groupby(scorer.records, key=itemgetter("dataset", "split")):
        with_value = [record for record in group if record["value"] is not None and record["metric"] in headlines]
        scores = ", ".join(f"{record['metric']} {record['value']:.2f}" for record in with_value)
        logger.info("%s: %s %s  %s", key, source, split, scores)


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
    # params.yaml was edited after the training
    if model.task != finetune.task:
        raise DataError(
            f"checkpoints/finetune/{key} has the task {model.task}, but the run {key} the task {finetune.task}; run "
            f"`dvc repro finetune@{key}`"
        )
    # Captions to look up come from the version itself, or from the current training data.
    if as_served and search is not None and search.is_dir():
        model.load_search(search)
    else:
        model.set_search(model.evaluate_settings(params.evaluate, finetune.task))
        model.prepare_search(workspace.shards, finetune.sources, search)
    return model


class _Scorer:
    """Scores the predictions of one run, one dataset and split at a time.

    facts: of the run, in every record. records: rows of scores.json. items: scores per item, which the promotion gate
    compares.
    """

    def __init__(
        self,
        params: Params,
        workspace: Workspace,
        key: str,
        model: TaskModel,
        settings: EvaluateParams,
        meteor: SharedMeteor,
    ) -> None:
        from vlp_models.pipeline.lineage import git_commit

        finetune = params.finetune[key]
        self.facts = {
            "model": model.info.name,
            "family": model.info.family,
            "run": key,
            "variant": finetune.variant or key,
            "task": finetune.task,
            "seed": finetune.seed,
            "git": git_commit(workspace.root),
            "data": hash_shards(workspace.shards),
        }
        self.records: list[dict[str, Any]] = []
        self.items: list[ItemScores] = []
        self._workspace, self._model, self._settings, self._meteor = workspace, model, settings, meteor
        self._training_data = read_training_data(params, workspace, key)
        self._baselines = baseline_models(params, key)
        # by dataset, for all splits: both read its training images
        self._nearest: dict[str, NearestTrainImages] = {}
        self._consensus: dict[str, ConsensusCaptions] = {}

    def score(
        self,
        source: str,
        split: str,
        rows: list[dict[str, Any]],
        samples: list[Sample],
        seconds: float,
        directory: Path,
    ) -> None:
        """Score one dataset and split, and write the task's official files to `directory`.

        Args:
            rows: the predictions, one for each sample.
            seconds: that the prediction of the split took.
        """
        from vlp_models.common.device import peak_host_memory_mb
        from vlp_models.evaluation.predict import NearestTrainImages
        from vlp_models.tasks.scoring import EvalContext, baselines_by_metric

        nearest = self._nearest.setdefault(source, NearestTrainImages(self._workspace.shards, source))
        # the nearest-neighbor baseline is for models that read regions
        reads_regions = self._model.reader.flags["regions"]
        with _status(f"scoring {self.facts['run']} on {source} {split}") as progress:
            context = EvalContext(
                source=source,
                validated=self._workspace.validated,
                nearest=partial(nearest.find, split) if reads_regions else lambda image_ids: {},
                progress=progress,
                meteor=self._meteor,
                consensus=self._consensus,
            )
            self._model.write_official(rows, context, split, directory)
            scored = self._add_plugin_metrics(self._model.score(rows, samples, context), rows, samples)
            for name, family in self._baselines.items():
                score_untrained = import_target(BASELINES[family])
                baseline = {f"zero-shot {name}": score_untrained(self._workspace, name, self._model, split, context)}
                for metric, scores in baselines_by_metric(baseline).items():
                    scored.baselines.setdefault(metric, {}).update(scores)
        seen = self._training_data.find_seen(samples) if self._training_data else None
        items = self._score_items(scored, source, split, samples, seen or {})
        self.items += items.values()
        facts = {
            **self.facts,
            "dataset": source,
            "split": split,
            "seconds": seconds,
            "peak_memory_mb": round(peak_host_memory_mb(), 1),
        }
        for score in scored.scores:
            # Without the training data it is unknown which items are seen.
            score_items = items.get(score.metric) if seen is not None else None
            self.records.append(self._make_record(score, scored, facts, score_items))

    def _add_plugin_metrics(self, scored: TaskScores, rows: list[dict[str, Any]], samples: list[Sample]) -> TaskScores:
        """Add the scores of plugins' metrics, also of the blind baseline if there is one."""
        from vlp_models.tasks.scoring import BLIND, baselines_by_metric

        model, metrics = self._model, self._settings.metrics
        if not metrics:
            return scored
        # a plugin's metric must not hide one of the task's
        names = {score.metric for score in scored.scores}
        if taken := [name for name in metrics if name in names]:
            where = f"params.yaml: `evaluate.metrics: {taken[0]}`"
            raise ParamsError(f"{where}: {model.task} has a metric of this name itself; rename yours")
        extra = [score_by(load_metric(name), rows, samples) for name in metrics]
        baselines = dict(scored.baselines)
        # All predictions of a split have the same fields, so the first one decides.
        if model.blind_fields and all(f"{name}_blind" in rows[0] for name in model.blind_fields):
            # the predictions of the blank images, under the names that the metrics read
            blind = [{**row, **{name: row[f"{name}_blind"] for name in model.blind_fields}} for row in rows]
            blind_scores = [score_by(load_metric(name), blind, samples) for name in metrics]
            baselines |= baselines_by_metric({BLIND: blind_scores})
        return replace(scored, scores=[*scored.scores, *extra], baselines=baselines)

    def _make_record(
        self, score: Score, scored: TaskScores, facts: dict[str, Any], items: ItemScores | None
    ) -> dict[str, Any]:
        """Return a score with its 95% interval, baselines and notes, and all of it again on the unseen items.

        Args:
            items: the score per item; None: not kept, or it is unknown which items are seen.
        """
        resampling = {"resamples": self._settings.bootstrap, "seed": facts["seed"]}
        # 95% interval by bootstrap over the test's images; None if they are too few
        ends = interval(score.evidence, **resampling)
        bounds = {"low": round(ends[0], 4), "high": round(ends[1], 4)} if ends else {"low": None, "high": None}
        baselines = scored.baseline_values(score.metric)
        # Baselines without values per item, such as chance.
        kinds = scored.baselines.get(score.metric, {})
        constants = {name: value for name, value in baselines.items() if not isinstance(kinds[name], Score)}
        notes = [score.note] if score.note else []
        if score.value is not None and score.evidence is not None:
            count = len(set(score.evidence.groups))
            if count < MIN_GROUPS:
                notes.append(f"{NO_INTERVAL}: {count} test items, {MIN_GROUPS} are needed")
        return {
            **facts,
            "metric": score.metric,
            "value": None if score.value is None else round(score.value, 4),
            **bounds,
            "baselines": baselines,
            "n": score.n,
            "note": "; ".join(notes),
            "leakage": None if items is None else score_unseen(items, constants, **resampling),
            **({EXTRA: True} if score.metric in self._settings.metrics else {}),
        }

    def _score_items(
        self, scored: TaskScores, source: str, split: str, samples: list[Sample], seen: Mapping[str, list[str]]
    ) -> dict[str, ItemScores]:
        """Return scores per item with those of their baselines, for the metrics that have them."""
        model, validated = self._model, self._workspace.validated
        # what identifies the test: scores are compared on equal tests only
        test = hash_test_set(samples, VIEWS[model.prediction_view], validated)
        slices = slices_of(samples, validated, model.slices)
        # A copy, to which the statistics of plugins are added.
        statistics = {**model.statistics}
        for name in self._settings.metrics:
            statistics |= load_metric(name).statistics
        items = {}
        for score in scored.scores:
            scores = item_scores(
                score,
                dataset=source,
                split=split,
                test=test,
                slices=slices,
                decoding=model.search,
                statistics=statistics,
                seen=seen,
                baselines=scored.baselines.get(score.metric, {}),
            )
            if scores is not None:
                items[score.metric] = scores
        return items


@contextmanager
def _status(description: str) -> Iterator[Any]:
    from rich.console import Console

    # In a log file each frame of the spinner would be text.
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    with Console(stderr=True).status(description) as status:
        yield lambda text: status.update(f"{description}: {text}")
