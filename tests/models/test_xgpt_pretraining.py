"""XGPT's objectives under every recipe: alternating, on some samples, and in two passes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_xgpt import tiny_xgpt, toy_xgpt
from toy_dataset import Toy, make_toy
from two_pass_toys import two_pass

from vlp_models.data.batch import Batch
from vlp_models.models.xgpt.model import XGPT
from vlp_models.objectives.generation import region_generation
from vlp_models.objectives.loss import Loss
from vlp_models.objectives.masked_modeling import word_positions

ALL = ("ic", "imlm", "ida", "tifg")
TURNS = dict.fromkeys(ALL, 1.0)


def losses(model: XGPT, batch: Batch, objectives: Any = ALL, seed: int = 0) -> dict[str, Loss]:
    """objectives: names, or the samples that train each."""
    asked = objectives if isinstance(objectives, dict) else dict.fromkeys(objectives)
    generator = torch.Generator().manual_seed(seed)
    return model.pretraining_losses(batch, objectives=asked, generator=generator, mask_probability=0.15)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("toy"))


@pytest.mark.parametrize(
    ("name", "reached", "not_reached"),
    [
        ("ic", {"refiner"}, {"matching", "first_region", "region_head"}),
        ("imlm", {"refiner"}, {"matching", "first_region", "region_head"}),
        ("ida", {"refiner", "matching"}, {"first_region", "region_head"}),
        # The regions are a target and a given: nothing teaches the model to make them easier.
        ("tifg", {"first_region", "region_head"}, {"matching", "refiner", "region_embedding", "word_bias"}),
    ],
)
def test_single_objective_reaches_its_own_modules(
    make_batch: Any, name: str, reached: set[str], not_reached: set[str]
) -> None:
    model = tiny_xgpt()
    losses(model, make_batch(), [name])[name].mean.backward()
    found = {n.split(".")[0] for n, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}
    assert reached | {"layers", "text_embedding"} <= found and not not_reached & found


def test_all_objectives_together_train_every_weight(make_batch: Any) -> None:
    """Including all of the matching, whose first third is left out because it has no effect."""
    model = tiny_xgpt()
    torch.stack([loss.mean for loss in losses(model, make_batch()).values()]).sum().backward()
    untouched = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 1e-9}
    assert untouched == set(), untouched


def test_tifg_target_has_no_feature_dropout(make_batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """TIFG's target is the same in training and validation, and belongs to each text's image."""
    targets: list[torch.Tensor] = []

    def seen(generated: torch.Tensor, target: torch.Tensor, **more: Any) -> Loss:
        targets.append(target)
        return region_generation(generated, target, **more)

    monkeypatch.setattr("vlp_models.models.xgpt.model.region_generation", seen)
    model, batch = tiny_xgpt(feature_dropout=0.5), make_batch()
    for mode in (True, False):
        losses(model.train(mode), batch, ["tifg"])
    assert torch.equal(*targets) and not targets[0].requires_grad
    dropped = model.train().region_embedding(batch.image)[0]
    assert not torch.equal(dropped, model.region_embedding(batch.image, drop=False)[0])


def test_predictions_do_not_depend_on_hidden_words(make_batch: Any) -> None:
    """Another word in the fragment, or in a span, changes targets and what the decoder has read, not the predictions of
    the first hidden word; nor does the encoder of IDA see how many words a span hid."""
    model, batch = tiny_xgpt(), make_batch()
    found = model.corrupt(batch, objectives=dict.fromkeys(ALL), generator=torch.Generator(), mask_probability=0.0)
    words, ids = found.words_BT, batch.text.ids_BT
    first = words & (words.cumsum(1) == 1)
    assert (words.sum(1) > 0).all() and not (words & ~word_positions(batch.text.mask_BT)).any()
    masked = ids.masked_fill(words, 4)
    other = torch.where(words, (ids + 1 - 5) % 25 + 5, ids)
    image = model.encode_image(batch.image)
    logits = [
        model.predict_fragment(masked, words, dataclasses.replace(batch.text, ids_BT=read), image)[first[words]]
        for read in (ids, other)
    ]
    assert torch.equal(*logits)
    assert found.infilled_BU is not None and found.infilled_mask_BU is not None
    assert (found.infilled_BU == 4).any(1).all()
    assert (found.infilled_mask_BU.sum(1) <= batch.text.mask_BT.sum(1)).all()


def test_random_words_are_no_special_tokens(make_batch: Any) -> None:
    model, batch = tiny_xgpt(imlm_fragment=1.0), make_batch()
    seen, places = set(), 0
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        found = model.corrupt(batch, objectives={"imlm": None}, generator=generator, mask_probability=0.0)
        seen |= set(found.ids_BT[found.words_BT].tolist())
        places += int((found.ids_BT == 4).sum())
        assert torch.equal(found.ids_BT[~found.words_BT], batch.text.ids_BT[~found.words_BT])
    assert min(seen) == 4 and max(seen) == 29
    assert places / (60 * int(word_positions(batch.text.mask_BT).sum())) == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize("name", ALL)
def test_other_samples_have_no_effect(make_batch: Any, name: str) -> None:
    model, batch = tiny_xgpt(), make_batch()
    learners = torch.tensor([True, False, True, False])
    some = losses(model, batch, {name: learners})[name]
    none = losses(model, batch, {name: torch.zeros(4, dtype=torch.bool)})[name]
    assert none.count == 0 and none.sum.item() == 0 and none.sum.requires_grad
    none.sum.backward()
    # A sample's corruption does not depend on which other samples train, so these are the rows of the whole loss.
    everybody = losses(model, batch, {name: torch.ones(4, dtype=torch.bool)})[name]
    others = losses(model, batch, {name: ~learners})[name]
    assert some.count + others.count == everybody.count == losses(model, batch, [name])[name].count
    torch.testing.assert_close(some.sum + others.sum, everybody.sum)
    assert losses(model, batch.empty(), [name])[name].count == 0


def test_imlm_on_texts_is_mass(make_batch: Any) -> None:
    model, batch = tiny_xgpt(), make_batch()
    alone = losses(model, dataclasses.replace(batch, image=None), ["imlm"])["imlm"]
    assert alone.count == losses(model, batch, ["imlm"])["imlm"].count and alone.mean > 0
    alone.mean.backward()
    assert model.region_embedding.features.weight.grad is None


def test_two_passes(make_batch: Any) -> None:
    """The second pass's encoder reads the first one's predictions of the fragment; other objectives run once."""
    model, batch = tiny_xgpt(), make_batch()
    made = two_pass(model, "a", weights={"ic": 1.0, "imlm": 0.5}, sample="argmax")
    loss = made(batch, update=0, generator=torch.Generator().manual_seed(4))
    assert set(loss.losses) == {"ic", "imlm", "imlm_pass2"} and loss.weights["imlm_pass2"] == 0.5
    corruption = model.corrupt(
        batch,
        objectives=dict.fromkeys(("ic", "imlm")),
        generator=torch.Generator().manual_seed(4),
        mask_probability=0.0,
    )
    words, image = corruption.words_BT, model.encode_image(batch.image)
    first = model.predict_fragment(corruption.ids_BT, words, batch.text, image)
    read = corruption.ids_BT.clone()
    read[words] = first.argmax(-1)
    second = model.predict_fragment(read, words, batch.text, image)
    expected = torch.nn.functional.cross_entropy(second, batch.text.ids_BT[words])
    torch.testing.assert_close(loss.losses["imlm_pass2"].mean, expected)
    assert not torch.allclose(first, second)


def test_alternating_updates_use_one_objective_and_one_batch(toy: Toy, tmp_path: Path) -> None:
    model = toy_xgpt(toy.tokenizer.vocab_size, dropout=0.0, attention_dropout=0.0)
    _, result = toy.fit(tmp_path, model, objectives=TURNS, mix="alternate", reuse_batch=True, max_epochs=1)
    rows = [{key for key in row if key in ALL} for row in result.rows]
    assert rows[:8] == [{name} for name in ALL] * 2 and result.steps == 24  # six batches, four turns each
    assert {"val_ic", "val_imlm", "val_ida", "val_tifg", "val_tifg_squared"} <= set(result.rows[-1])
