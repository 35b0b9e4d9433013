"""Load the part of a checkpoint that fits a model, and report the rest.

A model may start from a checkpoint of its family with another config (other heads, longer position tables), or from the
weights of another program (convert/). What the family accepts is data: its class attribute `partial_load`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vlp_models.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class PartialLoad:
    """What a family accepts from a checkpoint of the same family with another config.

    same      config keys that must be equal: with another value the weights have other shapes or another meaning
    tables    tables that may be longer or shorter: the rows that both have are loaded
    meanings  config key -> pattern of the names of weights that keep their shape but change their meaning with the key;
              where the key differs they are left out
    """

    same: tuple[str, ...]
    tables: tuple[str, ...] = ("text_embedding.positions.weight",)
    meanings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """Names of weights, sorted.

    loaded    of the model, filled from the checkpoint
    missing   of the model, not filled, or only in part
    left_out  of the checkpoint, without a counterpart in the model
    """

    loaded: list[str]
    missing: list[str]
    left_out: list[str]


def load_partial(model: nn.Module, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> LoadReport:
    """Load what fits `model` of another checkpoint of its family.

    A model's own method `fit_weights(weights, config)`, if it has one, adapts the weights first.

    Args:
        model: a `LoadsPartially` (models/protocols.py).
        weights: of the checkpoint, without the prefix `model.`.
        config: `model_config` in the checkpoint's config.json.

    Raises:
        CheckpointError: the two configs differ in a key of `partial_load.same`, or nothing fits.
    """
    # Refused first: weights with another meaning may still fit.
    spec: PartialLoad = model.partial_load  # type: ignore[assignment]
    config_object: Any = model.config
    model_config = dataclasses.asdict(config_object)
    check_same_config(config, model_config, spec.same)
    fit_weights: Any = getattr(model, "fit_weights", None)
    fitted = dict(weights) if fit_weights is None else fit_weights(weights, config)
    # Weights that keep their shape, but mean something else under the model's config.
    patterns = []
    for key, pattern in spec.meanings.items():
        if config.get(key, model_config[key]) != model_config[key]:
            patterns.append(pattern)
    changed = [name for name in fitted if any(re.search(pattern, name) for pattern in patterns)]
    same_meaning = {name: tensor for name, tensor in fitted.items() if name not in changed}
    report = load_matching(model, same_meaning, tables=spec.tables)
    return dataclasses.replace(report, left_out=sorted([*report.left_out, *changed]))


@torch.no_grad()
def load_matching(model: nn.Module, weights: Mapping[str, Tensor], *, tables: Collection[str] = ()) -> LoadReport:
    """Copy every tensor whose name and shape `model` has.

    tables: names of tables whose number of rows may differ: the rows that both have are copied. A table that is longer
    in the model still counts as missing.

    Raises:
        CheckpointError: no weight fits.
    """
    # The state's tensors are the model's own, so copying into them loads the weights.
    state = model.state_dict()
    left_out, missing = [], set(state)
    for name, tensor in weights.items():
        if name not in state:
            left_out.append(name)
            continue
        # Same name and shape: the whole tensor. A table of another length: its common rows. Else nothing.
        rows = min(len(state[name]), len(tensor)) if name in tables else 0
        if state[name].shape == tensor.shape:
            state[name].copy_(tensor)
            missing.discard(name)
        elif rows and state[name].shape[1:] == tensor.shape[1:]:
            state[name][:rows].copy_(tensor[:rows])
            # A table that is shorter in the model is complete; a longer one has new rows, so it stays missing.
            if rows < len(tensor):
                left_out.append(f"{name}[{rows}:]")
                missing.discard(name)
        else:
            left_out.append(name)
    if len(missing) == len(state):
        raise CheckpointError("none of these weights fits the model: neither names nor shapes agree")
    return LoadReport(loaded=sorted(state.keys() - missing), missing=sorted(missing), left_out=sorted(left_out))


def check_same_config(config: Mapping[str, object], model_config: Mapping[str, object], keys: Collection[str]) -> None:
    """Check that two configs agree in `keys`, as far as `config`, that of the weights, has them.

    Raises:
        CheckpointError: names the keys that differ, with both values.
    """
    different = [
        f"{key}: {model_config[key]} in the model, {config[key]} in the weights"
        for key in keys
        if key in config and config[key] != model_config[key]
    ]
    if different:
        raise CheckpointError(
            f"the weights are of another architecture ({'; '.join(different)}); set these keys in the model's config"
        )


def summarize_names(names: Collection[str], among: Collection[str]) -> list[str]:
    """Return `names` with all the names of a module replaced by the module's name, if every one of them is listed.

    among: all names that exist.
    """
    listed = set(names)
    # For each module, at every depth: whether all of its names are listed.
    complete: dict[str, bool] = {}
    for name in among:
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            prefix = ".".join(parts[:i])
            complete[prefix] = complete.get(prefix, True) and name in listed
    # The outermost complete module of each name, without duplicates.
    short: dict[str, None] = {}
    for name in sorted(listed):
        parts = name.split(".")
        prefixes = [".".join(parts[:i]) for i in range(1, len(parts) + 1)]
        short[next((prefix for prefix in prefixes if complete.get(prefix)), name)] = None
    return list(short)
