"""finetune RUN: a pretrained model learns a task. Killed or stopped, it goes on where it was."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vlp_models.errors import ParamsError
from vlp_models.params import FinetuneParams, Params, to_plain
from vlp_models.workspace.paths import Workspace, measured, need, read_json

if TYPE_CHECKING:
    from vlp_models.runs.fitting import Inputs
    from vlp_models.tasks.base import TaskModel
    from vlp_models.tasks.captioning import Captioning
    from vlp_models.training.module import LossFunction

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
        task_model = _task_model(p, init, inputs, workspace)
        loaders = LoaderFactory(
            inputs.shards,
            "images" if p.self_critical else task_model.view,
            sources=p.sources,
            collate=task_model.collate,
            batch_size=p.batch_size,
            num_workers=params.trainer.num_workers,
            seed=p.seed,
            captioned=p.self_critical is not None,
        )
        tags = {"task": p.task, "run": key}
        with tracking(params, workspace, work, stage=stage, settings=settings, tags=tags) as tracker:
            result = fit(
                task_model,
                _loss(p, task_model, inputs.shards, work),
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
            config=task_model.info,
            tokenizer=task_model.tokenizer,
            answers=task_model.answers,
            settings=settings,
            files=files,
            counts={"train_samples": len(loaders.train), "val_samples": len(loaders.val)},
            result=result,
        )
        keep(workspace, work, stage, [workspace.checkpoint(key), curve_file(workspace, key)])
        forget(work)


def _loss(p: FinetuneParams, task_model: TaskModel, shards: Path, work: Path) -> LossFunction:
    """The task's own, or captioning's reward."""
    if p.self_critical is None:
        return lambda batch, *, update, generator: task_model.loss(batch)

    from vlp_models.tasks.self_critical import self_critical_loss

    return self_critical_loss(cast("Captioning", task_model), p.self_critical, shards, p.sources, work)


def _run_params(params: Params, key: str) -> FinetuneParams:
    from vlp_models.tasks.base import read_options, task_class

    if key not in params.finetune:
        raise ParamsError(f"params.yaml: no fine-tuning run `{key}`; there are: {', '.join(params.finetune)}")
    p = params.finetune[key]
    if key in PRETRAININGS:
        raise ParamsError(f"params.yaml: a fine-tuning run can't be called `{key}`; checkpoints/{key} is taken")
    if p.init == key:
        raise ParamsError(f"params.yaml: `finetune.{key}.init` is the run itself")
    if p.self_critical and p.task != "captioning":
        raise ParamsError(f"params.yaml: `finetune.{key}.self_critical` is for captioning, not for {p.task}")
    read_options(task_class(p.task), p.options, where=f"finetune.{key}.options")
    return p


def _task_model(p: FinetuneParams, init: Path, inputs: Inputs, workspace: Workspace) -> TaskModel:
    """The task's model with the weights of `init`; its head's too, where the task and its answers are the same."""
    import torch

    from vlp_models.models.checkpoint import (
        build_from_config,
        load_strictly,
        part_of,
        read_answers,
        read_config,
        read_weights,
    )
    from vlp_models.runs.fitting import check_same_data
    from vlp_models.tasks.base import read_options, task_class

    before = read_config(init)
    check_same_data(before, init, inputs)
    answers = read_json(workspace.tokenizer / "answers.json") if p.task == "vqa" else []
    info: dict[str, Any] = {
        **{name: before[name] for name in ("model", "model_config", "detector_id", "feature_dim", "classes")},
        "task": p.task,
        "max_text_len": p.max_text_len,
        "max_regions": p.max_regions,
        "blank_images": p.blank_images,
        "label_smoothing": p.label_smoothing,
        "options": to_plain(read_options(task_class(p.task), p.options)),
    }
    torch.manual_seed(p.seed)
    model = build_from_config(info, inputs.tokenizer, init)
    task_model = task_class(p.task)(model, inputs.tokenizer, info, answers=answers)
    if not p.scratch:
        weights = read_weights(init)
        load_strictly(model, part_of(weights, "model"), init)
        if before["task"] == p.task and (p.task != "vqa" or read_answers(init) == answers):
            load_strictly(task_model.head, part_of(weights, "head"), init)
    return task_model
