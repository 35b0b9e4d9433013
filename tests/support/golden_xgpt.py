"""XGPT on weights, sentences and regions that are formulas (tests/support/golden_tden.py), and a training curve of it.

python tests/support/golden_xgpt.py      records tests/golden/golden_xgpt.json again
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from golden_tden import batch, fill
from tiny_xgpt import toy_xgpt
from toy_dataset import Toy, make_toy, untimed

from vlp_models.models import DataFacts, build_model
from vlp_models.models.decoding.search import beam_search
from vlp_models.models.xgpt.state import SpanCorruption
from vlp_models.objectives.span_masking import replace_spans

FILE = Path(__file__).parents[1] / "golden" / "golden_xgpt.json"
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
    """Return losses, the norm of their gradient, logits of a caption, and the result of beam search."""
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
        logits = model.generation_logits(data.image, data.text, data.text.has_next_BT)
        found["caption"] = logits[::3, :4].flatten().tolist()
        best = beam_search(model, data.image, max_len=6, bos_id=2, eos_id=3, beam_size=2)
    found["beams"] = [h.ids for h in best]
    found["scores of the beams"] = [h.score for h in best]
    return found


def curve(toy: Toy, work: Path) -> list[dict[str, Any]]:
    """Train two epochs with alternating objectives on one batch each, inverse square root, without dropout, whose
    numbers depend on layout."""
    model = toy_xgpt(toy.tokenizer.vocab_size, dropout=0.0, attention_dropout=0.0)
    shares = {"ic": 2.0, "imlm": 1.0, "ida": 1.0, "tifg": 1.0}
    optimizer = {"schedule": "inverse_sqrt", "min_lr": 2e-4, "betas": [0.9, 0.98]}
    _, result = toy.fit(work, model, objectives=shares, mix="alternate", reuse_batch=True, optimizer=optimizer)
    return untimed(result.rows)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        recorded: dict[str, Any] = {name: numbers(name) for name in VARIANTS}
        recorded["curve"] = curve(make_toy(Path(folder)), Path(folder) / "work")
    FILE.write_text(json.dumps(recorded, indent=1) + "\n")
