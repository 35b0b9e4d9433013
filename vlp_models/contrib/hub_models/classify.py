"""Zero-shot classification: a label is the mean embedding of sentences with it.

A. Radford et al.: "Learning Transferable Visual Models From Natural Language Supervision", ICML 2021, section 3.1.

Shape suffixes: B images, L labels, E embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vlp_models.data.pixels import PixelInput, collate_pixels
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import CheckpointError
from vlp_models.models.checkpoint import build_from_config, load_checkpoint_weights, part_of, read_config, read_weights
from vlp_models.models.protocols import Contrasts
from vlp_models.serving.images import check_image
from vlp_models.tasks.base import implements


@dataclass(frozen=True, kw_only=True)
class Classifier:
    """A model with two towers that reads pixels, and its tokenizer."""

    model: Any
    tokenizer: Tokenizer
    max_text_len: int

    @classmethod
    def open(cls, source: str) -> Classifier:
        """Load a checkpoint's folder, or a registered version; "": the champion of retrieval.

        Raises:
            CheckpointError: it is damaged, or no model with two towers on pixels.
            DataError: nothing is registered under that name.
        """
        directory = Path(source) if source and Path(source).is_dir() else _registered(source)
        info, tokenizer = read_config(directory), Tokenizer.load(directory)
        model: Any = build_from_config(info, tokenizer, directory)
        if not implements(model, Contrasts) or not isinstance(model.inputs.image, PixelInput):
            raise CheckpointError(
                f"{directory}: a {info.family}; expected a model with two towers, such as dual_encoder"
            )
        load_checkpoint_weights(model, part_of(read_weights(directory), "model"), directory)
        length = getattr(model.config, "max_positions", info.max_text_len)
        return cls(model=model.eval(), tokenizer=tokenizer, max_text_len=min(length, info.max_text_len))

    @torch.inference_mode()
    def embed_labels(self, labels: Sequence[str], templates: Sequence[str]) -> Tensor:
        """Return [L, E], unit length: the mean over the templates."""
        embedded = []
        for template in templates:
            texts = [template.replace("{}", label) for label in labels]
            embedded.append(self.model.embed_text(self.tokenizer.encode_batch(texts, self.max_text_len)))
        return F.normalize(torch.stack(embedded).mean(0), dim=-1)

    @torch.inference_mode()
    def compare(self, files: Sequence[str], labels_LE: Tensor) -> Tensor:
        """Return [B, L]: the share of each label for each image, a softmax over the labels."""
        pictures = [check_image(file).open() for file in files]
        pixels = collate_pixels(pictures, self.model.inputs.image, [None] * len(pictures))
        return (self.model.contrast_scale() * self.model.embed_image(pixels) @ labels_LE.T).softmax(-1)


def _registered(name: str) -> Path:
    from vlp_models.params import load_params
    from vlp_models.registry.client import mlflow_errors, model_name
    from vlp_models.registry.serving_cache import open_served_bundle
    from vlp_models.serving.bundle import checkpoint_folder

    params = load_params()
    with mlflow_errors(params):
        bundle, _ = open_served_bundle(params.tracking, Path.cwd(), name or model_name(params.tracking, "retrieval"))
    return checkpoint_folder(bundle)
