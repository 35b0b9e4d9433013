"""VLMo's structure: encoders against slow references, routing to experts, invariances, checkpoints."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from slow_vlmo import Slow
from tiny_vlmo import build_tiny, losses, padded, random_batch, trimmed

from vlp_models.data.batch import Pixels, Regions
from vlp_models.errors import CheckpointError, DataError, ParamsError
from vlp_models.models.layers.packing import Packing
from vlp_models.models.partial_load import load_partial
from vlp_models.models.vlmo.interpolation import (
    geometric_offsets,
    interpolate_biases,
    resize_text_biases,
    spline_matrix,
)
from vlp_models.models.vlmo.transformer import MoMEBlock, Route
from vlp_models.params import OptimizerParams, to_plain
from vlp_models.params.runs import GroupParams
from vlp_models.training.optim import Freezing, build_optimizer

VARIANTS: list[dict[str, Any]] = [
    {},
    {"positions": "absolute", "layer_scale": 0.0},
    {"feed_forward": "shared"},
    {"vl_start": 3},
    {"vl_start": 0, "contrast": "both"},
]


@pytest.mark.parametrize("config", VARIANTS, ids=str)
def test_encoders_equal_slow_reference(config: dict[str, Any]) -> None:
    """Of one sample at a time, without padding: so no other sample, and no padding, has an effect."""
    model, batch = build_tiny(**config), random_batch(3)
    slow, text = Slow(model), batch.text
    words = Packing.of(text.mask_BT)
    length = text.ids_BT.shape[1]
    with torch.no_grad():
        patches = model.encode_image(batch.image)
        images = model.image_states(patches, model.biases(0)).numpy()
        texts = words.pad(model.text_states(text.ids_BT, words, model.biases(length, image=False))).numpy()
        fused = model.fuse(batch.image, text)
    for i in range(3):
        ids = text.ids_BT[i][text.mask_BT[i]].tolist()
        pixels = batch.image.pixels_B3HW[i].numpy()
        np.testing.assert_allclose(images[i], slow.image(pixels), atol=1e-10)
        np.testing.assert_allclose(texts[i, : len(ids)], slow.text(ids), atol=1e-10)
        pair = slow.pair(pixels, ids)
        np.testing.assert_allclose(fused.image_BRD[i].numpy(), pair[:17], atol=1e-10)
        np.testing.assert_allclose(fused.text_BTD[i, : len(ids)].numpy(), pair[17:], atol=1e-10)
        pooled = np.tanh(slow.weights["pooler.weight"] @ pair[17] + slow.weights["pooler.bias"])
        np.testing.assert_allclose(fused.pooled_BP[i].numpy(), pooled, atol=1e-10)


def test_cached_biases_are_valid_until_a_weight_changes() -> None:
    model, batch = build_tiny(), random_batch()

    def pooled(text: Any) -> torch.Tensor:
        return model.fuse(batch.image, text).pooled_BP

    short = trimmed(batch, torch.tensor([1])).text
    one = Pixels(pixels_B3HW=batch.image.pixels_B3HW[1:2])
    fresh = [pooled(batch.text), model.fuse(one, short).pooled_BP]
    with torch.no_grad():
        for _ in range(2):  # the longest first, so that the shorter one's are a corner of the cached table
            kept = [pooled(batch.text), model.fuse(one, short).pooled_BP]
            assert all(torch.allclose(a, b, rtol=0, atol=1e-13) for a, b in zip(fresh, kept, strict=True))
        with torch.inference_mode():
            assert torch.allclose(pooled(batch.text), fresh[0], rtol=0, atol=1e-13)
            made_there = build_tiny()
            assert torch.allclose(made_there.fuse(batch.image, batch.text).pooled_BP, fresh[0], rtol=0, atol=1e-13)
        assert model.position_bias is not None
        model.position_bias.text.mul_(2)
        assert not torch.allclose(pooled(batch.text), fresh[0], rtol=0, atol=1e-6)
        state = {name: tensor.clone() for name, tensor in build_tiny().state_dict().items()}
        model.load_state_dict(state)
        assert torch.allclose(pooled(batch.text), fresh[0], rtol=0, atol=1e-13)


@pytest.mark.parametrize("route", ["each", "vision_language"])
def test_stochastic_depth_draws_for_image_and_text_of_a_pair(route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once each for their own experts; once per pair for attention and for the vision-language expert."""
    pairs, drop = 400, 0.25
    experts = ["vision", "language", "vision_language"]
    block = MoMEBlock(8, 2, 8, experts=experts, layer_scale=0.0, drop_path=drop, eps=1e-6).train()
    words = Packing.of(torch.arange(4) < torch.arange(1, 5).repeat(pairs // 4)[:, None])
    joint = Packing.of(torch.ones(pairs, 3, dtype=torch.bool)).concat(words)

    def kept(attention: float, expert: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return bool [pairs]: whose image and whose text keep the sub-layer that adds 1 while the other adds 0."""
        monkeypatch.setattr(block.attention, "forward", lambda x, *_: torch.full_like(x, attention))
        for each in block.experts.values():
            monkeypatch.setattr(each, "forward", lambda x: torch.full_like(x, expert))
        y = block(torch.zeros(len(joint), 8), None, joint, route)[:, 0] * (1 - drop)
        image, text = y[: joint.split].view(pairs, 3), words.pad(y[joint.split :, None])[..., 0]
        assert torch.equal(image, image[:, :1].expand(-1, 3)), "all tokens of an image share its draw"
        assert torch.equal(text, text[:, :1] * words.mask_BT), "and all tokens of a text"
        return image[:, 0].round().bool(), text[:, 0].round().bool()

    torch.manual_seed(0)
    image, text = kept(attention=1.0, expert=0.0)
    assert torch.equal(image, text)
    image, text = kept(attention=0.0, expert=1.0)
    for side in (image, text):
        assert abs(int((~side).sum()) - drop * pairs) < 40
    if route == "each":
        assert abs(int((image != text).sum()) - 2 * drop * (1 - drop) * pairs) < 40
    else:
        assert torch.equal(image, text)


def test_frozen_parts_are_bitwise_unchanged() -> None:
    """The second stage: texts alone, attention and vision experts frozen; the language experts learn."""
    model = build_tiny(drop_path=0.2).train()
    frozen = ("attention", "vision_expert", "image_embedding")
    groups = {name: GroupParams(frozen=True) for name in frozen}
    freezing = Freezing(model, groups)
    freezing.train(0)
    optimizer = build_optimizer(model, OptimizerParams(lr=0.1, muon_lr=0.1, groups=groups))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batch = dataclasses.replace(random_batch(), image=None)
    for seed in range(3):
        optimizer.zero_grad()
        losses(model, batch, ("mlm",), seed=seed)["mlm"].mean.backward()
        optimizer.step()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    own = {id(p) for name in frozen for p in model.parameter_groups()[name]}
    assert not changed & {name for name, p in model.named_parameters() if id(p) in own}
    for layer in range(3):
        assert f"blocks.{layer}.experts.language.ffn.0.weight" in changed
    assert {"text_embedding.words.weight", "position_bias.text", "norm.weight", "word_head.weight"} <= changed
    assert not [name for name in changed if "vision" in name or "image" in name]


def test_spline_is_exact_for_cubics_and_interpolates() -> None:
    places = geometric_offsets(6, 11)
    assert places[-1] == pytest.approx(11, abs=1e-4) and places[6] == 0 and places[7] == 1
    wanted = np.linspace(places[0], places[-1], 33)
    cubic = lambda x: 0.1 * x**3 - x**2 + 2 * x - 3  # noqa: E731
    np.testing.assert_allclose(spline_matrix(places, wanted) @ cubic(places), cubic(wanted), atol=1e-9)
    values = np.random.default_rng(0).normal(size=13)
    np.testing.assert_allclose(spline_matrix(places, places) @ values, values, atol=1e-10)
    np.testing.assert_allclose(spline_matrix(np.array([0.0, 1.0]), np.array([0.5])), [[0.5, 0.5]])


def test_positions_are_interpolated_only_if_requested() -> None:
    before = build_tiny()
    config = to_plain(before.config)
    state = before.state_dict()
    with pytest.raises(CheckpointError, match="interpolate_positions: true"):
        load_partial(build_tiny(1, side=24), state, config)
    model = build_tiny(1, side=24, interpolate_positions=True, max_positions=20)
    report = load_partial(model, state, config)
    assert not report.left_out and not report.missing
    old, new = state["position_bias.image"], model.state_dict()["position_bias.image"]
    assert torch.equal(new[:, -3:], old[:, -3:])
    center = lambda table, grid: table[:, (2 * grid - 1) * (grid - 1) + grid - 1]  # noqa: E731 - a patch to itself
    torch.testing.assert_close(center(new, 6), center(old, 4))
    even = torch.arange(7.0).double()
    plane = even[:, None] + 0 * even  # what only depends on y still does
    wide = interpolate_biases(torch.cat([plane.flatten(), torch.zeros(3)])[None], 4, 6)[0, :-3].view(11, 11)
    assert torch.allclose(wide, wide[:, :1]) and bool((wide.diff(dim=0) > 0).all())
    text_old, text_new = state["position_bias.text"], model.state_dict()["position_bias.text"]
    torch.testing.assert_close(resize_text_biases(text_new, 12), text_old)
    batch = random_batch()
    torch.testing.assert_close(model.embed_text(batch.text), before.embed_text(batch.text))
    with pytest.raises(CheckpointError, match="hidden: 32 in the model, 16 in the weights"):
        load_partial(build_tiny(hidden=32), state, config)
    absolute = build_tiny(positions="absolute")
    bigger = build_tiny(positions="absolute", side=24, interpolate_positions=True)
    found = load_partial(bigger, absolute.state_dict(), to_plain(absolute.config))
    assert not found.left_out and not found.missing


def test_second_image_type() -> None:
    """It starts as a copy of the first image's type and does not affect single images."""
    before, model = build_tiny(), build_tiny(1, second_image_type=True)
    report = load_partial(model, before.state_dict(), to_plain(before.config))
    assert not report.missing and not report.left_out
    batch = random_batch()
    pictures = batch.image.pixels_B3HW
    pairs = Pixels(pixels_B3HW=pictures, place_B=torch.arange(4) % 2)
    own = before.fuse(batch.image, batch.text).pooled_BP
    torch.testing.assert_close(model.fuse(pairs, batch.text).pooled_BP, own)
    with torch.no_grad():
        assert model.image_embedding.second_type_1D is not None
        model.image_embedding.second_type_1D.add_(torch.linspace(-1, 1, 16))
    found = model.fuse(pairs, batch.text).pooled_BP
    torch.testing.assert_close(found[::2], own[::2])
    assert not torch.isclose(found[1::2], own[1::2]).all(1).any()
    torch.testing.assert_close(model.fuse(batch.image, batch.text).pooled_BP, own)
    torch.testing.assert_close(before.fuse(pairs, batch.text).pooled_BP, own)
    assert load_partial(before, model.state_dict(), to_plain(model.config)).left_out == [
        "image_embedding.second_type_1D"
    ]


def test_invalid_inputs_are_refused() -> None:
    model, batch = build_tiny(), random_batch()
    with pytest.raises(DataError, match="3x16x16"):
        model.embed_image(Pixels(pixels_B3HW=torch.zeros(1, 3, 8, 8).double()))
    regions = Regions(*[torch.zeros(1)] * 0, **{n: torch.zeros(1) for n in Regions.__dataclass_fields__})
    with pytest.raises(DataError, match="pixels"):
        model.embed_image(regions)
    with pytest.raises(ParamsError, match="max_positions is 12"):
        model.embed_text(padded(batch.text, 9))
