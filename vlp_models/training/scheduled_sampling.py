"""One pass over a batch, or two-pass scheduled sampling: the second pass reads words that the first one predicted.

Li et al. 2021 (TDEN), "Scheduled Sampling in VL Pretraining" and figure 3. With S the masked sentence, S_E and S_D the
same with its masked words sampled from what the cross-modal encoder and the decoder predicted in the first pass:

    A (eq. 1)  L(S) + MLM(S_E) + MOC(S_E) + MSG(S_D)             each path reads its own predictions
    B (eq. 2)  L(S) + MLM(S_D) + MOC(S_D) + MSG(S_E)             each path reads the other's
    C (eq. 3)  a [MLM(S) + MOC(S) + MSG(S_E)] + (1 - a) [MSG(S) + MLM(S_D) + MOC(S_D)] + ISM(S)

L(S) is the sum of all objectives in the first pass. Both passes are learnt in one update; the image is encoded once, a
model may reuse from its first pass what the second would compute identically, and nothing flows back through the
sampled ids. Targets stay the original words and regions. The paper leaves open what `a` is drawn for: here it is 0 or
1, half and half, for a whole batch (a micro-batch, if an update adds up several).

The public code does Two-Pass-A with two updates a batch, encodes the image again, and takes the most probable word
(`sample: argmax`). `ramp` goes beyond the paper, which replaces every masked word from the first update on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor, nn

from vlp_models.data.batch import Batch
from vlp_models.errors import ParamsError
from vlp_models.models.protocols import EmbedsPairs, PredictsMaskedWords
from vlp_models.objectives.loss import Loss, WeightedLosses
from vlp_models.objectives.masked_modeling import replace_words, sample_words, select_replaced, share_at
from vlp_models.objectives.ranks import draw_uniform
from vlp_models.params import RampParams, RecipeParams, ScheduledSamplingParams
from vlp_models.training.recipe import PretrainingLoss, Recipe, make_recipe

SECOND = "_pass2"  # ends the names of the second pass's numbers


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Who learns in which pass, and whose words whom feeds.

    first, second: the objectives of the passes.
    source: path -> the path whose predictions it reads in the second pass.
    """

    first: frozenset[str]
    second: frozenset[str]
    source: Mapping[str, str]


def schedule(
    scheme: Literal["a", "b", "c"], paths: Mapping[str, Collection[str]], objectives: Collection[str], *, coin: bool
) -> Schedule:
    """The schedule of one batch.

    paths: path -> its objectives, of those asked for. coin: C's `a`, True where the first path begins.
    """
    everything = frozenset(objectives)
    of_paths = frozenset(name for names in paths.values() for name in names) & everything
    if scheme == "a":
        return Schedule(first=everything, second=of_paths, source={path: path for path in paths})
    one, other = paths
    if scheme == "b":
        return Schedule(first=everything, second=of_paths, source={one: other, other: one})
    begins, follows = (one, other) if coin else (other, one)
    second = frozenset(paths[follows]) & everything
    return Schedule(first=everything - second, second=second, source={follows: begins})


@dataclass(frozen=True, kw_only=True)
class TwoPassLoss:
    """Both passes' weighted loss on a batch: what the training loop calls. Made by `make_loss`."""

    model: PredictsMaskedWords
    recipe: Recipe
    mask_probability: float
    scheme: Literal["a", "b", "c"]
    sample: Literal["multinomial", "argmax"]
    ramp: RampParams

    def __call__(self, batch: Batch, *, update: int | None, generator: torch.Generator) -> WeightedLosses:
        objectives = self.recipe.objectives(update)
        corruption = self.model.corrupt(
            batch, objectives=dict.fromkeys(objectives), generator=generator, mask_probability=self.mask_probability
        )
        share = share_at(update, start=self.ramp.start, end=self.ramp.end, steps=self.ramp.steps)
        replaced_BT = select_replaced(corruption.words_BT, share, generator)
        coin = bool(draw_uniform((), generator, torch.device("cpu")) < 0.5) if self.scheme == "c" else True
        paths = {p: names for p, names in self.model.word_paths.items() if set(names) & set(objectives)}
        plan = schedule(self.scheme, paths, objectives, coin=coin)

        image = self.model.encode_corrupted(batch, corruption)
        first = self.model.masked_pass(batch, corruption, image, _all_samples(plan.first))
        read: dict[str, Tensor] = {}
        for path, source in sorted(plan.source.items()):
            words_M = sample_words(first.word_logits[source], how=self.sample, generator=generator)
            read[path] = replace_words(corruption.ids_BT, corruption.words_BT, words_M, replaced_BT)
        second = self.model.masked_pass(batch, corruption, image, _all_samples(plan.second), read, after=first)

        one, two = self.recipe.weigh(first.losses, update), self.recipe.weigh(second.losses, update)
        # What C learns once, in whichever pass, is one loss over all micro-batches of an update.
        names = {name: f"{name}{SECOND}" if name in one.losses else name for name in two.losses}
        return WeightedLosses(
            losses={**one.losses, **{names[name]: _renamed(loss) for name, loss in two.losses.items()}},
            weights={**one.weights, **{names[name]: weight for name, weight in two.weights.items()}},
        )


