"""SOHO's text side by BERT's names."""

from __future__ import annotations

from torch import Tensor

BERT = {
    "attention.out": "attention.output.dense",
    "attention_end.norm": "attention.output.LayerNorm",
    "ffn.0": "intermediate.dense",
    "ffn.2": "output.dense",
    "ffn_end.norm": "output.LayerNorm",
}


def bert_layout(state: dict[str, Tensor], prefix: str, layers: int) -> dict[str, Tensor]:
    """Return the weights of embeddings and encoder. prefix: of their names."""
    found = {
        f"{prefix}embeddings.{theirs}.weight": state[f"text_embedding.{ours}.weight"]
        for ours, theirs in (
            ("words", "word_embeddings"),
            ("positions", "position_embeddings"),
            ("types", "token_type_embeddings"),
        )
    }
    for part in ("weight", "bias"):
        found[f"{prefix}embeddings.LayerNorm.{part}"] = state[f"text_embedding.norm.{part}"]
        for i in range(layers):
            to = f"{prefix}encoder.layer.{i}"
            projections = state[f"transformer.{i}.attention.qkv.{part}"].chunk(3)
            for name, tensor in zip(("query", "key", "value"), projections, strict=True):
                found[f"{to}.attention.self.{name}.{part}"] = tensor.clone()
            for ours, theirs in BERT.items():
                found[f"{to}.{theirs}.{part}"] = state[f"transformer.{i}.{ours}.{part}"]
    return found
