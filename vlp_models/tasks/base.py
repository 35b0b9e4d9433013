"""What every task is: a model, perhaps a head, and all that must be known of the task anywhere else.

Training asks for its view, its options and its loss; evaluation for predictions, scores and official files; the report
for its title, headline figures and gallery; serving and the command line for its words. So a new task is one file.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from vlp_models.common.io import read_json
from vlp_models.common.workspace import Workspace
from vlp_models.data.batch import Batch
from vlp_models.data.inputs import InputReader, blanked
from vlp_models.data.sample import Sample
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.data.views import VIEWS
from vlp_models.errors import DataError, ParamsError
from vlp_models.metrics.items import STATISTICS
from vlp_models.metrics.score import Statistic
from vlp_models.models.info import CheckpointInfo
from vlp_models.models.protocols import Embeds, Fuses, Generates, ScoresPairs
from vlp_models.objectives.loss import Loss
from vlp_models.params import EvaluateParams, build
from vlp_models.tasks.gallery import Card, Gallery, PictureSource
from vlp_models.tasks.scoring import Place, Prediction, Scored

ABILITIES: dict[type, str] = {
    Fuses: "fuse image and text",
    Embeds: "embed images and texts apart",
    ScoresPairs: "score pairs of image and text",
    Generates: "generate text",
}
TrainingLoss = Callable[..., Loss]  # (batch, *, update: int | None, generator); update None: validation


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """`finetune.<run>.options` of a task: a task with options extends this, every option with its default."""


@dataclass(frozen=True, kw_only=True)
class Words:
    """How a task is spoken of on the command line.

    verb    of its command; empty: `vlp predict TASK` alone
    text    what is asked beside the image (`question`); empty: nothing is
    images  how many of them it looks at
    """

    verb: str = ""
    text: str = ""
    images: int = 1


class TaskModel(nn.Module, ABC):
    """A model with a task's head.

    What a task is:
    task             its name in `tasks.TASKS` and params.yaml
    title            as tables head it
    view             of the data: what it learns from; `learning_view` may choose another by the options
    prediction_view  of the data: what it predicts for
    needs            protocols of models/protocols.py: a model that has one of them can do the task
    options_class    what `finetune.<run>.options` may hold
    shares_images    samples beside each other may have one image in common, which the model then encodes once;
                     `can_share_images` may choose by the options
    has_labels       its head chooses among labels, given to `__init__` and kept with the checkpoint

    What is known of its figures:
    id_key           of a prediction: the key of its sample's id
    metric, direction  the one figure that says which of two models is better, and which way
    headlines        the figures to see first
    statistics       name -> what makes a metric of per-item sums, for metrics whose per-item sums are kept
    blanked_fields   of a prediction: what is asked once more with the image blanked, and stands under `<field>_blank`
    why_not_blanked  why there is no such control; empty where there is one

    How it is shown:
    words            on the command line; None: it is not served
    gallery          of the report; None: it has none

    An instance has
    options          `info.options` as `options_class`
    info             what its checkpoint says of itself
    labels           what the rows of a classifier stand for (VQA's answers, entailment's labels)
    blank_images     every image is replaced by nothing when a batch is made: the text-only control
    reader           makes batches of samples, as the model reads them
    """

    task: ClassVar[str]
    title: ClassVar[str]
    view: ClassVar[str]
    prediction_view: ClassVar[str]
    needs: ClassVar[tuple[type, ...]]
    options_class: ClassVar[type[TaskOptions]] = TaskOptions
    shares_images: ClassVar[bool] = False
    has_labels: ClassVar[bool] = False
    id_key: ClassVar[str]
    metric: ClassVar[str]
    direction: ClassVar[Literal["higher", "lower"]] = "higher"
    headlines: ClassVar[tuple[str, ...]] = ()
    statistics: ClassVar[Mapping[str, Statistic]] = STATISTICS
    blanked_fields: ClassVar[tuple[str, ...]] = ()
    why_not_blanked: ClassVar[str] = ""
    words: ClassVar[Words | None] = None
    gallery: ClassVar[Gallery | None] = None

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, info: CheckpointInfo, *, labels: Sequence[str] = ()
    ) -> None:
        """
        Raises:
            ParamsError: the model can't do this task, or an option is wrong.
        """
        super().__init__()
        check_can(self.task, type(self), model, info.name)
        self.model = model
        self.head: nn.Module = nn.Identity()
        self.tokenizer = tokenizer
        self.info = info
        self.options: Any = read_options(type(self), info.options)
        self.labels = tuple(labels)
        self.blank_images = info.blank_images
        self.reader = InputReader(
            model.inputs,  # type: ignore[arg-type]
            tokenizer,
            max_text_len=info.max_text_len,
            max_regions=info.max_regions,
        )

    # Learning

    @classmethod
    def learning_view(cls, options: Any) -> str:
        return cls.view

    @classmethod
    def captioned_only(cls, options: Any) -> bool:
        """Whether images without a reference caption are of no use for learning."""
        return False

    @classmethod
    def can_share_images(cls, model: type[nn.Module] | nn.Module, options: Any) -> bool:
        return cls.shares_images

    @classmethod
    def labels_for(cls, tokenizer: Path) -> list[str]:
        """What a fresh head of a task with labels chooses from; `tokenizer` is the folder of data/tokenizer."""
        return []

    @abstractmethod
    def loss(self, batch: Batch, *, generator: torch.Generator) -> Loss:
        """generator: what the loss draws at random, it draws from this."""

    def training_loss(self, shards: Path, sources: Mapping[str, int], work: Path) -> TrainingLoss:
        """What the training loop calls. shards, sources: what is learnt from; work: a folder for what is worked out."""
        return lambda batch, *, update, generator: self.loss(batch, generator=generator)

    def targets(self, samples: Sequence[Sample]) -> Tensor | None:
        """What `loss` compares with; None where the text is the target, or where a sample hides its answer."""
        return None

    def collate(self, samples: Sequence[Sample]) -> Batch:
        batch = self.read(samples)
        return dataclasses.replace(blanked(batch) if self.blank_images else batch, targets=self.targets(samples))

    def read(self, samples: Sequence[Sample]) -> Batch:
        """The batch without its targets, as the model reads it."""
        return self.reader.collate(samples, share_images=self.shares_images)

    # Predicting

    @abstractmethod
    def predict(self, batch: Batch, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        """One record a sample, in the form of docs/contracts.md; `batch` is `samples`, collated, on the model's device.

        Puts the model into eval mode.
        """

    def finish(self, predictions: list[dict[str, Any]], samples: Sequence[Sample]) -> list[dict[str, Any]]:
        """What can only be said with every sample of a split at hand; called once, with all of `predict`'s records."""
        return predictions

    @classmethod
    def check_search(cls, settings: EvaluateParams, shards: Path, sources: Mapping[str, int]) -> None:
        """Whether a search can look up what is learnt from; asked before training.

        Raises:
            DataError: it can't.
        """

    def set_search(self, settings: EvaluateParams) -> None:
        """Takes over how answers are searched for, where they are searched for."""

    def prepare_search(self, shards: Path, sources: Mapping[str, int], kept: Path | None = None) -> None:
        """Makes what the search looks things up in, of what the run learnt from; or takes it from `kept`, if
        `save_search` left it there."""

    def save_search(self, directory: Path) -> None:
        """The search, for `load_search`: what a version is scored by is what it is served with."""

    def load_search(self, directory: Path) -> None:
        """Takes over a search that `save_search` left.

        Raises:
            CheckpointError: it is damaged.
        """

    @property
    def search(self) -> str:
        """In words; figures of another search are not to be compared. Empty where nothing is searched for."""
        return ""

    @classmethod
    def spoken(cls, prediction: Prediction) -> list[str]:
        """A prediction as lines on the terminal."""
        return [", ".join(f"{name} {value}" for name, value in prediction.items() if not name.endswith("_id"))]

    # Judging

    @abstractmethod
    def score(self, predictions: Sequence[Prediction], samples: Sequence[Sample], place: Place) -> Scored:
        """The scores of one dataset and split, and what to compare them with."""

    def write_official(
        self, predictions: Sequence[Prediction], place: Place, split: str, directory: Path
    ) -> Path | None:
        """The file that the dataset's own evaluation takes; None where it has none."""
        return None

    @classmethod
    def can_score(cls, sample: Sample) -> bool:
        """Whether there is anything to compare a prediction with; others are left out of an evaluation."""
        return True

    @classmethod
    def slices(cls, sample: Sample) -> list[str]:
        """The slices of a test set that a sample belongs to besides those of every task (evaluation/slices.py)."""
        named = (column.name for column in VIEWS[cls.prediction_view].indexed if column.slices)
        return [f"{name}={sample[name]}" for name in named if sample[name]]

    @classmethod
    def cards(cls, workspace: Workspace, pictures: PictureSource, predictions: Sequence[Prediction]) -> list[Card]:
        """The gallery's entries for some predictions."""
        return []


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


