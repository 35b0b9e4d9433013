"""A text without any token, not even [CLS], is an error or has a defined feature: never that of another text.

The tokenizer writes [CLS] and [SEP] even for an empty string; only a batch made by other code can hold such a text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import soho_toys
import tiny_vlmo
import torch
from tiny_unified_vlp import tiny_unified_vlp
from tiny_xgpt import tiny_xgpt
from torch import Tensor

from vlp_models.data.batch import Batch
from vlp_models.errors import DataError

NO_TOKEN = r"1 of 4 texts in the batch have no first token"
EMPTY = [0, 1, 3]  # the text without a token: the first, one in the middle, the last of four


def emptied(batch: Batch, row: int) -> Batch:
    mask_BT = batch.text.mask_BT.clone()
    mask_BT[row] = False
    return dataclasses.replace(batch, text=dataclasses.replace(batch.text, mask_BT=mask_BT))


def scores(model: Any, batch: Batch) -> Tensor:
    found: Tensor = model.score(model.encode_image(batch.image), batch.text, torch.arange(len(batch)))
    return found


@pytest.mark.parametrize("row", EMPTY)
def test_vlmo_refuses_it(row: int) -> None:
    model, batch = tiny_vlmo.build_tiny(contrast="both"), emptied(tiny_vlmo.random_batch(), row)
    for call in (
        lambda: model.embed_text(batch.text),
        lambda: model.fuse(batch.image, batch.text),
        lambda: scores(model, batch),
        lambda: model.contrast_pairs(batch),
        lambda: tiny_vlmo.losses(model, batch, ("itc",)),
    ):
        with pytest.raises(DataError, match=NO_TOKEN):
            call()


@pytest.mark.parametrize("row", EMPTY)
@pytest.mark.parametrize("config", [{}, soho_toys.PUBLIC])
def test_soho_refuses_it(row: int, config: dict[str, Any]) -> None:
    model, batch = soho_toys.build(**config), emptied(soho_toys.batch_of(), row)
    for call in (lambda: model.fuse(batch.image, batch.text), lambda: scores(model, batch)):
        with pytest.raises(DataError, match=NO_TOKEN):
            call()
    with pytest.raises(DataError, match=r"of 8 texts in the batch have no first token"):
        soho_toys.losses(model, batch, ("itm",))


@pytest.mark.parametrize("row", EMPTY)
def test_tden_does_not_match_it(row: int, tiny: Callable[..., Any], batch: Batch) -> None:
    """By [CLS]: an error. By attention pooling: not a number, which training and ranking refuse."""
    with pytest.raises(DataError, match=NO_TOKEN):
        scores(tiny(ism_source="cross_modal"), emptied(batch, row))
    for model in (tiny(), tiny(structure="single_stream")):
        given = emptied(batch, row)
        for found, whole in (
            (model.embed_text(given.text), model.embed_text(batch.text)),
            (model.fuse(given.image, given.text).pooled_BP, model.fuse(batch.image, batch.text).pooled_BP),
        ):
            assert found[row].isnan().all()
            check_others(found, whole, row)


def check_others(found: Tensor, whole: Tensor, row: int) -> None:
    """Check that the other texts' rows are those of the batch in which no text is empty."""
    others = torch.arange(len(found)) != row
    torch.testing.assert_close(found[others], whole[others], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("row", EMPTY)
def test_unified_vlp_has_one_feature_for_it(row: int, batch: Batch) -> None:
    model, given = tiny_unified_vlp(), emptied(batch, row)
    found = model.fuse(given.image, given.text).pooled_BP
    check_others(found, model.fuse(batch.image, batch.text).pooled_BP, row)
    torch.testing.assert_close(found[row], model.fusion.bias.relu())


@pytest.mark.parametrize("row", EMPTY)
def test_generation_does_not_depend_on_it(row: int, tiny: Callable[..., Any], batch: Batch) -> None:
    for model in (tiny(), tiny_unified_vlp(), tiny_xgpt()):
        given = emptied(batch, row)
        found, whole = (model.generation_logits(b.image, b.text, b.text.has_next_BT) for b in (given, batch))
        expected = whole[(torch.arange(len(batch)) != row)[batch.text.has_next_BT.nonzero()[:, 0]]]
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
