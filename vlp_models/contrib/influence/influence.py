"""Score the training pairs of a run: for its mean loss on a split, or for one of its predictions."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vlp_models.common.device import pick_device
from vlp_models.common.io import hash_path
from vlp_models.common.progress import progress_bar
from vlp_models.common.workspace import Workspace, require_output
from vlp_models.contrib.influence.losses import check_task, pair_losses
from vlp_models.contrib.influence.scores import LR, all_losses, moved_weights
from vlp_models.data.batch import Batch, Image, Regions
from vlp_models.data.sample import Sample
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.tables import read_table
from vlp_models.errors import DataError
from vlp_models.models.protocols import Embeds
from vlp_models.params import FinetuneParams, Params
from vlp_models.params.schema import suggestion
from vlp_models.tasks import TASKS
from vlp_models.tasks.base import TaskModel, implements, load_task_model
from vlp_models.training.optim import Freezing

ANSWERS = 10  # of a VQA question: the predicted one as often as annotators answer one
GALLERY = 100  # test pairs among which the caption of a retrieval prediction is ranked


@dataclass(frozen=True, kw_only=True)
class Query:
    """What the pairs are scored for.

    title   `val`, or the prediction in words
    image_id  of a prediction; empty: a split
    batches, losses  whose mean loss is explained; `batches` may be called more than once
    """

    title: str
    batches: Callable[[], Iterable[Batch]]
    losses: Callable[[TaskModel, Batch], Tensor] = pair_losses
    image_id: str = ""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Pairs by falling score. One with a positive score lowers the loss.

    task     of the run
    rows     pair_id, image_id, text, path, score
    nearest  of a prediction: a pair of each of the images that are most alike to its own, with `similarity`, the cosine
             of the model's embeddings, else of the mean region features; empty if the model has neither
    """

    run: str
    task: str
    query: Query
    rows: list[dict[str, Any]]
    nearest: Sequence[dict[str, Any]] = ()


def resolve_run(params: Params, workspace: Workspace, name: str) -> str:
    """Return the fine-tuning run that `name` is, or whose checkpoint here is that of the version `name`.

    Raises:
        DataError: neither; names the way out.
    """
    if name in params.finetune:
        return name
    if name not in TASKS and not {"/", "@"} & set(name):
        nearest = suggestion(name, params.finetune)
        raise DataError(f"{name}: no fine-tuning run, and no version such as vlp-vqa/3{nearest}")
    from vlp_models.registry.client import connect, mlflow_errors
    from vlp_models.registry.versions import resolve_version

    with mlflow_errors(params):
        version = resolve_version(connect(params.tracking, workspace.root), params.tracking, name)
    run, full_name = version.tags.get("run", ""), f"{version.name}/{version.version}"
    checkpoint = workspace.checkpoint(f"finetune/{run}")
    if run not in params.finetune or not checkpoint.exists() or not _is_of(version.tags, hash_path(checkpoint)):
        raise DataError(
            f"{full_name}: the run {run} here has another checkpoint; `vlp lineage {full_name}` lists the commands "
            "that make that of the version again"
        )
    return run


def _is_of(tags: Mapping[str, str], checkpoint: str) -> bool:
    # The tag starts with the 64 hexadecimal digits of the checkpoint's hash.
    return tags.get("weights", "")[:64] == checkpoint