def can(model: type[nn.Module] | nn.Module, protocol: type) -> bool:
    """Whether a model, or a class of models, has every method of a protocol."""
    methods = [name for name in dir(protocol) if not name.startswith("_") and callable(getattr(protocol, name))]
    return all(callable(getattr(model, name, None)) for name in methods)


def can_do(task: type[TaskModel], model: type[nn.Module] | nn.Module) -> bool:
    return any(can(model, protocol) for protocol in task.needs)


def check_can(name: str, task: type[TaskModel], model: type[nn.Module] | nn.Module, model_name: str) -> None:
    """To be asked before anything is computed: a class of models will do.

    Raises:
        ParamsError: the model can't do this task.
    """
    if not can_do(task, model):
        abilities = " or ".join(ABILITIES.get(protocol, protocol.__name__) for protocol in task.needs)
        raise ParamsError(f"the model `{model_name}` can't {abilities}, so it can't do the task {name}")


def check_texts_per_image(
    where: str, task: type[TaskModel], model: type[nn.Module] | nn.Module, options: Any, texts_per_image: int
) -> None:
    """
    Args:
        where: the run, as params.yaml names it.

    Raises:
        ParamsError: texts about one image are to be put beside each other, but each of them gets an image of its own.
    """
    if texts_per_image > 1 and not task.can_share_images(model, options):
        raise ParamsError(
            f"params.yaml: `{where}.texts_per_image: {texts_per_image}`: {task.task}, with these options, reads an "
            "image for each text; leave it out"
        )


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


def joined(*losses: Loss) -> Loss:
    """The sum of losses over the same items, as one."""
    parts = {name: part for loss in losses for name, part in loss.parts.items()}
    return Loss(sum=torch.stack([loss.sum for loss in losses]).sum(), count=losses[0].count, parts=parts)


def init_head(head: nn.Module, info: CheckpointInfo) -> None:
    """The linear layers of a new head as the model's own began: N(0, init_std), zero biases.

    A head at BERT's 0.02 on a small model that began at 0.08 passes so little gradient down that a true/false task
    stays at chance for 100,000 samples (docs/log-nlvr.md).
    """
    std = float(info.model_config.get("init_std", 0.02))
    for layer in head.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)


def answer_vocabulary(tokenizer: Path) -> list[str]:
    """The answers that the tokenizer stage found frequent enough."""
    found: list[str] = read_json(tokenizer / "answers.json")
    return found
