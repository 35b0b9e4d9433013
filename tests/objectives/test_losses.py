"""Each loss against a slow reference in plain Python, its gradient against finite differences; draws of negatives."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vlp_models.objectives.distributed import draw_categorical
from vlp_models.objectives.generation import advantages, self_critical, sentence_generation
from vlp_models.objectives.loss import cross_entropy, soft_label_answers
from vlp_models.objectives.masked_modeling import masked_language_modeling, masked_object_classification
from vlp_models.objectives.matching import (
    different_image_mask,
    draw_hard_negatives,
    image_sentence_matching,
    match_in_batch,
    similarities,
)

RANDOM = np.random.default_rng(0)


def tensor(array: np.ndarray, grad: bool = True) -> torch.Tensor:
    return torch.tensor(array, dtype=torch.float64, requires_grad=grad)


def log_softmax(row: np.ndarray) -> list[float]:
    total = math.log(sum(math.exp(v) for v in row))
    return [v - total for v in row]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_word_losses(smoothing):
    logits, targets = RANDOM.normal(size=(5, 7)), RANDOM.integers(0, 7, size=5)
    expected = 0.0
    for row, target in zip(logits, targets, strict=True):
        log_p = log_softmax(row)
        expected -= ((1 - smoothing) * log_p[target] + smoothing * sum(log_p) / 7) / 5
    x, y = tensor(logits), torch.tensor(targets)
    loss = sentence_generation(x, y, label_smoothing=smoothing)
    assert loss.mean.item() == pytest.approx(expected, rel=1e-12)
    assert loss.parts["msg_accuracy"].mean.item() == pytest.approx(float((logits.argmax(1) == targets).mean()))
    assert torch.autograd.gradcheck(lambda x: sentence_generation(x, y, label_smoothing=smoothing).mean, x)
    if smoothing == 0:
        assert masked_language_modeling(x, y).mean.item() == pytest.approx(expected, rel=1e-12)
        assert set(cross_entropy(x, y, name="nlvr").parts) == {"nlvr", "nlvr_accuracy"}


def test_object_loss():
    logits, probs = RANDOM.normal(size=(4, 6)), RANDOM.random((4, 6))
    probs[0, 2] = 0.0  # 0 log 0 is 0
    expected = 0.0
    for row, target in zip(logits, probs / probs.sum(1, keepdims=True), strict=True):
        log_p = log_softmax(row)
        expected += sum(t * (math.log(t) - q) for t, q in zip(target, log_p, strict=True) if t > 0) / 4
    x, y = tensor(logits), tensor(probs, grad=False)
    assert masked_object_classification(x, y).mean.item() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(lambda x: masked_object_classification(x, y).mean, x)
    half = masked_object_classification(x.detach().half(), y.half()).mean
    assert half.dtype == torch.float32
    assert half.item() == pytest.approx(expected, rel=1e-2)


def test_object_loss_is_zero_at_the_target():
    probs = tensor(RANDOM.random((4, 6)), grad=False)
    assert abs(masked_object_classification(probs.log(), probs).mean.item()) < 1e-12


@pytest.mark.parametrize("negatives", ["all", "hardest"])
def test_matching_loss(negatives):
    ids = ["a", "b", "a", "c", "d"]
    similarity = RANDOM.uniform(-1, 1, size=(5, 5))
    expected = 0.0
    for table in (similarity, similarity.T):  # sentences against images, then images against sentences
        costs = [[max(0.0, 0.2 + table[i][j] - table[i][i]) for j in range(5) if ids[j] != ids[i]] for i in range(5)]
        if negatives == "hardest":
            expected += sum(max(row) for row in costs) / 5
        else:
            violations = [c for row in costs for c in row if c > 0]
            expected += sum(violations) / max(1, len(violations))
    x, same = tensor(similarity), ~different_image_mask(ids)
    loss = image_sentence_matching(x, same, negatives=negatives)
    assert loss.mean.item() == pytest.approx(expected, rel=1e-12)
    best = [similarity[i][i] > max(similarity[i][j] for j in range(5) if ids[j] != ids[i]) for i in range(5)]
    assert loss.parts["ism_accuracy"].mean.item() == pytest.approx(sum(best) / 5)
    assert torch.autograd.gradcheck(lambda x: image_sentence_matching(x, same, negatives=negatives).mean, x)


@pytest.mark.parametrize("negatives", ["all", "hardest"])
def test_matching_without_negatives_or_violations_is_zero(negatives):
    for ids in (["a"], ["a", "a", "a"]):
        x = torch.zeros(len(ids), len(ids), requires_grad=True)
        loss = image_sentence_matching(x, ~different_image_mask(ids), negatives=negatives)
        loss.mean.backward()
        assert loss.mean.item() == 0
        assert x.grad is not None
    separated = torch.eye(3, requires_grad=True) * 2
    assert image_sentence_matching(separated, ~different_image_mask("abc"), negatives=negatives).mean.item() == 0


def test_answer_loss():
    logits, scores = RANDOM.normal(size=(3, 4)), RANDOM.choice([0, 0.3, 0.6, 1], size=(3, 4))
    expected = 0.0
    for row, target in zip(logits, scores, strict=True):
        for x, t in zip(row, target, strict=True):
            p = 1 / (1 + math.exp(-x))
            expected -= (t * math.log(p) + (1 - t) * math.log(1 - p)) / 3
    x, y = tensor(logits), tensor(scores, grad=False)
    loss = soft_label_answers(x, y)
    assert loss.mean.item() == pytest.approx(expected, rel=1e-12)
    best = [scores[i, logits[i].argmax()] for i in range(3)]
    assert loss.parts["vqa_accuracy"].mean.item() == pytest.approx(sum(best) / 3)
    assert torch.autograd.gradcheck(lambda x: soft_label_answers(x, y).mean, x)


@pytest.mark.parametrize("loss_of", [masked_language_modeling, sentence_generation, masked_object_classification])
def test_empty_selection_gives_zero_loss_with_gradients(loss_of):
    weight = torch.randn(3, 7, requires_grad=True)
    targets = torch.zeros(0, 7) if loss_of is masked_object_classification else torch.zeros(0, dtype=torch.int64)
    loss = loss_of(torch.zeros(0, 3) @ weight, targets)
    loss.mean.backward()
    assert loss.mean.item() == 0
    assert not weight.grad.any()
    assert all(part.count == 0 for part in loss.parts.values())


def test_parts_carry_no_graph():
    loss = masked_language_modeling(torch.randn(4, 7, requires_grad=True), torch.zeros(4, dtype=torch.int64))
    assert loss.mean.requires_grad
    assert not any(part.sum.requires_grad for part in loss.parts.values())


# ---- Self-critical sequence training ----


def test_self_critical_loss_equals_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    drawn = torch.randint(5, (7,), generator=generator)
    advantage = torch.randn(7, generator=generator, dtype=torch.float64)
    total = 0.0
    for row, token, a in zip(logits.numpy(), drawn.tolist(), advantage.tolist(), strict=True):
        total -= float(np.log(np.exp(row[token]) / np.exp(row).sum())) * a / 7
    assert float(self_critical(logits, drawn, advantage).mean) == pytest.approx(total, rel=1e-12)
    assert torch.autograd.gradcheck(lambda x: self_critical(x, drawn, advantage).mean, logits.requires_grad_())


@pytest.mark.parametrize("baseline", [0.0, 0.7])
def test_expected_gradient_equals_gradient_of_expected_reward(baseline: float) -> None:
    """Over all pairs of tokens that can be drawn, for any baseline that does not depend on the draw."""
    generator = torch.Generator().manual_seed(1)
    first = torch.randn(4, generator=generator, dtype=torch.float64, requires_grad=True)
    second = torch.randn(4, 4, generator=generator, dtype=torch.float64, requires_grad=True)  # given the first
    reward = torch.rand(4, 4, generator=generator, dtype=torch.float64)

    joint = first.softmax(0)[:, None] * second.softmax(1)
    wanted = torch.autograd.grad(-(joint * reward).sum(), [first, second], retain_graph=True)

    loss = torch.zeros((), dtype=torch.float64)
    for a in range(4):
        for b in range(4):
            advantage = (reward[a, b] - baseline).expand(2)
            drawn = self_critical(torch.stack([first, second[a]]), torch.tensor([a, b]), advantage)
            loss = loss + joint[a, b].detach() * 2 * drawn.mean  # 2: a sum over the tokens, not their mean
    for got, expected in zip(torch.autograd.grad(loss, [first, second]), wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_self_critical_baselines() -> None:
    reward = torch.tensor([[1.0, 2.0, 6.0], [0.0, 0.0, 3.0]])
    greedy = advantages(reward, "greedy", torch.tensor([1.0, 2.0]))
    assert greedy.tolist() == [[0.0, 1.0, 5.0], [-2.0, -2.0, 1.0]]
    assert advantages(reward, "leave_one_out").tolist() == [[-3.0, -1.5, 4.5], [-1.5, -1.5, 3.0]]


# ---- Draws and hard negatives ----


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
