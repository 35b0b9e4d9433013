"""The sections of params.yaml that make models: which there are, how they are pretrained and fine-tuned.

Every model and run has a name, and starts from a checkpoint that is named by where it lies below checkpoints/:
`initial/MODEL` (fresh or imported weights), `pretrain/RUN` or `finetune/RUN`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from vlp_models.common.packages import is_source
from vlp_models.params.augment import AugmentedParams
from vlp_models.params.optimizer import OptimizerParams
from vlp_models.params.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from vlp_models.params.recipe import RecipeParams, ScheduledSamplingParams
from vlp_models.params.snapshots import SnapshotParams

TextLength = Annotated[int, Field(ge=2)]  # holds [CLS] and [SEP]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
KINDS = ("initial", "pretrain", "finetune")


@dataclass(frozen=True, kw_only=True)
class VisionWarmupParams:
    """Warm-up of the vision encoder of a model that reads pixels: it is trained on the boxes of the train split before
    pretraining (vision/vision_warmup.py).

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
    init           a checkpoint made by `vlp import-checkpoint`
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
        if is_source(self.init):
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
    """How a training reads the tars of data/shards; the index is read in data/shards in any case.

    address    a folder or `s3://bucket/prefix` that holds a copy of data/shards; empty: data/shards, where every sample
               is looked up by itself
    block_mb   one request's share of a tar, of neighbouring images
    window     blocks that are mixed with each other
    buffer_mb  of blocks that a process holds
    timeout_seconds  seconds that the store may be away
    retry_seconds  seconds before it is asked a second time; doubled each time
    """

    address: str = ""
    block_mb: PositiveInt = 4
    window: PositiveInt = 4
    buffer_mb: PositiveInt = 1024
    timeout_seconds: NonNegativeFloat = 300.0
    retry_seconds: NonNegativeFloat = 0.5


@dataclass(frozen=True, kw_only=True)
class TrainerParams:
    """How to run a training loop; the same for pretraining and fine-tuning.

    precision  auto: bf16-mixed on a GPU that computes in it, else 32-true. bf16-where-native: likewise, and bf16-mixed
               on a CPU that multiplies bfloat16 itself (AMX, AVX512-BF16). A run goes on in what it began with
    """

    accelerator: str = "auto"
    devices: PositiveInt = 1
    precision: Literal["auto", "bf16-where-native", "32-true", "bf16-mixed"] = "auto"
    num_workers: NonNegativeInt = 0
    checkpoint_every_steps: PositiveInt = 100
    log_every_steps: PositiveInt = 10
    torch_threads: NonNegativeInt = 0  # 0: as the model's size has it (training/distributed.py)
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"  # auto: ddp from two processes on
    num_nodes: PositiveInt = 1  # `devices` is per node
    parallel_finetune: PositiveInt = (
        1  # fine-tunings that `vlp run` trains beside each other, each with its share of the CPUs
    )
    stream: StreamParams = field(default_factory=StreamParams)


@dataclass(frozen=True, kw_only=True)
class TrainingParams:
    """What every training needs to know.

    sources  dataset -> how often an epoch has its samples; empty: every dataset once
    max_steps  updates; 0: as many as the epochs hold
    """

    optimizer: OptimizerParams
    sources: dict[str, PositiveInt] = field(default_factory=dict)
    seed: NonNegativeInt = 1
    max_epochs: PositiveInt = 1
    max_steps: NonNegativeInt = 0
    batch_size: PositiveInt = 64
    accumulate: PositiveInt = 1
    max_text_len: TextLength = 32
    max_regions: PositiveInt = 16
    snapshots: SnapshotParams = field(default_factory=SnapshotParams)


@dataclass(frozen=True, kw_only=True)
class PretrainParams(TrainingParams):
    """One pretraining.

    model   whose architecture it trains; `start` may be of another config of the same family
    start   empty: initial/MODEL
    view    what it learns from: image-caption pairs, texts alone, or images alone
    captions_per_image  of the view `images`: each comes with so many of its captions, and without one it is left out;
            0: without any
    """

    model: str
    start: str = ""
    view: Literal["captions", "texts", "images"] = "captions"
    captions_per_image: NonNegativeInt = 0
    recipe: RecipeParams
    scheduled_sampling: ScheduledSamplingParams = field(default_factory=ScheduledSamplingParams)

    def __post_init__(self) -> None:
        if self.captions_per_image and self.view != "images":
            raise ValueError(f"`captions_per_image` is for `view: images`, not {self.view}")


@dataclass(frozen=True, kw_only=True)
class FinetuneParams(TrainingParams):
    """One fine-tuning, and later one version in the registry.

    variant       shared by runs that differ in seed only, so that they are reported as one; empty: the run's own name
    evaluate_on   datasets; empty: those it learned from
    config        laid over the model config of `start` (a higher resolution, more dropout)
    texts_per_image  at most so many texts about one image are put beside each other in an epoch: the model encodes it
                  once for them (most of SOHO's work is the image's side). For tasks that ask about one image
    blank_images  the text-only control: it sees no image
    augment       captions that a model wrote of its training images
    options       the task's own: `TaskModel.options_class`
    """

    task: str
    start: str
    variant: str = ""
    evaluate_on: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    texts_per_image: PositiveInt = 1
    blank_images: bool = False
    augment: AugmentedParams = field(default_factory=AugmentedParams)
    options: dict[str, Any] = field(default_factory=dict)


def split_start(start: str) -> tuple[str, str]:
    """`pretrain/tden` -> (pretrain, tden); ("", "") if it is not of this form."""
    kind, _, name = start.partition("/")
    return (kind, name) if kind in KINDS and NAME.fullmatch(name) else ("", "")
