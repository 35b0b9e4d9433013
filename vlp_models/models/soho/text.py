"""BERT's names of weights as SOHO's: the words' embedding and the transformer."""

from __future__ import annotations

from vlp_models.models.bert import ENCODER_BLOCK, Converter


class TextConverter(Converter):
    """Collects weights under their new names."""

    def embedding(self, theirs: str, vocab: int, positions: int) -> None:
        for ours, name, rows in (
            ("words", "word_embeddings", vocab),
            ("positions", "position_embeddings", positions),
            ("types", "token_type_embeddings", 2),
        ):
            self.weights[f"text_embedding.{ours}.weight"] = self.taker.take(
                f"{theirs}.{name}.weight", rows, self.hidden
            )
        self.norm("text_embedding.norm", f"{theirs}.LayerNorm")

    def layers(self, theirs: str, count: int) -> None:
        """theirs: what stands before a layer's number."""
        for i in range(count):
            self.attention(f"transformer.{i}.attention", f"{theirs}.{i}.attention.self")
            self.block(f"transformer.{i}", f"{theirs}.{i}", ENCODER_BLOCK)
