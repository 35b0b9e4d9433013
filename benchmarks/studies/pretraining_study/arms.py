"""Arms as data: what is pretrained, how, how long, and how it is fine-tuned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

TASKS = ("captioning", "vqa", "retrieval")


@dataclass(frozen=True, kw_only=True)
class Pretraining:
    """passes: one, or two with scheduled sampling (Li et al. 2021, equations 1 to 3). updates: of `Setting.batch`."""

    objectives: tuple[str, ...]
    updates: int
    passes: Literal["single", "a", "b", "c"] = "single"
    mask_probability: float = 0.15


@dataclass(frozen=True, kw_only=True)
class DrawnPretraining(Pretraining):
    """Each sample learns one of the objectives, drawn with these shares, which are as many.

    texts_first: updates on the same texts with nothing to see, with the objectives and shares of `texts_learn`, before
    the pairs: a text model to begin with.
    """

    shares: tuple[float, ...]
    texts_first: int = 0
    texts_learn: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """budgets: updates of a run. Of several, each a run of its own with its own schedule, the best on val counts."""

    budgets: tuple[int, ...] = (100,)
    lr_factor: float = 1.0  # of the setting's rate


@dataclass(frozen=True, kw_only=True)
class Arm:
    """name: of its results. label: of its row. config: of the model, over the setting's sizes."""

    name: str
    label: str
    family: str = "tden"
    pretraining: Pretraining | None
    fine_tuning: FineTuning = field(default_factory=FineTuning)
    config: Mapping[str, Any] = field(default_factory=dict)

    def scaled(self, share: float) -> Arm:
        """With `share` of all updates, at least one: for a look before the long run."""
        if share == 1:
            return self
        part = self.pretraining
        if part is not None:
            part = replace(part, updates=max(1, round(part.updates * share)))
        if isinstance(part, DrawnPretraining) and part.texts_first:
            part = replace(part, texts_first=max(1, round(part.texts_first * share)))
        budgets = tuple(dict.fromkeys(max(1, round(b * share)) for b in self.fine_tuning.budgets))
        return replace(self, pretraining=part, fine_tuning=replace(self.fine_tuning, budgets=budgets))


def of_equal_compute(updates: int, cost_ratio: float) -> int:
    """How many updates cost what `updates` of the cheaper kind do, if one costs `cost_ratio` of those."""
    return round(updates / cost_ratio)
