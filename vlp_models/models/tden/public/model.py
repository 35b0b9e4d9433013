"""TDEN as its authors' public code (YehLi/xmodaler) has it, switch by switch.

What only its checkpoints need is here: a feed-forward net per modality in the cross-modal encoder, ISM's poolers on
every object layer and normalised over the batch, the decoder's memory from the cross-modal encoder in pretraining, and
VQA's feature as a product of poolers after each cross-modal layer, with a second feature from the decoder. Any of the
switches may be set by itself.

Shape suffixes as in model.py.
"""

from __future__ import annotations

from torch import Tensor, nn

from vlp_models.data.batch import Image, Text
from vlp_models.models.layers.blocks import ModalityBlock
from vlp_models.models.layers.init import init_weights
from vlp_models.models.layers.masks import padding_mask
from vlp_models.models.layers.packing import Packing
from vlp_models.models.protocols import Fused
from vlp_models.models.tden.config import TDENConfig
from vlp_models.models.tden.model import GENERATION, TDEN, UNDERSTANDING, Learners
from vlp_models.models.tden.state import VisualStates


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
        reads_it = self.config.decoder_visual_source == "cross_encoder" and "msg" in objectives
        return reads_it or super().needs_cross_encoder(objectives)

    def decoder_reads(
        self, image: VisualStates, owner_N: Tensor | None, crossed: tuple[Tensor, Packing] | None
    ) -> tuple[Tensor, Packing, Tensor | None]:
        if self.config.decoder_visual_source == "cross_encoder" and crossed is not None:
            return *crossed, None  # there, every text has an image of its own
        return super().decoder_reads(image, owner_N, crossed)

    # ---- VQA, VCR --------------------------------------------------------------------------------------------

    def fuse(self, image: Image, text: Text) -> Fused:
        config, pool = self.config, self.fusion_poolers
        visual, words, owner_N = self.encode_image(image), Packing.of(text.mask_BT), text.owners(len(image))
        each = visual.last().select(owner_N)
        segments = config.segment_types and text.last_segment_BT is not None
        types_NT = text.last_segment_BT.long() if segments and text.last_segment_BT is not None else None
        understood_MD = self.encode_text(text.ids_BT, words, UNDERSTANDING, types_NT)
        text_MD, image_layers = self.cross_encode(understood_MD, words, each)
        pooled_image = pool["image"](image_layers[-1], each.packing)
        if config.fusion_pooling == "all_layers":
            for layer, x_KD in enumerate(image_layers[:-1]):
                pooled_image = pooled_image + pool[f"image_{layer}"](x_KD, each.packing)
        pooled_text = pool["text"](text_MD, words)
        pooled_NP = pooled_text * pooled_image if config.fusion == "product" else pooled_text + pooled_image
        decoder_NP = None
        if config.use_decoder_in_fusion:
            crossed = config.decoder_visual_source == "cross_encoder"
            reads = (image_layers[-1], each.packing, None) if crossed else (visual.last_KD, visual.packing, owner_N)
            if config.understanding_decoder_mask == "causal":
                decoded_MD, mask = self.encode_text(text.ids_BT, words, GENERATION), None
            else:
                decoded_MD, mask = understood_MD, padding_mask(words.mask_BT)
            pooled_decoder_NP = pool["decoder"](self.decode(decoded_MD, words, self.remember(*reads), mask), words)
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
