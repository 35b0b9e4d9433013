"""The image-text pairs that an update learns from: every text with its own image, and for each a text of another image.

Shape suffixes: B images, N texts, P pairs, G texts of the whole batch, R cells, T text tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vlp_models.data.batch import Batch
from vlp_models.objectives.matching import not_the_same_image
from vlp_models.objectives.ranks import draw_categorical, draw_uniform, take_rows


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Matched pairs first, in the texts' order, then mismatched ones.

    ids_PT      int64: the texts with words masked; original_PT int64: as they were
    words_PT    bool: the masked words
    mask_PT     bool: where there is a token
    owner_P     int64: which image of this process each text is shown with
    matched_P   bool
    origin_P    int64: of which of this process's texts a pair is, or takes the place
    """

    ids_PT: Tensor
    original_PT: Tensor
    words_PT: Tensor
    mask_PT: Tensor
    owner_P: Tensor
    matched_P: Tensor
    origin_P: Tensor

    def learners(self, mask_B: Tensor | None) -> Tensor:
        """bool [P]: the pairs whose image's sample learns something. mask_B: which samples do; None: all."""
        if mask_B is None:
            return torch.ones_like(self.matched_P)
        return mask_B.index_select(0, self.owner_P)


def make_pairs(
    batch: Batch, ids_NT: Tensor, words_NT: Tensor, generator: torch.Generator, *, mismatched: bool
) -> Pairs:
    """
    Args:
        ids_NT, words_NT: the batch's texts with words masked, and which words these are.
        mismatched: whether to add, for each text, a text of another image: drawn evenly from all texts of the whole
            batch whose image has another id, over all processes. A text that has none stays without.
    """
    text, device = batch.text, batch.text.ids_BT.device
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
        image_ids = [batch.image_ids[i] for i in owner_N.tolist()]
        negative_NG = not_the_same_image(image_ids, device)
        has_N = negative_NG.any(1) if negative_NG.shape[1] else torch.zeros_like(owner_N, dtype=torch.bool)
        drawn_N = draw_categorical(negative_NG.float(), generator) if negative_NG.shape[1] else origin_N
        drawn_P = drawn_N[has_N]
        for name in ("ids_PT", "original_PT", "words_PT", "mask_PT"):
            parts[name].append(take_rows(parts[name][0], drawn_P))
        parts["owner_P"].append(owner_N[has_N])
        parts["matched_P"].append(torch.zeros_like(drawn_P, dtype=torch.bool))
        parts["origin_P"].append(origin_N[has_N])
        width = parts["ids_PT"][1].shape[1]
        for name in ("ids_PT", "original_PT", "words_PT", "mask_PT"):
            parts[name][0] = F.pad(parts[name][0], (0, width - parts[name][0].shape[1]))
    return Pairs(**{name: torch.cat(tensors) for name, tensors in parts.items()})


def hide_codes(
    pairs: Pairs, codes_BR: Tensor, mask_BR: Tensor, probability: float, generator: torch.Generator, texts: int
) -> Tensor:
    """bool [P, R]: with `probability`, all cells of a pair's image that have one code; which one of the image's codes,
    each is as likely (section 3.3, "we first randomly select an existing label index j, then replace all").

    texts: N, of this process. Matched and mismatched pairs are hidden alike: else what is hidden gave them away.
    """
    weights_BR = first_of_their_code(codes_BR, mask_BR).float()
    owner_N = pairs.owner_P[:texts]
    hidden = []
    for rows in (slice(0, texts), pairs.origin_P[texts:]):
        place_N = draw_categorical(weights_BR.index_select(0, owner_N), generator)
        chosen_N = draw_uniform((texts,), generator, owner_N.device) < probability
        code_N = codes_BR.index_select(0, owner_N).gather(1, place_N[:, None])
        group_NR = (codes_BR.index_select(0, owner_N) == code_N) & mask_BR.index_select(0, owner_N)
        hidden.append((group_NR & chosen_N[:, None])[rows])
    return torch.cat(hidden)


def first_of_their_code(codes_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """bool [B, R]: the valid cells before which no valid one has their code."""
    same_BRR = (codes_BR[:, :, None] == codes_BR[:, None, :]) & mask_BR[:, None, :]
    earlier_RR = torch.ones(same_BRR.shape[1:], dtype=torch.bool, device=codes_BR.device).tril(-1)
    return mask_BR & ~(same_BRR & earlier_RR).any(-1)
