"""The model families, by the name that params.yaml gives them (`models.<name>.family`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from vlp_models.errors import ParamsError
from vlp_models.params.lookup import load
from vlp_models.params.schema import build

# family -> module:class. A class has `config_class`, a frozen dataclass, and is called with one; where it has a
# `from_config`, that is called instead. Nothing is imported before it is asked for.
FAMILIES: dict[str, str] = {
    "tden": "vlp_models.models.tden.model:TDEN",
    "unified_vlp": "vlp_models.models.unified_vlp.model:UnifiedVLP",
    "xgpt": "vlp_models.models.xgpt.model:XGPT",
    "vlmo": "vlp_models.models.vlmo.model:VLMo",
    "soho": "vlp_models.models.soho.model:SOHO",
}


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What the data decides of a model; a family whose config has no field of that name is not told.

    vocab_size, mask_id, cls_id, sep_id  of the tokenizer; the last two as in a vocabulary trained here
    feature_dim, num_classes of the regions (data/features/manifest.json); 0 for a model that reads none
    """

    vocab_size: int
    mask_id: int
    feature_dim: int = 0
    num_classes: int = 0
    cls_id: int = 2
    sep_id: int = 3

    def told(self, config_class: type) -> dict[str, Any]:
        """Those that a family's config has a field for."""
        known = {field.name for field in dataclasses.fields(config_class)}
        return {name: value for name, value in dataclasses.asdict(self).items() if name in known}


def family_class(family: str) -> type[nn.Module]:
    """
    Raises:
        ParamsError: no such family.
    """
    if family not in FAMILIES:
        raise ParamsError(f"unknown model family `{family}`; known: {', '.join(FAMILIES)}")
    found: type[nn.Module] = load(FAMILIES[family])
    return found


def build_model(family: str, config: Mapping[str, Any], facts: DataFacts, where: str = "config") -> nn.Module:
    """A freshly initialised model; the weights depend on torch's global seed alone.

    Args:
        config: params.yaml's `models.<name>.config`, or a checkpoint's `model_config`.
        where: its place, for messages.

    Raises:
        ParamsError: an unknown family or key, a value out of range, or a config made for other data.
    """
    model_class: Any = family_class(family)
    told = facts.told(model_class.config_class)
    for key, value in told.items():
        if config.get(key, value) != value:
            raise ParamsError(f"`{where}.{key}` is {config[key]!r}, but the data at hand has {value}")
    built = build(model_class.config_class, {**config, **told}, where=where)
    model: nn.Module = getattr(model_class, "from_config", model_class)(built)
    return model
