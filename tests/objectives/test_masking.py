"""Which tokens and regions are hidden."""

from __future__ import annotations

import pytest
import torch

from vlp_models.objectives.masked_modeling import mask_tokens, overlapping, select_regions, select_tokens

LENGTHS = torch.arange(4000) % 21 + 2  # from the empty sentence, [CLS] [SEP], on
MASK = torch.arange(24) < LENGTHS[:, None]
IDS = torch.full((4000, 24), 7)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("probability", [0.0, 0.15, 1.0])
def test_words_are_selected_at_the_given_rate_and_specials_never(probability):
    selected = select_tokens(MASK, probability, generator())
    words = MASK.clone()
    words[:, 0] = False
    words[torch.arange(4000), LENGTHS - 1] = False
    assert not (selected & ~words).any()
    assert float(selected.sum() / words.sum()) == pytest.approx(probability, abs=0.005)
    assert torch.equal(selected, select_tokens(MASK, probability, generator()))


def test_the_paper_always_puts_mask():
    selected = select_tokens(MASK, 0.15, generator())
    masked = mask_tokens(IDS, selected, scheme="mask", mask_id=4, vocab_size=100, generator=generator())
    assert torch.equal(masked == 4, selected)
    assert bool((masked[~selected] == 7).all())
    assert bool((IDS == 7).all())  # the input is left alone: its words are the targets


def test_bert_puts_mask_in_eight_of_ten():
    selected = select_tokens(MASK, 0.5, generator())
    masked = mask_tokens(IDS, selected, scheme="bert", mask_id=4, vocab_size=100, generator=generator(1))
    assert bool((masked[~selected] == 7).all())
    chosen = masked[selected]
    kept, random = chosen == 7, (chosen != 7) & (chosen != 4)
    assert float((chosen == 4).float().mean()) == pytest.approx(0.8, abs=0.01)
    assert float(kept.float().mean()) == pytest.approx(0.1 + 0.1 / 95, abs=0.01)
    assert set(chosen[random].tolist()) == set(range(5, 100)) - {7}


def test_regions_are_selected_among_the_real_ones():
    selected = select_regions(MASK, 0.15, generator())
    assert not (selected & ~MASK).any()
    assert float(selected.sum() / MASK.sum()) == pytest.approx(0.15, abs=0.005)


def test_overlapping_neighbours():
    boxes = torch.tensor([[[0.0, 0.0, 0.5, 0.5], [0.0, 0.0, 0.5, 0.3], [0.0, 0.0, 0.5, 0.15], [0.6, 0.6, 1.0, 1.0]]])
    selected = torch.tensor([[True, False, False, False]])  # IoU with the first: 1, 0.6, 0.3, 0
    assert overlapping(selected, boxes).tolist() == [[True, True, False, False]]
    assert not overlapping(selected & False, boxes).any()
    nothing = torch.zeros(1, 3, 4)  # padding: boxes without area, one on the other
    assert overlapping(torch.tensor([[True, False, False]]), nothing).tolist() == [[True, False, False]]
