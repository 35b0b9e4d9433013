"""A model under test: built at a small size, and trained for two updates on an objective or a task."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from vlp_models.contrib.plugin_kit.conformance.checks import Problem, shorten_names
from vlp_models.contrib.plugin_kit.conformance.scenes import MAX_REGIONS, MAX_TEXT_LEN, SampleScenes
from vlp_models.data.batch import Batch
from vlp_models.data.inputs import InputReader, ModelInputs, RegionInput
from vlp_models.errors import ParamsError
from vlp_models.models import add_objectives, build_model
from vlp_models.models.checkpoint import CheckpointInfo
from vlp_models.objectives.loss import WeightedLosses
from vlp_models.params import ObjectiveParams, RecipeParams, ScheduledSamplingParams, to_plain
from vlp_models.tasks import TASKS, task_class
from vlp_models.tasks.base import TaskModel, read_options, supports_task
from vlp_models.training.normalization import normalize, total_over_ranks
from vlp_models.training.scheduled_sampling import make_loss

UPDATES = 2
NOISE = 0.02  # added to fresh weights: initial zeros would hide what a part does
TOLERANCE = 1e-4  # of the largest value of an output, in float32
MASK_PROBABILITY = 0.4  # every batch then has masked words

# Sizes at which the built-in families are tried; their defaults are the papers'. A plugin is tried at its defaults.
SMALL: dict[str, dict[str, Any]] = {
    "tden": {
        "hidden": 32,
        "heads": 2,
        "intermediate": 64,
        "object_layers": 1,
        "sentence_layers": 1,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "init_std": 0.1,
    },
    "unified_vlp": {
        "hidden": 32,
        "heads": 2,
        "intermediate": 64,
        "layers": 2,
        "max_positions": 64,
        "region_slots": 16,
        "init_std": 0.1,
    },
    "xgpt": {"hidden": 32, "heads": 2, "intermediate": 64, "layers": 1, "init_std": 0.1},
    "vlmo": {
        "hidden": 32,
        "heads": 2,
        "intermediate": 64,
        "layers": 3,
        "vl_start": 2,
        "side": 64,
        "patch": 16,
        "max_positions": 48,
        "image_codes": 16,
        "init_std": 0.1,
    },
    "soho": {
        "height": 64,
        "width": 64,
        "longer": 0,
        "shorter": 0,
        "backbone": "small",
        "backbone_options": {"channels": [4, 6, 8]},
        "backbone_stage": 0,
        "hidden": 32,
        "heads": 2,
        "intermediate": 64,
        "layers": 1,
        "dictionary_size": 8,
        "init_std": 0.1,
    },
}


@dataclass
class Trial:
    """A model under test. reached: parameters that a gradient has reached so far; filled by the checks of training."""

    family: str
    config: Mapping[str, Any]
    scenes: SampleScenes
    model: nn.Module
    reached: set[str] = dataclasses.field(default_factory=set)

    @property
    def inputs(self) -> ModelInputs:
        return cast(ModelInputs, self.model.inputs)

    @property
    def view(self) -> str:
        """The view that the model is tried on."""
        if not self.inputs.text:
            return "images"
        return "captions" if self.inputs.image is not None else "texts"

    def reader(self) -> InputReader:
        return self.scenes.reader(self.inputs, self.view)

    def info(self, task: str | None = None, options: Mapping[str, Any] | None = None) -> CheckpointInfo:
        regions = isinstance(self.inputs.image, RegionInput)
        manifest = self.scenes.manifest
        return CheckpointInfo(
            family=self.family,
            name=self.family,
            model_config=to_plain(getattr(self.model, "config", dict(self.config))),
            task=task,
            max_text_len=MAX_TEXT_LEN,
            max_regions=MAX_REGIONS if regions else 0,
            detector_id=manifest.detector_id if regions else "",
            feature_dim=manifest.feature_dim if regions else 0,
            classes=manifest.classes if regions else (),
            options=options or {},
        )


def small_config(family: str, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the config that a family is tried with: small for a built-in one, then `config`."""
    return {**SMALL.get(family, {}), **(config or {})}


def build_trial(family: str, config: Mapping[str, Any], scenes: SampleScenes, seed: int = 0) -> Trial:
    """Build a model with slightly disturbed weights."""
    torch.manual_seed(seed)
    model = build_model(family, config, scenes.facts, where=f"models.{family}.config")
    if not isinstance(getattr(model, "inputs", None), ModelInputs):
        raise Problem(f"{type(model).__name__} has no `inputs`: return a ModelInputs (vlp_models/data/inputs.py)")
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * NOISE)
    return Trial(family=family, config=config, scenes=scenes, model=model)


def supported_tasks(model: nn.Module) -> list[str]:
    """Return the tasks whose protocols the model meets; without plugins that cannot be imported."""
    inputs, tasks = cast(ModelInputs, model.inputs), []
    # Every task needs a model of images and texts.
    for name in TASKS if inputs.text and inputs.image is not None else ():
        with contextlib.suppress(ParamsError):
            if supports_task(model, task_class(name)):
                tasks.append(name)
    return tasks


