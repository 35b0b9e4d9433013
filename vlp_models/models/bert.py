"""BERT's layout (Hugging Face's names): taken apart once, for every family that can begin with BERT's words.

UniLM's file has the same names, so it is read as BERT's. Of more layers than a model has, the first ones are taken, of
positions likewise; a vocabulary that was trimmed gets the rows of its tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlp_models.data.bert_folder import CONFIG, read_tokenizer, weights_file
from vlp_models.errors import CheckpointError
from vlp_models.models import family_class
from vlp_models.models.adopt import in_short
from vlp_models.models.foreign import Asked, Imported, Taker, read_json, read_state_dict
from vlp_models.models.readers import READERS
from vlp_models.params.lookup import load

# Of layers/blocks.py's TransformerBlock, but for its attention's projections.
ENCODER_BLOCK = {
    "attention.out": "attention.output.dense",
    "attention_end.norm": "attention.output.LayerNorm",
    "ffn.0": "intermediate.dense",
    "ffn.2": "output.dense",
    "ffn_end.norm": "output.LayerNorm",
}
IGNORED = ("pooler.", "cls.seq_relationship.", "embeddings.position_ids", "cls.predictions.decoder.bias")
WORD_ROWS = ("text_embedding.words.weight", "word_head.weight", "word_head.bias")  # a row a token


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
    """What the model has where BERT's weights go.

    layers   of the blocks `stack`; 0: it takes none of BERT's
    max_positions  0: it has no place for BERT's
    types    how many rows of token types BERT may have
    layers_key  of the family's config
    head     whether it has BERT's LM head; tied: to the word embeddings
    eps      of its LayerNorms, by their names in the family's config
    """

    vocab_size: int
    hidden: int
    heads: int = 0
    intermediate: int = 0
    layers: int
    max_positions: int
    types: tuple[int, ...] = (2,)
    stack: str = ""
    layers_key: str = "layers"
    head: bool = True
    tied: bool = True
    eps: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Any, *, layers_key: str = "layers", eps: Sequence[str] = (), **more: Any) -> BertSizes:
        """Those of a family's config. eps: what it calls its LayerNorms'. more: what it lacks or has otherwise."""
        names = ("vocab_size", "hidden", "heads", "intermediate", "max_positions")
        sizes = {name: getattr(config, name) for name in names} | {"layers": getattr(config, layers_key), **more}
        return cls(**sizes, layers_key=layers_key, eps={name: getattr(config, name) for name in eps})


@dataclass(frozen=True, kw_only=True)
class Converted:
    """weights: by the family's names. left_out: BERT's names that found no place, in short. notes: what makes the same
    weights tell a little else than in BERT."""

    weights: dict[str, Tensor]
    left_out: list[str]
    notes: tuple[str, ...] = ()


def read_bert(folder: Path, asked: Asked) -> Imported:
    """A folder of Hugging Face's BERT, for the model that `asked` describes.

    Raises:
        CheckpointError, DataError: see `bert_weights`.
    """
    converted = bert_weights(folder, asked)
    return Imported(
        family=asked.family,
        what="BERT",
        config=asked.config,
        weights=converted.weights,
        left_out=tuple(converted.left_out),
        notes=converted.notes,
    )


def bert_weights(folder: Path, asked: Asked) -> Converted:
    """
    Raises:
        CheckpointError: a file is missing or damaged, the folder holds another architecture, its vocabulary lacks words
            of the tokenizer or has not a row for each token, the family has no place for BERT's weights; or see
            `convert`. DataError: it holds no BERT's tokenizer.
    """
    if asked.family not in READERS:
        raise CheckpointError(f"a {asked.family} model can't begin with BERT's weights; {', '.join(READERS)} can")
    file = weights_file(folder)
    bert = read_json(folder / CONFIG)
    _check_is_bert(bert, folder / CONFIG)
    vocabulary = read_tokenizer(folder, lowercase=asked.lowercase).vocabulary
    rows = _rows(asked.vocabulary, vocabulary, folder)
    state = read_state_dict(file)
    _check_rows(state, len(vocabulary), file)
    family: Any = family_class(asked.family)
    config = asked.built(family.config_class, vocab_size=len(vocabulary))
    converted: Converted = load(READERS[asked.family])(state, bert, config)
    if asked.vocabulary == vocabulary:
        return converted
    chosen = {n: t[rows] if n in WORD_ROWS else t for n, t in converted.weights.items()}
    note = f"of BERT's {len(vocabulary):,} words the {len(rows):,} of data/tokenizer"
    return dataclasses.replace(converted, weights=chosen, notes=(*converted.notes, note))


def _check_is_bert(bert: Mapping[str, Any], file: Path) -> None:
    """
    Raises:
        CheckpointError: another architecture, or positions of another kind.
    """
    kind = bert.get("model_type", "bert")
    if kind not in ("bert", "unilm"):  # in a roberta, equal names mean something else
        raise CheckpointError(f"{file}: weights of another architecture ({kind}); what is read here is a BERT")
    if bert.get("position_embedding_type", "absolute") != "absolute":
        raise CheckpointError(f"{file}: position_embedding_type {bert['position_embedding_type']}; BERT's is absolute")


def _rows(own: Sequence[str], theirs: Sequence[str], folder: Path) -> Tensor:
    """Where BERT has our tokens.

    Raises:
        CheckpointError: it lacks some.
    """
    ids = {token: i for i, token in enumerate(theirs)}
    if lacking := [token for token in own if token not in ids]:
        raise CheckpointError(
            f"{folder}: not the vocabulary of data/tokenizer, {len(lacking):,} of whose {len(own):,} tokens it lacks "
            f"(such as {', '.join(map(repr, lacking[:3]))}); set tokenizer.source: vocab and tokenizer.vocab to this "
            "folder, then `dvc repro shards tokenizer`"
        )
    return torch.tensor([ids[token] for token in own])


def _check_rows(state: Mapping[str, Tensor], tokens: int, file: Path) -> None:
    """
    Raises:
        CheckpointError: more or fewer word embeddings than tokens.
    """
    words = plain_names(state).get("embeddings.word_embeddings.weight")
    if words is not None and len(words) != tokens:
        raise CheckpointError(
            f"{file}: embeddings of {len(words):,} words, but the vocabulary beside it has {tokens:,} tokens; they are "
            "not of one model"
        )


def convert(state: Mapping[str, Tensor], bert: Mapping[str, Any], sizes: BertSizes) -> Converted:
    """Text embedding, blocks and, where the file has it, LM head, by the names that all families give them.

    bert: its config.json.

    Raises:
        CheckpointError: sizes that differ, or names that are missing, unexpected or misshapen.
    """
    _check_sizes(bert, sizes)
    hidden, vocab = sizes.hidden, sizes.vocab_size
    named = plain_names(state)
    taker = Taker(named)
    c = Converter(taker, hidden, sizes.intermediate)
    take_text(c, sizes, types=int(bert.get("type_vocab_size", 2)), positions=int(bert["max_position_embeddings"]))
    words = c.weights["text_embedding.words.weight"]
    if sizes.head and any(name.startswith("cls.predictions.") for name in named):
        last = take_head(c, vocab)
        last = words if last is None else last  # tied in BERT, so it may be left out
        if not sizes.tied:
            c.weights["word_head.weight"] = last.clone()
        elif not torch.equal(last, words):
            raise CheckpointError("the LM head is not tied to the word embeddings; set the model's tie_lm_head: false")
    above = tuple(f"encoder.layer.{i}." for i in range(sizes.layers, bert["num_hidden_layers"]))
    taker.check("a BERT of these sizes", ignored=(*IGNORED, *above, *(() if sizes.head else ("cls.",))))
    theirs = bert.get("layer_norm_eps", 1e-12)
    notes = tuple(
        f"config.{key} is {eps:g}, BERT's layer_norm_eps {theirs:g}: the same weights tell a little else"
        for key, eps in sizes.eps.items()
        if eps != theirs
    )
    left_out = list(in_short(named.keys() - taker.taken, named))
    if 0 < sizes.max_positions < bert["max_position_embeddings"]:
        left_out.append(f"embeddings.position_embeddings.weight[{sizes.max_positions}:]")
    return Converted(weights=c.weights, left_out=sorted(left_out), notes=notes)


def _check_sizes(bert: Mapping[str, Any], sizes: BertSizes) -> None:
    """
    Raises:
        CheckpointError: lists those that are not the model's, and fewer layers or positions than it has.
    """
    expected = {"vocab_size": ("vocab_size", sizes.vocab_size), "hidden_size": ("hidden", sizes.hidden)}
    if sizes.layers:
        expected["num_attention_heads"] = ("heads", sizes.heads)
        expected["intermediate_size"] = ("intermediate", sizes.intermediate)
    wrong = [
        f"{ours} {value}, BERT's {key} {bert.get(key)}"
        for key, (ours, value) in expected.items()
        if bert.get(key) != value
    ]
    if sizes.layers and bert.get("hidden_act", "gelu") != "gelu":
        wrong.append(f"activation gelu, BERT's hidden_act {bert['hidden_act']}")
    if bert.get("type_vocab_size", 2) not in sizes.types:
        of_ours = " or ".join(map(str, sizes.types))
        wrong.append(f"token types {of_ours}, BERT's type_vocab_size {bert.get('type_vocab_size')}")
    for key, ours, least in (
        ("num_hidden_layers", sizes.layers_key, sizes.layers),
        ("max_position_embeddings", "max_positions", sizes.max_positions),
    ):
        if not isinstance(bert.get(key), int) or bert[key] < least:
            wrong.append(f"{ours} {least}, BERT's {key} {bert.get(key)}, which is less")
    if wrong:
        raise CheckpointError(f"BERT's sizes are not the model's: {'; '.join(wrong)}; set its config to BERT's")


def plain_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`bert.` stands before the encoder where a head was saved along; early files call a norm's parts gamma, beta."""
    return {
        name.removeprefix("bert.")
        .replace("LayerNorm.gamma", "LayerNorm.weight")
        .replace("LayerNorm.beta", "LayerNorm.bias"): tensor
        for name, tensor in state.items()
    }


def take_text(c: Converter, sizes: BertSizes, types: int, positions: int = 0) -> None:
    """The embeddings and the blocks; of token types all rows that BERT has. positions: BERT's; 0: as many as ours."""
    take, hidden = c.taker.take, sizes.hidden
    table = take("embeddings.position_embeddings.weight", positions or sizes.max_positions, hidden)
    c.weights |= {
        "text_embedding.words.weight": take("embeddings.word_embeddings.weight", sizes.vocab_size, hidden),
        "text_embedding.positions.weight": table[: sizes.max_positions],
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
