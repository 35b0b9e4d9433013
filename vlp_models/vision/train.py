"""Training a detector, or eyes (eyes.py): one plain loop, minutes long.

The same seed, data and thread count give the same weights on a CPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN

from vlp_models.common.progress import progress_bar
from vlp_models.errors import NonFiniteLossError
from vlp_models.vision.images import read_image
from vlp_models.vision.labelled import LabelledImage

Targets = list[dict[str, Tensor]]
Marked = list[tuple[LabelledImage, bool]]  # and whether to mirror it


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    steps: int
    batch_size: int
    lr: float  # peak of AdamW: linear warm-up, cosine decay to zero
    seed: int
    weight_decay: float = 1e-4
    warmup_fraction: float = 0.1
    clip_norm: float = 5.0
    flip: bool = True  # half of the images, left to right


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    losses: dict[str, float]  # mean over the last tenth of the steps
    images_per_second: float
    seconds: float


def train_detector(
    model: FasterRCNN, images: Sequence[LabelledImage], options: TrainingOptions, device: torch.device
) -> TrainingResult:
    """Trains in place and leaves the model in eval mode.

    Raises:
        NonFiniteLossError: before the step, naming the batch's images.
        DataError: an image can't be read.
    """
    torch.manual_seed(options.seed)  # torchvision samples proposals from the global generator
    model.to(device, memory_format=torch.channels_last).train()  # the layout convolutions are quickest in

    def losses(batch: Marked) -> dict[str, Tensor]:
        found: dict[str, Tensor] = model(*_load(batch, device))
        return found

    result = fit(model, losses, images, options, what="the detector", lower="detector.lr")
    model.to(memory_format=torch.contiguous_format).eval()
    return result


def fit(
    model: nn.Module,
    losses_of: Callable[[Marked], dict[str, Tensor]],
    images: Sequence[LabelledImage],
    options: TrainingOptions,
    *,
    what: str,
    lower: str,
) -> TrainingResult:
    """`options.steps` updates of AdamW on the sum of the losses.

    Args:
        losses_of: of a batch, by name.
        what: is trained, for the progress and for errors.
        lower: the setting to lower where training diverges.

    Raises:
        NonFiniteLossError: before the step, naming the batch's images.
    """
    torch.set_flush_denormal(True)  # dying activations are slow on CPUs otherwise
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=options.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, options))
    history: list[dict[str, float]] = []
    start = time.perf_counter()
    with progress_bar(f"training {what}", options.steps, "steps") as bar:
        for batch in batches(images, options):
            losses = losses_of(batch)
            total = torch.stack(list(losses.values())).sum()
            if not torch.isfinite(total):
                raise NonFiniteLossError(
                    f"training {what}: the loss is {total.item()} at step {len(history) + 1}, on images "
                    f"{', '.join(image.image_id for image, _ in batch)}; lower {lower}"
                )
            optimizer.zero_grad(set_to_none=True)
            total.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm)
            optimizer.step()
            schedule.step()
            history.append({"loss": total.item(), **{name: value.item() for name, value in losses.items()}})
            speed = len(history) * options.batch_size / (time.perf_counter() - start)
            bar.advance(f"loss {history[-1]['loss']:.3f}, {speed:.0f} images/s")
    seconds = time.perf_counter() - start
    last = history[-max(1, len(history) // 10) :]
    return TrainingResult(
        losses={name: round(sum(step[name] for step in last) / len(last), 4) for name in last[0]},
        images_per_second=round(options.steps * options.batch_size / seconds, 1),
        seconds=round(seconds, 1),
    )


def first_step(images: Sequence[LabelledImage], options: TrainingOptions, image_ids: Set[str]) -> int | None:
    """The first step, from 1, that has one of these images; None: none has."""
    if not any(image.image_id in image_ids for image in images):
        return None
    for number, batch in enumerate(batches(images, options), start=1):
        if any(image.image_id in image_ids for image, _ in batch):
            return number
    return None


def _rate(step: int, options: TrainingOptions) -> float:
    warmup = max(1, round(options.warmup_fraction * options.steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, options.steps - warmup)))


def batches(images: Sequence[LabelledImage], options: TrainingOptions) -> Iterator[Marked]:
    """Batches of (image, whether to mirror it), every image once before any twice."""
    rng = np.random.default_rng(options.seed)
    order: list[int] = []
    for _ in range(options.steps):
        while len(order) < options.batch_size:
            order += rng.permutation(len(images)).tolist()
        chosen, order = order[: options.batch_size], order[options.batch_size :]
        mirrored = rng.random(len(chosen)) < (0.5 if options.flip else 0.0)
        yield [(images[i], bool(flip)) for i, flip in zip(chosen, mirrored, strict=True)]


def _load(batch: Marked, device: torch.device) -> tuple[list[Tensor], Targets]:
    pixels: list[Tensor] = []
    targets: Targets = []
    for image, flip in batch:
        tensor = read_image(image.path, image.width, image.height).to(device).float() / 255
        boxes = torch.as_tensor(image.boxes, dtype=torch.float32, device=device)
        if flip:
            tensor = tensor.flip(-1)
            boxes = torch.stack([image.width - boxes[:, 2], boxes[:, 1], image.width - boxes[:, 0], boxes[:, 3]], dim=1)
        pixels.append(tensor)
        labels = torch.as_tensor(image.labels, dtype=torch.int64, device=device)
        words = torch.as_tensor(image.words, dtype=torch.float32, device=device)
        targets.append({"boxes": boxes, "labels": labels, "words": words})
    return pixels, targets
