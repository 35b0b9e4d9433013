"""BERT's layout (Hugging Face's names): taken apart once, for every family that has BERT's blocks.

UniLM's file has the same names, so it is read as BERT's.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import CheckpointError
from vlp_models.models import family_class
from vlp_models.models.foreign import Asked, Imported, Taker, read_json, read_state_dict
from vlp_models.params.schema import build

# family -> module:function, called with the file's tensors, BERT's config.json and the family's config, gives weights
READERS: dict[str, str] = {
    "tden": "vlp_models.models.tden.convert_bert:convert_bert",
    "unified_vlp": "vlp_models.models.unified_vlp.convert_bert:convert_bert",
}
# Of layers/blocks.py's TransformerBlock, but for its attention's projections.
ENCODER_BLOCK = {
    "attention.out": "attention.output.dense",
    "attention_end.norm": "attention.output.LayerNorm",
    "ffn.0": "intermediate.dense",
    "ffn.2": "output.dense",
    "ffn_end.norm": "output.LayerNorm",
}
IGNORED = ("pooler.", "cls.seq_relationship.", "embeddings.position_ids", "cls.predictions.decoder.bias")


class Converter:
    """Collects weights under their new names."""

    def __init__(self, taker: Taker, hidden: int, intermediate: int) -> None:
        self.taker = taker
        self.hidden = hidden
        self.intermediate = intermediate
        self.weights: dict[str, Tensor] = {}

    def linear(self, ours: str, theirs: str, outputs: int, inputs: int) -> None:
        self.weights[f"{ours}.weight"] = self.taker.take(f"{theirs}.weight", outputs, inputs)
        self.weights[f"{ours}.bias"] = self.taker.take(f"{theirs}.bias", outputs)

    def norm(self, ours: str, theirs: str, size: int = 0) -> None:
        for part in ("weight", "bias"):
            self.weights[f"{ours}.{part}"] = self.taker.take(f"{theirs}.{part}", size or self.hidden)

    def attention(self, ours: str, theirs: str) -> None:
        """Three projections as one, in the order query, key, value."""
        for part, shape in (("weight", (self.hidden, self.hidden)), ("bias", (self.hidden,))):
            parts = [self.taker.take(f"{theirs}.{name}.{part}", *shape) for name in ("query", "key", "value")]
            self.weights[f"{ours}.qkv.{part}"] = torch.cat(parts)

    def block(self, ours: str, theirs: str, names: Mapping[str, str]) -> None:
        for own, other in names.items():
            if "norm" in own:
                self.norm(f"{ours}.{own}", f"{theirs}.{other}")
                continue
            outputs = self.intermediate if own.endswith("ffn.0") else self.hidden
            inputs = self.intermediate if own.endswith("ffn.2") else self.hidden
            self.linear(f"{ours}.{own}", f"{theirs}.{other}", outputs, inputs)


@dataclass(frozen=True, kw_only=True)
class BertSizes:
    """What the model has where BERT's weights go. layers: of the blocks `stack`."""

    vocab_size: int
    hidden: int
    heads: int
    intermediate: int
    layers: int
    max_positions: int
    types: tuple[int, ...]  # how many rows of token types BERT may have
    stack: str
    layers_key: str  # of the family's config
    tied: bool = True


def read_bert(folder: Path, asked: Asked) -> Imported:
    """A folder of Hugging Face's bert-base, for the model that `asked` describes.

    Raises:
        CheckpointError: a file is missing or damaged, the vocabulary is not the tokenizer's, the family has no place
            for BERT's weights; or see `convert`.
    """
    if asked.family not in READERS:
        raise CheckpointError(f"a {asked.family} model can't begin with BERT's weights; {', '.join(READERS)} can")
    files = [folder / name for name in ("model.safetensors", "pytorch_model.bin") if (folder / name).exists()]
    if not files:
        raise CheckpointError(f"{folder}: holds neither model.safetensors nor pytorch_model.bin")
    vocabulary = Tokenizer.from_vocab(folder / "vocab.txt", asked.lowercase).vocabulary
    if vocabulary != asked.vocabulary:
        raise CheckpointError(
            f"{folder / 'vocab.txt'}: not the vocabulary of data/tokenizer; set tokenizer.source: vocab and "
            "tokenizer.vocab to this file, then `dvc repro shards tokenizer`"
        )
    family: Any = family_class(asked.family)
    config_class = family.config_class
    known = {field.name for field in dataclasses.fields(config_class)}
    facts = {name: value for name, value in dataclasses.asdict(asked.facts).items() if name in known}
    config = build(config_class, {**asked.config, **facts}, where="config")
    module, _, name = READERS[asked.family].partition(":")
    converted = getattr(importlib.import_module(module), name)(
        read_state_dict(files[0]), read_json(folder / "config.json"), config
    )
    return Imported(family=asked.family, what="BERT", config=asked.config, weights=converted)


