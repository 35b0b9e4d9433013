"""XGPT against the paper's formulas in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from slow_xgpt import SlowXGPT
from tiny_xgpt import STRUCTURES, VARIANTS, tiny_xgpt

from vlp_models.data.batch import Batch
from vlp_models.models.xgpt.model import XGPT
from vlp_models.models.xgpt.state import SpanCorruption
from vlp_models.objectives.span_masking import replace_spans

SPANS = [[(2, 3), (6, 1)], [(1, 1)], [(1, 1)], [(1, 1)]]


def corruption(batch: Batch) -> SpanCorruption:
    """Corrupt words 3 to 5 (IMLM) and two spans (IDA) of the first caption, and the first word of the others."""
    words = torch.zeros_like(batch.text.mask_BT)
    words[0, 3:6], words[1:, 1] = True, True
    ids, mask = replace_spans(batch.text.ids_BT, batch.text.mask_BT, SPANS, how="single", mask_id=4)
    read = batch.text.ids_BT.masked_fill(words, 4)
    return SpanCorruption(ids_BT=read, words_BT=words, infilled_BU=ids, infilled_mask_BU=mask)


def slow(model: XGPT) -> SlowXGPT:
    return SlowXGPT({name: tensor.numpy() for name, tensor in model.state_dict().items()}, model.config)


def sample(batch: Batch, row: int) -> tuple[list[int], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the words, features and boxes of one sample, without padding."""
    seen = batch.image.mask_BR[row]
    ids = batch.text.ids_BT[row][batch.text.mask_BT[row]].tolist()
    return ids, batch.image.features_BRF[row][seen].numpy(), batch.image.boxes_BR4[row][seen].numpy()


def nll(logits: np.ndarray[Any, Any], targets: list[int]) -> float:
    shifted = logits - logits.max(-1, keepdims=True)
    return float(np.sum(np.log(np.exp(shifted).sum(-1)) - shifted[range(len(targets)), targets]))


@pytest.mark.parametrize("name", STRUCTURES)
def test_objectives_equal_the_papers_formulas(make_batch: Any, name: str) -> None:
    """The first third of the matching's W has no effect."""
    model, batch = tiny_xgpt(**VARIANTS[name]), make_batch()
    reference, hidden = slow(model), corruption(batch)
    assert hidden.infilled_BU is not None and hidden.infilled_mask_BU is not None
    with torch.no_grad():
        image = model.encode_corrupted(batch, hidden)
        done = model.masked_pass(batch, hidden, image, dict.fromkeys(model.objectives))
        logits = model.generation_logits(batch.image, batch.text)
    expected, counts = dict.fromkeys(model.objectives, 0.0), dict.fromkeys(model.objectives, 0)
    generator = np.random.default_rng(0)
    for row in range(len(batch)):
        ids, features, boxes = sample(batch, row)
        own = reference.ic(ids, features, boxes)
        np.testing.assert_allclose(logits[row, : len(ids)].numpy(), own, rtol=1e-9, atol=1e-9)
        places = hidden.words_BT[row].nonzero().flatten().tolist()
        start, end = places[0], places[-1] + 1
        read = hidden.ids_BT[row][: len(ids)].tolist()
        fragment = reference.imlm(ids, read, start, end, features, boxes)
        infilled = hidden.infilled_BU[row][hidden.infilled_mask_BU[row]].tolist()
        anything = generator.normal(size=model.config.hidden) * 10
        denoised = reference.ida(ids, infilled, features, boxes, anything)
        expected["ic"] += nll(own[:-1], ids[1:])
        expected["imlm"] += nll(fragment, ids[start:end])
        expected["ida"] += nll(denoised[:-1], ids[1:])
        expected["tifg"] += reference.tifg(ids, features, boxes)
        for key, n in (("ic", len(ids) - 1), ("imlm", end - start), ("ida", len(ids) - 1), ("tifg", len(features))):
            counts[key] += n
    for key, loss in done.losses.items():
        assert loss.sum.item() == pytest.approx(expected[key], rel=1e-9), key
        assert loss.count == counts[key], key


def test_objectives_with_other_settings(make_batch: Any) -> None:
    batch = make_batch()
    model = tiny_xgpt(ida_residual=True, tifg_target="raw", tifg_reduction="sum", imlm_reads="caption")
    reference, hidden = slow(model), corruption(batch)
    with torch.no_grad():
        image = model.encode_corrupted(batch, hidden)
        done = model.masked_pass(batch, hidden, image, dict.fromkeys(("imlm", "ida", "tifg")))
    expected = dict.fromkeys(done.losses, 0.0)
    for row in range(len(batch)):
        ids, features, boxes = sample(batch, row)
        embedded, regions = reference.regions(features, boxes)
        assert hidden.infilled_BU is not None and hidden.infilled_mask_BU is not None
        read = hidden.infilled_BU[row][hidden.infilled_mask_BU[row]].tolist()
        found = reference.matched(reference.words(read), regions, np.zeros(model.config.hidden))
        words = reference.place(found + reference.w["text_embedding.words.weight"][read])
        states = reference.encode(np.concatenate([words, regions]))
        expected["ida"] += nll(reference.logits(reference.decode(reference.words(ids), states))[:-1], ids[1:])
        masked = hidden.ids_BT[row][: len(ids)].tolist()
        states = reference.encode(np.concatenate([reference.words(masked), regions]))
        places = hidden.words_BT[row].nonzero().flatten().tolist()
        logits = reference.logits(reference.decode(reference.words(ids), states))
        expected["imlm"] += nll(logits[[p - 1 for p in places]], [ids[p] for p in places])
        before = np.concatenate([reference.w["first_region"], embedded[:-1]])
        head = reference.decode(before, reference.encode(reference.words(ids)))
        out = head @ reference.w["region_head.weight"].T + reference.w["region_head.bias"]
        expected["tifg"] += float(((out - features) ** 2).sum())
    for key, loss in done.losses.items():
        assert loss.sum.item() == pytest.approx(expected[key], rel=1e-9), key
    parts = done.losses["tifg"].parts
    assert parts["tifg_squared"].sum.item() == pytest.approx(parts["tifg"].sum.item() * 6)
