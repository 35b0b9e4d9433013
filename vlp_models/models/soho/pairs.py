"""Image-text pairs for pretraining: each text with its own image and, for ITM, a text of another image; cells for MVM.

Shape suffixes: B images, N texts, P pairs, G texts of the whole batch, R cells, T text tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vlp_models.data.batch import Batch
from vlp_models.objectives.distributed import draw_categorical, draw_uniform, take_rows
from vlp_models.objectives.matching import different_image_mask


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Matched pairs in the order of the texts, then mismatched pairs.

    ids_PT       int64: the texts with words masked
    original_PT  int64: the texts before masking
    words_PT     bool: the masked words
    mask_PT      bool: False in padding
    owner_P      int64: the image, of this process, that each text is paired with
    matched_P    bool
    origin_P     int64: the text, of this process, that a pair has or (mismatched) has replaced
    """

    ids_PT: Tensor
    original_PT: Tensor
    words_PT: Tensor
    mask_PT: Tensor
    owner_P: Tensor
    matched_P: Tensor
    origin_P: Tensor

    def learners(self, mask_N: Tensor | None) -> Tensor:
        """Return bool [P]: the pairs that have, or have replaced, a text in mask_N, bool [N]; None: all pairs."""
        if mask_N is None:
            return torch.ones_like(self.matched_P)
        return mask_N.index_select(0, self.origin_P)


def make_pairs(
    batch: Batch, ids_NT: Tensor, words_NT: Tensor, generator: torch.Generator, *, mismatched: bool
) -> Pairs:
    """Pair each text with its image and, if `mismatched`, each image with a text of another image.

    Args:
        ids_NT: the batch's texts with words masked.
        words_NT: bool, the masked words.
        mismatched: draw, for each text, one uniformly from all texts of the whole batch, over all processes, whose
            image has another id. A text without such a candidate gets no mismatched pair.
    """
    text, device = batch.text, batch.text.ids_BT.device
    # Each part as a list: the matched pairs, then the mismatched ones
    owner_N = text.owners(len(batch.image))
    owner_N = torch.arange(len(text), device=device) if owner_N is None else owner_N
    origin_N = torch.arange(len(text), device=device)
    parts = {
        "ids_PT": [ids_NT],
        "original_PT": [text.ids_BT],
        "words_PT": [words_NT],
        "mask_PT": [text.mask_BT],
        "owner_P": [owner_N],
        "matched_P": [torch.ones_like(owner_N, dtype=torch.bool)],
        "origin_P": [origin_N],
    }
    if mismatched:
        # bool [N, G]: which texts of all processes are about another image; one of them is drawn for each text
        image_ids = [batch.image_ids[i] for i in owner_N.tolist()]
        negative_NG = different_image_mask(image_ids, device)
        has_N = negative_NG.any(1) if negative_NG.shape[1] else torch.zeros_like(owner_N, dtype=torch.bool)
        drawn_N = draw_categorical(negative_NG.float(), generator) if negative_NG.shape[1] else origin_N
        drawn_P = drawn_N[has_N]
        # Texts and masks may come from another process; the images stay.
        for name in ("ids_PT", "original_PT", "words_PT", "mask_PT"):
            parts[name].append(take_rows(parts[name][0], drawn_P))
        parts["owner_P"].append(owner_N[has_N])
        parts["matched_P"].append(torch.zeros_like(drawn_P, dtype=torch.bool))
        parts["origin_P"].append(origin_N[has_N])
        # The drawn texts may come from a process with longer texts: pad the matched ones to the same width.
        width = parts["ids_PT"][1].shape[1]
        for name in ("ids_PT", "original_PT", "words_PT", "mask_PT"):
            parts[name][0] = F.pad(parts[name][0], (0, width - parts[name][0].shape[1]))
    return Pairs(**{name: torch.cat(tensors) for name, tensors in parts.items()})


def hide_codes(
    pairs: Pairs, codes_BR: Tensor, mask_BR: Tensor, probability: float, generator: torch.Generator, texts: int
) -> Tensor:
    """Hide, with `probability`, all cells of a pair's image that have one code, drawn uniformly from the image's codes.

    Section 3.3: "we first randomly select an existing label index j, then replace all". Mismatched pairs are masked as
    often as matched ones, so that the mask does not reveal the match.

    texts: N, this process's texts. Returns bool [P, R].
    """
    # Drawing among the first cells of the codes makes each code equally likely, however many cells it has.
    weights_BR = first_with_code(codes_BR, mask_BR).float()
    # [B, R] -> [N, R]: the codes of each text's image, and which of its cells are real
    owner_N = pairs.owner_P[:texts]
    codes_NR, mask_NR = codes_BR.index_select(0, owner_N), mask_BR.index_select(0, owner_N)
    hidden = []
    # Matched pairs, then mismatched ones: one draw for each text, also for those without a mismatched pair.
    for rows in (slice(0, texts), pairs.origin_P[texts:]):
        cell_N = draw_categorical(weights_BR.index_select(0, owner_N), generator)
        masked_N = draw_uniform((texts,), generator, owner_N.device) < probability
        group_NR = (codes_NR == codes_NR.gather(1, cell_N[:, None])) & mask_NR
        hidden.append((group_NR & masked_N[:, None])[rows])
    return torch.cat(hidden)


def first_with_code(codes_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """Return bool [B, R]: each code's first valid cell."""
    # A cell is the first with its code unless an earlier valid one has the same code.
    same_BRR = (codes_BR[:, :, None] == codes_BR[:, None, :]) & mask_BR[:, None, :]
    earlier_RR = torch.ones(same_BRR.shape[1:], dtype=torch.bool, device=codes_BR.device).tril(-1)
    return mask_BR & ~(same_BRR & earlier_RR).any(-1)
