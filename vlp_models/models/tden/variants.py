"""TDEN's variants: the paper's ablations, and the model of the authors' code.

Ablations: other structures (table 1), and ISM after the cross-modal encoder (the row marked * in table 2).
Li et al. 2021, "Comparison with VL Pretraining Approaches": TDEN (Two-stream) and TDEN (Single-stream) share one stack
across the proxy tasks. The paper does not say how one stack generates; here as in Unified VLP (Zhou et al. 2020,
section 3.2): words attend to past words and all regions, regions attend to regions only, so no word reaches another one
through the image. VQA's feature has no decoder part.

Authors' code (YehLi/xmodaler), switch by switch, for its checkpoints: one feed-forward net per modality in the
cross-modal encoder; ISM's poolers on every object layer, normalized over the batch; the decoder's memory from the
cross-modal encoder in pretraining; VQA's feature as a product of poolers after each cross-modal layer, with a second
feature from the decoder. Each switch can be set alone.

Shape suffixes as in model.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vlp_models.data.batch import Batch, Image, Text
from vlp_models.models.layers.attention import causal_mask, padding_mask
from vlp_models.models.layers.blocks import ModalityBlock, init_weights
from vlp_models.models.layers.cache import DecodingState, KeyValues
from vlp_models.models.layers.packing import Packing, take
from vlp_models.models.protocols import Fused
from vlp_models.models.tden.config import TDENConfig
from vlp_models.models.tden.model import GENERATION, TDEN, UNDERSTANDING
from vlp_models.models.tden.state import GenerationPass, VisualStates
from vlp_models.objectives.distributed import number_over_ranks
from vlp_models.objectives.loss import Learners, Loss
from vlp_models.objectives.matching import binary_matching


@dataclass(frozen=True, kw_only=True)
class SharedMemory:
    """An image's states for one stack that reads words and regions together.

    source  the states that it was made from
    layers  the regions' keys and values in every block, for step-by-step decoding
    """

    visual: VisualStates
    owner_N: Tensor | None
    source: Tensor
    layers: tuple[KeyValues, ...] = ()

    @property
    def images(self) -> int:
        return self.visual.packing.shape[0]


class AblatedTDEN(TDEN):
    """TDEN with another `structure` or `ism_source`."""

    def __init__(self, config: TDENConfig) -> None:
        super().__init__(config)
        # One stack for understanding and generation: `cross_encoder` is that stack, and there is no decoder.
        self.shares = config.structure != "decoupled"
        if config.structure == "single_stream":
            self.object_encoder, self.sentence_encoder = nn.ModuleList(), nn.ModuleList()
        if self.shares:
            self.cross_decoder = nn.ModuleList()
            del self.fusion_poolers["decoder"]
        if config.ism_source == "cross_modal":
            self.matching_head = nn.Linear(config.hidden, 1)
            init_weights(self.matching_head, config.init_std)

    # ---- Matching after the cross-modal encoder --------------------------------------------------------------

    def match(self, understood_MD: Tensor, words: Packing, visual: VisualStates) -> Tensor:
        """Return matching logits, [N], from [CLS] and [IMG] after the cross-modal encoder, as in ViLBERT.

        Raises:
            DataError: a text has no token.
        """
        x_MD, (*_, image_KD) = self.cross_encode(understood_MD, words, visual)
        cls_ND, img_ND = take(x_MD, words.first_rows()), take(image_KD, visual.packing.first_rows())
        return self.matching_head(cls_ND * img_ND).squeeze(-1)

    def matching_loss(
        self, understood_MD: Tensor, words: Packing, batch: Batch, image: VisualStates, learners: Tensor | None
    ) -> Loss:
        """Return ISM's loss: each sentence is matched with its own image and that of the previous sample."""
        if self.config.ism_source == "unimodal":
            return super().matching_loss(understood_MD, words, batch, image, learners)
        image_ids = batch.image_ids
        if batch.text.owner_N is not None:  # the image of each text
            image_ids = tuple(image_ids[i] for i in batch.text.owner_N.tolist())
        numbers_G, local_rows = number_over_ranks(image_ids)
        if len(numbers_G.unique()) <= 1:  # no negatives
            return self.empty_matching_loss(understood_MD)
        visual = image.last().select(batch.text.owner_N)
        previous_visual = visual.rolled()
        matched_N = self.match(understood_MD, words, visual)
        mismatched_N = self.match(understood_MD, words, previous_visual)
        # The previous sample may show the same image: then its pair is no mismatch.
        differs_N = (numbers_G != numbers_G.roll(1))[local_rows].to(understood_MD.device)
        if learners is not None:
            matched_N, differs_N = matched_N[learners], differs_N & learners
        return binary_matching(matched_N, mismatched_N[differs_N])

    def score(self, state: VisualStates, text: Text, image_of_text_N: Tensor) -> Tensor:
        """Return [N] scores: logits if `ism_source` is cross_modal, else cosines."""
        if self.config.ism_source == "unimodal":
            return super().score(state, text, image_of_text_N)
        words = Packing.of(text.mask_BT)
        return self.match(self.encode_text(text.ids_BT, words), words, state.last().select(image_of_text_N))

    # ---- One stack for understanding and generation ----------------------------------------------------------

    def project_memory(self, image_KD: Tensor, regions: Packing, owner_N: Tensor | None) -> Any:
        if not self.shares:
            return super().project_memory(image_KD, regions, owner_N)
        visual = VisualStates(layers=(image_KD,), packing=regions)
        return SharedMemory(visual=visual, owner_N=owner_N, source=image_KD)

    def decode(self, text_MD: Tensor, words: Packing, memory: Any, mask: Tensor | None = None) -> Tensor:
        if not self.shares:
            return super().decode(text_MD, words, memory, mask)
        # Words and regions go through one stack, so each text has its own copy of its image's states.
        visual = memory.visual.select(memory.owner_N)
        joint = words.concat(visual.packing)
        x = torch.cat([text_MD, visual.last_KD])
        mask = one_way_mask(words, visual.packing)
        for block in self.cross_encoder:
            x = block(x, mask, joint)
        return x[: joint.split]

    def generation_pass(
        self,
        ids_NT: Tensor,
        at_NT: Tensor,
        image: tuple[Tensor, Packing, Tensor | None],
        before: GenerationPass | None,
    ) -> GenerationPass:
        # A shared stack computes every pass completely.
        return super().generation_pass(ids_NT, at_NT, image, None if self.shares else before)

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
        # Each layer's keys and values of the regions, for every step
        visual = state.memory.visual
        x_KD, mask, layers = visual.last_KD, padding_mask(visual.packing.mask_BT), []
        for block in self.cross_encoder:  # regions attend to regions only, so they do not depend on words
            layers.append(block.attention.project(x_KD, visual.packing))
            x_KD = block(x_KD, mask, visual.packing)
        return replace(state, memory=replace(state.memory, layers=tuple(layers)))

    def step(self, token_N: Tensor, state: DecodingState) -> tuple[Tensor, DecodingState]:
        if not self.shares:
            return super().step(token_N, state)
        position = torch.full_like(token_N, state.length)
        x_ND = self.text_embedding(token_N, torch.full_like(token_N, GENERATION), position)
        past: list[KeyValues] = []
        # One entry per layer: the sentence encoder's, then the shared stack's.
        before = iter(state.past or [None] * (len(self.sentence_encoder) + len(self.cross_encoder)))
        for block in self.sentence_encoder:
            x_ND, cache = block.step(x_ND, next(before))
            past.append(cache)
        regions_NS = state.memory.visual.packing.mask_BT[state.owner_N]
        # The new word attends to all words so far, itself included, and to its image's regions.
        words_NT = regions_NS.new_ones(len(regions_NS), state.length + 1)
        mask = padding_mask(torch.cat([words_NT, regions_NS], dim=1))
        for block, regions in zip(self.cross_encoder, state.memory.layers, strict=True):
            # Keys and values: the past words and this one, which are cached; then its image's regions.
            present, earlier = block.attention.project(x_ND[:, None]), next(before)
            if earlier is not None:
                present = earlier.append(present)
            past.append(present)
            both = present.append(regions.select(state.owner_N))
            x_ND = block.attention_end(x_ND, block.attention.cross(x_ND[:, None], both, mask)[:, 0])
            x_ND = block.ffn_end(x_ND, block.ffn(x_ND))
        return self.predict_words(x_ND), replace(state, length=state.length + 1, past=tuple(past))


