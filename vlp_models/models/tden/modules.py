"""TDEN's four stacks of transformer blocks, their embeddings and heads: what pretraining and the tasks build on.

Shape suffixes: B batch, S visual tokens ([IMG] and R regions), T text tokens, D hidden, P similarity dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlp_models.data.batch import Image, Regions
from vlp_models.errors import DataError, ParamsError
from vlp_models.models.layers.blocks import DecoderBlock, ModalityBlock, TransformerBlock
from vlp_models.models.layers.embeddings import RegionEmbedding, TextEmbedding
from vlp_models.models.layers.heads import TokenHead
from vlp_models.models.layers.init import init_weights
from vlp_models.models.layers.masks import causal_mask, padding_mask
from vlp_models.models.layers.pooling import AttentionPooler
from vlp_models.models.layers.reading import Reading
from vlp_models.models.tden import shared
from vlp_models.models.tden.config import TDENConfig
from vlp_models.models.tden.state import VisualStates

UNDERSTANDING, GENERATION = 0, 1  # the sentence encoder's streams, and their token types


class TDENModules(nn.Module):
    """Object encoder, sentence encoder, cross-modal encoder and cross-modal decoder."""

    def __init__(self, config: TDENConfig) -> None:
        super().__init__()
        self.config = config
        self.objectives = ("mlm", "moc", "ism", "msg") if config.num_classes else ("mlm", "ism", "msg")
        hidden, dropout, eps = config.hidden, config.dropout, config.layer_norm_eps

        def stack(block: type[nn.Module], layers: int) -> nn.ModuleList:
            sizes = (hidden, config.heads, config.intermediate)
            drop = {"dropout": dropout, "attention_dropout": config.attention_dropout}
            return nn.ModuleList(block(*sizes, **drop, eps=eps) for _ in range(layers))

        self.region_embedding = RegionEmbedding(
            config.feature_dim,
            hidden,
            dropout=dropout,
            eps=config.embedding_norm_eps,
            separate_norms=config.separate_region_norms,
        )
        self.text_embedding = TextEmbedding(
            config.vocab_size,
            hidden,
            max_positions=config.max_positions,
            types=2,
            dropout=dropout,
            eps=config.embedding_norm_eps,
        )
        alone = config.structure == "single_stream"
        self.object_encoder = stack(TransformerBlock, 0 if alone else config.object_layers)
        self.sentence_encoder = stack(TransformerBlock, 0 if alone else config.sentence_layers)
        self.cross_encoder = stack(ModalityBlock if config.separate_ffn else TransformerBlock, config.encoder_layers)
        self.cross_decoder = stack(DecoderBlock, 0 if config.shared else config.decoder_layers)

        self.word_head = TokenHead(hidden, config.vocab_size, eps=eps, tied=config.tie_lm_head)
        self.object_head = TokenHead(hidden, config.num_classes, eps=eps) if config.num_classes else None

        def ism_pooler() -> AttentionPooler:
            size = config.similarity_dim or hidden
            return AttentionPooler(hidden, size, dropout=dropout, batch_norm=config.pooler_batch_norm)

        self.text_pooler = ism_pooler()
        pooled_layers = max(1, len(self.object_encoder)) if config.ism_pooling == "all_layers" else 1
        self.image_poolers = nn.ModuleList(ism_pooler() for _ in range(pooled_layers))

        if config.ism_source == "cross_modal":
            self.matching_head = nn.Linear(hidden, 1)

        self.fuses_decoder = config.use_decoder_in_fusion and not config.shared
        self.fused_dim = config.fusion_dim or hidden
        self.decoder_dim = self.fused_dim if self.fuses_decoder and config.fusion_decoder == "apart" else 0
        sources = ["image", "text", "decoder"] if self.fuses_decoder else ["image", "text"]
        if config.fusion_pooling == "all_layers":
            sources += [f"image_{layer}" for layer in range(config.encoder_layers - 1)]
        self.fusion_poolers = nn.ModuleDict(
            {s: AttentionPooler(hidden, self.fused_dim, dropout=dropout) for s in sources}
        )
        self.fusion_norm = nn.LayerNorm(self.fused_dim, eps=config.fusion_norm_eps)
        if self.decoder_dim:
            self.fusion_decoder_norm = nn.LayerNorm(self.decoder_dim, eps=config.fusion_norm_eps)
        init_weights(self, config.init_std)

    # ---- The four modules ------------------------------------------------------------------------------------

    def encode_image(self, image: Image, hidden_BR: Tensor | None = None) -> VisualStates:
        """The object encoder. hidden_BR bool: regions that MOC hides."""
        if not isinstance(image, Regions):
            raise DataError("TDEN reads region features: run the features stage, or choose a model that reads pixels")
        x_BSD, mask_BS = self.region_embedding(image, hidden_BR)
        layers = []
        for block in self.object_encoder:
            x_BSD = block(x_BSD, padding_mask(mask_BS))
            layers.append(x_BSD)
        return VisualStates(layers=tuple(layers) or (x_BSD,), mask_BS=mask_BS)

    def encode_text(
        self,
        ids: Mapping[int, Tensor],
        mask_BT: Tensor,
        last_segment_BT: Tensor | None = None,
        reading: Reading | None = None,
    ) -> dict[int, Tensor]:
        """The sentence encoder, once over all streams: {UNDERSTANDING or GENERATION: ids_BT} -> {...: [B, T, D]}.

        last_segment_BT bool: of texts in several segments; `segment_types` tells them apart when understanding.
        reading: of the generation stream by itself; the states are those of the tokens that it has.
        """
        batch, length = mask_BT.shape
        if length > self.config.max_positions:
            raise ParamsError(f"{length} tokens of text, but model.config.max_positions is {self.config.max_positions}")
        types = torch.tensor(list(ids), device=mask_BT.device).repeat_interleave(batch)[:, None]
        if self.config.segment_types and last_segment_BT is not None:
            types = types.expand(-1, length).clone()
            for number, stream in enumerate(ids):
                if stream == UNDERSTANDING:
                    types[number * batch : (number + 1) * batch] = last_segment_BT.long()
        masks = [causal_mask(mask_BT) if s == GENERATION else padding_mask(mask_BT) for s in ids]
        mask = masks[0] if len(masks) == 1 else torch.cat([m.expand(-1, -1, length, -1) for m in masks])
        x = self.text_embedding(torch.cat(list(ids.values())), types)
        if reading is not None:
            x = reading.select(x)
        for block in self.sentence_encoder:
            x = block(x, mask, reading)
        return dict(zip(ids, x.chunk(len(ids)), strict=True))

    def cross_encode(self, text_BTD: Tensor, mask_BT: Tensor, visual: VisualStates) -> tuple[Tensor, list[Tensor]]:
        """The cross-modal encoder over [words; regions].

        Returns the words' last states, and the regions' after each layer, [IMG] first: [B, T, D] and [B, S, D]s.
        """
        length = mask_BT.shape[1]
        x = torch.cat([text_BTD, visual.last_BSD], dim=1)
        mask = padding_mask(torch.cat([mask_BT, visual.mask_BS], dim=1))
        image_layers = []
        for block in self.cross_encoder:
            x = block(x, mask, length) if self.config.separate_ffn else block(x, mask)
            image_layers.append(x[:, length:])
        return x[:, :length], image_layers

    def decode(
        self, text_BTD: Tensor, text_mask: Tensor, memory_BSD: Tensor, mask_BS: Tensor, reading: Reading | None = None
    ) -> Tensor:
        """The cross-modal decoder. `text_mask` is an attention mask: `causal_mask`, but for the public code's VQA.

        reading: what `encode_text` read; not of a decoder that is shared with the encoder.
        """
        if self.config.shared:
            return shared.decode(self._shared_blocks(), text_BTD, text_mask, memory_BSD, mask_BS)
        for block in self._decoder_blocks():
            text_BTD = block(text_BTD, text_mask, memory_BSD, padding_mask(mask_BS), reading)
        return text_BTD

    def _decoder_blocks(self) -> list[DecoderBlock]:
        return cast("list[DecoderBlock]", self.cross_decoder)

    def _shared_blocks(self) -> list[TransformerBlock]:
        return cast("list[TransformerBlock]", self.cross_encoder)

    def predict_words(self, x_D: Tensor) -> Tensor:
        """Vocabulary logits; any leading dimensions. Gather the positions that need them first."""
        return self.word_head(x_D, self.text_embedding.words.weight if self.config.tie_lm_head else None)

    def pool_image(self, visual: VisualStates) -> Tensor:
        """[B, P], unit length."""
        layers = visual.layers[-len(self.image_poolers) :]
        pooled = [pool(x, visual.mask_BS) for pool, x in zip(self.image_poolers, layers, strict=True)]
        return F.normalize(torch.stack(pooled).sum(0), dim=-1)

    def pool_text(self, text_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """[B, P], unit length."""
        return F.normalize(self.text_pooler(text_BTD, mask_BT), dim=-1)

    def match(self, text_BTD: Tensor, mask_BT: Tensor, visual: VisualStates) -> Tensor:
        """How much image and sentence belong together, from [CLS] and [IMG] after the cross-modal encoder, as in
        ViLBERT; logits, [B]. Only with `ism_source: cross_modal`."""
        x_BTD, (*_, image_BSD) = self.cross_encode(text_BTD, mask_BT, visual)
        return self.matching_head(x_BTD[:, 0] * image_BSD[:, 0]).squeeze(-1)
