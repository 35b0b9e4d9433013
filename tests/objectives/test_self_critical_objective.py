"""The self-critical loss against its definition, and its gradient against that of the expected reward."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vlp_models.objectives.generation import advantages, self_critical


def test_equals_the_definition() -> None:
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
def test_on_average_the_gradient_is_that_of_the_expected_reward(baseline: float) -> None:
    """Over every pair of tokens that can be drawn; whatever the baseline, as long as it does not look at the draw."""
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


def test_baselines() -> None:
    reward = torch.tensor([[1.0, 2.0, 6.0], [0.0, 0.0, 3.0]])
    greedy = advantages(reward, "greedy", torch.tensor([1.0, 2.0]))
    assert greedy.tolist() == [[0.0, 1.0, 5.0], [-2.0, -2.0, 1.0]]
    assert advantages(reward, "leave_one_out").tolist() == [[-3.0, -1.5, 4.5], [-1.5, -1.5, 3.0]]
