"""Runs of words to hide: one fragment of a sentence (MASS), or spans of drawn lengths (BART's text infilling).

K. Song et al.: "MASS: Masked Sequence to Sequence Pre-training for Language Generation", ICML 2019, section 3.
M. Lewis et al.: "BART", ACL 2020, section 2.2, Text Infilling.

Pure functions of their input and an explicit generator, drawn for the batch of all processes (objectives/ranks.py).

Shape suffixes: B sentences, T tokens, U tokens of a sentence with its spans replaced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vlp_models.objectives.masked_modeling import word_positions
from vlp_models.objectives.ranks import draw_uniform

Span = tuple[int, int]  # place of its first token in the sentence, and how many tokens; 0: in front of that place


def select_fragment(mask_BT: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """One run of words of each sentence, `share` of them (rounded, at least one), anywhere with equal chances.

    bool [B, T]; of a sentence without words nothing is selected.
    """
    words_B1 = word_positions(mask_BT).sum(1, keepdim=True)
    length_B1 = torch.floor(share * words_B1 + 0.5).long().clamp(min=1).minimum(words_B1)
    chance_B1 = draw_uniform((len(mask_BT), 1), generator, mask_BT.device)
    starts_B1 = words_B1 - length_B1 + 1  # so many places to begin at
    first_B1 = 1 + torch.minimum((chance_B1 * starts_B1).long(), starts_B1 - 1)  # [CLS] stands in front
    places_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    return (places_T >= first_B1) & (places_T < first_B1 + length_B1)


def draw_spans(
    mask_BT: Tensor, *, share: float, mean: float, empty: bool, generator: torch.Generator
) -> list[list[Span]]:
    """Spans of each sentence's words, in their order, never side by side: a word at least stands between two.

    Lengths are Poisson numbers of this mean, until `share` of the words (rounded, at least one) is hidden; the last
    span is cut to that. They come to lie anywhere with equal chances. empty: lengths of 0 as well, as in BART, where a
    [MASK] may stand for nothing, but only so many that a sentence with one [MASK] a span is no longer than before; else
    they are drawn from 1 on.
    """
    draws_BT2 = draw_uniform((*mask_BT.shape, 2), generator, torch.device("cpu")).numpy()
    words_B = word_positions(mask_BT).sum(1).tolist()
    lengths_BT = _poisson(draws_BT2[..., 0].astype(np.float64), mean, smallest=0 if empty else 1)
    rows = zip(words_B, lengths_BT, draws_BT2[..., 1], strict=True)
    return [_place(_cut(words, lengths.tolist(), share), words, chances) for words, lengths, chances in rows]


def replace_spans(
    ids_BT: Tensor, mask_BT: Tensor, spans: Sequence[Sequence[Span]], *, how: Literal["single", "multi"], mask_id: int
) -> tuple[Tensor, Tensor]:
    """The sentences with each span replaced: by one [MASK] (`single`), or by one for each of its tokens (`multi`).

    Returns ids and mask, [B, U]: the tokens behind a span move up, so that nothing tells its length.
    """
    rows = []
    lengths = mask_BT.sum(1).tolist()
    for ids, length, of_sentence in zip(ids_BT.tolist(), lengths, spans, strict=True):
        row, done = [], 0
        for start, count in of_sentence:
            row += [*ids[done:start], *[mask_id] * (1 if how == "single" else count)]
            done = start + count
        rows.append([*row, *ids[done:length]])
    width = max((len(row) for row in rows), default=ids_BT.shape[1])
    replaced = torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=ids_BT.dtype).reshape(-1, width)
    counts_B1 = torch.tensor([[len(row)] for row in rows], dtype=torch.int64).reshape(-1, 1)
    return replaced.to(ids_BT.device), (torch.arange(width) < counts_B1).to(ids_BT.device)


def _poisson(chance: NDArray[np.float64], mean: float, *, smallest: int) -> NDArray[np.int64]:
    """By inversion: where the cumulated probability of the numbers from `smallest` on first exceeds the chance."""
    largest = int(mean + 20 * math.sqrt(mean) + 20)  # beyond it the probability is no longer a number
    probability = np.array([math.exp(-mean + n * math.log(mean) - math.lgamma(n + 1)) for n in range(largest + 1)])
    probability[:smallest] = 0
    cumulated = np.cumsum(probability / probability.sum())
    return np.minimum(np.searchsorted(cumulated, chance, side="right"), largest).astype(np.int64)


def _cut(words: int, lengths: Sequence[int], share: float) -> list[int]:
    """As many of the lengths as hide `share` of the words and leave one between any two; of those that are 0, the first
    that find room: one for each word that a longer span hides beyond its first."""
    wanted = min(words, max(1, math.floor(share * words + 0.5)))
    kept: list[int] = []
    for length in lengths:
        length = min(length, wanted - sum(kept))
        if sum(kept) >= wanted or len(kept) > words - sum(kept) - length:
            break
        kept.append(length)
    room = sum(kept) - sum(length > 0 for length in kept)
    surplus = max(0, kept.count(0) - room)
    for _ in range(surplus):  # what was drawn last goes first; its place is not drawn yet
        del kept[len(kept) - 1 - kept[::-1].index(0)]
    return kept


def _place(lengths: Sequence[int], words: int, chances: NDArray[np.float32]) -> list[Span]:
    """The words that stay have a gap in front of each and one behind the last; every span gets a gap of its own."""
    gaps = np.argsort(chances[: words - sum(lengths) + 1], kind="stable")[: len(lengths)].tolist()
    spans, hidden = [], 0
    for gap, length in sorted(zip(gaps, lengths, strict=True)):
        spans.append((1 + gap + hidden, length))  # [CLS] stands in front
        hidden += length
    return spans
