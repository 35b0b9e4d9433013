"""A SOHO of a few thousand weights, in float64 and without dropout, and random pixel batches for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from vlp_models.data.batch import Batch, Pixels, Text
from vlp_models.models import DataFacts, build_model
from vlp_models.models.soho.model import SOHO

VOCAB, CODES = 30, 7
FACTS = DataFacts(vocab_size=VOCAB, mask_id=4)
TINY: dict[str, Any] = {
    "height": 64,
    "width": 64,
    "longer": 0,
    "shorter": 0,
    "backbone": "resnet18",
    "backbone_options": {"layers": [1, 1, 1, 1], "channels": [4, 6, 8, 8]},
    "backbone_stage": 2,  # cells of 8 pixels, after pooling of 16: a grid of 4 by 4
    "hidden": 16,
    "heads": 2,
    "intermediate": 32,
    "layers": 2,
    "dictionary_size": CODES,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "init_std": 0.2,
    "fusion_dropout": 0.0,
}
PUBLIC: dict[str, Any] = {
    "pool_first": True,
    "gate": True,
    "square_mask": True,
    "tight_canvas": True,
    "padding_in_dictionary": True,
    "plain_heads": True,
    "code_scores": "cosine",
    "masked_code": "of_one_place",
    "masked_pairs": "all",
    "dictionary_update": "released",
}
ALL = ("mlm", "mvm", "itm")


def build(seed: int = 0, **config: Any) -> SOHO:
    """Return a model with batch norm statistics, and codes that features are mapped to."""
    torch.manual_seed(seed)
    model = build_model("soho", {**TINY, **config}, FACTS)
    assert isinstance(model, SOHO)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(std=0.2)
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 1.5)
    return model.double().eval()


def batch_of(images: int = 4, texts: int = 1, *, tokens: int = 8, seed: int = 0, padded: bool = True) -> Batch:
    """Return landscape and portrait images with `texts` texts each, of different lengths; the first fills the width."""
    generator = torch.Generator().manual_seed(seed)
    rows = images * texts
    lengths = torch.randint(3, tokens + 1, (rows,), generator=generator)
    lengths[0] = tokens
    mask_BT = torch.arange(tokens) < lengths[:, None]
    ids_BT = torch.randint(5, VOCAB, (rows, tokens), generator=generator)
    ids_BT[:, 0] = 2
    ids_BT[torch.arange(rows), lengths - 1] = 3
    pixels = torch.randn(images, 3, 64, 64, generator=generator, dtype=torch.float64)
    mask_BHW = torch.ones(images, 64, 64, dtype=torch.bool)
    if padded:
        for i in range(1, images):
            (mask_BHW[i, 40:] if i % 2 else mask_BHW[i, :, 40:]).fill_(False)
    owner_N = torch.arange(images).repeat_interleave(texts) if texts > 1 else None
    return Batch(
        sample_ids=tuple(f"s/{i}" for i in range(images)),
        image_ids=tuple(f"i/{i}" for i in range(images)),
        image=Pixels(pixels_B3HW=pixels * mask_BHW[:, None], mask_BHW=mask_BHW if padded else None),
        text=Text(ids_BT=ids_BT * mask_BT, mask_BT=mask_BT, owner_N=owner_N),
    )


def losses(model: SOHO, batch: Batch, objectives: Any = ALL, seed: int = 0, probability: float = 0.4) -> dict[str, Any]:
    asked = objectives if isinstance(objectives, dict) else dict.fromkeys(objectives)
    generator = torch.Generator().manual_seed(seed)
    return model.pretraining_losses(batch, objectives=asked, generator=generator, mask_probability=probability)


def with_pixels(batch: Batch, pixels: torch.Tensor) -> Batch:
    return replace(batch, image=replace(batch.image, pixels_B3HW=pixels))
