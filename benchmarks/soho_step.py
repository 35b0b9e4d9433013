"""Time a pretraining step of SOHO, forward and backward, against one that copies images before the neck and projects
every position onto the vocabulary (soho_expanded.py). Two texts per image and two of others, as in the paper.

    OMP_NUM_THREADS=2 python benchmarks/soho_step.py

Losses and gradients are compared first. The two then alternate, so that other load on the machine affects both.
Writes benchmarks/results/soho_step-<device>.json.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from common import write_result
from soho_expanded import expanded_losses
from torch import Tensor

from vlp_models.data.batch import Batch, Pixels, Text
from vlp_models.models import DataFacts, build_model
from vlp_models.models.soho.model import SOHO

VOCAB, TOKENS, TEXTS = 30522, 16, 2
CONFIG = {"height": 1024, "width": 1024, "backbone": "resnet18", "layers": 3}  # of the paper's ablations
CONFIG |= {"dropout": 0.0, "attention_dropout": 0.0}
MASKED = 0.15


def random_batch(images: int, height: int, width: int) -> Batch:
    """Return landscape images, padded to whole cells as in the public code, and texts of 8 to 16 tokens."""
    generator = torch.Generator().manual_seed(0)
    rows = images * TEXTS
    lengths = torch.randint(TOKENS // 2, TOKENS + 1, (rows, 1), generator=generator)
    padded = [32 * -(-side // 32) for side in (height, width)]
    mask_BHW = torch.zeros(images, *padded, dtype=torch.bool)
    mask_BHW[:, :height, :width] = True
    pixels = torch.randn(images, 3, *padded, generator=generator) * mask_BHW[:, None]
    names = tuple(map(str, range(images)))
    return Batch(
        sample_ids=names,
        image_ids=names,
        image=Pixels(pixels_B3HW=pixels, mask_BHW=mask_BHW),
        text=Text(
            ids_BT=torch.randint(104, VOCAB, (rows, TOKENS), generator=generator),
            mask_BT=torch.arange(TOKENS) < lengths,
            owner_N=torch.arange(images).repeat_interleave(TEXTS),
        ),
    )


def ours(model: SOHO, batch: Batch) -> dict[str, Tensor]:
    losses = model.pretraining_losses(
        batch,
        objectives=dict.fromkeys(model.objectives),
        generator=torch.Generator().manual_seed(1),
        mask_probability=MASKED,
    )
    assert model.dictionary is not None
    model.dictionary._accumulated = None  # both start from the same codes
    return {name: loss.mean for name, loss in losses.items()}


def expanded(model: SOHO, batch: Batch) -> dict[str, Tensor]:
    return expanded_losses(model, batch, torch.Generator().manual_seed(1), MASKED)


def check(model: SOHO, batch: Batch) -> dict[str, float]:
    """Compare losses and gradients in float64, where only the order of sums differs; return the largest differences."""
    assert isinstance(batch.image, Pixels)
    exact = model.double()
    wide = replace(batch, image=replace(batch.image, pixels_B3HW=batch.image.pixels_B3HW.double()))
    found = []
    for step in (ours, expanded):
        exact.zero_grad()
        losses = step(exact, wide)
        torch.stack(list(losses.values())).sum().backward()
        found.append((losses, {name: p.grad.clone() for name, p in exact.named_parameters() if p.grad is not None}))
    (a, one), (b, other) = found
    loss = max(float((a[name] - b[name]).detach().abs()) for name in a)
    gradient = max(float((one[name] - other[name]).abs().max() / other[name].abs().max()) for name in one)
    assert loss < 1e-9 and gradient < 1e-6, (loss, gradient)
    exact.float().zero_grad()
    return {"loss": loss, "gradient, relative": gradient}


def seconds(step: Callable[[SOHO, Batch], dict[str, Tensor]], model: SOHO, batch: Batch) -> float:
    model.zero_grad()
    start = time.perf_counter()
    torch.stack(list(step(model, batch).values())).sum().backward()
    if next(model.parameters()).is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main(device: torch.device, images: int, height: int, width: int, repeats: int) -> None:
    torch.manual_seed(0)
    model = build_model("soho", {**CONFIG, "mvm_probability": 1.0}, DataFacts(vocab_size=VOCAB, mask_id=103))
    assert isinstance(model, SOHO)
    model.to(device).train()
    differences = check(model, random_batch(2, 100, 160).to(device))
    batch = random_batch(images, height, width).to(device)
    times: dict[str, list[float]] = {"ours": [], "expanded": []}
    for repeat in range(repeats + 1):
        for name, step in (("ours", ours), ("expanded", expanded)):
            took = seconds(step, model, batch)
            if repeat:  # the first one warms up
                times[name].append(took)
    ratios = [slow / fast for slow, fast in zip(times["expanded"], times["ours"], strict=True)]
    result = {
        "device": str(device),
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "images": images,
        "pixels": [height, width],
        "texts": 2 * TEXTS * images,
        "largest differences": differences,
        "seconds": {name: statistics.median(values) for name, values in times.items()},
        "times as fast, median of pairs": statistics.median(ratios),
        "times as fast, lowest and highest": [min(ratios), max(ratios)],
    }
    print(write_result(f"soho_step-{device.type}", result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, default=2)
    parser.add_argument("--height", type=int, default=600)
    parser.add_argument("--width", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    main(torch.device(given.device), given.images, given.height, given.width, given.repeats)
