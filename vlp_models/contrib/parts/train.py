"""Train a part of a run, and average the parts."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vlp_models.common.workspace import Workspace, require_output
from vlp_models.contrib.parts.params import PartsParams
from vlp_models.contrib.parts.plan import list_parts, part_checkpoints
from vlp_models.errors import ParamsError
from vlp_models.params import Params, to_plain
from vlp_models.params.schema import suggestion

if TYPE_CHECKING:
    from torch import Tensor

    from vlp_models.pipeline.training_job import Training, TrainingJob


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Write checkpoints/finetune/KEY, for KEY a part of a run (`RUN-part-1`), its curve and its training report.

    Raises:
        ParamsError: no such part.
        DataError, CheckpointError: an input is missing or does not match.
    """
    from vlp_models.pipeline.stages import finetune

    parts = list_parts(params)
    if key not in parts:
        raise ParamsError(f"params.yaml: no part `{key}`{suggestion(key, parts)}")
    runs = {**params.finetune, key: parts[key].params}
    finetune.run(dataclasses.replace(params, finetune=runs), workspace, key)


def average(params: Params, workspace: Workspace, key: str) -> None:
    """Write checkpoints/finetune/KEY, the average of its parts, as a training without updates would.

    Raises:
        DataError, CheckpointError: an input is missing or does not match.
    """
    from vlp_models.pipeline.training_job import TrainingJob
    from vlp_models.tasks import TASKS, task_class
    from vlp_models.tasks.base import read_options
    from vlp_models.training import PARTS

    p = params.finetune[key]
    folders = [
        require_output(workspace.root / path, f"part@{Path(path).name}") for path in part_checkpoints(params)[key]
    ]
    task = task_class(p.task)
    job = TrainingJob(
        dataclasses.replace(
            params, finetune={**params.finetune, key: dataclasses.replace(p, max_epochs=0, max_steps=0)}
        ),
        workspace,
        f"finetune/{key}",
        view=task.training_view(read_options(task, p.options, where=f"finetune.{key}.options")),
        settings={"finetune": {key: to_plain(p)}},
        files={f"part-{number}": folder for number, folder in enumerate(folders, start=1)},
        modules=[TASKS[p.task], *PARTS.values()],
    )
    job.run(partial(_build, folders=folders, scale=p.section(PartsParams).scale))


def _build(job: TrainingJob, *, folders: list[Path], scale: float) -> Training:
    """Return the run's model with the average of the parts as its weights, and nothing to train."""
    from vlp_models.models.checkpoint import load_checkpoint_weights, read_weights
    from vlp_models.pipeline.stages.finetune import build_training

    training = build_training(job)
    weights = average_weights([read_weights(folder) for folder in folders], read_weights(job.start), scale)
    load_checkpoint_weights(training.checkpoint, weights, folders[0])
    return training


def average_weights(parts: list[dict[str, Tensor]], start: dict[str, Tensor], scale: float = 1.0) -> dict[str, Tensor]:
    """Return start + scale * (average of the parts - start).

    Computed in float64, in the order of the parts, so equal parts give equal bits. Integers (counters) are those of the
    first part; a tensor that the start does not have, such as a new head, is the average.
    """
    result = {}
    for name, tensor in parts[0].items():
        result[name] = tensor
        if tensor.is_floating_point():
            mean = sum((weights[name].double() for weights in parts[1:]), tensor.double()) / len(parts)
            if name in start and scale != 1.0:
                origin = start[name].double()
                mean = origin + scale * (mean - origin)
            result[name] = mean.to(tensor.dtype)
    return result
