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
        # The tolerance counts a difference that equals the observed one but for rounding; an undefined one counts, too.
        extreme += int((~(differences_S < observed * (1 - 1e-9))).sum())
        ways += len(differences_S)
    return extreme / ways


def are_right_or_wrong(sums_GK: FloatArray) -> bool:
    """Return whether each cluster is one answer that is right, (1, 1) or (100, 1), or wrong, (0, 1).

    Then a model is better if and only if it wins more often than it loses, and the test assumes nothing else. Scores of
    other sizes could hide a rare large loss.
    """
    if sums_GK.shape[1] != 2 or not (sums_GK[:, 1] == 1).all():
        return False
    return any(bool(np.isin(sums_GK[:, 0], (0, right)).all()) for right in (1, 100))
