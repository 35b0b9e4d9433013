"""Who learns what of a batch, and what is hidden from whom.

Shape suffixes: B images, R regions, N texts, T text tokens, M packed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from vlp_models.data.batch import Text
from vlp_models.models.layers.packing import Packing
from vlp_models.models.unified_vlp.config import UnifiedVLPConfig
from vlp_models.objectives.masked_modeling import word_positions

BIDIRECTIONAL, SEQ2SEQ = "bidirectional", "seq2seq"
Learners = Mapping[str, Tensor | None]  # objective -> bool [N], which samples learn it; None: all


def hideable(text: Text) -> Tensor:
    """bool [N, T]: the words and the closing [SEP], but not of a text that was cut, where it closes nothing."""
    if text.cut_B is None:
        return _behind_first(text.mask_BT)
    return torch.where(text.cut_B[:, None], word_positions(text.mask_BT), _behind_first(text.mask_BT))


def hide_a_word(text: Text, config: UnifiedVLPConfig) -> Tensor:
    """The texts, each with one of its tokens behind the first hidden as BERT hides. Draws from torch's own generator,
    as dropout does. int64 [N, T]"""
    ids_NT, device = text.ids_BT, text.ids_BT.device
    draw_NT = torch.rand(ids_NT.shape, device=device).masked_fill(~_behind_first(text.mask_BT), -1.0)
    chosen_NT = F.one_hot(draw_NT.argmax(1), ids_NT.shape[1]).bool()
    action_N1 = torch.rand(len(ids_NT), 1, device=device)
    random_N1 = torch.randint(config.mask_id + 1, config.vocab_size, (len(ids_NT), 1), device=device)
    ids_NT = torch.where(chosen_NT & (action_N1 < 0.8), config.mask_id, ids_NT)
    return torch.where(chosen_NT & (action_N1 >= 0.9), random_N1, ids_NT)


def rows_of(objectives: Learners, text: Text) -> dict[str, Tensor]:
    """Which texts the stack sees with each of the two masks: path -> int64 [N], in their order."""
    rows = {}
    for path, names in ((BIDIRECTIONAL, (BIDIRECTIONAL, "moc")), (SEQ2SEQ, (SEQ2SEQ,))):
        learners = [objectives[name] for name in names if name in objectives]
        if any(mask is None for mask in learners):
            rows[path] = torch.arange(len(text), device=text.ids_BT.device)
        elif learners:
            rows[path] = torch.stack(cast("list[Tensor]", learners)).any(0).nonzero().squeeze(1)
    return rows


def rows_behind(packing: Packing, at_NT: Tensor) -> Tensor:
    """int64: the packed rows of these places, counted from the end of the sequences."""
    return packing.rows_at(F.pad(at_NT, (packing.shape[1] - at_NT.shape[1], 0)))


def learnt(places: Tensor, learners: Tensor | None) -> Tensor:
    """Of these places in [N, ...] those of the samples that learn."""
    return places if learners is None else places & learners[:, None]


def any_learner(objectives: Learners, like_NT: Tensor) -> Tensor:
    """bool, broadcastable to [N, T]: which samples learn from hidden words."""
    masks = [objectives[name] for name in (BIDIRECTIONAL, SEQ2SEQ) if name in objectives]
    if any(mask is None for mask in masks):
        return torch.ones_like(like_NT[:1, :1])
    return torch.stack(cast("list[Tensor]", masks)).any(0)[:, None]


def of_texts(rows_B: Tensor, text: Text) -> Tensor:
    """Of each text its image's row."""
    return rows_B if text.owner_N is None else rows_B[text.owner_N]


def _behind_first(mask_NT: Tensor) -> Tensor:
    return F.pad(mask_NT[:, 1:], (1, 0))
