"""The interface of a downstream task: a pretrained model, an optional head, and what the pipeline reads of the task.

    training     view, options, targets, loss
    evaluation   predict, postprocess, score, write_official
    captioning   also configures how captions are searched for (`set_search` and its companions)
    gates, CLI and report read small class attributes: metric, headlines, title, request

How to add a task: see the list in `vlp_models/tasks/__init__.py`.
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
from vlp_models.data.batch import Batch
from vlp_models.data.inputs import InputReader, blanked
from vlp_models.data.sample import Sample
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.data.views import VIEWS
from vlp_models.errors import CheckpointError, DataError, ParamsError
from vlp_models.metrics.score import STATISTICS, Statistic
from vlp_models.models.checkpoint import (
    CheckpointInfo,
    build_from_config,
    load_checkpoint_weights,
    read_config,
    read_labels,
    read_weights,
)
from vlp_models.models.layers.linear import use_quantized_layers
from vlp_models.models.protocols import Embeds, Fuses, Generates, LocatesStates, ScoresPairs
from vlp_models.objectives.loss import Loss, WeightedLosses
from vlp_models.params import SEARCH_OPTIONS, EvaluateParams, build
from vlp_models.tasks import task_class
from vlp_models.tasks.scoring import EvalContext, Prediction, TaskScores

PROTOCOL_NAMES: dict[type, str] = {
    Fuses: "fuse image and text",
    LocatesStates: "locate its states in the image",
    Embeds: "embed images and texts separately",
    ScoresPairs: "score image-text pairs",
    Generates: "generate text",
}
TrainingLoss = Callable[..., WeightedLosses]  # (batch, *, update: int | None, generator); update None: validation


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Base of a task's `finetune.<run>.options`; every option has a default."""


@dataclass(frozen=True, kw_only=True)
class RequestFormat:
    """The input of one served prediction.

    text    what the text is (`question`); empty: the task takes no text
    images  number of images
    """

    text: str = ""
    images: int = 1


