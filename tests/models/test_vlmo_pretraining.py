"""VLMo's four objectives: definitions, pairs, texts alone, images alone."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_vlmo import build_tiny, losses, random_batch

from vlp_models.data.batch import Batch
from vlp_models.errors import ParamsError
from vlp_models.models.layers.packing import Packing
from vlp_models.models.vlmo.image_tokens import nearest_codes, random_codes
from vlp_models.models.vlmo.pretraining import mask_words
from vlp_models.objectives.contrastive import EmbeddedPairs, image_text_contrast
from vlp_models.objectives.masked_modeling import select_blocks, select_words
from vlp_models.objectives.matching import different_image_mask, draw_hard_negatives

ALL = ("itc", "itm", "mlm", "mim")


def test_contrast_equals_slow_reference_without_same_image_negatives() -> None:
    torch.manual_seed(0)
    texts, images = (F.normalize(torch.randn(4, 8), dim=-1) for _ in range(2))
    ids = ("a", "b", "a", "c")
    loss = image_text_contrast(texts, images, ids, torch.tensor(5.0))
    total = 0.0
    for i in range(4):
        others = [j for j in range(4) if j == i or ids[j] != ids[i]]
        own = math.exp(5 * float(texts[i] @ images[i]))
        total -= math.log(own / sum(math.exp(5 * float(texts[i] @ images[j])) for j in others)) / 2
        total -= math.log(own / sum(math.exp(5 * float(texts[j] @ images[i])) for j in others)) / 2
    assert loss.sum.item() == pytest.approx(total, rel=1e-5) and loss.count == 4
    nothing = image_text_contrast(texts[:0], images[:0], (), torch.tensor(5.0))
    assert nothing.sum.item() == 0 and nothing.count == 0


def test_contrast_over_micro_batches_equals_the_large_batch() -> None:
    """Sums and gradients of the micro-batches, also the temperature's, add up to the large batch's."""
    torch.manual_seed(0)
    scale = torch.tensor(7.0, dtype=torch.float64, requires_grad=True)
    raw = [torch.randn(7, 5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    ids = ("a", "b", "a", "c", "d", "c", "e")

    def embedded() -> list[torch.Tensor]:
        return [F.normalize(x, dim=-1) for x in raw]

    texts, images = embedded()
    large = image_text_contrast(texts, images, ids, scale)
    expected = torch.autograd.grad(large.sum, [*raw, scale])
    found, total, count = [torch.zeros_like(x) for x in (*raw, scale)], 0.0, 0.0
    parts = [slice(0, 3), slice(3, 5), slice(5, 7)]
    for part in parts:
        texts, images = embedded()
        rest = [i for i in range(7) if i not in range(7)[part]]
        others = EmbeddedPairs(
            texts_KE=texts[rest].detach(), images_KE=images[rest].detach(), image_ids=tuple(ids[i] for i in rest)
        )
        one = image_text_contrast(texts[part], images[part], ids[part], scale, other_pairs=others)
        total, count = total + one.sum.item(), count + float(one.count)
        for gradient, more in zip(found, torch.autograd.grad(one.sum, [*raw, scale]), strict=True):
            gradient += more
    assert total == pytest.approx(large.sum.item(), rel=1e-12) and count == float(large.count)
    for gradient, right in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, right, rtol=0, atol=1e-12)


def test_itc_mlm_itm_equal_their_definitions() -> None:
    """One batched pass over 4 pairs per sample equals separate passes over each kind of pair."""
    model, batch = build_tiny(), random_batch(image_ids="abac")
    result = losses(model, batch)
    texts, images = model.embed_text(batch.text), model.embed_image(batch.image)
    itc = image_text_contrast(texts, images, batch.image_ids, model.contrast_scale())
    torch.testing.assert_close(result["itc"].mean, itc.mean)

    generator = torch.Generator().manual_seed(0)
    masked, ids = mask_words(batch.text, model.config, {"mlm": None}, generator, 0.3)
    fused = model.fuse(batch.image, dataclasses.replace(batch.text, ids_BT=ids))
    logits = model.word_head(fused.text_BTD[masked])
    torch.testing.assert_close(result["mlm"].mean, F.cross_entropy(logits, batch.text.ids_BT[masked]))
    assert float(result["mlm"].count) == float(masked.sum()) > 0

    negative = different_image_mask(batch.image_ids)
    image_of, _ = draw_hard_negatives(texts @ images.T * model.contrast_scale(), negative, generator)
    text_of, _ = draw_hard_negatives(images @ texts.T * model.contrast_scale(), negative, generator)
    assert all(negative[i, j] for i, j in enumerate(image_of.tolist()))
    state, own = model.encode_image(batch.image), torch.arange(4)
    right = model.score(state, batch.text, own)
    wrong = torch.cat([model.score(state, batch.text, image_of), model.score(state, batch.text.select(text_of), own)])
    expected = (F.softplus(-right).sum() + F.softplus(wrong).sum()) / 12
    torch.testing.assert_close(result["itm"].mean, expected)
    assert float(result["itm"].count) == 12


def test_mlm_and_itm_share_one_pass_and_only_masked_words_are_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch = build_tiny(), random_batch(image_ids="abcd")
    joint: list[tuple[int, int]] = []
    embedded: list[int] = []
    decoded: list[int] = []
    pair_states = model.pair_states

    def watched(patches: torch.Tensor, ids: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        joint.append((len(patches), len(ids)))
        return pair_states(patches, ids, *rest)

    monkeypatch.setattr(model, "pair_states", watched)
    model.image_embedding.register_forward_hook(lambda module, given, found: embedded.append(len(found)))
    model.word_head.register_forward_hook(lambda module, given, found: decoded.append(len(found)))
    found = losses(model, batch, ("itc", "itm", "mlm"))
    assert joint == [(16, 16)], "four pairs each: with words hidden, as it is, and two that do not belong together"
    assert embedded == [4], "each image's patches are embedded once"
    assert decoded == [int(found["mlm"].count)] and 0 < decoded[0] < int(batch.text.mask_BT.sum())


def test_mim_predicts_hidden_patches_and_does_not_depend_on_them() -> None:
    model, batch = build_tiny(), random_batch()
    before = losses(model, batch, ("mim",))["mim"]
    hidden = model.hidden_patches(batch.image, None, torch.Generator().manual_seed(0))
    assert float(before.count) == float(hidden.sum()) == 4 * 6
    pixels = batch.image.pixels_B3HW.clone()
    tiles = pixels.unfold(2, 4, 4).unfold(3, 4, 4)  # a view [B, 3, 4, 4, 4, 4]
    tiles.permute(0, 2, 3, 1, 4, 5)[hidden.view(4, 4, 4)] = 3.0
    changed = dataclasses.replace(batch, image=dataclasses.replace(batch.image, pixels_B3HW=pixels))
    states = [model.image_states(model.encode_image(b.image, hidden), model.biases(0)) for b in (batch, changed)]
    assert torch.equal(*states)
    tokens = model.image_tokens(batch.image.pixels_B3HW)
    logits = model.image_head(states[0][:, 1:][hidden])
    torch.testing.assert_close(before.mean, F.cross_entropy(logits, tokens[hidden]))
    assert not torch.equal(tokens, model.image_tokens(pixels))


def test_stand_in_tokens_are_the_same_on_every_machine() -> None:
    projection, codes = random_codes(4, 11)
    assert projection.shape == (48, 16) and torch.allclose(codes.norm(dim=1), torch.ones(11))
    torch.manual_seed(3)
    again = random_codes(4, 11)
    assert torch.equal(projection, again[0]) and torch.equal(codes, again[1])
    picture = torch.randn(1, 3, 8, 8)
    tokens = nearest_codes(picture, 4, projection, codes)
    for number, (y, x) in enumerate([(0, 0), (0, 4), (4, 0), (4, 4)]):
        patch = picture[0, :, y : y + 4, x : x + 4].flatten() @ projection
        assert tokens[0, number] == (codes @ patch).argmax()


def test_blocks_mask_the_given_share_in_few_pieces() -> None:
    hidden = select_blocks(50, (14, 14), 0.4, torch.Generator().manual_seed(0))
    assert (hidden.sum(1) == round(0.4 * 196)).all()
    again = select_blocks(50, (14, 14), 0.4, torch.Generator().manual_seed(0))
    assert torch.equal(hidden, again) and not torch.equal(hidden[0], hidden[1])
    grid = hidden.view(50, 14, 14)
    edges = (grid[:, 1:] != grid[:, :-1]).sum() + (grid[:, :, 1:] != grid[:, :, :-1]).sum()
    scattered = torch.rand(50, 14, 14, generator=torch.Generator().manual_seed(0)) < 0.4
    by_chance = (scattered[:, 1:] != scattered[:, :-1]).sum() + (scattered[:, :, 1:] != scattered[:, :, :-1]).sum()
    assert edges < by_chance / 2
    assert select_blocks(0, (3, 3), 0.4, torch.Generator()).shape == (0, 9)
    assert not select_blocks(2, (3, 3), 0.0, torch.Generator()).any()


def test_whole_words_are_masked_together() -> None:
    words = torch.tensor([[-1, 0, 0, 1, 2, 2, 2, -1], [-1, 0, 1, 1, -1, -1, -1, -1]]).repeat(200, 1)
    chosen = select_words(words, 0.3, torch.Generator().manual_seed(0))
    assert not chosen[words < 0].any()
    for row, pieces in zip(chosen, words, strict=True):
        for word in range(3):
            assert len(set(row[pieces == word].tolist())) <= 1
    firsts = chosen[::2][:, [1, 3, 4]]
    assert 0.25 < firsts.double().mean() < 0.35


def test_losses_of_texts_alone_and_images_alone() -> None:
    """MLM of a text alone uses the language experts and no other part of the model."""
    model, batch = build_tiny(), random_batch()
    texts = dataclasses.replace(batch, image=None)
    loss = losses(model, texts, ("mlm",))["mlm"]
    masked, ids = mask_words(texts.text, model.config, {"mlm": None}, torch.Generator().manual_seed(0), 0.3)
    words = Packing.of(batch.text.mask_BT)
    states = words.pad(model.text_states(ids, words, model.biases(9, image=False)))
    torch.testing.assert_close(loss.mean, F.cross_entropy(model.word_head(states[masked]), batch.text.ids_BT[masked]))
    loss.mean.backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None}
    assert not [name for name in reached if "vision" in name or "image" in name or "cross" in name]
    images = losses(model, dataclasses.replace(batch, text=None), ("mim",))["mim"]
    torch.testing.assert_close(images.mean, losses(model, batch, ("mim",))["mim"].mean)
    for without, names in (("image", ["itc", "mim"]), ("text", ["itm", "mlm"])):
        half = Batch(**{**{f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}, without: None})
        with pytest.raises(ParamsError, match=rf"can't learn \['{names[0]}', '{names[1]}'\] from `view"):
            losses(model, half, names)
    with pytest.raises(ParamsError, match=r"can't learn \['moc'\]"):
        losses(model, batch, ("moc",))
    with pytest.raises(ParamsError, match="image_codes"):
        losses(build_tiny(image_codes=0), batch, ("mim",))


def test_counts_equal_those_of_the_losses() -> None:
    model, batch = build_tiny(), random_batch(image_ids="aabc")
    for names in (("mlm",), ("mim",), ("itc",), ("itm",), ALL):
        found = losses(model, batch, names)
        counts = model.pretraining_counts(
            batch, objectives=dict.fromkeys(names), generator=torch.Generator().manual_seed(0), mask_probability=0.3
        )
        assert counts is not None
        assert {name: float(count) for name, count in counts.items()} == {n: float(x.count) for n, x in found.items()}


@pytest.mark.parametrize("size", [0, 1, 2])
def test_small_batches_give_no_error_and_no_nan(size: int) -> None:
    """No rows; one image, so no negatives; a single negative each."""
    model = build_tiny(contrast="both").train()
    batch = random_batch(max(size, 1))
    batch = batch if size else batch.empty()
    result = losses(model, batch)
    torch.stack([loss.mean for loss in result.values()]).sum().backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())
    assert float(result["itc"].count) == (size if size > 1 else 0)
    assert float(result["itm"].count) == (3 * size if size > 1 else size)
    one_image = losses(model, dataclasses.replace(random_batch(3), image_ids=("a", "a", "a")))
    assert one_image["itc"].mean.item() == 0.0 and float(one_image["itm"].count) == 3


def test_each_sample_learns_only_its_objectives() -> None:
    model, batch = build_tiny(), random_batch(4)
    only = torch.tensor([True, False, True, False])
    rows = only.nonzero().squeeze(1)
    asked = losses(model, batch, dict.fromkeys(("itc", "mim"), only))
    alone = losses(model, batch.select(rows), ("itc",))
    torch.testing.assert_close(asked["itc"].mean, alone["itc"].mean)
    assert float(asked["mim"].count) == 2 * 6
    itm = losses(model, batch, {"itm": only})["itm"]
    assert float(itm.count) == 3 * 2
    others, every = losses(model, batch, {"itm": ~only})["itm"], losses(model, batch, ("itm",))["itm"]
    torch.testing.assert_close(itm.sum + others.sum, every.sum)
    empty = losses(model, batch, dict.fromkeys(ALL, only & False))
    assert all(loss.mean.item() == 0.0 for loss in empty.values())


def test_two_texts_of_one_image_are_not_negatives() -> None:
    model, batch = build_tiny(), random_batch(2)
    batch = dataclasses.replace(batch, text=dataclasses.replace(batch.text, owner_N=torch.tensor([0, 0])))
    found = losses(model, batch, ("itc", "itm"))
    assert float(found["itc"].count) == 0 and float(found["itm"].count) == 2  # no negatives
    assert model.contrast_pairs(batch)[0].image_ids == ("a", "a")
    counts = model.pretraining_counts(
        batch, objectives={"itc": None, "itm": None}, generator=torch.Generator(), mask_probability=0.3
    )
    assert counts is not None and {name: int(count) for name, count in counts.items()} == {"itc": 0, "itm": 2}


def test_same_image_negatives() -> None:
    """The losses are the same as with different image ids."""
    names, config = ("itc", "itm"), {"same_image_negatives": True, "contrast": "both"}
    model, twins, apart = build_tiny(**config), random_batch(image_ids="abac"), random_batch(image_ids="abcd")
    for one, other in zip(losses(model, twins, names).values(), losses(model, apart, names).values(), strict=True):
        torch.testing.assert_close(one.mean, other.mean, rtol=0, atol=0)
    assert losses(build_tiny(), twins, ("itc",))["itc"].mean != losses(build_tiny(), apart, ("itc",))["itc"].mean
    shared = dataclasses.replace(random_batch(2), image_ids=("a", "b"))
    shared = dataclasses.replace(shared, text=dataclasses.replace(shared.text, owner_N=torch.tensor([0, 0])))
    found = losses(model, shared, names)
    assert {name: float(loss.count) for name, loss in found.items()} == {"itc": 2, "itm": 6}
    counts = model.pretraining_counts(
        shared, objectives=dict.fromkeys(names), generator=torch.Generator(), mask_probability=0.3
    )
    assert counts is not None and {name: int(count) for name, count in counts.items()} == {"itc": 2, "itm": 6}
    assert len(set(model.contrast_pairs(shared)[0].image_ids)) == 2


def test_temperature_beyond_its_limit_still_has_a_gradient() -> None:
    model = build_tiny()
    with torch.no_grad():
        model.log_scale.fill_(math.log(120))
    scale = model.contrast_scale()
    assert scale.item() == pytest.approx(100)
    (gradient,) = torch.autograd.grad(scale, model.log_scale)
    assert gradient.item() == pytest.approx(120)


def test_contrast_pairs_equal_the_embeddings_in_training() -> None:
    """With the same random state, including dropout and drop path: contrast over an update depends on it."""
    model, batch = build_tiny(drop_path=0.4, dropout=0.3).train(), random_batch()
    torch.manual_seed(5)
    (pairs,) = model.contrast_pairs(batch)
    torch.manual_seed(5)
    found = losses(model, batch)["itc"]
    expected = image_text_contrast(pairs.texts_KE, pairs.images_KE, pairs.image_ids, model.contrast_scale())
    torch.testing.assert_close(found.mean, expected.mean)
    assert not pairs.texts_KE.requires_grad
    (again,) = model.contrast_pairs(batch)
    assert not torch.equal(again.texts_KE, pairs.texts_KE)
