"""The sections of params.yaml about running and judging: evaluate, tracking, promotion and flow."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from vlp_models.errors import ParamsError
from vlp_models.params.schema import (
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    OneOf,
    PositiveFloat,
    PositiveInt,
    Probability,
    Split,
    Word,
)


@dataclass(frozen=True, kw_only=True)
class TaskEvaluateParams:
    """Evaluation settings of one task; null: as in `evaluate`.

    blind_baseline  whether the task is scored a second time with every image blanked
    """

    batch_size: PositiveInt | None = None
    beam_size: PositiveInt | None = None
    length_penalty: NonNegativeFloat | None = None
    consensus_samples: NonNegativeInt | None = None
    consensus_temperature: Annotated[float, Field(ge=0.01, le=100)] | None = None
    consensus_neighbors: NonNegativeInt | None = None
    max_caption_len: PositiveInt | None = None
    blind_baseline: bool | None = None
    metrics: list[str] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings that are not null."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class EvaluateParams:
    """How fine-tuned models are evaluated, and how captions are generated.

    length_penalty        a beam's score is divided by length ** length_penalty; 0: as in the papers
    consensus_samples     captions sampled in addition to the beam's; the one most similar to the others is chosen
                          (metrics/consensus.py). 0: the beam's caption
    consensus_temperature  of the sampled captions
    consensus_neighbors   above 0: choose the caption most similar to the captions of this many similar training images
                          instead (tasks/caption_search.py)
    blind_baseline        tasks that are scored a second time with every image blanked
    metrics               names of metrics in `plugins.metrics`, in addition to those of each task
    bootstrap             resamples behind each 95% interval
    gallery               examples per task in the report
    tasks                 task -> its own settings, in place of those above
    """

    batch_size: PositiveInt = 100
    beam_size: PositiveInt = 3
    length_penalty: NonNegativeFloat = 0.0
    consensus_samples: NonNegativeInt = 0
    consensus_temperature: Annotated[float, Field(ge=0.01, le=100)] = 0.6
    consensus_neighbors: NonNegativeInt = 0
    max_caption_len: PositiveInt = 24
    splits: list[Split] = field(default_factory=lambda: ["val", "test"])
    blind_baseline: list[str] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)
    bootstrap: PositiveInt = 1000
    gallery: NonNegativeInt = 24
    tasks: dict[str, TaskEvaluateParams] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.consensus_neighbors and not self.consensus_samples:
            raise ValueError(
                "`consensus_neighbors` selects a sampled caption: set `consensus_samples`, too (20 is a good start)"
            )

    def of_task(self, task: str, search: Collection[str]) -> EvaluateParams:
        """Return what the evaluation of one task depends on: its own settings, and defaults in place of unused options.

        Args:
            search: the names of the search options that the task uses.

        Raises:
            ParamsError: an option that the task does not use, or settings that exclude each other.
        """
        settings, where = self.tasks.get(task, TaskEvaluateParams()).settings, f"params.yaml: `evaluate.tasks.{task}"
        # An option of another task's search would have no effect here, so it is an error.
        unused = [name for name in settings if name in SEARCH_OPTIONS and name not in search]
        if unused:
            uses = f"it uses {', '.join(search)}" if search else "it does not search"
            raise ParamsError(f"{where}.{unused[0]}`: {task} has no such option; {uses}")
        # The task's own value wins over the general list.
        blind = settings.pop("blind_baseline", task in self.blind_baseline)
        # Options that the task does not use keep their defaults, so a change of them makes its evaluation not stale.
        general = {name: getattr(self, name) for name in (*GENERAL_OPTIONS, *search)}
        try:
            # The constructor checks the combination of general and own settings.
            return EvaluateParams(**{**general, **settings, "blind_baseline": [task] if blind else []})
        except ValueError as error:
            raise ParamsError(f"{where}`: {error}") from None


SEARCH_OPTIONS = (  # a task names those that its outputs depend on (`TaskModel.search_options`)
    "beam_size",
    "length_penalty",
    "consensus_samples",
    "consensus_temperature",
    "consensus_neighbors",
    "max_caption_len",
)
GENERAL_OPTIONS = ("batch_size", "splits", "metrics", "bootstrap", "gallery")


@dataclass(frozen=True, kw_only=True)
class TrackingParams:
    # where curves are shown besides MLflow; each is a package of this name
    sinks: list[Annotated[str, OneOf("sinks")]] = field(default_factory=list)
    uri: str  # sqlite:///... or http(s)://...; empty: training is not logged to MLflow
    artifacts: str
    experiment: Annotated[str, Field(min_length=1)]
    model_prefix: Word
    metric: dict[str, str]  # task -> the metric that ranks versions
    # task -> the dataset to rank on; default: all datasets the runs share
    dataset: dict[str, str] = field(default_factory=dict)


# Defaults by metric for `seed_std` and `relevant_gain`. The standard deviations, rounded up, are those of twelve seeds
# of TDEN in benchmarks/results/study-tden.json, pooled over variants.
SEED_STD = {"CIDEr": 3.9, "accuracy": 1.25, "R@1": 1.6}
RELEVANT_GAIN = {"CIDEr": 10.0}
DEFAULT_SEED_STD, DEFAULT_RELEVANT_GAIN = 1.25, 3.0  # for every other metric


@dataclass(frozen=True, kw_only=True)
class GateParams:
    """The promotion gate of one task. Numbers are in the metric's unit (percentage points; CIDEr 1.2 is 120).

    metric         empty: the one of tracking.metric, else the task's own
    direction      which values are better; task: the task's own for its own metric, lower for median ranks, higher for
                   any other one
    confidence     1 less the error that a comparison may have at most; the error budget demands more (at the
                   defaults 98% of the first comparison, and more after each that is refused)
    relevant_gain  the smallest gain that should not be missed; None: `RELEVANT_GAIN`
    seed_std       standard deviation of the metric over seeds; None: `SEED_STD`; 0: estimate it from the runs alone
    beat_baselines  a first champion must be better than the task's simple baselines, such as a constant caption
    floors         slice -> worst value allowed there. `all` is the whole test set; other slices are written as
                   `question_type=how many`, `objects=6+`, `caption_length=1-6` (evaluation/test_set.py)
    """

    metric: str = ""
    direction: Literal["task", "higher", "lower"] = "task"
    min_gain: NonNegativeFloat = 0.0
    confidence: Annotated[float, Field(ge=0.5, lt=1)] = 0.95
    relevant_gain: NonNegativeFloat | None = None
    seed_std: NonNegativeFloat | None = None
    beat_baselines: bool = True
    floors: dict[str, FiniteFloat] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.relevant_gain is not None and self.relevant_gain <= self.min_gain:
            raise ValueError(f"`relevant_gain` {self.relevant_gain} must be above `min_gain` {self.min_gain}")

    def seed_std_of(self, metric: str) -> float:
        """Return the standard deviation of a metric over seeds."""
        return SEED_STD.get(metric, DEFAULT_SEED_STD) if self.seed_std is None else self.seed_std

    def relevant_gain_of(self, metric: str) -> float:
        """Return the smallest gain of a metric that should not be missed, always above `min_gain`."""
        # Added to `min_gain`, so that it is above it.
        default = self.min_gain + RELEVANT_GAIN.get(metric, DEFAULT_RELEVANT_GAIN)
        return default if self.relevant_gain is None else self.relevant_gain


@dataclass(frozen=True, kw_only=True)
class PromotionParams:
    """The gate between a registered version and the alias `champion`.

    ledger             path relative to the project
    split              the split a version is judged on
    select_on          the split to select the best of several versions on, if all were scored on it; else `split`
    error_budget       probability that any comparison of a task ever promotes a version that is no better, on any test
    spend              share of the error budget that the first comparison uses
    min_images         with fewer test images (NLVR: sentences) the gate is inconclusive
    allow_unvalidated  accept versions whose data has no recorded validation (a failed validation is always refused)
    tasks              a task without an entry has the defaults of `GateParams`
    """

    ledger: str = "promotions/ledger.jsonl"
    split: Split = "test"
    select_on: Split = "val"
    error_budget: Probability = 0.2
    spend: Probability = 0.1
    resamples: Annotated[int, Field(ge=200, le=1_000_000)] = 2000
    seed: NonNegativeInt = 1
    min_images: Annotated[int, Field(ge=2)] = 20
    allow_unvalidated: bool = False
    tasks: dict[str, GateParams] = field(default_factory=dict)

    def gate(self, task: str) -> GateParams:
        return self.tasks.get(task, GateParams())


PARTS = (
    "ingest",
    "drift",
    "validate",
    "features",
    "pretrain",
    "scheduled_sampling",
    "finetune",
    "evaluate",
    "register",
    "promote",
    "report",
    "bisect",
    "commit",
    "prune",
)


@dataclass(frozen=True, kw_only=True)
class FlowParams:
    """The unattended flow `retrain`.

    webhook          URL to notify; `env:NAME` reads it from the environment, so that this file holds no secret
    webhook_timeout  seconds for the whole call
    gpu_limit        Prefect global concurrency limit that a stale GPU stage takes a slot of; empty: none
    retry_delays     seconds before each retry
    wait_minutes     how long to wait for another run to release the workspace
    commit           commit and push what a run changed (`vlp commit`); needs contrib/commit
    timeout_hours    part -> hours; a part without an entry has no limit
    """

    webhook: str = ""
    webhook_timeout: Annotated[float, Field(gt=0, le=600)] = 5.0
    notify: Literal["all", "failures"] = "all"
    gpu_limit: str = "gpu"
    retry_delays: list[NonNegativeInt] = field(default_factory=lambda: [10, 30, 60])
    wait_minutes: NonNegativeFloat = 720.0
    commit: bool = False
    timeout_hours: dict[str, PositiveFloat] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Checked here, because an unknown part would silently have no limit.
        unknown = [name for name in self.timeout_hours if name not in PARTS]
        if unknown:
            raise ValueError(f"`timeout_hours.{unknown[0]}`: unknown part; known: {', '.join(PARTS)}")
        # Other schemes, such as file:, must not be opened.
        if self.webhook and not self.webhook.startswith(("env:", "http://", "https://")):
            raise ValueError("`webhook` must be env:NAME, or a URL with http:// or https://")
