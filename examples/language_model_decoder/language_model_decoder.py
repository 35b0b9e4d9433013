"""A frozen language model that describes images: GPT-2, Llama or any other of transformers' decoder-only models.

    pixels ── patches ── image encoder ── projection ──> prefix ┐
                                                                ├── frozen language model ──> the next word
    words so far ── the language model's own embeddings ────────┘

M. Tsimpoukelli et al.: "Multimodal Few-Shot Learning with Frozen Language Models", NeurIPS 2021, section 3. Here every
patch is one place of the prefix, and the image encoder is a small transformer over patches, trained from scratch.

Only image encoder and projection are trained and saved. The language model's weights stay where they are: the config
(and so each checkpoint) has the path of its folder and the sha256 of its weights, which is checked when it is loaded.

Shape suffixes: B images, P places of the prefix, N texts or hypotheses, T tokens, D hidden, L hidden of the language
model, V vocabulary, M chosen positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from vlp_models.common.io import hash_file
from vlp_models.data.batch import Batch, Image, Pixels, Text
from vlp_models.data.inputs import ModelInputs
from vlp_models.data.pixels import PixelInput
from vlp_models.errors import CheckpointError, ParamsError
from vlp_models.models.layers.blocks import TransformerBlock, init_weights
from vlp_models.models.layers.embeddings import embedding_table
from vlp_models.objectives.loss import Loss, cross_entropy
from vlp_models.params.schema import PositiveInt

WEIGHTS = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class LanguageModelDecoderConfig:
    """The data determines vocab_size; all other keys may be set in `models.<name>.config` of params.yaml."""

    vocab_size: int
    language_model: str  # a folder with config.json and model.safetensors
    sha256: str = ""  # of model.safetensors; empty: as found, and recorded in each checkpoint

    side: PositiveInt = 64  # pixels, of the square that every image is resized to
    patch: PositiveInt = 16
    hidden: PositiveInt = 64  # of the image encoder
    heads: PositiveInt = 2
    layers: PositiveInt = 2

    def __post_init__(self) -> None:
        if self.hidden % self.heads or self.side % self.patch:
            raise ParamsError("config: hidden must be a multiple of heads, and side a multiple of patch")


@dataclass(frozen=True, kw_only=True)
class Past:
    """The keys and values of each layer of the language model, for N hypotheses: first the prefix, then the words."""

    layers: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def of(cls, cache: DynamicCache) -> Past:
        return cls(layers=tuple((layer.keys, layer.values) for layer in cache.layers))

    def cache(self) -> DynamicCache:
        """Return a cache to extend: extending it leaves this state as it is."""
        cache = DynamicCache()
        for number, (keys, values) in enumerate(self.layers):
            cache.update(keys, values, number)
        return cache

    def select(self, index_N: Tensor) -> Past:
        return Past(layers=tuple((k.index_select(0, index_N), v.index_select(0, index_N)) for k, v in self.layers))


class LanguageModelDecoder(nn.Module):
    """Meets `Generates` and `Pretrains` of models/protocols.py, on pixels."""

    config_class: ClassVar[type] = LanguageModelDecoderConfig
    objectives: ClassVar[tuple[str, ...]] = ("caption",)

    def __init__(self, config: LanguageModelDecoderConfig) -> None:
        super().__init__()
        # In a tuple, so that its weights are no parameters of this module and in none of its checkpoints
        language_model, sha256 = load_language_model(config)
        self._frozen = (language_model,)
        self.config = dataclasses.replace(config, sha256=sha256)
        hidden = config.hidden
        self.patches = nn.Conv2d(3, hidden, config.patch, stride=config.patch)
        self.places = nn.Embedding((config.side // config.patch) ** 2, hidden)
        self.image_encoder = nn.ModuleList(
            TransformerBlock(hidden, config.heads, 4 * hidden, dropout=0.0, attention_dropout=0.0, eps=1e-12)
            for _ in range(config.layers)
        )
        init_weights(self)
        self.projection = nn.Linear(hidden, language_model.config.hidden_size)

    @property
    def inputs(self) -> ModelInputs:
        return ModelInputs(image=PixelInput(height=self.config.side, width=self.config.side))

    @property
    def language_model(self) -> Any:
        return self._frozen[0]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LanguageModelDecoder:
        """Move the language model, too, with `to`, `cuda` or `double`."""
        self.language_model._apply(fn, recurse)
        super()._apply(fn, recurse)
        return self

    # ---- Image and words -------------------------------------------------------------------------------------------

    def prefix(self, image: Image) -> Tensor:
        """[B, P, L]"""
        assert isinstance(image, Pixels)  # as `inputs` asks
        x_BPD = self.patches(image.pixels_B3HW).flatten(2).transpose(1, 2) + embedding_table(self.places)
        for block in self.image_encoder:
            x_BPD = block(x_BPD)
        return self.projection(x_BPD)

    def embed_words(self, ids_NT: Tensor) -> Tensor:
        """[N, T, L]"""
        return self.language_model.get_input_embeddings()(ids_NT)

    def next_words(self, x_L: Tensor) -> Tensor:
        """[..., L] -> [..., V]. A language model may have more rows than its tokenizer has tokens."""
        return self.language_model.get_output_embeddings()(x_L)[..., : self.config.vocab_size]

    def states(self, image: Image, text: Text) -> Tensor:
        """Return the last states of the words, [N, T, L], which attend to the image and the words before them."""
        prefix, owner_N = self.prefix(image), text.owners(len(image))
        prefix_NPL = prefix if owner_N is None else prefix.index_select(0, owner_N)
        mask = torch.cat([text.mask_BT.new_ones(prefix_NPL.shape[:2]), text.mask_BT], 1)
        found = self.language_model.base_model(
            inputs_embeds=torch.cat([prefix_NPL, self.embed_words(text.ids_BT)], 1),
            attention_mask=mask.long(),
            use_cache=False,
        )
        return found.last_hidden_state[:, prefix_NPL.shape[1] :]

    # ---- Captioning ------------------------------------------------------------------------------------------------

    def generation_logits(self, image: Image, text: Text, at_NT: Tensor | None = None) -> Tensor:
        x_NTL = self.states(image, text)
        return self.next_words(x_NTL if at_NT is None else x_NTL[at_NT])

    def start(self, image: Image, *, max_len: int) -> Past:
        cache = DynamicCache()
        self.language_model.base_model(inputs_embeds=self.prefix(image), past_key_values=cache, use_cache=True)
        return Past.of(cache)

    def step(self, token_N: Tensor, state: Past) -> tuple[Tensor, Past]:
        cache = state.cache()
        found = self.language_model.base_model(
            inputs_embeds=self.embed_words(token_N[:, None]), past_key_values=cache, use_cache=True
        )
        return self.next_words(found.last_hidden_state[:, -1]), Past.of(cache)

    def reorder(self, state: Past, index_N: Tensor) -> Past:
        return state.select(index_N)

    # ---- Pretraining -----------------------------------------------------------------------------------------------

    def pretraining_losses(
        self,
        batch: Batch,
        *,
        objectives: Mapping[str, Tensor | None],
        generator: torch.Generator,
        mask_probability: float,
    ) -> dict[str, Loss]:
        """`caption`: the cross-entropy of every word after [CLS], and of [SEP]."""
        text, learners_N = batch.text, objectives["caption"]
        target_NT = text.mask_BT[:, 1:]
        if learners_N is not None:
            target_NT = target_NT & learners_N[:, None]
        logits_MV = self.next_words(self.states(batch.image, text)[:, :-1][target_NT])
        return {"caption": cross_entropy(logits_MV, text.ids_BT[:, 1:][target_NT], name="caption")}


def load_language_model(config: LanguageModelDecoderConfig) -> tuple[Any, str]:
    """Return the frozen language model, and the sha256 of its weights.

    Raises:
        ParamsError: no such folder, or its vocabulary is smaller than the tokenizer's.
        CheckpointError: its weights are not those that were recorded.
    """
    folder = Path(config.language_model)
    if not (folder / WEIGHTS).is_file():
        raise ParamsError(
            f"config: language_model `{folder}`: {folder / WEIGHTS} does not exist; copy a language model of "
            "transformers there (config.json, model.safetensors), or set its path"
        )
    sha256 = hash_file(folder / WEIGHTS)
    if config.sha256 not in ("", sha256):
        raise CheckpointError(
            f"{folder / WEIGHTS}: has the sha256 {sha256[:12]}..., but the model was trained with {config.sha256[:12]}"
            "...; restore it, or start again from the new one: `dvc repro -f initial@NAME`"
        )
    if torch.empty(0).is_meta:  # a model without memory: only its shapes are needed
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))
    else:
        model = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, dtype=torch.float32
        )
    rows = model.get_input_embeddings().weight.shape[0]
    if rows < config.vocab_size:
        raise ParamsError(
            f"config: language_model `{folder}` has {rows:,} tokens, but the tokenizer has {config.vocab_size:,}; use "
            f"its own: `tokenizer: {{source: vocab, vocab: {folder}}}`"
        )
    return model.eval().requires_grad_(False), sha256
