"""Whether every run of params.yaml can be, asked before anything is computed."""

from __future__ import annotations

import functools
import json
from typing import Any

from vlp_models.data.inputs import ModelInputs, PixelInput, RegionInput
from vlp_models.errors import ParamsError
from vlp_models.params import ModelParams, Params
from vlp_models.params.schema import nearest


def check_runs(params: Params) -> None:
    """
    Raises:
        ParamsError: an unknown family or task, a config that the family refuses, an option that the task does not
            have, a task that the model can't do, or objectives that it can't learn.
    """
    from vlp_models.models import FAMILIES
    from vlp_models.tasks import TASKS, task_class
    from vlp_models.tasks.base import check_can, read_options

    for name, model in params.models.items():
        if model.family not in FAMILIES:
            raise ParamsError(f"params.yaml: `models.{name}.family: {model.family}`{nearest(model.family, FAMILIES)}")
        _outline(model, f"models.{name}.config")
    for name, run in params.pretrain.items():
        outline = _outline(params.models[run.model], f"models.{run.model}.config")
        for objective in run.recipe.objectives:
            known = getattr(outline, "objectives", ())
            if objective not in known:
                where = f"params.yaml: `pretrain.{name}.recipe.objectives.{objective}`"
                raise ParamsError(f"{where}: {run.model} can't learn that{nearest(objective, known)}")
    for name, finetune in params.finetune.items():
        if finetune.task not in TASKS:
            raise ParamsError(f"params.yaml: `finetune.{name}.task: {finetune.task}`{nearest(finetune.task, TASKS)}")
        task = task_class(finetune.task)
        read_options(task, finetune.options, where=f"finetune.{name}.options")
        model = params.model_of(name)
        outline = _outline(params.models[model], f"models.{model}.config")
        check_can(f"{finetune.task} (`finetune.{name}` in params.yaml)", task, outline, model)
        unknown = [source for source in (*finetune.sources, *finetune.evaluate_on) if source not in params.data]
        if unknown:
            raise ParamsError(
                f"params.yaml: `finetune.{name}` names the dataset {unknown[0]}{nearest(unknown[0], params.data)}"
            )


def reads(params: Params) -> tuple[bool, bool]:
    """Whether any model reads regions, and whether any reads pixels."""
    inputs = [inputs_of(model, f"models.{name}.config").image for name, model in params.models.items()]
    return any(isinstance(i, RegionInput) for i in inputs), any(isinstance(i, PixelInput) for i in inputs)


def inputs_of(model: ModelParams, where: str = "model.config") -> ModelInputs:
    inputs: ModelInputs = _outline(model, where).inputs
    return inputs


def _outline(model: ModelParams, where: str) -> Any:
    """The model without its weights, as if the data were any."""
    return _outlined(model.family, json.dumps(model.config, sort_keys=True), where)


@functools.lru_cache(maxsize=64)
def _outlined(family: str, config: str, where: str) -> Any:
    import torch

    from vlp_models.models import DataFacts, build_model

    facts = DataFacts(vocab_size=1000, mask_id=4, feature_dim=8, num_classes=8)
    with torch.device("meta"):
        return build_model(family, json.loads(config), facts, where=where)
