"""How much time do K/V caches save? Beam search with TDEN: cached steps against the whole prefix at every step.

Both decode the same 20 tokens with beam 5 (no hypothesis may end early) and must find the same sentences, or the script
fails before it measures anything. The uncached side also encodes each image once; it runs the sentence encoder and the
decoder over all tokens so far for every hypothesis, as a model that only has `generation_logits` would.

    python benchmarks/decoding.py                     # params.yaml's size: 128 wide, 2/2/2/2 layers
    python benchmarks/decoding.py --paper --images 2  # the paper's: 768 wide, 6/12/6/6 layers

Writes benchmarks/results/decoding-<size>-<device>.json.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time

import torch
from common import random_regions, write_result
from torch import Tensor

from vlp_models.data.batch import Image
from vlp_models.models import DataFacts, build_model
from vlp_models.models.decoding.search import DecodingModel, Hypothesis, beam_search
from vlp_models.models.layers.packing import Packing
from vlp_models.models.tden.model import GENERATION, TDEN
from vlp_models.models.tden.state import VisualStates

SMALL = {"hidden": 128, "heads": 4, "intermediate": 512}
SMALL |= dict.fromkeys(["object_layers", "sentence_layers", "encoder_layers", "decoder_layers"], 2)
BEAM, REGIONS, FEATURE_DIM = 5, 16, 256
LENGTH = 20  # tokens of every sentence: [SEP] is made impossible
SEP_ID = 3


class WholePrefix:
    """TDEN's step interface without caches: a state is the image's encoding and the tokens so far."""

    def __init__(self, model: TDEN) -> None:
        self.model = model

    def start(self, image: Image, *, max_len: int) -> tuple[VisualStates, Tensor]:
        return self.model.encode_image(image), torch.empty(len(image), 0, dtype=torch.int64, device=DEVICE)

    def step(self, token_N: Tensor, state: tuple[VisualStates, Tensor]) -> tuple[Tensor, tuple[VisualStates, Tensor]]:
        visual, prefix_NT = state
        ids_NT = torch.cat([prefix_NT, token_N[:, None]], dim=1)
        mask_NT = torch.ones_like(ids_NT, dtype=torch.bool)
        words = Packing.of(mask_NT)
        memory = self.model.project_memory(visual.last_KD, visual.packing, None)
        decoded = self.model.decode(self.model.encode_text(ids_NT, words, GENERATION), words, memory)
        return self.model.predict_words(words.pad(decoded)[:, -1]), (visual, ids_NT)

    def reorder(self, state: tuple[VisualStates, Tensor], index_N: Tensor) -> tuple[VisualStates, Tensor]:
        visual, prefix_NT = state
        return visual.last().select(index_N), prefix_NT[index_N]


def build(paper: bool) -> TDEN:
    torch.manual_seed(0)
    model = build_model(
        "tden",
        {**({} if paper else SMALL), "init_std": 0.06 if paper else 0.15},  # large: near-ties would hide a difference
        DataFacts(vocab_size=30522 if paper else 1000, mask_id=4, feature_dim=FEATURE_DIM),
    )
    assert isinstance(model, TDEN)
    with torch.no_grad():
        model.word_head.bias[SEP_ID] = -1e4  # [SEP] never comes: all sentences have full length
    return model.eval().to(DEVICE)


def decode(model: DecodingModel, image: Image) -> tuple[list[Hypothesis], float]:
    """Return the sentences of a beam search, and its seconds, including pending work on the device."""
    start = time.perf_counter()
    hypotheses = beam_search(model, image, max_len=LENGTH, bos_id=2, eos_id=SEP_ID, beam_size=BEAM)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - start
    assert all(len(hypothesis.ids) == LENGTH for hypothesis in hypotheses), "a sentence ended early"
    return hypotheses, elapsed


def main(arguments: argparse.Namespace) -> None:
    model, image = build(arguments.paper), random_regions(arguments.images, REGIONS, FEATURE_DIM).to(DEVICE)
    uncached = WholePrefix(model)
    with torch.no_grad():
        cached_result, uncached_result = decode(model, image)[0], decode(uncached, image)[0]
        assert [h.ids for h in cached_result] == [h.ids for h in uncached_result], "the two decode differently"
        # the two alternate, so that other load on the machine affects both
        pairs = [(decode(model, image)[1], decode(uncached, image)[1]) for _ in range(arguments.repeats)]
    cached, whole = (statistics.median(times) for times in zip(*pairs, strict=True))
    record = {
        "claim": "beam search with K/V caches against whole prefixes",
        "command": f"python benchmarks/decoding.py{' --paper' if arguments.paper else ''} --images {arguments.images}",
        "size": "paper" if arguments.paper else "small",
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "images": arguments.images,
        "beam": BEAM,
        "tokens": LENGTH,
        "regions": REGIONS,
        "repeats": arguments.repeats,
        "seconds_cached": round(cached, 4),
        "seconds_uncached": round(whole, 4),
        "ratio": round(whole / cached, 2),
        "ratios": sorted(round(u / c, 2) for c, u in pairs),
    }
    write_result(f"decoding-{record['size']}-{DEVICE.type}", record)
    print(f"{arguments.images} images: cached {cached:.3f} s, uncached {whole:.3f} s, {record['ratio']} times faster")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paper", action="store_true", help="the paper's size")
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parsed = parser.parse_args()
    DEVICE = torch.device(parsed.device)
    main(parsed)
