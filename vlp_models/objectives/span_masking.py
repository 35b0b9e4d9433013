"""Span masking: one fragment of a sentence (MASS), or spans of random lengths (BART's text infilling).

K. Song et al.: "MASS: Masked Sequence to Sequence Pre-training for Language Generation", ICML 2019, section 3.
M. Lewis et al.: "BART", ACL 2020, section 2.2, Text Infilling.

Pure functions of their input and an explicit generator; numbers are drawn for the batch of all processes
(distributed.py).

Shape suffixes: B sentences, T tokens, U tokens after the spans are replaced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vlp_models.objectives.distributed import draw_uniform
from vlp_models.objectives.masked_modeling import word_positions

Span = tuple[int, int]  # position of its first token, and length; length 0: an insertion before that position


def select_fragment(mask_BT: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Select one run of words in each sentence, `share` of its words (rounded, at least one), at a uniform position.

    Returns bool [B, T]; nothing is selected in a sentence without words.
    """
    words_B1 = word_positions(mask_BT).sum(1, keepdim=True)
    # Half rounds up; at least one word, but none in a sentence without words.
    length_B1 = torch.floor(share * words_B1 + 0.5).long().clamp(min=1).minimum(words_B1)
    chance_B1 = draw_uniform((len(mask_BT), 1), generator, mask_BT.device)
    starts_B1 = words_B1 - length_B1 + 1  # number of possible first words
    # The minimum is for a product that rounds up to the number of starts.
    first_B1 = 1 + torch.minimum((chance_B1 * starts_B1).long(), starts_B1 - 1)  # after [CLS]
    positions_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    return (positions_T >= first_B1) & (positions_T < first_B1 + length_B1)


def draw_spans(
    mask_BT: Tensor, *, share: float, mean: float, empty: bool, generator: torch.Generator
) -> list[list[Span]]:
    """Draw spans of each sentence's words, in order and separated by at least one word.

    Lengths are Poisson numbers with this mean, until `share` of the words (rounded, at least one) is masked; the last
    span is cut to fit. Positions are uniform.

    empty: allow length 0 as BART does, where a [MASK] may stand for no word, but only as many as keep a sentence with
        one [MASK] per span from getting longer. Otherwise lengths start at 1.
    """
    # (B, T, 2): a number for the length and one for the position of each span, of which there are at most T.
    draws_BT2 = draw_uniform((*mask_BT.shape, 2), generator, torch.device("cpu")).numpy()
    words_B = word_positions(mask_BT).sum(1).tolist()
    lengths_BT = _draw_poisson(draws_BT2[..., 0].astype(np.float64), mean, smallest=0 if empty else 1)
    spans = []
    for words, lengths_T, chances_T in zip(words_B, lengths_BT, draws_BT2[..., 1], strict=True):
        lengths = _fit_lengths(words, lengths_T.tolist(), share)
        spans.append(_place_spans(lengths, words, chances_T))
    return spans


def replace_spans(
    ids_BT: Tensor, mask_BT: Tensor, spans: Sequence[Sequence[Span]], *, how: Literal["single", "multi"], mask_id: int
) -> tuple[Tensor, Tensor]:
    """Replace each span by one [MASK] (`single`) or by one per token (`multi`).

    Returns ids and mask, [B, U]. With `single`, the tokens after a span move up, so its length is not visible.
    """
    rows = []
    lengths = mask_BT.sum(1).tolist()
    for ids, length, sentence_spans in zip(ids_BT.tolist(), lengths, spans, strict=True):
        row, done = [], 0
        for start, count in sentence_spans:
            masks = 1 if how == "single" else count
            row += [*ids[done:start], *[mask_id] * masks]
            done = start + count
        rows.append([*row, *ids[done:length]])
    # Pad to the longest sentence: (B, U)
    width = max((len(row) for row in rows), default=ids_BT.shape[1])
    replaced = torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=ids_BT.dtype).reshape(-1, width)
    counts_B1 = torch.tensor([[len(row)] for row in rows], dtype=torch.int64).reshape(-1, 1)
    return replaced.to(ids_BT.device), (torch.arange(width) < counts_B1).to(ids_BT.device)


def _draw_poisson(chance: NDArray[np.float64], mean: float, *, smallest: int) -> NDArray[np.int64]:
    """Return Poisson numbers of at least `smallest`, by inversion of the cumulative probability at `chance`."""
    largest = int(mean + 20 * math.sqrt(mean) + 20)  # beyond this the probability underflows
    # By logarithms, because powers and factorials overflow.
    probability = np.array([math.exp(-mean + n * math.log(mean) - math.lgamma(n + 1)) for n in range(largest + 1)])
    probability[:smallest] = 0
    cumulated = np.cumsum(probability / probability.sum())
    return np.minimum(np.searchsorted(cumulated, chance, side="right"), largest).astype(np.int64)


def _fit_lengths(words: int, lengths: Sequence[int], share: float) -> list[int]:
    """Return the first lengths that mask `share` of the words and leave a word between any two spans.

    Zero lengths are kept, earliest first, while there is room: one for each word that longer spans mask beyond their
    first word."""
    target = min(words, max(1, math.floor(share * words + 0.5)))
    chosen_lengths: list[int] = []
    for length in lengths:
        length = min(length, target - sum(chosen_lengths))
        # One more span needs a remaining word for each span before it, to be separated from it.
        if sum(chosen_lengths) >= target or len(chosen_lengths) > words - sum(chosen_lengths) - length:
            break
        chosen_lengths.append(length)
    # With one [MASK] per span, a longer span makes the sentence shorter, and one of length zero makes it longer.
    room = sum(chosen_lengths) - sum(length > 0 for length in chosen_lengths)
    surplus = max(0, chosen_lengths.count(0) - room)
    for _ in range(surplus):  # remove the last zero; positions are drawn later
        del chosen_lengths[len(chosen_lengths) - 1 - chosen_lengths[::-1].index(0)]
    return chosen_lengths


def _place_spans(lengths: Sequence[int], words: int, chances: NDArray[np.float32]) -> list[Span]:
    """Return the spans, each in its own gap. Gaps are before each remaining word and after the last one."""
    # Gaps without repetition: the positions of the smallest random numbers.
    gaps = np.argsort(chances[: words - sum(lengths) + 1], kind="stable")[: len(lengths)].tolist()
    spans, hidden = [], 0
    for gap, length in sorted(zip(gaps, lengths, strict=True)):
        spans.append((1 + gap + hidden, length))  # after [CLS]
        hidden += length
    return spans
