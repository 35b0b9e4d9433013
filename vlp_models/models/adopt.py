"""Taking over what fits of another checkpoint, and saying what did not."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vlp_models.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Adopted:
    """left_out: names of the other's weights that found no place; fresh: of the model's own that none filled, at least
    in part; taken: of the model's own that were filled."""

    left_out: list[str]
    fresh: list[str]
    taken: list[str] = field(default_factory=list)


@torch.no_grad()
def adopt_weights(model: nn.Module, weights: Mapping[str, Tensor], *, tables: Collection[str] = ()) -> Adopted:
    """Copies every tensor whose name and shape `model` has.

    tables: names of those that may be longer or shorter than the model's: the rows that both have are taken, and a
    longer table counts as fresh besides.

    Raises:
        CheckpointError: not one of them fits.
    """
    own = model.state_dict()
    left_out, fresh = [], set(own)
    for name, tensor in weights.items():
        if name not in own:
            left_out.append(name)
            continue
        rows = min(len(own[name]), len(tensor)) if name in tables else 0
        if own[name].shape == tensor.shape:
            own[name].copy_(tensor)
            fresh.discard(name)
        elif rows and own[name].shape[1:] == tensor.shape[1:]:
            own[name][:rows].copy_(tensor[:rows])
            if rows < len(tensor):
                left_out.append(f"{name}[{rows}:]")
                fresh.discard(name)
        else:
            left_out.append(name)
    if len(fresh) == len(own):
        raise CheckpointError("nothing of these weights fits the model: neither names nor shapes agree")
    return Adopted(left_out=sorted(left_out), fresh=sorted(fresh), taken=sorted(own.keys() - fresh))


def in_short(names: Collection[str], among: Collection[str]) -> list[str]:
    """`names`, with a module's name in place of all of its own where all are there. among: all names that there are."""
    given, short = set(names), dict[str, None]()
    whole: dict[str, bool] = {}
    for name in among:
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            part = ".".join(parts[:i])
            whole[part] = whole.get(part, True) and name in given
    for name in sorted(given):
        parts = name.split(".")
        beginnings = (".".join(parts[:i]) for i in range(1, len(parts) + 1))
        short[next((part for part in beginnings if whole.get(part)), name)] = None
    return list(short)


def refuse_other(config: Mapping[str, object], own: Mapping[str, object], keys: Collection[str]) -> None:
    """
    Args:
        keys: settings without which the same numbers would mean something else.

    Raises:
        CheckpointError: names those that differ.
    """
    differ = [
        f"{key}: {own[key]} here, {config[key]} there" for key in keys if key in config and config[key] != own[key]
    ]
    if differ:
        raise CheckpointError(
            f"the weights are another architecture's ({'; '.join(differ)}); set these in the model's config"
        )
