"""Inputs of VLMo's objectives: masked patches and words, and the pairs that the fusion encoder reads.

MLM and image-text matching (ITM) share one pass through the fusion encoder (`FusionPairs`): first the pairs whose words
MLM predicts, then ITM's true pairs and hard negatives.

Shape suffixes: B images, N texts of this process, G texts of all processes, S image tokens, T text tokens, D
hidden, E embedding, R pairs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from vlp_models.data.batch import Batch, Text
from vlp_models.errors import ParamsError
from vlp_models.models.vlmo.config import VLMoConfig
from vlp_models.objectives.distributed import gather_rows, take_rows, world_size
from vlp_models.objectives.loss import Learners
from vlp_models.objectives.masked_modeling import mask_tokens, select_tokens, select_words
from vlp_models.objectives.matching import different_image_mask, draw_hard_negatives, similarities


def check_objectives(objectives: Collection[str], supported: Collection[str], batch: Batch) -> None:
    """Check that the batch has what the objectives need. supported: the objectives of the model.

    Raises:
        ParamsError: unknown objective, or the batch has no images or no texts and an objective needs them.
    """
    unknown = sorted(set(objectives) - set(supported))
    if unknown:
        hint = "; `mim` needs `image_codes` in the model's config" if "mim" in unknown else ""
        raise ParamsError(f"VLMo can't learn {unknown}, only {list(supported)}{hint}")
    for missing, needing, view in (
        (batch.image is None, {"itc", "itm", "mim"}, "texts"),
        (batch.text is None, {"itc", "itm", "mlm"}, "images"),
    ):
        wrong = sorted(needing & set(objectives))
        if missing and wrong:
            lacking = "images" if view == "texts" else "texts"
            raise ParamsError(f"VLMo can't learn {wrong} from `view: {view}`, which has no {lacking}")


def mask_words(
    text: Text | None, config: VLMoConfig, objectives: Learners, generator: torch.Generator, probability: float
) -> tuple[Tensor, Tensor]:
    """Return bool [N, T], the words that MLM predicts, and int64 [N, T], the texts with these masked."""
    if text is None:
        nothing = torch.zeros(0, 0, dtype=torch.bool)
        return nothing, nothing
    if "mlm" not in objectives:
        return torch.zeros_like(text.mask_BT), text.ids_BT
    if config.whole_words:
        assert text.word_BT is not None  # requested by `VLMo.inputs`
        selected_NT = select_words(text.word_BT, probability, generator)
    else:
        selected_NT = select_tokens(text.mask_BT, probability, generator)
    learners = objectives["mlm"]
    if learners is not None:
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


@dataclass(kw_only=True)
class FusionPairs:
    """The pairs of one pass through the fusion encoder, collected in parts.

    patches_BSD: this process's images, embedded once. owner_N: the image that each of its texts is about.
    """

    patches_BSD: Tensor
    owner_N: Tensor | None
    _ids: list[Tensor] = field(default_factory=list)
    _masks: list[Tensor] = field(default_factory=list)
    _patches: list[Tensor] = field(default_factory=list)

    @property
    def patches_NSD(self) -> Tensor:
        """Return the patches of each text's image."""
        return self.patches_BSD if self.owner_N is None else self.patches_BSD.index_select(0, self.owner_N)

    def add_true_pairs(self, ids_NT: Tensor, mask_NT: Tensor, rows_R: Tensor | None = None) -> None:
        """Add texts with the images that they are about; rows_R: only these texts."""
        patches_NSD = self.patches_NSD
        if rows_R is not None:
            ids_NT, mask_NT = ids_NT.index_select(0, rows_R), mask_NT.index_select(0, rows_R)
            patches_NSD = patches_NSD.index_select(0, rows_R)
        self.add(ids_NT, mask_NT, patches_NSD)

    def add(self, ids_RT: Tensor, mask_RT: Tensor, patches_RSD: Tensor) -> None:
        self._ids.append(ids_RT)
        self._masks.append(mask_RT)
        self._patches.append(patches_RSD)

    def concatenate(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids and masks, padded to the longest text, and patches of all pairs."""
        width = max(ids.shape[1] for ids in self._ids)
        ids = [F.pad(part, (0, width - part.shape[1])) for part in self._ids]
        masks = [F.pad(part, (0, width - part.shape[1])) for part in self._masks]
        return torch.cat(ids), torch.cat(masks), torch.cat(self._patches)


def add_matching_pairs(
    pairs: FusionPairs,
    text: Text,
    images_NE: Tensor,
    texts_NE: Tensor,
    scale: Tensor,
    image_ids: tuple[str, ...],
    learners: Tensor | None,
    generator: torch.Generator,
) -> Tensor:
    """Add ITM's pairs: each text with its image, with a similar other image, and each image with a similar other text.

    Negatives are drawn from all processes, with probabilities that grow with similarity (section 3.3; ALBEF, section
    3.2).

    learners: bool [N]; None: all. Returns int64 [R]: 1 for true pairs, 0 for negatives.
    """
    device = texts_NE.device
    negative_NG = different_image_mask(image_ids, device)
    # A negative image for each text, then a negative text for each text's image, numbered over all processes.
    negatives = []
    for anchor_NE, candidate_NE in ((texts_NE, images_NE), (images_NE, texts_NE)):
        similarity_NG = similarities(anchor_NE.detach(), gather_rows(candidate_NE.detach())) * scale
        negatives.append(draw_hard_negatives(similarity_NG, negative_NG, generator))
    (image_N, has_N), (text_N, _) = negatives
    if learners is not None:
        has_N = has_N & learners
    true_R = None if learners is None else learners.nonzero().squeeze(1)
    matched_R = has_N.nonzero().squeeze(1)  # texts that have a negative

    # 1. Each text with its own image.
    pairs.add_true_pairs(text.ids_BT, text.mask_BT, true_R)
    # 2. Each text with another image. All processes must call `take_rows`, even those that request nothing.
    ids_RT, mask_RT = text.ids_BT.index_select(0, matched_R), text.mask_BT.index_select(0, matched_R)
    image_R = image_N.index_select(0, matched_R)
    if world_size() == 1 and pairs.owner_N is not None:
        # One process has all images: take them without a copy per text first.
        other_RSD = pairs.patches_BSD.index_select(0, pairs.owner_N.index_select(0, image_R))
    else:
        other_RSD = take_rows(pairs.patches_NSD, image_R)
    pairs.add(ids_RT, mask_RT, other_RSD)
    # 3. Each text's image with another text.
    text_R = text_N.index_select(0, matched_R)
    other_ids_RT, other_mask_RT = take_rows(text.ids_BT, text_R), take_rows(text.mask_BT, text_R)
    pairs.add(other_ids_RT, other_mask_RT, pairs.patches_NSD.index_select(0, matched_R))

    true_pairs, mismatched_pairs = len(text) if true_R is None else len(true_R), 2 * len(matched_R)
    return torch.cat([torch.full((true_pairs,), 1, device=device), torch.full((mismatched_pairs,), 0, device=device)])
