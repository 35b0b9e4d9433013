"""Masked words and regions, and scheduled sampling of masked words."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlp_models.objectives.masked_modeling import (
    mask_tokens,
    overlapping,
    ramp_share,
    replace_words,
    sample_words,
    select_regions,
    select_replaced,
    select_tokens,
)

LENGTHS = torch.arange(4000) % 21 + 2  # from the empty sentence, [CLS] [SEP], on
MASK = torch.arange(24) < LENGTHS[:, None]
IDS = torch.full((4000, 24), 7)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("probability", [0.0, 0.15, 1.0])
def test_words_are_selected_at_the_given_rate_and_special_tokens_never(probability):
    selected = select_tokens(MASK, probability, generator())
    words = MASK.clone()
    words[:, 0] = False
    words[torch.arange(4000), LENGTHS - 1] = False
    assert not (selected & ~words).any()
    assert float(selected.sum() / words.sum()) == pytest.approx(probability, abs=0.005)
    assert torch.equal(selected, select_tokens(MASK, probability, generator()))


def test_scheme_mask_always_writes_mask():
    selected = select_tokens(MASK, 0.15, generator())
    masked = mask_tokens(IDS, selected, scheme="mask", mask_id=4, vocab_size=100, generator=generator())
    assert torch.equal(masked == 4, selected)
    assert bool((masked[~selected] == 7).all())
    assert bool((IDS == 7).all())  # the input is not modified: its words are the targets


def test_scheme_bert_writes_mask_in_80_percent():
    selected = select_tokens(MASK, 0.5, generator())
    masked = mask_tokens(IDS, selected, scheme="bert", mask_id=4, vocab_size=100, generator=generator(1))
    assert bool((masked[~selected] == 7).all())
    chosen = masked[selected]
    kept, random = chosen == 7, (chosen != 7) & (chosen != 4)
    assert float((chosen == 4).float().mean()) == pytest.approx(0.8, abs=0.01)
    assert float(kept.float().mean()) == pytest.approx(0.1 + 0.1 / 95, abs=0.01)
    assert set(chosen[random].tolist()) == set(range(5, 100)) - {7}


def test_padding_regions_are_never_selected():
    selected = select_regions(MASK, 0.15, generator())
    assert not (selected & ~MASK).any()
    assert float(selected.sum() / MASK.sum()) == pytest.approx(0.15, abs=0.005)


def test_overlapping_regions_are_hidden():
    boxes = torch.tensor([[[0.0, 0.0, 0.5, 0.5], [0.0, 0.0, 0.5, 0.3], [0.0, 0.0, 0.5, 0.15], [0.6, 0.6, 1.0, 1.0]]])
    selected = torch.tensor([[True, False, False, False]])  # IoU with the first: 1, 0.6, 0.3, 0
    assert overlapping(selected, boxes).tolist() == [[True, True, False, False]]
    assert not overlapping(selected & False, boxes).any()
    nothing = torch.zeros(1, 3, 4)  # padding: identical boxes without area
    assert overlapping(torch.tensor([[True, False, False]]), nothing).tolist() == [[True, False, False]]


# ---- Scheduled sampling ----


def test_share_ramps_up_and_stays() -> None:
    shares = [ramp_share(update, start=0.2, end=1.0, steps=4) for update in range(6)]
    assert shares == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert ramp_share(None, start=0.2, end=0.7, steps=4) == 0.7
    assert {ramp_share(update, start=1.0, end=1.0, steps=0) for update in (0, 9, None)} == {1.0}


def test_words_are_drawn_from_the_predicted_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.2, 0.3, 0.0])
    drawn = sample_words(probabilities.log().repeat(40_000, 1), how="multinomial", generator=generator())
    frequencies = torch.bincount(drawn, minlength=5) / len(drawn)
    assert frequencies[1] == frequencies[4] == 0
    torch.testing.assert_close(frequencies, probabilities, atol=0.01, rtol=0)  # four standard errors
    again = sample_words(probabilities.log().repeat(40_000, 1), how="multinomial", generator=generator())
    assert torch.equal(drawn, again)


def test_argmax_uses_no_random_numbers_and_no_gradient_flows_back() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 0.0, 0.0]], requires_grad=True)
    numbers = generator()
    before = numbers.get_state()
    ids = sample_words(logits, how="argmax", generator=numbers)
    assert ids.tolist() == [1, 0]
    assert torch.equal(numbers.get_state(), before)
    assert not sample_words(logits, how="multinomial", generator=numbers).requires_grad


@pytest.mark.parametrize("how", ["argmax", "multinomial"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_zero_masked_words_and_other_precisions(how, dtype) -> None:
    assert sample_words(torch.zeros(0, 7, dtype=dtype), how=how, generator=generator()).shape == (0,)
    certain = torch.full((3, 7), -100.0, dtype=dtype)
    certain[:, 5] = 100.0
    assert sample_words(certain, how=how, generator=generator()).tolist() == [5, 5, 5]


def test_replaced_words_by_hand() -> None:
    ids = torch.tensor([[2, 4, 8, 4, 3], [2, 9, 4, 3, 0]])
    words = torch.tensor([[0, 1, 0, 1, 0], [0, 0, 1, 0, 0]], dtype=torch.bool)
    sampled = torch.tensor([11, 12, 13])
    assert replace_words(ids, words, sampled, words).tolist() == [[2, 11, 8, 12, 3], [2, 9, 13, 3, 0]]
    only_one = torch.tensor([[0, 0, 0, 1, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    assert replace_words(ids, words, sampled, only_one).tolist() == [[2, 4, 8, 12, 3], [2, 9, 4, 3, 0]]
    assert ids[0, 1] == 4, "the input is not modified"


@given(st.floats(0, 1, allow_subnormal=False), st.integers(0, 99))
def test_only_masked_words_are_replaced(share: float, seed: int) -> None:
    words = torch.rand(8, 30, generator=generator(seed)) < 0.4
    replaced = select_replaced(words, share, generator(seed))
    assert not (replaced & ~words).any()
    assert torch.equal(select_replaced(words, 1.0, generator(seed)), words)
    assert not select_replaced(words, 0.0, generator(seed)).any()
