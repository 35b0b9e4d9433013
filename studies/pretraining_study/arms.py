"""Arms as data: what is pretrained, how, how long, and how it is fine-tuned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

TASKS = ("captioning", "vqa", "retrieval")


@dataclass(frozen=True, kw_only=True)
class Pretraining:
    """One pretraining; an arm may have several in a chain, each with its own optimizer and schedule.

    updates          of the optimizer. With `alternate`, one batch serves a cycle of the objectives
    mix, shares      as a recipe's: `sample` needs shares, as many as objectives
    weights          of the losses, as many as objectives; none given: 1 each
    scheduled_sampling  `none`: one pass; `a`, `b`, `c`: two (Li et al. 2021, equations 1 to 3)
    mask_probability of each word in MLM
    reads            pairs; texts alone; images alone; or texts next to a blank image, for a model that
                     reads no text without one
    where            the web's noisy pairs, or the target's own captions: the images that are then fine-tuned on
    frozen           parts of the model that do not learn (`GroupsParameters`)
    lr_factor        of the setting's rate
    """

    objectives: tuple[str, ...]
    updates: int
    mix: Literal["sum", "sample", "alternate"] = "sum"
    shares: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()
    scheduled_sampling: Literal["none", "a", "b", "c"] = "none"
    mask_probability: float = 0.15
    reads: Literal["pairs", "texts", "images", "blanked"] = "pairs"
    where: Literal["web", "target"] = "web"
    frozen: tuple[str, ...] = ()
    lr_factor: float = 1.0

    @property
    def updates_per_batch(self) -> int:
        return len(self.objectives) if self.mix == "alternate" else 1


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """budgets: updates of a run. Of several, each a run of its own with its own schedule, the best on val counts.

    captioner: an arm that writes captions of the target's training images, to fine-tune on besides.
    written: at most so many of each image.
    """

    budgets: tuple[int, ...] = (100,)
    lr_factor: float = 1.0  # of the setting's rate
    captioner: Arm | None = None
    written: int = 2


@dataclass(frozen=True, kw_only=True)
class Arm:
    """name: of its results. label: of its row. config: of the model, over the setting's sizes. pretraining: one after
    the other; none: from fresh weights. tasks: of those that the model can do."""

    name: str
    label: str
    family: str = "tden"
    pretraining: tuple[Pretraining, ...] = ()
    fine_tuning: FineTuning = field(default_factory=FineTuning)
    config: Mapping[str, Any] = field(default_factory=dict)
    tasks: tuple[str, ...] = TASKS

    @property
    def updates(self) -> int:
        """Of all its pretraining."""
        return sum(part.updates for part in self.pretraining)

    def scaled(self, share: float) -> Arm:
        """With `share` of all updates, at least one: for a look before the long run."""
        if share == 1:
            return self
        parts = tuple(replace(part, updates=max(1, round(part.updates * share))) for part in self.pretraining)
        tuning = self.fine_tuning
        budgets = tuple(dict.fromkeys(max(1, round(b * share)) for b in tuning.budgets))
        captioner = tuning.captioner and tuning.captioner.scaled(share)
        return replace(self, pretraining=parts, fine_tuning=replace(tuning, budgets=budgets, captioner=captioner))


def of_equal_compute(updates: int, cost_ratio: float) -> int:
    """Return the number of updates with the compute of `updates` cheaper ones; cost_ratio: cost of one, in those."""
    return round(updates / cost_ratio)
