"""What VLMo's objectives hide, and which of them a batch can be learnt by.

Shape suffixes: B images, N patches of an image, or texts; T text tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from vlp_models.data.batch import Batch, Text
from vlp_models.errors import ParamsError
from vlp_models.models.vlmo.config import VLMoConfig
from vlp_models.objectives.block_masking import select_blocks
from vlp_models.objectives.masking import mask_tokens, select_tokens, select_words

Learners = Mapping[str, Tensor | None]  # objective -> bool [N], which samples learn it; None: all


def hidden_patches(
    images: int, config: VLMoConfig, learners: Tensor | None, generator: torch.Generator, device: torch.device
) -> Tensor:
    """bool [B, N]: the patches that MIM tells."""
    grid = (config.grid, config.grid)
    hidden_BN = select_blocks(images, grid, config.image_mask_share, generator, device)
    return hidden_BN if learners is None else hidden_BN & learners[:, None]


def masked_words(
    text: Text | None, config: VLMoConfig, objectives: Learners, generator: torch.Generator, probability: float
) -> tuple[Tensor, Tensor]:
    """bool and int64 [N, T]: which words MLM tells, and the texts with these masked."""
    if "mlm" not in objectives or text is None:
        nothing = torch.zeros(0, 0, dtype=torch.bool)
        return (nothing, nothing) if text is None else (torch.zeros_like(text.mask_BT), text.ids_BT)
    if config.whole_words:
        assert text.word_BT is not None  # as `inputs` asks
        selected_NT = select_words(text.word_BT, probability, generator)
    else:
        selected_NT = select_tokens(text.mask_BT, probability, generator)
    if (learners := objectives["mlm"]) is not None:
        selected_NT = selected_NT & learners[:, None]
    ids_NT = mask_tokens(
        text.ids_BT,
        selected_NT,
        scheme=config.mask_scheme,
        mask_id=config.mask_id,
        vocab_size=config.vocab_size,
        generator=generator,
    )
    return selected_NT, ids_NT


def check_learnable(objectives: Learners, known: Collection[str], batch: Batch) -> None:
    """
    Raises:
        ParamsError: an objective is unknown, or the batch lacks what it is about.
    """
    unknown = sorted(set(objectives) - set(known))
    if unknown:
        why = "; `mim` needs `image_codes` in the model's config" if "mim" in unknown else ""
        raise ParamsError(f"VLMo can't learn {unknown}, only {list(known)}{why}")
    for missing, needing, view in (
        (batch.image is None, {"itc", "itm", "mim"}, "texts"),
        (batch.text is None, {"itc", "itm", "mlm"}, "images"),
    ):
        wrong = sorted(needing & set(objectives))
        if missing and wrong:
            raise ParamsError(f"VLMo can't learn {wrong} from `view: {view}`: it takes what that has not")
