"""An XGPT of a few thousand weights, in float64 and without dropout."""

from __future__ import annotations

import torch
from toy_dataset import CLASSES, FEATURE_DIM

from vlp_models.models import DataFacts, build_model
from vlp_models.models.xgpt.model import XGPT

FACTS = DataFacts(vocab_size=30, mask_id=4, feature_dim=6, num_classes=5)
SIZES = {"hidden": 16, "heads": 2, "intermediate": 32, "layers": 2, "dropout": 0.0, "attention_dropout": 0.0}
VARIANTS: dict[str, dict[str, object]] = {
    "paper": {},
    "signal to keys and values": {"signal": "kv"},
    "signal to queries": {"signal": "query", "cross_norm": "shared"},
    "merged": {"cross_attention": "shared_merged", "signal": "kv"},
    "separate attention": {"cross_attention": "separate"},
    "two stacks": {"structure": "enc_dec"},
    "two stacks, shared attention": {"structure": "enc_dec", "cross_attention": "shared_sequential"},
    "one stack": {"structure": "enc", "signal": "kv"},
    "AoANet's refiner": {"refiner_gate": "raw", "refiner_norm": "pre", "refiner_layers": 2},
    "region norms, no refiner": {"separate_region_norms": True, "refiner_layers": 0},
    "other objectives": {
        "imlm_reads": "caption",
        "ida_masks": "multi",
        "ida_residual": True,
        "tifg_target": "raw",
        "tifg_reduction": "sum",
    },
    "no matching": {"ida_matching": False, "ida_empty_spans": True},
}
STRUCTURES = list(VARIANTS)[:8]  # those that encode or decode differently


def tiny_xgpt(seed: int = 0, **overrides: object) -> XGPT:
    """Build the model; signals, which start at zero, are drawn so that every path has an effect."""
    torch.manual_seed(seed)
    model = build_model("xgpt", {**SIZES, "init_std": 0.3, **overrides}, FACTS)
    assert isinstance(model, XGPT)
    with torch.no_grad():
        for block in model.decoder_layers():
            if block.signal is not None:
                block.signal.normal_(std=0.5)
    return model.double().eval()


def toy_xgpt(vocab_size: int, **config: object) -> XGPT:
    """Build an XGPT for the data of toy_dataset.py, in float32."""
    torch.manual_seed(1)
    facts = DataFacts(vocab_size=vocab_size, mask_id=4, feature_dim=FEATURE_DIM, num_classes=len(CLASSES))
    sizes = {"hidden": 16, "heads": 2, "intermediate": 32, "layers": 1, "init_std": 0.1}
    model = build_model("xgpt", {**sizes, **config}, facts)
    assert isinstance(model, XGPT)
    return model
