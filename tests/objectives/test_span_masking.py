"""Fragments and spans against slow code for one sentence at a time, and their statistics."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch

from vlp_models.objectives.masked_modeling import word_positions
from vlp_models.objectives.span_masking import draw_spans, replace_spans, select_fragment


def sentences(*words: int, wider: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask of sentences with these numbers of words: [CLS] 10 11 12 ... [SEP]."""
    width = max(words) + 2 + wider
    mask = torch.arange(width) < torch.tensor(words)[:, None] + 2
    ids = torch.arange(width).expand(len(words), -1) + 9
    ids = ids.masked_fill(torch.arange(width) == 0, 2)
    return ids.masked_fill(torch.arange(width) == torch.tensor(words)[:, None] + 1, 3) * mask, mask


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_fragment_is_one_run_of_half_the_words() -> None:
    counts = [0, 1, 2, 3, 4, 9, 10]
    _, mask = sentences(*counts, wider=2)
    for seed in range(50):
        chosen = select_fragment(mask, 0.5, generator(seed))
        assert not (chosen & ~word_positions(mask)).any()
        for row, words in zip(chosen.tolist(), counts, strict=True):
            places = [i for i, yes in enumerate(row) if yes]
            assert len(places) == (max(1, math.floor(words / 2 + 0.5)) if words else 0)
            assert places == list(range(places[0], places[0] + len(places))) if places else not words


def test_fragments_are_uniformly_distributed() -> None:
    _, mask = sentences(*[7] * 20_000)
    first = Counter(select_fragment(mask, 0.5, generator()).int().argmax(1).tolist())
    assert set(first) == {1, 2, 3, 4}  # four of seven words
    assert all(abs(n - 5000) < 5 * math.sqrt(5000) for n in first.values())


@pytest.mark.parametrize("empty", [False, True])
def test_spans_mask_the_given_share_and_never_touch(empty: bool) -> None:
    counts = [0, 1, 2, 3, 5, 8, 13, 20]
    _, mask = sentences(*counts, wider=3)
    for share in (0.3, 0.6, 1.0):
        for seed in range(40):
            found = draw_spans(mask, share=share, mean=3.0, empty=empty, generator=generator(seed))
            for spans, words in zip(found, counts, strict=True):
                hidden, wanted = sum(n for _, n in spans), max(1, math.floor(share * words + 0.5)) if words else 0
                assert hidden <= wanted and (hidden == wanted or empty or share > 0.5)
                assert all(start >= 1 and start + n <= words + 1 and n >= (not empty) for start, n in spans)
                # At least one word stays between two spans, so no two [MASK]s are adjacent.
                assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(spans))


@pytest.mark.parametrize(("empty", "mean"), [(False, 3.0), (True, 3.0), (False, 1.0)])
def test_lengths_are_poisson_distributed(empty: bool, mean: float) -> None:
    """The sentences are long enough that few spans are cut."""
    _, mask = sentences(*[100] * 4000)
    spans = draw_spans(mask, share=0.9, mean=mean, empty=empty, generator=generator(3))
    # The order of drawing is unknown, so the span that the share cut is counted as well.
    lengths = Counter(n for row in spans for _, n in row)
    total = sum(lengths.values())
    probability = {n: math.exp(-mean) * mean**n / math.factorial(n) for n in range(9)}
    scale = 1.0 if empty else 1 / (1 - probability[0])
    for n in range(0 if empty else 1, 8):
        expected = probability[n] * scale
        assert lengths[n] / total == pytest.approx(expected, abs=0.012), n
    assert empty or 0 not in lengths


def test_span_positions_are_uniform() -> None:
    """One span of two words in eight: seven gaps, each as likely."""
    _, mask = sentences(*[8] * 14_000)
    spans = draw_spans(mask, share=0.25, mean=20.0, empty=False, generator=generator())
    starts = Counter(row[0][0] for row in spans)
    assert all(len(row) == 1 and row[0][1] == 2 for row in spans)
    assert set(starts) == set(range(1, 8)) and all(abs(n - 2000) < 5 * math.sqrt(2000) for n in starts.values())


def test_replaced_spans_against_a_slow_reference() -> None:
    ids, mask = sentences(6, 9, 1, 14)
    for seed in range(30):
        for empty in (False, True):
            spans = draw_spans(mask, share=0.4, mean=2.0, empty=empty, generator=generator(seed))
            for how in ("single", "multi"):
                replaced, replaced_mask = replace_spans(ids, mask, spans, how=how, mask_id=4)
                for row, seen, of_sentence, got, got_mask in zip(
                    ids, mask, spans, replaced, replaced_mask, strict=True
                ):
                    words = row[seen].tolist()
                    for start, count in reversed(of_sentence):
                        words[start : start + count] = [4] * (1 if how == "single" else count)
                    assert got[got_mask].tolist() == words
                    assert got_mask.tolist() == [True] * len(words) + [False] * (len(got) - len(words))


def test_empty_spans_never_make_a_sentence_longer() -> None:
    ids, mask = sentences(1, 2, 3, 5, 8, 20)
    found = 0
    for seed in range(200):
        spans = draw_spans(mask, share=0.3, mean=0.5, empty=True, generator=generator(seed))
        found += sum(not n for row in spans for _, n in row)
        _, seen = replace_spans(ids, mask, spans, how="single", mask_id=4)
        assert (seen.sum(1) <= mask.sum(1)).all()
    assert found > 50  # some do fit


def test_same_seed_gives_same_spans_and_empty_batches_work() -> None:
    _, mask = sentences(5, 9)
    one, again, other = (
        draw_spans(mask, share=0.3, mean=3.0, empty=False, generator=generator(seed)) for seed in (1, 1, 2)
    )
    assert one == again != other
    nothing = draw_spans(mask[:0], share=0.3, mean=3.0, empty=False, generator=generator())
    ids, seen = replace_spans(mask[:0].long(), mask[:0], nothing, how="single", mask_id=4)
    assert nothing == [] and ids.shape == seen.shape == (0, 11)
    assert select_fragment(mask[:0], 0.5, generator()).shape == (0, 11)
