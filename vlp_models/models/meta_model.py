"""A model on torch's meta device: what it reads and can do, without weights and before there is any data."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from vlp_models.data.inputs import ModelInputs
from vlp_models.data.shards.contents import Kind
from vlp_models.models import DataFacts, build_model
from vlp_models.params import ModelParams, Params

META_FACTS = DataFacts(vocab_size=1000, mask_id=4, feature_dim=8, num_classes=8)  # of arbitrary data
# In-place initializers of torch.nn.init and of tensors
INITIALIZERS = {"normal_", "uniform_", "trunc_normal_", "kaiming_normal_", "kaiming_uniform_", "xavier_uniform_"}


def meta_model(model: ModelParams, where: str = "config", *, classes: bool = True) -> nn.Module:
    """Return the model without weights, for data of arbitrary sizes.

    where: the config's place in params.yaml, for messages. classes: whether regions have class probabilities.

    Raises:
        ParamsError: its family refuses the config.
    """
    # JSON, because the key of a cache must be hashable.
    return _build(model.family, json.dumps(model.config, sort_keys=True), where, model.init, classes)


def model_inputs(models: Mapping[str, ModelParams]) -> list[ModelInputs]:
    """Return what each model of `models` in params.yaml reads, in their order."""
    built: list[Any] = [meta_model(model, f"models.{name}.config") for name, model in models.items()]
    return [model.inputs for model in built]


def image_kinds(params: Params) -> dict[str, Kind]:
    """Return which kind of image input each model reads, by its name."""
    return {name: inputs.kind for name, inputs in zip(params.models, model_inputs(params.models), strict=True)}


def image_kind_of(params: Params, checkpoint: str) -> Kind:
    """Return which kind of image input the model of a checkpoint reads."""
    name = params.model_at(checkpoint)
    (inputs,) = model_inputs({name: params.models[name]})
    return inputs.kind


@contextmanager
def without_weights() -> Iterator[None]:
    """Build modules in the block on the meta device, without drawing their weights."""
    with torch.device("meta"), _SkipInitialization():
        yield


@functools.lru_cache(maxsize=64)
def _build(family: str, config: str, where: str, init: str, classes: bool) -> nn.Module:
    facts = META_FACTS if classes else dataclasses.replace(META_FACTS, num_classes=0)
    with without_weights():
        return build_model(family, json.loads(config), facts, where=where, init=init)


class _SkipInitialization(TorchFunctionMode):
    """Skip initializers: a meta tensor has no values, and drawing them loads torch modules for seconds."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # An initializer's first argument is the tensor, which it returns.
        kwargs = kwargs or {}
        if func.__name__ in INITIALIZERS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)
