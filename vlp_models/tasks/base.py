"""What every task is: a model, perhaps a head, and how samples become a batch, a loss and predictions."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vlp_models.data.batch import Batch, Regions
from vlp_models.data.collate import collate_samples
from vlp_models.data.dataset import View
from vlp_models.data.sample import Sample
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import CheckpointError, DataError, ParamsError
from vlp_models.models.checkpoint import build_from_config, load_strictly, read_answers, read_config, read_weights
from vlp_models.objectives.loss import Loss
from vlp_models.params import build


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """`finetune.<run>.options` of a task: a task with options extends this, every option with its default."""


class TaskModel(nn.Module, ABC):
    """A model with a task's head.

    task             the name in params.yaml
    view             of the shards: what it learns from
    prediction_view  of the shards: what it predicts for
    options_class    what `finetune.<run>.options` may hold
    options          these, from info["options"]; a checkpoint without them has the defaults
    info             its checkpoint's config.json (without `format`)
    blank_images     every image is replaced by nothing when a batch is made: the text-only control
    """

    task: ClassVar[str]
    view: ClassVar[View]
    prediction_view: ClassVar[View]
    options_class: ClassVar[type[TaskOptions]] = TaskOptions

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, info: Mapping[str, Any], *, answers: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.model = model
        self.head: nn.Module = nn.Identity()
        self.tokenizer = tokenizer
        self.info = dict(info)
        self.options: Any = read_options(type(self), info.get("options", {}))
        self.answers = tuple(answers)
        self.blank_images = bool(info.get("blank_images", False))

    @abstractmethod
    def loss(self, batch: Batch) -> Loss: ...

    @abstractmethod
    def predict(self, batch: Batch, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        """One record a sample, in the form of docs/contracts.md; `batch` is `samples`, collated, on the model's device.

        Puts the model into eval mode.
        """

    def finish(self, predictions: list[dict[str, Any]], samples: Sequence[Sample]) -> list[dict[str, Any]]:
        """What can only be said with every sample of a split at hand; called once, with all of `predict`'s records."""
        return predictions

    def targets(self, samples: Sequence[Sample]) -> Tensor | None:
        """What `loss` compares with; None where the text is the target, or where a sample hides its answer."""
        return None

    def collate(self, samples: Sequence[Sample]) -> Batch:
        batch = collate_samples(
            samples, self.tokenizer, max_text_len=self.info["max_text_len"], max_regions=self.info["max_regions"]
        )
        image = batch.image.blanked() if self.blank_images and isinstance(batch.image, Regions) else batch.image
        return dataclasses.replace(batch, image=image, targets=self.targets(samples))


def read_options(task: type[TaskModel], raw: Mapping[str, Any], where: str = "options") -> TaskOptions:
    """The task's options, defaults where `raw` says nothing; `where` is their place in params.yaml.

    Raises:
        ParamsError: an option the task does not have (names those it has), or a value it can't take.
    """
    known = [field.name for field in dataclasses.fields(task.options_class)]
    for name in raw:
        if name not in known:
            has = f"its options: {', '.join(known)}" if known else "it has no options"
            raise ParamsError(f"params.yaml: `{where}.{name}`: the task {task.task} has no such option; {has}")
    return build(task.options_class, dict(raw), where=where)


def need_targets(batch: Batch) -> Tensor:
    """
    Raises:
        DataError: an answer or label of the batch is hidden, so nothing can be learned from it.
    """
    if batch.targets is None:
        raise DataError(
            f"among {batch.sample_ids[0]} and the {len(batch) - 1} samples beside it are some whose answer is hidden; "
            "they can be predicted, not learned from: leave their dataset out of `sources`, or give its answers"
        )
    return batch.targets


def init_head(head: nn.Module, info: Mapping[str, Any]) -> None:
    """The linear layers of a new head as the model's own began: N(0, init_std), zero biases.

    A head at BERT's 0.02 on a small model that began at 0.08 passes so little gradient down that a true/false task
    stays at chance for 100,000 samples (docs/log-nlvr.md).
    """
    std = float(info["model_config"].get("init_std", 0.02))
    for layer in head.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)


def task_class(task: str) -> type[TaskModel]:
    """
    Raises:
        CheckpointError: no such task.
    """
    from vlp_models.tasks.captioning import Captioning
    from vlp_models.tasks.nlvr import NLVR
    from vlp_models.tasks.retrieval import Retrieval
    from vlp_models.tasks.vcr import VCR
    from vlp_models.tasks.vqa import VQA

    classes: dict[str, type[TaskModel]] = {c.task: c for c in (Captioning, VQA, NLVR, Retrieval, VCR)}
    if task not in classes:
        raise CheckpointError(f"unknown task {task!r}; known: {', '.join(classes)}")
    return classes[task]


def load_task_model(directory: Path, device: torch.device | str = "cpu") -> TaskModel:
    """A fine-tuned model, in eval mode.

    Raises:
        CheckpointError: damaged, of another architecture, or a pretrained model without a task.
    """
    directory = Path(directory)
    config = read_config(directory)
    if config["task"] is None:
        raise CheckpointError(f"{directory}: a pretrained model without a task's head; fine-tune it first")
    tokenizer = Tokenizer.load(directory)
    answers = read_answers(directory) if config["task"] == "vqa" else []
    model = build_from_config(config, tokenizer, directory)
    task_model = task_class(config["task"])(model, tokenizer, config, answers=answers)
    load_strictly(task_model, read_weights(directory), directory)
    return task_model.to(device).eval()
