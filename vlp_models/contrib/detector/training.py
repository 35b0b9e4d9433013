"""Labeled images, and the training loop for detectors and vision warm-up: one plain loop of a few minutes.

On a CPU, the same seed, data and thread count give the same weights; in portable mode (common/portable.py) the number
of processors makes no difference.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vlp_models.common.device import cpu_count
from vlp_models.common.portable import is_portable
from vlp_models.common.progress import progress_bar
from vlp_models.contrib.detector.faster_rcnn import SeededSampler
from vlp_models.contrib.detector.torchvision_parts import FasterRCNN
from vlp_models.errors import NonFiniteLossError
from vlp_models.vision.batch_norm import fix_batch_norm_gradients
from vlp_models.vision.image_io import read_image
from vlp_models.vision.region_source import object_words

# ---- Labeled images ----------------------------------------------------------------------------------------------

Rows = Sequence[Mapping[str, Any]]  # of boxed.parquet (data/joins.py)


@dataclass(frozen=True, kw_only=True)
class LabeledImage:
    """An image and its objects.

    boxes   float32 [N, 4] in pixels, x1 y1 x2 y2
    labels  int64 [N]; 1 is the first class
    words   float32 [N, W]; 1 if the word applies to the object
    """

    image_id: str
    path: Path
    width: int
    height: int
    boxes: np.ndarray
    labels: np.ndarray
    words: np.ndarray


def categories_of(rows: Rows) -> tuple[str, ...]:
    """Return the category names of all objects, sorted."""
    return tuple(sorted({item["category"] for row in rows for item in row["objects"]}))


def words_of(rows: Rows) -> tuple[str, ...]:
    """Return the words of all objects' categories and attributes, sorted."""
    return tuple(sorted({word for row in rows for item in row["objects"] for word in object_words(item)}))


def labeled_images(
    rows: Rows, split: str, categories: Sequence[str], words: Sequence[str], root: Path
) -> list[LabeledImage]:
    """Return the images of a split that have objects of these categories, each with only those objects, in order.

    Args:
        root: folder that the rows' paths are relative to.
    """
    label_of = {name: number for number, name in enumerate(categories, start=1)}
    images = []
    for row in rows:
        if row["split"] != split:
            continue
        objects = [item for item in row["objects"] if item["category"] in label_of]
        boxes = np.array([[item["x1"], item["y1"], item["x2"], item["y2"]] for item in objects], np.float32)
        # (N, 4), also without objects; clipped to the image
        boxes = boxes.reshape(-1, 4).clip(0, np.array([row["width"], row["height"]] * 2, np.float32))
        inside = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)  # validation allows boxes slightly outside the image
        labels = np.array([label_of[item["category"]] for item in objects], np.int64)
        # (N, W): which words of all categories and attributes apply to each object
        word_labels = np.zeros((len(objects), len(words)), np.float32)
        for number, item in enumerate(objects):
            word_labels[number] = [word in object_words(item) for word in words]
        if inside.any():
            images.append(
                LabeledImage(
                    image_id=row["image_id"],
                    path=root / row["path"],
                    width=row["width"],
                    height=row["height"],
                    boxes=boxes[inside],
                    labels=labels[inside],
                    words=word_labels[inside],
                )
            )
    return images


# ---- The training loop -------------------------------------------------------------------------------------------

FlipBatch = list[tuple[LabeledImage, bool]]  # images, and whether to flip each horizontally


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    steps: int
    batch_size: int
    lr: float  # peak of AdamW's: linear warm-up, cosine decay to zero
    seed: int
    weight_decay: float = 1e-4
    warmup_fraction: float = 0.1
    clip_norm: float = 5.0
    flip: bool = True  # flip half of the images horizontally


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    losses: dict[str, float]  # means over the last tenth of the steps
    images_per_second: float
    seconds: float


