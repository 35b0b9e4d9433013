"""XGPT on weights, sentences and regions that are formulas, as golden_tden.py has it for TDEN."""

from __future__ import annotations

from typing import Any

import torch
from golden_tden import batch, fill

from vlp_models.models import DataFacts, build_model
from vlp_models.models.decoding.search import beam_search
from vlp_models.models.xgpt.state import SpanCorruption
from vlp_models.objectives.span_masking import replace_spans

FACTS = DataFacts(vocab_size=23, mask_id=4, feature_dim=5)
TINY = {"hidden": 12, "heads": 3, "intermediate": 20, "layers": 2, "max_positions": 10}
TINY |= {"dropout": 0.0, "attention_dropout": 0.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "signals": {"signal": "kv", "cross_norm": "shared"},
    "merged": {"cross_attention": "shared_merged", "signal": "kv"},
    "two stacks": {"structure": "enc_dec"},
    "one stack": {"structure": "enc"},
    "AoANet's refiner": {"refiner_gate": "raw", "refiner_norm": "pre", "refiner_layers": 2},
    "other objectives": {"imlm_reads": "caption", "ida_residual": True, "tifg_target": "raw", "tifg_reduction": "sum"},
}


def numbers(name: str) -> dict[str, Any]:
    """Losses, the size of their gradient, logits of a caption, and what beam search says."""
    model: Any = fill(build_model("xgpt", {**TINY, **VARIANTS[name]}, FACTS))
    data = batch()
    words = torch.zeros_like(data.text.mask_BT)
    words[0, 2:5], words[1, 1], words[2, 3:5] = True, True, True
    spans = [[(1, 2), (4, 1)], [(2, 1)], [(1, 3)]]
    infilled, seen = replace_spans(data.text.ids_BT, data.text.mask_BT, spans, how="single", mask_id=4)
    hidden = SpanCorruption(
        ids_BT=data.text.ids_BT.masked_fill(words, 4), words_BT=words, infilled_BU=infilled, infilled_mask_BU=seen
    )
    image = model.encode_corrupted(data, hidden)
    losses = model.masked_pass(data, hidden, image, dict.fromkeys(model.objectives)).losses
    torch.stack([loss.mean for loss in losses.values()]).sum().backward()
    found: dict[str, Any] = {key: loss.mean.item() for key, loss in losses.items()}
    gradients = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
    found["norm of the gradient"] = torch.stack(gradients).sum().sqrt().item()
    with torch.no_grad():
        logits = model.generation_logits(data.image, data.text, data.text.followed_BT)
        found["caption"] = logits[::3, :4].flatten().tolist()
        best = beam_search(model, data.image, max_len=6, bos_id=2, eos_id=3, beam_size=2)
    found["beams"] = [h.ids for h in best]
    found["scores of the beams"] = [h.score for h in best]
    return found
