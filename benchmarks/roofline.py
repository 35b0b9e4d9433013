"""How close training steps come to the machine's limit: `OMP_NUM_THREADS=1 python benchmarks/roofline.py`.

The limit is the rate of a large float32 matrix product (sgemm, 1,024 x 1,024) on the same threads. A step is forward
and backward of a preset's pretraining objectives on random inputs, without the optimizer. Counted are the
multiplications and additions of matrix products and convolutions (torch.utils.flop_counter), of texts without padding:
the batch's texts have four lengths, and each quarter is counted by itself. So padding, and everything that is no matrix
product, lowers the share.

`--size demo`: 128 wide, 2 layers, short texts. `middle`: 384 wide, 6 layers. `paper`: the presets' sizes.

Writes benchmarks/results/roofline-<size>-<device>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import dataclass, fields
from typing import Any

import torch
from common import random_regions, write_result
from paper_size import FACTS, RUNS, Run, load_run, random_text
from torch.utils.flop_counter import FlopCounterMode

from vlp_models.data.batch import Batch, Image, Pixels
from vlp_models.data.inputs import RegionInput
from vlp_models.models import DataFacts, build_model
from vlp_models.params import ScheduledSamplingParams
from vlp_models.training.normalization import normalize, total_over_ranks
from vlp_models.training.scheduled_sampling import make_loss

MODELS = ("tden", "unified-vlp", "xgpt", "vlmo-base", "soho")
QUARTERS = (0.5, 0.67, 0.83, 1.0)  # lengths of the texts, in shares of the longest


@dataclass(frozen=True)
class Size:
    """config: of every family; depths: fields that exist in only some. picture: its side; 0: the preset's."""

    config: dict[str, int]
    depths: dict[str, int]
    facts: DataFacts
    regions: int
    tokens: int
    picture: int
    batch: int


def depths(layers: int) -> dict[str, int]:
    own = dict.fromkeys(("layers", "object_layers", "sentence_layers", "encoder_layers", "decoder_layers"), layers)
    return own | {"vl_start": layers - 1}


SMALL = DataFacts(vocab_size=1000, mask_id=103, cls_id=101, sep_id=102, feature_dim=256, num_classes=40)
SIZES = {
    "demo": Size({"hidden": 128, "heads": 4, "intermediate": 512}, depths(2), SMALL, 16, 24, 96, 64),
    "middle": Size({"hidden": 384, "heads": 6, "intermediate": 1536}, depths(6), FACTS, 36, 20, 160, 16),
    "paper": Size({}, {}, FACTS, 100, 20, 0, 4),
}


def make_image(model: Any, images: int, size: Size, run: Run) -> Image:
    if isinstance(model.inputs.image, RegionInput):
        return random_regions(images, size.regions, size.facts.feature_dim, classes=size.facts.num_classes)
    sides = (size.picture, size.picture) if size.picture else run.size
    return Pixels(pixels_B3HW=torch.randn(images, 3, *sides, generator=torch.Generator().manual_seed(1)))


def make_batch(model: Any, section: Any, size: Size, run: Run, lengths: list[int]) -> Batch:
    images, per_image = len(lengths), max(1, section.captions_per_image)
    owner_N = torch.arange(images).repeat_interleave(per_image) if section.captions_per_image else None
    lengths_N = torch.tensor(lengths).repeat_interleave(per_image)
    text = random_text(images * per_image, int(lengths_N.max()), owner_N, lengths_N, size.facts)
    names = tuple(map(str, range(images)))
    return Batch(sample_ids=names, image_ids=names, image=make_image(model, images, size, run), text=text)


def measure(name: str, size: Size, repeats: int) -> dict[str, Any]:
    run = RUNS[name]
    params = load_run(run)
    section, own = params.pretrain[run.name], params.models[params.pretrain[run.name].model]
    config = {**own.config, **size.config}
    torch.manual_seed(0)
    if size.depths:
        original: Any = build_model(own.family, own.config, FACTS)
        known = {field.name for field in fields(original.config)}
        config |= {key: value for key, value in (size.depths | {"side": size.picture}).items() if key in known}
    model: Any = build_model(own.family, config, size.facts).train()
    loss = make_loss(model, section.recipe, ScheduledSamplingParams(), name=section.model)

    def step(batch: Batch, update: int) -> None:
        torch.manual_seed(update)
        model.zero_grad(set_to_none=True)
        found = loss(batch, update=update, generator=torch.Generator().manual_seed(update))
        normalize(found, total_over_ranks(found).counts).backward()

    longest = [max(4, round(share * size.tokens)) for share in QUARTERS]
    quarters = [[length] * (size.batch // len(QUARTERS)) for length in longest]
    whole = make_batch(model, section, size, run, [length for quarter in quarters for length in quarter])
    updates = range(getattr(loss, "updates_per_batch", 1))  # XGPT has an objective per update
    flops = 0
    torch.backends.cuda.enable_flash_sdp(False)  # whose products the counter does not know
    for quarter in quarters:
        batch = make_batch(model, section, size, run, quarter)
        for update in updates:
            with FlopCounterMode(display=False) as counter:
                step(batch, update)
            flops += counter.get_total_flops()
    torch.backends.cuda.enable_flash_sdp(True)
    seconds, limits = [], []
    for number in range(repeats + 1):
        start = time.perf_counter()
        for update in updates:
            step(whole, update)
        seconds.append(time.perf_counter() - start)
        limits.append(sgemm_rate())
        if number == 0:
            seconds.clear()
    rate, limit = flops / statistics.median(seconds), statistics.median(limits)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "images": size.batch,
        "seconds": round(statistics.median(seconds), 4),
        "gflop": round(flops / 1e9, 2),
        "gflop_per_second": round(rate / 1e9, 1),
        "sgemm": round(limit / 1e9, 1),
        "share": round(rate / limit, 3),
    }


def sgemm_rate(side: int = 1024, repeats: int = 5) -> float:
    a, b = torch.randn(side, side), torch.randn(side, side)
    start = time.perf_counter()
    for _ in range(repeats):
        a @ b
    return 2 * side**3 * repeats / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="middle")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--repeats", type=int, default=7)
    parsed = parser.parse_args()
    torch.set_flush_denormal(True)
    record: dict[str, Any] = {
        "claim": "matrix products of a pretraining step, without padding, as a share of the rate of a large sgemm",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "load_average": round(os.getloadavg()[0], 1),
        "models": {},
    }
    for name in parsed.models:
        record["models"][name] = measure(name, SIZES[parsed.size], parsed.repeats)
        print(name, json.dumps(record["models"][name]), flush=True)
    write_result(f"roofline-{parsed.size}-cpu", record)


if __name__ == "__main__":
    main()
