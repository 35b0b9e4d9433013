"""Which tokens and regions to hide: pure functions of their input and an explicit generator.

Numbers are drawn on the generator's own device, then moved: one seed gives one corruption on every device.

Shape suffixes: B batch, T text tokens, R regions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vlp_models.objectives.ranks import own_share_of

OVERLAP = 0.4  # IoU from which the public TDEN code hides a masked region's neighbour


@dataclass(frozen=True, kw_only=True)
class Corruption:
    """What pretraining hides of a batch.

    ids_BT      int64: the sentences with their selected words masked
    words_BT    bool: the selected words
    regions_BR  bool: the selected regions; None if no objective predicts regions
    hidden_BR   bool: the regions that are out of sight, the selected ones and perhaps more; None likewise
    """

    ids_BT: Tensor
    words_BT: Tensor
    regions_BR: Tensor | None = None
    hidden_BR: Tensor | None = None


def draw_uniform(shape: tuple[int, ...], generator: torch.Generator, device: torch.device) -> Tensor:
    """Numbers for the whole batch, of which this process gets its rows."""
    return own_share_of(shape, lambda size: torch.rand(size, generator=generator, device=generator.device)).to(device)


def word_positions(mask_BT: Tensor) -> Tensor:
    """True at the words: real tokens but the first ([CLS]) and the last ([SEP])."""
    words_BT = mask_BT.clone()
    words_BT[:, 0] = False
    words_BT[:, :-1] &= mask_BT[:, 1:]
    words_BT[:, -1] = False
    return words_BT


def select_tokens(mask_BT: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Each word is selected independently with `probability`; a sentence without selected words is possible."""
    chosen_BT = draw_uniform(tuple(mask_BT.shape), generator, mask_BT.device) < probability
    return chosen_BT & word_positions(mask_BT)


def select_number(
    candidates_BT: Tensor, length_B: Tensor, probability: float, generator: torch.Generator, *, at_most: int = 0
) -> Tensor:
    """Of each sentence's candidates `probability` times its length, rounded (halves to even), one at least, as BERT and
    UniLM do; none if the probability is zero. bool [B, T]

    length_B int64: how many words it has. at_most: the most of a sentence; 0: no limit.
    """
    number_B = (length_B.double() * probability).round().clamp(min=1 if probability > 0 else 0, max=at_most or None)
    draw_BT = draw_uniform(tuple(candidates_BT.shape), generator, candidates_BT.device)
    rank_BT = draw_BT.masked_fill(~candidates_BT, 2.0).argsort(dim=1, stable=True).argsort(dim=1)
    return candidates_BT & (rank_BT < number_B[:, None])


def mask_tokens(
    ids_BT: Tensor,
    selected_BT: Tensor,
    *,
    scheme: Literal["mask", "bert"],
    mask_id: int,
    vocab_size: int,
    generator: torch.Generator,
) -> Tensor:
    """The ids with the selected ones replaced.

    `mask`: always by [MASK] (TDEN). `bert`: 80% by [MASK], 10% by a random word, 10% kept. Random words come from
    the whole vocabulary behind [MASK], where both BERT's and our own vocabularies keep no special token.
    """
    if scheme == "mask":
        return ids_BT.masked_fill(selected_BT, mask_id)
    action_BT = draw_uniform(tuple(ids_BT.shape), generator, ids_BT.device)

    def draw_words(size: tuple[int, ...]) -> Tensor:
        return torch.randint(mask_id + 1, vocab_size, size, generator=generator, device=generator.device)

    random_BT = own_share_of(tuple(ids_BT.shape), draw_words).to(ids_BT.device)
    ids_BT = torch.where(selected_BT & (action_BT < 0.8), mask_id, ids_BT)
    return torch.where(selected_BT & (action_BT >= 0.9), random_BT, ids_BT)


def select_regions(mask_BR: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Each region is selected independently with `probability`."""
    return (draw_uniform(tuple(mask_BR.shape), generator, mask_BR.device) < probability) & mask_BR


def overlapping(selected_BR: Tensor, boxes_BR4: Tensor, threshold: float = OVERLAP) -> Tensor:
    """True at the selected regions and at those whose IoU with a selected one is above `threshold`.

    Boxes are continuous: x2 - x1 is a width. The public TDEN code adds a pixel to each side, as for pixels counted
    from 0, so that for every 200 hidden regions one or so differs.
    """
    top_left = torch.maximum(boxes_BR4[:, :, None, :2], boxes_BR4[:, None, :, :2])
    bottom_right = torch.minimum(boxes_BR4[:, :, None, 2:], boxes_BR4[:, None, :, 2:])
    intersection_BRR = (bottom_right - top_left).clamp(min=0).prod(-1)
    area_BR = (boxes_BR4[..., 2:] - boxes_BR4[..., :2]).clamp(min=0).prod(-1)
    union_BRR = area_BR[:, :, None] + area_BR[:, None, :] - intersection_BRR
    near_BRR = intersection_BRR > threshold * union_BRR
    return selected_BR | (near_BRR & selected_BR[:, None, :]).any(-1)


def select_words(word_BT: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Whole words: each is selected independently with `probability`, all its pieces together. bool [B, T]

    word_BT int64: which of the sentence's words a token is a piece of, -1 where of none.
    """
    draw_BT = draw_uniform(tuple(word_BT.shape), generator, word_BT.device)  # more than there are words
    return (draw_BT.gather(1, word_BT.clamp(min=0)) < probability) & (word_BT >= 0)
