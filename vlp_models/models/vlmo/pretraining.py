"""Inputs of VLMo's objectives: masked patches and words, and the pairs that the fusion encoder reads.

MLM and image-text matching (ITM) share one pass through the fusion encoder: first the pairs whose words MLM predicts,
then ITM's true pairs and hard negatives.

Shape suffixes: B images, N texts of this process, G texts of all processes, S image tokens, T text tokens, D
hidden, E embedding, R pairs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

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

Pairs = tuple[Tensor, Tensor, Tensor]  # ids and mask of the texts, [R, T], and patches of their images, [R, S, D]


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


def join_pairs(parts: Sequence[Pairs]) -> Pairs:
    """Return all pairs of one pass, with ids and masks padded to the longest text."""
    width = max(ids.shape[1] for ids, _, _ in parts)
    ids, masks, patches = zip(*parts, strict=True)
    padded = [torch.cat([F.pad(part, (0, width - part.shape[1])) for part in column]) for column in (ids, masks)]
    return padded[0], padded[1], torch.cat(patches)


def rows_of_texts(rows_B: Tensor, owner_N: Tensor | None) -> Tensor:
    """Return the row of each text's image: [B, ...] -> [N, ...]. owner_N: that image; None: text i has image i."""
    return rows_B if owner_N is None else rows_B.index_select(0, owner_N)


def matching_pairs(
    text: Text,
    patches_BSD: Tensor,
    vectors: tuple[Tensor, Tensor],
    scale: Tensor,
    image_ids: tuple[str, ...],
    learners: Tensor | None,
    generator: torch.Generator,
) -> tuple[list[Pairs], Tensor]:
    """Return ITM's pairs: each text with its image and with a similar other image, and its image with another text.

    Negatives are drawn from all processes, with probabilities that grow with similarity (section 3.3; ALBEF, section
    3.2).

    Args:
        patches_BSD: this process's images, embedded once.
        vectors: of the images, [B, E], and the texts, [N, E]; scale: 1 / temperature.
        learners: bool [N]; None: all.

    Returns the pairs in three parts, and int64 [R]: 1 for true pairs, 0 for negatives.
    """
    owner_N = text.owners(len(patches_BSD))
    images_BE, texts_NE = vectors
    images_NE = rows_of_texts(images_BE, owner_N)
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
    ids_NT, mask_NT, patches_NSD = text.ids_BT, text.mask_BT, rows_of_texts(patches_BSD, owner_N)
    if true_R is not None:
        ids_NT, mask_NT = ids_NT.index_select(0, true_R), mask_NT.index_select(0, true_R)
        patches_NSD = patches_NSD.index_select(0, true_R)
    parts = [(ids_NT, mask_NT, patches_NSD)]
    # 2. Each text with another image. All processes must call `take_rows`, even those that request nothing.
    ids_RT, mask_RT = text.ids_BT.index_select(0, matched_R), text.mask_BT.index_select(0, matched_R)
    image_R = image_N.index_select(0, matched_R)
    if world_size() == 1 and owner_N is not None:
        # One process has all images: take them without a copy per text first.
        other_RSD = patches_BSD.index_select(0, owner_N.index_select(0, image_R))
    else:
        other_RSD = take_rows(rows_of_texts(patches_BSD, owner_N), image_R)
    parts.append((ids_RT, mask_RT, other_RSD))
    # 3. Each text's image with another text.
    text_R = text_N.index_select(0, matched_R)
    other_ids_RT, other_mask_RT = take_rows(text.ids_BT, text_R), take_rows(text.mask_BT, text_R)
    parts.append((other_ids_RT, other_mask_RT, rows_of_texts(patches_BSD, owner_N).index_select(0, matched_R)))

    matched = torch.full((len(ids_NT),), 1, device=device), torch.full((2 * len(matched_R),), 0, device=device)
    return parts, torch.cat(matched)