def convert(state: Mapping[str, Tensor], bert: Mapping[str, Any], sizes: BertSizes) -> dict[str, Tensor]:
    """Text embedding, blocks and, where the file has it, LM head, by the names that all families give them.

    bert: its config.json.

    Raises:
        CheckpointError: sizes that differ, or names that are missing, unexpected or misshapen.
    """
    expected = {
        "vocab_size": ("vocab_size", sizes.vocab_size),
        "hidden_size": ("hidden", sizes.hidden),
        "num_attention_heads": ("heads", sizes.heads),
        "intermediate_size": ("intermediate", sizes.intermediate),
        "num_hidden_layers": (sizes.layers_key, sizes.layers),
        "max_position_embeddings": ("max_positions", sizes.max_positions),
        "hidden_act": ("activation", "gelu"),
    }
    wrong = [
        f"{ours} {value}, BERT's {key} {bert.get(key)}"
        for key, (ours, value) in expected.items()
        if bert.get(key) != value
    ]
    if bert.get("type_vocab_size") not in sizes.types:
        of_ours = " or ".join(map(str, sizes.types))
        wrong.append(f"token types {of_ours}, BERT's type_vocab_size {bert.get('type_vocab_size')}")
    if wrong:
        raise CheckpointError(f"BERT's sizes are not the model's: {'; '.join(wrong)}; set its config to BERT's")
    hidden, vocab = sizes.hidden, sizes.vocab_size
    named = plain_names(state)
    taker = Taker(named)
    c = Converter(taker, hidden, sizes.intermediate)
    take_text(c, sizes, types=int(bert["type_vocab_size"]))
    words = c.weights["text_embedding.words.weight"]
    if any(name.startswith("cls.predictions.") for name in named):
        last = take_head(c, vocab)
        last = words if last is None else last  # tied in BERT, so it may be left out
        if not sizes.tied:
            c.weights["word_head.weight"] = last.clone()
        elif not torch.equal(last, words):
            raise CheckpointError("the LM head is not tied to the word embeddings; set the model's tie_lm_head: false")
    taker.check("a BERT of these sizes", ignored=IGNORED)
    return c.weights


def plain_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`bert.` stands before the encoder where a head was saved along; early files call a norm's parts gamma, beta."""
    return {
        name.removeprefix("bert.")
        .replace("LayerNorm.gamma", "LayerNorm.weight")
        .replace("LayerNorm.beta", "LayerNorm.bias"): tensor
        for name, tensor in state.items()
    }


def take_text(c: Converter, sizes: BertSizes, types: int) -> None:
    """The embeddings and the blocks; of token types all rows that BERT has."""
    take, hidden = c.taker.take, sizes.hidden
    c.weights |= {
        "text_embedding.words.weight": take("embeddings.word_embeddings.weight", sizes.vocab_size, hidden),
        "text_embedding.positions.weight": take("embeddings.position_embeddings.weight", sizes.max_positions, hidden),
        "text_embedding.types.weight": take("embeddings.token_type_embeddings.weight", types, hidden),
    }
    c.norm("text_embedding.norm", "embeddings.LayerNorm")
    for i in range(sizes.layers):
        c.attention(f"{sizes.stack}.{i}.attention", f"encoder.layer.{i}.attention.self")
        c.block(f"{sizes.stack}.{i}", f"encoder.layer.{i}", ENCODER_BLOCK)


def take_head(c: Converter, vocab: int) -> Tensor | None:
    """The LM head; returns its last matrix, where the file has it."""
    c.linear("word_head.dense", "cls.predictions.transform.dense", c.hidden, c.hidden)
    c.norm("word_head.norm", "cls.predictions.transform.LayerNorm")
    c.weights["word_head.bias"] = c.taker.take("cls.predictions.bias", vocab)
    if "cls.predictions.decoder.weight" not in c.taker.state:
        return None
    return c.taker.take("cls.predictions.decoder.weight", vocab, c.hidden)
