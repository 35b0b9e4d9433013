"""Unified VLP on weights, sentences and regions that are formulas (golden_tden.py), and a training curve of it.

python tests/support/golden_unified_vlp.py      records tests/golden/golden_unified_vlp.json again
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from golden_tden import SIZES, batch, descend, fill, wave

from vlp_models.data.batch import Batch, Regions, ScoredRegions
from vlp_models.models import DataFacts, build_model
from vlp_models.models.decoding.search import beam_search
from vlp_models.objectives.masked_modeling import Corruption

FILE = Path(__file__).parents[1] / "golden" / "golden_unified_vlp.json"
TINY: dict[str, Any] = {"hidden": 12, "heads": 3, "intermediate": 20, "layers": 2, "region_slots": 4}
TINY |= {"max_positions": 20, "dropout": 0.0, "attention_dropout": 0.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "public code": {"compat_reference": True},
    "pretext": {"region_classes": "pretext"},
}
UPDATES = 12


def build(name: str) -> Any:
    return fill(build_model("unified_vlp", {**TINY, **VARIANTS[name]}, DataFacts(mask_id=4, **SIZES)))


def scored_batch() -> Batch:
    data = batch()
    assert isinstance(data.image, Regions)
    scores = (wave((3, 4), 5) / 2 + 0.5) * data.image.mask_BR
    image = ScoredRegions(**vars(data.image), scores_BR=scores)
    return replace(data, image=image)


def numbers(name: str) -> dict[str, Any]:
    """Return losses, the norm of their gradient, the tasks' inputs, and the result of beam search."""
    model, data = build(name), scored_batch()
    words, regions = torch.zeros_like(data.text.mask_BT), torch.zeros_like(data.image.mask_BR)
    words[0, 2], words[0, 6], words[2, 3], regions[0, 1], regions[1, 2] = (True,) * 5
    hidden = regions if name == "pretext" else None
    masked = data.text.ids_BT.masked_fill(words, 4)
    seen = Corruption(ids_BT=masked, words_BT=words, regions_BR=hidden, hidden_BR=hidden)
    done = model.masked_pass(data, seen, model.encode_corrupted(data, seen), dict.fromkeys(model.objectives))
    torch.stack([loss.mean for loss in done.losses.values()]).sum().backward()
    found: dict[str, Any] = {objective: loss.mean.item() for objective, loss in done.losses.items()}
    gradients = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
    found["norm of the gradient"] = torch.stack(gradients).sum().sqrt().item()
    with torch.no_grad():
        found["fused"] = model.fuse(data.image, data.text).pooled_BP.flatten()[:24].tolist()
        logits = model.generation_logits(data.image, data.text, data.text.has_next_BT)
        found["caption"] = logits[::3, :4].flatten().tolist()
        best = beam_search(model, data.image, max_len=6, bos_id=2, eos_id=3, beam_size=3)
        found["beams"] = [h.ids for h in best]
        found["scores of the beams"] = [h.score for h in best]
    return found


def curve() -> list[dict[str, float]]:
    """Return the two losses over updates of gradient descent; half of the samples draw each objective."""
    model, data = build("paper").train(), scored_batch().select(torch.arange(12) % 3)
    rows = []
    for update in range(UPDATES):
        generator = torch.Generator().manual_seed(update)
        first = torch.rand(len(data), generator=generator) < 0.5
        losses = model.pretraining_losses(
            data, objectives={"bidirectional": first, "seq2seq": ~first}, generator=generator, mask_probability=0.3
        )
        rows.append(descend(model, losses))
    return rows


if __name__ == "__main__":
    recorded = {"numbers": {name: numbers(name) for name in VARIANTS}, "curve": curve()}
    FILE.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
