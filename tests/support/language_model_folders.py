"""Tiny language models with random weights and a byte-level BPE, as transformers saves them: 2 layers, width 32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pretrained_tokenizers import write_bpe
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

ROWS = 420  # more than the tokenizer has tokens
SIZES: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "initializer_range": 0.3,  # large, so that the most probable words differ
}
TOKENS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gpt2": lambda: GPT2Config(
        vocab_size=ROWS, n_embd=32, n_layer=2, n_head=2, n_positions=96, initializer_range=0.3, **TOKENS
    ),
    "llama": lambda: LlamaConfig(**SIZES, **TOKENS),
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=8),
    "smollm3": lambda: SmolLM3Config(**{**SIZES, "num_hidden_layers": 4}, **TOKENS),
}


def write_language_model(folder: Path, kind: str) -> Path:
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(CONFIGS[kind]()).save_pretrained(folder)
    return write_bpe(folder)
