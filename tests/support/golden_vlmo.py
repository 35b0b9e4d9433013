"""VLMo on weights, texts and pixels that are formulas, so that no generator's stream is part of the numbers."""

from __future__ import annotations

from typing import Any

import torch
from golden_tden import fill, wave

from vlp_models.data.batch import Batch, Pixels, Text
from vlp_models.models.layers.packing import Packing

SIZES = {"vocab_size": 23, "mask_id": 4}
TINY = {"hidden": 12, "heads": 3, "intermediate": 20, "layers": 3, "vl_start": 2, "side": 12, "patch": 4}
TINY |= {"max_positions": 10, "drop_path": 0.0, "dropout": 0.0, "image_codes": 7}
VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "both contrasts": {"contrast": "both", "classifier": "mlp"},
    "absolute positions": {"positions": "absolute", "layer_scale": 0.0},
    "one feed-forward net": {"feed_forward": "shared"},
}


def batch() -> Batch:
    lengths = torch.tensor([7, 4, 6])
    mask_BT = torch.arange(7) < lengths[:, None]
    ids = (torch.arange(21).reshape(3, 7) * 5) % 18 + 5
    ids[:, 0] = 2
    ids[torch.arange(3), lengths - 1] = 3
    return Batch(
        sample_ids=("a", "b", "c"),
        image_ids=("x", "y", "z"),
        image=Pixels(pixels_B3HW=wave((3, 3, 12, 12), 1)),
        text=Text(ids_BT=ids * mask_BT, mask_BT=mask_BT),
    )


def numbers(model: Any) -> dict[str, Any]:
    """Return losses without random choices, the norm of their gradient, and outputs for tasks."""
    fill(model)
    model.log_scale.data.fill_(1.5)
    data = batch()
    biases = model.biases(7)
    patches = model.encode_image(data.image)
    itc = model.contrast_loss(model.contrast_vectors(patches, data.text, biases), data.image_ids, None, None).mean
    masked = torch.zeros_like(data.text.mask_BT)
    masked[:, 2] = True
    words = Packing.of(data.text.mask_BT)
    ids = data.text.ids_BT.masked_fill(masked, 4)
    _, text_MD = model.pair_states(patches, ids, words, biases)
    mlm = model.word_loss(text_MD, words, masked, data.text).mean
    hidden = torch.arange(9).expand(3, 9) % 2 == 0
    states = model.image_states(model.encode_image(data.image, hidden), model.biases(0))
    mim = model.image_head(states[:, 1:][hidden]).log_softmax(-1)[:, 3].mean()
    scores = model.score(patches, data.text, torch.tensor([1, 2, 0]))
    (itc + mlm + mim + scores.sum()).backward()
    gradients = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
    found = {"itc": itc.item(), "mlm": mlm.item(), "mim": mim.item(), "scores": scores.tolist()}
    found["norm of the gradient"] = torch.stack(gradients).sum().sqrt().item()
    with torch.no_grad():
        found["fused"] = model.fuse(data.image, data.text).pooled_BP.flatten()[:8].tolist()
        found["image"] = model.embed_image(data.image).flatten()[:8].tolist()
        found["text"] = model.embed_text(data.text).flatten()[:8].tolist()
        found["tokens"] = model.image_tokens(data.image.pixels_B3HW)[0].tolist()
    return found
