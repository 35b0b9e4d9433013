"""Taking over what fits of another checkpoint, and saying what did not."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vlp_models.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Adopted:
    """left_out: names of the other's weights that found no place; fresh: of the model's own that none filled, at least
    in part."""

    left_out: list[str]
    fresh: list[str]


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
    return Adopted(left_out=sorted(left_out), fresh=sorted(fresh))


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
