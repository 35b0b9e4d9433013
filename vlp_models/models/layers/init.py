"""Initial weights as in BERT."""

from __future__ import annotations

from torch import nn


def init_weights(module: nn.Module, std: float = 0.02, *, but: tuple[str, ...] = ()) -> None:
    """Matrices N(0, std), biases 0, LayerNorm and BatchNorm 1 and 0. Draws from torch's global generator.

    A parameter that is one number (a temperature, a gate) keeps the value that its module gave it, and so does what is
    named like one of `but` at its beginning.
    """
    for name, parameter in module.named_parameters():
        if name.startswith(but):
            continue
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.dim() > 1:
            nn.init.normal_(parameter, std=std)
        elif parameter.dim() == 1:
            nn.init.ones_(parameter)
