"""SOHO on weights, sentences and images that are formulas, so that no generator's stream is part of the numbers.

python tests/support/golden_soho.py > tests/golden/golden_soho.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from golden_tden import fill, wave

from vlp_models.data.batch import Batch, Pixels, Text
from vlp_models.models import DataFacts, build_model
from vlp_models.models.soho.pairs import Pairs

TINY: dict[str, Any] = {"height": 32, "width": 48, "longer": 0, "shorter": 0, "backbone": "resnet18"}
TINY |= {"backbone_options": {"layers": [1, 1, 1, 1], "channels": [3, 4, 5, 6]}, "backbone_stage": 2}
TINY |= {"hidden": 12, "heads": 3, "intermediate": 20, "layers": 2, "max_positions": 10, "dictionary_size": 9}
TINY |= {"dropout": 0.0, "attention_dropout": 0.0}
PUBLIC = {"pool_first": True, "gate": True, "square_mask": True, "padding_in_dictionary": True, "plain_heads": True}
PUBLIC |= {"code_scores": "cosine", "masked_pairs": "all"}
VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "released update": {"dictionary_update": "released"},
    "public code": {**PUBLIC, "dictionary_update": "released"},
    "tasks on codes": {"task_features": "dictionary", "fusion_hidden": 8, "fusion_dropout": 0.0},
}


def batch() -> Batch:
    lengths = torch.tensor([7, 4, 6, 5])
    words_BT = torch.arange(7) < lengths[:, None]
    ids = (torch.arange(28).reshape(4, 7) * 5) % 18 + 5
    ids[:, 0] = 2
    ids[torch.arange(4), lengths - 1] = 3
    mask = torch.ones(2, 32, 48, dtype=torch.bool)
    mask[1, :, 16:] = False
    return Batch(
        sample_ids=("a", "b"),
        image_ids=("x", "y"),
        image=Pixels(pixels_B3HW=wave((2, 3, 32, 48), 1) * mask[:, None], mask_BHW=mask),
        text=Text(ids_BT=ids * words_BT, mask_BT=words_BT, owner_N=torch.tensor([0, 0, 1, 1])),
    )


def fixed_pairs(data: Batch) -> Pairs:
    """Pair each text with its own image and with the other one; every third word is masked."""
    text, owner = data.text, data.text.owner_N
    words = (torch.arange(28).reshape(4, 7) % 3 == 1) & text.mask_BT
    twice = {"original_PT": text.ids_BT, "mask_PT": text.mask_BT, "words_PT": words}
    twice["ids_PT"] = text.ids_BT.masked_fill(words, 4)
    own = torch.arange(4)
    return Pairs(
        **{name: value.repeat(2, 1) for name, value in twice.items()},
        owner_P=torch.cat([owner, 1 - owner]),
        matched_P=torch.arange(8) < 4,
        origin_P=torch.cat([own, own]),
    )


def numbers(name: str) -> dict[str, Any]:
    """Return losses, the norm of their gradient, codes before and after the update, and outputs for tasks."""
    model: Any = fill(build_model("soho", {**TINY, **VARIANTS[name]}, DataFacts(vocab_size=23, mask_id=4)))
    model.train()
    data = batch()
    model.draw_pairs = lambda *_: fixed_pairs(data)
    model.select_hidden_cells = lambda pairs, codes, *_: (codes == codes[:, :1]).index_select(0, pairs.owner_P)
    asked = dict.fromkeys(model.objectives)
    losses = model.pretraining_losses(data, objectives=asked, generator=torch.Generator(), mask_probability=0.15)
    sum(loss.mean for loss in losses.values()).backward()
    found: dict[str, Any] = {key: loss.mean.item() for key, loss in losses.items()}
    found |= {f"items of {key}": int(loss.count) for key, loss in losses.items()}
    gradients = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
    found["norm of the gradient"] = torch.stack(gradients).sum().sqrt().item()
    model.dictionary.update()
    found["codes"] = model.dictionary.codes[:, 0].tolist()
    model.eval()
    with torch.no_grad():
        found["fused"] = model.fuse(data.image, data.text).pooled_BP.flatten()[:8].tolist()
        found["scores"] = model.score(model.encode_image(data.image), data.text, data.text.owner_N).tolist()
    return found


if __name__ == "__main__":
    print(json.dumps({name: numbers(name) for name in VARIANTS}, indent=1))
