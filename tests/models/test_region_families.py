"""What holds in every family that reads regions and writes captions: which outputs depend on which inputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import tiny_tden
import tiny_unified_vlp
import tiny_xgpt
import torch
from tiny_tden import random_batch
from tiny_unified_vlp import MASK, scored

from vlp_models.data.batch import Batch, Pixels, Text
from vlp_models.errors import DataError, ParamsError
from vlp_models.objectives.masked_modeling import Corruption

TDEN: list[dict[str, Any]] = [
    {},
    {
        "separate_ffn": True,
        "tie_lm_head": False,
        "ism_pooling": "all_layers",
        "similarity_dim": 24,
        "pooler_batch_norm": True,
        "understanding_decoder_mask": "bidirectional",
        "fusion": "product",
    },
    {"use_decoder_in_fusion": False},
    {"fusion_decoder": "apart", "fusion_pooling": "all_layers", "fusion_dim": 24},
    {"structure": "two_stream", "ism_source": "cross_modal"},
    {"structure": "single_stream"},
]
BUILD = {
    "tden": tiny_tden.build_tiny,
    "unified_vlp": tiny_unified_vlp.tiny_unified_vlp,
    "xgpt": tiny_xgpt.tiny_xgpt,
}
# Every variant of a family, and those that decode differently
VARIANTS = [
    *(("tden", config) for config in TDEN),
    *(("unified_vlp", config) for config in tiny_unified_vlp.VARIANTS.values()),
    *(("xgpt", config) for config in tiny_xgpt.VARIANTS.values()),
]
DECODERS = [
    *(("tden", {"structure": structure}) for structure in ("decoupled", "two_stream", "single_stream")),
    *(("unified_vlp", tiny_unified_vlp.VARIANTS[name]) for name in ("paper", "public code")),
    *(("xgpt", tiny_xgpt.VARIANTS[name]) for name in tiny_xgpt.STRUCTURES),
]


def batch_for(family: str) -> Batch:
    return scored(random_batch()) if family == "unified_vlp" else random_batch()


@torch.no_grad()
def outputs(family: str, model: Any, batch: Batch) -> dict[str, torch.Tensor]:
    """Return all outputs that tasks and objectives use, one row per sample."""
    real, image = batch.text.mask_BT[..., None], batch.image
    found = {"logits": model.generation_logits(image, batch.text) * real}
    words = torch.zeros_like(batch.text.mask_BT)
    words[:, 1] = True
    read = batch.text.ids_BT.masked_fill(words, MASK)
    if family == "xgpt":
        states = model.encode_image(image)
        found["fragment"] = model.predict_fragment(read, words, batch.text, states)
        memory = model.encode_infilled(read, batch.text.mask_BT, states)
        found["denoised"] = model.predict_next(batch.text.ids_BT, words, memory)
        regions = []
        for row in torch.arange(len(batch))[:, None]:
            one = batch.select(row)
            regions.append(model.generate_regions(one.text, states.select(row), one.image).mean)
        return {**found, "regions": torch.stack(regions)}
    fused = model.fuse(image, batch.text)
    found |= {"pooled": fused.pooled_BP, "fused text": fused.text_BTD * real}
    if family == "unified_vlp":
        hidden = Corruption(ids_BT=read, words_BT=words)
        asked = dict.fromkeys(("bidirectional", "seq2seq"))
        return {**found, **model.masked_pass(batch, hidden, model.encode_corrupted(batch, hidden), asked).word_logits}
    if fused.decoder_BP is not None:
        found["decoder"] = fused.decoder_BP
    found |= {"image": model.embed_image(image), "text": model.embed_text(batch.text)}
    return {**found, "scores": model.score(model.encode_image(image), batch.text, torch.arange(len(batch)))}


@pytest.mark.parametrize(("family", "config"), VARIANTS)
def test_sample_depends_on_no_other_sample_and_on_no_padding(family: str, config: dict[str, Any]) -> None:
    model, batch = BUILD[family](**config), batch_for(family)
    together = outputs(family, model, batch)
    padded = ~batch.image.mask_BR[..., None]
    noise = dataclasses.replace(
        batch,
        image=dataclasses.replace(
            batch.image,
            features_BRF=batch.image.features_BRF.masked_fill(padded, 7.0),
            boxes_BR4=batch.image.boxes_BR4.masked_fill(padded, 0.5),
        ),
        text=dataclasses.replace(batch.text, ids_BT=batch.text.ids_BT.masked_fill(~batch.text.mask_BT, 9)),
    )
    backwards = outputs(family, model, noise.select(torch.tensor([3, 2, 1, 0])))
    for name, value in together.items():
        torch.testing.assert_close(backwards[name].flip(0), value, rtol=0, atol=1e-10, msg=name)
    for i in range(len(batch)):
        one = batch.select(torch.tensor([i]))
        length, regions = int(one.text.mask_BT.sum()), int(one.image.mask_BR.sum())
        cut = dataclasses.replace(
            one,
            image=type(one.image)(**{n: x[:, :regions] for n, x in vars(one.image).items() if x is not None}),
            text=Text(ids_BT=one.text.ids_BT[:, :length], mask_BT=one.text.mask_BT[:, :length]),
        )
        for name, value in outputs(family, model, cut).items():
            expected = together[name][i : i + 1]
            expected = expected[:, :length] if expected.dim() == 3 else expected
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize(("family", "config"), DECODERS)
def test_generation_does_not_depend_on_later_words(family: str, config: dict[str, Any]) -> None:
    model, batch = BUILD[family](**config), batch_for(family)
    logits = model.generation_logits(batch.image, batch.text)
    for changed in range(1, 8):
        ids = batch.text.ids_BT.clone()
        ids[:, changed] = (ids[:, changed] + 1) % 30
        other = model.generation_logits(batch.image, dataclasses.replace(batch.text, ids_BT=ids))
        assert torch.equal(other[:, :changed], logits[:, :changed])
        assert not torch.allclose(other[0, changed], logits[0, changed])


@pytest.mark.parametrize(("family", "config"), DECODERS)
def test_cached_steps_equal_teacher_forcing(family: str, config: dict[str, Any]) -> None:
    """Also with three hypotheses per image, shuffled within and across images."""
    model, batch = BUILD[family](**config), batch_for(family)
    size, length = batch.text.ids_BT.shape
    copies = torch.arange(size).repeat_interleave(3)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(5, 30, (3 * size, length), generator=generator)
    state, states = model.reorder(model.start(batch.image, max_len=length), copies), []
    for t in range(length):
        if t == 2:  # within images: what is known of an image stays shared
            index = copies * 3 + torch.randint(0, 3, (3 * size,), generator=generator)
            state, ids = model.reorder(state, index), ids[index]
            assert state.memory.images == size
        if t == 5:  # hypotheses leave unevenly, images change places
            index = torch.tensor([7, 0, 1, 11, 4])
            state, ids, copies = model.reorder(state, index), ids[index], copies[index]
        logits, state = model.step(ids[:, t], state)
        prefix = Text(ids_BT=ids[:, : t + 1], mask_BT=torch.ones_like(ids[:, : t + 1], dtype=torch.bool))
        expected = model.generation_logits(batch.image.select(copies), prefix)[:, -1]
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
        states.append(state)
    assert state.memory.images == size
    if family == "unified_vlp":
        for t, state in enumerate(states):
            assert state.memory is states[0].memory, "the image's keys and values are never copied"
            assert all(past.keys.shape[2] == t for past in state.past), "no [MASK] is kept, nor [CLS]"


@pytest.mark.parametrize(("family", "config"), [("tden", {}), *VARIANTS[len(TDEN) : len(TDEN) + 4], ("xgpt", {})])
def test_image_and_text_both_reach_every_output(family: str, config: dict[str, Any]) -> None:
    model, batch = BUILD[family](**config), batch_for(family)
    before = outputs(family, model, batch)
    ids = batch.text.ids_BT.clone()
    ids[:, 1] = 29
    for name, other in (
        ("image", dataclasses.replace(batch, image=batch.image.blanked())),
        ("text", dataclasses.replace(batch, text=dataclasses.replace(batch.text, ids_BT=ids))),
    ):
        after = outputs(family, model, other)
        # a vector of one side alone; what hides the first word, which is the one that was changed
        alone = {"image": {"text"}, "text": {"image", "bidirectional", "seq2seq", "fragment", "denoised"}}[name]
        for key in before.keys() - alone:
            assert not torch.allclose(before[key], after[key]), (name, key)


@pytest.mark.parametrize(("family", "positions"), [("tden", 8), ("unified_vlp", 16), ("xgpt", 8)])
def test_wrong_inputs_are_explained(family: str, positions: int) -> None:
    model, batch = BUILD[family](), batch_for(family)
    with pytest.raises(DataError, match="region features"):
        model.start(Pixels(pixels_B3HW=torch.zeros(1, 3, 8, 8)), max_len=4)
    with pytest.raises(ParamsError, match=r"has no objective \['itm'\]"):
        model.pretraining_losses(batch, objectives={"itm": None}, generator=torch.Generator(), mask_probability=0.15)
    short = BUILD[family](max_positions=positions)
    with pytest.raises(ParamsError, match=r"9 tokens of text, but config.max_positions"):
        short.generation_logits(batch.image, batch.text)
    with pytest.raises(ParamsError, match=r"max_len is 9, but config.max_positions"):
        short.start(batch.image, max_len=9)
