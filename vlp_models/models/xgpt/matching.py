"""Attention-driven image-text matching: what of the image a word is about (section 4.3, IDA).

    A_ij = W [x_i^T, x_j^I, x_i^T o x_j^I]      of word i and region j; W maps 3h to 1 (the trilinear score of BiDAF)
    x_i^T <- sum_j softmax_j(A_ij) x_j^I

The first third of W adds the same to all scores of a word. The softmax takes it away again, so it can neither matter
nor learn, and is left out here. The rest is X_T diag(w3) X_I' + 1 (X_I w2)': nothing of size words x regions x h.

Shape suffixes: N texts, T tokens, R regions, M packed words, K packed regions, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vlp_models.models.layers.packing import Packing


class Matching(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, hidden))  # w2, w3

    def forward(self, words_MD: Tensor, words: Packing, regions_KD: Tensor, regions: Packing) -> Tensor:
        """What each word found in its image, [M, D]; text i belongs to image i. Softmax in float32 at least."""
        own_D, both_D = self.weight
        regions_NRD = regions.pad(regions_KD)
        scores_NTR = words.pad(words_MD * both_D) @ regions_NRD.mT + (regions_NRD @ own_D)[:, None]
        scores_NTR = scores_NTR.float() if scores_NTR.dtype.itemsize < 4 else scores_NTR
        shares_NTR = scores_NTR.masked_fill(~regions.mask_BT[:, None], float("-inf")).softmax(-1)
        return words.pack(shares_NTR.to(regions_NRD.dtype) @ regions_NRD)
