"""Parity with the authors' public VLMo code on weights in that code's layout: encoders, losses, gradients, tasks, and
loading weights of another stage or resolution. golden/authors_vlmo.json holds that code's outputs;
tests/support/authors_vlmo.py recreates the same weights and inputs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from authors_vlmo import (
    KINDS,
    SIDE,
    SIZES,
    TEXT,
    TEXTS,
    Numbers,
    beit,
    built,
    checkpoint,
    imported,
    nlvr2,
    pretraining,
    recorded,
    resized,
    retrieval,
    texts_alone,
    third_stage,
    vqa,
)

from vlp_models.models.vlmo.transformer import PositionBias
from vlp_models.objectives import matching as hard_negatives

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "authors_vlmo.json").read_text(encoding="utf-8"))
INPUTS = ("index", "itm.drawn")  # recorded inputs, which are not compared as outputs
DTYPES = (torch.float32, torch.float64)
LAYOUTS = pytest.mark.parametrize("plus", [False, True], ids=["relative", "plus"])
PRECISIONS = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
FUNCTIONS = {"text": texts_alone, "retrieval": retrieval, "vqa": vqa, "nlvr2": nlvr2}


def check(found: Numbers, expected: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Compare within 1e-5 plus a millionth of the number: logits divided by a temperature below 0.01 are large, and
    float32 rounds them more coarsely.

    Which weights have a gradient is asked in either precision. What is recorded of one is a sum over thousands of
    numbers, so that it is asked in float64 alone.
    """
    names = expected.keys() - set(INPUTS)
    assert {name for name, tensor in found.items() if not name.startswith("gradient") or bool(tensor.any())} == names
    for name in sorted(names):
        if dtype == torch.float64 or not name.startswith("gradient"):
            wanted = torch.tensor(expected[name], dtype=torch.float64)
            ours = recorded(name, found[name])
            torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def name_of(case: str, plus: bool) -> str:
    return f"{case}-plus" if plus else case


def test_sizes_are_those_of_the_recording() -> None:
    assert GOLDEN["made"]["sizes"] == {**SIZES, "side": SIDE, "length": TEXT, "texts_alone": TEXTS}


@LAYOUTS
@PRECISIONS
def test_pretraining_on_pairs_equals_the_public_code(
    plus: bool, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joint states; each modality alone, by its own and by the vision-language experts; MLM, both contrasts and
    matching with the negatives that were drawn there, the weights that they were drawn with, and the gradients of it
    all. Two pairs show one image, and count there as each other's negatives."""
    expected = GOLDEN[name_of("pretraining", plus)]
    weights = imported(checkpoint("pretraining", plus), tmp_path)
    patch = lambda draw: monkeypatch.setattr(hard_negatives, "draw_categorical", draw)  # noqa: E731
    check(pretraining(weights, expected["itm.drawn"], patch, dtype), expected, dtype)


@LAYOUTS
@PRECISIONS
@pytest.mark.parametrize("kind", KINDS[1:])
def test_texts_alone_and_tasks_equal_the_public_code(kind: str, plus: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """For texts alone also the set of weights with gradients: attention and vision experts are frozen."""
    check(FUNCTIONS[kind](imported(checkpoint(kind, plus), tmp_path), dtype), GOLDEN[name_of(kind, plus)], dtype)


@LAYOUTS
@PRECISIONS
@pytest.mark.parametrize("side", [96, 48])
def test_interpolated_positions_equal_the_public_code(
    side: int, plus: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    weights = imported(checkpoint("pretraining", plus), tmp_path)
    check(resized(weights, side, dtype), GOLDEN[name_of(f"side {side}", plus)], dtype)


@LAYOUTS
@PRECISIONS
def test_loading_the_previous_stage_equals_the_public_code(plus: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    weights = imported(checkpoint("text", plus), tmp_path)
    check(third_stage(weights, plus, dtype), GOLDEN[name_of("stage 3", plus)], dtype)


@PRECISIONS
def test_loading_beit_equals_the_public_code(dtype: torch.dtype) -> None:
    check(beit(dtype), GOLDEN["beit"], dtype)


def test_position_bias_rows_equal_the_public_table(tmp_path: Path) -> None:
    """In the public code a pair's text comes first, and a single table has all rows."""
    bias = built(imported(checkpoint("pretraining", False), tmp_path)).position_bias
    assert isinstance(bias, PositionBias)
    image = bias.image_tokens
    order = torch.cat([torch.arange(image, image + TEXT), torch.arange(image)])
    assert bias.index(TEXT)[order][:, order].tolist() == GOLDEN["pretraining"]["index"]
