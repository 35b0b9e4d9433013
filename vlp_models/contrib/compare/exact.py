"""The exact test for few clusters: all ways of swapping two models' results, cluster by cluster.

If neither model is better, which of them got which of the two results on a cluster is chance: each of the 2^G ways to
assign them is equally likely (Fisher, 1935; Noreen, 1989, "Computer-intensive methods for testing hypotheses"). For a
mean over clusters of one size these are the sign flips of the clusters' differences.

Shape suffixes: G clusters, K additive statistics, S ways of swapping.
"""

from __future__ import annotations

import itertools

import numpy as np

from vlp_models.metrics.score import FloatArray, Statistic

FLIPPED_AT_ONCE = 12  # clusters: 4,096 ways


def exact_p(sums_a_GK: FloatArray, sums_b_GK: FloatArray, statistic: Statistic) -> float:
    """Return the two-sided p-value of a difference between two models: how many ways give one at least as large.

    Args:
        sums_a_GK, sums_b_GK: the statistics of each model, summed within each cluster.
    """
    middle_K = (sums_a_GK + sums_b_GK).sum(axis=0) / 2
    halves_GK = (sums_a_GK - sums_b_GK) / 2

    def difference(flipped_SK: FloatArray) -> FloatArray:
        return np.abs(statistic(middle_K + flipped_SK) - statistic(middle_K - flipped_SK))

    # Swapping all clusters only reverses the difference, so the first cluster need not be swapped.
    first_1K, head_GK, tail_GK = halves_GK[:1], halves_GK[1:FLIPPED_AT_ONCE], halves_GK[FLIPPED_AT_ONCE:]
    sums_SK = first_1K
    for half_K in head_GK:
        sums_SK = np.concatenate([sums_SK + half_K, sums_SK - half_K])
    observed = float(difference(halves_GK.sum(axis=0, keepdims=True))[0])
    extreme = ways = 0
    for signs in itertools.product((1, -1), repeat=len(tail_GK)):
        # (S, K) + (K,): all ways for the head, with one for the tail.
        differences_S = difference(sums_SK + np.array(signs) @ tail_GK if len(tail_GK) else sums_SK)
        # The tolerance counts a difference that equals the observed one but for rounding.
        extreme += int((differences_S >= observed - 1e-9 * max(observed, 1e-300)).sum())
        ways += len(differences_S)
    return extreme / ways


def differs_by_one_size(sums_a_GK: FloatArray, sums_b_GK: FloatArray) -> bool:
    """Return whether all clusters on which the models differ do so by the same amount, such as right or wrong answers.

    Then a model is better if and only if it wins more often than it loses, and the test assumes nothing else.
    """
    sizes = np.abs((sums_a_GK - sums_b_GK)[(sums_a_GK != sums_b_GK).any(axis=1)])
    return bool(np.allclose(sizes, sizes[:1], rtol=1e-9, atol=0)) if len(sizes) else True
