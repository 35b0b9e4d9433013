"""How pretraining objectives mix: summed, drawn, or in turns. Pure functions of the update's number."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import torch
from torch import nn

from vlp_models.data.batch import Batch
from vlp_models.errors import ParamsError
from vlp_models.models.protocols import Pretrains
from vlp_models.objectives.loss import Loss, WeightedLosses


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Which objectives an update learns, and with what weight.

    `sum`: all of them, weighted (TDEN, VLMo, SOHO). `draw`: one an update, with these probabilities (Unified VLP
    draws per sample; the model would draw that from the generator it is given). `turns`: one an update, in order,
    each as many updates in a row as its whole-numbered share says (XGPT).
    """

    mix: Literal["sum", "draw", "turns"]
    weights: Mapping[str, float]
    seed: int = 0

    def objectives(self, update: int | None) -> tuple[str, ...]:
        """What update number `update` (from 0) learns; all that are ever learned for None."""
        names = tuple(name for name, weight in self.weights.items() if weight > 0)
        if update is None or self.mix == "sum":
            return names
        shares = [self.weights[name] for name in names]
        if self.mix == "draw":
            place = np.random.default_rng([self.seed, update]).random() * sum(shares)
            return (names[min(int(np.searchsorted(np.cumsum(shares), place, side="right")), len(names) - 1)],)
        turn = update % int(sum(shares))
        return (names[int(np.searchsorted(np.cumsum(shares), turn, side="right"))],)

    def combine(self, losses: Mapping[str, Loss]) -> WeightedLosses:
        """Weights scale a `sum` only."""
        return WeightedLosses(
            losses=losses, weights={name: self.weights[name] if self.mix == "sum" else 1.0 for name in losses}
        )


def make_recipe(
    mix: str, weights: Mapping[str, float], *, known: Collection[str], seed: int, section: str = "pretrain"
) -> Recipe:
    """
    Args:
        known: what the model can learn (`Pretrains.objectives`).
        section: of params.yaml, where the weights stand.

    Raises:
        ParamsError: an objective the model does not have, a negative weight, nothing to learn, or turns that are no
            whole numbers.
    """
    for name, weight in weights.items():
        where = f"params.yaml: `{section}.objectives.{name}"
        if name not in known:
            raise ParamsError(f"{where}`: the model can't learn that here; it can learn: {', '.join(sorted(known))}")
        if not 0 <= weight < float("inf"):
            raise ParamsError(f"{where}: {weight}` must be zero or more")
        if mix == "turns" and weight != int(weight):
            raise ParamsError(f"{where}: {weight}` must be a whole number of updates, for `mix: turns`")
    if not any(weights.values()):
        raise ParamsError(f"params.yaml: `{section}.objectives` names nothing to learn")
    return Recipe(mix=cast(Literal["sum", "draw", "turns"], mix), weights=dict(weights), seed=seed)


@dataclass(frozen=True, kw_only=True)
class PretrainingLoss:
    """The recipe's loss of a model on a batch: what the training loop calls."""

    model: nn.Module
    recipe: Recipe
    mask_probability: float

    def __call__(self, batch: Batch, *, update: int | None, generator: torch.Generator) -> WeightedLosses:
        losses = cast(Pretrains, self.model).pretraining_losses(
            batch,
            objectives=self.recipe.objectives(update),
            generator=generator,
            mask_probability=self.mask_probability,
        )
        return self.recipe.combine(losses)
