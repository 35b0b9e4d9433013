"""Eyes to begin with: before everything else, the image's side of a model learns to tell what lies in each cell.

The papers' models of pixels begin with weights that a million labelled images taught, and this is what stands for
them: the web's pictures without their texts, and what is drawn in them as labels. It is learnt once, from one seed, and
every arm and seed begins with the same eyes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretraining_study import adapter
from pretraining_study.data import SYMBOLS, Data, symbols
from pretraining_study.learn import orders, updates_of
from vlp_models.synthetic.scenes.world import Scene

_SEED = 77
_learnt: dict[tuple[str, str], dict[str, Tensor]] = {}  # of this process


def eyes(family: str, data: Data) -> dict[str, Tensor]:
    """The weights of the image's side, by name; empty where the setting asks for none."""
    setting = data.setting
    if not setting.eyes:
        return {}
    key = (family, setting.fingerprint())
    if key not in _learnt:
        torch.manual_seed(_SEED)
        model = adapter.build(family, {}, data)
        head = nn.Linear(setting.hidden, len(SYMBOLS))
        rows = orders(setting.web, setting.batch, setting.eyes, torch.Generator().manual_seed(_SEED))
        step = partial(_loss, model, head, data, cells(data.web_scenes, setting.side // setting.patch))
        for _ in updates_of(nn.ModuleList([model, head]), step, rows, lr=setting.lr, updates=setting.eyes):
            pass
        _learnt[key] = adapter.image_side(family, model)
    return _learnt[key]


def _loss(model: nn.Module, head: nn.Linear, data: Data, true_ICS: Tensor, rows: Tensor, update: int) -> Tensor:
    tokens_BCD = adapter.cells_seen(model, adapter.image(data.web[0], rows))
    return F.binary_cross_entropy_with_logits(head(tokens_BCD), true_ICS[rows].float())


def cells(scenes: Sequence[Scene], side: int) -> Tensor:
    """bool [I, side * side, S]: which shape, colour, size and texture lies on the middle of each cell, if any does."""
    found = torch.zeros(len(scenes), side, side, len(SYMBOLS), dtype=torch.bool)
    for scene, of_scene in zip(scenes, found, strict=True):
        middle = (torch.arange(side) + 0.5) * scene.side / side
        for item in scene.objects:  # those behind first, so that what lies in front stays
            x1, y1, x2, y2 = item.box
            here = ((middle >= y1) & (middle < y2))[:, None] & ((middle >= x1) & (middle < x2))
            of_scene[here] = torch.tensor(symbols(item)) > 0
    return found.flatten(1, 2)
