"""Two-pass scheduled sampling: the second pass reads words that the first pass predicted.

Li et al. 2021 (TDEN), "Scheduled Sampling in VL Pretraining" and figure 3. S is the masked sentence. S_E and S_D are
the same sentence with its masked words sampled from the first-pass predictions of the cross-modal encoder and of the
decoder:

    A (eq. 1)  L(S) + MLM(S_E) + MOC(S_E) + MSG(S_D)             each path reads its own predictions
    B (eq. 2)  L(S) + MLM(S_D) + MOC(S_D) + MSG(S_E)             each path reads the other's
    C (eq. 3)  a [MLM(S) + MOC(S) + MSG(S_E)] + (1 - a) [MSG(S) + MLM(S_D) + MOC(S_D)] + ISM(S)

L(S) is the sum of all objectives in the first pass. `TwoPassLoss` computes both passes in one update:

- The image is encoded once. A model may reuse first-pass results that the second pass would compute identically.
- No gradient flows through the sampled ids. Targets remain the original words and regions.
- The paper does not state how often `a` is drawn. Here it is 0 or 1 with equal probability, for a whole batch (or
  micro-batch, if an update accumulates several).

The public code runs Two-Pass-A with two updates per batch, encodes the image twice, and takes the most probable word
(`sample: argmax`). `ramp` goes beyond the paper, which replaces every masked word from the first update on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from vlp_models.data.batch import Batch
from vlp_models.errors import ParamsError
from vlp_models.models.protocols import EmbedsPairs, PredictsMaskedWords
from vlp_models.objectives.distributed import draw_uniform
from vlp_models.objectives.loss import WeightedLosses
from vlp_models.objectives.masked_modeling import ramp_share, replace_words, sample_words, select_replaced
from vlp_models.params import RampParams, RecipeParams, ScheduledSamplingParams
from vlp_models.training.recipe import PretrainingLoss, Recipe, make_recipe

SECOND_PASS = "_pass2"  # suffix of the second pass's losses and parts


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The objectives of each pass, and the predictions that the second one reads.

    first, second: the objectives of the passes.
    source: path -> the path whose predictions it reads in the second pass.
    """

    first: frozenset[str]
    second: frozenset[str]
    source: Mapping[str, str]


def schedule(
    scheme: Literal["a", "b", "c"], paths: Mapping[str, Collection[str]], objectives: Collection[str], *, coin: bool
) -> Schedule:
    """Return the schedule of one batch.

    Args:
        paths: path -> its objectives, for the paths with any objective in the recipe.
        coin: `a` of scheme C: True if the first of the two paths goes first.
    """
    # The second pass needs only the objectives that read words: ISM, for example, would compute the same again.
    everything = frozenset(objectives)
    with_words = frozenset(name for names in paths.values() for name in names) & everything
    if scheme == "a":
        return Schedule(first=everything, second=with_words, source={path: path for path in paths})
    first_path, second_path = paths
    if scheme == "b":
        return Schedule(first=everything, second=with_words, source={first_path: second_path, second_path: first_path})
    # C: one path goes first, and the other reads its predictions; each objective is in one pass only.
    leading, following = (first_path, second_path) if coin else (second_path, first_path)
    second = frozenset(paths[following]) & everything
    return Schedule(first=everything - second, second=second, source={following: leading})


@dataclass(frozen=True, kw_only=True)
class TwoPassLoss:
    """The weighted loss of both passes on a batch, for the training loop. Built by `make_loss`."""

    model: PredictsMaskedWords
    recipe: Recipe
    mask_probability: float
    scheme: Literal["a", "b", "c"]
    sample: Literal["multinomial", "argmax"]
    ramp: RampParams

    def __call__(self, batch: Batch, *, update: int | None, generator: torch.Generator) -> WeightedLosses:
        # One corruption for both passes: what is hidden, and so the targets, are the same.
        objectives = self.recipe.objectives(update)
        corruption = self.model.corrupt(
            batch, objectives=dict.fromkeys(objectives), generator=generator, mask_probability=self.mask_probability
        )
        # bool [B, T]: the masked words that the second pass reads as predicted; the ramp sets their share.
        share = ramp_share(update, start=self.ramp.start, end=self.ramp.end, steps=self.ramp.steps)
        replaced_BT = select_replaced(corruption.words_BT, share, generator)
        coin = True
        if self.scheme == "c":
            coin = bool(draw_uniform((), generator, torch.device("cpu")) < 0.5)
        paths = {path: names for path, names in self.model.word_paths.items() if set(names) & set(objectives)}
        plan = schedule(self.scheme, paths, objectives, coin=coin)

        # First pass: masked words. Second pass: words sampled from the first pass's logits, M of them.
        image = self.model.encode_corrupted(batch, corruption)
        # Sorted, because the order of a set of strings differs between processes.
        first = self.model.masked_pass(batch, corruption, image, dict.fromkeys(sorted(plan.first)))
        sampled: dict[str, Tensor] = {}  # path -> ids [B, T]
        # In a fixed order, because each path draws from the same generator.
        for path, source in sorted(plan.source.items()):
            words_M = sample_words(first.word_logits[source], how=self.sample, generator=generator)
            sampled[path] = replace_words(corruption.ids_BT, corruption.words_BT, words_M, replaced_BT)
        second = self.model.masked_pass(
            batch, corruption, image, dict.fromkeys(sorted(plan.second)), sampled, after=first
        )

        # Scheme C computes an objective in one of the passes only: it keeps its name, so that it is one loss over all
        # micro-batches of an update.
        first_losses, second_losses = self.recipe.weigh(first.losses, update), self.recipe.weigh(second.losses, update)
        losses, weights = dict(first_losses.losses), dict(first_losses.weights)
        for name, loss in second_losses.losses.items():
            unique = f"{name}{SECOND_PASS}" if name in first_losses.losses else name
            parts = {f"{part}{SECOND_PASS}": value for part, value in loss.parts.items()}
            losses[unique] = replace(loss, parts=parts)
            weights[unique] = second_losses.weights[name]
        return WeightedLosses(losses=losses, weights=weights)


