"""What two-pass scheduled sampling costs: a training step of Two-Pass-A, -B and -C against a single-pass step.

A step is corruption, forward, backward, clipping and AdamW, on the demo's model (128 wide, 2/2/2/2 layers) and random
batches (32 pairs, up to 16 regions and 24 tokens). All four kinds of step take turns on identical batches and from
identical seeds within one process, so that a busy machine slows all alike; a ratio is the median over the rounds of a
kind's CPU seconds (on a GPU: seconds) over the single pass's in the same round. C's coin falls both ways equally
often.

    OMP_NUM_THREADS=1 python benchmarks/two_pass_step.py [--rounds 20] [--device cuda] [--paper]

--paper takes the paper's sizes (768 wide, 6/12/6/6 layers, 30,522 words, 50 regions, 36 tokens); for a GPU.
Also states how much memory logits take at the positions that need them, against all positions of both paths.
Writes benchmarks/results/two_pass_step-<device>.json.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Literal

import torch
from common import write_result
from rich.console import Console
from rich.table import Table
from torch import Tensor

from vlp_models.data.batch import Batch, Regions, Text
from vlp_models.models import DataFacts, build_model
from vlp_models.models.tden.model import TDEN
from vlp_models.objectives.loss import WeightedLosses
from vlp_models.params import ObjectiveParams, OptimizerParams, RecipeParams, ScheduledSamplingParams
from vlp_models.training.optim import build_optimizer
from vlp_models.training.scheduled_sampling import make_loss

LAYERS = ("object_layers", "sentence_layers", "encoder_layers", "decoder_layers")
DEMO: dict[str, float] = {"hidden": 128, "heads": 4, "intermediate": 512, **dict.fromkeys(LAYERS, 2)}
DEMO |= {"dropout": 0.0, "attention_dropout": 0.0}
AIMS = {"a": 1.75, "b": 1.75, "c": 1.15}
MASK_PROBABILITY = 0.15


def random_batch(size: int, regions: int, tokens: int, features: int, classes: int, vocab: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def mask(width: int) -> Tensor:
        return torch.arange(width) < torch.randint(width // 2, width + 1, (size, 1), generator=generator)

    names = tuple(map(str, range(size)))
    region_mask, token_mask = mask(regions), mask(tokens)
    return Batch(
        sample_ids=names,
        image_ids=names,
        image=Regions(
            features_BRF=torch.randn(size, regions, features, generator=generator),
            boxes_BR4=torch.rand(size, regions, 4, generator=generator).sort(-1).values,
            class_probs_BRC=torch.randn(size, regions, classes, generator=generator).softmax(-1),
            mask_BR=region_mask,
        ),
        text=Text(ids_BT=torch.randint(5, vocab, (size, tokens), generator=generator), mask_BT=token_mask),
    )


def coins(loss: Callable[..., WeightedLosses], batch: Batch, count: int) -> list[int]:
    """Seeds with which C begins with the encoder and with the decoder by turns."""
    found: dict[bool, list[int]] = {True: [], False: []}
    seed = 0
    while min(len(seeds) for seeds in found.values()) < (count + 1) // 2:
        with torch.no_grad():
            parts = loss(batch, update=0, generator=torch.Generator().manual_seed(seed)).parts
        found["mlm" in parts].append(seed)
        seed += 1
    return [found[i % 2 == 0][i // 2] for i in range(count)]


def logit_bytes(model: TDEN, batch: Batch, vocab: int) -> tuple[int, int]:
    """Of the words' logits of one pass, in float32: at the positions that need them, and at all."""
    words = model.corrupt(
        batch,
        objectives=dict.fromkeys(model.objectives),
        generator=torch.Generator().manual_seed(0),
        mask_probability=MASK_PROBABILITY,
    ).words_BT
    rows = int(words.sum()) + int(batch.text.mask_BT[:, 1:].sum())
    return rows * vocab * 4, 2 * batch.text.ids_BT.numel() * vocab * 4


