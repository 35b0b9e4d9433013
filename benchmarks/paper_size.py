"""Training steps at the papers' sizes: the models, objectives, batches and optimizers of the presets, on random inputs.

Each model trains through the project's own loop (`training.run.fit`) on one batch that repeats. The time of a batch is
the median after four batches, in which each of its updates is done (XGPT: four, one for each objective). Weights,
pictures, regions and words are random, so the losses only show that they are finite.

    python benchmarks/paper_size.py                 # all models, on a GPU of 80 GB
    python benchmarks/paper_size.py --models xgpt --batches 4 --batch 2 --device cpu
    python benchmarks/paper_size.py --strategy fsdp --activation-checkpointing      # also --compile

Writes benchmarks/results/paper_size-<device>[-<option>...].json.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import platform
import shutil
import statistics
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from common import random_regions, write_result
from torch.utils.data import Dataset

from vlp_models.cli.presets import apply_overlay
from vlp_models.data.batch import Batch, Image, Pixels, Text
from vlp_models.data.inputs import RegionInput
from vlp_models.data.shards.loader import ResumableLoader
from vlp_models.models import DataFacts, build_model
from vlp_models.params import Params, ScheduledSamplingParams, TrainerParams, parse_params, read_yaml
from vlp_models.training.run import Plan, fit
from vlp_models.training.scheduled_sampling import make_loss

ROOT = Path(__file__).parent.parent
WARMUP, FIRST_WORD = 4, 1000
FACTS = DataFacts(vocab_size=30522, mask_id=103, cls_id=101, sep_id=102, feature_dim=2048, num_classes=1601)


@dataclass(frozen=True)
class Run:
    """One pretraining run of a preset.

    batch: images that fit a GPU of 80 GB. size: of pictures, height and width. scheme: of scheduled sampling.
    """

    presets: tuple[str, ...]
    name: str
    batch: int
    size: tuple[int, int] = (0, 0)
    scheme: Literal["none", "a"] = "none"


RUNS = {
    "tden": Run(("tden-cc3m",), "tden-cc3m", 64),
    "tden-two-pass-a": Run(("tden-cc3m",), "tden-cc3m", 64, scheme="a"),
    "unified-vlp": Run(("unified-vlp-cc3m",), "unified-vlp-cc3m", 64),
    "xgpt": Run(("xgpt-cc3m",), "xgpt-cc3m", 64),
    "vlmo-base": Run(("vlmo-base",), "vlmo-base", 48, (224, 224)),
    "vlmo-large": Run(("vlmo-base", "vlmo-large"), "vlmo-large", 32, (224, 224)),
    "soho": Run(("soho-coco",), "soho-coco", 32, (600, 1000)),
}


def random_image(model: Any, images: int, run: Run) -> Image:
    if isinstance(model.inputs.image, RegionInput):
        return random_regions(images, 100, FACTS.feature_dim, classes=FACTS.num_classes)
    generator = torch.Generator().manual_seed(1)
    return Pixels(pixels_B3HW=torch.randn(images, 3, *run.size, generator=generator))


def random_text(
    texts: int,
    length: int,
    owner_N: torch.Tensor | None,
    lengths_B: torch.Tensor | None = None,
    facts: DataFacts = FACTS,
) -> Text:
    """Return texts of `lengths_B` tokens; by default of half to all of `length`."""
    generator = torch.Generator().manual_seed(2)
    ids_BT = torch.randint(
        min(FIRST_WORD, facts.vocab_size // 2), facts.vocab_size, (texts, length), generator=generator
    )
    if lengths_B is None:
        lengths_B = torch.randint(length // 2, length + 1, (texts,), generator=generator)
    lengths_B1 = lengths_B[:, None]
    ids_BT[:, 0] = facts.cls_id
    ids_BT.scatter_(1, lengths_B1 - 1, facts.sep_id)
    mask_BT = torch.arange(length) < lengths_B1
    return Text(
        ids_BT=ids_BT.where(mask_BT, 0),
        mask_BT=mask_BT,
        word_BT=torch.arange(length).where(mask_BT, -1),
        owner_N=owner_N,
    )


def random_batch(model: Any, section: Any, images: int, run: Run) -> Batch:
    names = tuple(map(str, range(images)))
    texts = max(1, section.captions_per_image)
    owner_N = torch.arange(images).repeat_interleave(texts) if section.captions_per_image else None
    text = random_text(images * texts, section.max_text_len, owner_N)
    return Batch(sample_ids=names, image_ids=names, image=random_image(model, images, run), text=text)


class Repeated(Dataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def load_run(run: Run) -> Params:
    """Return the params of a run's presets."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(shutil.copy(ROOT / "params.yaml", folder))
        for preset in run.presets:
            apply_overlay(file, ROOT / "vlp_models" / "presets" / f"{preset}.yaml", [])
        return parse_params(read_yaml(file))


