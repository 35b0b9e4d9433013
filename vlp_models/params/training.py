"""The sections of params.yaml that make models: pretraining, scheduled sampling, fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from vlp_models.params.optimizer import OptimizerParams
from vlp_models.params.recipe import RampParams


@dataclass(frozen=True, kw_only=True)
class ModelParams:
    name: Literal["tden"]
    config: dict[str, Any]  # checked against the model's own config dataclass


@dataclass(frozen=True, kw_only=True)
class TrainerParams:
    """How to run a training loop; the same for pretraining and fine-tuning."""

    accelerator: str
    devices: int
    precision: Literal["auto", "32-true", "bf16-mixed"]
    num_workers: int
    checkpoint_every_steps: int
    log_every_steps: int
    torch_threads: int  # 0: leave it to torch
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"  # auto: ddp from two processes on
    num_nodes: int = 1  # `devices` is per node


@dataclass(frozen=True, kw_only=True)
class PairsParams:
    """What every pretraining on image-text pairs needs to know."""

    seed: int
    sources: dict[str, int]  # dataset -> how often its pairs are seen per epoch; empty: every dataset once
    max_epochs: int
    max_steps: int  # 0: as many as the epochs hold
    batch_size: int
    accumulate: int
    max_text_len: int
    max_regions: int
    objectives: dict[str, float]  # name -> weight (sum), probability (draw) or share of turns
    mask_probability: float
    optimizer: OptimizerParams


@dataclass(frozen=True, kw_only=True)
class PretrainParams(PairsParams):
    mix: Literal["sum", "draw", "turns"]
    init: str = ""  # a checkpoint to start from, made by `vlp import-checkpoint`; empty: fresh weights


@dataclass(frozen=True, kw_only=True)
class ScheduledSamplingParams(PairsParams):
    scheme: Literal["none", "a", "b", "c"]  # none: hand checkpoints/pretrain on as it is
    init: Literal["pretrain", "scratch"]  # scratch: two passes from the start, as in the paper
    sample: Literal["multinomial", "argmax"]
    ramp: RampParams = field(default_factory=RampParams)


@dataclass(frozen=True, kw_only=True)
class FinetuneParams:
    design: str = ""  # under which runs with different seeds are one; empty: the run's own name
    task: str  # vlp_models/tasks/__init__.py
    init: str  # `pretrain`, `scheduled_sampling` or the name of another fine-tuning run
    sources: dict[str, int]
    seed: int
    max_epochs: int
    max_steps: int
    batch_size: int
    accumulate: int
    max_text_len: int
    max_regions: int
    optimizer: OptimizerParams
    scratch: bool = False  # ignore init's weights: TDEN- of the paper
    blank_images: bool = False  # text-only control: every region feature zero, boxes too
    evaluate_on: list[str] = field(
        default_factory=list
    )  # datasets; empty: the sources, or all that have the task's view
    options: dict[str, Any] = field(default_factory=dict)  # the task's own: `TaskModel.options_class`
