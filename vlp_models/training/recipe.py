"""Recipes: how pretraining objectives mix. Summed, sampled for each sample, or alternating between updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from vlp_models.data.batch import Batch
from vlp_models.errors import ParamsError
from vlp_models.models.protocols import EmbedsPairs, Pretrains
from vlp_models.objectives.contrastive import EmbeddedPairs, concatenate_pairs
from vlp_models.objectives.distributed import draw_uniform
from vlp_models.objectives.loss import Count, Loss, WeightedLosses
from vlp_models.params import RecipeParams


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Which objectives an update minimizes, on which samples, and with what weights.

    - `sum`: all objectives on all samples (TDEN, VLMo, SOHO). Minimizes the sum of weight * loss.
    - `sample`: one objective per sample, drawn with probabilities proportional to the shares (Unified VLP). Minimizes
      the mean of weight * loss with the shares as its weights, in each update.
    - `alternate`: one objective per update, in the model's order; each takes as many consecutive updates as its share
      (XGPT). Minimizes the same mean as `sample`, over a cycle.

    weights, shares: of the objectives whose weight and share are above 0.
    reuse_batch: for `alternate`: all updates of a cycle use the same batch.
    """

    mix: Literal["sum", "sample", "alternate"]
    weights: Mapping[str, float]
    shares: Mapping[str, float]
    reuse_batch: bool = False

    @property
    def cycle(self) -> tuple[str, ...]:
        """For `alternate`: the objective of each update of a cycle."""
        return tuple(name for name, share in self.shares.items() for _ in range(int(share)))

    @property
    def updates_per_batch(self) -> int:
        return len(self.cycle) if self.mix == "alternate" and self.reuse_batch else 1

    def objectives(self, update: int | None) -> tuple[str, ...]:
        """Return the objectives of update number `update` (from 0); all of them for None (validation)."""
        if update is None or self.mix != "alternate":
            return tuple(self.weights)
        return (self.cycle[update % len(self.cycle)],)

    def assign(
        self, update: int | None, size: int, generator: torch.Generator, device: torch.device
    ) -> dict[str, Tensor | None]:
        """Return objective -> bool [B], the samples it uses; None for all of them, as in every validation.

        `sample` draws for the batch of all processes, so that each sample gets one objective on whatever rank it is.
        """
        names = self.objectives(update)
        if update is None or self.mix != "sample":
            return dict.fromkeys(names)
        # The cumulated shares cut [0, 1) into one interval per objective.
        shares = torch.tensor([self.shares[name] for name in names], dtype=torch.float64)
        edges = (shares.cumsum(0) / shares.sum())[:-1].float().to(device)
        # right=True: an interval includes its lower edge and excludes its upper one.
        drawn_B = torch.bucketize(draw_uniform((size,), generator, device), edges, right=True)
        return {name: drawn_B == i for i, name in enumerate(names)}

    def weigh(self, losses: Mapping[str, Loss], update: int | None) -> WeightedLosses:
        """Return the losses with their weights in this update."""
        weights = {name: self.weights[name] for name in losses}
        # `alternate` trains by its shares over a cycle; only validation, which has all objectives at once, weighs them.
        if self.mix == "sample" or (self.mix == "alternate" and update is None):
            total = sum(self.shares.values())
            weights = {name: weight * (self.shares[name] / total) for name, weight in weights.items()}
        return WeightedLosses(losses=losses, weights=weights)


