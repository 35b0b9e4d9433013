"""Texts of several segments, such as a question, an answer and its rationale, as one row of word pieces."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from vlp_models.data.batch import Text
from vlp_models.data.tokenizer import Tokenizer


def encode_segments(tokenizer: Tokenizer, texts: Sequence[Sequence[str]], max_len: int) -> Text:
    """Encode texts of several segments as [CLS] first [SEP] second [SEP] ...

    A text that is too long loses the ends of its longest segments.

    Raises:
        ValueError: `max_len` does not fit [CLS] and each segment's [SEP].
    """
    rows, starts, cut = [], [], []
    for segments in texts:
        room = max_len - 1 - len(segments)
        if room < 0:
            raise ValueError(f"max_len must fit [CLS] and {len(segments)} [SEP]: {max_len}")
        pieces = [tokenizer.pieces(segment) for segment in segments]
        last_length = len(pieces[-1])
        # shorten the longest segment, one piece at a time
        while sum(map(len, pieces)) > room:
            longest = max(range(len(pieces)), key=lambda i: len(pieces[i]))
            pieces[longest] = pieces[longest][:-1]
        rows.append([tokenizer.cls_id, *(i for ids in pieces for i in (*ids, tokenizer.sep_id))])
        cut.append(len(pieces[-1]) < last_length)
        # where the last segment starts; behind the row if it is the only one
        starts.append(len(rows[-1]) - (len(pieces[-1]) + 1 if len(pieces) > 1 else 0))
    text = tokenizer.pad(rows)
    # (B, T): True from the last segment's first piece on.
    is_last_BT = torch.arange(text.ids_BT.shape[1]) >= torch.tensor(starts)[:, None]
    cut_B = torch.tensor(cut, dtype=torch.bool)
    return dataclasses.replace(text, last_segment_BT=text.mask_BT & is_last_BT, cut_B=cut_B)
