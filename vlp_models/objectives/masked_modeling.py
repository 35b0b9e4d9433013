"""Which tokens and regions to hide: pure functions of their input and an explicit generator.

Numbers are drawn on the generator's own device, then moved: one seed gives one corruption on every device.

Shape suffixes: B batch, T text tokens, R regions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vlp_models.objectives.loss import Loss, cross_entropy
from vlp_models.objectives.ranks import draw_categorical, draw_uniform, own_share_of

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


SMALLEST = 16  # patches of a block, where that many are still to be hidden
NARROWEST = 0.3  # height to width of a block


def select_blocks(
    images: int, grid: tuple[int, int], share: float, generator: torch.Generator, device: torch.device | str = "cpu"
) -> Tensor:
    """bool [B, N]: blocks of random size, shape and place are hidden until `share` of each image's patches is.

    A seed for each image is drawn for the batch of all processes.
    """
    device_of_draws = generator.device
    seeds_B = own_share_of(
        (images,), lambda size: torch.randint(2**62, size, generator=generator, device=device_of_draws)
    )
    hidden = [_blocks(grid, share, np.random.default_rng(seed)) for seed in seeds_B.tolist()]
    stacked = np.stack(hidden) if hidden else np.zeros((0, grid[0] * grid[1]), dtype=bool)
    return torch.from_numpy(stacked).to(device)


def _blocks(grid: tuple[int, int], share: float, rng: np.random.Generator) -> np.ndarray:
    height, width = grid
    hidden, wanted = np.zeros(grid, dtype=bool), round(share * height * width)
    while (left := wanted - int(hidden.sum())) > 0:
        size, ratio = rng.uniform(min(SMALLEST, left), left), rng.uniform(NARROWEST, 1 / NARROWEST)
        rows = min(height, max(1, math.floor(math.sqrt(size * ratio))))
        columns = min(width, max(1, math.floor(math.sqrt(size / ratio))))
        top, start = rng.integers(0, height - rows + 1), rng.integers(0, width - columns + 1)
        hidden[top : top + rows, start : start + columns] = True
    return hidden.flatten()


def masked_language_modelling(logits_MV: Tensor, targets_M: Tensor) -> Loss:
    """logits_MV: predictions at the M masked positions; targets_M int64: the words that stood there."""
    return cross_entropy(logits_MV, targets_M, name="mlm")


def masked_object_classification(logits_MC: Tensor, targets_MC: Tensor) -> Loss:
    """KL(target || prediction), summed over the C classes and the M masked regions.

    targets_MC: the detector's class probabilities. They may have been stored in half precision, so they are made
    to sum to one again. Computed in float32 at least.
    """
    logits_MC = logits_MC.float() if logits_MC.dtype.itemsize < 4 else logits_MC
    targets_MC = targets_MC.to(logits_MC.dtype)
    targets_MC = targets_MC / targets_MC.sum(-1, keepdim=True).clamp(min=1e-6)
    total = F.kl_div(logits_MC.log_softmax(-1), targets_MC, reduction="sum")
    correct = (logits_MC.argmax(-1) == targets_MC.argmax(-1)).sum()
    return Loss.of(total, len(logits_MC), moc=total, moc_accuracy=correct)


def share_at(update: int | None, *, start: float, end: float, steps: int) -> float:
    """The share of the masked words that update number `update` replaces: linear from `start` to `end` in `steps`
    updates, then `end`. None (validation) is the end, so that validations compare."""
    if update is None or update >= steps:
        return end
    return start + (end - start) * update / steps


def sample_words(logits_MV: Tensor, *, how: Literal["multinomial", "argmax"], generator: torch.Generator) -> Tensor:
    """Word ids, int64 [M]: drawn from the predicted distributions (the paper) or the most probable (its code).

    No gradient passes.
    """
    logits_MV = logits_MV.detach()
    if how == "argmax":
        return logits_MV.argmax(-1)
    return draw_categorical(logits_MV.float().softmax(-1), generator)


def select_replaced(words_BT: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Which of the masked words to replace: each with probability `share`. bool [B, T]"""
    return words_BT & (draw_uniform(tuple(words_BT.shape), generator, words_BT.device) < share)


def replace_words(ids_BT: Tensor, words_BT: Tensor, words_M: Tensor, replaced_BT: Tensor) -> Tensor:
    """The sentences with `words_M`, which belong to the True places of `words_BT` in row-major order, written where
    `replaced_BT`, too, is True."""
    written_BT = ids_BT.clone()
    written_BT[words_BT] = words_M
    return torch.where(replaced_BT, written_BT, ids_BT)