def _all_samples(objectives: Collection[str]) -> dict[str, Tensor | None]:
    return dict.fromkeys(sorted(objectives))


def _renamed(loss: Loss) -> Loss:
    """Of the second pass."""
    return replace(loss, parts={f"{name}{SECOND}": part for name, part in loss.parts.items()})


def make_loss(
    model: nn.Module, recipe: RecipeParams, sampling: ScheduledSamplingParams, *, name: str, section: str = "pretrain"
) -> PretrainingLoss | TwoPassLoss:
    """What a pretraining run learns, in one pass or in two.

    Args:
        name: the model's in params.yaml.
        section: the run's place in params.yaml.

    Raises:
        ParamsError: a recipe that the model can't learn; or, of two passes, a model that can't be pretrained by the
            pass or lacks the paths that the scheme needs, objectives that leave a path without its masked words, a
            share outside 0 to 1, a recipe that is no sum.
    """
    mixed = make_recipe(recipe, known=model.objectives, section=section)  # type: ignore[arg-type]
    if sampling.scheme == "none":
        ahead = recipe.contrast_over == "update"
        if ahead and (not isinstance(model, EmbedsPairs) or mixed.mix != "sum"):
            raise ParamsError(
                f"params.yaml: `{section}.recipe.contrast_over: update` needs `mix: sum` and a model that can embed "
                f"its pairs beforehand (EmbedsPairs in vlp_models/models/protocols.py), not `{name}`; set `batch`"
            )
        return PretrainingLoss(model=model, recipe=mixed, mask_probability=recipe.mask_probability, looks_ahead=ahead)
    where = f"params.yaml: `{section}.scheduled_sampling"
    scheme_is, ramp = f"{where}.scheme: {sampling.scheme}`", sampling.ramp
    if not isinstance(model, PredictsMaskedWords):
        raise ParamsError(
            f"{scheme_is}: the model `{name}` does not predict masked words by the pass (PredictsMaskedWords in "
            "vlp_models/models/protocols.py), so there is nothing to sample; set `scheme: none`"
        )
    if mixed.mix != "sum":
        raise ParamsError(f"{scheme_is} learns all objectives in every update; it needs `mix: sum`, not {mixed.mix}")
    for key, value in (("start", ramp.start), ("end", ramp.end)):
        if not 0 <= value <= 1:
            raise ParamsError(f"{where}.ramp.{key}: {value}` must be a share from 0 to 1")
    if ramp.steps < 0:
        raise ParamsError(f"{where}.ramp.steps: {ramp.steps}` must not be negative")
    objectives = mixed.objectives(None)
    for path, names in model.word_paths.items():
        wanted = set(names) & set(objectives)
        if names[0] not in wanted and (wanted or sampling.scheme != "a"):
            raise ParamsError(
                f"{scheme_is}: the {path} of `{name}` needs `{names[0]}` in `{section}.recipe.objectives`: its "
                "predictions of masked words come from there"
            )
    if sampling.scheme != "a" and len(model.word_paths) != 2:
        raise ParamsError(
            f"{scheme_is} lets two paths feed each other, but the model `{name}` predicts masked words along "
            f"{len(model.word_paths)}: {', '.join(model.word_paths)}; `scheme: a` fits"
        )
    if not any(names[0] in objectives for names in model.word_paths.values()):
        raise ParamsError(f"{scheme_is}: `{section}.recipe.objectives` names none that predicts masked words")
    return TwoPassLoss(
        model=cast(PredictsMaskedWords, model),
        recipe=mixed,
        mask_probability=recipe.mask_probability,
        scheme=sampling.scheme,
        sample=sampling.sample,
        ramp=ramp,
    )
