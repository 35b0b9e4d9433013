"""finetune RUN: a model learns a task. Killed or stopped, it goes on where it was."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vlp_models.common.workspace import Workspace, record_timing, require_output
from vlp_models.errors import ParamsError
from vlp_models.params import FinetuneParams, Params, to_plain
from vlp_models.params.schema import nearest

if TYPE_CHECKING:
    from vlp_models.models.checkpoint import CheckpointInfo
    from vlp_models.pipeline.training_job import Inputs
    from vlp_models.tasks.base import TaskModel


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Writes checkpoints/finetune/KEY, its curve and reports/training/finetune/KEY.json.

    The architecture is the start's, with `config` laid over it.

    Raises:
        ParamsError: no such run in params.yaml, or a value that can't be.
        CheckpointError: the start is damaged, or was made from other features or another vocabulary.
        Preempted, NonFiniteLossError, CheckpointError: see `training.run.fit`.
    """
    from vlp_models.data.shards.dataset import read_generated
    from vlp_models.models import FAMILIES
    from vlp_models.models.checkpoint import read_config
    from vlp_models.models.meta_model import image_kind_of
    from vlp_models.pipeline.check_params import check_searches
    from vlp_models.pipeline.training_job import (
        check_same_data,
        forget,
        learned_files,
        publish,
        read_inputs,
        stage_of,
        tracking,
        work_directory,
    )
    from vlp_models.pipeline.unrecorded import keep, restore
    from vlp_models.tasks import TASKS, task_class
    from vlp_models.tasks.base import check_texts_per_image, read_options
    from vlp_models.training.data import LoaderFactory
    from vlp_models.training.run import Plan, fit

    if key not in params.finetune:
        raise ParamsError(f"params.yaml: no fine-tuning run `{key}`{nearest(key, params.finetune)}")
    p = params.finetune[key]
    stage, run_name = f"finetune@{key}", f"finetune/{key}"
    with record_timing(workspace, stage):
        inputs = read_inputs(workspace)
        start = require_output(workspace.checkpoint(p.start), stage_of(p.start))
        before = read_config(start)
        task = task_class(p.task)
        view = task.training_view(read_options(task, p.options, where=f"finetune.{key}.options"))
        kind = image_kind_of(params, p.start)
        learned = learned_files(workspace, inputs, kind, view, p.sources, params.trainer.stream)
        files = {**learned, **inputs.files, "start": start}
        written = []
        if p.augment.captions:
            augmented = require_output(workspace.augmented(p.augment.captions), f"augment@{p.augment.captions}")
            files["augment"] = augmented
            written = read_generated(augmented, inputs.shards)
        settings = {"finetune": {key: to_plain(p)}}
        modules = ["vlp_models.pipeline.stages.finetune", FAMILIES[before.family], TASKS[p.task]]
        detector_id = inputs.manifest.detector_id if kind == "regions" else ""
        work = work_directory(workspace, stage, params.trainer, settings, files, modules, detector_id=detector_id)
        if restore(workspace, work, stage):
            forget(work)
            return
        check_searches(params, inputs.shards, run_name)
        check_same_data(before, start, inputs)
        task_model = _task_model(key, p, before, start, inputs, workspace)
        check_texts_per_image(f"finetune.{key}", task, task_model.model, task_model.options, p.texts_per_image)
        loss = task_model.training_loss(inputs.shards, p.sources, work)
        loaders = LoaderFactory(
            inputs.shards,
            task_model.training_view(task_model.options),
            sources=p.sources,
            collate=task_model.collate,
            batch_size=p.batch_size,
            num_workers=params.trainer.num_workers,
            stream=params.trainer.stream,
            texts_per_image=p.texts_per_image,
            seed=p.seed,
            captioned=task_model.needs_captions(task_model.options),
            written=written,
            control=p.augment.control,
            **task_model.reader.flags,
        )
        tags = {"task": p.task, "run": key, "model": before.name}
        with tracking(params, workspace, work, stage=stage, settings=settings, tags=tags, sources=p.sources) as tracker:
            result = fit(
                task_model,
                loss,
                loaders,
                plan=Plan.of(p),
                trainer=params.trainer,
                work=work,
                title=stage,
                tracker=tracker,
            )
        if not result.is_main:
            return
        outputs = publish(
            workspace,
            run_name,
            module=task_model,
            info=task_model.info,
            tokenizer=task_model.tokenizer,
            labels=task_model.labels,
            settings=settings,
            files=files,
            counts={"train_samples": len(loaders.train), "val_samples": len(loaders.val)},
            start=p.start,
            result=result,
            stream=params.trainer.stream,
            tracker=tracker,
        )
        keep(workspace, work, stage, outputs)
        forget(work)


def _task_model(
    key: str, p: FinetuneParams, before: CheckpointInfo, start: Path, inputs: Inputs, workspace: Workspace
) -> TaskModel:
    """The task's model with the weights of its start; its head's too, where the task and its labels are the same."""
    import torch

    from vlp_models.models import build_model
    from vlp_models.models.checkpoint import load_strictly, part_of, read_labels, read_weights
    from vlp_models.pipeline.training_job import data_facts, describe, start_from
    from vlp_models.tasks import task_class
    from vlp_models.tasks.base import read_options

    task = task_class(p.task)
    labels = task.initial_labels(workspace.tokenizer)
    torch.manual_seed(p.seed)
    config = {**before.model_config, **p.config}
    model = build_model(before.family, config, data_facts(inputs), where=f"finetune.{key}.config")
    info = describe(
        inputs,
        model,
        family=before.family,
        name=before.name,
        max_text_len=p.max_text_len,
        max_regions=p.max_regions,
        task=p.task,
        blank_images=p.blank_images,
        options=to_plain(read_options(task, p.options, where=f"finetune.{key}.options")),
    )
    task_model = task(model, inputs.tokenizer, info, labels=labels)
    weights = read_weights(start)
    for line in start_from(model, before, part_of(weights, "model"), start):
        print(line, file=sys.stderr)
    if before.task == p.task and (not task.has_labels or read_labels(start) == labels):
        load_strictly(task_model.head, part_of(weights, "head"), start)
    return task_model
