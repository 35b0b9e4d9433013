"""The exact p of few clusters, against scipy and a plain loop, and the verdicts from it."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from score_files import write_csv

from vlp_models.contrib.compare.comparison import Row, compare
from vlp_models.contrib.compare.exact import exact_p
from vlp_models.contrib.compare.scored import plain_mean
from vlp_models.metrics.score import FloatArray, macro_f1_percent


def with_counts(values: FloatArray) -> FloatArray:
    return np.column_stack([values, np.ones(len(values))])


@pytest.mark.parametrize("clusters", [2, 7, 14])
@pytest.mark.parametrize("digits", [0, 1, 6])  # 0 and 1: many ties
def test_p_is_that_of_all_sign_flips(clusters: int, digits: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(clusters)
    a, b = rng.random((2, clusters)).round(digits)
    expected = stats.permutation_test(
        (a - b,), np.mean, permutation_type="samples", n_resamples=np.inf, alternative="two-sided"
    )
    assert exact_p(with_counts(a), with_counts(b), plain_mean) == pytest.approx(expected.pvalue)


def test_p_of_any_statistic_is_that_of_swapped_results() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.integers(0, 5, size=(2, 8, 9)).astype(float)  # confusion matrices of three labels
    swaps = np.array(list(itertools.product((False, True), repeat=8)))[:, :, None]
    sums_a, sums_b = (np.where(swaps, y, x).sum(axis=1) for x, y in ((a, b), (b, a)))
    differences = np.abs(macro_f1_percent(sums_a) - macro_f1_percent(sums_b))
    observed = abs(macro_f1_percent(a.sum(0, keepdims=True)) - macro_f1_percent(b.sum(0, keepdims=True)))
    assert exact_p(a, b, macro_f1_percent) == np.mean(differences >= observed - 1e-9)


def test_verdicts_of_few_clusters(tmp_path: Path) -> None:
    def row(a: list[float], b: list[float], challengers: int = 1) -> Row:
        files = {"a": write_csv(tmp_path / "a.csv", a)}
        for i in range(challengers):
            files[f"b{i}"] = write_csv(tmp_path / f"b{i}.csv", b if i == 0 else [1 - value for value in a])
        return compare(files).rows[0]

    def verdict(a: list[float], b: list[float], challengers: int = 1) -> tuple[str, float | None, str]:
        compared = row(a, b, challengers)
        assert compared.low is None and compared.detectable is None
        return compared.verdict, compared.p, compared.reason

    # All of six: 2 of 64 ways. Two comparisons double it.
    assert verdict([0] * 6, [1] * 6)[:2] == ("promote", 1 / 32)
    assert verdict([1] * 6, [0] * 6)[:2] == ("keep", 1 / 32)
    assert verdict([0] * 6, [1] * 6, challengers=2)[:2] == ("inconclusive", 1 / 32)
    few = verdict([0] * 5, [1] * 5)
    assert few[:2] == ("inconclusive", 1 / 16) and "5 can have no p below 0.062, so nothing can be shown" in few[2]
    assert verdict([0, 1] * 9, [1, 1] * 9)[:2] == ("promote", 2 / 2**9)  # ties say nothing
    assert "shows no difference" in verdict([0, 1] * 6, [1, 0] * 6)[2]
    assert "same scores" in verdict([0.5] * 10, [0.5] * 10)[2]
    # Graded scores may win often and lose rarely but much: a few items do not show that they do not.
    for better in ([0.1] * 12, [0.1 + i / 100 for i in range(12)]):
        graded = verdict([0.0] * 12, better)
        assert graded[:2] == ("inconclusive", 2 / 2**12) and "are equally likely between equals" in graded[2]
    files = {"a": write_csv(tmp_path / "a.csv", [0] * 12), "b": write_csv(tmp_path / "b.csv", [1] * 12)}
    known = compare(files, seed_std=0.1).rows[0]
    assert known.p is None and known.verdict == "inconclusive" and "for one run of each model" in known.reason
    assert compare(files, lower_is_better=True).rows[0].verdict == "keep"


def test_nineteen_clusters_of_many_items(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    clusters = {"cluster": [f"c{i % 19}" for i in range(190)]}
    a, b = (write_csv(tmp_path / f"{name}.csv", rng.random(190).tolist(), clusters) for name in "ab")
    found = compare([a, b])
    assert found.rows[0].clusters == 19 and 0 < (found.rows[0].p or 0) <= 1
    assert any("with fewer than 20 clusters p is exact" in note for note in found.notes)


def test_challengers_with_the_same_scores_are_noted(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    first, other = rng.random((2, 40)).round(3).tolist()
    files = {"a": write_csv(tmp_path / "a.csv", rng.random(40).tolist())}
    files |= {name: write_csv(tmp_path / f"{name}.csv", values) for name, values in (("b", first), ("c", other))}
    files["d"] = write_csv(tmp_path / "d.csv", list(reversed(first)), {"item": [f"q{i}" for i in reversed(range(40))]})
    assert [note for note in compare(files).notes if "one result" in note] == [
        "b, d: the same score on every item; they are one result, not 2"
    ]
