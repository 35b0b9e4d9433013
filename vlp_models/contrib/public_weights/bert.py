"""Convert BERT's weights (Hugging Face's names) to any family that supports them: text embedding, blocks, LM head.

UniLM's files have the same names and are read as BERT's. If the BERT has more layers or positions than the model, the
first ones are used; for a trimmed vocabulary, the rows of its tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlp_models.common.plugins import import_target
from vlp_models.common.state_dicts import read_state_dict
from vlp_models.contrib.public_weights.mapping import StateDictMapping
from vlp_models.data.bert_folder import CONFIG, read_tokenizer, weights_file
from vlp_models.errors import CheckpointError
from vlp_models.models import family_class
from vlp_models.models.convert import TEXT_READERS, ImportedModel, ImportRequest
from vlp_models.models.partial_load import summarize_names

# The parts of layers/blocks.py's TransformerBlock except the attention's projections -> BERT's names
ENCODER_BLOCK = {
    "attention.out": "attention.output.dense",
    "attention_end.norm": "attention.output.LayerNorm",
    "ffn.0": "intermediate.dense",
    "ffn.2": "output.dense",
    "ffn_end.norm": "output.LayerNorm",
}
IGNORED = ("pooler.", "cls.seq_relationship.", "embeddings.position_ids", "cls.predictions.decoder.bias")
ROBERTAS = ("roberta", "xlm-roberta", "camembert")  # `model_type` of config.json
POOLING = "1_Pooling/config.json"
WORD_ROWS = ("text_embedding.words.weight", "word_head.weight", "word_head.bias")  # have one row per token


class BertMapping(StateDictMapping):
    """Maps transformer blocks that are named as in BERT."""

    def __init__(self, state: Mapping[str, Tensor], hidden: int, intermediate: int) -> None:
        super().__init__(state)
        self.hidden = hidden
        self.intermediate = intermediate

    def attention(self, target: str, source: str) -> None:
        """Stack the query, key and value projections, in this order, into one: [3 * hidden, hidden]."""
        for part, shape in (("weight", (self.hidden, self.hidden)), ("bias", (self.hidden,))):
            parts = [self.take(f"{source}.{name}.{part}", *shape) for name in ("query", "key", "value")]
            self.weights[f"{target}.qkv.{part}"] = torch.cat(parts)

    def block(self, target: str, source: str, names: Mapping[str, str]) -> None:
        """Map a block's linear layers and norms. names: part of the target -> part of the source."""
        for part, source_part in names.items():
            if "norm" in part:
                self.norm(f"{target}.{part}", f"{source}.{source_part}", self.hidden)
                continue
            # A feed-forward net widens to `intermediate` and goes back.
            outputs = self.intermediate if part.endswith("ffn.0") else self.hidden
            inputs = self.intermediate if part.endswith("ffn.2") else self.hidden
            self.linear(f"{target}.{part}", f"{source}.{source_part}", outputs, inputs)

    def text_embedding(self, source: str, sizes: BertSizes, *, positions: int, types: int) -> None:
        """Map the embeddings. positions, types: the rows that the BERT has; of positions the first ones are used."""
        take, hidden = self.take, self.hidden
        # A shorter model takes the first positions; a longer one is refused before.
        table = take(f"{source}.position_embeddings.weight", positions, hidden)
        self.weights |= {
            "text_embedding.words.weight": take(f"{source}.word_embeddings.weight", sizes.vocab_size, hidden),
            "text_embedding.positions.weight": table[: sizes.max_positions],
            "text_embedding.types.weight": take(f"{source}.token_type_embeddings.weight", types, hidden),
        }
        self.norm("text_embedding.norm", f"{source}.LayerNorm", hidden)

    def stack(self, target: str, source: str, layers: int) -> None:
        """Map a stack of encoder blocks."""
        for i in range(layers):
            self.attention(f"{target}.{i}.attention", f"{source}.{i}.attention.self")
            self.block(f"{target}.{i}", f"{source}.{i}", ENCODER_BLOCK)

    def word_head(self, vocab: int) -> Tensor | None:
        """Map the LM head except its last matrix, [vocab, hidden], which is returned; None: the file has none."""
        self.linear("word_head.dense", "cls.predictions.transform.dense", self.hidden, self.hidden)
        self.norm("word_head.norm", "cls.predictions.transform.LayerNorm", self.hidden)
        self.weights["word_head.bias"] = self.take("cls.predictions.bias", vocab)
        if "cls.predictions.decoder.weight" not in self.state:
            return None
        return self.take("cls.predictions.decoder.weight", vocab, self.hidden)


