"""A small CoCa: one model for contrast and captions, trained in one pass.

J. Yu et al.: "CoCa: Contrastive Captioners are Image-Text Foundation Models", TMLR 2022, arXiv 2205.01917, section 3.2.

    pixels ── image encoder ── pooler of many queries ──┬── pooler of one query ── projection ──┐
                                                        │                                       ├── InfoNCE
    words ─── unimodal decoder ─────────────────────────│────┬──── [CLS], last ── projection ───┘
                                                        └────┴── multimodal decoder ── the next word

The unimodal decoder is causal and reads no image; a learned [CLS] after the last word collects the text. Its states of
the words go on into the multimodal decoder, whose layers also attend to the pooled image. Both poolers are attention
with learned queries; the one of a single query reads the result of the other (the paper's cascade).

Differences from the paper: the blocks normalize after each residual sum, as in the other families, and sizes are small.

Shape suffixes: B images, P patches, Q pooled places, N texts or hypotheses, T tokens, D hidden, V vocabulary, M chosen
positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlp_models.contrib.plugin_kit.scaffolds.family.info_nce import info_nce
from vlp_models.data.batch import Batch, Image, Pixels, Text
from vlp_models.data.inputs import ModelInputs
from vlp_models.data.pixels import PixelInput
from vlp_models.errors import ParamsError
from vlp_models.models.layers.attention import MultiHeadAttention
from vlp_models.models.layers.blocks import DecoderBlock, TransformerBlock, init_weights
from vlp_models.models.layers.cache import KeyValues, pack_by_image
from vlp_models.models.layers.embeddings import TextEmbedding, embedding_table
from vlp_models.models.protocols import Fused
from vlp_models.objectives.loss import Loss, cross_entropy
from vlp_models.params.schema import PositiveFloat, PositiveInt

EPS = 1e-12  # of all norms, as in BERT


@dataclass(frozen=True, kw_only=True)
class CoCaConfig:
    """The data determines vocab_size; all other keys may be set in `models.<name>.config` of params.yaml."""

    vocab_size: int

    side: PositiveInt = 64  # pixels, of the square that every image is resized to
    patch: PositiveInt = 16
    hidden: PositiveInt = 64
    heads: PositiveInt = 2
    image_layers: PositiveInt = 2
    unimodal_layers: PositiveInt = 2
    multimodal_layers: PositiveInt = 2
    queries: PositiveInt = 8  # of the pooler for captions; the paper: 256
    max_positions: PositiveInt = 64  # tokens of a text
    temperature: PositiveFloat = 0.07  # initial value of the learned one
    init_std: PositiveFloat = 0.08

    def __post_init__(self) -> None:
        if self.hidden % self.heads or self.side % self.patch:
            raise ParamsError("config: hidden must be a multiple of heads, and side a multiple of patch")


class AttentionalPooler(nn.Module):
    """Attention of learned queries over an image: [B, P, D] -> [B, Q, D]."""

    def __init__(self, queries: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.queries = nn.Embedding(queries, hidden)
        self.attention = MultiHeadAttention(hidden, heads)
        self.norm = nn.LayerNorm(hidden, eps=EPS)

    def forward(self, x_BPD: Tensor) -> Tensor:
        queries_BQD = embedding_table(self.queries).expand(len(x_BPD), -1, -1)
        return self.norm(self.attention.cross(queries_BQD, self.attention.project(x_BPD)))


@dataclass(frozen=True, kw_only=True)
class Written:
    """What decoding keeps of N hypotheses: the words of both decoders, and each multimodal layer's image."""

    unimodal: tuple[KeyValues, ...]
    multimodal: tuple[KeyValues, ...]
    image: tuple[KeyValues, ...]
    length: int


