"""SOHO's pretraining losses without its optimizations: a reference for tests.

The CNN runs once per image. Its maps are then copied for every text, and the neck, the dictionary and the positions run
on the copies; sequences are padded; vocabulary logits are computed at every position, code logits at every cell.

Shape suffixes as in vlp_models/models/soho/model.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vlp_models.data.batch import Batch, Pixels
from vlp_models.models.layers.embeddings import sine_positions
from vlp_models.models.soho.model import SOHO

NO_TARGET = -100


def expanded_losses(
    model: SOHO, batch: Batch, generator: torch.Generator, mask_probability: float
) -> dict[str, Tensor]:
    """Return the three mean losses, with the same draws as `pretraining_losses` in the same generator state."""
    config = model.config
    assert isinstance(batch.image, Pixels)
    pairs = model.draw_pairs(batch, dict.fromkeys(model.objectives), generator, mask_probability)
    maps = model.backbone(batch.image.pixels_B3HW)
    features = model.neck(maps.index_select(0, pairs.owner_P))
    mask_PRR = model.grid_mask(batch.image.mask_BHW, model.neck(maps)).index_select(0, pairs.owner_P)
    mask_PR = mask_PRR.flatten(1)
    features_PRD = features.flatten(2).transpose(1, 2)

    assert model.dictionary is not None
    codes = model.dictionary.codes
    distances = torch.cdist(features_PRD.flatten(0, 1), codes)
    one_hot = F.one_hot(distances.argmin(1), len(codes)).to(codes.dtype)
    vectors_PRD = (one_hot @ codes).view_as(features_PRD)
    codes_PR = one_hot.argmax(1).view_as(mask_PR).masked_fill(~mask_PR, -1)
    read_PRD = features_PRD + (vectors_PRD - features_PRD).detach()
    first = [int((pairs.owner_P == i).nonzero()[0]) for i in range(len(batch.image))]
    hidden_PR = model.select_hidden_cells(pairs, codes_PR[first], mask_PR[first], generator, len(batch.text))
    read_PRD = torch.where(hidden_PR[..., None], model.hidden_cell, read_PRD)
    positions = sine_positions(mask_PRR, config.hidden).flatten(1, 2).to(read_PRD.dtype)
    cells_PRD = model.visual_norm(read_PRD + positions)

    length = pairs.ids_PT.shape[1]
    places = torch.arange(length, device=pairs.ids_PT.device)
    words_PTD = model.text_embedding(pairs.ids_PT, torch.zeros_like(pairs.ids_PT), places)
    x = torch.cat([words_PTD, cells_PRD], 1)
    seen = torch.cat([pairs.mask_PT, mask_PR], 1)[:, None, None]
    for block in model.transformer:
        x = block(x, seen)

    logits = model.predict_words(x)[:, :length]
    masked = pairs.words_PT & pairs.matched_P[:, None]
    words = torch.where(masked, pairs.original_PT, NO_TARGET)
    scores = model.predict_codes(x[:, length:], codes)
    cells = torch.where(hidden_PR & pairs.matched_P[:, None], codes_PR, NO_TARGET)
    return {
        "mlm": _mean(logits, words),
        "mvm": _mean(scores, cells),
        "itm": F.cross_entropy(model.match_head(x[:, 0]), pairs.matched_P.long()),
    }


def _mean(logits: Tensor, targets: Tensor) -> Tensor:
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET, reduction="sum")
    return total / (targets != NO_TARGET).sum().clamp(min=1)
