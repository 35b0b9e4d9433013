"""Masked modeling: which words, regions and patches are masked, the masked sentence, and the MLM and MOC losses.

    words    select_tokens, select_words, select_number -> mask_tokens -> masked_language_modeling
    regions  select_regions, overlapping                               -> masked_object_classification
    patches  select_blocks (BEiT)                                      -> cross_entropy over visual tokens

Masks are pure functions of their input and an explicit generator. Numbers are drawn on the generator's own device and
then moved, so that a seed gives the same corruption on every device, and they are drawn for the batch of all processes
(distributed.py). Spans of words are in span_masking.py.

The last section replaces masked words by a first pass's predictions: scheduled sampling (Bengio et al. 2015; for masked
pretraining Li et al. 2021 (TDEN), "Scheduled Sampling in VL Pretraining").

Shape suffixes: B batch, T text tokens, R regions, N patches, M masked words or regions, V vocabulary, C classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vlp_models.objectives.distributed import draw_categorical, draw_local_rows, draw_uniform
from vlp_models.objectives.loss import Loss, at_least_float32, cross_entropy

OVERLAP = 0.4  # IoU above which the public TDEN code hides a masked region's neighbor
MIN_BLOCK_PATCHES = 16  # while at least that many patches remain to be masked
MIN_BLOCK_ASPECT = 0.3  # height to width; its inverse is the maximum


@dataclass(frozen=True, kw_only=True)
class Corruption:
    """A batch's masks in pretraining.

    ids_BT      int64: the sentences with their selected words masked
    words_BT    bool: the selected words
    regions_BR  bool: the selected regions; None if no objective predicts regions
    hidden_BR   bool: the regions the model cannot attend to: the selected ones and maybe others; None likewise
    """

    ids_BT: Tensor
    words_BT: Tensor
    regions_BR: Tensor | None = None
    hidden_BR: Tensor | None = None


# ---- Words -------------------------------------------------------------------------------------------------------


def word_positions(mask_BT: Tensor) -> Tensor:
    """Return bool [B, T], True at the words: all real tokens except the first ([CLS]) and the last ([SEP])."""
    words_BT = mask_BT.clone()
    words_BT[:, 0] = False
    # A word has a real token after it, which [SEP], the last real token, does not.
    words_BT[:, :-1] &= mask_BT[:, 1:]
    words_BT[:, -1] = False
    return words_BT


def select_tokens(mask_BT: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Select each word independently with `probability`. A sentence may end up without selected words. bool [B, T]"""
    selected_BT = draw_uniform(tuple(mask_BT.shape), generator, mask_BT.device) < probability
    return selected_BT & word_positions(mask_BT)