def score_run(
    params: Params, workspace: Workspace, run: str, *, split: str = "val", prediction: str = "", seed: int = 1
) -> Scored:
    """Score every training pair of a run.

    Args:
        split: whose mean loss is explained, unless `prediction` names one of the evaluation's predictions.
        seed: of the order that batches are made in; of importance to retrieval alone, whose negatives they are.

    Raises:
        DataError: the run is not trained or evaluated, is trained on blank images, its task has no loss of a pair, or
            there is no such prediction.
    """
    p = params.finetune[run]
    if p.blank_images:
        raise DataError(f"finetune.{run}: is trained on blank images; vlp influence reads the real ones")
    device = pick_device(params.trainer.accelerator, params.trainer.torch_threads)
    task = load_task_model(require_output(workspace.checkpoint(f"finetune/{run}"), f"finetune@{run}"), device)
    check_task(task, f"finetune.{run}")
    Freezing(task, {name: group for name, group in p.optimizer.groups.items() if group.frozen})
    task.eval()
    pairs = open_pairs(task, workspace, p, "train")
    if prediction:
        query = _read_prediction(params, workspace, run, task, prediction)
    else:
        query = _read_split(task, workspace, p, split, seed)
    order = np.random.default_rng(seed).permutation(len(pairs))
    scores = np.zeros(len(pairs))
    batches = partial(read_batches, task, pairs, order, _batch_size(p))
    scores[order] = score_pairs(task, batches, query, len(pairs), lr=LR * p.optimizer.lr)
    rows = _list_rows(workspace, task, p, scores)
    nearest = find_nearest(task, query, batches, rows)
    return Scored(run=run, task=task.task, query=query, rows=rows, nearest=nearest)


def score_pairs(
    task: TaskModel, batches: Callable[[], Iterable[Batch]], query: Query, count: int, *, lr: float
) -> NDArray[np.float64]:
    """Return how much the loss of each of the `count` pairs falls by training on the query, in the batches' order.

    Raises:
        DataError: a loss is not finite.
    """
    with progress_bar("losses", 2 * count, "pairs") as progress:

        def counted() -> Iterator[Batch]:
            for batch in batches():
                yield batch
                progress.advance(by=len(batch))

        before = all_losses(task, counted(), pair_losses)
        with moved_weights(task, query.batches, query.losses, lr=lr):
            scores = before - all_losses(task, counted(), pair_losses)
    if not np.isfinite(scores).all():
        raise DataError("the loss of a pair is not finite, so pairs cannot be ranked; was the run trained to the end?")
    return scores