def main(device: torch.device, rounds: int, paper: bool) -> None:
    features, classes, vocab, tokens, regions = (2048, 1601, 30522, 36, 50) if paper else (256, 40, 1000, 24, 16)
    size = 64 if paper else 32
    torch.manual_seed(0)
    config = {} if paper else DEMO
    facts = DataFacts(vocab_size=vocab, mask_id=4, feature_dim=features, num_classes=classes)
    model = build_model("tden", config, facts).to(device)
    assert isinstance(model, TDEN)
    recipe = RecipeParams(
        objectives={name: ObjectiveParams() for name in model.objectives}, mask_probability=MASK_PROBABILITY
    )
    batches = [random_batch(size, regions, tokens, features, classes, vocab, seed).to(device) for seed in range(4)]
    schemes: tuple[Literal["none", "a", "b", "c"], ...] = ("none", "a", "b", "c")
    kinds: dict[str, Callable[..., WeightedLosses]] = {
        scheme: make_loss(model, recipe, ScheduledSamplingParams(scheme=scheme), name="tden") for scheme in schemes
    }
    optimizer = build_optimizer(model, OptimizerParams(lr=1e-4))
    clock = time.process_time if device.type == "cpu" else time.perf_counter

    def step(loss: Callable[..., WeightedLosses], batch: Batch, seed: int) -> float:
        begin = clock()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            total = loss(batch, update=0, generator=torch.Generator().manual_seed(seed)).mean
        optimizer.zero_grad(set_to_none=True)
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return clock() - begin

    rounds += rounds % 2  # both ways of C's coin
    seeds = coins(kinds["c"], batches[0], rounds)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(-2, rounds):  # the first two warm up
        names = list(kinds)
        for kind in names[number % 4 :] + names[: number % 4]:  # each kind is first equally often
            taken = step(kinds[kind], batches[(number // 2) % 4], seeds[max(0, number)])
            if number >= 0:
                seconds[kind].append(taken)

    needed, everywhere = logit_bytes(model, batches[0], vocab)
    table = Table(title=f"A training step, {rounds} rounds")
    for column in ("", "ms (median)", "x single pass", "aim"):
        table.add_column(column, justify="right")
    results = {}
    for kind, measured in seconds.items():
        pairs = zip(measured, seconds["none"], strict=True)
        each = [a / b for a, b in pairs]
        # C costs differently by its coin: the mean of the two ways' medians
        ways = [each[0::2], each[1::2]] if kind == "c" else [each]
        ratio = statistics.mean(map(statistics.median, ways))
        results[kind] = {"milliseconds": round(1000 * statistics.median(measured), 1), "ratio": round(ratio, 3)}
        if kind == "c":
            results[kind] |= dict(
                zip(("encoder_first", "decoder_first"), (round(statistics.median(way), 3) for way in ways), strict=True)
            )
        if kind in AIMS:
            results[kind]["aim"] = AIMS[kind]
        aim = f"<= {AIMS[kind]}" if kind in AIMS else ""
        table.add_row(kind, f"{results[kind]['milliseconds']:.1f}", f"{ratio:.2f}", aim)
    record = {
        "claim": "a step in two passes against one in a single pass",
        "command": f"python benchmarks/two_pass_step.py --rounds {rounds}" + (" --paper" if paper else ""),
        "size": "paper" if paper else "demo",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
        "batch": size,
        "steps": results,
        "logits_mb_a_pass": {"at_needed_positions": round(needed / 1e6, 2), "everywhere": round(everywhere / 1e6, 2)},
    }
    if device.type == "cuda":
        record["peak_memory_mb"] = round(torch.cuda.max_memory_allocated() / 1e6)
    Console().print(table)
    print(f"word logits of one pass: {needed / 1e6:.2f} MB where needed, {everywhere / 1e6:.2f} MB everywhere")
    write_result(f"two_pass_step-{'paper-' if paper else ''}{device.type}", record)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--paper", action="store_true")
    parsed = parser.parse_args()
    main(torch.device(parsed.device), parsed.rounds, parsed.paper)