def select_words(word_BT: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Select whole words: each independently with `probability`, all its pieces together. bool [B, T]

    word_BT int64: index of the word that a token is a piece of; -1 for tokens outside any word.
    """
    draw_BT = draw_uniform(tuple(word_BT.shape), generator, word_BT.device)  # one per token; more than there are words
    # Every piece reads the draw at its word's index, so a word's pieces are selected together.
    return (draw_BT.gather(1, word_BT.clamp(min=0)) < probability) & (word_BT >= 0)


def select_number(
    candidates_BT: Tensor, length_B: Tensor, probability: float, generator: torch.Generator, *, at_most: int = 0
) -> Tensor:
    """Select a fixed number of each sentence's candidates, as BERT and UniLM do. bool [B, T]

    The number is `probability` times the sentence's length, rounded half to even, but at least one; none if the
    probability is zero.

    length_B int64: words of each sentence. at_most: maximum per sentence; 0: no limit.
    """
    number_B = (length_B.double() * probability).round().clamp(min=1 if probability > 0 else 0, max=at_most or None)
    draw_BT = draw_uniform(tuple(candidates_BT.shape), generator, candidates_BT.device)
    # Rank the candidates by their draw; 2.0 sorts all other tokens behind them.
    rank_BT = draw_BT.masked_fill(~candidates_BT, 2.0).argsort(dim=1, stable=True).argsort(dim=1)
    return candidates_BT & (rank_BT < number_B[:, None])


def word_range(mask_id: int, vocab_size: int) -> tuple[int, int]:
    """Return the first id of the words that may replace a masked one, and the id after the last.

    They come after [MASK] in BERT's vocabulary and the ones trained here, without special tokens. If [MASK] is the last
    token or one of the last (RoBERTa's, or one that was appended), they come before it, with the few special tokens
    among them, as in BERT's own code.
    """
    # [MASK] is at the start if the tokens after it exceed an eighth of those before it.
    if vocab_size - mask_id > mask_id // 8 + 1:
        return mask_id + 1, vocab_size
    return 0, mask_id


def mask_tokens(
    ids_BT: Tensor,
    selected_BT: Tensor,
    *,
    scheme: Literal["mask", "bert"],
    mask_id: int,
    vocab_size: int,
    generator: torch.Generator,
) -> Tensor:
    """Return the ids with the selected tokens replaced.

    `mask`: always [MASK] (TDEN). `bert`: 80% [MASK], 10% a random word, 10% unchanged. Random words: `word_range`.
    """
    if scheme == "mask":
        return ids_BT.masked_fill(selected_BT, mask_id)
    words = word_range(mask_id, vocab_size)
    action_BT = draw_uniform(tuple(ids_BT.shape), generator, ids_BT.device)
    random_BT = draw_local_rows(
        tuple(ids_BT.shape),
        lambda size: torch.randint(*words, size, generator=generator, device=generator.device),
    ).to(ids_BT.device)
    ids_BT = torch.where(selected_BT & (action_BT < 0.8), mask_id, ids_BT)
    return torch.where(selected_BT & (action_BT >= 0.9), random_BT, ids_BT)


def masked_language_modeling(logits_MV: Tensor, targets_M: Tensor) -> Loss:
    """Return MLM's cross-entropy. logits_MV: predictions at the M masked positions; targets_M int64: original words."""
    return cross_entropy(logits_MV, targets_M, name="mlm")


# ---- Regions -----------------------------------------------------------------------------------------------------


def select_regions(mask_BR: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Select each region independently with `probability`. bool [B, R]"""
    return (draw_uniform(tuple(mask_BR.shape), generator, mask_BR.device) < probability) & mask_BR


def overlapping(selected_BR: Tensor, boxes_BR4: Tensor) -> Tensor:
    """Return the selected regions and those whose IoU with a selected one is above OVERLAP. bool [B, R]

    Boxes are continuous: x2 - x1 is a width. The public TDEN code adds a pixel to each side, as for pixels counted
    from 0, so about one in 200 hidden regions differs.
    """
    # [B, R, 1, 2] against [B, 1, R, 2] -> [B, R, R]
    top_left = torch.maximum(boxes_BR4[:, :, None, :2], boxes_BR4[:, None, :, :2])
    bottom_right = torch.minimum(boxes_BR4[:, :, None, 2:], boxes_BR4[:, None, :, 2:])
    intersection_BRR = (bottom_right - top_left).clamp(min=0).prod(-1)
    area_BR = (boxes_BR4[..., 2:] - boxes_BR4[..., :2]).clamp(min=0).prod(-1)
    union_BRR = area_BR[:, :, None] + area_BR[:, None, :] - intersection_BRR
    # IoU above the threshold, written without dividing by the union of empty boxes.
    near_BRR = intersection_BRR > OVERLAP * union_BRR
    return selected_BR | (near_BRR & selected_BR[:, None, :]).any(-1)


def masked_object_classification(logits_MC: Tensor, targets_MC: Tensor) -> Loss:
    """Return MOC's loss (TDEN; UNITER's MRC-KL): KL(target || prediction), summed over C classes and M masked regions.

    targets_MC: the detector's class probabilities. They may have been stored in half precision, so they are
    renormalized to sum to one. Computed in float32 at least.
    """
    logits_MC = at_least_float32(logits_MC)
    targets_MC = targets_MC.to(logits_MC.dtype)
    # The clamp keeps a row of zeros from becoming NaN.
    targets_MC = targets_MC / targets_MC.sum(-1, keepdim=True).clamp(min=1e-6)
    total = F.kl_div(logits_MC.log_softmax(-1), targets_MC, reduction="sum")
    correct = (logits_MC.argmax(-1) == targets_MC.argmax(-1)).sum()
    return Loss.of(total, len(logits_MC), moc=total, moc_accuracy=correct)


# ---- Patches -----------------------------------------------------------------------------------------------------


def select_blocks(
    images: int, grid: tuple[int, int], share: float, generator: torch.Generator, device: torch.device | str = "cpu"
) -> Tensor:
    """Select blocks of patches until `share` of each image's patches is masked (BEiT, algorithm 1). bool [B, N]

    Blocks have random size, shape and position. Each image has its own seed, drawn for the batch of all processes.
    """
    draw_device = generator.device
    seeds_B = draw_local_rows(
        (images,), lambda size: torch.randint(2**62, size, generator=generator, device=draw_device)
    )
    masks = [_select_image_blocks(grid, share, np.random.default_rng(seed)) for seed in seeds_B.tolist()]
    stacked = np.stack(masks) if masks else np.zeros((0, grid[0] * grid[1]), dtype=bool)
    return torch.from_numpy(stacked).to(device)


def _select_image_blocks(grid: tuple[int, int], share: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    height, width = grid
    masked, target = np.zeros(grid, dtype=bool), round(share * height * width)
    # A block may overlap earlier ones, so it masks between none and `remaining` new patches.
    while (remaining := target - int(masked.sum())) > 0:
        size = rng.uniform(min(MIN_BLOCK_PATCHES, remaining), remaining)
        ratio = rng.uniform(MIN_BLOCK_ASPECT, 1 / MIN_BLOCK_ASPECT)
        # A block of about `size` patches, with `ratio` as height to width.
        rows = min(height, max(1, math.floor(math.sqrt(size * ratio))))
        columns = min(width, max(1, math.floor(math.sqrt(size / ratio))))
        top, start = rng.integers(0, height - rows + 1), rng.integers(0, width - columns + 1)
        masked[top : top + rows, start : start + columns] = True
    return masked.flatten()


# ---- Scheduled sampling of masked words --------------------------------------------------------------------------


def ramp_share(update: int | None, *, start: float, end: float, steps: int) -> float:
    """Return the share of masked words that update number `update` replaces: linear from `start` to `end` in `steps`
    updates, then `end`. None, in validation, gives `end`, so that validations are comparable."""
    if update is None or update >= steps:
        return end
    return start + (end - start) * update / steps


def sample_words(logits_MV: Tensor, *, how: Literal["multinomial", "argmax"], generator: torch.Generator) -> Tensor:
    """Return word ids, int64 [M]: drawn from the predicted distributions (the paper) or the most probable (its code).

    No gradient flows back.
    """
    logits_MV = logits_MV.detach()
    if how == "argmax":
        return logits_MV.argmax(-1)
    return draw_categorical(logits_MV.float().softmax(-1), generator)


def select_replaced(words_BT: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Select the masked words to replace, each with probability `share`. bool [B, T]"""
    return words_BT & (draw_uniform(tuple(words_BT.shape), generator, words_BT.device) < share)


def replace_words(ids_BT: Tensor, words_BT: Tensor, words_M: Tensor, replaced_BT: Tensor) -> Tensor:
    """Write `words_M` into the sentences at the positions in `replaced_BT`. int64 [B, T]

    words_M has one word for each True position of `words_BT`, in row-major order.
    """
    written_BT = ids_BT.clone()
    written_BT[words_BT] = words_M
    return torch.where(replaced_BT, written_BT, ids_BT)
