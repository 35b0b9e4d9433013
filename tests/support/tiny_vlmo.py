"""A VLMo of a few thousand weights, in float64, every weight of it random, and random batches for it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vlp_models.data.batch import Batch, Pixels, Text
from vlp_models.models import DataFacts, build_model
from vlp_models.models.vlmo.model import VLMo
from vlp_models.objectives.loss import Loss

VOCAB, SIDE = 30, 16
FACTS = DataFacts(vocab_size=VOCAB, mask_id=4)
TINY: dict[str, Any] = {
    "hidden": 16,
    "heads": 2,
    "layers": 3,
    "intermediate": 32,
    "vl_start": 2,
    "side": SIDE,
    "patch": 4,
    "max_positions": 12,
    "drop_path": 0.0,
    "dropout": 0.0,
    "image_codes": 11,
    "init_std": 0.2,  # large enough that every path matters
}


def build_tiny(seed: int = 0, **config: Any) -> VLMo:
    torch.manual_seed(seed)
    model = build_model("vlmo", {**TINY, **config}, FACTS)
    assert isinstance(model, VLMo)
    with torch.no_grad():  # initial zeros and ones would hide mistakes
        for name, parameter in model.named_parameters():
            if name.startswith("position_bias") or parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.double().eval()


def random_batch(size: int = 4, *, tokens: int = 9, image_ids: str = "abcdefgh", seed: int = 0) -> Batch:
    """Return texts of different lengths; the first fills the batch's whole width."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, tokens + 1, (size,), generator=generator)
    lengths[:1] = tokens
    mask = torch.arange(tokens) < lengths[:, None]
    ids = torch.randint(5, VOCAB, (size, tokens), generator=generator)
    ids[:, 0] = 2
    ids[torch.arange(size), lengths - 1] = 3
    return Batch(
        sample_ids=tuple(f"s/{i}" for i in range(size)),
        image_ids=tuple(image_ids[:size]),
        image=Pixels(pixels_B3HW=torch.randn(size, 3, SIDE, SIDE, generator=generator, dtype=torch.float64)),
        text=Text(ids_BT=ids * mask, mask_BT=mask),
    )


def losses(
    model: VLMo, batch: Batch, objectives: Any = ("itc", "itm", "mlm", "mim"), seed: int = 0, probability: float = 0.3
) -> dict[str, Loss]:
    """Return the losses. objectives: names, or the samples that learn each."""
    asked = objectives if isinstance(objectives, dict) else dict.fromkeys(objectives)
    generator = torch.Generator().manual_seed(seed)
    return model.pretraining_losses(batch, objectives=asked, generator=generator, mask_probability=probability)


def trimmed(batch: Batch, rows: Tensor) -> Batch:
    """Return these rows, without unnecessary padding."""
    chosen = batch.select(rows)
    width = int(chosen.text.mask_BT.sum(1).max())
    text = Text(ids_BT=chosen.text.ids_BT[:, :width], mask_BT=chosen.text.mask_BT[:, :width])
    return Batch(sample_ids=chosen.sample_ids, image_ids=chosen.image_ids, image=chosen.image, text=text)


def padded(text: Text, more: int) -> Text:
    return Text(ids_BT=F.pad(text.ids_BT, (0, more)), mask_BT=F.pad(text.mask_BT, (0, more)))
