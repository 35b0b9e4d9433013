"""Time VLMo's joint inference against a plain version: explicit softmax, biases gathered in each pass, padded texts.

    OMP_NUM_THREADS=1 python benchmarks/vlmo_inference.py [--side 384] [--rounds 5] [--layers 12] [--full-texts]

Both have the same random weights, in the public layout (plain_vlmo.py), of VLMo-Base; two images of `--side` pixels,
with texts of 8 to 19 of 40 tokens (`--full-texts`: all 40, so that skipping padding gains nothing). Their outputs are
compared first. They alternate within one process; the result is the median over the rounds of the ratio of CPU seconds
(on a GPU: seconds). Target: 1.5 at 384 pixels. The text encoder alone (32 texts) is timed as well.
Writes benchmarks/results/vlmo_inference-<side>[-full]-<device>.json.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch
from common import write_result
from plain_vlmo import PlainVLMo, random_state
from torch import Tensor

from vlp_models.contrib.authors_checkpoints.vlmo import convert_vlmo
from vlp_models.data.batch import Pixels, Text
from vlp_models.models import DataFacts, build_model
from vlp_models.models.convert.mapping import ImportRequest
from vlp_models.models.vlmo.model import VLMo

AIM, TOLERANCE = 1.5, 1e-4
VOCAB, LENGTH = 30522, 40


def texts(count: int, full: bool, device: torch.device) -> Text:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.full((count, 1), LENGTH) if full else torch.randint(8, 20, (count, 1), generator=generator)
    mask = torch.arange(LENGTH) < lengths
    ids = torch.randint(1000, VOCAB, (count, LENGTH), generator=generator) * mask
    return Text(ids_BT=ids.to(device), mask_BT=mask.to(device))


def cut(text: Text) -> Text:
    """Pad to the longest text, as `InputReader` does."""
    width = int(text.mask_BT.sum(1).max())
    return Text(ids_BT=text.ids_BT[:, :width], mask_BT=text.mask_BT[:, :width])


def compared(
    plain: Callable[[], Tensor], ours: Callable[[], Tensor], rounds: int, device: torch.device
) -> dict[str, float]:
    """
    Raises:
        SystemExit: the outputs differ.
    """
    difference = float((plain() - ours()).abs().max())
    if difference > TOLERANCE:
        raise SystemExit(f"the outputs differ by {difference:.2e}; not timing them")
    clock = time.process_time if device.type == "cpu" else time.perf_counter

    def seconds(run: Callable[[], Tensor]) -> float:
        begin = clock()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return clock() - begin

    taken = [(seconds(plain), seconds(ours)) for _ in range(rounds)]
    return {
        "largest_difference": difference,
        "plain_seconds": round(statistics.median(a for a, _ in taken), 4),
        "seconds": round(statistics.median(b for _, b in taken), 4),
        "ratio": round(statistics.median(a / b for a, b in taken), 3),
    }


def main(side: int, rounds: int, layers: int, full: bool, device: torch.device) -> None:
    state = random_state(hidden=768, heads=12, layers=layers, start=layers - 2, side=side)
    plain = PlainVLMo({name: tensor.to(device) for name, tensor in state.items()}, heads=12, side=side)
    imported = convert_vlmo(state, ImportRequest(facts=DataFacts(vocab_size=VOCAB, mask_id=103), config={}))
    config = {key: value for key, value in imported.config.items() if key != "vocab_size"}
    model = build_model("vlmo", config, DataFacts(vocab_size=VOCAB, mask_id=103))
    assert isinstance(model, VLMo)
    model.load_state_dict(dict(imported.weights))
    model.eval().to(device)

    time_both(model, plain, side, rounds, layers, full, device)


@torch.inference_mode()
def time_both(
    model: VLMo, plain: PlainVLMo, side: int, rounds: int, layers: int, full: bool, device: torch.device
) -> None:
    pixels = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1)).to(device)
    two, many = texts(2, full, device), texts(32, full, device)
    result = {
        "claim": f"joint inference at {side} pixels is {AIM} times as fast as written plainly",
        "command": f"python benchmarks/vlmo_inference.py --side {side} --rounds {rounds} --layers {layers}"
        + (" --full-texts" if full else ""),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
        "joint": compared(
            lambda: plain.pooled(plain.pair(pixels, two.ids_BT, two.mask_BT)),
            lambda: model.fuse(Pixels(pixels_B3HW=pixels), cut(two)).pooled_BP,
            rounds,
            device,
        ),
        "texts": compared(
            lambda: plain.embedded(plain.text(many.ids_BT, many.mask_BT), "text"),
            lambda: model.embed_text(cut(many)),
            rounds,
            device,
        ),
        "aim": AIM,
    }
    print(write_result(f"vlmo_inference-{side}{'-full' if full else ''}-{device.type}", result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--full-texts", action="store_true")
    parser.add_argument("--device", default="cpu")
    parsed = parser.parse_args()
    main(parsed.side, parsed.rounds, parsed.layers, parsed.full_texts, torch.device(parsed.device))