def train(run: Run, images: int, batches: int, trainer: TrainerParams) -> dict[str, Any]:
    """Train on `images` random images `WARMUP + batches` times, and return what was measured."""
    params = load_run(run)
    section = params.pretrain[run.name]
    architecture = params.models[section.model]
    torch.manual_seed(0)
    model: Any = build_model(architecture.family, architecture.config, FACTS)
    batch = random_batch(model, section, images, run)
    sampling = ScheduledSamplingParams(scheme=run.scheme)
    loss = make_loss(model, section.recipe, sampling, name=section.model)
    plan = Plan(seed=0, max_epochs=1, max_steps=0, accumulate=1, optimizer=section.optimizer)
    read_at: list[float] = []

    def collate(_: object) -> Batch:
        if trainer.accelerator == "gpu":
            torch.cuda.synchronize()
        read_at.append(time.perf_counter())
        return batch

    def loaders(rank: int, processes: int) -> tuple[ResumableLoader, None]:
        data = Repeated(WARMUP + batches + 1)
        return ResumableLoader(data, batch_size=1, collate=collate, seed=0, shuffle=False), None  # type: ignore[arg-type]

    with tempfile.TemporaryDirectory() as work:
        result = fit(model, loss, loaders, plan=plan, trainer=trainer, work=Path(work), title=run.name)
    losses = [row["loss"] for row in result.rows if "loss" in row]
    assert all(map(math.isfinite, losses)), losses
    intervals = [after - before for before, after in itertools.pairwise(read_at[WARMUP:])]
    return {
        "presets": list(run.presets),
        "parameters": sum(p.numel() for p in model.parameters()),
        "images": images,
        "updates_per_batch": getattr(loss, "updates_per_batch", 1),
        "precision": result.precision,
        "seconds_per_batch": round(statistics.median(intervals), 4),
        "slowest": round(max(intervals), 4),
        "images_per_second": round(images / statistics.median(intervals), 1),
        "peak_memory_mb": result.peak_memory_mb,
        "first_loss": round(losses[0], 4),
        "last_loss": round(losses[-1], 4),
    }


def measure(name: str, images: int, batches: int, trainer: TrainerParams) -> dict[str, Any]:
    gc.collect()
    if trainer.accelerator == "gpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return train(RUNS[name], images or RUNS[name].batch, batches, trainer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--batch", type=int, default=0, help="images; 0: as many as fit a GPU of 80 GB")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--activation-checkpointing", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parsed = parser.parse_args()
    trainer = TrainerParams(
        accelerator="gpu" if parsed.device == "cuda" else "cpu",
        precision=parsed.precision,
        strategy=parsed.strategy,
        activation_checkpointing=parsed.activation_checkpointing,
        compile=parsed.compile,
        checkpoint_every_steps=10**9,
        log_every_steps=1,
    )
    record: dict[str, Any] = {
        "claim": "training steps at the papers' sizes, through the project's own loop, on random inputs",
        "device": torch.cuda.get_device_name() if parsed.device == "cuda" else f"{platform.machine()} CPU",
        "torch": torch.__version__,
        "precision": parsed.precision,
        "strategy": parsed.strategy,
        "activation_checkpointing": parsed.activation_checkpointing,
        "compile": parsed.compile,
        "batches": parsed.batches,
        "models": {},
    }
    start = time.perf_counter()
    for name in parsed.models:
        try:
            record["models"][name] = measure(name, parsed.batch, parsed.batches, trainer)
        except Exception as error:  # the other models are still worth measuring
            traceback.print_exc()
            record["models"][name] = {"failed": f"{type(error).__name__}: {error}"[:500]}
        print(f"{time.perf_counter() - start:.0f} s  {name}: {json.dumps(record['models'][name])}", flush=True)
        chosen = {parsed.strategy: parsed.strategy != "auto", "compile": parsed.compile}
        chosen["activation-checkpointing"] = parsed.activation_checkpointing
        suffix = "".join(f"-{name}" for name, yes in chosen.items() if yes)
        write_result(f"paper_size-{parsed.device}{suffix}", record)


if __name__ == "__main__":
    main()
