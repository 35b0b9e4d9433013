"""The models, by the name params.yaml gives them."""

from __future__ import annotations

from typing import Any

from torch import nn

from vlp_models.errors import ParamsError
from vlp_models.models.tden.config import TDENConfig
from vlp_models.models.tden.model import TDEN
from vlp_models.params import build

MODELS: dict[str, tuple[type[nn.Module], type]] = {"tden": (TDEN, TDENConfig)}


def build_model(
    name: str,
    config: dict[str, Any],
    *,
    vocab_size: int,
    feature_dim: int,
    num_classes: int,
    mask_id: int | None = None,
) -> nn.Module:
    """A freshly initialised model; the weights depend on torch's global seed alone.

    Args:
        config: params.yaml's `model.config`, or a checkpoint's `model_config`.
        vocab_size, mask_id: the tokenizer's; `mask_id` matters for pretraining only.
        feature_dim, num_classes: the features' (data/features/manifest.json).

    Raises:
        ParamsError: an unknown model or key, a value out of range, or a config made for other data.
    """
    if name not in MODELS:
        raise ParamsError(f"unknown model `{name}`; known: {', '.join(MODELS)}")
    model_class, config_class = MODELS[name]
    data = {"vocab_size": vocab_size, "feature_dim": feature_dim, "num_classes": num_classes}
    if mask_id is not None:
        data["mask_id"] = mask_id
    for key, value in data.items():
        if config.get(key, value) != value:
            raise ParamsError(f"`model.config.{key}` is {config[key]!r}, but the data at hand has {value}")
    return model_class(build(config_class, {**config, **data}, where="model.config"))
