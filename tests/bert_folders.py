"""BERTs as transformers writes them into a folder: small, with random weights and a vocabulary of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForPreTraining, BertModel

# As in BERT's own vocabulary: unused tokens first, special ones behind them, pieces of words among the words.
VOCABULARY = (
    *("[PAD]", "[unused0]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused2]"),
    *(".", ",", "'", "a", "b", "c", "d", "##a", "##b", "##c", "##d", "red", "green", "cube", "##s", "is", "it", "two"),
)
HIDDEN, HEADS, INTERMEDIATE, LAYERS, POSITIONS = 16, 2, 32, 3, 24


def write_bert(folder: Path, *, head: bool = False, pickled: bool = False, **changes: Any) -> BertModel:
    """Writes config.json, vocab.txt and weights, and returns the model (without its head), every weight random.

    head: with the LM head; pickled: as pytorch_model.bin; changes: of the config.
    """
    torch.manual_seed(0)
    settings = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": POSITIONS,
        "initializer_range": 0.3,
    }
    config = BertConfig(**{**settings, **changes}, attn_implementation="eager")
    bert = (BertForPreTraining if head else BertModel)(config).eval()
    with torch.no_grad():
        for parameter in bert.parameters():
            parameter.add_(torch.rand_like(parameter) * 0.2)
    bert.save_pretrained(folder)
    if pickled:
        (folder / "model.safetensors").unlink()
        torch.save(bert.state_dict(), folder / "pytorch_model.bin")
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in VOCABULARY), encoding="utf-8")
    return bert.bert if head else bert
