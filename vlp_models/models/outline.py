"""A model without its weights: what it reads and can do, known before there is any data."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from vlp_models.data.content_hashes import Kind
from vlp_models.data.inputs import ModelInputs
from vlp_models.models import DataFacts, build_model
from vlp_models.params import ModelParams, Params

# In place; of torch.nn.init as of tensors.
DRAWING = {"normal_", "uniform_", "trunc_normal_", "kaiming_normal_", "kaiming_uniform_", "xavier_uniform_"}


def outline(model: ModelParams, where: str = "config") -> nn.Module:
    """The model on no device, as if the data were any.

    Raises:
        ParamsError: a config that its family refuses; `where` is the config's place in params.yaml.
    """
    return _outlined(model.family, json.dumps(model.config, sort_keys=True), where)


def inputs_of(models: Mapping[str, ModelParams]) -> list[ModelInputs]:
    """What each of these models (`models` of params.yaml) reads."""
    found: list[Any] = [outline(model, f"models.{name}.config") for name, model in models.items()]
    return [model.inputs for model in found]


def kinds(params: Params) -> dict[str, Kind]:
    """What of an image each model reads."""
    return {name: inputs.kind for name, inputs in zip(params.models, inputs_of(params.models), strict=True)}


def kind_at(params: Params, checkpoint: str) -> Kind:
    """What of an image the model of a checkpoint reads."""
    model = params.model_at(checkpoint)
    (inputs,) = inputs_of({model: params.models[model]})
    return inputs.kind


@functools.lru_cache(maxsize=64)
def _outlined(family: str, config: str, where: str) -> nn.Module:
    facts = DataFacts(vocab_size=1000, mask_id=4, feature_dim=8, num_classes=8)
    with torch.device("meta"), _NothingDrawn():
        return build_model(family, json.loads(config), facts, where=where)


class _NothingDrawn(TorchFunctionMode):
    """No weight gets a value: it has no memory to hold one, and drawing nothing into it takes torch seconds to load."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.__name__ in DRAWING:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)
