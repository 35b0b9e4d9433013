"""How much time does XGPT save by projecting an image's keys and values once? Beam 2, as in the paper, three ways:

- cached: the encoder's keys and values once per image, those of past words once per hypothesis;
- projected: the encoder once per image, but its output projected again for every hypothesis and step;
- encoded: the encoder again for every hypothesis and step, as a model that only has `generation_logits` would.

The last two run the decoder over the whole prefix. All three decode the same 20 tokens (no hypothesis ends early) and
must find the same sentences, or the script fails before it measures anything.

    python benchmarks/decoding_xgpt.py                     # the scenes' size: 128 wide, 4 layers
    python benchmarks/decoding_xgpt.py --paper --images 2  # the paper's: 768 wide, 12 layers, 100 regions

Writes benchmarks/results/decoding-xgpt-<size>-<device>.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics

import torch
from common import LENGTH, SEP_ID, decode, random_regions, seconds, write_result
from torch import Tensor

from vlp_models.data.batch import Image, Text
from vlp_models.models import DataFacts, build_model
from vlp_models.models.decoding.search import DecodingModel
from vlp_models.models.layers.attention import padding_mask
from vlp_models.models.layers.packing import Packing
from vlp_models.models.xgpt.model import XGPT
from vlp_models.models.xgpt.state import Memory

SMALL = {"hidden": 128, "heads": 4, "intermediate": 512, "layers": 4}
BEAM, FEATURE_DIM = 2, 256

Encoded = tuple[Tensor, Packing]  # the encoder's last states of each hypothesis' image


class Projected:
    """XGPT's step interface without caches: a state is the encoder's output and the tokens so far."""

    def __init__(self, model: XGPT) -> None:
        self.model = model

    def start(self, image: Image, *, max_len: int) -> tuple[Encoded, Tensor]:
        states = self.model.encode_image(image)
        x, mask = states.refined_KD, padding_mask(states.packing.mask_BT)
        for block in self.model.encoder_layers():
            x = block.encode(x, mask, states.packing)
        return (x, states.packing), torch.empty(len(image), 0, dtype=torch.int64, device=x.device)

    def step(self, token_N: Tensor, state: tuple[Encoded, Tensor]) -> tuple[Tensor, tuple[Encoded, Tensor]]:
        (x_KD, packing), prefix_NT = state
        ids_NT = torch.cat([prefix_NT, token_N[:, None]], dim=1)
        layers = tuple(block.project(x_KD, packing) for block in self.model.decoder_layers())
        memory = Memory(layers=layers, mask=padding_mask(packing.mask_BT), owner_N=None)
        last_NT = torch.zeros_like(ids_NT, dtype=torch.bool)
        last_NT[:, -1] = True
        return self.model.predict_next(ids_NT, last_NT, memory), ((x_KD, packing), ids_NT)

    def reorder(self, state: tuple[Encoded, Tensor], index_N: Tensor) -> tuple[Encoded, Tensor]:
        (x_KD, packing), prefix_NT = state
        chosen = Packing.of(packing.mask_BT.index_select(0, index_N))
        return (chosen.pack(packing.pad(x_KD).index_select(0, index_N)), chosen), prefix_NT[index_N]


class EncodedEachStep:
    """The same with the encoder at every step: a state is the image and the tokens so far."""

    def __init__(self, model: XGPT) -> None:
        self.model = model

    def start(self, image: Image, *, max_len: int) -> tuple[Image, Tensor]:
        return image, torch.empty(len(image), 0, dtype=torch.int64, device=DEVICE)

    def step(self, token_N: Tensor, state: tuple[Image, Tensor]) -> tuple[Tensor, tuple[Image, Tensor]]:
        image, prefix_NT = state
        ids_NT = torch.cat([prefix_NT, token_N[:, None]], dim=1)
        last_NT = torch.zeros_like(ids_NT, dtype=torch.bool)
        last_NT[:, -1] = True
        text = Text(ids_BT=ids_NT, mask_BT=torch.ones_like(last_NT))
        return self.model.generation_logits(image, text, last_NT), (image, ids_NT)

    def reorder(self, state: tuple[Image, Tensor], index_N: Tensor) -> tuple[Image, Tensor]:
        return state[0].select(index_N), state[1][index_N]


def build(paper: bool) -> XGPT:
    torch.manual_seed(0)
    model = build_model(
        "xgpt",
        {**({} if paper else SMALL), "init_std": 0.06 if paper else 0.15},  # large: near-ties would hide a difference
        DataFacts(vocab_size=30522 if paper else 1000, mask_id=4, feature_dim=FEATURE_DIM),
    )
    assert isinstance(model, XGPT)
    with torch.no_grad():
        model.word_bias[SEP_ID] = -1e4  # [SEP] never comes: all sentences have full length
    return model.eval().to(DEVICE)


def main(arguments: argparse.Namespace) -> None:
    model, regions = build(arguments.paper), 100 if arguments.paper else 16
    image = random_regions(arguments.images, regions, FEATURE_DIM).to(DEVICE)
    ways: dict[str, DecodingModel] = {"cached": model, "projected": Projected(model), "encoded": EncodedEachStep(model)}
    with torch.no_grad():
        found = {name: decode(way, image, BEAM) for name, way in ways.items()}
        sentences = {name: [h.ids for h in hypotheses] for name, hypotheses in found.items()}
        assert sentences["cached"] == sentences["projected"] == sentences["encoded"], "they decode differently"
        rounds = [  # alternating
            {name: seconds(lambda way=way: decode(way, image, BEAM), DEVICE) for name, way in ways.items()}  # type: ignore[misc]
            for _ in range(arguments.repeats)
        ]
    medians = {name: statistics.median(times[name] for times in rounds) for name in ways}
    record = {
        "claim": "XGPT's encoder keys and values once per image",
        "command": f"python benchmarks/decoding_xgpt.py{' --paper' if arguments.paper else ''} --images "
        f"{arguments.images}",
        "size": "paper" if arguments.paper else "small",
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "images": arguments.images,
        "beam": BEAM,
        "tokens": LENGTH,
        "regions": regions,
        "repeats": arguments.repeats,
        "seconds": {name: round(value, 4) for name, value in medians.items()},
        "times_faster_than": {name: round(medians[name] / medians["cached"], 2) for name in ("projected", "encoded")},
    }
    write_result(f"decoding-xgpt-{record['size']}-{DEVICE.type}", record)
    print(json.dumps(record["seconds"]), json.dumps(record["times_faster_than"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paper", action="store_true", help="the paper's size")
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parsed = parser.parse_args()
    DEVICE = torch.device(parsed.device)
    main(parsed)
