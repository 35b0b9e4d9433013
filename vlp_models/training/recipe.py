"""How pretraining objectives mix: summed, drawn for each sample, or in turns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from vlp_models.data.batch import Batch
from vlp_models.errors import ParamsError
from vlp_models.models.protocols import EmbedsPairs, Pretrains
from vlp_models.objectives.contrastive import EmbeddedPairs, concatenate_pairs
from vlp_models.objectives.loss import Count, Loss, WeightedLosses
from vlp_models.objectives.ranks import draw_uniform
from vlp_models.params import RecipeParams


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Which objectives an update learns, from which samples, and with what weight.

    `sum`: all of them, from every sample (TDEN, VLMo, SOHO). `sample`: every sample learns one, drawn with these shares
    (Unified VLP). `alternate`: one an update, in order, each as many updates in a row as its share says (XGPT).

    weights, shares: of the objectives that are learnt at all.
    reuse_batch: of `alternate`: a cycle of turns learns from one batch.

    What is minimised on average is, of `sum`, the sum of weight * loss. Of `sample` and `alternate` it is the mean of
    weight * loss with the shares as its weights: `sample` learns that in each update, `alternate` over a cycle.
    """

    mix: Literal["sum", "sample", "alternate"]
    weights: Mapping[str, float]
    shares: Mapping[str, float]
    reuse_batch: bool = False

    @property
    def cycle(self) -> tuple[str, ...]:
        """`alternate`: the objective of each update, after which they begin anew."""
        return tuple(name for name, share in self.shares.items() for _ in range(int(share)))

    @property
    def updates_per_batch(self) -> int:
        return len(self.cycle) if self.mix == "alternate" and self.reuse_batch else 1

    def objectives(self, update: int | None) -> tuple[str, ...]:
        """What update number `update` (from 0) learns; all that are ever learnt for None (validation)."""
        if update is None or self.mix != "alternate":
            return tuple(self.weights)
        return (self.cycle[update % len(self.cycle)],)

    def assign(
        self, update: int | None, size: int, generator: torch.Generator, device: torch.device
    ) -> dict[str, Tensor | None]:
        """Objective -> bool [B], which samples learn it; None for all of them, as in every validation.

        `sample` draws for the batch of all processes, so that each sample learns one objective whoever holds it.
        """
        names = self.objectives(update)
        if update is None or self.mix != "sample":
            return dict.fromkeys(names)
        shares = torch.tensor([self.shares[name] for name in names], dtype=torch.float64)
        edges = (shares.cumsum(0) / shares.sum())[:-1].float().to(device)
        drawn_B = torch.bucketize(draw_uniform((size,), generator, device), edges, right=True)
        return {name: drawn_B == i for i, name in enumerate(names)}

    def weigh(self, losses: Mapping[str, Loss], update: int | None) -> WeightedLosses:
        """The losses with the weights that this update gives them."""
        shared = self.mix == "sample" or (self.mix == "alternate" and update is None)
        total = sum(self.shares.values())
        return WeightedLosses(
            losses=losses,
            weights={name: self.weights[name] * (self.shares[name] / total if shared else 1.0) for name in losses},
        )


def make_recipe(params: RecipeParams, *, known: Collection[str], section: str = "pretrain") -> Recipe:
    """
    Args:
        known: what the model can learn (`Pretrains.objectives`).
        section: of params.yaml, where `recipe` stands.

    Raises:
        ParamsError: an objective the model does not have, nothing to learn, turns that are no whole numbers, or
            settings that do not go together.
    """
    where = f"params.yaml: `{section}.recipe"
    for name, objective in params.objectives.items():
        if name not in known:
            raise ParamsError(
                f"{where}.objectives.{name}`: the model can't learn that here; it can learn: {', '.join(sorted(known))}"
            )
        for key in ("weight", "share"):
            if not 0 <= getattr(objective, key) < float("inf"):
                raise ParamsError(f"{where}.objectives.{name}.{key}: {getattr(objective, key)}` must be zero or more")
        if params.mix == "alternate" and objective.share != int(objective.share):
            raise ParamsError(
                f"{where}.objectives.{name}.share: {objective.share}` must be a whole number of updates, for "
                "`mix: alternate`; `weight` may be any number"
            )
        if params.mix == "sum" and objective.share != 1:
            raise ParamsError(
                f"{where}.objectives.{name}.share: {objective.share}` has no meaning for `mix: sum`; did you mean "
                "`weight`?"
            )
    if params.reuse_batch and params.mix != "alternate":
        raise ParamsError(f"{where}.reuse_batch` is for `mix: alternate`, not {params.mix}")
    learnt = {name: one for name, one in params.objectives.items() if one.weight > 0 and one.share > 0}
    if not learnt:
        raise ParamsError(f"{where}.objectives` names nothing to learn")
    return Recipe(
        mix=params.mix,
        weights={name: one.weight for name, one in learnt.items()},
        shares={name: one.share for name, one in learnt.items()},
        reuse_batch=params.reuse_batch,
    )


@dataclass(frozen=True, kw_only=True)
class PretrainingLoss:
    """The recipe's loss of a model on a batch, in a single pass: what the training loop calls.

    looks_ahead: contrast has the candidates of all micro-batches of an update (`contrast_over: update`).
    """

    model: nn.Module
    recipe: Recipe
    mask_probability: float
    looks_ahead: bool = False
    _window: list[tuple[tuple[str, ...], Sequence[EmbeddedPairs]]] = field(
        default_factory=list, repr=False, compare=False
    )

    @property
    def updates_per_batch(self) -> int:
        return self.recipe.updates_per_batch

    def __call__(self, batch: Batch, *, update: int | None, generator: torch.Generator) -> WeightedLosses:
        arguments = self._arguments(batch, update, generator)
        if self.looks_ahead and update is not None:
            arguments["others"] = self._others(batch)
        losses = cast(Pretrains, self.model).pretraining_losses(batch, **arguments)
        return self.recipe.weigh(losses, update)

    @torch.no_grad()
    def look_ahead(self, window: Sequence[Batch], seed: Callable[[int], None]) -> None:
        """Embeds the pairs of all micro-batches of an update, for the contrast of each with the others'.

        seed: sets the state of chance to what it will be when micro-batch i is learnt from.
        """
        self._window.clear()
        for number, batch in enumerate(window):
            seed(number)
            self._window.append((batch.sample_ids, cast(EmbedsPairs, self.model).contrast_pairs(batch)))

    def _others(self, batch: Batch) -> list[EmbeddedPairs] | None:
        """Of each of the model's contrasts, what the update's other micro-batches hold; None if there are none."""
        own = [sample_ids for sample_ids, _ in self._window].index(batch.sample_ids)
        rest = [pairs for number, (_, pairs) in enumerate(self._window) if number != own]
        return [concatenate_pairs(of_branch) for of_branch in zip(*rest, strict=True)] or None

    def count_items(
        self, batch: Batch, *, update: int | None, generator: torch.Generator
    ) -> Mapping[str, Count] | None:
        """Of a model that can say them (`pretraining_counts`, with the arguments of `pretraining_losses`)."""
        counts = getattr(self.model, "pretraining_counts", None)
        return (
            None if counts is None or self.looks_ahead else counts(batch, **self._arguments(batch, update, generator))
        )

    def _arguments(self, batch: Batch, update: int | None, generator: torch.Generator) -> dict[str, Any]:
        device = next(self.model.parameters()).device
        return {
            "objectives": self.recipe.assign(update, len(batch), generator, device),
            "generator": generator,
            "mask_probability": self.mask_probability,
        }
