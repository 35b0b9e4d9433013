"""The report's comparison of variants: pairs on the same items, corrected for their number, and what is left out."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from several_variants import variants_params, variants_workspace, write_evaluation

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.compare.variants import compare, compare_variants, holm, variants
from vlp_models.evaluation.report import ReportContext
from vlp_models.evaluation.report.records import evaluation_records
from vlp_models.metrics.bootstrap import MIN_GROUPS
from vlp_models.metrics.score import Evidence, mean_score
from vlp_models.params import Params


@pytest.fixture(scope="module")
def params() -> Params:
    return variants_params()


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return variants_workspace(tmp_path)


def test_variants_are_compared_in_pairs_on_the_same_test(params: Params, workspace: Workspace) -> None:
    records = evaluation_records(params, workspace)
    found = compare(workspace, records, "accuracy", "higher", resamples=500)
    assert found is not None
    pairs = {(pair.a, pair.b): pair for pair in found.pairs}
    assert list(pairs) == [("regions", "fresh"), ("regions", "other"), ("fresh", "other")], (
        "text-only controls are not compared"
    )
    assert found.verdict(pairs["regions", "fresh"]) == "regions is better"
    assert found.describe_interval(pairs["regions", "fresh"]) == "items and seeds (2 and 2)"
    assert found.verdict(pairs["regions", "other"]) == "inconclusive"
    assert found.describe_interval(pairs["regions", "other"]) == "items and seeds (2 and 1)"
    lower = compare(workspace, records, "accuracy", "lower", resamples=500)
    assert lower is not None and lower.verdict(lower.pairs[0]) == "fresh is better"
    html = variants(ReportContext(params=params, workspace=workspace, records=records, missing=[])).in_tables
    assert list(html) == [("vqa", "scenes", "test")]
    for words in ("regions − fresh", "inconclusive", "regions is better"):
        assert words in html["vqa", "scenes", "test"], words
    alone = dataclasses.replace(params, finetune={"other": params.finetune["other"]})
    assert compare(workspace, evaluation_records(alone, workspace), "accuracy", "higher", resamples=100) is None


def test_incomparable_runs_are_listed_with_the_reason(params: Params, workspace: Workspace) -> None:
    for file in workspace.evaluation("other").iterdir():
        file.unlink()
    workspace.evaluation("other").rmdir()
    write_evaluation(workspace, "other", 0.7, 1, test="another")
    (workspace.evaluation("fresh-2") / "items.parquet").unlink()
    found = compare(workspace, evaluation_records(params, workspace), "accuracy", "higher", resamples=100)
    assert found is not None and [(p.a, p.b, p.seeds) for p in found.pairs] == [("regions", "fresh", (2, 1))]
    left_out = "\n".join(found.left_out)
    assert "other: measured on another test" in left_out and "fresh-2: " in left_out


def runs_of(share: float, seeds: int = 1, *, groups: int = 40, number: int = 0) -> list[Evidence]:
    """Return the evidence of one variant's runs on three items of each of `groups` images."""
    rng, difficulty = np.random.default_rng(number), np.random.default_rng(99).normal(0, 0.2, 3 * groups)
    names, items = [f"i{n // 3:02d}" for n in range(3 * groups)], [f"q{n}" for n in range(3 * groups)]
    scores = [
        mean_score("accuracy", share + shift + difficulty + rng.normal(0, 0.05, 3 * groups), names, items=items)
        for shift in rng.normal(0, 0.02, seeds)
    ]
    return [score.evidence for score in scores if score.evidence is not None]


def test_equal_variants_are_inconclusive_and_different_ones_significant() -> None:
    same = {
        "a": runs_of(0.5, 3, number=1),
        "b": runs_of(0.5, 3, number=2),
    }
    assert not compare_variants(same, resamples=1000, seed=1)[0].is_significant
    apart = {**same, "c": runs_of(0.9, 3, number=3)}
    found = {(d.a, d.b): d for d in compare_variants(apart, resamples=1000, seed=1)}
    assert list(found) == [("a", "b"), ("a", "c"), ("b", "c")]
    assert found["a", "c"].is_significant and found["a", "c"].value < 0 and not found["a", "b"].is_significant
    p = found["a", "c"].p
    assert p is not None and p < 0.01 and found["a", "c"].p_holm == pytest.approx(3 * p)
    run = runs_of(0.5)
    (itself,) = compare_variants({"a": run, "b": run}, resamples=100, seed=1)
    assert (itself.value, itself.p) == (0.0, 1.0) and not itself.is_significant


def test_below_twenty_groups_no_variant_is_better() -> None:
    for groups in (1, 2, MIN_GROUPS - 1):
        (few,) = compare_variants(
            {"a": runs_of(0.9, groups=groups), "b": runs_of(0.1, groups=groups)}, resamples=1000, seed=1
        )
        assert (few.low, few.high, few.p, few.p_holm) == (None, None, None, None)
        assert few.value == pytest.approx(80) and not few.is_significant
    enough = {"a": runs_of(0.9, groups=MIN_GROUPS), "b": runs_of(0.1, groups=MIN_GROUPS)}
    (difference,) = compare_variants(enough, resamples=1000, seed=1)
    assert difference.is_significant


def test_holm_correction_equals_a_textbook_example() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([]) == []
