"""Sampling masked words: by hand, in distribution, at the edges."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlp_models.objectives.masked_modeling import replace_words, sample_words, select_replaced, share_at


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_share_ramps_and_stays() -> None:
    shares = [share_at(update, start=0.2, end=1.0, steps=4) for update in range(6)]
    assert shares == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert share_at(None, start=0.2, end=0.7, steps=4) == 0.7
    assert {share_at(update, start=1.0, end=1.0, steps=0) for update in (0, 9, None)} == {1.0}


def test_words_are_drawn_from_the_predicted_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.2, 0.3, 0.0])
    drawn = sample_words(probabilities.log().repeat(40_000, 1), how="multinomial", generator=generator())
    frequencies = torch.bincount(drawn, minlength=5) / len(drawn)
    assert frequencies[1] == frequencies[4] == 0
    torch.testing.assert_close(frequencies, probabilities, atol=0.01, rtol=0)  # four standard errors
    again = sample_words(probabilities.log().repeat(40_000, 1), how="multinomial", generator=generator())
    assert torch.equal(drawn, again)


def test_argmax_needs_no_randomness_and_nothing_flows_back() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 0.0, 0.0]], requires_grad=True)
    numbers = generator()
    before = numbers.get_state()
    ids = sample_words(logits, how="argmax", generator=numbers)
    assert ids.tolist() == [1, 0]
    assert torch.equal(numbers.get_state(), before)
    assert not sample_words(logits, how="multinomial", generator=numbers).requires_grad


@pytest.mark.parametrize("how", ["argmax", "multinomial"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_no_masked_word_and_other_precisions(how, dtype) -> None:
    assert sample_words(torch.zeros(0, 7, dtype=dtype), how=how, generator=generator()).shape == (0,)
    certain = torch.full((3, 7), -100.0, dtype=dtype)
    certain[:, 5] = 100.0
    assert sample_words(certain, how=how, generator=generator()).tolist() == [5, 5, 5]


def test_words_go_where_they_belong_by_hand() -> None:
    ids = torch.tensor([[2, 4, 8, 4, 3], [2, 9, 4, 3, 0]])
    words = torch.tensor([[0, 1, 0, 1, 0], [0, 0, 1, 0, 0]], dtype=torch.bool)
    sampled = torch.tensor([11, 12, 13])
    assert replace_words(ids, words, sampled, words).tolist() == [[2, 11, 8, 12, 3], [2, 9, 13, 3, 0]]
    only_one = torch.tensor([[0, 0, 0, 1, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    assert replace_words(ids, words, sampled, only_one).tolist() == [[2, 4, 8, 12, 3], [2, 9, 4, 3, 0]]
    assert ids[0, 1] == 4, "the input is left alone"


@given(st.floats(0, 1, allow_subnormal=False), st.integers(0, 99))
def test_only_masked_words_are_replaced(share: float, seed: int) -> None:
    words = torch.rand(8, 30, generator=generator(seed)) < 0.4
    replaced = select_replaced(words, share, generator(seed))
    assert not (replaced & ~words).any()
    assert torch.equal(select_replaced(words, 1.0, generator(seed)), words)
    assert not select_replaced(words, 0.0, generator(seed)).any()
