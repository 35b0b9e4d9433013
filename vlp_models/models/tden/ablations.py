"""The paper's ablations of TDEN: other structures (table 1), and ISM after the cross-modal encoder (*, table 2).

Li et al. 2021, "Comparison with VL Pretraining Approaches": TDEN (Two-stream) and TDEN (Single-stream) share one stack
across the proxy tasks. The paper does not say how one stack generates; here as in Unified VLP (Zhou et al. 2020,
section 3.2): words see the past words and all regions, regions see regions only, so that no word reaches another
through the image. VQA's feature has no decoder's part.

Shape suffixes as in model.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from vlp_models.data.batch import Batch, Image, Text
from vlp_models.models.layers.attention import KeyValues
from vlp_models.models.layers.blocks import TransformerBlock
from vlp_models.models.layers.decoding import DecodingState
from vlp_models.models.layers.init import init_weights
from vlp_models.models.layers.masks import causal_mask, padding_mask
from vlp_models.models.layers.packing import Packing
from vlp_models.models.protocols import Fused
from vlp_models.models.tden.config import TDENConfig
from vlp_models.models.tden.model import GENERATION, TDEN
from vlp_models.models.tden.state import Told, VisualStates
from vlp_models.objectives.ism import matched_or_not
from vlp_models.objectives.loss import Loss
from vlp_models.objectives.ranks import number_over_ranks


@dataclass(frozen=True, kw_only=True)
class SharedMemory:
    """The image's states for one stack that reads words and regions together.

    layers  the regions' keys and values in every block, for decoding step by step
    """

    visual: VisualStates
    owner_N: Tensor | None
    source: Tensor
    layers: tuple[KeyValues, ...] = ()

    @property
    def images(self) -> int:
        return self.visual.packing.shape[0]


class AblatedTDEN(TDEN):
    """`structure` and `ism_source` other than the paper's choice."""

    def __init__(self, config: TDENConfig) -> None:
        super().__init__(config)
        self.shares = config.structure != "decoupled"
        if config.structure == "single_stream":
            self.object_encoder, self.sentence_encoder = nn.ModuleList(), nn.ModuleList()
        if self.shares:
            self.cross_decoder = nn.ModuleList()
            del self.fusion_poolers["decoder"]
        if config.ism_source == "cross_modal":
            self.matching_head = nn.Linear(config.hidden, 1)
            init_weights(self.matching_head, config.init_std)

    def _shared_blocks(self) -> list[TransformerBlock]:
        return cast("list[TransformerBlock]", self.cross_encoder)

    # ---- Matching after the cross-modal encoder --------------------------------------------------------------

    def match(self, understood_MD: Tensor, words: Packing, visual: VisualStates) -> Tensor:
        """How much each sentence and its image belong together, from [CLS] and [IMG] after the cross-modal encoder, as
        in ViLBERT; logits, [N]."""
        x_MD, (*_, image_KD) = self.cross_encode(understood_MD, words, visual)
        return self.matching_head(words.pad(x_MD)[:, 0] * visual.packing.pad(image_KD)[:, 0]).squeeze(-1)

    def matching_loss(
        self, understood_MD: Tensor, words: Packing, batch: Batch, image: VisualStates, learners: Tensor | None
    ) -> Loss:
        """Each sentence meets its own image and that of the sample before it."""
        if self.config.ism_source == "unimodal":
            return super().matching_loss(understood_MD, words, batch, image, learners)
        numbers_G, own = number_over_ranks(batch.image_ids)
        if len(numbers_G.unique()) <= 1:  # no negative
            return self.no_matching(understood_MD)
        visual = image.last().select(batch.text.owner_N)
        matched_N, mismatched_N = (self.match(understood_MD, words, v) for v in (visual, visual.rolled()))
        differs_N = (numbers_G != numbers_G.roll(1))[own].to(understood_MD.device)
        if learners is not None:
            matched_N, differs_N = matched_N[learners], differs_N & learners
        return matched_or_not(matched_N, mismatched_N[differs_N])

    def score(self, state: VisualStates, text: Text, image_of_text_N: Tensor) -> Tensor:
        """A logit, if cross-modal. [N]"""
        if self.config.ism_source == "unimodal":
            return super().score(state, text, image_of_text_N)
        words = Packing.of(text.mask_BT)
        return self.match(self.encode_text(text.ids_BT, words), words, state.last().select(image_of_text_N))

    # ---- One stack for understanding and generation ----------------------------------------------------------

    def remember(self, image_KD: Tensor, regions: Packing, owner_N: Tensor | None) -> Any:
        if not self.shares:
            return super().remember(image_KD, regions, owner_N)
        visual = VisualStates(layers=(image_KD,), packing=regions)
        return SharedMemory(visual=visual, owner_N=owner_N, source=image_KD)

    def decode(self, text_MD: Tensor, words: Packing, memory: Any, mask: Tensor | None = None) -> Tensor:
        if not self.shares:
            return super().decode(text_MD, words, memory, mask)
        visual = memory.visual.select(memory.owner_N)
        joint = words.beside(visual.packing)
        x = torch.cat([text_MD, visual.last_KD])
        mask = one_way_mask(words, visual.packing)
        for block in self.cross_encoder:
            x = block(x, mask, joint)
        return x[: joint.split]

    def tell(
        self, ids_NT: Tensor, at_NT: Tensor, reads: tuple[Tensor, Packing, Tensor | None], before: Told | None
    ) -> Told:
        """A shared stack computes every pass as a whole."""
        return super().tell(ids_NT, at_NT, reads, None if self.shares else before)

    def fuse(self, image: Image, text: Text) -> Fused:
        if not self.shares:
            return super().fuse(image, text)
        visual, words = self.encode_image(image).last().select(text.owners(len(image))), Packing.of(text.mask_BT)
        text_MD, (*_, image_KD) = self.cross_encode(self.encode_text(text.ids_BT, words), words, visual)
        pooled_NP = self.fusion_poolers["text"](text_MD, words) + self.fusion_poolers["image"](image_KD, visual.packing)
        return Fused(
            image_BRD=visual.packing.pad(image_KD), text_BTD=words.pad(text_MD), pooled_BP=self.fusion_norm(pooled_NP)
        )

    def start(self, image: Image, *, max_len: int) -> DecodingState:
        state = super().start(image, max_len=max_len)
        if not self.shares:
            return state
        visual = state.memory.visual
        x_KD, mask, layers = visual.last_KD, padding_mask(visual.packing.mask_BT), []
        for block in self._shared_blocks():  # regions see regions only, so they are known before any word
            layers.append(block.attention.project(x_KD, visual.packing))
            x_KD = block(x_KD, mask, visual.packing)
        return replace(state, memory=replace(state.memory, layers=tuple(layers)))

    def step(self, token_N: Tensor, state: DecodingState) -> tuple[Tensor, DecodingState]:
        if not self.shares:
            return super().step(token_N, state)
        position = torch.full_like(token_N, state.length)
        x_ND = self.text_embedding(token_N, torch.full_like(token_N, GENERATION), position)
        past: list[KeyValues] = []
        before = iter(state.past or [None] * (len(self.sentence_encoder) + len(self.cross_encoder)))
        for block in cast("list[TransformerBlock]", self.sentence_encoder):
            x_ND, cache = block.step(x_ND, next(before))
            past.append(cache)
        regions_NS = state.memory.visual.packing.mask_BT[state.owner_N]
        mask = padding_mask(torch.cat([regions_NS.new_ones(len(regions_NS), state.length + 1), regions_NS], dim=1))
        for block, regions in zip(self._shared_blocks(), state.memory.layers, strict=True):
            x_ND, cache = _shared_step(block, x_ND, next(before), regions.select(state.owner_N), mask)
            past.append(cache)
        return self.predict_words(x_ND), replace(state, length=state.length + 1, past=tuple(past))


def one_way_mask(words: Packing, regions: Packing) -> Tensor:
    """Words see past words and all regions of their image, regions see regions. [N, 1, T + S, T + S]"""
    (texts, length), width = words.shape, regions.shape[1]
    past = causal_mask(length, words.places_M.device).expand(texts, 1, length, length)
    sees_regions = padding_mask(regions.mask_BT)
    of_words = torch.cat([past, sees_regions.expand(texts, 1, length, width)], dim=3)
    blind = past.new_zeros(texts, 1, width, length)
    of_regions = torch.cat([blind, sees_regions.expand(texts, 1, width, width)], dim=3)
    return torch.cat([of_words, of_regions], dim=2)


def _shared_step(
    block: TransformerBlock, x_ND: Tensor, past: KeyValues | None, regions: KeyValues, mask: Tensor
) -> tuple[Tensor, KeyValues]:
    """One more word of each hypothesis through one block; returns its state and the grown past.

    regions: of each hypothesis's own image.
    """
    present = block.attention.project(x_ND[:, None])
    if past is not None:
        present = past.append(present)
    x = block.attention_end(x_ND, block.attention.cross(x_ND[:, None], present.append(regions), mask)[:, 0])
    return block.ffn_end(x, block.ffn(x)), present
