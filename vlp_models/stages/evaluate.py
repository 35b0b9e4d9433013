"""evaluate KEY: one fine-tuned model on its test splits: predictions, scores with 95% intervals, baselines.

Everything but scores.json is a function of checkpoint, data and params; seconds, memory and commit stand there alone.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.data.sample import Sample
from vlp_models.data.tables import read_table
from vlp_models.errors import DataError, ParamsError
from vlp_models.evaluation.scoring import (
    Scored,
    score_answers,
    score_captioning,
    score_choices,
    score_retrieval,
    score_statements,
    write_official,
)
from vlp_models.evaluation.slices import slices_of
from vlp_models.metrics.bootstrap import interval
from vlp_models.metrics.items import ItemScores, item_scores, write_items
from vlp_models.metrics.score import Score
from vlp_models.params import EvaluateParams, Params, to_plain
from vlp_models.workspace.paths import (
    Workspace,
    hash_file,
    measured,
    need,
    output_directory,
    write_json,
    write_manifest,
    write_text,
)

if TYPE_CHECKING:
    from vlp_models.data.dataset import ShardDataset
    from vlp_models.tasks.base import TaskModel

SCORERS = {
    "captioning": score_captioning,
    "vqa": score_answers,
    "nlvr": score_statements,
    "retrieval": score_retrieval,
    "vcr": score_choices,
}
ID_KEYS = {
    "captioning": "image_id",
    "vqa": "question_id",
    "nlvr": "statement_id",
    "retrieval": "image_id",
    "vcr": "choice_id",
}
ITEMS = "items.parquet"
BLANKABLE = ("captioning", "vqa", "nlvr", "vcr")  # without images, retrieval ranks nothing: chance is its baseline


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Writes reports/eval/KEY: `predictions-<split>.jsonl`, official result files, `scores.json`, `items.parquet`.

    Raises:
        ParamsError: params.yaml has no fine-tuning run of this name.
        DataError: shards or checkpoint are not there, or no split has anything to score.
    """
    if key not in params.finetune:
        raise ParamsError(f"evaluate: no run `{key}` in params.yaml's `finetune`; known: {', '.join(params.finetune)}")
    with measured(workspace, f"evaluate@{key}"):
        _evaluate(params, workspace, key)


def _evaluate(params: Params, workspace: Workspace, key: str) -> None:
    from vlp_models.data.dataset import ShardDataset
    from vlp_models.tasks.base import load_task_model
    from vlp_models.tasks.captioning import Captioning
    from vlp_models.tracking.lineage import git_commit

    finetune, settings = params.finetune[key], params.evaluate
    need(workspace.shards / "manifest.json", "shards")
    model = load_task_model(need(workspace.checkpoint(key), f"finetune@{key}"), device=_device(params))
    if isinstance(model, Captioning):
        model.beam_size, model.max_caption_len = settings.beam_size, settings.max_caption_len
    facts = {
        "model": model.info["model"],
        "run": key,
        "task": finetune.task,
        "seed": finetune.seed,
        "git": git_commit(workspace.root),
        "data": data_hash(workspace.shards),
    }
    sources = dict.fromkeys(finetune.sources, 1)
    records: list[dict[str, Any]] = []
    skipped: list[str] = []
    counts: dict[str, int] = {}
    items: list[ItemScores] = []
    with output_directory(workspace.evaluation(key)) as directory:
        for split in settings.splits:
            dataset = ShardDataset(workspace.shards, split, model.prediction_view, sources)
            start = time.perf_counter()
            predictions, samples = _predict(model, dataset, settings, f"{key} on {split}")
            seconds = round(time.perf_counter() - start, 2)
            if not samples:
                skipped.append(f"{split}: no {model.prediction_view} that {finetune.task} could be scored on")
                print(f"evaluate {key}: {skipped[-1]}; skipped", file=sys.stderr)
                continue
            lines = (json.dumps(row, ensure_ascii=False, sort_keys=True) for row in predictions)
            write_text(directory / f"predictions-{split}.jsonl", "".join(f"{line}\n" for line in lines))
            counts[split] = len(predictions)
            for source in sorted({sample.source for sample in samples}):
                chosen = [i for i, sample in enumerate(samples) if sample.source == source]
                own = [predictions[i] for i in chosen]
                write_official(finetune.task, own, source, split, directory, workspace.validated)
                with _status(f"scoring {key} on {source} {split}") as progress:
                    asked = [samples[i] for i in chosen]
                    scored = SCORERS[finetune.task](own, asked, source, workspace.validated, progress)
                items += _items(scored, source, split, asked, workspace.validated, _decoding(model))
                place = {"dataset": source, "split": split, "seconds": seconds, "peak_memory_mb": _peak_memory_mb()}
                records += _records(scored, settings, facts | place)
        if not records:
            splits = ", ".join(settings.splits)
            raise DataError(f"evaluate {key}: nothing to score in {splits}; see `evaluate.splits` in params.yaml")
        write_json(directory / "scores.json", records)
        write_items(directory / ITEMS, items)
        shown = {"evaluate": to_plain(settings), "task": finetune.task, "blank_images": finetune.blank_images}
        write_manifest(
            directory, stage=f"evaluate@{key}", params=shown, counts=counts, skipped=skipped, data=facts["data"]
        )
    for record in records:
        if record["value"] is not None and "(" not in record["metric"]:
            print(f"{key}: {record['dataset']} {record['split']} {record['metric']} {record['value']:.2f}")


