"""The sections of params.yaml about models and training: models, trainer, pretrain, finetune and augment.

Every model and run has a name and starts from a checkpoint, named by its path below checkpoints/: `initial/MODEL`
(fresh or imported weights), `pretrain/RUN` or `finetune/RUN`.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from vlp_models.common.packages import HUB, PREFIX, is_source
from vlp_models.params.schema import (
    Extensible,
    NonNegativeFloat,
    NonNegativeInt,
    OneOf,
    PositiveFloat,
    PositiveInt,
    Probability,
    Share,
    ShareBelowOne,
)

TextLength = Annotated[int, Field(ge=2)]  # room for [CLS] and [SEP]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")  # no dot: DVC reads `pretrain.a.b` as three keys
KINDS = ("initial", "pretrain", "finetune")


def split_start(start: str) -> tuple[str, str]:
    """Split `pretrain/tden` into (pretrain, tden); return ("", "") if it does not have this form."""
    # Without a slash, `name` is empty and does not match.
    kind, _, name = start.partition("/")
    return (kind, name) if kind in KINDS and NAME.fullmatch(name) else ("", "")


@dataclass(frozen=True, kw_only=True)
class VisionWarmupParams:
    """Warm-up of the vision encoder of a model that reads pixels: it is trained on the boxes of the train split before
    pretraining (contrib/detector/vision_warmup.py).

    steps       updates; 0: no warm-up, and no boxes are needed
    batch_size  images
    lr          peak learning rate of AdamW
    crop        smallest share of an image that a random crop keeps; 1: no cropping
    flip        mirror half of the images; set false if box labels say left or right
    """

    steps: NonNegativeInt = 0
    batch_size: PositiveInt = 32
    lr: PositiveFloat = 3.0e-3
    crop: Annotated[float, Field(gt=0, le=1)] = 0.5
    flip: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelParams:
    """A model architecture and its initial weights.

    family         one of `vlp_models.models.FAMILIES`
    config         checked against the family's config dataclass
    init           a checkpoint made by `vlp import-checkpoint`; of a family that reads the models of others, such as
                   dual_encoder, such a model: a folder, package:NAME, or hf://OWNER/NAME@COMMIT
    image_init     timm weights for the image side of a model that reads pixels: a file, package:NAME or timm:NAME
    text_init      weights of a BERT for the text side: a Hugging Face folder, or package:NAME; applied after `init`
    vision_warmup  trains the vision encoder on boxes first; not together with `init` or `image_init`
    seed           of whatever is freshly initialized
    """

    family: str
    config: dict[str, Any] = field(default_factory=dict)
    init: str = ""
    image_init: str = ""
    text_init: str = ""
    vision_warmup: VisionWarmupParams = field(default_factory=VisionWarmupParams)
    seed: NonNegativeInt = 1

    def __post_init__(self) -> None:
        if self.init and self.image_init:
            raise ValueError("set `init` (a whole checkpoint) or `image_init` (weights of the image side), not both")
        if is_source(self.init) and not self.init.startswith((HUB, PREFIX)):
            raise ValueError(
                f"`init: {self.init}` must be a checkpoint made by `vlp import-checkpoint`; weights of the image side "
                "(a file, package:NAME, timm:NAME) go to `image_init`"
            )
        if self.image_init and not is_source(self.image_init):
            raise ValueError(
                f"`image_init: {self.image_init}` must be a weights file, package:NAME or timm:NAME; a checkpoint made "
                "by `vlp import-checkpoint` goes to `init`"
            )


@dataclass(frozen=True, kw_only=True)
class StreamParams:
    """Where training reads the tars of data/shards. The index is always read from data/shards.

    address          a folder or `s3://bucket/prefix` with a copy of data/shards; empty: random access to data/shards
    block_mb         size of one request: a block of consecutive images
    window           blocks that are shuffled together
    buffer_mb        blocks that one process keeps in memory
    timeout_seconds  how long the store may be unavailable before training stops
    retry_seconds    wait before the first retry; doubled for each further one
    """

    address: str = ""
    block_mb: PositiveInt = 4
    window: PositiveInt = 4
    buffer_mb: PositiveInt = 1024
    timeout_seconds: NonNegativeFloat = 300.0
    retry_seconds: NonNegativeFloat = 0.5


@dataclass(frozen=True, kw_only=True)
class TrainerParams:
    """How training loops run; the same for pretraining and fine-tuning.

    launcher           local: this machine (Lightning). Otherwise an engine that starts the processes there, one
                       training at a time (`launchers`)
    devices            per node
    precision          auto: bf16-mixed on a GPU that supports it, else 32-true. bf16-where-native: also bf16-mixed on a
                       CPU with instructions for it (AMX, Arm's BF16, AMD's AVX512-BF16). A resumed run keeps its
                       precision
    reproducible       portable: equal bits on every x86-64 processor with AVX2; an operation has one thread. machine:
                       the instructions and threads that are fastest on this machine. A GPU computes other bits
    torch_threads      0: chosen by the size of the model (training/distributed.py); not with `reproducible: portable`
    strategy           auto: ddp with two processes or more. fsdp: weights, gradients and optimizer state are sharded
    activation_checkpointing  recompute the activations of transformer blocks in the backward pass: less memory, equal
                       numbers
    compile            compile transformer blocks with torch.compile: other float rounding, and other draws of dropout
    parallel_finetune  fine-tunings that `vlp run` trains at the same time on a CPU, each with its share of the cores
    """

    launcher: Annotated[str, OneOf("launchers", "local")] = "local"
    accelerator: Literal["auto", "cpu", "gpu", "cuda"] = "auto"
    devices: PositiveInt = 1
    precision: Literal["auto", "bf16-where-native", "32-true", "bf16-mixed"] = "auto"
    reproducible: Literal["machine", "portable"] = "machine"
    num_workers: NonNegativeInt = 0
    checkpoint_every_steps: PositiveInt = 100
    log_every_steps: PositiveInt = 10
    torch_threads: NonNegativeInt = 0
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    num_nodes: PositiveInt = 1
    activation_checkpointing: bool = False
    compile: bool = False
    parallel_finetune: PositiveInt = 1
    stream: StreamParams = field(default_factory=StreamParams)


Kind = Literal["adamw", "adam", "sgd", "muon"]


@dataclass(frozen=True, kw_only=True)
class GroupParams:
    """Optimizer settings of one part of the model; null: as in the run's `optimizer`.

    kind           muon applies to the matrices of the group; its other parameters use AdamW with the run's `lr`
    momentum       of sgd and muon; default: 0.9 and 0.95
    frozen         never updated, nor are its running statistics
    frozen_epochs  not updated in the first epochs
    """

    kind: Kind | None = None
    lr: NonNegativeFloat | None = None
    weight_decay: NonNegativeFloat | None = None
    momentum: ShareBelowOne | None = None
    frozen: bool = False
    frozen_epochs: NonNegativeInt = 0


@dataclass(frozen=True, kw_only=True)
class OptimizerParams:
    """
    muon_lr     learning rate of Muon for the matrices of the blocks; 0: AdamW for them as well
    muon_dtype  auto: bfloat16 if the hardware supports it
    decay_at    of `schedule: steps`: shares of all updates after which `lr` is multiplied by `decay_by`
    min_lr      `lr` does not fall below it after warm-up; other rates in proportion
    clip_norm   0: off
    ema_decay   0: off
    groups      name of a part of the model (training/optim.py) -> its own settings
    """

    lr: NonNegativeFloat
    kind: Literal["adamw", "adam"] = "adamw"
    muon_lr: NonNegativeFloat = 0.0
    muon_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    weight_decay: NonNegativeFloat = 0.01
    betas: list[ShareBelowOne] = field(default_factory=lambda: [0.9, 0.999])
    eps: PositiveFloat = 1e-8
    warmup_fraction: Share = 0.1
    schedule: Literal["linear", "cosine", "constant", "steps", "inverse_sqrt"] = "linear"
    decay_at: list[float] = field(default_factory=list)
    decay_by: Probability = 0.1
    min_lr: NonNegativeFloat = 0.0
    clip_norm: NonNegativeFloat = 1.0
    ema_decay: ShareBelowOne = 0.0
    groups: dict[str, GroupParams] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.schedule == "steps" and not self.decay_at:
            raise ValueError("`schedule: steps` needs `decay_at`, the shares of all updates after which `lr` falls")
        if self.schedule != "steps" and self.decay_at:
            raise ValueError(f"`decay_at` only applies to `schedule: steps`, not {self.schedule}; remove it")
        # The points in order: end of warm-up, each decay, end of training.
        points = [self.warmup_fraction, *self.decay_at, 1.0] if self.decay_at else []
        # Strictly increasing; an empty list, without `decay_at`, always is.
        if not all(before < after for before, after in itertools.pairwise(points)):
            raise ValueError(
                f"`decay_at: {self.decay_at}` must increase strictly between `warmup_fraction` "
                f"({self.warmup_fraction}) and 1: shares of all updates, not epochs"
            )
        if self.lr and self.min_lr > self.lr:
            raise ValueError(f"`min_lr: {self.min_lr}` is above `lr: {self.lr}`")
        if len(self.betas) != 2:
            raise ValueError(f"`betas: {self.betas}` must have two values")
        for name, group in self.groups.items():
            # A group without a kind uses Muon where the run does, else the run's own kind.
            kind = group.kind or ("muon" if self.muon_lr else self.kind)
            if group.momentum is not None and kind not in ("sgd", "muon"):
                raise ValueError(
                    f"`groups.{name}.momentum: {group.momentum}` only applies to sgd and muon, not {kind}; remove it, "
                    f"or set `groups.{name}.kind`"
                )


@dataclass(frozen=True, kw_only=True)
class SnapshotParams:
    """Select the final weights by validation: the average of the `keep` best checkpoints, or the best one.

    keep     0: off, the last weights are the result
    metric   of the validation (`val_loss`, `val_mlm_accuracy`, ...)
    mode     min: lower is better; max: higher is better
    average  false: the best checkpoint alone
    """

    keep: NonNegativeInt = 0
    metric: Annotated[str, Field(pattern="^val_")] = "val_loss"
    mode: Literal["min", "max"] = "min"
    average: bool = True


@dataclass(frozen=True, kw_only=True)
class TrainingParams:
    """Settings that pretraining and fine-tuning share.

    sources        dataset -> repeats per epoch; empty: every dataset once
    max_epochs     passes over the samples; not used with `max_steps`. 0: none, the start is the result
    max_steps      updates, over as many epochs as they take; 0: `max_epochs` decides
    cpu_processes  of a local training on a CPU, with `trainer.reproducible: portable` and `trainer.devices: 1`; each
                   computes a part of every batch. Another number gives other weights. Always one with batch norm
    """

    optimizer: OptimizerParams
    sources: dict[str, PositiveInt] = field(default_factory=dict)
    seed: NonNegativeInt = 1
    max_epochs: NonNegativeInt = 1
    max_steps: NonNegativeInt = 0
    batch_size: PositiveInt = 64
    accumulate: PositiveInt = 1
    max_text_len: TextLength = 32
    max_regions: PositiveInt = 16
    cpu_processes: PositiveInt = 1
    snapshots: SnapshotParams = field(default_factory=SnapshotParams)

    def __post_init__(self) -> None:
        if self.snapshots.keep and self.optimizer.ema_decay:
            raise ValueError(
                "`snapshots.keep` and `optimizer.ema_decay` would each replace the result; set one of them to 0"
            )


@dataclass(frozen=True, kw_only=True)
class ObjectiveParams:
    """`mlm: 1.0` stands for `mlm: {weight: 1.0}`.

    weight  of the loss
    share   of the samples (`mix: sample`), or of the updates, a whole number (`mix: alternate`). With `sample`, an
            objective that none of an update's samples drew has no weight in it, so small batches train rare ones less
    """

    weight: NonNegativeFloat = 1.0
    share: NonNegativeFloat = 1.0

    @staticmethod
    def from_shorthand(value: Any) -> dict[str, Any]:
        return {"weight": value}


@dataclass(frozen=True, kw_only=True)
class RecipeParams:
    """The objectives of a pretraining run and how they are mixed.

    mix            sum: every sample is used for every objective. sample: one objective is drawn for each sample.
                   alternate: one objective per update, in the model's order
    contrast_over  candidates of contrastive losses with accumulation: the micro-batch, or the whole update. The latter
                   adds a forward pass without gradients (Gao et al. 2021), and a further one of all micro-batches but
                   the first, to count the terms of each loss
    reuse_batch    of `mix: alternate`: a cycle of all objectives uses one batch, instead of a new one per update
    """

    objectives: dict[str, ObjectiveParams]
    mix: Literal["sum", "sample", "alternate"] = "sum"
    contrast_over: Literal["batch", "update"] = "batch"
    mask_probability: Share = 0.15
    reuse_batch: bool = False


@dataclass(frozen=True, kw_only=True)
class RampParams:
    """The share of masked words that scheduled sampling replaces: from `start` to `end` within `steps` updates."""

    start: Share = 1.0
    end: Share = 1.0
    steps: NonNegativeInt = 0


@dataclass(frozen=True, kw_only=True)
class ScheduledSamplingParams:
    """Two-pass scheduled sampling (TDEN, Li et al. 2021, equations 1 to 3).

    scheme  none: a single pass
    sample  multinomial: as in the paper; argmax: as in its code
    ramp    share of the masked words that are replaced; the paper: all
    """

    scheme: Literal["none", "a", "b", "c"] = "none"
    sample: Literal["multinomial", "argmax"] = "multinomial"
    ramp: RampParams = field(default_factory=RampParams)


@dataclass(frozen=True, kw_only=True)
class PretrainParams(TrainingParams):
    """One pretraining run.

    model               the architecture; `start` may have another config of the same family
    start               empty: initial/MODEL
    view                samples: image-caption pairs, texts alone, or images alone
    captions_per_image  of `view: images`: each image comes with this many of its captions, and images without any are
                        skipped; 0: no captions
    """

    model: str
    start: str = ""
    view: Literal["captions", "texts", "images"] = "captions"
    captions_per_image: NonNegativeInt = 0
    recipe: RecipeParams
    scheduled_sampling: ScheduledSamplingParams = field(default_factory=ScheduledSamplingParams)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.captions_per_image and self.view != "images":
            raise ValueError(f"`captions_per_image` only applies to `view: images`, not {self.view}")


@dataclass(frozen=True, kw_only=True)
class AugmentParams:
    """Captions that a model writes for training images (the stage `augment`).

    start     the captioner: finetune/RUN of the task captioning
    sources   datasets whose training images are described; empty: all
    captions  per image, at most
    samples   drawn per image; of the distinct new ones the `captions` most likely per token are kept
    top_p     nucleus sampling: share of the probability mass that each token is drawn from
    max_caption_len  tokens, including [SEP]
    """

    start: str
    sources: list[str] = field(default_factory=list)
    captions: PositiveInt = 2
    samples: PositiveInt = 5
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.9
    max_caption_len: PositiveInt = 24
    batch_size: PositiveInt = 64
    seed: NonNegativeInt = 1

    def __post_init__(self) -> None:
        if self.samples < self.captions:
            raise ValueError(f"`samples: {self.samples}` must be at least `captions: {self.captions}`")


@dataclass(frozen=True, kw_only=True)
class ExtraCaptionsParams:
    """Written captions that a fine-tuning uses in addition; `augment: NAME` stands for `augment: {captions: NAME}`.

    captions  name of an entry of `augment`; empty: none
    control   replace each written caption with one of the image's own: as many samples and updates, but no new text
    """

    captions: str = ""
    control: bool = False

    @staticmethod
    def from_shorthand(value: Any) -> dict[str, Any]:
        return {"captions": value}


@dataclass(frozen=True, kw_only=True)
class FinetuneParams(TrainingParams, Extensible):
    """One fine-tuning run, registered as one version.

    variant          shared by runs that differ in seed only, so that they are reported as one; empty: the run's name
    evaluate_on      datasets; empty: those it was trained on
    config           overrides the model config of `start` (a higher resolution, more dropout)
    texts_per_image  for tasks about one image: up to this many texts of an image are grouped into a batch, so that the
                     image is encoded once for all of them (most of SOHO's computation is the image side)
    blank_images     text-only baseline: every image is blanked
    augment          captions that a model wrote for the training images
    options          options of the task, its `TaskModel.options_class`
    """

    prefix: ClassVar[str] = "finetune.NAME."

    task: str
    start: str
    variant: str = ""
    evaluate_on: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    texts_per_image: PositiveInt = 1
    blank_images: bool = False
    augment: ExtraCaptionsParams = field(default_factory=ExtraCaptionsParams)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def adapters(self) -> Any:
        """Return the settings of the adapters that are trained instead of the weights (contrib/lora); None: of none."""
        lora = self.sections.get("lora")
        return lora if lora is not None and lora.rank else None

    @property
    def parts(self) -> int:
        """Return the number of parts that are trained separately and averaged (contrib/parts); 1: none."""
        return getattr(self.sections.get("parts"), "of", 1)
