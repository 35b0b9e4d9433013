"""Decoding, on a toy language model whose sentences can all be scored by hand."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from functools import partial

import pytest
import torch

from vlp_models.data.batch import Regions
from vlp_models.models.decoding.sampling import nucleus, sample
from vlp_models.models.decoding.search import beam_search, greedy

VOCAB, BOS, EOS = 4, 0, 1


class TableModel:
    """The next token depends on the image's number and on the whole prefix, through fixed random tables."""

    def __init__(self, seed: int = 0, eos_bias: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randn(8, VOCAB, 12, generator=generator, dtype=torch.float64) * 2
        self.images = torch.randn(16, 12, generator=generator, dtype=torch.float64)
        self.out = torch.randn(12, VOCAB, generator=generator, dtype=torch.float64)
        self.bias = torch.zeros(VOCAB, dtype=torch.float64)
        self.bias[EOS] = eos_bias
        self.steps = 0

    def start(self, image, *, max_len):
        return torch.arange(len(image)), torch.empty(len(image), 0, dtype=torch.int64)

    def step(self, token_N, state):
        self.steps += 1
        owner, prefix = state[0], torch.cat([state[1], token_N[:, None]], 1)
        positions = torch.arange(prefix.shape[1])
        x = torch.tanh(self.images[owner] + self.tokens[positions, prefix].sum(1))
        return x @ self.out + self.bias, (owner, prefix)

    def reorder(self, state, index_N):
        return state[0][index_N], state[1][index_N]

    def log_probability(self, image: int, ids: tuple[int, ...]) -> float:
        state, token, total = (torch.tensor([image]), torch.empty(1, 0, dtype=torch.int64)), BOS, 0.0
        for following in ids:
            logits, state = self.step(torch.tensor([token]), state)
            total += float(logits.log_softmax(-1)[0, following])
            token = following
        return total


def images(count: int) -> Regions:
    return Regions(
        features_BRF=torch.zeros(count, 1, 1),
        boxes_BR4=torch.zeros(count, 1, 4),
        class_probs_BRC=torch.zeros(count, 1, 1),
        mask_BR=torch.ones(count, 1, dtype=torch.bool),
    )


def searches(**settings):
    """Beam search with finished hypotheses kept in the beam and set aside."""
    return [partial(beam_search, set_aside=aside, **settings) for aside in (False, True)]


def all_sentences(max_len: int):
    """Return all sequences that end with EOS, or have `max_len` tokens without it."""
    words = [t for t in range(VOCAB) if t != EOS]
    for length in range(max_len):
        yield from ((*ids, EOS) for ids in itertools.product(words, repeat=length))
    yield from itertools.product(words, repeat=max_len)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
@pytest.mark.parametrize("set_aside", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_wide_beam_finds_the_best_of_all_sentences(seed, set_aside, length_penalty):
    model = TableModel(seed)
    settings = {"beam_size": 200, "length_penalty": length_penalty, "set_aside": set_aside}
    found = beam_search(model, images(3), max_len=4, bos_id=BOS, eos_id=EOS, **settings)
    for i, hypothesis in enumerate(found):
        scores = {ids: model.log_probability(i, ids) for ids in all_sentences(4)}
        best = max(scores, key=lambda ids: scores[ids] / len(ids) ** length_penalty)
        assert hypothesis.ids == [t for t in best if t != EOS]
        assert hypothesis.score == pytest.approx(scores[best], rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_one_beam_is_greedy_and_more_are_no_worse(seed):
    model = TableModel(seed)
    settings = {"max_len": 6, "bos_id": BOS, "eos_id": EOS}
    one = beam_search(model, images(8), beam_size=1, **settings)
    expected = greedy(model, images(8), **settings)
    assert [h.ids for h in one] == [h.ids for h in expected]
    assert [h.score for h in one] == pytest.approx([h.score for h in expected])
    five = beam_search(model, images(8), beam_size=5, **settings)
    assert all(a.score >= b.score - 1e-6 for a, b in zip(five, expected, strict=True))


def test_scores_are_log_probabilities_of_the_sentences():
    model = TableModel(2)
    generator = torch.Generator().manual_seed(0)
    settings = {"max_len": 5, "bos_id": BOS, "eos_id": EOS}
    groups = sample(model, images(4), num_samples=3, temperature=2.0, generator=generator, **settings)
    groups += [[h] for h in greedy(model, images(4), **settings)]
    groups += [[h] for h in beam_search(model, images(4), beam_size=3, length_penalty=0.7, **settings)]
    for i, group in enumerate(groups):
        for hypothesis in group:
            ids = tuple(hypothesis.ids) + ((EOS,) if len(hypothesis.ids) < 5 else ())
            assert EOS not in hypothesis.ids
            assert hypothesis.score == pytest.approx(model.log_probability(i % 4, ids), rel=1e-6)


def test_caption_does_not_depend_on_the_batch():
    for decode in (greedy, *searches(beam_size=3)):
        together = decode(TableModel(1), images(6), max_len=6, bos_id=BOS, eos_id=EOS)
        for count in range(1, 6):
            fewer = decode(TableModel(1), images(count), max_len=6, bos_id=BOS, eos_id=EOS)
            assert [h.ids for h in fewer] == [h.ids for h in together[:count]]


def test_decoding_stops_when_all_have_finished():
    for decode in (greedy, *searches(beam_size=3)):
        model = TableModel(0, eos_bias=50.0)
        assert [h.ids for h in decode(model, images(3), max_len=8, bos_id=BOS, eos_id=EOS)] == [[]] * 3
        assert model.steps == 1


def slow_search_that_sets_aside(model: TableModel, image: int, max_len: int, beams: int) -> tuple[list[int], float]:
    """Beam search one hypothesis at a time, keeping every one that finishes."""
    living, ended = [((), 0.0)], []
    for step in range(1, max_len + 1):
        grown = [((*ids, t), model.log_probability(image, (*ids, t))) for ids, _ in living for t in range(VOCAB)]
        kept = sorted(grown, key=lambda pair: -pair[1])[:beams]
        ended += [(ids, score) for ids, score in kept if ids[-1] == EOS or step == max_len]
        living = [(ids, score) for ids, score in kept if ids[-1] != EOS]
        if not living:
            break
    ids, score = max(ended, key=lambda pair: pair[1])
    return [t for t in ids if t != EOS], score


def test_set_aside_keeps_the_best_finished_hypothesis():
    settings, better = {"max_len": 5, "bos_id": BOS, "eos_id": EOS}, 0
    for seed, beams in itertools.product(range(12), (1, 2, 3)):
        model = TableModel(seed, eos_bias=-0.5)
        model.out *= 0.5  # so that few words are sure, and what ended early may win
        found = beam_search(model, images(3), beam_size=beams, set_aside=True, **settings)
        stayed = beam_search(model, images(3), beam_size=beams, **settings)
        for i, hypothesis in enumerate(found):
            ids, score = slow_search_that_sets_aside(model, i, 5, beams)
            assert hypothesis.ids == ids
            assert hypothesis.score == pytest.approx(score, rel=1e-6)
            better += hypothesis.score > stayed[i].score + 1e-6
            if beams == 1:
                assert hypothesis.ids == stayed[i].ids
    assert better


@pytest.mark.parametrize("given", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["generator", "draws"])
def test_samples_follow_the_distribution(given: bool) -> None:
    """And given draws give an image the same samples alone and with others."""
    model, count = TableModel(3), 20000
    settings = {"max_len": 2, "bos_id": BOS, "eos_id": EOS, "num_samples": count}

    def drawn(number: int):
        generator = torch.Generator().manual_seed(0)
        source = {"draws_KT": torch.rand(count, 2, generator=generator)} if given else {"generator": generator}
        return sample(model, images(number), **source, **settings)

    groups = drawn(3 if given else 1)
    for image, group in enumerate(groups):
        frequency = Counter(tuple(h.ids) + ((EOS,) if len(h.ids) < 2 else ()) for h in group)
        for ids in all_sentences(2):
            assert frequency[ids] / count == pytest.approx(math.exp(model.log_probability(image, ids)), abs=0.015)
    assert drawn(1)[0] == groups[0]


def test_dropping_finished_rows_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(TableModel):
        rows = 0

        def step(self, token_N, state):
            self.rows += len(token_N)
            return super().step(token_N, state)

    settings = {"max_len": 8, "bos_id": BOS, "eos_id": EOS, "num_samples": 5, "temperature": 1.5}
    draws = torch.rand(5, 8, generator=torch.Generator().manual_seed(0))
    found, rows = {}, {}
    for share in (0.0, 0.25, 1.0):
        monkeypatch.setattr("vlp_models.models.decoding.sampling.COMPACT_SHARE", share)
        model = Counting(3)
        found[share], rows[share] = sample(model, images(6), draws_KT=draws, **settings), model.rows
    assert found[0.0] == found[0.25] == found[1.0]
    assert len({len(h.ids) for group in found[1.0] for h in group}) > 3, "some ended early, some late"
    assert rows[0.0] < rows[0.25] < rows[1.0]


def test_extreme_draws_select_possible_tokens():
    class Fixed(TableModel):
        def step(self, token_N, state):
            return torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]]).repeat(len(token_N), 1), state

    draws = torch.tensor([[0.0], [0.49], [0.5], [1 - 2**-24]])
    groups = sample(Fixed(), images(1), draws_KT=draws, max_len=1, bos_id=BOS, eos_id=3, num_samples=4)
    assert [h.ids for h in groups[0]] == [[1], [1], [2], [2]]


def test_nucleus_is_the_fewest_tokens_with_the_share() -> None:
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.randn(50, 12, generator=generator).mul(2).softmax(-1)
    for share in (0.05, 0.5, 0.9):
        for before, after in zip(probabilities, nucleus(probabilities, share), strict=True):
            total, wanted = 0.0, set()
            for token in before.argsort(descending=True).tolist():
                if total < share:
                    wanted.add(token)
                total += float(before[token])
            assert {i for i in range(12) if after[i] > 0} == wanted
            assert torch.equal(after[after > 0], before[after > 0])