class CoCa(nn.Module):
    """Meets `Contrasts`, `Fuses`, `Generates` and `Pretrains` of models/protocols.py, on pixels."""

    config_class: ClassVar[type] = CoCaConfig
    objectives: ClassVar[tuple[str, ...]] = ("contrast", "caption")
    fused_dim: int

    def __init__(self, config: CoCaConfig) -> None:
        super().__init__()
        self.config = config
        self.fused_dim = hidden = config.hidden
        sizes = {"dropout": 0.0, "attention_dropout": 0.0, "eps": EPS}
        self.patches = nn.Conv2d(3, hidden, config.patch, stride=config.patch)
        self.places = nn.Embedding((config.side // config.patch) ** 2, hidden)
        self.image_encoder = nn.ModuleList(
            TransformerBlock(hidden, config.heads, 4 * hidden, **sizes) for _ in range(config.image_layers)
        )
        self.caption_pooler = AttentionalPooler(config.queries, hidden, config.heads)
        self.contrast_pooler = AttentionalPooler(1, hidden, config.heads)
        self.words = TextEmbedding(
            config.vocab_size, hidden, max_positions=config.max_positions, types=1, dropout=0.0, eps=EPS
        )
        self.cls = nn.Embedding(1, hidden)
        self.unimodal = nn.ModuleList(
            TransformerBlock(hidden, config.heads, 4 * hidden, **sizes) for _ in range(config.unimodal_layers)
        )
        self.multimodal = nn.ModuleList(
            DecoderBlock(hidden, config.heads, 4 * hidden, **sizes) for _ in range(config.multimodal_layers)
        )
        self.image_projection = nn.Linear(hidden, hidden, bias=False)
        self.text_projection = nn.Linear(hidden, hidden, bias=False)
        self.log_scale = nn.Parameter(torch.tensor(-math.log(config.temperature)))
        init_weights(self, config.init_std)

    @property
    def inputs(self) -> ModelInputs:
        return ModelInputs(image=PixelInput(height=self.config.side, width=self.config.side))

    # ---- Image and text alone: retrieval ---------------------------------------------------------------------------

    def encode_image(self, image: Image) -> Tensor:
        """Return the pooled places that captions are written from, [B, Q, D]."""
        assert isinstance(image, Pixels)  # as `inputs` asks
        x_BPD = self.patches(image.pixels_B3HW).flatten(2).transpose(1, 2) + embedding_table(self.places)
        for block in self.image_encoder:
            x_BPD = block(x_BPD)
        return cast(Tensor, self.caption_pooler(x_BPD))

    def encode_text(self, text: Text) -> tuple[Tensor, Tensor]:
        """Return the unimodal states of the words, [N, T, D], and of [CLS], [N, D]."""
        words_NTD = self.embed_words(text.ids_BT)
        length, cls_N1D = words_NTD.shape[1], embedding_table(self.cls).expand(len(text), 1, -1)
        real_NL = F.pad(text.mask_BT, (0, 1), value=True)
        # Words attend to earlier words and themselves; [CLS], the last place, to all real words and itself
        causal_LL = torch.ones(length + 1, length + 1, dtype=torch.bool, device=real_NL.device).tril()
        mask = (causal_LL & real_NL[:, None])[:, None]
        mask = mask | torch.eye(length + 1, dtype=torch.bool, device=mask.device)  # padding attends to itself
        x_NLD = torch.cat([words_NTD, cls_N1D], 1)
        for block in self.unimodal:
            x_NLD = block(x_NLD, mask)
        return x_NLD[:, :-1], x_NLD[:, -1]

    def embed_words(self, ids_NT: Tensor, first: int = 0) -> Tensor:
        """Embed words whose positions start at `first`. [N, T, D]"""
        end, limit = first + ids_NT.shape[1], self.config.max_positions
        if end > limit:
            raise ParamsError(f"{end} tokens of text, but config.max_positions is {limit}")
        positions_T = torch.arange(first, end, device=ids_NT.device)
        return cast(Tensor, self.words(ids_NT, torch.zeros_like(positions_T), positions_T))

    def embed_image(self, image: Image) -> Tensor:
        return self.project_image(self.encode_image(image))

    def project_image(self, pooled_BQD: Tensor) -> Tensor:
        return F.normalize(self.image_projection(self.contrast_pooler(pooled_BQD)[:, 0]), dim=-1)

    def embed_text(self, text: Text) -> Tensor:
        return F.normalize(self.text_projection(self.encode_text(text)[1]), dim=-1)

    def contrast_scale(self) -> Tensor:
        return self.log_scale.exp().clamp(max=100)

    # ---- Image and text together: VQA, captioning ------------------------------------------------------------------

    def attend_to_image(self, words_NTD: Tensor, pooled_BQD: Tensor, text: Text) -> Tensor:
        """Run the multimodal decoder. [N, T, D]"""
        owner_N = text.owners(len(pooled_BQD))
        pooled_NQD = pooled_BQD if owner_N is None else pooled_BQD.index_select(0, owner_N)
        length = words_NTD.shape[1]
        causal = torch.ones(1, 1, length, length, dtype=torch.bool, device=words_NTD.device).tril()
        seen = causal.new_ones(1, 1, 1, pooled_NQD.shape[1])
        for block in cast("list[DecoderBlock]", self.multimodal):
            words_NTD = block(words_NTD, causal, block.cross.project(pooled_NQD), seen)
        return words_NTD

    def fuse(self, image: Image, text: Text) -> Fused:
        """The image-text feature is the state of the last token, as in the paper's VQA."""
        pooled_BQD = self.encode_image(image)
        x_NTD = self.attend_to_image(self.encode_text(text)[0], pooled_BQD, text)
        last_N = text.mask_BT.sum(1) - 1
        owner_N = text.owners(len(pooled_BQD))
        image_NQD = pooled_BQD if owner_N is None else pooled_BQD.index_select(0, owner_N)
        rows_N = torch.arange(len(x_NTD), device=x_NTD.device)
        return Fused(image_BRD=image_NQD, text_BTD=x_NTD, pooled_BP=x_NTD[rows_N, last_N])

    def next_words(self, x_D: Tensor) -> Tensor:
        """Return the logits of the next word, with the words' embeddings as the matrix. [..., D] -> [..., V]"""
        return F.linear(x_D, embedding_table(self.words.words))

    def generation_logits(self, image: Image, text: Text, at_NT: Tensor | None = None) -> Tensor:
        x_NTD = self.attend_to_image(self.encode_text(text)[0], self.encode_image(image), text)
        return self.next_words(x_NTD if at_NT is None else x_NTD[at_NT])

    def start(self, image: Image, *, max_len: int) -> Written:
        pooled_BQD = self.encode_image(image)
        layers = cast("list[DecoderBlock]", self.multimodal)
        return Written(
            unimodal=(), multimodal=(), image=tuple(layer.cross.project(pooled_BQD) for layer in layers), length=0
        )

    def step(self, token_N: Tensor, state: Written) -> tuple[Tensor, Written]:
        x_ND, first = self.embed_words(token_N[:, None], state.length)[:, 0], state.length == 0
        unimodal, multimodal, count = [], [], len(token_N)
        for number, block in enumerate(cast("list[TransformerBlock]", self.unimodal)):
            x_ND, past = block.step(x_ND, None if first else state.unimodal[number])
            unimodal.append(past)
        one_each = pack_by_image(torch.arange(count, device=token_N.device), count)
        seen = torch.ones(1, 1, 1, state.image[0].keys.shape[2], dtype=torch.bool, device=token_N.device)
        for number, layer in enumerate(cast("list[DecoderBlock]", self.multimodal)):
            past_or_none = None if first else state.multimodal[number]
            x_ND, past = layer.step(x_ND, past_or_none, state.image[number], seen, one_each)
            multimodal.append(past)
        after = Written(
            unimodal=tuple(unimodal), multimodal=tuple(multimodal), image=state.image, length=state.length + 1
        )
        return self.next_words(x_ND), after

    def reorder(self, state: Written, index_N: Tensor) -> Written:
        def select(layers: tuple[KeyValues, ...]) -> tuple[KeyValues, ...]:
            return tuple(layer.select(index_N) for layer in layers)

        return Written(
            unimodal=select(state.unimodal),
            multimodal=select(state.multimodal),
            image=select(state.image),
            length=state.length,
        )

    # ---- Pretraining -----------------------------------------------------------------------------------------------

    def pretraining_losses(
        self,
        batch: Batch,
        *,
        objectives: Mapping[str, Tensor | None],
        generator: torch.Generator,
        mask_probability: float,
    ) -> dict[str, Loss]:
        """Both losses from one pass over images and texts."""
        text, losses = batch.text, {}
        pooled_BQD = self.encode_image(batch.image)
        words_NTD, cls_ND = self.encode_text(text)
        if "contrast" in objectives:
            texts_NE = F.normalize(self.text_projection(cls_ND), dim=-1)
            images_NE, image_ids = self.project_image(pooled_BQD), batch.image_ids
            if text.owner_N is not None:
                images_NE = images_NE.index_select(0, text.owner_N)
            if (learners_N := objectives["contrast"]) is not None:
                image_ids = tuple(image_ids[i] for i in learners_N.nonzero().flatten().tolist())
                texts_NE, images_NE = texts_NE[learners_N], images_NE[learners_N]
            losses["contrast"] = info_nce(texts_NE, images_NE, image_ids, self.contrast_scale())
        if "caption" in objectives:
            target_NT = text.mask_BT[:, 1:]
            if (learners_N := objectives["caption"]) is not None:
                target_NT = target_NT & learners_N[:, None]
            logits_MV = self.next_words(self.attend_to_image(words_NTD, pooled_BQD, text)[:, :-1][target_NT])
            losses["caption"] = cross_entropy(logits_MV, text.ids_BT[:, 1:][target_NT], name="caption")
        return losses