def fit(
    model: nn.Module,
    backward: Callable[[FlipBatch], Mapping[str, float]],
    images: Sequence[LabeledImage],
    options: TrainingOptions,
    *,
    model_name: str,
    lr_key: str,
) -> TrainingResult:
    """Run `options.steps` updates of AdamW on the sum of the losses.

    Args:
        backward: adds the gradients of a batch's losses to those of the parameters, and returns the losses by name.
        model_name: for the progress bar and errors.
        lr_key: the key in params.yaml to lower if training diverges.

    Raises:
        NonFiniteLossError: before the step, with the ids of the batch's images.
    """
    torch.set_flush_denormal(True)  # vanishing activations are slow on CPUs otherwise
    fix_batch_norm_gradients(model)  # a detector's, and those of a head for the warm-up
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=options.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _lr_factor(step, options))
    history: list[dict[str, float]] = []
    start = time.perf_counter()
    with progress_bar(f"training {model_name}", options.steps, "steps") as bar:
        for batch in batches(images, options):
            optimizer.zero_grad(set_to_none=True)
            losses = backward(batch)
            total = sum(losses.values())
            if not math.isfinite(total):
                raise NonFiniteLossError(
                    f"training {model_name}: the loss is {total} at step {len(history) + 1}, on images "
                    f"{', '.join(image.image_id for image, _ in batch)}; lower {lr_key}"
                )
            torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm)
            optimizer.step()
            schedule.step()
            history.append({"loss": total, **losses})
            speed = len(history) * options.batch_size / (time.perf_counter() - start)
            bar.advance(f"loss {total:.3f}, {speed:.0f} images/s")
    seconds = time.perf_counter() - start
    # One step's loss is mostly noise, so the result is a mean over many.
    last_tenth = history[-max(1, len(history) // 10) :]
    losses = {}
    for name in last_tenth[0]:
        losses[name] = round(sum(step[name] for step in last_tenth) / len(last_tenth), 4)
    return TrainingResult(
        losses=losses,
        images_per_second=round(options.steps * options.batch_size / seconds, 1),
        seconds=round(seconds, 1),
    )


def backward_of(losses: Mapping[str, Tensor], weight: float = 1.0) -> dict[str, float]:
    """Add the gradients of the losses, each times `weight`, to those of the parameters; return the losses."""
    (weight * torch.stack(list(losses.values())).sum()).backward()
    return {name: value.item() for name, value in losses.items()}


def batches(images: Sequence[LabeledImage], options: TrainingOptions) -> Iterator[FlipBatch]:
    """Yield `options.steps` batches; each image is used once before any is used again."""
    rng = np.random.default_rng(options.seed)
    order: list[int] = []
    for _ in range(options.steps):
        # A new pass over the images in a new order; what is left of the last pass comes first.
        while len(order) < options.batch_size:
            order += rng.permutation(len(images)).tolist()
        batch, order = order[: options.batch_size], order[options.batch_size :]
        # Drawn even if none is flipped, so that the order of the images is the same with and without flips.
        flips = rng.random(len(batch)) < (0.5 if options.flip else 0.0)
        yield [(images[i], bool(flip)) for i, flip in zip(batch, flips, strict=True)]


def first_step(images: Sequence[LabeledImage], options: TrainingOptions, image_ids: Set[str]) -> int | None:
    """Return the first step, from 1, whose batch contains one of these images; None if no batch does."""
    if not any(image.image_id in image_ids for image in images):
        return None
    for number, batch in enumerate(batches(images, options), start=1):
        if any(image.image_id in image_ids for image, _ in batch):
            return number
    return None


def _lr_factor(step: int, options: TrainingOptions) -> float:
    # Linear from 1 / warmup to 1, then half a cosine down to 0.
    warmup = max(1, round(options.warmup_fraction * options.steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, options.steps - warmup)))


# ---- Detectors ---------------------------------------------------------------------------------------------------


def train_detector(
    model: FasterRCNN, images: Sequence[LabeledImage], options: TrainingOptions, device: torch.device
) -> TrainingResult:
    """Train a detector in place and leave it in eval mode.

    Raises:
        NonFiniteLossError: before the step, with the ids of the batch's images.
        DataError: an image can't be read.
    """
    model.to(device, memory_format=torch.channels_last).train()  # the fastest layout for convolutions
    fix_batch_norm_gradients(model)
    with _Halves(model, options.seed, device) as halves:
        result = fit(model, halves.backward, images, options, model_name="the detector", lr_key="detector.lr")
    model.to(memory_format=torch.contiguous_format).eval()
    return result


class _Halves:
    """A detector and a copy of it with the same parameters, which compute one half of every batch each.

    In portable mode (common/portable.py), where an operation has one thread, two processors compute the halves at the
    same time. One processor computes the first half, then the second, with the same results, bit for bit: a half has
    its own random generator, its own gradients and its own statistics of batch norm.

    torchvision's losses are means over a batch's samples; here the mean over the halves, weighted by their images.
    Batch norm normalizes a half by its own statistics, as if it were on a device of its own; the running statistics
    are the means of the halves'. A batch of one image has one half.
    """

    def __init__(self, model: FasterRCNN, seed: int, device: torch.device) -> None:
        self._models = [model, copy.deepcopy(model)]
        # The copy reads the model's weights; only gradients and buffers are its own.
        for copied, parameter in zip(self._models[1].parameters(), model.parameters(), strict=True):
            copied.data = parameter.data
        for number, half in enumerate(self._models):
            # Seeds 2 s and 2 s + 1: no two halves of trainings with different seeds share one.
            generator = torch.Generator().manual_seed(2 * seed + number)
            for part in (half.rpn, half.roi_heads):
                part.fg_bg_sampler = SeededSampler(part.fg_bg_sampler, generator)
        self._device = device
        # Without portable mode an operation uses all cores itself, so the halves run one after the other.
        threads = cpu_count(2) if is_portable() and device.type == "cpu" else 1
        self._pool = ThreadPoolExecutor(threads, initializer=torch.set_flush_denormal, initargs=(True,))
        self._map = map if threads == 1 else self._pool.map

    def __enter__(self) -> _Halves:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown()

    def backward(self, batch: FlipBatch) -> dict[str, float]:
        """Leave the gradients of the batch's losses in the parameters of the model; return the losses."""
        middle = (len(batch) + 1) // 2
        halves = [half for half in (batch[:middle], batch[middle:]) if half]
        # Of a batch of odd size, the first half has one image more, and so more weight.
        weights = [len(half) / len(batch) for half in halves]
        # `map` and the pool's stop at the shortest list, so a single half uses the model alone.
        losses = list(self._map(self._backward_half, self._models, halves, weights))
        if len(halves) == 2:
            self._merge()
        means = {}
        for name in losses[0]:
            means[name] = sum(weight * half[name] for weight, half in zip(weights, losses, strict=True))
        return means

    def _backward_half(self, model: FasterRCNN, half: FlipBatch, weight: float) -> dict[str, float]:
        return backward_of(model(*_load_examples(half, self._device)), weight)

    def _merge(self) -> None:
        """Add the copy's gradients to the model's, and give both the means of their running statistics."""
        model, replica = self._models
        for parameter, copied in zip(model.parameters(), replica.parameters(), strict=True):
            # A half without gradients adds none: a head without a sample of its kind, or frozen layers.
            if parameter.grad is None:
                parameter.grad = copied.grad
            elif copied.grad is not None:
                parameter.grad += copied.grad
            copied.grad = None
        for buffer, copied in zip(model.buffers(), replica.buffers(), strict=True):
            if buffer.is_floating_point():  # not the count of batches, which is the same in both
                buffer.add_(copied).div_(2)
                copied.copy_(buffer)


def _load_examples(batch: FlipBatch, device: torch.device) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Return the images, float32 [3, H, W] from 0 to 1, and their targets: boxes, labels and words."""
    pixels: list[Tensor] = []
    targets: list[dict[str, Tensor]] = []
    for image, flip in batch:
        tensor = read_image(image.path, image.width, image.height).to(device).float() / 255
        boxes = torch.as_tensor(image.boxes, dtype=torch.float32, device=device)
        if flip:
            # The right edge of a box becomes its left one.
            tensor = tensor.flip(-1)
            x1, y1, x2, y2 = boxes.unbind(1)
            boxes = torch.stack([image.width - x2, y1, image.width - x1, y2], dim=1)
        pixels.append(tensor)
        labels = torch.as_tensor(image.labels, dtype=torch.int64, device=device)
        words = torch.as_tensor(image.words, dtype=torch.float32, device=device)
        targets.append({"boxes": boxes, "labels": labels, "words": words})
    return pixels, targets


def average_precision(
    model: FasterRCNN, images: Sequence[LabeledImage], classes: Sequence[str], device: torch.device, batch_size: int
) -> dict[str, float]:
    """Return COCO's AP (mean over IoU 0.5 to 0.95), AP50, AP75 and AR (100 detections per image), in percent.

    Args:
        classes: names, background first; labels of `images` are indices into it.
    """
    detections: list[dict[str, Any]] = []
    sizes = [(image.height, image.width) for image in images]
    model.to(device).eval()
    with torch.inference_mode(), progress_bar("average precision", len(images), "images") as bar:
        for numbers in batches_by_size(sizes, batch_size):
            rows = [images[number] for number in numbers]
            pixels = [read_image(row.path, row.width, row.height).to(device).float() / 255 for row in rows]
            for number, detected in zip(numbers, model(pixels), strict=True):
                boxes = detected["boxes"].cpu().clone()
                boxes[:, 2:] -= boxes[:, :2]  # x1 y1 x2 y2 -> x y width height
                columns = boxes.tolist(), detected["labels"].tolist(), detected["scores"].tolist()
                for box, label, score in zip(*columns, strict=True):
                    detections.append({"image_id": number, "category_id": label, "bbox": box, "score": score})
            bar.advance(by=len(numbers))
    return _score_coco(images, classes, detections)


def batches_by_size(sizes: Sequence[tuple[int, int]], batch_size: int) -> Iterator[list[int]]:
    """Yield positions in batches of images of one size; padding would change the smaller images' detections."""
    order = sorted(range(len(sizes)), key=lambda number: sizes[number])
    for _, group in groupby(order, key=lambda number: sizes[number]):
        numbers = list(group)
        for start in range(0, len(numbers), batch_size):
            yield numbers[start : start + batch_size]


def _score_coco(
    images: Sequence[LabeledImage], classes: Sequence[str], detections: list[dict[str, Any]]
) -> dict[str, float]:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    annotations: list[dict[str, Any]] = []
    for number, image in enumerate(images):
        for box, label in zip(image.boxes.tolist(), image.labels.tolist(), strict=True):
            width, height = box[2] - box[0], box[3] - box[1]
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": label,
                    "bbox": [box[0], box[1], width, height],
                    "area": width * height,
                    "iscrowd": 0,
                }
            )
    positions = {"AP": 0, "AP50": 1, "AP75": 2, "AR": 8}  # in COCOeval.stats
    # `loadRes` does not accept an empty list.
    if not detections:
        return dict.fromkeys(positions, 0.0)
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its own report
        truth = COCO()
        truth.dataset["images"] = [
            {"id": n, "width": image.width, "height": image.height} for n, image in enumerate(images)
        ]
        truth.dataset["annotations"] = annotations
        truth.dataset["categories"] = [{"id": n, "name": name} for n, name in enumerate(classes) if n]  # 0: background
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(detections), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return {name: round(100 * float(evaluation.stats[position]), 2) for name, position in positions.items()}
