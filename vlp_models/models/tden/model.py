"""TDEN: the two-stream decoupled encoder-decoder.

Y. Li, Y. Pan, T. Yao, J. Chen, T. Mei: "Scheduled Sampling in Vision-Language Pretraining with Decoupled
Encoder-Decoder Network", AAAI 2021. Public code: YehLi/xmodaler (its release, YehLi/TDEN, holds no model).

    regions  [IMG] r1 .. rn ── object encoder (K_I) ──┬─────────────── cross-modal encoder (K_E) ── MLM, MOC
                                                      ├── ISM ──┐        │
    words [CLS] w1 .. wm [SEP] ── sentence encoder (K_S) ───────┴────────┘
                    the same, run causally ───────────────────── cross-modal decoder (K_D) ── MSG
                                                                   └ attends to the object encoder's output

What the paper says: four stacks of transformer blocks. [IMG], the mean of all regions, begins the visual tokens.
The cross-modal encoder runs over the two encoded sequences joined; each decoder layer attends to the past words,
then to all visual tokens. MLM: 15% of the words become [MASK], classified by cross-entropy. MOC: 15% of the regions
become a mask token, classified by KL divergence to the detector's distribution. ISM: attention-pooled outputs of the
object and the sentence encoder (not of the cross-modal encoder), triplet ranking loss, Multibatch negatives. MSG: the
sentence word by word from the past words and the image. All four are summed, in one pass or two.

Where the paper is silent, what is done here (and the switch in `TDENConfig`, if the public code differs):
- Sizes are "as in ViLBERT"; the defaults are the public code's, 768 wide throughout. Post-LN, GELU, N(0, 0.02).
- The sentence encoder serves both paths, so for generation it must be causal, too: each sentence is encoded twice,
  with type 0 and all words visible, with type 1 and only the past visible. Both go through as one batch.
- The decoder attends to the object encoder's output, which is what "conditioned on the input image" asks for. In the
  public code's pretraining it is the cross-modal encoder's, which has seen the caption through MLM's path
  (`decoder_visual_source`).
- Cross-modal encoder blocks are plain. The public code has a feed-forward net per modality (`separate_ffn`).
- MSG reads the sentence that MLM masked and predicts every token, [SEP] included.
- [MASK] always replaces a masked word; BERT replaces 80% (`mask_scheme`). The mask token of a region is a zero
  feature with its location kept, left out of [IMG]'s mean; the public code hides overlapping regions as well
  (`zero_overlapping_regions`).
- ISM sees the masked input, as there is one pass. It pools the last object layer, margin 0.2, all violating
  negatives (`ism_pooling`, `ism_margin`, `ism_negatives`, `similarity_dim`, `pooler_batch_norm`).
- MLM and MSG share one head, tied to the word embeddings as in BERT (`tie_lm_head`).
- The holistic feature for VQA is "based on the outputs of encoder and decoder via attention" after MCAN: pooled image,
  pooled text and pooled decoder output are added and normalised. The decoder stays causal as in pretraining; the
  public code runs it bidirectionally (`understanding_decoder_mask`), multiplies image and text (`fusion`), pools the
  image after every cross-modal layer (`fusion_pooling`) and classifies the decoder's part separately.

Two-pass scheduled sampling calls `run_pass` twice with one `VisualStates`.

Shape suffixes: B batch, S visual tokens ([IMG] and R regions), T text tokens, D hidden, P similarity dimension,
V vocabulary, N hypotheses.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlp_models.data.batch import Batch, Image, Regions, Text
from vlp_models.errors import DataError, ParamsError
from vlp_models.models.layers.attention import KeyValues
from vlp_models.models.layers.blocks import DecoderBlock, ModalityBlock, TransformerBlock
from vlp_models.models.layers.embeddings import RegionEmbedding, TextEmbedding
from vlp_models.models.layers.heads import TokenHead
from vlp_models.models.layers.init import init_weights
from vlp_models.models.layers.masks import causal_mask, padding_mask
from vlp_models.models.layers.pooling import AttentionPooler
from vlp_models.models.protocols import Fused
from vlp_models.models.tden.config import TDENConfig
from vlp_models.models.tden.state import DecodingState, PassOutput, VisualStates
from vlp_models.objectives.ism import image_sentence_matching, same_image
from vlp_models.objectives.loss import Loss
from vlp_models.objectives.masking import mask_tokens, overlapping, select_regions, select_tokens
from vlp_models.objectives.mlm import masked_language_modelling
from vlp_models.objectives.moc import masked_object_classification
from vlp_models.objectives.msg import sentence_generation

UNDERSTANDING, GENERATION = 0, 1  # the sentence encoder's streams, and their token types


class TDEN(nn.Module):
    """Fuses, Embeds, ScoresPairs, Generates and Pretrains (models/protocols.py), on region features."""

    def __init__(self, config: TDENConfig) -> None:
        super().__init__()
        self.config = config
        self.objectives = ("mlm", "moc", "ism", "msg") if config.num_classes else ("mlm", "ism", "msg")
        self.fused_dim = config.hidden
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
        self.object_encoder = stack(TransformerBlock, config.object_layers)
        self.sentence_encoder = stack(TransformerBlock, config.sentence_layers)
        self.cross_encoder = stack(ModalityBlock if config.separate_ffn else TransformerBlock, config.encoder_layers)
        self.cross_decoder = stack(DecoderBlock, config.decoder_layers)

        self.word_head = TokenHead(hidden, config.vocab_size, eps=eps, tied=config.tie_lm_head)
        self.object_head = TokenHead(hidden, config.num_classes, eps=eps) if config.num_classes else None

        def ism_pooler() -> AttentionPooler:
            size = config.similarity_dim or hidden
            return AttentionPooler(hidden, size, dropout=dropout, batch_norm=config.pooler_batch_norm)

        self.text_pooler = ism_pooler()
        pooled_layers = config.object_layers if config.ism_pooling == "all_layers" else 1
        self.image_poolers = nn.ModuleList(ism_pooler() for _ in range(pooled_layers))

        sources = ["image", "text", "decoder"] if config.use_decoder_in_fusion else ["image", "text"]
        if config.fusion_pooling == "all_layers":
            sources += [f"image_{layer}" for layer in range(config.encoder_layers - 1)]
        self.fusion_poolers = nn.ModuleDict({s: AttentionPooler(hidden, hidden, dropout=dropout) for s in sources})
        self.fusion_norm = nn.LayerNorm(hidden, eps=eps)
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
        return VisualStates(layers=tuple(layers), mask_BS=mask_BS)

    def encode_text(self, ids: Mapping[int, Tensor], mask_BT: Tensor) -> dict[int, Tensor]:
        """The sentence encoder, once over all streams: {UNDERSTANDING or GENERATION: ids_BT} -> {...: [B, T, D]}."""
        batch, length = mask_BT.shape
        if length > self.config.max_positions:
            raise ParamsError(f"{length} tokens of text, but model.config.max_positions is {self.config.max_positions}")
        type_B = torch.tensor(list(ids), device=mask_BT.device).repeat_interleave(batch)
        masks = [causal_mask(mask_BT) if s == GENERATION else padding_mask(mask_BT) for s in ids]
        mask = masks[0] if len(masks) == 1 else torch.cat([m.expand(-1, -1, length, -1) for m in masks])
        x = self.text_embedding(torch.cat(list(ids.values())), type_B)
        for block in self.sentence_encoder:
            x = block(x, mask)
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

    def decode(self, text_BTD: Tensor, text_mask: Tensor, memory_BSD: Tensor, mask_BS: Tensor) -> Tensor:
        """The cross-modal decoder. `text_mask` is an attention mask: `causal_mask`, but for the public code's VQA."""
        for block in self._decoder_blocks():
            text_BTD = block(text_BTD, text_mask, block.cross.project(memory_BSD), padding_mask(mask_BS))
        return text_BTD

    def _decoder_blocks(self) -> list[DecoderBlock]:
        return cast("list[DecoderBlock]", self.cross_decoder)

    def predict_words(self, x_D: Tensor) -> Tensor:
        """Vocabulary logits; any leading dimensions. Gather the positions that need them first."""
        return self.word_head(x_D, self.text_embedding.words.weight if self.config.tie_lm_head else None)

    # ---- Pretraining -----------------------------------------------------------------------------------------

    def run_pass(
        self,
        visual: VisualStates,
        mask_BT: Tensor,
        *,
        encoder_ids_BT: Tensor | None = None,
        decoder_ids_BT: Tensor | None = None,
        words_BT: Tensor | None = None,
        regions_BR: Tensor | None = None,
    ) -> PassOutput:
        """One pass, given encoded images and corrupted sentences.

        encoder_ids_BT: what the cross-modal encoder reads (S_E in the paper), None to leave MLM, MOC and ISM out.
        decoder_ids_BT: what the cross-modal decoder reads (S_D), None to leave MSG out.
        words_BT, regions_BR bool: the masked positions that MLM and MOC predict, None to leave the objective out.
        """
        ids = {UNDERSTANDING: encoder_ids_BT, GENERATION: decoder_ids_BT}
        text = self.encode_text({stream: i for stream, i in ids.items() if i is not None}, mask_BT)
        output = PassOutput(text_BTD=text.get(UNDERSTANDING))
        memory_BSD = visual.last_BSD

        needs_encoder = words_BT is not None or regions_BR is not None
        if UNDERSTANDING in text and (needs_encoder or self._decoder_reads_cross_encoder(text)):
            text_BTD, (*_, image_BSD) = self.cross_encode(text[UNDERSTANDING], mask_BT, visual)
            if words_BT is not None:
                output = replace(output, mlm_logits_MV=self.predict_words(text_BTD[words_BT]))
            if regions_BR is not None and self.object_head is not None:
                output = replace(output, moc_logits_KC=self.object_head(image_BSD[:, 1:][regions_BR]))
            if self._decoder_reads_cross_encoder(text):
                memory_BSD = image_BSD
        if GENERATION in text:
            decoded_BTD = self.decode(text[GENERATION], causal_mask(mask_BT), memory_BSD, visual.mask_BS)
            output = replace(output, msg_logits_NV=self.predict_words(decoded_BTD[:, :-1][mask_BT[:, 1:]]))
        return output

    def _decoder_reads_cross_encoder(self, text: Mapping[int, Tensor]) -> bool:
        return self.config.decoder_visual_source == "cross_encoder" and len(text) == 2

    def pretraining_losses(
        self, batch: Batch, *, objectives: Collection[str], generator: torch.Generator, mask_probability: float
    ) -> dict[str, Loss]:
        """One unweighted loss per objective; one corruption of the batch and one pass serve them all.

        Raises:
            ParamsError: an objective is unknown, or MOC is asked for without class probabilities.
        """
        unknown = set(objectives) - set(self.objectives)
        if unknown:
            why = "; `moc` needs features with class probabilities" if "moc" in unknown else ""
            raise ParamsError(f"TDEN can't learn {sorted(unknown)}, only {list(self.objectives)}{why}")
        config, text, image = self.config, batch.text, batch.image
        words_BT = select_tokens(text.mask_BT, mask_probability, generator)
        ids_BT = text.ids_BT
        if {"mlm", "msg"} & set(objectives):
            ids_BT = mask_tokens(
                ids_BT,
                words_BT,
                scheme=config.mask_scheme,
                mask_id=config.mask_id,
                vocab_size=config.vocab_size,
                generator=generator,
            )
        regions_BR = hidden_BR = None
        if "moc" in objectives and isinstance(image, Regions):
            regions_BR = hidden_BR = select_regions(image.mask_BR, mask_probability, generator)
            if config.zero_overlapping_regions:
                hidden_BR = overlapping(regions_BR, image.boxes_BR4) & image.mask_BR

        visual = self.encode_image(image, hidden_BR)
        output = self.run_pass(
            visual,
            text.mask_BT,
            encoder_ids_BT=ids_BT if {"mlm", "moc", "ism"} & set(objectives) else None,
            decoder_ids_BT=ids_BT if "msg" in objectives else None,
            words_BT=words_BT if "mlm" in objectives else None,
            regions_BR=regions_BR,
        )
        losses = self.pass_losses(output, batch, words_BT=words_BT, regions_BR=regions_BR)
        if "ism" in objectives and output.text_BTD is not None:
            similarity_BB = self.pool_text(output.text_BTD, text.mask_BT) @ self.pool_image(visual).T
            losses["ism"] = image_sentence_matching(
                similarity_BB,
                same_image(batch.image_ids, similarity_BB.device),
                margin=config.ism_margin,
                negatives=config.ism_negatives,
            )
        return losses

    def pass_losses(
        self, output: PassOutput, batch: Batch, *, words_BT: Tensor, regions_BR: Tensor | None
    ) -> dict[str, Loss]:
        """MLM, MOC and MSG of what a pass predicted; the targets are the batch's own words and regions."""
        losses = {}
        ids_BT, mask_BT = batch.text.ids_BT, batch.text.mask_BT
        if output.mlm_logits_MV is not None:
            losses["mlm"] = masked_language_modelling(output.mlm_logits_MV, ids_BT[words_BT])
        if output.moc_logits_KC is not None and isinstance(batch.image, Regions):
            targets_KC = batch.image.class_probs_BRC[regions_BR]
            losses["moc"] = masked_object_classification(output.moc_logits_KC, targets_KC)
        if output.msg_logits_NV is not None:
            losses["msg"] = sentence_generation(output.msg_logits_NV, ids_BT[:, 1:][mask_BT[:, 1:]])
        return losses

    # ---- Understanding ---------------------------------------------------------------------------------------

    def pool_image(self, visual: VisualStates) -> Tensor:
        """[B, P], unit length."""
        layers = visual.layers[-len(self.image_poolers) :]
        pooled = [pool(x, visual.mask_BS) for pool, x in zip(self.image_poolers, layers, strict=True)]
        return F.normalize(torch.stack(pooled).sum(0), dim=-1)

    def pool_text(self, text_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """[B, P], unit length."""
        return F.normalize(self.text_pooler(text_BTD, mask_BT), dim=-1)

    def embed_image(self, image: Image) -> Tensor:
        return self.pool_image(self.encode_image(image))

    def embed_text(self, text: Text) -> Tensor:
        return self.pool_text(self.encode_text({UNDERSTANDING: text.ids_BT}, text.mask_BT)[UNDERSTANDING], text.mask_BT)

    def score_pairs(self, image: Image, text: Text) -> Tensor:
        """The cosine of each image with its own sentence, as in ISM. [B]"""
        return (self.embed_image(image) * self.embed_text(text)).sum(-1)

    def fuse(self, image: Image, text: Text) -> Fused:
        """The holistic feature of VQA, VCR and NLVR. `image_BRD` has [IMG] at 0, so R + 1 tokens."""
        config, pool = self.config, self.fusion_poolers
        causal = config.use_decoder_in_fusion and config.understanding_decoder_mask == "causal"
        visual = self.encode_image(image)
        encoded = self.encode_text(
            dict.fromkeys([UNDERSTANDING, GENERATION] if causal else [UNDERSTANDING], text.ids_BT), text.mask_BT
        )
        text_BTD, image_layers = self.cross_encode(encoded[UNDERSTANDING], text.mask_BT, visual)
        image_BSD = image_layers[-1]
        pooled_text, pooled_image = pool["text"](text_BTD, text.mask_BT), pool["image"](image_BSD, visual.mask_BS)
        if config.fusion_pooling == "all_layers":
            for layer, x_BSD in enumerate(image_layers[:-1]):
                pooled_image = pooled_image + pool[f"image_{layer}"](x_BSD, visual.mask_BS)
        pooled_BD = pooled_text * pooled_image if config.fusion == "product" else pooled_text + pooled_image
        if config.use_decoder_in_fusion:
            memory_BSD = image_BSD if config.decoder_visual_source == "cross_encoder" else visual.last_BSD
            stream, mask = (GENERATION, causal_mask) if causal else (UNDERSTANDING, padding_mask)
            decoded_BTD = self.decode(encoded[stream], mask(text.mask_BT), memory_BSD, visual.mask_BS)
            pooled_BD = pooled_BD + pool["decoder"](decoded_BTD, text.mask_BT)
        return Fused(image_BRD=image_BSD, text_BTD=text_BTD, pooled_BP=self.fusion_norm(pooled_BD))

    # ---- Generation ------------------------------------------------------------------------------------------

    def generation_logits(self, image: Image, text: Text) -> Tensor:
        """[B, T, V]; position t predicts token t + 1."""
        visual = self.encode_image(image)
        text_BTD = self.encode_text({GENERATION: text.ids_BT}, text.mask_BT)[GENERATION]
        return self.predict_words(self.decode(text_BTD, causal_mask(text.mask_BT), visual.last_BSD, visual.mask_BS))

    def start(self, image: Image, *, max_len: int) -> DecodingState:
        """Encodes each image once; up to `max_len` steps may follow, the first with [CLS]."""
        if max_len > self.config.max_positions:
            raise ParamsError(f"max_len is {max_len}, but model.config.max_positions is {self.config.max_positions}")
        visual = self.encode_image(image)
        return DecodingState(
            length=0,
            max_len=max_len,
            past=(),
            memory=tuple(block.cross.project(visual.last_BSD) for block in self._decoder_blocks()),
            memory_mask=padding_mask(visual.mask_BS),
            owner_N=torch.arange(len(image), device=visual.mask_BS.device),
        )

    def step(self, token_N: Tensor, state: DecodingState) -> tuple[Tensor, DecodingState]:
        """Reads one more token of each hypothesis. Returns the next token's logits, [N, V]."""
        x_N1D = self.text_embedding(token_N[:, None], torch.full_like(token_N, GENERATION), start=state.length)
        past: list[KeyValues] = []
        before = iter(state.past or [None] * (len(self.sentence_encoder) + len(self.cross_decoder)))
        for block in cast("list[TransformerBlock]", self.sentence_encoder):
            x_N1D, cache = block.step(x_N1D, next(before))
            past.append(cache)
        for layer, memory in zip(self._decoder_blocks(), state.memory, strict=True):
            x_N1D, cache = layer.step(x_N1D, next(before), memory, state.memory_mask)
            past.append(cache)
        return self.predict_words(x_N1D[:, 0]), replace(state, length=state.length + 1, past=tuple(past))

    def reorder(self, state: DecodingState, index_N: Tensor) -> DecodingState:
        """Hypothesis i continues hypothesis index[i]; their number may change."""
        return state.reorder(index_N)