@torch.no_grad()
def find_nearest(
    task: TaskModel, query: Query, batches: Callable[[], Iterable[Batch]], rows: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the row of one pair of each training image, the most similar image first; nothing for a split."""
    if not query.image_id:
        return []
    image = next(iter(query.batches())).image
    if not implements(task.model, Embeds) and not isinstance(image, Regions):
        return []

    def embed(image: Image) -> Tensor:
        if implements(task.model, Embeds):
            return cast(Embeds, task.model).embed_image(image)
        return cast(Regions, image).pooled_BF()

    query_E = embed(image)[0]  # a retrieval query's first pair is the prediction
    similarity: dict[str, float] = {}
    for batch in batches():
        similarity |= zip(batch.image_ids, (embed(batch.image) @ query_E).tolist(), strict=True)
    pair_of = {row["image_id"]: row for row in rows[::-1]}  # of an image's pairs the one with the highest score
    nearest = [{**pair_of[name], "similarity": similarity[name]} for name in similarity]
    return sorted(nearest, key=lambda row: -row["similarity"])


# ---- What is read -------------------------------------------------------------------------------------------------


def open_pairs(task: TaskModel, workspace: Workspace, p: FinetuneParams, split: str) -> ShardDataset:
    """Return a split's pairs, each once, of the datasets that the run trains on (train) or is evaluated on.

    Raises:
        DataError: there are none.
    """
    sources = p.sources if split == "train" else p.evaluate_on or p.sources
    pairs = ShardDataset(workspace.shards, split, task.view, dict.fromkeys(sources, 1), **task.reader.flags)
    if not len(pairs):
        raise DataError(f"{workspace.shards}: no {task.view} in the split {split}")
    return pairs


def read_batches(task: TaskModel, pairs: ShardDataset, order: NDArray[np.int64], size: int) -> Iterator[Batch]:
    """Yield the pairs in this order, on the model's device."""
    device = next(task.parameters()).device
    for start in range(0, len(order), size):
        samples = [pairs[int(number)] for number in order[start : start + size]]
        yield task.collate(samples).to(device)


def _batch_size(p: FinetuneParams) -> int:
    return max(p.batch_size, 8)  # retrieval compares the pairs of a batch


def _read_split(task: TaskModel, workspace: Workspace, p: FinetuneParams, split: str, seed: int) -> Query:
    pairs = open_pairs(task, workspace, p, split)
    order = np.random.default_rng(seed).permutation(len(pairs))
    return Query(title=split, batches=partial(read_batches, task, pairs, order, _batch_size(p)))


def _read_prediction(params: Params, workspace: Workspace, run: str, task: TaskModel, name: str) -> Query:
    """Return the loss of one prediction: of the caption or answer that the model gave, or of a caption's retrieval."""
    p, folder = params.finetune[run], require_output(workspace.evaluation(run), f"evaluate@{run}")
    view = task.view if task.task == "retrieval" else task.prediction_view
    for file in sorted(folder.glob("predictions-*.jsonl")):
        split = file.stem.partition("-")[2]
        sources = dict.fromkeys(p.evaluate_on or p.sources, 1)
        texts = ShardDataset(workspace.shards, split, view, sources, regions=False, pixels=False)
        number = next((i for i in range(len(texts)) if texts[i].sample_id == name), None)
        if number is None:
            continue
        dataset = ShardDataset(workspace.shards, split, view, sources, **task.reader.flags)
        sample = dataset[number]
        if task.task == "retrieval":
            others = [i for i in range(len(dataset)) if i != number][:GALLERY]
            samples = [sample, *(dataset[i] for i in others)]
            title, first = f"{sample.text!r} of {sample.image_id}", True
        else:
            with file.open(encoding="utf-8") as lines:
                record = next((row for row in map(json.loads, lines) if row[task.id_key] == name), None)
            if record is None:  # the split has grown since the evaluation
                continue
            sample, title = _as_predicted(task, sample, record)
            samples, first = [sample], False
        batch = task.collate(samples).to(next(task.parameters()).device)
        losses = (lambda task, batch: pair_losses(task, batch)[:1]) if first else pair_losses
        return Query(title=title, batches=partial(list, [batch]), losses=losses, image_id=sample.image_id)
    example = open_pairs(task, workspace, p, "test")[0]
    example_id = example.image_id if task.id_key == "image_id" else example.sample_id
    raise DataError(f"{folder}: no prediction for {name!r}; name an id of predictions-*.jsonl, such as {example_id}")


def _as_predicted(task: TaskModel, sample: Sample, record: Mapping[str, Any]) -> tuple[Sample, str]:
    """Return the sample with the prediction in place of its references, and a title."""
    if task.task == "captioning":
        return dataclasses.replace(sample, text=record["caption"]), f"{record['caption']!r} for {sample.image_id}"
    values = {**sample.values, "answers": (record["answer"],) * ANSWERS}
    title = f"{record['answer']!r} to {sample.text!r}, {sample.image_id} (annotators: {_answer(sample)!r})"
    return dataclasses.replace(sample, values=values), title


def _describe(sample: Sample) -> str:
    """Return a caption, or a question with its answer."""
    return f"{sample.text} {_answer(sample)}" if "answers" in sample.values else sample.text


def _answer(sample: Sample) -> str:
    return Counter(sample["answers"]).most_common(1)[0][0] if sample["answers"] else ""


def _list_rows(
    workspace: Workspace, task: TaskModel, p: FinetuneParams, scores: NDArray[np.float64]
) -> list[dict[str, Any]]:
    sources = dict.fromkeys(p.sources, 1)
    texts = ShardDataset(workspace.shards, "train", task.view, sources, regions=False, pixels=False)
    images = read_table("images", workspace.validated, ["image_id", "path"]).to_pylist()
    path_of = {row["image_id"]: row["path"] for row in images}
    rows = []
    for number, score in enumerate(scores):
        sample = texts[number]
        row = {"pair_id": sample.sample_id, "image_id": sample.image_id, "text": _describe(sample)}
        # Without a pair, all of its repeats in an epoch are missing. No sources: every dataset, once.
        repeats = p.sources.get(sample.source, 1)
        rows.append({**row, "path": path_of.get(sample.image_id, ""), "score": repeats * float(score)})
    return sorted(rows, key=lambda row: -row["score"])