@dataclass(frozen=True, kw_only=True)
class BertSizes:
    """The sizes of the part of a model that BERT's weights fill.

    layers   of the blocks named `stack`; 0: the model uses none of BERT's blocks
    layers_key  the config key of `layers`, for messages
    max_positions  0: the model has no place for BERT's positions
    types    the numbers of token types that the BERT may have
    head     whether the model has BERT's LM head; tied: to the word embeddings
    eps      of the LayerNorms, by config key
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
        """Return the sizes of a family's config. eps: the keys of its LayerNorms' epsilons. more: other fields."""
        names = ("vocab_size", "hidden", "heads", "intermediate", "max_positions")
        sizes = {name: getattr(config, name) for name in names} | {"layers": getattr(config, layers_key), **more}
        return cls(**sizes, layers_key=layers_key, eps={name: getattr(config, name) for name in eps})


@dataclass(frozen=True, kw_only=True)
class ConvertedBert:
    """weights: by the family's names. left_out: BERT's names without a place in the model, summarized. notes: settings
    with which the same weights compute something slightly different than in BERT."""

    weights: dict[str, Tensor]
    left_out: list[str]
    notes: tuple[str, ...] = ()


def read_json(file: Path, kind: type = dict) -> Any:
    """Read a JSON file of another program.

    Raises:
        CheckpointError: the file cannot be read, or holds no `kind` (dict or list).
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from None
    if not isinstance(value, kind):
        raise CheckpointError(f"{file}: not a JSON {'object' if kind is dict else 'list'}")
    return value


def read_bert(folder: Path, request: ImportRequest) -> ImportedModel:
    """Read a folder of Hugging Face's BERT for the model that `request` describes, with the rows of its vocabulary.

    Raises:
        CheckpointError: a file is missing or damaged; another architecture; the BERT's vocabulary lacks tokens or does
            not have one row per token; the family has no place for BERT's weights; or see `convert_layout`.
        DataError: the folder holds no BERT tokenizer.
    """
    if request.family not in TEXT_READERS:
        families = ", ".join(TEXT_READERS)
        raise CheckpointError(f"a {request.family} model cannot start from BERT's weights; {families} can")
    file = weights_file(folder)
    bert = read_json(folder / CONFIG)
    if (folder / POOLING).exists():  # of sentence-transformers
        bert |= read_json(folder / POOLING)
    kind = bert.get("model_type", "bert")
    if kind not in ("bert", "unilm", *ROBERTAS):
        raise CheckpointError(
            f"{folder / CONFIG}: weights of another architecture ({kind}); expected a BERT, RoBERTa or XLM-R"
        )
    if bert.get("position_embedding_type", "absolute") != "absolute":
        raise CheckpointError(
            f"{folder / CONFIG}: position_embedding_type {bert['position_embedding_type']}; expected absolute"
        )

    # Every token of the data must have a row in the BERT; its other rows are dropped.
    vocabulary = read_tokenizer(folder, lowercase=request.lowercase).vocabulary
    ids = {token: i for i, token in enumerate(vocabulary)}
    if missing := [token for token in request.vocabulary if token not in ids]:
        raise CheckpointError(
            f"{folder}: its vocabulary lacks {len(missing):,} of the {len(request.vocabulary):,} tokens of "
            f"data/tokenizer (such as {', '.join(map(repr, missing[:3]))}); set tokenizer.source: vocab and "
            "tokenizer.vocab to this folder, then `dvc repro shards tokenizer`"
        )
    state = read_state_dict(file)
    if kind in ROBERTAS:
        state, bert = roberta_as_bert(state, bert)
    words = rename_bert(state).get("embeddings.word_embeddings.weight")
    if words is not None and len(words) != len(vocabulary):
        raise CheckpointError(
            f"{file}: {len(words):,} word embeddings, but the vocabulary next to it has {len(vocabulary):,} tokens: "
            "they belong to different models"
        )

    # The model is configured for the whole vocabulary first; rows of other tokens are dropped after the conversion.
    family: Any = family_class(request.family)
    config = request.build_config(family.config_class, vocab_size=len(vocabulary))
    converted: ConvertedBert = import_target(TEXT_READERS[request.family])(state, bert, config)
    weights, notes = converted.weights, converted.notes
    if request.vocabulary != vocabulary:
        rows = torch.tensor([ids[token] for token in request.vocabulary])
        weights = {name: t[rows] if name in WORD_ROWS else t for name, t in weights.items()}
        notes = (*notes, f"{len(rows):,} of BERT's {len(vocabulary):,} words are used: those of data/tokenizer")
    return ImportedModel(
        family=request.family,
        origin="BERT",
        config=request.config,
        weights=weights,
        left_out=tuple(converted.left_out),
        notes=notes,
    )


