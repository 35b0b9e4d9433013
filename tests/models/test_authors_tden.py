"""Imported weights compute what the public code (YehLi/xmodaler, and what YehLi/TDEN has of it) computes: it was run on
the same weights, regions and texts (tests/golden/authors_tden.json, tests/authors_tden_inputs.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from authors_tden import bert, captioning, matching, pretraining, recorded, retrieval, rewards, vcr, vqa
from authors_tden_inputs import KINDS, NOTHING, SIZES, Numbers, checksum, imported, layout

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "authors_tden.json").read_text(encoding="utf-8"))
FUNCTIONS = {"pretraining": pretraining, "captioning": captioning, "retrieval": retrieval, "vqa": vqa, "vcr": vcr}
PRECISIONS = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def check(found: Numbers, expected: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Within 1e-5. Gradients in float64 alone: what is recorded of one is a sum over up to thousands of numbers."""
    if dtype == torch.float32:
        found = {name: tensor for name, tensor in found.items() if not name.startswith("gradient")}
        expected = {name: values for name, values in expected.items() if not name.startswith("gradient")}
    found = {n: t for n, t in found.items() if not n.startswith("gradient") or t.abs().max() > NOTHING}
    assert found.keys() == expected.keys()
    for name in sorted(found):
        wanted = torch.tensor(expected[name], dtype=torch.float64)
        ours = recorded(name, found[name])
        torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_the_sizes_are_those_that_were_recorded() -> None:
    assert GOLDEN["made"]["sizes"] == SIZES


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_are_laid_out_as_there(kind: str) -> None:
    """Every name and shape."""
    assert checksum(layout(kind)) == GOLDEN["layouts"][kind]


@PRECISIONS
@pytest.mark.parametrize("kind", KINDS)
def test_weights_compute_what_they_do_there(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Pretraining: what is hidden, embeddings, the states of each module, logits, pooled vectors; the losses of two
    passes, what the second one reads, the gradients of both. Captioning: cross-entropy, smoothed and of a reward;
    greedy and beam search. Retrieval: vectors, losses, recall. VQA, VCR: logits, losses, answers."""
    check(FUNCTIONS[kind](imported(kind, tmp_path), dtype), GOLDEN[kind], dtype)


@PRECISIONS
def test_the_releases_bert_is_ours(dtype: torch.dtype) -> None:
    check(bert(dtype), GOLDEN["bert"], dtype)


@PRECISIONS
def test_matching_is_ranked_as_there(dtype: torch.dtype) -> None:
    check(matching(dtype), GOLDEN["ism"], dtype)


def test_captions_are_rewarded_as_there() -> None:
    check(rewards(), GOLDEN["rewards"], torch.float64)