class TaskModel(nn.Module, ABC):
    """A model with a task's head.

    Class attributes, definition:
    task             name in `tasks.TASKS` and params.yaml
    title            heading in tables
    view             the data view trained on; `training_view` may choose another by the options
    prediction_view  the data view predicted for
    needs            protocols of models/protocols.py; a model that implements any one of them supports the task
    options_class    schema of `finetune.<run>.options`
    shares_images    adjacent samples may have an image in common, which is then encoded once;
                     `can_share_images` may decide by the options
    has_labels       the head chooses among labels, passed to `__init__` and saved with the checkpoint

    Class attributes, evaluation:
    id_key           key of the sample's id in a prediction
    metric, direction  the metric that two models are compared by, and which direction is better
    headlines        metrics shown first
    statistics       name -> function of per-item sums, for metrics kept item by item
    baselines_to_beat  names of the baselines that a first champion must be better than
    blind_fields     fields of a prediction that the blind baseline predicts again, as `<field>_blind`
    why_no_blind     the reason if there is no blind baseline
    search_options   options of `evaluate` that `set_search` uses; None: all, if the task has a `set_search`, else none
    request          input of a served prediction; None: the task is not served
    example          a call of an exported model (`VLP`), for its card and for errors

    Instance attributes:
    options          `info.options` as `options_class`
    info             config.json of the checkpoint
    labels           the classifier's classes (VQA's answers, entailment's labels)
    blank_images     every image is blanked in `collate`: a text-only control
    reader           collates samples the way the model reads them
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
    baselines_to_beat: ClassVar[tuple[str, ...]] = ()
    blind_fields: ClassVar[tuple[str, ...]] = ()
    why_no_blind: ClassVar[str] = ""
    search_options: ClassVar[tuple[str, ...] | None] = None
    request: ClassVar[RequestFormat | None] = None
    example: ClassVar[str] = 'predict("photo.jpg", "a text, if the task takes one")'

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, info: CheckpointInfo, *, labels: Sequence[str] = ()
    ) -> None:
        """
        Raises:
            ParamsError: the model does not support this task, or an option is invalid.
        """
        super().__init__()
        check_model(self.task, type(self), model, info.name)
        self.model = model
        self.head: nn.Module = nn.Identity()
        self.tokenizer = tokenizer
        self.info = info
        self.options: Any = read_options(type(self), info.options)
        self.labels = tuple(labels)
        self.blank_images = info.blank_images
        # What is read follows from the model's own declaration and from the lengths that it was trained with.
        self.reader = InputReader(
            model.inputs,  # type: ignore[arg-type]
            tokenizer,
            max_text_len=info.max_text_len,
            max_regions=info.max_regions,
        )

    # Training

    @classmethod
    def training_view(cls, options: Any) -> str:
        """Return the data view that training reads with these options."""
        return cls.view

    @classmethod
    def needs_captions(cls, options: Any) -> bool:
        """Return whether training skips images without a reference caption."""
        return False

    @classmethod
    def can_share_images(cls, model: type[nn.Module] | nn.Module, options: Any) -> bool:
        """Return whether several texts of a batch may refer to one encoded image."""
        return cls.shares_images

    @classmethod
    def initial_labels(cls, tokenizer: Path) -> list[str]:
        """Return the labels of a new head; `tokenizer` is the folder data/tokenizer."""
        return []

    @abstractmethod
    def loss(self, batch: Batch, *, generator: torch.Generator) -> Loss:
        """Return the loss of a batch; every random draw comes from `generator`."""

    def training_loss(self, shards: Path, sources: Mapping[str, int], work: Path) -> TrainingLoss:
        """Return the function the training loop calls.

        Args:
            shards, sources: the training data.
            work: a folder for files computed once per run.
        """
        return lambda batch, *, update, generator: WeightedLosses.of(self.loss(batch, generator=generator))

    def targets(self, samples: Sequence[Sample]) -> Tensor | None:
        """Return what `loss` compares with; None if the text is the target, or a sample's answer is hidden."""
        return None

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Collate samples with their targets; images are blanked in a text-only control."""
        batch = self.read(samples)
        return dataclasses.replace(blanked(batch) if self.blank_images else batch, targets=self.targets(samples))

    def read(self, samples: Sequence[Sample]) -> Batch:
        """Collate samples the way the model reads them, without targets."""
        return self.reader.collate(samples, share_images=self.shares_images)

    # Prediction

    @abstractmethod
    def predict(self, batch: Batch, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        """Return one record per sample (docs/reference/checkpoints.md); `batch` is `samples`, on the model's device.

        Puts the model into eval mode.
        """

    def postprocess(self, predictions: list[dict[str, Any]], samples: Sequence[Sample]) -> list[dict[str, Any]]:
        """Complete the predictions of a whole split, called once; retrieval ranks all of them here."""
        return predictions

    @classmethod
    def format_prediction(cls, prediction: Prediction) -> list[str]:
        """Return the lines that the terminal shows of a prediction."""
        return [", ".join(f"{name} {value}" for name, value in prediction.items() if not name.endswith("_id"))]

    # Search: how outputs are found (beam, consensus, shortlist). A version is served with the search of its scores.

    @classmethod
    def evaluate_settings(cls, evaluate: EvaluateParams, task: str) -> EvaluateParams:
        """Return what the evaluation of this task, which params.yaml names `task`, depends on.

        Raises:
            ParamsError: `evaluate.tasks.TASK` has an option that the task does not use.
        """
        # A task that overrides `set_search` has a search, and uses every option unless it names some.
        searches = cls.set_search is not TaskModel.set_search
        options = cls.search_options if cls.search_options is not None else SEARCH_OPTIONS if searches else ()
        return evaluate.of_task(task, options)

    @classmethod
    def check_search(cls, settings: EvaluateParams, shards: Path, sources: Mapping[str, int]) -> None:
        """Check before training that the search can index the training data.

        Raises:
            DataError: it cannot.
        """

    def set_search(self, settings: EvaluateParams) -> None:
        """Configure the search from `evaluate` of params.yaml."""

    def prepare_search(self, shards: Path, sources: Mapping[str, int], saved: Path | None = None) -> None:
        """Build the index that the search reads from the training data, or load the one saved in `saved`."""

    def save_search(self, directory: Path) -> None:
        """Save settings and index for `load_search`."""

    def load_search(self, directory: Path) -> None:
        """Load a search that `save_search` wrote.

        Raises:
            CheckpointError: it is damaged.
        """

    @property
    def search(self) -> str:
        """Description of the search, empty if the task has none; scores of different searches are not comparable."""
        return ""

    # Evaluation

    @abstractmethod
    def score(self, predictions: Sequence[Prediction], samples: Sequence[Sample], context: EvalContext) -> TaskScores:
        """Return the scores of one dataset and split, with their baselines."""

    def write_official(
        self, predictions: Sequence[Prediction], context: EvalContext, split: str, directory: Path
    ) -> Path | None:
        """Write the result file that the dataset's own evaluation reads; None if there is no such format."""
        return None

    @classmethod
    def can_score(cls, sample: Sample) -> bool:
        """Return whether the sample has references; evaluation skips those without."""
        return True

    @classmethod
    def slices(cls, sample: Sample) -> list[str]:
        """Return the slices a sample belongs to, besides those common to all tasks (evaluation/test_set.py)."""
        # The columns that the view marks as slices; an empty value makes no slice.
        named = (column.name for column in VIEWS[cls.prediction_view].indexed if column.slices)
        return [f"{name}={sample[name]}" for name in named if sample[name]]


