"""Training samples a second: forward and backward of TDEN's four objectives together, without the optimizer.

Three quarters of a batch's regions and tokens are real. `--size demo`: 128 wide, 2/2/2/2 layers, as in params.yaml.
`--size paper`: TDEN's own, 768 wide, 6/12/6/6 layers, with the paper's regions and BERT's vocabulary.

    OMP_NUM_THREADS=2 python benchmarks/training_step.py --size demo

Writes benchmarks/results/training_step-<size>-<device>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from dataclasses import dataclass

import torch
from common import write_result

from vlp_models.data.batch import Batch, Regions, Text
from vlp_models.models import DataFacts, build_model
from vlp_models.models.tden.model import TDEN


@dataclass(frozen=True)
class Size:
    config: dict[str, int]
    batch: int
    regions: int
    tokens: int
    feature_dim: int
    classes: int
    vocab: int

    @property
    def facts(self) -> DataFacts:
        return DataFacts(vocab_size=self.vocab, mask_id=4, feature_dim=self.feature_dim, num_classes=self.classes)


LAYERS = dict.fromkeys(["object_layers", "sentence_layers", "encoder_layers", "decoder_layers"], 2)
SIZES = {
    "demo": Size({"hidden": 128, "heads": 4, "intermediate": 512, **LAYERS}, 128, 16, 24, 256, 40, 1000),
    "paper": Size({}, 8, 100, 20, 2048, 1601, 30522),
}


def random_batch(size: Size) -> Batch:
    generator = torch.Generator().manual_seed(0)

    def mask(width: int) -> torch.Tensor:
        return torch.arange(width) < torch.randint(width // 2, width + 1, (size.batch, 1), generator=generator)

    regions, tokens = mask(size.regions), mask(size.tokens)
    names = tuple(map(str, range(size.batch)))
    return Batch(
        sample_ids=names,
        image_ids=names,
        image=Regions(
            features_BRF=torch.randn(size.batch, size.regions, size.feature_dim, generator=generator),
            boxes_BR4=torch.rand(size.batch, size.regions, 4, generator=generator).sort(-1).values,
            class_probs_BRC=torch.randn(size.batch, size.regions, size.classes, generator=generator).softmax(-1),
            mask_BR=regions,
        ),
        text=Text(ids_BT=torch.randint(5, size.vocab, (size.batch, size.tokens), generator=generator), mask_BT=tokens),
    )


def main(name: str, device: torch.device, repeats: int) -> None:
    size = SIZES[name]
    torch.manual_seed(0)
    model = build_model("tden", size.config, size.facts).to(device)
    assert isinstance(model, TDEN)
    batch = random_batch(size).to(device)
    generator = torch.Generator().manual_seed(1)
    rates = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        losses = model.pretraining_losses(
            batch, objectives=dict.fromkeys(model.objectives), generator=generator, mask_probability=0.15
        )
        model.zero_grad(set_to_none=True)
        torch.stack([loss.mean for loss in losses.values()]).sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        rates.append(size.batch / (time.perf_counter() - start))
    rates = sorted(rates[2:])  # the first two warm up
    record = {
        "claim": "training samples a second, forward and backward, four objectives",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
        "samples_per_second": round(statistics.median(rates), 1),
        "best": round(rates[-1], 1),
        "repeats": repeats,
    }
    write_result(f"training_step-{name}-{device.type}", record)
    print(json.dumps(record))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=10)
    parsed = parser.parse_args()
    main(parsed.size, torch.device(parsed.device), parsed.repeats)
