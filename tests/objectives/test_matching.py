"""Categorical draws, hard negatives and similarities."""

from __future__ import annotations

import pytest
import torch

from vlp_models.objectives.distributed import draw_categorical
from vlp_models.objectives.matching import different_image_mask, draw_hard_negatives, match_in_batch, similarities


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_draws_are_proportional_to_weights_and_never_of_weight_zero() -> None:
    weights = torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0]).expand(8000, 5)
    drawn = draw_categorical(weights, generator())
    assert set(drawn.tolist()) == {1, 3}
    assert abs((drawn == 3).float().mean().item() - 0.75) < 0.02


def test_one_hot_rows_and_rows_without_weight() -> None:
    weights = torch.zeros(500, 4)
    weights[:, 1] = 1e-30
    assert set(draw_categorical(weights, generator()).tolist()) == {1}
    assert set(draw_categorical(torch.zeros(5, 4), generator()).tolist()) == {0}
    assert draw_categorical(torch.zeros(0, 4), generator()).tolist() == []


def test_uniform_draw_of_one_gives_the_last_possible_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """The uniform number times the sum may round up to the sum."""
    from vlp_models.objectives import distributed as ranks

    monkeypatch.setattr(ranks, "draw_uniform", lambda shape, generator, device: torch.ones(shape))
    assert draw_categorical(torch.tensor([[1.0, 2.0, 0.0, 0.0]]), generator()).tolist() == [1]


def test_similar_images_are_drawn_more_often_and_the_same_image_never() -> None:
    negative = different_image_mask(["a", "b", "a", "c"])
    assert negative.tolist()[0] == [False, True, False, True]
    similarity = torch.tensor([[0.9, 0.5, 0.9, 0.3]]).expand(9000, 4)
    drawn, has = draw_hard_negatives(similarity / 0.1, negative[:1].expand(9000, 4), generator())
    assert bool(has.all()) and set(drawn.tolist()) == {1, 3}
    wanted = torch.tensor([5.0, 3.0]).softmax(0)[0].item()
    assert abs((drawn == 1).float().mean().item() - wanted) < 0.02


def test_a_batch_of_one_image_has_no_negative() -> None:
    for ids in (["a"], ["a", "a"]):
        drawn, has = draw_hard_negatives(torch.ones(len(ids), len(ids)), different_image_mask(ids), generator())
        assert not has.any() and drawn.tolist() == [0] * len(ids)


def test_dominant_similarity_is_always_drawn() -> None:
    similarity = torch.tensor([[1.0, 0.99, -1.0]])
    drawn, _ = draw_hard_negatives(similarity / 1e-4, torch.tensor([[False, True, True]]), generator())
    assert drawn.tolist() == [1]


def test_similarities_stay_float32_under_autocast() -> None:
    """In bfloat16 these similarities would be 1; a temperature of 0.07 multiplies the difference by 14."""
    torch.manual_seed(0)
    texts = torch.nn.functional.normalize(torch.randn(16, 32), dim=-1)
    images = torch.nn.functional.normalize(texts + 0.01 * torch.randn(16, 32), dim=-1)
    exact = texts.double() @ images.double().T
    with torch.autocast("cpu", torch.bfloat16):
        assert ((texts @ images.T).double() - exact).abs().max() > 1e-3
        assert (similarities(texts, images).double() - exact).abs().max() < 1e-6
        under = match_in_batch(texts, images, [str(i) for i in range(16)])
    plain = match_in_batch(texts, images, [str(i) for i in range(16)])
    assert torch.equal(under.sum, plain.sum) and under.sum.dtype == torch.float32
