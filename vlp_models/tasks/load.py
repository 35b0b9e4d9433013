"""A fine-tuned model from its checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import CheckpointError, ParamsError
from vlp_models.models.checkpoint import (
    build_from_config,
    load_strictly,
    read_config,
    read_labels,
    read_weights,
)
from vlp_models.tasks import task_class
from vlp_models.tasks.base import TaskModel


def load_task_model(directory: Path, device: torch.device | str = "cpu") -> TaskModel:
    """A fine-tuned model, in eval mode.

    Raises:
        CheckpointError: damaged, of another architecture, or a pretrained model without a task.
    """
    directory = Path(directory)
    info = read_config(directory)
    if info.task is None:
        raise CheckpointError(f"{directory}: a pretrained model without a task's head; fine-tune it first")
    try:
        task = task_class(info.task)
    except ParamsError as error:
        raise CheckpointError(f"{directory}: {error}") from None
    tokenizer = Tokenizer.load(directory)
    labels = read_labels(directory) if task.has_labels else []
    model = build_from_config(info, tokenizer, directory)
    task_model = task(model, tokenizer, info, labels=labels)
    load_strictly(task_model, read_weights(directory), directory)
    return task_model.to(device).eval()
