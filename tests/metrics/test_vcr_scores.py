"""VCR's accuracies by hand, and the leaderboard's file."""

from __future__ import annotations

import pytest

from vlp_models.metrics.vcr import VCRResult, official_csv, score_vcr


def test_both_must_be_right_and_unknown_ones_do_not_count() -> None:
    verdicts = [(True, True), (True, False), (False, True), (True, None), (None, None)]
    scores = {
        s.metric: s
        for s in score_vcr(
            [VCRResult(group=str(i), answer_right=a, rationale_right=r) for i, (a, r) in enumerate(verdicts)]
        )
    }
    assert (scores["Q->A"].value, scores["Q->A"].n) == (pytest.approx(75), 4)
    assert (scores["QA->R"].value, scores["QA->R"].n) == (pytest.approx(200 / 3), 3)
    assert (scores["Q->AR"].value, scores["Q->AR"].n) == (pytest.approx(100 / 3), 3)
    hidden = score_vcr([VCRResult(group="a", answer_right=None, rationale_right=None)])
    assert all(s.value is None and "hidden" in s.note for s in hidden)


def test_the_leaderboards_file_has_twenty_probabilities() -> None:
    header, line = official_csv([("test-0", [0.1, 0.2, 0.3, 0.4], [[0.25] * 4] * 4)]).splitlines()
    assert header.split(",")[:6] == ["annot_id", *(f"answer_{i}" for i in range(4)), "rationale_conditioned_on_a0_0"]
    assert len(header.split(",")) == len(line.split(",")) == 21
    assert line.startswith("test-0,0.100000,0.200000")
