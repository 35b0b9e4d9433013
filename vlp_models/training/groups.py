"""The parts of a model by name: what `optimizer.groups` of params.yaml may set apart, and what stays frozen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

from torch import nn

from vlp_models.errors import ParamsError
from vlp_models.params import GroupParams
from vlp_models.params.schema import nearest


@runtime_checkable
class HasParameterGroups(Protocol):
    def parameter_groups(self) -> dict[str, list[nn.Parameter]]: ...


def named_groups(module: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Name -> parameters: what the model says (`parameter_groups`), else its top-level children.

    Of a task's model, which has a `model` within, that one's groups and the other children (`head`). A parameter that
    two parts share belongs to the first.
    """
    if isinstance(module, HasParameterGroups):
        return module.parameter_groups()
    groups: dict[str, list[nn.Parameter]] = {}
    for name, child in module.named_children():
        groups |= named_groups(child) if name == "model" else {name: list(child.parameters())}
    seen: set[int] = set()
    for name, parameters in groups.items():
        groups[name] = [p for p in parameters if id(p) not in seen]
        seen |= set(map(id, parameters))
    return {name: parameters for name, parameters in groups.items() if parameters}


def chosen_groups(module: nn.Module, params: Mapping[str, GroupParams]) -> dict[str, list[nn.Parameter]]:
    """The groups that `params` names.

    Raises:
        ParamsError: the model has no such group (says the nearest), or two of them share a parameter.
    """
    known = named_groups(module) if params else {}
    owner: dict[int, str] = {}
    for name in params:
        if name not in known:
            place = f"params.yaml: `optimizer.groups.{name}`"
            raise ParamsError(f"{place}: the model has no such part{nearest(name, known)}")
        for parameter in known[name]:
            if owner.setdefault(id(parameter), name) != name:
                raise ParamsError(
                    f"params.yaml: `optimizer.groups`: {owner[id(parameter)]} and {name} share a parameter"
                )
    return {name: known[name] for name in params}


class Freezing:
    """Keeps parts of a model as they are, parameters and statistics: for ever, or in the first epochs.

    A frozen module is in eval mode, so that its running statistics stay and nothing of it is dropped out. Parameters
    frozen for ever need no gradient. Those frozen for some epochs lose theirs before each update: what wraps the model
    for several processes must know them from the start. Without a gradient an optimiser leaves them alone: no decay,
    no momentum.
    """

    def __init__(self, module: nn.Module, params: Mapping[str, GroupParams]) -> None:
        """
        Raises:
            ParamsError: see `chosen_groups`.
        """
        self._module = module
        self._until: dict[int, float] = {}  # parameter -> the epoch, from 0, in which it is updated for the first time
        for name, parameters in chosen_groups(module, params).items():
            group = params[name]
            for parameter in parameters:
                if group.frozen:
                    parameter.requires_grad_(False)
                if group.frozen or group.frozen_epochs:
                    self._until[id(parameter)] = float("inf") if group.frozen else group.frozen_epochs

    def train(self, epoch: int) -> None:
        """Puts the model into training mode, but for what is frozen in this epoch."""
        self._module.train()
        frozen = {id(p) for p in self.frozen(epoch)}
        for module in self._module.modules() if frozen else ():
            parameters = list(module.parameters())
            if parameters and all(id(p) in frozen for p in parameters):
                module.eval()

    def frozen(self, epoch: int) -> Iterable[nn.Parameter]:
        return [p for p in self._module.parameters() if epoch < self._until.get(id(p), 0)]

    def drop_gradients(self, epoch: int) -> None:
        for parameter in self.frozen(epoch):
            parameter.grad = None
