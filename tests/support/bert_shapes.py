"""Names and shapes of a BERT in the layout of its first PyTorch code, without a pooler."""

from __future__ import annotations

Shapes = dict[str, tuple[int, ...]]


def add_linear(shapes: Shapes, name: str, outputs: int, inputs: int) -> None:
    shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (outputs, inputs), (outputs,)


def add_norm(shapes: Shapes, name: str, size: int) -> None:
    shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (size,)


def bert_shapes(*, vocab: int, positions: int, types: int, hidden: int, intermediate: int, layers: int) -> Shapes:
    """Return the shapes of embeddings, layers and the LM head, whose matrix is tied to the word embeddings."""
    tables = {"word": vocab, "position": positions, "token_type": types}
    shapes: Shapes = {f"bert.embeddings.{name}_embeddings.weight": (rows, hidden) for name, rows in tables.items()}
    add_norm(shapes, "bert.embeddings.LayerNorm", hidden)
    for i in range(layers):
        layer = f"bert.encoder.layer.{i}"
        for name in ("query", "key", "value"):
            add_linear(shapes, f"{layer}.attention.self.{name}", hidden, hidden)
        add_linear(shapes, f"{layer}.attention.output.dense", hidden, hidden)
        add_norm(shapes, f"{layer}.attention.output.LayerNorm", hidden)
        add_linear(shapes, f"{layer}.intermediate.dense", intermediate, hidden)
        add_linear(shapes, f"{layer}.output.dense", hidden, intermediate)
        add_norm(shapes, f"{layer}.output.LayerNorm", hidden)
    add_linear(shapes, "cls.predictions.transform.dense", hidden, hidden)
    add_norm(shapes, "cls.predictions.transform.LayerNorm", hidden)
    shapes["cls.predictions.bias"] = (vocab,)
    return shapes
