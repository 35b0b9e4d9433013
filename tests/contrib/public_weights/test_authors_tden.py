"""Imported weights compute what the authors' code (YehLi/xmodaler, and the part of it in YehLi/TDEN) computed on the
same weights, regions and texts (tests/golden/authors_tden.json, tests/support/authors_tden_inputs.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from authors_tden import bert, captioning, matching, pretraining, recorded, retrieval, rewards, vcr, vqa
from authors_tden_inputs import KINDS, NOTHING, SIZES, Numbers, checksum, imported, layout

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "authors_tden.json").read_text(encoding="utf-8"))
FUNCTIONS = {"pretraining": pretraining, "captioning": captioning, "retrieval": retrieval, "vqa": vqa, "vcr": vcr}
PRECISIONS = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def check(found: Numbers, expected: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Compare within 1e-5 plus a millionth of the number. Gradients in float64 only: a recorded one is a sum over up to
    thousands of numbers."""
    if dtype == torch.float32:
        found = {name: tensor for name, tensor in found.items() if not name.startswith("gradient")}
        expected = {name: values for name, values in expected.items() if not name.startswith("gradient")}
    found = {n: t for n, t in found.items() if not n.startswith("gradient") or t.abs().max() > NOTHING}
    assert found.keys() == expected.keys()
    for name in sorted(found):
        wanted = torch.tensor(expected[name], dtype=torch.float64)
        ours = recorded(name, found[name])
        torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_sizes_equal_the_recorded_ones() -> None:
    assert GOLDEN["made"]["sizes"] == SIZES


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_layout(kind: str) -> None:
    """Every name and shape."""
    assert checksum(layout(kind)) == GOLDEN["layouts"][kind]


@PRECISIONS
@pytest.mark.parametrize("kind", KINDS)
def test_outputs(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Pretraining: what is hidden, embeddings, the states of each module, logits, pooled vectors; the losses of two
    passes, what the second one reads, the gradients of both. Captioning: cross-entropy, smoothed and of a reward;
    greedy and beam search. Retrieval: vectors, losses, recall. VQA, VCR: logits, losses, answers."""
    check(FUNCTIONS[kind](imported(kind, tmp_path), dtype), GOLDEN[kind], dtype)


@PRECISIONS
def test_bert_of_the_release(dtype: torch.dtype) -> None:
    check(bert(dtype), GOLDEN["bert"], dtype)


@PRECISIONS
def test_matching(dtype: torch.dtype) -> None:
    check(matching(dtype), GOLDEN["ism"], dtype)


def test_caption_rewards() -> None:
    check(rewards(), GOLDEN["rewards"], torch.float64)
