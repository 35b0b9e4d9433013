"""Training samples a second: forward and backward of TDEN's four objectives together, without the optimiser.

128 wide, 2/2/2/2 layers, batches of 128 with up to 16 regions and 24 tokens (three quarters of them real), as in
params.yaml.

    OMP_NUM_THREADS=2 python benchmarks/training_step.py

Writes benchmarks/results/training_step-<device>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time

import torch
from kept import keep

from vlp_models.data.batch import Batch, Regions, Text
from vlp_models.models import DataFacts, build_model
from vlp_models.models.tden.model import TDEN

CONFIG = {"hidden": 128, "heads": 4, "intermediate": 512}
CONFIG |= dict.fromkeys(["object_layers", "sentence_layers", "encoder_layers", "decoder_layers"], 2)
BATCH, REGIONS, TOKENS, FEATURE_DIM, CLASSES, VOCAB = 128, 16, 24, 256, 40, 1000
FACTS = DataFacts(vocab_size=VOCAB, mask_id=4, feature_dim=FEATURE_DIM, num_classes=CLASSES)


def random_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)

    def mask(width: int) -> torch.Tensor:
        return torch.arange(width) < torch.randint(width // 2, width + 1, (BATCH, 1), generator=generator)

    regions, tokens = mask(REGIONS), mask(TOKENS)
    names = tuple(map(str, range(BATCH)))
    return Batch(
        sample_ids=names,
        image_ids=names,
        image=Regions(
            features_BRF=torch.randn(BATCH, REGIONS, FEATURE_DIM, generator=generator),
            boxes_BR4=torch.rand(BATCH, REGIONS, 4, generator=generator).sort(-1).values,
            class_probs_BRC=torch.randn(BATCH, REGIONS, CLASSES, generator=generator).softmax(-1),
            mask_BR=regions,
        ),
        text=Text(ids_BT=torch.randint(5, VOCAB, (BATCH, TOKENS), generator=generator), mask_BT=tokens),
    )


def main(device: torch.device, repeats: int) -> None:
    torch.manual_seed(0)
    model = build_model("tden", CONFIG, FACTS).to(device)
    assert isinstance(model, TDEN)
    batch = random_batch().to(device)
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
        rates.append(BATCH / (time.perf_counter() - start))
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
    keep(f"training_step-{device.type}", record)
    print(json.dumps(record))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=10)
    parsed = parser.parse_args()
    main(torch.device(parsed.device), parsed.repeats)
