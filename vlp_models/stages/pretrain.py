"""pretrain: a model learns from image-text pairs without a task. Killed or stopped, it goes on where it was."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from vlp_models.params import Params
from vlp_models.workspace.paths import Workspace, measured

if TYPE_CHECKING:
    from torch import nn

    from vlp_models.training.module import LossFunction


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Writes checkpoints/pretrain, reports/pretrain.json and reports/curves/pretrain.csv.

    Raises:
        DataError, ParamsError: an input is missing or does not fit.
        Preempted, NonFiniteLossError, CheckpointError: see `training.run.fit`.
    """
    from vlp_models.runs.fitting import read_inputs, start_from
    from vlp_models.runs.pretraining import fresh_model, learn_from_pairs
    from vlp_models.training.recipe import PretrainingLoss, make_recipe

    p = params.pretrain
    with measured(workspace, "pretrain"):
        inputs = read_inputs(workspace)
        init = workspace.root / p.init if p.init else None
        if init:
            inputs = dataclasses.replace(inputs, files={**inputs.files, "init": init})

        def prepare() -> tuple[nn.Module, LossFunction]:
            model = fresh_model(params, inputs, p.seed)
            if init:
                start_from(model, params.model.name, init, inputs)
            recipe = make_recipe(p.mix, p.objectives, known=model.objectives, seed=p.seed)  # type: ignore[arg-type]
            return model, PretrainingLoss(model=model, recipe=recipe, mask_probability=p.mask_probability)

        learn_from_pairs(params, workspace, inputs, p, stage="pretrain", prepare=prepare)