def make_recipe(params: RecipeParams, *, supported: Sequence[str], section: str = "pretrain") -> Recipe:
    """Check the recipe of a run against its model.

    The objectives have the model's order: neither DVC nor a run's fingerprint reads that of params.yaml.

    Args:
        supported: the model's objectives (`Pretrains.objectives`).
        section: the section of params.yaml that contains `recipe`.

    Raises:
        ParamsError: an objective that the model does not have, no objective at all, shares of `alternate` that are not
            whole numbers, or settings that contradict each other.
    """
    # `weight` is a factor of a loss; `share` is how often an objective is trained, of samples or of updates.
    where = f"params.yaml: `{section}.recipe"
    for name, objective in params.objectives.items():
        if name not in supported:
            names = ", ".join(sorted(supported))
            raise ParamsError(f"{where}.objectives.{name}`: the model does not support it; it supports: {names}")
        if params.mix == "alternate" and objective.share != int(objective.share):
            raise ParamsError(
                f"{where}.objectives.{name}.share: {objective.share}` must be a whole number of updates for "
                "`mix: alternate`; `weight` may be any number"
            )
        if params.mix == "sum" and objective.share != 1:
            raise ParamsError(
                f"{where}.objectives.{name}.share: {objective.share}` has no meaning for `mix: sum`; did you mean "
                "`weight`?"
            )
    if params.reuse_batch and params.mix != "alternate":
        raise ParamsError(f"{where}.reuse_batch` requires `mix: alternate`, not {params.mix}")
    ordered = {name: params.objectives[name] for name in supported if name in params.objectives}
    trained = {name: objective for name, objective in ordered.items() if objective.weight > 0 and objective.share > 0}
    if not trained:
        raise ParamsError(f"{where}.objectives` has no objective with a weight and share above 0")
    return Recipe(
        mix=params.mix,
        weights={name: objective.weight for name, objective in trained.items()},
        shares={name: objective.share for name, objective in trained.items()},
        reuse_batch=params.reuse_batch,
    )


@dataclass(frozen=True, kw_only=True)
class PretrainingLoss:
    """The recipe's loss on a batch in a single pass, for the training loop.

    looks_ahead: contrast uses candidates from all micro-batches of an update (`contrast_over: update`).
    """

    model: nn.Module
    recipe: Recipe
    mask_probability: float
    looks_ahead: bool = False
    # The current update's micro-batches: sample ids, and the embedded pairs of each of the model's contrasts
    _window: list[tuple[tuple[str, ...], Sequence[EmbeddedPairs]]] = field(
        default_factory=list, repr=False, compare=False
    )

    @property
    def updates_per_batch(self) -> int:
        return self.recipe.updates_per_batch

    def __call__(self, batch: Batch, *, update: int | None, generator: torch.Generator) -> WeightedLosses:
        arguments = self._arguments(batch, update, generator)
        # Contrast also reads the pairs of the update's other micro-batches, which `look_ahead` has embedded.
        if self.looks_ahead and update is not None:
            # Of two micro-batches with equal ids (a dataset that an epoch repeats), the second is taken for the first.
            # They have the same pairs, with other dropout and augmentation, and equal pairs are no negatives.
            position = [sample_ids for sample_ids, _ in self._window].index(batch.sample_ids)
            other_pairs = [pairs for number, (_, pairs) in enumerate(self._window) if number != position]
            # One set of pairs for each of the model's contrasts; None without another micro-batch
            arguments["others"] = [concatenate_pairs(contrast) for contrast in zip(*other_pairs, strict=True)] or None
        losses = cast(Pretrains, self.model).pretraining_losses(batch, **arguments)
        return self.recipe.weigh(losses, update)

    @torch.no_grad()
    def look_ahead(self, window: Sequence[Batch], seed: Callable[[int], None]) -> None:
        """Embed the pairs of all micro-batches of an update, so that each is contrasted with the others' pairs.

        Args:
            seed: sets the random state that micro-batch i is trained with.
        """
        self._window.clear()
        for number, batch in enumerate(window):
            seed(number)
            self._window.append((batch.sample_ids, cast(EmbedsPairs, self.model).contrast_pairs(batch)))

    def count_items(
        self, batch: Batch, *, update: int | None, generator: torch.Generator
    ) -> Mapping[str, Count] | None:
        """Return the counts of the losses if the model can compute them alone (`pretraining_counts`)."""
        counts = getattr(self.model, "pretraining_counts", None)
        if counts is None or self.looks_ahead:
            return None
        return counts(batch, **self._arguments(batch, update, generator))

    def _arguments(self, batch: Batch, update: int | None, generator: torch.Generator) -> dict[str, Any]:
        device = next(self.model.parameters()).device
        return {
            "objectives": self.recipe.assign(update, len(batch), generator, device),
            "generator": generator,
            "mask_probability": self.mask_probability,
        }
