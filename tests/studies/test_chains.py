"""What a study's pretraining reads and changes: chains, turns, parts that are frozen, pictures, written captions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pretraining_study import adapter, measure
from pretraining_study.arms import Arm, FineTuning, Pretraining
from pretraining_study.data import Data
from pretraining_study.learn import Learner, pretraining
from pretraining_study.run import _written_besides
from pretraining_study.setting import Setting

SIZES: dict[str, Any] = {"web": 24, "train": 4, "val": 3, "test": 6, "questions": 2, "hidden": 16, "heads": 2}


@pytest.fixture(scope="module")
def drawn() -> Data:
    torch.set_num_threads(1)
    return Data(Setting(**SIZES, batch=8, side=48))


@pytest.fixture(scope="module")
def regions() -> Data:
    return Data(Setting(**SIZES, batch=8))


def learn(arm: Arm, data: Data) -> tuple[torch.nn.Module, list[dict[str, torch.Tensor]]]:
    """The model, and its weights after each pretraining of the arm."""
    torch.manual_seed(0)
    model, states = adapter.build(arm.family, arm.config, data), []
    ends = torch.tensor([part.updates for part in arm.pretraining]).cumsum(0).tolist()
    for done, _ in enumerate(pretraining(model, arm, data, data.train(1), seed=1), start=1):
        if done in ends:
            states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return model, states


def test_chain_continues_from_its_weights_and_freezes_parts(drawn: Data) -> None:
    """VLMo's stages: images, then texts with vision experts and attention frozen, then pairs with everything."""
    frozen = ("attention", "vision_expert", "image_embedding")
    stages = (
        Pretraining(objectives=("mim",), updates=2, reads="images"),
        Pretraining(objectives=("mlm",), updates=2, reads="texts", frozen=frozen),
        Pretraining(objectives=("itc", "itm", "mlm"), updates=2),
    )
    model, (images, texts, pairs) = learn(Arm(name="a", label="a", family="vlmo", pretraining=stages), drawn)
    groups = {id(p): group for group, ps in model.parameter_groups().items() for p in ps}  # type: ignore[operator]
    moved: dict[str, set[bool]] = {}
    for name, parameter in model.named_parameters():
        moved.setdefault(groups[id(parameter)], set()).add(not torch.equal(images[name], texts[name]))
        if groups[id(parameter)] in ("attention", "vision_expert"):
            assert not torch.equal(texts[name], pairs[name]), f"{name} does not learn again"
    assert all(moved[group] == {False} for group in frozen)
    assert moved["language_expert"] == {True}
    assert all(p.requires_grad for p in model.parameters()) and not model.training


@pytest.mark.slow
def test_turns_learn_from_one_batch_each_in_its_turn(regions: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four objectives, eight updates: two batches; in domain they are the target's own captions."""
    read: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    plain = adapter.StepLoss.__call__

    def noted(self: Any, batch: Any, update: int, generator: torch.Generator) -> torch.Tensor:
        read.append((batch.sample_ids, self._loss.recipe.objectives(update)))
        return plain(self, batch, update, generator)

    monkeypatch.setattr(adapter.StepLoss, "__call__", noted)
    four = ("ic", "imlm", "ida", "tifg")
    weights = (1.0, 0.3, 0.3, 0.3)
    parts = (
        Pretraining(objectives=four, updates=8, mix="alternate"),
        Pretraining(objectives=four, updates=4, mix="alternate", weights=weights, where="target"),
    )
    learn(Arm(name="a", label="a", family="xgpt", pretraining=parts), regions)
    assert [objective for _, (objective,) in read] == list(four) * 3
    batches = [ids for ids, _ in read]
    assert len(set(batches[:4])) == len(set(batches[4:8])) == 1 and batches[0] != batches[4]
    assert {int(i) for i in batches[8]} <= set(range(SIZES["train"])) and max(map(int, batches[0])) >= SIZES["train"]


def test_codes_of_a_dictionary_follow(drawn: Data) -> None:
    part = Pretraining(objectives=("mlm", "mvm", "itm"), updates=1)
    torch.manual_seed(0)
    before = adapter.build("soho", {}, drawn).state_dict()["dictionary.codes"].clone()
    _, (after,) = learn(Arm(name="a", label="a", family="soho", pretraining=(part,)), drawn)
    assert not torch.equal(before, after["dictionary.codes"])


@pytest.mark.slow
def test_pictures_are_of_their_scenes(drawn: Data) -> None:
    """The center of a large plain object has the object's color."""
    pictures, _ = drawn.web
    pixels = pictures.pixels_I3HW  # type: ignore[union-attr]
    assert pixels.dtype == torch.uint8 and pixels.shape == (SIZES["web"], 3, 48, 48)
    channels = {"red": 0, "green": 1, "blue": 2}
    seen = 0
    for image, scene in zip(pixels, drawn.web_scenes, strict=True):
        for item in scene.objects:
            if item.color in channels and (item.size, item.texture, item.visible) == ("large", "solid", 1):
                assert image[:, int(item.y * 48), int(item.x * 48)].argmax() == channels[item.color]
                seen += 1
    assert seen > 3
    assert torch.equal(Data(drawn.setting).web[0].pixels_I3HW, pixels)  # type: ignore[union-attr]


def test_the_likelihood_of_a_match_is_that_of_all_true_images(drawn: Data) -> None:
    torch.manual_seed(0)
    model, split = adapter.build("vlmo", {}, drawn).eval(), drawn.test
    with torch.no_grad():
        scores = adapter.similarity(model, split.images, split.captions)
    expected = 0.0
    for n, row in enumerate(scores.softmax(1)):
        expected -= float(sum(p for p, true in zip(row, split.true_NI[n], strict=True) if true).log())
    assert measure.retrieval(model, split)["match_nll"] == pytest.approx(expected / len(scores), rel=1e-5)


def test_a_model_without_vectors_is_asked_among_few(drawn: Data) -> None:
    """An untrained model is at chance, and the right image is never among the wrong ones."""
    torch.manual_seed(0)
    model, split = adapter.build("soho", {}, drawn).eval(), drawn.test
    with torch.no_grad():
        scores_IK, own_IK = measure._among_few(model, split)
    assert own_IK[:, 0].all() and own_IK.sum() == len(split.images) and scores_IK.shape[1] >= 2
    learner = Learner(model, drawn, split, seed=1, lr=3e-3)
    before = measure.retrieval(model, split)["match_nll"]
    learner.retrieval(40)
    assert measure.retrieval(learner.model, split)["match_nll"] < before


@pytest.mark.slow
def test_captions_are_written_of_training_images_alone(regions: Data) -> None:
    captioner = Arm(name="c", label="c", family="xgpt", fine_tuning=FineTuning(budgets=(60,)))
    split = regions.train(1)
    more = _written_besides(captioner, 2, split, 1, regions)
    own, new = len(split.captions), more.captions.words[len(split.captions) :]
    assert more.captions.words[:own] == split.captions.words and 0 < len(new) <= 2 * SIZES["train"]
    assert more.images is split.images and int(more.captions.owner_N.max()) < SIZES["train"]
    for text, owner in zip(new, more.captions.owner_N[own:].tolist(), strict=True):
        assert text not in split.references[owner]
