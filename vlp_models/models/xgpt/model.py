"""XGPT: one stack of transformer layers that encodes images and texts, and decodes either from the other.

Q. Xia, H. Huang, N. Duan et al.: "XGPT: Cross-modal Generative Pre-Training for Image Captioning", NLPCC 2021
(arXiv 2003.01473, the later version). The authors published no code.

            what the encoder reads                              what the decoder predicts
    IC      regions                                         ->   the caption
    IMLM    regions, and the caption with a masked fragment ->   the fragment
    IDA     regions, and the regions that the words of a    ->   the caption
            caption with masked spans attend to
    TIFG    the caption                                     ->   the regions

The paper: a region is one linear layer over its feature and location, refined by attention on attention; a word is its
token and its position. 12 layers, 768 wide, 8 heads; encoder and decoder share them, and so do attention over past
words and attention over the encoder's last layer. IMLM masks one fragment of half the words: 80% [MASK], 10% random
words, 10% unchanged. IDA replaces spans of Poisson(3) words by one [MASK] each, and each word's embedding by the
weighted sum of the regions it attends to. TIFG generates x^I with mean squared error. The losses take turns
(`mix: alternate`), each with an update of its own. Beam size 2, no length penalty.

Choices where the paper is silent:
- BERT-based, so post-LN, exact GELU, 3072 wide inside, learned positions, LayerNorm and dropout after embeddings,
  N(0, 0.02), and output weights tied to the word embeddings, with a bias. Attention over the memory has its own
  LayerNorm.
- The "signal ... for efficient re-use" that distinguishes the decoder's keys from the encoder's is which of the two are
  passed in: the encoder's are projected once per image (layers.py has other readings: `signal`, `cross_attention`).
- Captions start with [CLS] and end with [SEP]. Both count among the paper's 60 tokens.
- IMLM's decoder reads the fragment alone, after [CLS], at its positions in the caption (MASS). All places of the
  fragment are equally likely. The encoder reads its placeholders; only IDA hides a length.
- IDA hides 30% of the words (BART), in spans of at least one word, never two adjacent ones. What a word attends to gets
  the position of the word it replaces; [CLS] and [SEP] count as words. The first third of the matching's W has no
  effect and is left out (`Matching`).
- TIFG's target is x^I before refinement and without dropout, and has no gradient: a target that moves with the loss
  could shrink it. The decoder reads the regions before, unrefined and without a position, after a learned first vector,
  the most confident region first (`features.order: score` sorts imported ones). A linear layer maps its states to
  vectors. The distance is the mean over features; the equation's sum is 768 times as much (`tifg_reduction`).
- On text alone (`view: texts`), IMLM is MASS, with which the paper pretrains on texts.

The recipe's `mask_probability` has no effect, and other values than the default are refused: `imlm_fragment` and
`ida_share` of the config determine what is hidden.
Two-pass scheduled sampling (training/scheduled_sampling.py) has one path: in the second pass, IMLM's encoder reads the
first pass's predictions in place of the fragment's placeholders. Only real tokens are computed (layers/packing.py), and
vocabulary logits of predicted words only.

Shape suffixes: B images, R regions, K packed regions; N texts (or hypotheses), T text tokens, M packed ones, U tokens
of an infilled sentence; F features, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlp_models.data.batch import Batch, Image, Regions, Text
from vlp_models.data.inputs import ModelInputs, RegionInput
from vlp_models.errors import DataError, ParamsError
from vlp_models.models.layers.attention import causal_mask, padding_mask
from vlp_models.models.layers.blocks import init_weights
from vlp_models.models.layers.cache import DecodingState, KeyValues
from vlp_models.models.layers.embeddings import embedding_table
from vlp_models.models.layers.located import located_regions
from vlp_models.models.layers.packing import Packing, take
from vlp_models.models.layers.several_images import add_places, place_embedding
from vlp_models.models.partial_load import PartialLoad
from vlp_models.models.protocols import Located, MaskedPass
from vlp_models.models.xgpt.config import XGPTConfig
from vlp_models.models.xgpt.layers import AttentionOnAttention, Block, Matching, RegionEmbedding, TextEmbedding
from vlp_models.models.xgpt.state import ImageStates, Memory, SpanCorruption
from vlp_models.objectives.generation import region_generation, sentence_generation
from vlp_models.objectives.loss import Learners, Loss, learners_by_text
from vlp_models.objectives.masked_modeling import Corruption, mask_tokens
from vlp_models.objectives.span_masking import draw_spans, replace_spans, select_fragment


class XGPT(nn.Module):
    """Implements `LocatesStates`, `Generates`, `Pretrains` and `PredictsMaskedWords`, on regions."""

    config_class: ClassVar[type] = XGPTConfig
    partial_load: ClassVar[PartialLoad] = PartialLoad(
        same=(
            "hidden",
            "heads",
            "intermediate",
            "feature_dim",
            "separate_region_norms",
            "refiner_gate",
            "refiner_norm",
        ),
        meanings={"signal": r"\.signal$", "tifg_target": r"^region_head\."},
    )
    inputs: ClassVar[ModelInputs] = ModelInputs(image=RegionInput())
    objectives: ClassVar[tuple[str, ...]] = ("ic", "imlm", "ida", "tifg")
    word_paths: ClassVar[Mapping[str, tuple[str, ...]]] = {"encoder": ("imlm",)}
    ignores_mask_probability: ClassVar[str] = "`imlm_fragment` and `ida_share` of its config set what is hidden"
    located_dim: int
    images_per_text: int

    def __init__(self, config: XGPTConfig) -> None:
        super().__init__()
        self.config = config
        self.located_dim = config.hidden
        hidden, eps = config.hidden, config.embedding_norm_eps
        drop = {"dropout": config.dropout, "attention_dropout": config.attention_dropout}
        self.region_embedding = RegionEmbedding(
            config.feature_dim,
            hidden,
            eps=eps,
            separate_norms=config.separate_region_norms,
            feature_dropout=config.feature_dropout,
        )
        self.region_dropout = nn.Dropout(config.dropout)
        self.refiner = nn.ModuleList(
            AttentionOnAttention(
                hidden,
                config.heads,
                gate=config.refiner_gate,
                norm=config.refiner_norm,
                **drop,
                eps=config.layer_norm_eps,
            )
            for _ in range(config.refiner_layers)
        )
        self.refined_norm = None  # with pre-norm, the last layer's output is not normalized yet
        if config.refiner_layers and config.refiner_norm == "pre":
            self.refined_norm = nn.LayerNorm(hidden, eps=config.layer_norm_eps)
        self.text_embedding = TextEmbedding(
            config.vocab_size, hidden, max_positions=config.max_positions, dropout=config.dropout, eps=eps
        )
        has_decoder = config.structure == "enc_dec"  # EncDec has a second stack; else one stack encodes and decodes
        self.layers: Any = nn.ModuleList(Block(config, decodes=not has_decoder) for _ in range(config.layers))
        self.decoder: Any = None
        if has_decoder:
            self.decoder = nn.ModuleList(Block(config, decodes=True) for _ in range(config.layers))
        self.word_bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.matching = Matching(hidden) if config.ida_matching else None
        self.first_region = nn.Parameter(torch.zeros(1, hidden))  # starts a row of regions, as [CLS] starts a caption
        self.region_head = nn.Linear(hidden, hidden if config.tifg_target == "embedding" else config.feature_dim)
        init_weights(self, config.init_std)
        for block in self.decoder_layers():
            if block.signal is not None:
                nn.init.zeros_(block.signal)
        self.images_per_text = config.images_per_text
        self.place_embedding = place_embedding(config.images_per_text, hidden)

    def decoder_layers(self) -> Any:
        """Return the decoder's blocks: a stack of its own, or that of the encoder."""
        return self.layers if self.decoder is None else self.decoder

    # ---- Encoder and decoder ------------------------------------------------------------------------------------

    def encode_image(self, image: Image) -> ImageStates:
        """Embed and refine the regions (sections 3 and A.1)."""
        if not isinstance(image, Regions):
            raise DataError("XGPT reads region features: run the features stage, or choose a model that reads pixels")
        # (B, R, F) -> (K, D): packed regions, embedded, placed among several images, and refined by each other.
        embedded_KD, packing = self.region_embedding(image)
        x_KD = self.region_dropout(embedded_KD)
        if image.place_BR is not None:
            x_KD = add_places(x_KD, packing.pack(image.place_BR), self.place_embedding)
        for layer in self.refiner:
            x_KD = layer(x_KD, packing)
        x_KD = x_KD if self.refined_norm is None else self.refined_norm(x_KD)
        return ImageStates(embedded_KD=embedded_KD, refined_KD=x_KD, packing=packing)

    def embed_text(self, ids_NT: Tensor, words: Packing) -> Tensor:
        """Embed the packed words, [M, D]."""
        length = words.shape[1]
        if length > self.config.max_positions:
            raise ParamsError(f"{length} tokens of text, but config.max_positions is {self.config.max_positions}")
        embedded: Tensor = self.text_embedding(words.pack(ids_NT), words.positions_M)
        return embedded

    def encode(self, x: Tensor, packing: Packing, owner_N: Tensor | None = None) -> Memory:
        """Run the encoder over images, texts, or both joined, and project the result for the decoder.

        owner_N: the row that each decoded text reads; None: text i reads row i.
        """
        mask, states = padding_mask(packing.mask_BT), self.encoder_states(x, packing)
        # A decoder layer reads the encoder's last layer; with `structure: enc`, the input of the same layer.
        read = states[:-1] if self.config.structure == "enc" else states[-1:] * len(states[:-1])
        # Projected once: all texts of an image, and all steps of decoding, read the same keys and values.
        pairs = zip(self.decoder_layers(), read, strict=True)
        return Memory(layers=tuple(block.project(x, packing) for block, x in pairs), mask=mask, owner_N=owner_N)

    def encoder_states(self, x: Tensor, packing: Packing) -> list[Tensor]:
        """Run the encoder; returns its input and the states after each layer."""
        mask, states = padding_mask(packing.mask_BT), [x]
        for block in self.layers:
            states.append(block.encode(states[-1], mask, packing))
        return states

    def encode_both(self, words_MD: Tensor, words: Packing, image: ImageStates | None) -> Memory:
        """Run the encoder over words and the regions of their images joined, text i with image i; None: words alone."""
        if image is None:
            return self.encode(words_MD, words)
        return self.encode(torch.cat([words_MD, image.refined_KD]), words.concat(image.packing))

    def decode(self, x_MD: Tensor, packing: Packing, memory: Memory) -> Tensor:
        """Run the decoder: each token attends to those before it and to the memory. [M, D]"""
        causal = causal_mask(packing.shape[1], x_MD.device)
        for block, keys in zip(self.decoder_layers(), memory.layers, strict=True):
            x_MD = block.decode(x_MD, causal, packing, keys, memory)
        return x_MD

    def predict_next(self, ids_NT: Tensor, at_NT: Tensor, memory: Memory) -> Tensor:
        """Return the logits of the words after these positions, [M, V], in row-major order.

        Tokens after the last position of a text are not computed."""
        # Each text up to the last position asked for; what comes after cannot change a causal prediction.
        words = Packing.of(at_NT.flip(1).cumsum(1).flip(1) > 0)
        x_MD = self.decode(self.embed_text(ids_NT, words), words, memory)
        return self.predict_words(take(x_MD, words.rows_at(at_NT)))

    def predict_words(self, x_D: Tensor) -> Tensor:
        """Return vocabulary logits, [..., D] -> [..., V]. Gather the positions that need them first."""
        return F.linear(x_D, embedding_table(self.text_embedding.words), self.word_bias)

    # ---- The four objectives ------------------------------------------------------------------------------------

    def pretraining_losses(
        self, batch: Batch, *, objectives: Learners, generator: torch.Generator, mask_probability: float
    ) -> dict[str, Loss]:
        """Return one unweighted loss per objective.

        Raises:
            ParamsError: an unknown objective. DataError: an objective needs images and the batch has none.
        """
        objectives = learners_by_text(objectives, None if batch.text is None else batch.text.owner_N)
        corruption = self.corrupt(batch, objectives=objectives, generator=generator, mask_probability=mask_probability)
        return self.masked_pass(batch, corruption, self.encode_corrupted(batch, corruption), objectives).losses

    def corrupt(
        self, batch: Batch, *, objectives: Learners, generator: torch.Generator, mask_probability: float
    ) -> SpanCorruption:
        """Draw what IMLM and IDA hide of the batch. mask_probability has no effect.

        Raises:
            ParamsError: an unknown objective. DataError: an objective needs images and the batch has none.
        """
        if unknown := set(objectives) - set(self.objectives):
            raise ParamsError(f"XGPT has no objective {sorted(unknown)}, only {list(self.objectives)}")
        if batch.text is None or (batch.image is None and set(objectives) != {"imlm"}):
            raise DataError(
                f"XGPT trains {', '.join(objectives)} on captions of images: set `view: captions`; on texts alone it "
                "trains `imlm` only"
            )
        config, text = self.config, batch.text
        ids_NT, words_NT = text.ids_BT, torch.zeros_like(text.mask_BT)
        if "imlm" in objectives:
            words_NT = select_fragment(text.mask_BT, config.imlm_fragment, generator)
            ids_NT = mask_tokens(
                ids_NT,
                words_NT,
                scheme="bert",
                mask_id=config.mask_id,
                vocab_size=config.vocab_size,
                generator=generator,
            )
        # IDA's text has another length: a span of several words may become a single [MASK].
        infilled = infilled_mask = None
        if "ida" in objectives:
            spans = draw_spans(
                text.mask_BT,
                share=config.ida_share,
                mean=config.ida_span,
                empty=config.ida_empty_spans,
                generator=generator,
            )
            infilled, infilled_mask = replace_spans(
                text.ids_BT, text.mask_BT, spans, how=config.ida_masks, mask_id=config.mask_id
            )
        return SpanCorruption(ids_BT=ids_NT, words_BT=words_NT, infilled_BU=infilled, infilled_mask_BU=infilled_mask)

    def encode_corrupted(self, batch: Batch, corruption: Corruption) -> ImageStates | None:
        """Embed and refine the regions, once for all passes; None for a batch without images."""
        return None if batch.image is None else self.encode_image(batch.image)

    def masked_pass(
        self,
        batch: Batch,
        corruption: Corruption,
        image: ImageStates | None,
        objectives: Learners,
        ids: Mapping[str, Tensor] | None = None,
        after: MaskedPass | None = None,
    ) -> MaskedPass:
        """Run one pass for these objectives. ids: what IMLM's encoder reads (`encoder`); default: masked sentences."""
        losses: dict[str, Loss] = {}
        word_logits: dict[str, Tensor] = {}
        for name, learners in objectives.items():
            # The texts that train this objective, with the rows of their images. [N, ...]
            text, rows_N = _select_texts(batch.text, None if image is None else len(batch.image), learners)
            if name == "ic":
                assert image is not None
                memory = self.encode(image.refined_KD, image.packing, text.owner_N)
                losses[name] = self.caption_loss(text, memory, name)
                continue
            text_images = None if image is None else image.select(text.owner_N)  # one row per text
            if name == "imlm":
                read_NT = _rows((ids or {}).get("encoder", corruption.ids_BT), rows_N)
                words_NT = _rows(corruption.words_BT, rows_N)
                logits = self.predict_fragment(read_NT, words_NT, text, text_images)
                losses[name] = sentence_generation(logits, text.ids_BT[words_NT], name=name)
                word_logits["encoder"] = logits.detach()
            elif name == "ida":
                assert isinstance(corruption, SpanCorruption) and text_images is not None
                ids_NU, mask_NU = _rows(corruption.infilled_BU, rows_N), _rows(corruption.infilled_mask_BU, rows_N)
                memory = self.encode_infilled(ids_NU, mask_NU, text_images)
                losses[name] = self.caption_loss(text, memory, name)
            else:
                assert text_images is not None and isinstance(batch.image, Regions)
                losses[name] = self.generate_regions(text, text_images, batch.image)
        return MaskedPass(losses=losses, word_logits=word_logits)

    def caption_loss(self, text: Text, memory: Memory, name: str) -> Loss:
        """Return the loss of the whole caption, decoded from the memory: IC and IDA."""
        logits = self.predict_next(text.ids_BT, text.has_next_BT, memory)
        return sentence_generation(logits, text.next_tokens(text.has_next_BT), name=name)

    def predict_fragment(self, read_NT: Tensor, words_NT: Tensor, text: Text, image: ImageStates | None) -> Tensor:
        """Return IMLM's logits of the fragment's words, [M, V]. read_NT: what the encoder reads."""
        words = Packing.of(text.mask_BT)
        memory = self.encode_both(self.embed_text(read_NT, words), words, image)
        if self.config.imlm_reads == "caption":
            return self.predict_next(text.ids_BT, F.pad(words_NT[:, 1:], (0, 1)), memory)
        # The decoder reads [CLS] and the fragment but its last word, at their positions in the caption.
        rows_M, positions_M = words_NT.nonzero(as_tuple=True)
        rank_M = (words_NT.cumsum(1) - 1)[words_NT]  # 0: the fragment's first word
        width = max(1, int(words_NT.sum(1).max())) if len(words_NT) else 1  # of the longest fragment
        fragment = Packing(rows_M * width + rank_M, (len(words_NT), width))
        # Each word of the fragment is predicted from the word before it, the first one from [CLS].
        before_M = positions_M - 1
        ids_M = torch.where(rank_M == 0, text.ids_BT[rows_M, 0], text.ids_BT[rows_M, before_M])
        return self.predict_words(self.decode(self.text_embedding(ids_M, before_M), fragment, memory))

    def encode_infilled(self, ids_NU: Tensor, mask_NU: Tensor, image: ImageStates) -> Memory:
        """Run IDA's encoder over an image and a caption with its spans replaced, each word replaced by the regions it
        attends to."""
        words = Packing.of(mask_NU)
        # x_i^T <- sum_j A_ij x_j^I, then the position and the norm of the word that it replaces
        words_MD = self.embed_text(ids_NU, words)
        if self.matching is not None:
            attended_MD = self.matching(words_MD, words, image.refined_KD, image.packing)
            if self.config.ida_residual:
                attended_MD = attended_MD + self.text_embedding.words(words.pack(ids_NU))
            words_MD = self.text_embedding.add_positions(attended_MD, words.positions_M)
        return self.encode_both(words_MD, words, image)

    def generate_regions(self, text: Text, image: ImageStates, detected: Regions) -> Loss:
        """Return TIFG's loss: each region from the caption and the regions before it.

        image: one row per text. detected: the batch's regions, one row per image.
        """
        words, regions = Packing.of(text.mask_BT), image.packing
        memory = self.encode(self.embed_text(text.ids_BT, words), words)
        target_KD = image.embedded_KD.detach()
        # The decoder reads the regions shifted by one, after the learned first vector.
        before_NRD = F.pad(regions.pad(self.region_dropout(target_KD)), (0, 0, 1, 0))[:, :-1]
        # bool (N, R, 1): the first region of each text.
        first_NR1 = F.pad(regions.mask_BT.new_ones(len(text), 1), (0, regions.shape[1] - 1))[..., None]
        x_KD = regions.pack(torch.where(first_NR1, self.first_region, before_NRD))
        generated = self.region_head(self.decode(x_KD, regions, memory))
        if self.config.tifg_target == "raw":
            raw_NRF = detected.features_BRF
            target_KD = regions.pack(raw_NRF if text.owner_N is None else raw_NRF.index_select(0, text.owner_N))
        elif self.training and self.config.feature_dropout:
            # The target is x^I without feature dropout, which no caption could predict.
            with torch.no_grad():
                embedded_KD, packing = self.region_embedding(detected, drop=False)
                embedded_NRD = packing.pad(embedded_KD)
                if text.owner_N is not None:
                    embedded_NRD = embedded_NRD.index_select(0, text.owner_N)
                target_KD = regions.pack(embedded_NRD)
        return region_generation(generated, target_KD, reduction=self.config.tifg_reduction)

    # ---- Understanding ------------------------------------------------------------------------------------------

    def locate(self, image: Image, text: Text) -> Located:
        """Return the regions' last states of the encoder, which reads words and regions together as in IMLM."""
        owner_N, words = text.owners(len(image)), Packing.of(text.mask_BT)
        states = self.encode_image(image).select(owner_N)
        x, joint = torch.cat([self.embed_text(text.ids_BT, words), states.refined_KD]), words.concat(states.packing)
        image_KD = self.encoder_states(x, joint)[-1][joint.split :]
        return located_regions(states.packing.pad(image_KD), image, owner_N)

    # ---- Generation ---------------------------------------------------------------------------------------------

    def generation_logits(self, image: Image, text: Text, at_NT: Tensor | None = None) -> Tensor:
        """Return logits, [N, T, V], or [M, V] at the True positions of `at_NT`; position t predicts token t + 1.

        An image is encoded once even if several texts share it.
        """
        # The memory has a row per image; a text attends to that of its own.
        states = self.encode_image(image)
        memory = self.encode(states.refined_KD, states.packing, text.owners(len(image)))
        logits = self.predict_next(text.ids_BT, text.mask_BT if at_NT is None else at_NT, memory)
        return logits if at_NT is not None else Packing.of(text.mask_BT).pad(logits)

    def start(self, image: Image, *, max_len: int) -> DecodingState:
        """Encode each image once. Up to `max_len` steps may follow; the first reads [CLS]."""
        if max_len > self.config.max_positions:
            raise ParamsError(f"max_len is {max_len}, but config.max_positions is {self.config.max_positions}")
        states = self.encode_image(image)
        memory = self.encode(states.refined_KD, states.packing)
        return DecodingState.begin(memory, memory.mask, max_len=max_len)

    def step(self, token_N: Tensor, state: DecodingState) -> tuple[Tensor, DecodingState]:
        """Read one more token of each hypothesis. Returns the next token's logits, [N, V]."""
        # Each layer reads its own past and the image's keys, which all hypotheses of an image share.
        x_ND = self.text_embedding(token_N, torch.full_like(token_N, state.length))
        memory = replace(state.memory, owner_N=state.owner_N)
        before: tuple[KeyValues | None, ...] = state.past or (None,) * len(memory.layers)
        past: list[KeyValues] = []
        for block, keys, layer_past in zip(self.decoder_layers(), memory.layers, before, strict=True):
            x_ND, present = block.step(x_ND, layer_past, keys, memory, state.by_image)
            past.append(present)
        return self.predict_words(x_ND), replace(state, length=state.length + 1, past=tuple(past))

    def reorder(self, state: DecodingState, index_N: Tensor) -> DecodingState:
        """Let hypothesis i continue hypothesis index[i]; their number may change."""
        return state.reorder(index_N)


def _rows(x: Tensor | Any, rows_N: Tensor | None) -> Tensor:
    return x if rows_N is None else x.index_select(0, rows_N)


def _select_texts(text: Text, images: int | None, learners_N: Tensor | None) -> tuple[Text, Tensor | None]:
    """Return the texts of the samples that train an objective, with the rows of their images, and their indices.

    None: all texts."""
    owner_N = None if images is None else text.owners(images)
    if learners_N is None:
        return text, None
    rows_N = learners_N.nonzero().squeeze(1)
    # The selected texts no longer have the images' order, so each needs its image's row.
    owner_N = rows_N if owner_N is None else owner_N.index_select(0, rows_N)
    return replace(text.select(rows_N), owner_N=owner_N), rows_N
