"""BERTs as transformers writes them into a folder: small, with random weights and a vocabulary of their own."""

from __future__ import annotations

import re
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

SIZES = {"hidden": HIDDEN, "heads": HEADS, "intermediate": INTERMEDIATE, "max_positions": POSITIONS}
OTHERS = {"object_layers": 1, "encoder_layers": 1, "decoder_layers": 1}
CNN = {"backbone": "resnet18", "backbone_options": {"layers": [1, 1, 1, 1], "channels": [4, 6, 8, 8]}}
# family -> config keys besides the sizes; "layers": the requested number of BERT's layers
FAMILIES: dict[str, dict[str, Any]] = {
    "tden": {"sentence_layers": "layers", "embedding_norm_eps": 1e-12, **OTHERS},
    "unified_vlp": {"layers": "layers", "layer_norm_eps": 1e-12, "region_slots": 4},
    "xgpt": {"layers": "layers", "embedding_norm_eps": 1e-12},
    "vlmo": {"layers": 2, "vl_start": 1, "positions": "absolute", "side": 16, "patch": 8},
    "soho": {"layers": "layers", "height": 64, "width": 64, "dictionary_size": 4, **CNN},
}


def config_of(family: str, layers: int = LAYERS, **config: Any) -> dict[str, Any]:
    """A model of the BERT's sizes, or of those in `config`."""
    own = {key: layers if value == "layers" else value for key, value in FAMILIES[family].items()}
    return {**SIZES, **own, **config}


def write_bert(folder: Path, *, head: bool = False, pickled: bool = False, **changes: Any) -> BertModel:
    """Writes config.json, vocab.txt and weights, and returns the model (without its head), every weight random.

    head: with the LM head; pickled: as pytorch_model.bin with the names of early files; changes: of the config.
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
        renames = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        state = {re.sub(r"LayerNorm\.\w+$", lambda m: renames[m[0]], name): t for name, t in bert.state_dict().items()}
        torch.save(state, folder / "pytorch_model.bin")
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in VOCABULARY), encoding="utf-8")
    return bert.bert if head else bert