def make_loss(
    model: nn.Module, recipe: RecipeParams, sampling: ScheduledSamplingParams, *, name: str, section: str = "pretrain"
) -> PretrainingLoss | TwoPassLoss:
    """Return the loss of a pretraining run, in one pass or with two-pass scheduled sampling.

    Args:
        name: the model's name in params.yaml.
        section: the run's section of params.yaml.

    Raises:
        ParamsError: a recipe that the model does not support, or shared objectives (contrib) together with
            scheduled sampling or `contrast_over: update`. With scheduled sampling also: a model that does not
            predict masked words or lacks the paths of the scheme, a path without the objective that predicts its
            words, or a `mix` other than `sum`.
    """
    checked_recipe = make_recipe(recipe, supported=model.objectives, section=section)  # type: ignore[arg-type]
    ahead = recipe.contrast_over == "update"
    heads: Any = getattr(model, "objective_heads", ())  # of objectives that the family does not have itself
    if heads and (ahead or sampling.scheme != "none"):
        key = "recipe.contrast_over: update" if ahead else f"scheduled_sampling.scheme: {sampling.scheme}"
        raise ParamsError(
            f"params.yaml: `{section}.{key}` is for the own objectives of `{name}`; remove it, or "
            f"{' and '.join(heads)} from `{section}.recipe.objectives`"
        )
    if sampling.scheme == "none":
        if ahead and (not isinstance(model, EmbedsPairs) or checked_recipe.mix != "sum"):
            raise ParamsError(
                f"params.yaml: `{section}.recipe.contrast_over: update` needs `mix: sum` and a model that embeds its "
                f"pairs separately (EmbedsPairs in vlp_models/models/protocols.py), not `{name}`; set `batch`"
            )
        return PretrainingLoss(
            model=model, recipe=checked_recipe, mask_probability=recipe.mask_probability, looks_ahead=ahead
        )
    _check_scheduled_sampling(model, checked_recipe, sampling, name, section)
    return TwoPassLoss(
        model=cast(PredictsMaskedWords, model),
        recipe=checked_recipe,
        mask_probability=recipe.mask_probability,
        scheme=sampling.scheme,
        sample=sampling.sample,
        ramp=sampling.ramp,
    )


def _check_scheduled_sampling(
    model: nn.Module, recipe: Recipe, sampling: ScheduledSamplingParams, name: str, section: str
) -> None:
    scheme = f"params.yaml: `{section}.scheduled_sampling.scheme: {sampling.scheme}`"
    if not isinstance(model, PredictsMaskedWords):
        raise ParamsError(
            f"{scheme}: the model `{name}` does not predict masked words in separate passes (PredictsMaskedWords in "
            "vlp_models/models/protocols.py), so there is nothing to sample; set `scheme: none`"
        )
    if recipe.mix != "sum":
        raise ParamsError(f"{scheme} needs all objectives in every update: set `mix: sum`, not {recipe.mix}")
    objectives = recipe.objectives(None)
    for path, names in model.word_paths.items():
        used = set(names) & set(objectives)
        # The first objective of a path predicts its masked words.
        if names[0] not in used and (used or sampling.scheme != "a"):
            raise ParamsError(
                f"{scheme}: the {path} of `{name}` needs `{names[0]}` in `{section}.recipe.objectives`, which predicts "
                "its masked words"
            )
    if sampling.scheme != "a" and len(model.word_paths) != 2:
        raise ParamsError(
            f"{scheme} needs two paths that read each other's predictions, but the model `{name}` has "
            f"{len(model.word_paths)}: {', '.join(model.word_paths)}; set `scheme: a`"
        )
    if not any(names[0] in objectives for names in model.word_paths.values()):
        raise ParamsError(f"{scheme}: no objective in `{section}.recipe.objectives` predicts masked words")