def load_task_model(directory: Path, device: torch.device | str = "cpu") -> TaskModel:
    """Load a fine-tuned model in eval mode.

    Raises:
        CheckpointError: damaged, of another architecture, or a pretrained model without a task.
    """
    directory = Path(directory)
    info = read_config(directory)
    if info.task is None:
        raise CheckpointError(f"{directory}: a pretrained model without a task head; fine-tune it first")
    try:
        task = task_class(info.task)
    # The checkpoint is at fault here, not params.yaml.
    except ParamsError as error:
        raise CheckpointError(f"{directory}: {error}") from None
    tokenizer = Tokenizer.load(directory)
    labels = read_labels(directory) if task.has_labels else []
    model = build_from_config(info, tokenizer, directory)
    task_model = task(model, tokenizer, info, labels=labels)
    # Layers with weights of 8 bits are of another class, so they are replaced before the weights are loaded.
    weights = read_weights(directory)
    use_quantized_layers(task_model, weights)
    load_checkpoint_weights(task_model, weights, directory)
    return task_model.to(device).eval()


def read_options(task: type[TaskModel], raw: Mapping[str, Any], where: str = "options") -> TaskOptions:
    """Parse a task's options, with defaults for missing ones; `where` is their key in params.yaml.

    Raises:
        ParamsError: an unknown option (names the known ones) or an invalid value.
    """
    # `build` refuses unknown keys as well; here the error names the task and its options.
    option_names = [field.name for field in dataclasses.fields(task.options_class)]
    for name in raw:
        if name not in option_names:
            options = f"its options: {', '.join(option_names)}" if option_names else "it has no options"
            raise ParamsError(f"params.yaml: `{where}.{name}`: unknown option of the task {task.task}; {options}")
    return build(task.options_class, dict(raw), where=where)


def implements(model: type[nn.Module] | nn.Module, protocol: type) -> bool:
    """Return whether a model, or a model class, has every method of a protocol."""
    # Not isinstance: before training it is the class that is checked, without its instances' attributes.
    methods = [name for name in dir(protocol) if not name.startswith("_") and callable(getattr(protocol, name))]
    return all(callable(getattr(model, name, None)) for name in methods)


def supports_task(model: type[nn.Module] | nn.Module, task: type[TaskModel]) -> bool:
    """Return whether a model, or a model class, implements one of the protocols the task needs."""
    return any(implements(model, protocol) for protocol in task.needs)


def check_model(name: str, task: type[TaskModel], model: type[nn.Module] | nn.Module, model_name: str) -> None:
    """Check that a model supports a task; a model class is enough, so this runs before anything is computed.

    Raises:
        ParamsError: it does not.
    """
    if not supports_task(model, task):
        needed = " or ".join(PROTOCOL_NAMES.get(protocol, protocol.__name__) for protocol in task.needs)
        raise ParamsError(f"the model `{model_name}` cannot {needed}, so it does not support the task {name}")


def check_texts_per_image(
    where: str, task: type[TaskModel], model: type[nn.Module] | nn.Module, options: Any, texts_per_image: int
) -> None:
    """Check that texts of one image can share it in a batch; `where` is the run's key in params.yaml.

    Raises:
        ParamsError: `texts_per_image` is above 1, but the task reads one image per text.
    """
    if texts_per_image > 1 and not task.can_share_images(model, options):
        raise ParamsError(
            f"params.yaml: `{where}.texts_per_image: {texts_per_image}`: with these options {task.task} reads one "
            "image per text; remove it"
        )


def require_targets(batch: Batch) -> Tensor:
    """Return the batch's targets.

    Raises:
        DataError: an answer or label in the batch is hidden.
    """
    if batch.targets is None:
        raise DataError(
            f"{batch.sample_ids[0]} or one of the {len(batch) - 1} other samples in its batch has a hidden answer, so "
            "it can be predicted but not trained on: remove its dataset from `sources`, or provide its answers"
        )
    return batch.targets


def sum_losses(*losses: Loss) -> Loss:
    """Add losses over the same items."""
    parts = {name: part for loss in losses for name, part in loss.parts.items()}
    return Loss(sum=torch.stack([loss.sum for loss in losses]).sum(), count=losses[0].count, parts=parts)


def init_head(head: nn.Module, info: CheckpointInfo) -> None:
    """Initialize the linear layers of a new head like the model's own: N(0, init_std), zero biases.

    At BERT's 0.02, the head of a small model initialized at 0.08 passes so little gradient that a true/false task stays
    at chance for 100,000 samples.
    """
    std = float(info.model_config.get("init_std", 0.02))
    for layer in head.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)


def read_answers(tokenizer: Path) -> list[str]:
    """Read the frequent answers that the tokenizer stage collected."""
    answers: list[str] = read_json(tokenizer / "answers.json")
    return answers
