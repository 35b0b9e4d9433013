"""How close training and decoding come to the machine's limit: `OMP_NUM_THREADS=1 python benchmarks/roofline.py`.

Steps: the limit is the rate of a large float32 matrix product (sgemm, 1,024 x 1,024) on the same threads. A step is
forward and backward of a preset's pretraining objectives, or with `--work vqa` of question answering over 3,000
answers, on random inputs, without the optimizer. Counted are the multiplications and additions of matrix products and
convolutions (torch.utils.flop_counter), of texts without padding: the batch's texts have four lengths, and each quarter
is counted by itself. So padding, and everything that is no matrix product, lowers the share.

`--work decoding`: a step of beam search with five hypotheses for one image must read every weight that it uses and the
attention's cache once. The limit is the rate at which one large array is summed. Steps are timed at half of a
sentence of 20 words, without the search's own bookkeeping.

`--size demo`: 128 wide, 2 layers, short texts. `middle`: 384 wide, 6 layers. `paper`: the presets' sizes.

Writes benchmarks/results/roofline-<size>-cpu.json; for other work roofline-<work>-<size>-cpu.json.
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
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vlp_models.data.batch import Batch, Image, Pixels
from vlp_models.data.inputs import RegionInput
from vlp_models.models import DataFacts, build_model
from vlp_models.models.protocols import Fuses, Generates
from vlp_models.params import ScheduledSamplingParams
from vlp_models.training.normalization import normalize, total_over_ranks
from vlp_models.training.scheduled_sampling import make_loss

ANSWERS, BEAM, WORDS = 3000, 5, 20
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


def build(name: str, size: Size) -> tuple[Any, Run, Any]:
    """Return a preset's model at a size, its run, and the run's section of params.yaml."""
    run = RUNS[name]
    params = load_run(run)
    section, own = params.pretrain[run.name], params.models[params.pretrain[run.name].model]
    config = {**own.config, **size.config}
    torch.manual_seed(0)
    if size.depths:
        original: Any = build_model(own.family, own.config, FACTS)
        known = {field.name for field in fields(original.config)}
        config |= {key: value for key, value in (size.depths | {"side": size.picture}).items() if key in known}
    return build_model(own.family, config, size.facts), run, section


def measure_step(name: str, size: Size, repeats: int, work: str) -> dict[str, Any]:
    """Return the rate of a pretraining step, or of a step of question answering, and its share of the limit."""
    model, run, section = build(name, size)
    model.train()
    if work == "vqa":
        answer = nn.Linear(model.fused_dim, ANSWERS)
        updates = range(1)
    else:
        loss = make_loss(model, section.recipe, ScheduledSamplingParams(), name=section.model)
        updates = range(getattr(loss, "updates_per_batch", 1))  # XGPT has an objective per update

    def step(batch: Batch, update: int) -> None:
        torch.manual_seed(update)
        model.zero_grad(set_to_none=True)
        if work == "vqa":
            logits_BA = answer(model.fuse(batch.image, batch.text).pooled_BP)
            nn.functional.binary_cross_entropy_with_logits(logits_BA, torch.zeros_like(logits_BA)).backward()
        else:
            found = loss(batch, update=update, generator=torch.Generator().manual_seed(update))
            normalize(found, total_over_ranks(found).counts).backward()

    longest = [max(4, round(share * size.tokens)) for share in QUARTERS]
    quarters = [[length] * (size.batch // len(QUARTERS)) for length in longest]
    whole = make_batch(model, section, size, run, [length for quarter in quarters for length in quarter])
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


@torch.no_grad()
def measure_decoding(name: str, size: Size, repeats: int) -> dict[str, Any]:
    """Return the rate at which decoding reads weights and cache, and its share of the limit."""
    model, run, _ = build(name, size)
    model.eval()
    state = model.start(make_image(model, 1, size, run), max_len=WORDS)
    state = model.reorder(state, torch.zeros(BEAM, dtype=torch.int64))
    word_N = torch.full((BEAM,), 7)
    for _ in range(WORDS // 2):
        _, state = model.step(word_N, state)
    used: dict[int, int] = {}

    def note(module: nn.Module, *_: Any) -> None:
        for weight in module.parameters(recurse=False):
            if not isinstance(module, nn.Embedding):  # a step reads rows of it
                used[weight.data_ptr()] = weight.nbytes

    hooks = [module.register_forward_hook(note) for module in model.modules()]
    used |= {weight.data_ptr(): weight.nbytes for weight in head_weights(model, size.facts.vocab_size)}
    model.step(word_N, state)
    for hook in hooks:
        hook.remove()
    weights, cache = sum(used.values()), sum(tensor.nbytes for tensor in tensors_in(state).values())
    seconds, limits = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(5):
            model.step(word_N, state)
        seconds.append((time.perf_counter() - start) / 5)
        limits.append(stream_rate())
    rate, limit = (weights + cache) / statistics.median(seconds), statistics.median(limits)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "milliseconds": round(1000 * statistics.median(seconds), 2),
        "megabytes_of_weights": round(weights / 1e6, 1),
        "megabytes_of_cache": round(cache / 1e6, 1),
        "gigabytes_per_second": round(rate / 1e9, 1),
        "stream": round(limit / 1e9, 1),
        "share": round(rate / limit, 3),
    }


def head_weights(model: nn.Module, vocabulary: int) -> list[torch.Tensor]:
    """Return the weights that predict words: the embedding's, which the head shares and calls as a function."""
    return [weight for weight in model.parameters() if weight.ndim == 2 and len(weight) == vocabulary]


