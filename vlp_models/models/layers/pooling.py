"""One vector from many tokens.

Shape suffixes: B batch, M packed tokens, D hidden, P pooled dimension.
"""

from __future__ import annotations

from torch import Tensor, nn

from vlp_models.models.layers.packing import Packing


class AttentionPooler(nn.Module):
    """A two-layer MLP scores the tokens; their weighted mean goes through a linear layer (Yu et al. 2019, section 3.3).

    `batch_norm` normalises the result over the batch, which in training mode needs two samples or more.
    """

    def __init__(self, hidden: int, outputs: int, *, dropout: float, batch_norm: bool = False) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, 1))
        self.project = nn.Linear(hidden, outputs)
        self.norm = nn.BatchNorm1d(outputs) if batch_norm else nn.Identity()

    def forward(self, x_MD: Tensor, packing: Packing) -> Tensor:
        """[B, P]. Every sequence needs a token."""
        scores_BT = packing.pad(self.score(x_MD).squeeze(-1))
        scores_BT = scores_BT.float() if scores_BT.dtype.itemsize < 4 else scores_BT
        weights_BT = scores_BT.masked_fill(~packing.mask_BT, float("-inf")).softmax(-1).to(x_MD.dtype)
        return self.norm(self.project((weights_BT[:, None] @ packing.pad(x_MD)).squeeze(1)))
