"""finetune RUN: train a model on a task. A killed or stopped run resumes exactly."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

from vlp_models.common.plugins import import_target
from vlp_models.common.workspace import Workspace, require_output
from vlp_models.errors import ParamsError
from vlp_models.params import FinetuneParams, Params, to_plain
from vlp_models.params.schema import suggestion

if TYPE_CHECKING:
    from pathlib import Path

    from vlp_models.pipeline.training_job import Training, TrainingJob


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Write checkpoints/finetune/KEY, its curve and its training report.

    The architecture is that of the start, updated with `config`. With `parts`, the stage `part` has trained it.

    Raises:
        ParamsError: no such run, or an invalid value.
        MissingToolError: `lora` without peft.
        CheckpointError: the start is damaged, or was made from other features or with another vocabulary.
    """
    from vlp_models.data.shards import AUGMENTED
    from vlp_models.pipeline.training_job import TrainingJob
    from vlp_models.tasks import TASKS, task_class
    from vlp_models.tasks.base import read_options
    from vlp_models.training import ADAPTERS, PARTS

    if key not in params.finetune:
        raise ParamsError(f"params.yaml: no fine-tuning run `{key}`{suggestion(key, params.finetune)}")
    p = params.finetune[key]
    if p.parts > 1:
        import_target(PARTS["average"])(params, workspace, key)
        return
    # generated captions are a file that the run depends on
    generated = None
    if p.augment.captions:
        generated = require_output(workspace.augmented(p.augment.captions), f"augment@{p.augment.captions}")
    options = read_options(task_class(p.task), p.options, where=f"finetune.{key}.options")
    job = TrainingJob(
        params,
        workspace,
        f"finetune/{key}",
        view=task_class(p.task).training_view(options),
        settings={"finetune": {key: to_plain(p)}},
        files={"augment": generated} if generated else {},
        modules=[
            TASKS[p.task],
            *(ADAPTERS.values() if p.adapters else ()),
            *(AUGMENTED.values() if generated else ()),
        ],
    )
    job.run(partial(build_training, generated=generated))


def build_training(job: TrainingJob, *, generated: Path | None = None) -> Training:
    """Return the task's model with the weights of its start, including the head if task and labels are the same."""
    from vlp_models.data.shards import augmented
    from vlp_models.models import build_model
    from vlp_models.models.checkpoint import load_checkpoint_weights, part_of, read_labels, read_weights
    from vlp_models.pipeline.prepared_data import load_start
    from vlp_models.pipeline.training_job import Training
    from vlp_models.tasks import task_class
    from vlp_models.tasks.base import check_texts_per_image, read_options
    from vlp_models.training import ADAPTERS

    p, start, where = cast(FinetuneParams, job.section), job.start_info, job.name.replace("/", ".")
    task = task_class(p.task)
    # The labels of the data now; the head of the start is used below only if its labels are the same.
    labels = task.initial_labels(job.workspace.tokenizer)
    model = build_model(start.family, {**start.model_config, **p.config}, job.data.facts, where=f"{where}.config")
    # the description that the checkpoint carries; options with their defaults
    info = job.data.describe(
        model,
        family=start.family,
        name=start.name,
        max_text_len=p.max_text_len,
        max_regions=p.max_regions,
        task=p.task,
        blank_images=p.blank_images,
        options=to_plain(read_options(task, p.options, where=f"{where}.options")),
    )
    task_model = task(model, job.data.tokenizer, info, labels=labels)
    # The head continues from a fine-tuning on the same task with the same labels; otherwise it is new.
    weights = read_weights(job.start)
    load_start(model, start, part_of(weights, "model"), job.start)
    if start.task == p.task and (not task.has_labels or read_labels(job.start) == labels):
        load_checkpoint_weights(task_model.head, part_of(weights, "head"), job.start)
    if p.adapters:
        import_target(ADAPTERS["add"])(task_model, p.adapters, f"{where}.lora")
    check_texts_per_image(where, task, task_model.model, task_model.options, p.texts_per_image)
    augment = None
    if generated:
        augment = partial(augmented, directory=generated, shards=job.data.shards, control=p.augment.control)
    return Training(
        model=task_model,
        checkpoint=task_model,
        info=task_model.info,
        labels=task_model.labels,
        loss=task_model.training_loss(job.data.shards, p.sources, job.work),
        loaders=job.loaders(
            collate=task_model.collate,
            captioned=task_model.needs_captions(task_model.options),
            texts_per_image=p.texts_per_image,
            augment=augment,
            **task_model.reader.flags,
        ),
        tags={"task": p.task, "run": job.name.partition("/")[2], "model": start.name},
    )