def tensors_in(value: Any) -> dict[int, torch.Tensor]:
    """Return the tensors in a decoding state, each memory once."""
    if isinstance(value, torch.Tensor):
        return {value.data_ptr(): value}
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        value = list(vars(value).values()) if hasattr(value, "__dict__") else []
    return {key: tensor for one in value for key, tensor in tensors_in(one).items()}


def stream_rate(megabytes: int = 512) -> float:
    """Return the bytes per second at which a large array is summed."""
    array = torch.ones(megabytes * 250_000)
    start = time.perf_counter()
    array.sum()
    return array.nbytes / (time.perf_counter() - start)


def sgemm_rate(side: int = 1024, repeats: int = 5) -> float:
    a, b = torch.randn(side, side), torch.randn(side, side)
    start = time.perf_counter()
    for _ in range(repeats):
        a @ b
    return 2 * side**3 * repeats / (time.perf_counter() - start)


CLAIMS = {
    "pretraining": "matrix products of a pretraining step, without padding, as a share of the rate of a large sgemm",
    "vqa": "matrix products of a step of question answering, without padding, as a share of the rate of a large sgemm",
    "decoding": "bytes of weights and cache that a step of beam search reads, as a share of the rate of a large sum",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=CLAIMS, default="pretraining")
    parser.add_argument("--size", choices=SIZES, default="middle")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--repeats", type=int, default=7)
    parsed = parser.parse_args()
    torch.set_flush_denormal(True)
    record: dict[str, Any] = {
        "claim": CLAIMS[parsed.work],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "load_average": round(os.getloadavg()[0], 1),
        "models": {},
    }
    for name in parsed.models:
        size = SIZES[parsed.size]
        needed = {"decoding": Generates, "vqa": Fuses}.get(parsed.work)
        if needed is not None and not isinstance(build(name, size)[0], needed):
            continue
        if parsed.work == "decoding":
            record["models"][name] = measure_decoding(name, size, parsed.repeats)
        else:
            record["models"][name] = measure_step(name, size, parsed.repeats, parsed.work)
        print(name, json.dumps(record["models"][name]), flush=True)
    work = "" if parsed.work == "pretraining" else f"{parsed.work}-"
    write_result(f"roofline-{work}{parsed.size}-cpu", record)


if __name__ == "__main__":
    main()
