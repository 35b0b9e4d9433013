"""Whose model a run trains, which design its seeds stand for, what it starts from, where its checkpoint lies.

A checkpoint's name is its path below checkpoints/: `initial/MODEL`, `pretrain/RUN` or `finetune/RUN`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlp_models.params import Params


def models(params: Params) -> Mapping[str, tuple[str, Mapping[str, Any]]]:
    """Model -> its family and config."""
    several = getattr(params, "models", None)
    if several is None:  # one model, named after its family
        return {params.model.name: (params.model.name, params.model.config)}
    return {name: (model.family, model.config) for name, model in several.items()}


def model_of(params: Params, run: str) -> str:
    """The model of a fine-tuning run."""
    named = getattr(params, "model_of", None)
    return str(named(run)) if named else params.model.name


def family_of(params: Params, run: str) -> str:
    return models(params)[model_of(params, run)][0]


def design_of(params: Params, run: str) -> str:
    """The name under which fine-tuning runs that differ in nothing but their seed are one."""
    return getattr(params.finetune[run], "design", "") or run


def checkpoint_of(params: Params, run: str) -> str:
    """The name of a fine-tuning run's checkpoint."""
    return f"finetune/{run}" if hasattr(params, "models") else run


def start_of(params: Params, checkpoint: str) -> str:
    """The checkpoint that `checkpoint` was trained from, as params.yaml has it; empty: none, or not known there."""
    kind, _, name = checkpoint.partition("/")
    if hasattr(params, "models"):
        section: Mapping[str, Any] = {"pretrain": params.pretrain, "finetune": params.finetune}.get(kind, {})  # type: ignore[assignment]
        return str(section[name].start) if name in section else ""
    if checkpoint in params.finetune:
        return str(params.finetune[checkpoint].init)
    if checkpoint == "scheduled_sampling":
        return "" if params.scheduled_sampling.init == "scratch" else "pretrain"
    return params.pretrain.init if checkpoint == "pretrain" else ""


def weights_of(params: Params, checkpoint: str) -> str:
    """The imported weights that an initial checkpoint was made of; empty: fresh ones."""
    kind, _, name = checkpoint.partition("/")
    if kind != "initial" or name not in models(params):
        return ""
    return str(getattr(params.models[name], "weights", ""))  # type: ignore[attr-defined]


def candidates_of(params: Params, task: str) -> list[str]:
    """The task's runs that may become its champion: all but text-only controls."""
    return [name for name, run in params.finetune.items() if run.task == task and not run.blank_images]
