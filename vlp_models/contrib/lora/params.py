"""The section `finetune.NAME.lora` of params.yaml."""

from __future__ import annotations

from dataclasses import dataclass, field

from vlp_models.params.schema import NonNegativeInt, PositiveFloat, ShareBelowOne


@dataclass(frozen=True, kw_only=True)
class LoraParams:
    """Adapters that are trained instead of the model's weights (contrib/lora). The task's head is trained, too. The
    checkpoint has the adapters merged, and separately in `adapter/`.

    rank     of the product that is added to a layer's weights; 0: no adapters, all weights are trained
    alpha    the product is multiplied by alpha / rank
    dropout  of an adapter's input
    targets  ends of names of linear layers and embeddings (qkv, out, words); empty: all linear layers
    modules_to_save  parts of the model that are trained as a whole, without adapters: those without pretrained weights
    """

    rank: NonNegativeInt = 0
    alpha: PositiveFloat = 16.0
    dropout: ShareBelowOne = 0.0
    targets: list[str] = field(default_factory=list)
    modules_to_save: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Settings of adapters without adapters: `rank` was probably forgotten.
        if not self.rank and (self.alpha, self.dropout, self.targets) != (16.0, 0.0, []):
            raise ValueError("`lora` has no `rank`, so it would train all weights; set it, for example to 8")
