"""The pairs of one pass through the fusion encoder: those whose words MLM tells, then those that matching judges.

Shape suffixes: B images, N texts of this process, G of all processes, S image tokens, T text tokens, D hidden, E
embedding, R pairs that matching judges.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from vlp_models.data.batch import Text
from vlp_models.objectives.hard_negatives import draw_hard_negatives, not_the_same_image
from vlp_models.objectives.ism import similarities
from vlp_models.objectives.ranks import gather_rows, take_rows, world_size


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
