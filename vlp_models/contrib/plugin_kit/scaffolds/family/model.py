"""A dual encoder of pixels and words: a small CLIP, with a layer of fusion and a decoder for the tasks that need them.

A. Radford et al.: "Learning Transferable Visual Models From Natural Language Supervision", ICML 2021, figure 3.

    pixels ── image encoder ──┬───── mean of patches ── projection ──┐
                              │                                      ├── InfoNCE
    words ─── text encoder ───│──┬────────── [CLS] ──── projection ──┘
                              ├──┴── fusion ── [CLS]: the feature of VQA, VCR, NLVR, entailment
    words so far ─────────────┴───── decoder ── the next word: captioning

Differences from the paper: the blocks normalize after each residual sum, as in the other families; the text encoder is
bidirectional and read at [CLS]; fusion and decoder are additions that only tasks train.

Shape suffixes: B images, R patches, N texts or hypotheses, T tokens, D hidden, V vocabulary, M chosen positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlp_models.data.batch import Batch, Image, Pixels, Text
from vlp_models.data.inputs import ModelInputs
from vlp_models.data.pixels import Augmentation, PixelInput
from vlp_models.errors import ParamsError
from vlp_models.models.layers.attention import padding_mask, prefix_mask
from vlp_models.models.layers.blocks import TransformerBlock, init_weights
from vlp_models.models.layers.cache import KeyValues
from vlp_models.models.layers.embeddings import TextEmbedding, embedding_table
from vlp_models.models.protocols import Fused
from vlp_models.objectives.loss import Loss

from .config import ToyConfig
from .info_nce import info_nce

EPS = 1e-12  # of all norms, as in BERT


@dataclass(frozen=True, kw_only=True)
class Written:
    """What decoding keeps of N hypotheses: keys and values of each layer, first the image's, then the words'."""

    past: tuple[KeyValues, ...]
    length: int  # number of words


class Toy(nn.Module):
    """Meets `Embeds`, `Fuses`, `Generates` and `Pretrains` of models/protocols.py, on pixels."""

    config_class: ClassVar[type] = ToyConfig
    objectives: ClassVar[tuple[str, ...]] = ("contrast",)
    fused_dim: int
    text_dim: int

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.config = config
        self.fused_dim = self.text_dim = hidden = config.hidden
        # A convolution whose stride is its size: one vector per patch.
        self.patches = nn.Conv2d(3, hidden, config.patch, stride=config.patch)
        self.places = nn.Embedding((config.side // config.patch) ** 2, hidden)
        self.words = TextEmbedding(
            config.vocab_size, hidden, max_positions=config.max_positions, types=1, dropout=0.0, eps=EPS
        )
        self.image_encoder = self.stack(config.image_layers)
        self.text_encoder = self.stack(config.text_layers)
        self.fusion = self.stack(config.fusion_layers)
        self.decoder = self.stack(config.decoder_layers)
        self.image_projection = nn.Linear(hidden, hidden, bias=False)
        self.text_projection = nn.Linear(hidden, hidden, bias=False)
        # The logarithm of 1 / temperature, so that the learned scale stays positive.
        self.log_scale = nn.Parameter(torch.tensor(-math.log(config.temperature)))
        init_weights(self, config.init_std)

    def stack(self, layers: int) -> nn.ModuleList:
        hidden, heads = self.config.hidden, self.config.heads

        def block() -> TransformerBlock:
            return TransformerBlock(hidden, heads, 4 * hidden, dropout=0.0, attention_dropout=0.0, eps=EPS)

        return nn.ModuleList(block() for _ in range(layers))

    @property
    def inputs(self) -> ModelInputs:
        side = self.config.side
        augment: tuple[Augmentation, ...] = ("random_resized_crop",) if self.config.augment else ()
        return ModelInputs(image=PixelInput(height=side, width=side, augment=augment, crop_scale=(0.8, 1.0)))

    # ---- Encoders: retrieval ---------------------------------------------------------------------------------------

    def encode_image(self, image: Image) -> Tensor:
        """[B, R, D]"""
        assert isinstance(image, Pixels)  # as `inputs` asks
        # (B, 3, H, W) -> (B, D, H/P, W/P) -> (B, R, D), plus a learned position for each patch.
        x_BRD = self.patches(image.pixels_B3HW).flatten(2).transpose(1, 2) + embedding_table(self.places)
        for block in self.image_encoder:
            x_BRD = block(x_BRD)
        return x_BRD

    def encode_text(self, text: Text) -> Tensor:
        """[N, T, D]"""
        x_NTD, mask = self.embed_words(text.ids_BT), padding_mask(text.mask_BT)
        for block in self.text_encoder:
            x_NTD = block(x_NTD, mask)
        return x_NTD

    def embed_words(self, ids_NT: Tensor, first: int = 0) -> Tensor:
        """Embed words whose positions start at `first`. [N, T, D]"""
        end, limit = first + ids_NT.shape[1], self.config.max_positions
        if end > limit:
            raise ParamsError(f"{end} tokens of text, but config.max_positions is {limit}")
        positions_T = torch.arange(first, end, device=ids_NT.device)
        return self.words(ids_NT, torch.zeros_like(positions_T), positions_T)

    def embed_image(self, image: Image) -> Tensor:
        # (B, R, D) -> (B, D): the mean of all patches, of unit length.
        return F.normalize(self.image_projection(self.encode_image(image).mean(1)), dim=-1)

    def embed_text(self, text: Text) -> Tensor:
        # (N, T, D) -> (N, D): the state of [CLS], of unit length.
        return F.normalize(self.text_projection(self.encode_text(text)[:, 0]), dim=-1)

    # ---- Fusion: VQA, VCR, NLVR, entailment ------------------------------------------------------------------------

    def image_of_texts(self, image: Image, text: Text) -> Tensor:
        """Return the encoded image of each text. [N, R, D]"""
        image_BRD, owner_N = self.encode_image(image), text.owners(len(image))
        return image_BRD if owner_N is None else image_BRD.index_select(0, owner_N)

    def fuse(self, image: Image, text: Text) -> Fused:
        image_NRD, length = self.image_of_texts(image, text), text.ids_BT.shape[1]
        # Every patch is visible: images have no padding.
        seen_NR = text.mask_BT.new_ones(image_NRD.shape[:2])
        # (N, T, D) and (N, R, D) -> (N, T + R, D): text first, so that [CLS] stays at 0.
        x_ND, mask = torch.cat([self.encode_text(text), image_NRD], 1), torch.cat([text.mask_BT, seen_NR], 1)
        for block in self.fusion:
            x_ND = block(x_ND, padding_mask(mask))
        return Fused(image_BRD=x_ND[:, length:], text_BTD=x_ND[:, :length], pooled_BP=x_ND[:, 0])

    # ---- Decoder: captioning ---------------------------------------------------------------------------------------

    def next_words(self, x: Tensor) -> Tensor:
        """Return the logits of the next word, with the words' embeddings as the matrix. [..., D] -> [..., V]"""
        return x @ embedding_table(self.words.words).T

    def decoder_blocks(self) -> list[TransformerBlock]:
        return [cast(TransformerBlock, block) for block in self.decoder]

    def generation_logits(self, image: Image, text: Text, at_NT: Tensor | None = None) -> Tensor:
        """Image and words in one sequence: patches attend to patches, a word to all patches and the words before it."""
        image_NRD, words_NTD = self.image_of_texts(image, text), self.embed_words(text.ids_BT)
        patches, seen_NR = image_NRD.shape[1], text.mask_BT.new_ones(image_NRD.shape[:2])
        causal_N = text.mask_BT.new_ones(len(text))
        # A prefix of patches that attend to each other, then words that attend to the patches and to earlier words.
        mask = prefix_mask(torch.cat([seen_NR, text.mask_BT], 1), patches, causal_N)
        x_NLD = torch.cat([image_NRD, words_NTD], 1)
        for block in self.decoder:
            x_NLD = block(x_NLD, mask)
        x_NTD = x_NLD[:, patches:]
        return self.next_words(x_NTD if at_NT is None else x_NTD[at_NT])

    def start(self, image: Image, *, max_len: int) -> Written:
        """Run the decoder over the patches, which never attend to words, so this is done once for all hypotheses."""
        x_BRD, past = self.encode_image(image), []
        # Keys and values of the patches, before the block updates them: the words attend to these.
        for block in self.decoder_blocks():
            past.append(block.attention.project(x_BRD))
            x_BRD = block(x_BRD)
        return Written(past=tuple(past), length=0)

    def step(self, token_N: Tensor, state: Written) -> tuple[Tensor, Written]:
        x_ND, past = self.embed_words(token_N[:, None], state.length)[:, 0], []
        for block, before in zip(self.decoder_blocks(), state.past, strict=True):
            x_ND, after = block.step(x_ND, before)
            past.append(after)
        return self.next_words(x_ND), Written(past=tuple(past), length=state.length + 1)

    def reorder(self, state: Written, index_N: Tensor) -> Written:
        return Written(past=tuple(layer.select(index_N) for layer in state.past), length=state.length)

    # ---- Pretraining -----------------------------------------------------------------------------------------------

    def pretraining_losses(
        self,
        batch: Batch,
        *,
        objectives: Mapping[str, Tensor | None],
        generator: torch.Generator,
        mask_probability: float,
    ) -> dict[str, Loss]:
        """`contrast` alone, which neither draws nor masks anything."""
        texts_NE, images_NE, image_ids = self.embed_text(batch.text), self.embed_image(batch.image), batch.image_ids
        # (B, E) -> (N, E): the image of each text, if texts share one.
        if batch.text.owner_N is not None:
            images_NE = images_NE.index_select(0, batch.text.owner_N)
        # Only these samples train the objective; None stands for all.
        if (learners_N := objectives["contrast"]) is not None:
            image_ids = tuple(image_ids[i] for i in learners_N.nonzero().flatten().tolist())
            texts_NE, images_NE = texts_NE[learners_N], images_NE[learners_N]
        return {"contrast": info_nce(texts_NE, images_NE, image_ids, self.log_scale.exp().clamp(max=100))}
