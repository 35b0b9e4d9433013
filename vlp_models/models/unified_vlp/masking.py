"""Which samples train which objective of Unified VLP, and which tokens are masked.

Shape suffixes: B images, R regions, N texts, T text tokens, M packed tokens.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from vlp_models.data.batch import Text
from vlp_models.models.layers.packing import Packing
from vlp_models.models.unified_vlp.config import UnifiedVLPConfig
from vlp_models.objectives.loss import Learners
from vlp_models.objectives.masked_modeling import word_positions, word_range

BIDIRECTIONAL, SEQ2SEQ = "bidirectional", "seq2seq"


def maskable(text: Text) -> Tensor:
    """Return the tokens that may be masked: the words and the closing [SEP], unless the text was cut, where that [SEP]
    closes nothing. bool [N, T]"""
    if text.cut_B is None:
        return _after_first(text.mask_BT)
    return torch.where(text.cut_B[:, None], word_positions(text.mask_BT), _after_first(text.mask_BT))


def mask_one_word(text: Text, config: UnifiedVLPConfig) -> Tensor:
    """Return the texts with one token of each, after the first, masked by BERT's scheme. int64 [N, T]

    Draws from torch's global generator, as dropout does."""
    ids_NT, device = text.ids_BT, text.ids_BT.device
    draw_NT = torch.rand(ids_NT.shape, device=device).masked_fill(~_after_first(text.mask_BT), -1.0)
    masked_NT = F.one_hot(draw_NT.argmax(1), ids_NT.shape[1]).bool()  # the largest draw wins
    # 80% [MASK], 10% a random word, 10% unchanged
    action_N1 = torch.rand(len(ids_NT), 1, device=device)
    random_N1 = torch.randint(*word_range(config.mask_id, config.vocab_size), (len(ids_NT), 1), device=device)
    ids_NT = torch.where(masked_NT & (action_N1 < 0.8), config.mask_id, ids_NT)
    return torch.where(masked_NT & (action_N1 >= 0.9), random_N1, ids_NT)


def texts_by_path(objectives: Learners, text: Text) -> dict[str, Tensor]:
    """Return the texts that the stack processes with each of the two attention masks: path -> int64 [N], ascending."""
    rows = {}
    for path, names in ((BIDIRECTIONAL, (BIDIRECTIONAL, "moc")), (SEQ2SEQ, (SEQ2SEQ,))):
        learners = [objectives[name] for name in names if name in objectives]
        # None: every text trains the objective. Otherwise the texts that train at least one of them.
        if any(mask is None for mask in learners):
            rows[path] = torch.arange(len(text), device=text.ids_BT.device)
        elif learners:
            rows[path] = torch.stack(cast("list[Tensor]", learners)).any(0).nonzero().squeeze(1)
    return rows


def rows_at_end(packing: Packing, at_NT: Tensor) -> Tensor:
    """Return the packed rows of these places, int64, where `at_NT` covers the end of the sequences."""
    return packing.rows_at(F.pad(at_NT, (packing.shape[1] - at_NT.shape[1], 0)))


def rows_of_texts(rows_B: Tensor, text: Text) -> Tensor:
    """Return the row of each text's image: [B, ...] -> [N, ...]."""
    return rows_B if text.owner_N is None else rows_B[text.owner_N]


def _after_first(mask_NT: Tensor) -> Tensor:
    # The mask without the first place, which is [CLS].
    return F.pad(mask_NT[:, 1:], (1, 0))
