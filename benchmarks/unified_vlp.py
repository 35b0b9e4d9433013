"""The time that Unified VLP's caches save in captioning, and what its masks and vocabulary logits cost in pretraining.

Captioning: beam 5, 20 words, 100 regions. The cached side computes an image's keys and values once and shares them
among its beams; the other embeds the regions once and runs the whole stack over [CLS], regions, [SEP], words and [MASK]
for every hypothesis at every step. Both must find the same sentences, or the script fails before it measures anything.

Pretraining: 64 pairs, 100 regions, up to 20 words, objectives drawn. The masks must equal those of a plain loop, and
vocabulary logits are counted where they are computed. Times are CPU seconds of this process; wall-clock time on a GPU.

    python benchmarks/unified_vlp.py                     # 128 wide, 4 layers, as in the preset unified-vlp
    python benchmarks/unified_vlp.py --paper --images 2 --device cuda

Writes benchmarks/results/unified-vlp-<size>-<device>.json.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import LENGTH, SEP_ID, decode, random_regions, seconds, write_result
from torch import Tensor

from vlp_models.data.batch import Batch, Image, Regions, Text
from vlp_models.models import DataFacts, build_model
from vlp_models.models.layers.attention import prefix_mask
from vlp_models.models.unified_vlp.masking import SEQ2SEQ
from vlp_models.models.unified_vlp.model import UnifiedVLP
from vlp_models.objectives.distributed import draw_uniform

SMALL = {"hidden": 128, "heads": 4, "intermediate": 512, "layers": 4}
BEAM, REGIONS, PAIRS = 5, 100, 64


class WholeSequence:
    """Unified VLP's step interface without caches: a state is the regions' embeddings, their mask, and the words so
    far."""

    def __init__(self, model: UnifiedVLP) -> None:
        self.model = model

    def start(self, image: Image, *, max_len: int) -> tuple[Tensor, Tensor, Tensor]:
        assert isinstance(image, Regions)
        none_N0 = torch.empty(len(image), 0, dtype=torch.int64, device=DEVICE)
        return self.model.embed_visual(self.model.embed_regions(image), SEQ2SEQ), image.mask_BR, none_N0

    def step(
        self, token_N: Tensor, state: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        visual_NRD, mask_NR, before_NT = state
        model, ids_NT = self.model, torch.cat([before_NT, token_N[:, None]], 1)
        mask_N1 = torch.full_like(token_N, model.config.mask_id)[:, None]
        words_NTD = model.embed_words(torch.cat([ids_NT, mask_N1], 1), 0, SEQ2SEQ)
        real_NL = F.pad(mask_NR, (1, words_NTD.shape[1]), value=True)
        states_MD, packing = model.encode(
            torch.cat([visual_NRD, words_NTD], 1), real_NL, mask_NR.shape[1] + 2, torch.ones_like(token_N).bool()
        )
        return model.predict_words(packing.pad(states_MD)[:, -1]), (visual_NRD, mask_NR, ids_NT)

    def reorder(self, state: tuple[Tensor, Tensor, Tensor], index_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        visual_NRD, mask_NR, before_NT = state
        return visual_NRD[index_N], mask_NR[index_N], before_NT[index_N]


def build(paper: bool) -> UnifiedVLP:
    torch.manual_seed(0)
    model = build_model(
        "unified_vlp",
        {**({} if paper else SMALL), "init_std": 0.06 if paper else 0.15},  # large: near-ties would hide a difference
        DataFacts(
            vocab_size=28996 if paper else 1000,
            mask_id=4,
            feature_dim=2048 if paper else 256,
            num_classes=1601 if paper else 12,
        ),
    )
    assert isinstance(model, UnifiedVLP)
    with torch.no_grad():
        model.word_head.bias[SEP_ID] = -1e4  # [SEP] never comes: all sentences have full length
    return model.eval().to(DEVICE)


def regions_for(model: UnifiedVLP, images: int) -> Regions:
    config = model.config
    return random_regions(images, REGIONS, config.feature_dim, classes=max(1, config.num_classes)).to(DEVICE)


def measure(work: Callable[[], object]) -> float:
    return seconds(work, DEVICE, time.perf_counter if DEVICE.type == "cuda" else time.process_time)


def random_batch(model: UnifiedVLP) -> Batch:
    generator = torch.Generator().manual_seed(2)
    lengths_B1 = torch.randint(8, LENGTH + 3, (PAIRS, 1), generator=generator)  # [CLS] and [SEP] included
    mask_BT = torch.arange(LENGTH + 2) < lengths_B1
    ids_BT = torch.randint(5, model.config.vocab_size, mask_BT.shape, generator=generator) * mask_BT
    names = tuple(map(str, range(PAIRS)))
    text = Text(ids_BT=ids_BT, mask_BT=mask_BT).to(DEVICE)
    return Batch(sample_ids=names, image_ids=names, image=regions_for(model, PAIRS), text=text)


def captioning(model: UnifiedVLP, images: int, repeats: int) -> dict[str, Any]:
    image, uncached = regions_for(model, images), WholeSequence(model)
    with torch.no_grad():
        cached_result, uncached_result = decode(model, image, BEAM), decode(uncached, image, BEAM)
        assert [h.ids for h in cached_result] == [h.ids for h in uncached_result], "the two decode differently"
        worst = max(abs(c.score - u.score) for c, u in zip(cached_result, uncached_result, strict=True))
        pairs = [
            tuple(measure(partial(decode, way, image, BEAM)) for way in (model, uncached))  # alternating
            for _ in range(repeats)
        ]
    cached, whole = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {
        "images": images,
        "beam": BEAM,
        "tokens": LENGTH,
        "seconds_cached": round(cached, 4),
        "seconds_uncached": round(whole, 4),
        "ratio": round(whole / cached, 2),
        "ratios": sorted(round(u / c, 2) for c, u in pairs),
        "largest_difference_of_scores": worst,
    }


def pretraining(model: UnifiedVLP, repeats: int) -> dict[str, Any]:
    batch, rows = random_batch(model), []
    assert isinstance(batch.image, Regions)
    real_NL = torch.cat([F.pad(batch.image.mask_BR, (1, 0), value=True), batch.text.mask_BT], 1)
    causal_N = draw_uniform((PAIRS,), torch.Generator().manual_seed(3), DEVICE) < 0.75
    found = prefix_mask(real_NL, REGIONS + 2, causal_N)[:, 0].cpu()
    for n in range(0, PAIRS, 16):
        for j in range(0, real_NL.shape[1], 7):
            for k in range(real_NL.shape[1]):
                expected = real_NL[n, k] and (not causal_N[n] or k < REGIONS + 2 or k <= j)
                assert bool(found[n, j, k]) == bool(expected), "the mask differs from the paper's"
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    count = model.word_head.register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))

    def step() -> None:
        losses = model.pretraining_losses(
            batch,
            objectives={"seq2seq": causal_N, "bidirectional": ~causal_N},
            generator=torch.Generator().manual_seed(4),
            mask_probability=0.15,
        )
        optimizer.zero_grad()
        torch.stack([loss.mean for loss in losses.values()]).sum().backward()
        optimizer.step()

    def masks() -> None:
        for _ in range(20):
            prefix_mask(real_NL, REGIONS + 2, causal_N)

    step()
    masks()
    times = [(measure(step), measure(masks) / 20) for _ in range(repeats)]
    count.remove()
    whole, mask = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "pairs": PAIRS,
        "tokens_of_text": int(batch.text.mask_BT.sum()),
        "vocabulary_logits_rows": rows[-1],
        "seconds_step": round(whole, 4),
        "seconds_masks": round(mask, 6),
        "masks_share_of_step": round(mask / whole, 5),
    }


def main(arguments: argparse.Namespace) -> None:
    model = build(arguments.paper)
    size = "paper" if arguments.paper else "small"
    record = {
        "claim": "captioning with an image's keys and values shared by its beams; masks and logits in pretraining",
        "command": " ".join(["python benchmarks/unified_vlp.py", *(["--paper"] if arguments.paper else [])])
        + f" --images {arguments.images}",
        "size": size,
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else f"{platform.machine()} CPU, CPU seconds",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 2),
        "regions": REGIONS,
        "repeats": arguments.repeats,
        "captioning": captioning(model, arguments.images, arguments.repeats),
        "pretraining": pretraining(model, arguments.repeats),
    }
    print(write_result(f"unified-vlp-{size}-{DEVICE.type}", record))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paper", action="store_true", help="the paper's size")
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parsed = parser.parse_args()
    DEVICE = torch.device(parsed.device)
    main(parsed)
