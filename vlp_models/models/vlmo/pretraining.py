"""What VLMo's objectives hide, and which of them a batch can be learnt by.

Shape suffixes: B images, N patches of an image, or texts; T text tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from vlp_models.data.batch import Batch, Text
from vlp_models.errors import ParamsError
from vlp_models.models.vlmo.config import VLMoConfig
from vlp_models.objectives.masked_modeling import mask_tokens, select_blocks, select_tokens, select_words
from vlp_models.objectives.matching import draw_hard_negatives, not_the_same_image, similarities
from vlp_models.objectives.ranks import gather_rows, take_rows, world_size

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


@dataclass(kw_only=True)
class PairsToJudge:
    """patches_BSD: this process's images, embedded once. owner_N: whose image each of its texts is about."""

    patches_BSD: Tensor
    owner_N: Tensor | None
    _ids: list[Tensor] = field(default_factory=list)
    _masks: list[Tensor] = field(default_factory=list)
    _patches: list[Tensor] = field(default_factory=list)

    @property
    def patches_NSD(self) -> Tensor:
        """Of each text's image."""
        return self.patches_BSD if self.owner_N is None else self.patches_BSD.index_select(0, self.owner_N)

    def add_own(self, ids_NT: Tensor, mask_NT: Tensor, rows_R: Tensor | None = None) -> None:
        """Texts with the images that they are about."""
        if rows_R is not None:
            ids_NT, mask_NT = ids_NT.index_select(0, rows_R), mask_NT.index_select(0, rows_R)
        self.add(ids_NT, mask_NT, self.patches_NSD if rows_R is None else self.patches_NSD.index_select(0, rows_R))

    def add(self, ids_RT: Tensor, mask_RT: Tensor, patches_RSD: Tensor) -> None:
        self._ids.append(ids_RT)
        self._masks.append(mask_RT)
        self._patches.append(patches_RSD)

    def joined(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ids and mask, padded to the longest text, and patches of all pairs."""
        width = max(ids.shape[1] for ids in self._ids)
        ids, masks = ([F.pad(x, (0, width - x.shape[1])) for x in parts] for parts in (self._ids, self._masks))
        return torch.cat(ids), torch.cat(masks), torch.cat(self._patches)


def draw_pairs(
    pairs: PairsToJudge,
    text: Text,
    images_NE: Tensor,
    texts_NE: Tensor,
    scale: Tensor,
    image_ids: tuple[str, ...],
    learners: Tensor | None,
    generator: torch.Generator,
) -> Tensor:
    """Adds the pairs of matching: each text with its image, with a similar other image, and each image with a similar
    other text; drawn among all processes, the likelier the more similar (section 3.3; ALBEF, section 3.2).

    learners: bool [N]; None: all. Returns int64 [R]: 1 where a pair belongs together.
    """
    device = texts_NE.device
    negative_NG = not_the_same_image(image_ids, device)
    drawn = []
    for one_NE, other_NE in ((texts_NE, images_NE), (images_NE, texts_NE)):
        similarity_NG = similarities(one_NE.detach(), gather_rows(other_NE.detach())) * scale
        drawn.append(draw_hard_negatives(similarity_NG, negative_NG, generator))
    (image_N, has_N), (text_N, _) = drawn
    if learners is not None:
        has_N = has_N & learners
    own_R = None if learners is None else learners.nonzero().squeeze(1)
    judged_R = has_N.nonzero().squeeze(1)
    pairs.add_own(text.ids_BT, text.mask_BT, own_R)
    ids_RT, mask_RT = text.ids_BT.index_select(0, judged_R), text.mask_BT.index_select(0, judged_R)
    # Every process takes part, also one that wants nothing.
    wanted_R = image_N.index_select(0, judged_R)
    if world_size() == 1 and pairs.owner_N is not None:
        other_RSD = pairs.patches_BSD.index_select(0, pairs.owner_N.index_select(0, wanted_R))
    else:
        other_RSD = take_rows(pairs.patches_NSD, wanted_R)
    pairs.add(ids_RT, mask_RT, other_RSD)
    wanted_R = text_N.index_select(0, judged_R)
    other_ids_RT, other_mask_RT = take_rows(text.ids_BT, wanted_R), take_rows(text.mask_BT, wanted_R)
    pairs.add(other_ids_RT, other_mask_RT, pairs.patches_NSD.index_select(0, judged_R))
    counts = [len(text) if own_R is None else len(own_R), 2 * len(judged_R)]
    return torch.cat([torch.full((count,), label, device=device) for count, label in zip(counts, (1, 0), strict=True)])
