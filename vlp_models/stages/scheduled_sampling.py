"""scheduled_sampling: pretraining goes on, or begins, in two passes. Killed or stopped, it goes on where it was."""

from __future__ import annotations

import dataclasses
import shutil
from typing import TYPE_CHECKING

from vlp_models.params import Params
from vlp_models.workspace.paths import Workspace, measured, need, output_directory, write_json, write_text

if TYPE_CHECKING:
    from torch import nn

    from vlp_models.training.module import LossFunction

STAGE = "scheduled_sampling"


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Writes checkpoints/scheduled_sampling, reports/scheduled_sampling.json and its curve.

    With `scheme: none` the checkpoint is a copy of checkpoints/pretrain, and there is nothing to report.

    Raises:
        DataError, ParamsError: an input is missing or does not fit; the model can't learn by this scheme.
        Preempted, NonFiniteLossError, CheckpointError: see `training.run.fit`; or checkpoints/pretrain is of other
            features, words or architecture.
    """
    p = params.scheduled_sampling
    with measured(workspace, STAGE):
        if p.scheme == "none":
            _hand_on(workspace)
            return

        from vlp_models.models.checkpoint import load_strictly, part_of, read_config, read_weights
        from vlp_models.runs.fitting import check_same_data, read_inputs
        from vlp_models.runs.pretraining import fresh_model, learn_from_pairs
        from vlp_models.training.recipe import make_recipe
        from vlp_models.training.scheduled_sampling import make_two_pass_loss

        inputs = read_inputs(workspace)
        init = workspace.checkpoint("pretrain")
        if p.init == "pretrain":
            need(init, "pretrain")
            inputs = dataclasses.replace(inputs, files={**inputs.files, "init": init})

        def prepare() -> tuple[nn.Module, LossFunction]:
            model = fresh_model(params, inputs, p.seed)
            if p.init == "pretrain":
                check_same_data(read_config(init), init, inputs)
                load_strictly(model, part_of(read_weights(init), "model"), init)
            recipe = make_recipe("sum", p.objectives, known=model.objectives, seed=p.seed, section=STAGE)  # type: ignore[arg-type]
            return model, make_two_pass_loss(
                model,
                recipe,
                name=params.model.name,
                mask_probability=p.mask_probability,
                scheme=p.scheme,  # type: ignore[arg-type]
                sample=p.sample,
                ramp=p.ramp,
            )

        learn_from_pairs(params, workspace, inputs, p, stage=STAGE, prepare=prepare)


def _hand_on(workspace: Workspace) -> None:
    """No scheduled sampling after pretraining is pretraining: a fine-tuning run may start here all the same."""
    before = need(workspace.checkpoint("pretrain"), "pretrain")
    with output_directory(workspace.checkpoint(STAGE)) as directory:
        shutil.copytree(before, directory, dirs_exist_ok=True)
    write_json(workspace.reports / f"{STAGE}.json", {"steps": 0})
    write_text(workspace.reports / "curves" / f"{STAGE}.csv", "step,epoch,loss\n")
