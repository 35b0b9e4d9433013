"""The family `language_model_decoder`: a pretrained language model that describes images.

    regions ── mapper ──> prefix embeddings ┐
                                            ├── language model ──> the next word
    words so far ── its word embeddings ────┘

The mapper is the transformer of R. Mokady et al.: "ClipCap: CLIP Prefix for Image Captioning", 2021, section 3.2:
learned constants attend to what an image shows, and what becomes of them are the embeddings of a prefix. ClipCap shows
it one vector of CLIP; here these are the image's regions and their mean. The language model is trained as a whole, by
adapters, or not at all: that is a setting of the run (`optimizer.groups.language_model.frozen`, `lora`).

Shape suffixes: B images, P places of the prefix, N texts or hypotheses, T tokens, D hidden, L hidden of the language
model, V vocabulary, M chosen positions, R regions and their mean.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vlp_models.contrib.hub_models.folder import check_names, find_folder, hash_weights
from vlp_models.contrib.hub_models.language_model import (
    DEFAULT,
    build_language_model,
    read_architecture,
    read_renamed,
)
from vlp_models.data.batch import Batch, Image, Regions, Text
from vlp_models.data.inputs import ModelInputs, RegionInput
from vlp_models.data.tokenizer import Tokenizer, read_pretrained
from vlp_models.errors import CheckpointError, DataError, ParamsError
from vlp_models.models.layers.attention import padding_mask
from vlp_models.models.layers.blocks import TransformerBlock, init_weights
from vlp_models.models.layers.embeddings import RegionEmbedding, embedding_table
from vlp_models.models.protocols import Fused
from vlp_models.objectives.generation import sentence_generation
from vlp_models.objectives.loss import Loss
from vlp_models.params.schema import PositiveFloat, PositiveInt, Share


@dataclass(frozen=True, kw_only=True)
class LanguageModelDecoderConfig:
    """The data determines the first two, and the folder that `init` names the third."""

    vocab_size: int
    feature_dim: int  # of one region
    language_model: dict[str, Any] = field(default_factory=dict)  # its config.json; empty: a small Llama

    prefix: PositiveInt = 10  # places; ClipCap's number
    mapper_hidden: PositiveInt = 384
    mapper_heads: PositiveInt = 6
    mapper_intermediate: PositiveInt = 1536
    mapper_layers: PositiveInt = 2  # ClipCap's eight need more than a few thousand pairs
    dropout: Share = 0.1
    attention_dropout: Share = 0.0
    feature_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # the same entries of all regions of an image
    init_std: PositiveFloat = 0.02

    def __post_init__(self) -> None:
        if self.mapper_hidden % self.mapper_heads:
            raise ParamsError(
                f"config: mapper_hidden ({self.mapper_hidden}) must be a multiple of mapper_heads ({self.mapper_heads})"
            )
        if not self.language_model:
            self.language_model.update(DEFAULT, vocab_size=self.vocab_size)

    @property
    def max_positions(self) -> int:
        """The tokens of a text, [CLS] and [SEP] included, that fit behind the prefix."""
        positions = self.language_model.get("n_positions") or self.language_model.get("max_position_embeddings") or 1024
        return int(positions) - self.prefix


class Mapper(nn.Module):
    """Regions to the embeddings of a prefix (ClipCap, section 3.2)."""

    def __init__(self, config: LanguageModelDecoderConfig, width: int) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"hidden": config.mapper_hidden, "dropout": config.dropout, "eps": 1e-5}
        self.regions = RegionEmbedding(
            config.feature_dim, separate_norms=True, feature_dropout=config.feature_dropout, **sizes
        )
        self.constants = nn.Parameter(torch.empty(config.prefix, config.mapper_hidden))
        self.blocks = nn.ModuleList(
            TransformerBlock(
                heads=config.mapper_heads,
                intermediate=config.mapper_intermediate,
                attention_dropout=config.attention_dropout,
                **sizes,
            )
            for _ in range(config.mapper_layers)
        )
        self.projection = nn.Linear(config.mapper_hidden, width)
        init_weights(self, config.init_std)
        nn.init.normal_(self.constants)  # as large as the regions' embeddings, which are normalized

    def forward(self, regions: Regions) -> Tensor:
        """[B, P, L]"""
        embedded_MD, packing = self.regions(regions)
        # (M, D) -> (B, P + R, D): the constants first, which every image has.
        constants_BPD = self.constants.expand(len(regions), *self.constants.shape)
        x = torch.cat([constants_BPD, packing.pad(embedded_MD)], 1)
        mask = torch.cat([packing.mask_BT.new_ones(constants_BPD.shape[:2]), packing.mask_BT], 1)
        for block in self.blocks:
            x = block(x, padding_mask(mask))
        return self.projection(x[:, : len(self.constants)])


class LanguageModelDecoder(nn.Module):
    """Meets `Generates`, `Fuses`, `Pretrains` and `StartsFromFolder` of models/protocols.py, on regions."""

    config_class: ClassVar[type] = LanguageModelDecoderConfig
    objectives: ClassVar[tuple[str, ...]] = ("ic",)
    ignores_mask_probability: ClassVar[str] = "it predicts every word of a caption"
    inputs: ClassVar[ModelInputs] = ModelInputs(image=RegionInput())
    packages: ClassVar[tuple[str, ...]] = ("transformers",)

    def __init__(self, config: LanguageModelDecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.language_model = build_language_model(config.language_model)
        words = self.language_model.get_input_embeddings().weight
        # On the meta device sizes of the data are arbitrary.
        if len(words) < config.vocab_size and not words.is_meta:
            raise ParamsError(
                f"config.language_model: has rows for {len(words):,} tokens, but the tokenizer has "
                f"{config.vocab_size:,}; use the language model's own tokenizer: `tokenizer.vocab: FOLDER`"
            )
        self.fused_dim = words.shape[1]
        self.mapper = Mapper(config, self.fused_dim)

    @classmethod
    def read_architecture(cls, source: str, where: str) -> dict[str, Any]:
        """Return the key `language_model` of the config, for the folder that `init` names."""
        return {"language_model": read_architecture(source, f"{where.removesuffix('config')}init")}

    def load_folder(self, source: str, root: Path, where: str) -> dict[str, Any]:
        """Load the language model's weights from the folder that `init` names; return what config.json records of it.

        Raises:
            CheckpointError: the weights are missing, damaged, a pickle, or not those of the architecture; or the
                folder's vocabulary is not that of data/tokenizer.
            DataError: the folder has no tokenizer.
        """
        from vlp_models.common.workspace import Workspace  # of training: serving does without its packages

        folder = find_folder(source, root, where, weights=True)
        # Its rows mean the tokens of its own vocabulary; `tokenizer.special_tokens` may have appended others.
        vocabulary = read_pretrained(folder).vocabulary
        if Tokenizer.load(Workspace(root).tokenizer).vocabulary[: len(vocabulary)] != vocabulary:
            raise CheckpointError(
                f"params.yaml: `{where}: {source}`: its vocabulary is not that of data/tokenizer; set "
                f"`tokenizer: {{source: vocab, vocab: {source}, lowercase: false}}`"
            )
        weights, state = read_renamed(folder, self.config.language_model), self.language_model.state_dict()
        check_names(weights, state, folder)
        self.language_model.load_state_dict({name: weight.to(state[name].dtype) for name, weight in weights.items()})
        return {"source": source, "files": hash_weights(folder)}

    # ---- Image and words -------------------------------------------------------------------------------------------

    def embed_words(self, ids_NT: Tensor) -> Tensor:
        """[N, T, L]"""
        return self.language_model.get_input_embeddings()(ids_NT)

    def predict_words(self, x: Tensor) -> Tensor:
        """[..., L] -> [..., V]. A language model may have more rows than its tokenizer has tokens."""
        head = self.language_model.get_output_embeddings()
        tied = head is None
        logits = F.linear(x, embedding_table(self.language_model.get_input_embeddings())) if tied else head(x)
        return logits[..., : self.config.vocab_size]

    def states(self, image: Image, text: Text) -> Tensor:
        """Return the last states of prefix and words, [N, P + T, L]: each attends to the places before it.

        Padding needs no mask: it comes last, where no real token attends."""
        if not isinstance(image, Regions):
            raise DataError("a language model as decoder describes images: set `view: captions`")
        owner_N, prefix = text.owners(len(image)), self.mapper(image)
        prefix_NPL = prefix if owner_N is None else prefix.index_select(0, owner_N)
        x_NTL = torch.cat([prefix_NPL, self.embed_words(text.ids_BT)], 1)
        return self.language_model.base_model(inputs_embeds=x_NTL, use_cache=False).last_hidden_state

    # ---- Understanding ---------------------------------------------------------------------------------------------

    def fuse(self, image: Image, text: Text) -> Fused:
        """Return the states of prefix and words; the holistic feature is the state of the last word, [SEP]."""
        image_NPL, text_NTL = self.states(image, text).tensor_split([self.config.prefix], 1)
        last_N = text.mask_BT.sum(1) - 1
        pooled_NL = text_NTL[torch.arange(len(text_NTL), device=last_N.device), last_N]
        return Fused(image_BRD=image_NPL, text_BTD=text_NTL, pooled_BP=pooled_NL)

    # ---- Generation ------------------------------------------------------------------------------------------------

    def generation_logits(self, image: Image, text: Text, at_NT: Tensor | None = None) -> Tensor:
        """Return logits, [N, T, V], or [M, V] at the True positions of `at_NT`; position t predicts token t + 1."""
        x_NTL = self.states(image, text)[:, self.config.prefix :]
        return self.predict_words(x_NTL if at_NT is None else x_NTL[at_NT])

    def start(self, image: Image, *, max_len: int) -> Any:
        """Return transformers' cache of keys and values after the prefix."""
        if max_len > self.config.max_positions:
            raise ParamsError(f"max_len is {max_len}, but {self.config.max_positions} tokens fit behind the prefix")
        return self._extend(self.mapper(image), None)[1]

    def step(self, token_N: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Read one more token of each hypothesis. Returns the next token's logits, [N, V]."""
        x_N1L, state = self._extend(self.embed_words(token_N[:, None]), _copy(state))
        return self.predict_words(x_N1L[:, -1]), state

    def reorder(self, state: Any, index_N: Tensor) -> Any:
        """Let hypothesis i continue hypothesis index[i]; their number may change."""
        state = _copy(state)
        state.reorder_cache(index_N)
        return state

    def _extend(self, x_NTL: Tensor, cache: Any) -> tuple[Tensor, Any]:
        output = self.language_model.base_model(inputs_embeds=x_NTL, past_key_values=cache, use_cache=True)
        return output.last_hidden_state, output.past_key_values

    # ---- Pretraining -----------------------------------------------------------------------------------------------

    def pretraining_losses(
        self,
        batch: Batch,
        *,
        objectives: Mapping[str, Tensor | None],
        generator: torch.Generator,
        mask_probability: float,
    ) -> dict[str, Loss]:
        """`ic`, image captioning: the cross-entropy of every word after [CLS], and of [SEP], as in XGPT."""
        at_NT, learners_N = batch.text.has_next_BT, objectives["ic"]
        if learners_N is not None:
            at_NT = at_NT & learners_N[:, None]
        logits_MV = self.generation_logits(batch.image, batch.text, at_NT)
        return {"ic": sentence_generation(logits_MV, batch.text.next_tokens(at_NT), name="ic")}


def _copy(cache: Any) -> Any:
    """Return a cache to extend or reorder: both replace its tensors, so the given state stays as it is."""
    cache = copy.copy(cache)
    cache.layers = [copy.copy(layer) for layer in cache.layers]
    return cache