def roberta_as_bert(state: Mapping[str, Tensor], config: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return RoBERTa's weights and config.json as a BERT's. XLM-R is a RoBERTa of 100 languages.

    Its positions are counted from the id of the padding, plus 1. It has one token type, which becomes both of BERT's.
    """
    # Names first: the encoder's are BERT's with another prefix, the LM head has its own.
    first = int(config.get("pad_token_id", 1)) + 1
    renamed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        name = name.removeprefix("roberta.").replace("lm_head.layer_norm.", "cls.predictions.transform.LayerNorm.")
        name = name.replace("lm_head.dense.", "cls.predictions.transform.dense.")
        renamed[name.replace("lm_head.", "cls.predictions.")] = tensor
    # The first rows of the positions are the padding's; the only token type is that of both of BERT's segments.
    positions, types = "embeddings.position_embeddings.weight", "embeddings.token_type_embeddings.weight"
    if positions in renamed:
        renamed[positions] = renamed[positions][first:]
    if types in renamed and len(renamed[types]) == 1:
        renamed[types] = renamed[types].repeat(2, 1)
    places = int(config.get("max_position_embeddings", 0)) - first
    return renamed, {**config, "max_position_embeddings": places, "type_vocab_size": 2}


def convert_layout(state: Mapping[str, Tensor], bert: Mapping[str, Any], sizes: BertSizes) -> ConvertedBert:
    """Convert text embedding, blocks and, if the file has one, the LM head, to the names that all families share.

    bert: its config.json.

    Raises:
        CheckpointError: the sizes differ, or names are missing, unexpected or misshapen.
    """
    _check_sizes(bert, sizes)
    named = rename_bert(state)
    mapping = BertMapping(named, sizes.hidden, sizes.intermediate)
    types, positions = int(bert.get("type_vocab_size", 2)), int(bert["max_position_embeddings"])
    mapping.text_embedding("embeddings", sizes, positions=positions, types=types)
    mapping.stack(sizes.stack, "encoder.layer", sizes.layers)
    words = mapping.weights["text_embedding.words.weight"]
    if sizes.head and mapping.has("cls.predictions."):
        last = mapping.word_head(sizes.vocab_size)
        last = words if last is None else last  # tied in BERT, so a file may leave it out
        if not sizes.tied:
            mapping.weights["word_head.weight"] = last.clone()
        elif not torch.equal(last, words):
            raise CheckpointError("the LM head is not tied to the word embeddings; set the model's tie_lm_head: false")
    # Layers beyond those of the model may be left over.
    unused_layers = tuple(f"encoder.layer.{i}." for i in range(sizes.layers, bert["num_hidden_layers"]))
    mapping.check("a BERT of these sizes", ignored=(*IGNORED, *unused_layers, *(() if sizes.head else ("cls.",))))

    # Not an error: an epsilon of 1e-5 instead of 1e-12 changes the states in the last digits.
    bert_eps = bert.get("layer_norm_eps", 1e-12)
    notes = tuple(
        f"config.{key} is {eps:g}, BERT's layer_norm_eps {bert_eps:g}: the outputs differ slightly from BERT's"
        for key, eps in sizes.eps.items()
        if eps != bert_eps
    )
    left_out = summarize_names(named.keys() - mapping.taken, named)
    if 0 < sizes.max_positions < bert["max_position_embeddings"]:
        left_out.append(f"embeddings.position_embeddings.weight[{sizes.max_positions}:]")
    return ConvertedBert(weights=mapping.weights, left_out=sorted(left_out), notes=notes)


def _check_sizes(bert: Mapping[str, Any], sizes: BertSizes) -> None:
    """Check the BERT's config.json against the model."""
    # What must be equal, then what the BERT must have at least.
    expected = {"vocab_size": ("vocab_size", sizes.vocab_size), "hidden_size": ("hidden", sizes.hidden)}
    if sizes.layers:
        expected["num_attention_heads"] = ("heads", sizes.heads)
        expected["intermediate_size"] = ("intermediate", sizes.intermediate)
    wrong = [
        f"{setting} {value}, BERT's {key} {bert.get(key)}"
        for key, (setting, value) in expected.items()
        if bert.get(key) != value
    ]
    if sizes.layers and bert.get("hidden_act", "gelu") != "gelu":
        wrong.append(f"activation gelu, BERT's hidden_act {bert['hidden_act']}")
    if bert.get("type_vocab_size", 2) not in sizes.types:
        allowed_types = " or ".join(map(str, sizes.types))
        wrong.append(f"token types {allowed_types}, BERT's type_vocab_size {bert.get('type_vocab_size')}")
    for key, setting, least in (
        ("num_hidden_layers", sizes.layers_key, sizes.layers),
        ("max_position_embeddings", "max_positions", sizes.max_positions),
    ):
        if not isinstance(bert.get(key), int) or bert[key] < least:
            wrong.append(f"{setting} {least}, BERT's {key} {bert.get(key)}, which is less")
    if wrong:
        raise CheckpointError(f"BERT's sizes are not the model's: {'; '.join(wrong)}; set its config to BERT's")


def rename_bert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Unify BERT's names: files with a head have the prefix `bert.`, early ones call a norm's parts gamma and beta."""
    return {
        name.removeprefix("bert.")
        .replace("LayerNorm.gamma", "LayerNorm.weight")
        .replace("LayerNorm.beta", "LayerNorm.bias"): tensor
        for name, tensor in state.items()
    }


def choose_heads(heads: int, hidden: int) -> int:
    """Return the number of attention heads: `heads`, or one per 64 dimensions as in BERT if it is 0.

    Raises:
        CheckpointError: it does not divide `hidden`.
    """
    heads = heads or max(1, hidden // 64)
    if hidden % heads:
        raise CheckpointError(f"{heads} attention heads do not divide the hidden size {hidden}; give the right --heads")
    return heads
