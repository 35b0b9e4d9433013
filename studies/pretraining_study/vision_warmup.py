"""Vision warm-up: before anything else, a model's vision encoder is trained to classify each cell of the image.

The papers' pixel models start from weights trained on a million labeled images. This replaces them: the web images
without their texts, with the drawn objects as labels. It runs once, with one seed; every arm and seed starts from the
same weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretraining_study import adapter
from pretraining_study.data import PIXEL_FAMILIES, SYMBOLS, Data, symbols
from pretraining_study.learn import orders, updates_of
from vlp_models.synthetic.scenes.scene import Scene

_SEED = 77
_cache: dict[tuple[str, str], dict[str, Tensor]] = {}  # (family, setting) -> weights, within this process


def vision_warmup(family: str, data: Data) -> dict[str, Tensor]:
    """Return the weights of the vision encoder by name; empty without a warm-up or for a model that reads regions."""
    setting = data.setting
    if not setting.vision_warmup or family not in PIXEL_FAMILIES:
        return {}
    key = (family, setting.fingerprint())
    if key not in _cache:
        torch.manual_seed(_SEED)
        model = adapter.build(family, {}, data)
        head = nn.Linear(setting.hidden, len(SYMBOLS))
        rows = orders(setting.web, setting.batch, setting.vision_warmup, torch.Generator().manual_seed(_SEED))
        step = partial(_loss, model, head, data, cells(data.web_scenes, setting.side // setting.patch))
        for _ in updates_of(nn.ModuleList([model, head]), step, rows, lr=setting.lr, updates=setting.vision_warmup):
            pass
        _cache[key] = adapter.image_side(family, model)
    return _cache[key]


def _loss(model: nn.Module, head: nn.Linear, data: Data, true_ICS: Tensor, rows: Tensor, update: int) -> Tensor:
    tokens_BCD = adapter.cells_seen(model, adapter.image(data.web[0], rows))
    return F.binary_cross_entropy_with_logits(head(tokens_BCD), true_ICS[rows].float())


def cells(scenes: Sequence[Scene], side: int) -> Tensor:
    """Return the symbols of the object at the center of each cell, bool [I, side * side, S]; all False without one."""
    found = torch.zeros(len(scenes), side, side, len(SYMBOLS), dtype=torch.bool)
    for scene, of_scene in zip(scenes, found, strict=True):
        middle = (torch.arange(side) + 0.5) * scene.side / side
        for item in scene.objects:  # back to front, so that objects in front overwrite those behind
            x1, y1, x2, y2 = item.box
            here = ((middle >= y1) & (middle < y2))[:, None] & ((middle >= x1) & (middle < x2))
            of_scene[here] = torch.tensor(symbols(item)) > 0
    return found.flatten(1, 2)
