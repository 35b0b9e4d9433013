"""What weights of 8 bits save: beam search and encoding with TDEN, float32 against int8, in interleaved pairs.

One image, beam 5, 20 tokens (`decode`); and eight images with 36 regions each (`encode`). Outputs differ by rounding,
so the share of equal tokens is reported; whether a model is as good is what `vlp export --weights int8` tests.

    OMP_NUM_THREADS=1 python benchmarks/int8.py

Writes benchmarks/results/int8-cpu.json.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import decode, random_regions, seconds, write_result

from vlp_models.contrib.int8.layers import quantize_linears, use_int8_layers
from vlp_models.models import DataFacts, build_model
from vlp_models.models.tden.model import TDEN

SIZES: dict[str, tuple[dict[str, int], int]] = {  # config, words
    "demo": (
        {"hidden": 128, "heads": 4, "intermediate": 512}
        | dict.fromkeys(("object_layers", "sentence_layers", "encoder_layers", "decoder_layers"), 2),
        1000,
    ),
    "middle": (
        {"hidden": 384, "heads": 6, "intermediate": 1536}
        | dict.fromkeys(("object_layers", "sentence_layers", "encoder_layers", "decoder_layers"), 6),
        8000,
    ),
    "paper": ({}, 30522),
}
BEAM, REGIONS, FEATURES, CPU = 5, 36, 256, torch.device("cpu")


def measure(size: str, repeats: int) -> dict[str, Any]:
    config, words = SIZES[size]
    torch.manual_seed(0)
    facts = DataFacts(vocab_size=words, mask_id=4, feature_dim=FEATURES)
    model = build_model("tden", {**config, "init_std": 0.06}, facts).eval()
    assert isinstance(model, TDEN)
    with torch.no_grad():
        model.word_head.bias[3] = -1e4  # [SEP] never comes
    weights = quantize_linears(model, model.state_dict())
    small = copy.deepcopy(model)
    use_int8_layers(small, weights)
    small.load_state_dict(weights, strict=False)
    one, eight = random_regions(1, REGIONS, FEATURES), random_regions(8, REGIONS, FEATURES)
    found: dict[str, Any] = {
        "parameters": sum(tensor.numel() for tensor in model.parameters()),
        "megabytes": [round(sum(t.nbytes for t in m.state_dict().values()) / 1e6, 1) for m in (model, small)],
    }
    with torch.no_grad():
        ids = [decode(m, one, BEAM)[0].ids for m in (model, small)]
        found["equal_tokens"] = sum(a == b for a, b in zip(*ids, strict=True)) / len(ids[0])
        works: dict[str, Callable[[TDEN], object]] = {
            "decode": partial(decode, image=one, beam=BEAM),
            "encode": partial(TDEN.encode_image, image=eight),
        }
        for name, work in works.items():
            pairs = [[seconds(partial(work, m), CPU) for m in (model, small)] for _ in range(repeats)]
            ratios = sorted(before / after for before, after in pairs)
            found[name] = {
                "milliseconds": [round(1000 * statistics.median(own), 1) for own in zip(*pairs, strict=True)],
                "ratio": round(statistics.median(ratios), 2),
                "ratios": [round(ratio, 2) for ratio in ratios],
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=9)
    parsed = parser.parse_args()
    record: dict[str, Any] = {
        "claim": "TDEN with linear layers of 8 bits against float32: time before / after, median of interleaved pairs",
        "command": "OMP_NUM_THREADS=1 python benchmarks/int8.py",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "sizes": {size: measure(size, parsed.repeats) for size in parsed.sizes},
    }
    print(write_result("int8-cpu", record))


if __name__ == "__main__":
    main()
