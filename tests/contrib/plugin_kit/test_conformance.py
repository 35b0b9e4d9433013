"""The checks of `vlp try`: every built-in family and task passes them, and a broken model is named by the right one."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import pytest
import torch
from paper_families import PAPER_FAMILIES
from torch import Tensor, nn

from vlp_models.common.plugins import use_plugins
from vlp_models.contrib.plugin_kit.commands import SCAFFOLDS
from vlp_models.contrib.plugin_kit.conformance.checks import Problem
from vlp_models.contrib.plugin_kit.conformance.families import try_family
from vlp_models.contrib.plugin_kit.conformance.ranks import check_ranks
from vlp_models.contrib.plugin_kit.conformance.scenes import SampleScenes, write_sample_scenes
from vlp_models.contrib.plugin_kit.conformance.tasks import try_task
from vlp_models.contrib.plugin_kit.conformance.trial import build_trial, train
from vlp_models.contrib.plugin_kit.scaffolds.family.config import ToyConfig
from vlp_models.contrib.plugin_kit.scaffolds.family.model import Toy, Written
from vlp_models.contrib.plugin_kit.scaffolds.task.guess_color import GuessColor
from vlp_models.data.batch import Image, Text
from vlp_models.metrics import coco_tools
from vlp_models.models import FAMILIES
from vlp_models.models.protocols import Fused
from vlp_models.objectives.loss import Loss, WeightedLosses
from vlp_models.tasks import TASKS

SMALL_TOY = {"side": 32, "patch": 8, "hidden": 32, "heads": 2, "image_layers": 1, "text_layers": 1, "decoder_layers": 1}
BUILT_IN = [*PAPER_FAMILIES, "language_model_decoder"]  # those that need no folder of weights
THIS = "test_conformance"  # this module, as an import target


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> SampleScenes:
    return write_sample_scenes(tmp_path_factory.mktemp("scenes"))


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "toy", "vlp_models.contrib.plugin_kit.scaffolds.family.model:Toy")
    monkeypatch.setitem(TASKS, "guess_color", "vlp_models.contrib.plugin_kit.scaffolds.task.guess_color:GuessColor")


def problems(results: Iterator[Any]) -> dict[str, str]:
    """Run all checks; return the problems of those that failed."""
    return {result.check: result.problem for result in results if result.problem}


@pytest.mark.parametrize("family", [*BUILT_IN, "toy"])
def test_every_family_passes(family: str, scenes: SampleScenes) -> None:
    results = list(try_family(family, SMALL_TOY if family == "toy" else None, scenes))
    assert problems(iter(results)) == {}
    assert {"builds", "gradients", "batch of one", "padding", "texts per image"} <= {one.check for one in results}


@pytest.mark.parametrize("task", [*TASKS, "guess_color"])
def test_every_task_passes(task: str, scenes: SampleScenes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coco_tools.shutil, "which", lambda program: None)  # METEOR's and SPICE's Java takes seconds
    results = list(try_task(task, scenes))
    assert problems(iter(results)) == {}
    assert [one.check for one in results][-2:] == ["official file", "save and load"]


# ---- Broken models: each is the toy with one fault ----------------------------------------------------------------


class PadsIntoPooling(Toy):
    """The text feature is the mean of all positions, padding included."""

    def embed_text(self, text: Text) -> Tensor:
        return nn.functional.normalize(self.text_projection(self.encode_text(text).mean(1)), dim=-1)


class NormalizesOverTheBatch(Toy):
    def embed_image(self, image: Image) -> Tensor:
        found = super().embed_image(image)
        return found - found.mean(0)


class IgnoresOwners(Toy):
    def image_of_texts(self, image: Image, text: Text) -> Tensor:
        image_BRD = self.encode_image(image)
        return image_BRD[torch.arange(len(text)) % len(image_BRD)]


class HasAnUnusedLayer(Toy):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.forgotten = nn.Linear(2, 2)


class DecodesAtTheWrongPosition(Toy):
    def step(self, token_N: Tensor, state: Written) -> tuple[Tensor, Written]:
        logits_NV, after = super().step(token_N, dataclasses.replace(state, length=state.length + 1))
        return logits_NV, dataclasses.replace(after, length=state.length + 1)


class DoesNotReorder(Toy):
    def reorder(self, state: Written, index_N: Tensor) -> Written:
        return dataclasses.replace(state, past=tuple(layer.select(index_N * 0) for layer in state.past))


class KeepsStateOutsideItsBuffers(Toy):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.shift = float(torch.rand(()))

    def embed_image(self, image: Image) -> Tensor:
        return super().embed_image(image) + self.shift


class DividesByZero(Toy):
    def pretraining_losses(self, batch: Any, **arguments: Any) -> dict[str, Loss]:
        (loss,) = super().pretraining_losses(batch, **arguments).values()
        return {"contrast": dataclasses.replace(loss, sum=loss.sum / 0)}


class TrainsOnNothing(Toy):
    def pretraining_losses(self, batch: Any, **arguments: Any) -> dict[str, Loss]:
        (loss,) = super().pretraining_losses(batch, **arguments).values()
        return {"contrast": dataclasses.replace(loss, count=0)}


class Crashes(Toy):
    def fuse(self, image: Image, text: Text) -> Fused:
        return {}["pooled"]  # type: ignore[return-value]


class HasNoInputs(nn.Module):
    config_class = ToyConfig

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()


BROKEN = {
    PadsIntoPooling: ("padding", r"embed_text: row \d differs by .* with more padding: a mask is missing"),
    NormalizesOverTheBatch: ("batch of one", r"embed_image: row \d differs by .* alone and in a batch of three"),
    IgnoresOwners: ("texts per image", r"fuse \(pooled_BP\): row \d differs by .* read Text.owner_N"),
    HasAnUnusedLayer: ("gradients", "no gradient reaches forgotten.weight, forgotten.bias from any objective or task"),
    DecodesAtTheWrongPosition: ("decoding", r"step: row \d differs by .* from generation_logits at word 1"),
    DoesNotReorder: ("decoding", r"step: row \d differs by .* from generation_logits at word 4"),
    KeepsStateOutsideItsBuffers: ("save and load", r"embed_image: row \d differs by .* keep all state in parameters"),
    DividesByZero: ("objective contrast", "update 1: the loss is inf"),
    TrainsOnNothing: ("objective contrast", "update 1: the loss contrast has `count` 0: it trains on no item"),
    Crashes: ("task vqa", r"test_conformance\.py:\d+: KeyError: `pooled` is missing"),
    HasNoInputs: ("builds", "HasNoInputs has no `inputs`: return a ModelInputs"),
}


@pytest.mark.parametrize("model", BROKEN, ids=lambda model: model.__name__)
def test_a_broken_model_is_named_by_its_check(
    model: type[nn.Module], scenes: SampleScenes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "broken", f"{THIS}:{model.__name__}")
    check, sentence = BROKEN[model]
    found = problems(try_family("broken", SMALL_TOY, scenes))
    assert check in found, found
    assert re.search(sentence, found[check]), found[check]


class LosesAnId(GuessColor):
    def predict(self, batch: Any, samples: Any) -> list[dict[str, Any]]:
        return [{**record, "question_id": "?"} for record in super().predict(batch, samples)]


class PredictsTensors(GuessColor):
    def predict(self, batch: Any, samples: Any) -> list[dict[str, Any]]:
        return [{**record, "p": torch.ones(())} for record in super().predict(batch, samples)]


class ScoresAnotherMetric(GuessColor):
    metric = "recall"


@runtime_checkable
class Segments(Protocol):
    def segment(self) -> None: ...


class NeedsWhatNoFamilyHas(GuessColor):
    needs = (Segments,)


class WritesNothing(GuessColor):
    def write_official(self, predictions: Any, context: Any, split: str, directory: Path) -> Path | None:
        return directory / "results.json"


BROKEN_TASKS = {
    LosesAnId: ("prediction", "a prediction has '?' under `question_id` (`id_key`) instead of the sample's id"),
    PredictsTensors: ("prediction", "predictions are not JSON: Object of type Tensor"),
    ScoresAnotherMetric: ("scores", "`score` returns no 'recall', which `metric` or `headlines` names"),
    NeedsWhatNoFamilyHas: ("builds", "no family implements Segments (`needs` of NeedsWhatNoFamilyHas)"),
    WritesNothing: ("official file", "write_official returns results.json, which it did not write"),
}


@pytest.mark.parametrize("task", BROKEN_TASKS, ids=lambda task: task.__name__)
def test_a_broken_task_is_named_by_its_check(
    task: type[GuessColor], scenes: SampleScenes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TASKS, "guess_color", f"{THIS}:{task.__name__}")
    check, sentence = BROKEN_TASKS[task]
    assert sentence in problems(try_task("guess_color", scenes))[check]


@pytest.mark.slow
def test_the_bias_of_scores_before_a_softmax_is_reached() -> None:
    """Its gradient is the sum of probabilities less one: 0, or what rounding leaves of it on this processor."""
    score, spare = nn.Linear(4, 1), nn.Linear(4, 4)
    module = nn.ModuleDict({"score": score, "spare": spare})

    def loss(_: int) -> WeightedLosses:
        scores_NR = score(torch.zeros(2, 2, 4)).squeeze(-1)  # probabilities of exactly one half
        losses_N = nn.functional.cross_entropy(scores_NR, torch.tensor([0, 1]), reduction="none")
        total = losses_N.sum() + 0 * score.weight.sum() + 0 * spare.weight.sum()
        return WeightedLosses.of(Loss.of(total, 2))

    reached, _ = train(module, loss)
    assert reached == {"score.bias"}


@pytest.mark.slow
def test_a_loss_that_ignores_the_other_process_is_named(
    scenes: SampleScenes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gather_rows` is left out of a copy of the toy, whose negatives are then those of one process."""
    for name in ("alone", "whole"):
        shutil.copytree(SCAFFOLDS / "family", tmp_path / "plugins" / name)
    loss = tmp_path / "plugins" / "alone" / "info_nce.py"
    text = loss.read_text().replace("gather_rows(texts_NE)", "texts_NE").replace("gather_rows(images_NE)", "images_NE")
    text = text.replace("numbers_G, local = number_over_ranks(image_ids)", "numbers_G, local = numbers(image_ids)")
    loss.write_text(
        text.replace(
            "\n\ndef info_nce",
            "\n\ndef numbers(ids):\n    kept = {n: i for i, n in enumerate(ids)}\n"
            "    return torch.tensor([kept[n] for n in ids]), slice(None)\n\n\ndef info_nce",
        )
    )
    monkeypatch.chdir(tmp_path)
    try:
        use_plugins({"families": {name: f"plugins.{name}.model:Toy" for name in ("alone", "whole")}}, tmp_path)
        check_ranks(build_trial("whole", SMALL_TOY, scenes))
        with pytest.raises(Problem, match="with contrast in two processes: use gather_rows and draw_uniform"):
            check_ranks(build_trial("alone", SMALL_TOY, scenes))
    finally:
        use_plugins({}, tmp_path)
