"""The visual dictionary against slow NumPy: lookup, both update rules, revival of dead codes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vlp_models.models.soho.dictionary import NEVER, Dictionary
from vlp_models.objectives.moving_average import update_moving_averages

K, D = 6, 4


def dictionary(**options) -> Dictionary:
    torch.manual_seed(0)
    return Dictionary(K, D, momentum=0.4, **options).double().train()


def features(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def nearest_by_hand(values: np.ndarray, codes: np.ndarray) -> list[int]:
    return [min(range(len(codes)), key=lambda j: float(((v - codes[j]) ** 2).sum())) for v in values]


def test_lookup_of_nearest_code_with_straight_through_gradient():
    made, values = dictionary(), features(9).requires_grad_()
    mapped = made(values)
    codes = made.codes.numpy()
    wanted = nearest_by_hand(values.detach().numpy(), codes)
    assert mapped.codes_M.tolist() == wanted
    torch.testing.assert_close(mapped.vectors_MD, torch.from_numpy(codes[wanted]))
    weights = features(9, seed=2)
    (mapped.vectors_MD * weights).sum().backward()
    assert torch.equal(values.grad, weights)


def test_ties_go_to_the_first_code():
    made = dictionary()
    made.codes[3] = made.codes[1]
    assert made(made.codes[3][None]).codes_M.tolist() == [1]


def test_equation_4_moves_only_codes_that_were_hit():
    """Three updates, the first with two micro-batches."""
    made = dictionary()
    codes = made.codes.numpy().copy()
    for step, sizes in enumerate(((5, 2), (7,), (3,))):
        batches = [features(size, seed=10 * step + i) for i, size in enumerate(sizes)]
        for batch in batches:
            made(batch, learn=True)
            np.testing.assert_array_equal(made.codes.numpy(), codes)  # not before the update
        made.update()
        values = np.concatenate([batch.numpy() for batch in batches])
        group = nearest_by_hand(values, codes)
        after = codes.copy()
        for j in range(K):
            members = [v for v, h in zip(values, group, strict=True) if h == j]
            if members:
                after[j] = 0.4 * codes[j] + 0.6 * np.mean(members, axis=0)
        assert (after == codes).all(1).any() and (after != codes).any()
        np.testing.assert_allclose(made.codes.numpy(), after, rtol=1e-12)
        codes = made.codes.numpy().copy()


def test_released_update_averages_counts_and_sums_and_returns_moved_codes():
    made = dictionary(update="released")
    codes, counts, sums = made.codes.numpy().copy(), np.zeros(K), np.zeros((K, D))
    for step in range(3):
        values, weights = features(4, seed=step), torch.tensor([1.0, 3.0, 1.0, 2.0])
        group = nearest_by_hand(values.numpy(), codes)
        mapped = made(values, weights, learn=True)
        for j in range(K):
            of_j = [i for i, h in enumerate(group) if h == j]
            counts[j] = 0.4 * counts[j] + 0.6 * sum(float(weights[i]) for i in of_j)
            sums[j] = 0.4 * sums[j] + 0.6 * sum(((float(weights[i]) * values[i]).numpy() for i in of_j), np.zeros(D))
        smoothed = (counts + 1e-5) / (counts.sum() + K * 1e-5) * counts.sum()
        after = sums / smoothed[:, None]
        np.testing.assert_allclose(mapped.vectors_MD.numpy(), after[group], rtol=1e-9)
        np.testing.assert_array_equal(made.codes.numpy(), codes)
        made.update()
        np.testing.assert_allclose(made.codes.numpy(), after, rtol=1e-9)
        if step == 0:  # the collapse that equation 4 avoids
            assert (made.codes.numpy()[[j for j in range(K) if j not in group]] == 0).all()
        codes = made.codes.numpy().copy()


@pytest.mark.parametrize("update", ["paper", "released"])
def test_codes_stay_without_features_gradients_training_or_learn(update):
    made = dictionary(update=update)
    before = {name: b.clone() for name, b in made.state_dict().items()}
    made(features(5))
    with torch.no_grad():
        made(features(5), learn=True)
    made.eval()
    made(features(5), learn=True)
    made.train()
    made(features(0), learn=True)
    update_moving_averages(torch.nn.ModuleDict({"d": made}))
    assert all(torch.equal(before[name], b) for name, b in made.state_dict().items())


def test_idle_codes_are_revived_on_features():
    for revive_after in (0, 2):
        made = dictionary(revive_after=revive_after)
        far = 100 + torch.arange(K).double()[:, None].expand(K, D).clone()
        made.codes.copy_(far)
        made.codes[0] = 0
        batch = features(8)
        for _ in range(2):
            made(batch, learn=True)
            made.update()
        if not revive_after:
            assert made.idle.tolist() == [0] + [NEVER + 2] * (K - 1) and int(made.alive) == 1
            assert torch.equal(made.codes[1:], far[1:])
            made.idle += 99
            assert int(made.alive) == 1
            made.idle += 1
            assert int(made.alive) == 0
            continue
        assert made.idle.tolist() == [0] + [NEVER] * (K - 1) and int(made.alive) == 1  # put somewhere is not hit
        assert all((code == batch).all(1).any() for code in made.codes[1:])
        made(batch, learn=True)
        made.update()
        assert len(set(made(batch).codes_M.tolist())) > 1


def test_lookup_in_chunks_equals_one_lookup(monkeypatch):
    made, values = dictionary(), features(50)
    whole = made.nearest(values)
    monkeypatch.setattr("vlp_models.models.soho.dictionary.CHUNK", 7)
    assert torch.equal(made.nearest(values), whole)