def pretraining_batch(trial: Trial, *, seeded: bool = True, first: int = 0, last: int | None = None) -> Batch:
    """Collate samples as pretraining does: some of 16 texts, two per image."""
    reader = trial.reader()
    samples = trial.scenes.samples(trial.view, reader, seeded=seeded)[first:last]
    return reader.collate(samples)


def objective_loss(trial: Trial, names: Sequence[str], scheme: str = "none") -> Callable[..., Any]:
    """Return the loss of these objectives, as the pretraining stage makes it, with equal heads in every call."""
    # Heads that an objective adds are drawn here: the same in every call and process.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = add_objectives(trial.model, names, trial.scenes.facts, "recipe.objectives", trial.family)
    recipe = RecipeParams(objectives={n: ObjectiveParams() for n in names}, mask_probability=MASK_PROBABILITY)
    sampling = ScheduledSamplingParams(scheme=scheme)  # type: ignore[arg-type]
    return make_loss(model, recipe, sampling, name=trial.family)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def train(module: nn.Module, loss_of: Callable[[int], WeightedLosses]) -> tuple[set[str], list[float]]:
    """Train for two updates. Return the names of parameters that a gradient reached, and the losses."""
    module.train()
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-3)
    reached: set[str] = set()
    values = []
    for update in range(UPDATES):
        loss = loss_of(update)
        # A count of 0 is a loss over no items: it trains nothing, and its mean is 0 rather than an error.
        for name, part in loss.losses.items():
            if float(torch.as_tensor(part.count)) <= 0:
                raise Problem(f"update {update + 1}: the loss {name} has `count` 0: it trains on no item")
        value = float(loss.mean.detach())
        if not math.isfinite(value):
            raise Problem(f"update {update + 1}: the loss is {value}")
        optimizer.zero_grad()
        loss.mean.backward()
        for name, weight in module.named_parameters():
            if weight.grad is not None and not bool(weight.grad.isfinite().all()):
                raise Problem(f"update {update + 1}: the gradient of {name} is not finite")
            # A bias that is added to all scores of a softmax is used; its gradient is 0, or what rounding leaves.
            if weight.grad is not None and (weight.numel() == 1 or bool(weight.grad.any())):
                reached.add(name)
        optimizer.step()
        values.append(value)
    return reached, values


def make_task(trial: Trial, task: str) -> TaskModel:
    """Return the task on the trial's model, with its default options."""
    cls = task_class(task)
    options = to_plain(read_options(cls, {}))
    labels = cls.initial_labels(trial.scenes.root / "tokenizer")
    return cls(trial.model, trial.scenes.tokenizer, trial.info(task, options), labels=labels)


def check_task_updates(trial: Trial, task: str) -> str:
    """Train the model on a task."""
    task_model = make_task(trial, task)
    view = type(task_model).training_view(task_model.options)
    samples = trial.scenes.samples(view, task_model.reader, seeded=True)
    if not samples:
        raise Problem(f"the view `{view}` has no rows in the scenes, so the task cannot be tried")
    batch = task_model.collate(samples)
    with tempfile.TemporaryDirectory() as work:
        loss = task_model.training_loss(trial.scenes.root / "shards", {}, Path(work))
        reached, values = train(task_model, lambda update: loss(batch, update=update, generator=generator(update)))
    # The head is the task's own: only the model's parameters count for the family.
    trial.reached |= {name.removeprefix("model.") for name in reached if name.startswith("model.")}
    untrained = [n for n, p in task_model.head.named_parameters() if p.requires_grad and f"head.{n}" not in reached]
    if untrained:
        raise Problem(f"no gradient reaches {shorten_names(untrained)} of its head: `loss` does not use them")
    return f"loss {values[0]:.3f}, {values[1]:.3f}"


def compare(actual: Mapping[str, Sequence[Tensor]], expected: Mapping[str, Sequence[Tensor]], context: str) -> None:
    """Compare outputs row by row, up to rounding; a `Problem` names the method, row and difference, and the context."""
    for name, rows in expected.items():
        for number, row in enumerate(rows):
            other = actual[name][number]
            if other.shape != row.shape:
                raise Problem(
                    f"{name}: row {number} has the shape {[*other.shape]} instead of {[*row.shape]} {context}"
                )
            # An empty row, such as an image without located states, has no difference.
            difference = float((other - row).abs().max()) if row.numel() else 0.0
            if not difference <= TOLERANCE * max(1.0, float(row.abs().max())):  # also if it is not finite
                raise Problem(f"{name}: row {number} differs by {difference:.2g} {context}")


def rank_gradients(trial: Trial, name: str, first: int, last: int) -> dict[str, Tensor]:
    """Return the gradient of one objective on rows `first` to `last` of seven, which all processes share.

    In eval mode, because dropout draws in each process for itself.
    """
    # Gradients of the previous objective must not add up.
    trial.model.eval().zero_grad()
    batch = pretraining_batch(trial, seeded=False, first=first, last=last)
    loss = objective_loss(trial, [name])(batch, update=0, generator=generator())
    normalize(loss, total_over_ranks(loss).counts).backward()
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for n, p in trial.model.named_parameters()
        if p.requires_grad
    }
