"""Train a part of a run, and average the parts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.parts.params import PartsParams
from vlp_models.contrib.parts.plan import list_parts
from vlp_models.errors import ParamsError
from vlp_models.params import FinetuneParams, Params
from vlp_models.params.schema import suggestion

if TYPE_CHECKING:
    from torch import Tensor


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


def average(run: FinetuneParams, start: dict[str, Tensor], parts: list[Path]) -> dict[str, Tensor]:
    """Return the weights of a run: start + scale * (average of the parts - start).

    Computed in float64, in the order of the parts, so equal parts give equal bits. Integers (counters) are those of the
    first part; a tensor that the start does not have, such as a new head, is the average.

    Args:
        start: weights of the checkpoint that the parts started from.
        parts: their checkpoints.
    """
    from vlp_models.models.checkpoint import read_weights

    scale = run.section(PartsParams).scale
    first, *others = (read_weights(folder) for folder in parts)
    result = {}
    for name, tensor in first.items():
        result[name] = tensor
        if tensor.is_floating_point():
            mean = sum((weights[name].double() for weights in others), tensor.double()) / len(parts)
            if name in start and scale != 1.0:
                origin = start[name].double()
                mean = origin + scale * (mean - origin)
            result[name] = mean.to(tensor.dtype)
    return result
