"""BERT's weights (Hugging Face's names) as TDEN's text side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vlp_models.errors import CheckpointError
from vlp_models.models.foreign import Taker
from vlp_models.models.tden.config import TDENConfig
from vlp_models.models.tden.public.convert import ENCODER_BLOCK, Converter


def convert_bert(state: Mapping[str, Tensor], bert: Mapping[str, Any], config: TDENConfig) -> dict[str, Tensor]:
    """For a TDEN of BERT's sizes: text embedding, sentence encoder, LM head.

    bert: its config.json. A file without the LM head (a plain BertModel) leaves ours out.

    Raises:
        CheckpointError: sizes that differ, or names that are missing, unexpected or misshapen.
    """
    sizes = {
        "vocab_size": ("vocab_size", config.vocab_size),
        "hidden_size": ("hidden", config.hidden),
        "num_attention_heads": ("heads", config.heads),
        "intermediate_size": ("intermediate", config.intermediate),
        "num_hidden_layers": ("sentence_layers", config.sentence_layers),
        "max_position_embeddings": ("max_positions", config.max_positions),
        "type_vocab_size": ("token types", 2),
        "hidden_act": ("activation", "gelu"),
    }
    wrong = [
        f"{ours} {value}, BERT's {key} {bert.get(key)}"
        for key, (ours, value) in sizes.items()
        if bert.get(key) != value
    ]
    if wrong:
        raise CheckpointError(f"BERT's sizes are not model.config's: {'; '.join(wrong)}; set model.config to BERT's")
    # `bert.` stands before the encoder where a head was saved along; early files call a norm's parts gamma and beta.
    renamed = {
        name.removeprefix("bert.")
        .replace("LayerNorm.gamma", "LayerNorm.weight")
        .replace("LayerNorm.beta", "LayerNorm.bias"): tensor
        for name, tensor in state.items()
    }
    hidden, vocab = config.hidden, config.vocab_size
    taker = Taker(renamed)
    c = Converter(taker, hidden, config.intermediate)
    words = taker.take("embeddings.word_embeddings.weight", vocab, hidden)
    c.weights |= {
        "text_embedding.words.weight": words,
        "text_embedding.positions.weight": taker.take(
            "embeddings.position_embeddings.weight", config.max_positions, hidden
        ),
        "text_embedding.types.weight": taker.take("embeddings.token_type_embeddings.weight", 2, hidden),
    }
    c.norm("text_embedding.norm", "embeddings.LayerNorm")
    for i in range(config.sentence_layers):
        c.attention(f"sentence_encoder.{i}.attention", f"encoder.layer.{i}.attention.self")
        c.block(f"sentence_encoder.{i}", f"encoder.layer.{i}", ENCODER_BLOCK)
    if any(name.startswith("cls.predictions.") for name in renamed):
        c.linear("word_head.dense", "cls.predictions.transform.dense", hidden, hidden)
        c.norm("word_head.norm", "cls.predictions.transform.LayerNorm")
        c.weights["word_head.bias"] = taker.take("cls.predictions.bias", vocab)
        last = words
        if "cls.predictions.decoder.weight" in renamed:  # tied in BERT, so it may be left out
            last = taker.take("cls.predictions.decoder.weight", vocab, hidden)
        if not config.tie_lm_head:
            c.weights["word_head.weight"] = last.clone()
        elif not torch.equal(last, words):
            raise CheckpointError("the LM head is not tied to the word embeddings; set model.config.tie_lm_head: false")
    taker.check(
        "a BERT of these sizes",
        ignored=("pooler.", "cls.seq_relationship.", "embeddings.position_ids", "cls.predictions.decoder.bias"),
    )
    return c.weights
