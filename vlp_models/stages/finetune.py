"""finetune RUN: a pretrained model learns a task. Killed or stopped, it goes on where it was."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.errors import ParamsError
from vlp_models.params import FinetuneParams, Params, to_plain
from vlp_models.workspace.paths import Workspace, measured, need

if TYPE_CHECKING:
    from vlp_models.runs.fitting import Inputs
    from vlp_models.tasks.base import TaskModel

PRETRAININGS = ("pretrain", "scheduled_sampling")  # stages whose checkpoints no fine-tuning run may overwrite


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Writes checkpoints/KEY and reports/curves/KEY.csv; the architecture is checkpoints/INIT's, also from scratch.

    Raises:
        ParamsError: no such run in params.yaml, or a value that can't be.
        CheckpointError: checkpoints/INIT is damaged, or was made from other features or another vocabulary.
        Preempted, NonFiniteLossError, CheckpointError: see `training.run.fit`.
    """
    from vlp_models.models.checkpoint import CONFIG
    from vlp_models.runs.fitting import curve_file, forget, publish, read_inputs, tracking, work_directory
    from vlp_models.training.data import LoaderFactory
    from vlp_models.training.run import Plan, fit
    from vlp_models.workspace.finished import keep, restore

    p = _run_params(params, key)
    stage = f"finetune@{key}"
    with measured(workspace, stage):
        inputs = read_inputs(workspace)
        init = need(workspace.checkpoint(p.init), p.init if p.init in PRETRAININGS else f"finetune@{p.init}")
        files = {**inputs.files, "init": init / CONFIG if p.scratch else init}
        settings = {"finetune": to_plain(p)}
        work = work_directory(workspace, stage.replace("@", "-"), params.trainer, settings, files)
        if restore(workspace, work, stage):
            forget(work)
            return
        task_model, described = _task_model(p, init, inputs, workspace)
        loaders = LoaderFactory(
            inputs.shards,
            task_model.learning_view(task_model.options),
            sources=p.sources,
            collate=task_model.collate,
            batch_size=p.batch_size,
            num_workers=params.trainer.num_workers,
            seed=p.seed,
            captioned=task_model.captioned_only(task_model.options),
        )
        tags = {"task": p.task, "run": key}
        with tracking(params, workspace, work, stage=stage, settings=settings, tags=tags) as tracker:
            result = fit(
                task_model,
                task_model.training_loss(inputs.shards, p.sources, work),
                loaders,
                plan=Plan.of(p),
                trainer=params.trainer,
                work=work,
                title=stage,
                tracker=tracker,
            )
        if not result.is_main:
            return
        publish(
            workspace,
            key,
            stage=stage,
            module=task_model,
            config=described,
            tokenizer=task_model.tokenizer,
            answers=task_model.labels,
            settings=settings,
            files=files,
            counts={"train_samples": len(loaders.train), "val_samples": len(loaders.val)},
            result=result,
        )
        keep(workspace, work, stage, [workspace.checkpoint(key), curve_file(workspace, key)])
        forget(work)


def _run_params(params: Params, key: str) -> FinetuneParams:
    from vlp_models.tasks import task_class
    from vlp_models.tasks.base import read_options

    if key not in params.finetune:
        raise ParamsError(f"params.yaml: no fine-tuning run `{key}`; there are: {', '.join(params.finetune)}")
    p = params.finetune[key]
    if key in PRETRAININGS:
        raise ParamsError(f"params.yaml: a fine-tuning run can't be called `{key}`; checkpoints/{key} is taken")
    if p.init == key:
        raise ParamsError(f"params.yaml: `finetune.{key}.init` is the run itself")
    read_options(task_class(p.task), p.options, where=f"finetune.{key}.options")
    return p


def _task_model(
    p: FinetuneParams, init: Path, inputs: Inputs, workspace: Workspace
) -> tuple[TaskModel, dict[str, Any]]:
    """The task's model with the weights of `init`; its head's too, where the task and its answers are the same."""
    import torch

    from vlp_models.models.checkpoint import (
        FORMAT,
        build_from_config,
        load_strictly,
        part_of,
        read_config,
        read_labels,
        read_weights,
    )
    from vlp_models.models.info import CheckpointInfo
    from vlp_models.runs.fitting import check_same_data
    from vlp_models.tasks import task_class
    from vlp_models.tasks.base import read_options

    before = read_config(init)
    check_same_data(before, init, inputs)
    task = task_class(p.task)
    labels = task.labels_for(workspace.tokenizer)
    info: dict[str, Any] = {
        **{name: before[name] for name in ("model", "model_config", "detector_id", "feature_dim", "classes")},
        "task": p.task,
        "max_text_len": p.max_text_len,
        "max_regions": p.max_regions,
        "blank_images": p.blank_images,
        "options": to_plain(read_options(task, p.options)),
    }
    torch.manual_seed(p.seed)
    model = build_from_config(info, inputs.tokenizer, init)
    task_model = task(model, inputs.tokenizer, CheckpointInfo.from_json({"format": FORMAT, **info}), labels=labels)
    if not p.scratch:
        weights = read_weights(init)
        load_strictly(model, part_of(weights, "model"), init)
        if before["task"] == p.task and (not task.has_labels or read_labels(init) == labels):
            load_strictly(task_model.head, part_of(weights, "head"), init)
    return task_model, info