def _predict(
    model: TaskModel, dataset: ShardDataset, settings: EvaluateParams, description: str
) -> tuple[list[dict[str, Any]], list[Sample]]:
    """Predictions and samples (without their regions), in the dataset's order; every sample exactly once."""
    import torch

    blank_too = model.task in settings.blank_control and not model.blank_images
    if blank_too and model.task not in BLANKABLE:
        raise ParamsError(
            f"params.yaml: `evaluate.blank_control`: {model.task} has none: all blank images rank alike; compare with "
            f"chance instead. Known: {', '.join(BLANKABLE)}"
        )
    predictions: list[dict[str, Any]] = []
    samples: list[Sample] = []
    device = next(model.parameters()).device
    with torch.inference_mode():
        for chunk in _chunks(dataset, settings.batch_size, description):
            # An image without references can be captioned, but not scored.
            chunk = [sample for sample in chunk if sample.captions or model.prediction_view != "images"]
            if not chunk:
                continue
            batch = model.collate(chunk).to(device)
            rows = model.predict(batch, chunk)
            if blank_too:
                blank = model.predict(replace(batch, image=batch.image.blanked()), chunk)
                rows = [_with_blank(row, other) for row, other in zip(rows, blank, strict=True)]
            predictions += rows
            samples += [replace(sample, regions=None, pixels=None) for sample in chunk]
    predictions = model.finish(predictions, samples) if samples else predictions
    key = ID_KEYS[model.task]
    predicted, expected = [row[key] for row in predictions], [sample.sample_id for sample in samples]
    if predicted != expected or len(set(predicted)) != len(predicted):
        raise DataError(
            f"{description}: {len(set(predicted))} ids predicted, {len(expected)} asked for; they must agree"
        )
    return predictions, samples


def _with_blank(row: dict[str, Any], blank: dict[str, Any]) -> dict[str, Any]:
    """The prediction, and beside it what the model says of a blank image."""
    names = [name for name in ("caption", "answer", "rationale", "prediction") if name in row]
    return row | {f"{name}_blank": blank[name] for name in names}


def _records(scored: Scored, settings: EvaluateParams, facts: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            **facts,
            "metric": score.metric,
            "value": None if score.value is None else round(score.value, 4),
            **_interval(score, settings.bootstrap, facts["seed"]),
            "baselines": scored.baselines.get(score.metric, {}),
            "n": score.n,
            "note": score.note,
        }
        for score in scored.scores
    ]


def _decoding(model: TaskModel) -> str:
    """How the captions were searched for: those of another search are not to be compared."""
    from vlp_models.tasks.captioning import Captioning

    if not isinstance(model, Captioning):
        return ""
    return f"beam {model.beam_size}, at most {model.max_caption_len} tokens"


def _items(
    scored: Scored, source: str, split: str, samples: list[Sample], validated: Path, decoding: str
) -> list[ItemScores]:
    """The plain metrics item by item; those of variants and parts (`CIDEr (greedy)`) can be had from predictions."""
    test, slices = test_hash(samples, validated), slices_of(samples, validated)
    plain = [score for score in scored.scores if "(" not in score.metric or score.metric.endswith("(image to text)")]
    place = {"dataset": source, "split": split, "test": test, "decoding": decoding}
    found = (item_scores(score, **place, slices=slices) for score in plain)
    return [scores for scores in found if scores is not None]


def _interval(score: Score, resamples: int, seed: int) -> dict[str, float | None]:
    found = interval(score.evidence, resamples=resamples, seed=seed)
    return {"low": round(found[0], 4), "high": round(found[1], 4)} if found else {"low": None, "high": None}


def data_hash(shards: Path) -> str:
    """What was evaluated on: the shards' manifest and indexes (ids, texts, detector), first 16 hex digits."""
    import hashlib

    files = [shards / "manifest.json", *sorted(shards.glob("index-*.parquet"))]
    return hashlib.sha256("".join(f"{file.name} {hash_file(file)}\n" for file in files).encode()).hexdigest()[:16]


def test_hash(samples: list[Sample], validated: Path) -> str:
    """What was to be predicted: ids, texts, right answers and the images' bytes; first 16 hex digits.

    Neither the detector nor the training data count: models with other features answer the same test.
    """
    import hashlib

    images = read_table("images", validated)
    pixels = dict(zip(images["image_id"].to_pylist(), images["sha256"].to_pylist(), strict=True))
    plain = (replace(sample, regions=None, pixels=None) for sample in samples)
    rows = ([vars(sample), pixels.get(sample.image_id, "")] for sample in sorted(plain, key=lambda s: s.sample_id))
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, ensure_ascii=False).encode() + b"\n")
    return digest.hexdigest()[:16]


def _chunks(dataset: ShardDataset, size: int, description: str) -> Iterator[list[Sample]]:
    from rich.console import Console
    from rich.progress import track

    starts = range(0, len(dataset), max(1, size))
    console = Console(stderr=True)
    for start in track(starts, description, console=console, disable=not sys.stderr.isatty(), transient=True):
        yield [dataset[i] for i in range(start, min(start + max(1, size), len(dataset)))]


@contextmanager
def _status(description: str) -> Iterator[Any]:
    from rich.console import Console

    if not sys.stderr.isatty():
        yield lambda text: None
        return
    with Console(stderr=True).status(description) as status:
        yield lambda text: status.update(f"{description}: {text}")


def _device(params: Params) -> str:
    import torch

    if params.trainer.torch_threads:
        torch.set_num_threads(params.trainer.torch_threads)
    return "cuda" if params.trainer.accelerator != "cpu" and torch.cuda.is_available() else "cpu"


def _peak_memory_mb() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