def one_way_mask(words: Packing, regions: Packing) -> Tensor:
    """Return the mask with which words attend to past words and all regions, and regions to regions.

    [N, 1, T + S, T + S]"""
    # One row per query: those of words above those of regions; one column per key, in the same order.
    (texts, length), width = words.shape, regions.shape[1]
    past = causal_mask(length, words.places_M.device).expand(texts, 1, length, length)
    to_regions = padding_mask(regions.mask_BT)
    from_words = torch.cat([past, to_regions.expand(texts, 1, length, width)], dim=3)
    none = past.new_zeros(texts, 1, width, length)
    from_regions = torch.cat([none, to_regions.expand(texts, 1, width, width)], dim=3)
    return torch.cat([from_words, from_regions], dim=2)


class PublicTDEN(TDEN):
    """TDEN with `PublicSwitches`."""

    def __init__(self, config: TDENConfig) -> None:
        super().__init__(config)
        if config.separate_ffn:
            self.cross_encoder = self.stack(ModalityBlock, config.encoder_layers)
            init_weights(self.cross_encoder, config.init_std)

        layers = config.object_layers if config.ism_pooling == "all_layers" else 1
        if layers > 1 or config.pooler_batch_norm:
            size, norm = config.similarity_dim or config.hidden, config.pooler_batch_norm
            self.text_pooler = self.pooler(size, batch_norm=norm)
            self.image_poolers = nn.ModuleList(self.pooler(size, batch_norm=norm) for _ in range(layers))
            init_weights(self.text_pooler, config.init_std)
            init_weights(self.image_poolers, config.init_std)

        if not config.use_decoder_in_fusion:
            del self.fusion_poolers["decoder"]
        elif config.fusion_decoder == "apart":
            self.decoder_dim = self.fused_dim
            self.fusion_decoder_norm = nn.LayerNorm(self.decoder_dim, eps=config.fusion_norm_eps)
        if config.fusion_pooling == "all_layers":
            for layer in range(config.encoder_layers - 1):
                self.fusion_poolers[f"image_{layer}"] = self.pooler(self.fused_dim)
                init_weights(self.fusion_poolers[f"image_{layer}"], config.init_std)

    # ---- Pretraining: the decoder attends to the image after the cross-modal encoder ------------------------

    def needs_cross_encoder(self, objectives: Learners) -> bool:
        reads_crossed = self.config.decoder_visual_source == "cross_encoder" and "msg" in objectives
        return reads_crossed or super().needs_cross_encoder(objectives)

    def decoder_input(
        self, image: VisualStates, owner_N: Tensor | None, crossed: tuple[Tensor, Packing] | None
    ) -> tuple[Tensor, Packing, Tensor | None]:
        if self.config.decoder_visual_source == "cross_encoder" and crossed is not None:
            return *crossed, None  # there every text has its own copy of the image
        return super().decoder_input(image, owner_N, crossed)

    # ---- VQA, VCR --------------------------------------------------------------------------------------------

    def understand(self, text: Text, words: Packing) -> Tensor:
        types_NT = None
        if self.config.segment_types and text.last_segment_BT is not None:
            types_NT = text.last_segment_BT.long()
        return self.encode_text(text.ids_BT, words, UNDERSTANDING, types_NT)

    def fuse(self, image: Image, text: Text) -> Fused:
        config, pool = self.config, self.fusion_poolers
        visual, words, owner_N = self.encode_image(image), Packing.of(text.mask_BT), text.owners(len(image))
        each = visual.last().select(owner_N)
        understood_MD = self.understand(text, words)
        text_MD, image_layers = self.cross_encode(understood_MD, words, each)
        pooled_image = pool["image"](image_layers[-1], each.packing)
        if config.fusion_pooling == "all_layers":
            for layer, x_KD in enumerate(image_layers[:-1]):
                pooled_image = pooled_image + pool[f"image_{layer}"](x_KD, each.packing)
        # The holistic feature, [N, P]: image and text multiplied or added, then the decoder's part added or apart.
        pooled_text = pool["text"](text_MD, words)
        pooled_NP = pooled_text * pooled_image if config.fusion == "product" else pooled_text + pooled_image
        decoder_NP = None
        if config.use_decoder_in_fusion:
            if config.understanding_decoder_mask == "causal":
                decoded_MD, mask = self.encode_text(text.ids_BT, words, GENERATION), None
            else:
                decoded_MD, mask = understood_MD, padding_mask(words.mask_BT)
            # The decoder attends to the image after the cross-modal encoder, one copy per text, or before it.
            if config.decoder_visual_source == "cross_encoder":
                memory = self.project_memory(image_layers[-1], each.packing, None)
            else:
                memory = self.project_memory(visual.last_KD, visual.packing, owner_N)
            decoded_MD = self.decode(decoded_MD, words, memory, mask)
            pooled_decoder_NP = pool["decoder"](decoded_MD, words)
            if self.decoder_dim:
                decoder_NP = self.fusion_decoder_norm(pooled_decoder_NP)
            else:
                pooled_NP = pooled_NP + pooled_decoder_NP
        return Fused(
            image_BRD=each.packing.pad(image_layers[-1]),
            text_BTD=words.pad(text_MD),
            pooled_BP=self.fusion_norm(pooled_NP),
            decoder_BP=decoder_NP,
        )


class TDENFamily:
    """What `models.FAMILIES` names for `tden`: it chooses the class that a config describes."""

    config_class: ClassVar[type] = TDENConfig

    @staticmethod
    def from_config(config: TDENConfig) -> TDEN:
        """Return the paper's model, one of its ablations, or the authors' code's if one of its switches is set."""
        if config.is_ablation:
            return AblatedTDEN(config)
        return PublicTDEN(config) if config.set_switches() else TDEN(config)
