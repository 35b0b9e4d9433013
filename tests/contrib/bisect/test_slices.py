"""Gains by slice: errors of all intervals together, other test sets, and where they are reported."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_registry import TRACKING, ToyRegistry, answers

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.bisect.answers import is_missing_in_report, read_answer, report_section, write_answer
from vlp_models.contrib.bisect.slices import compare_slices, describe_slices
from vlp_models.errors import DataError
from vlp_models.evaluation.report import ReportContext
from vlp_models.metrics.score import Evidence, mean_percent
from vlp_models.params import load_params
from vlp_models.params.operations import PromotionParams
from vlp_models.registry.promotion.gate import Measurement

SLICES, IMAGES = 6, 50  # images of each slice
PARAMS = PromotionParams(resamples=400)


def measured(right: np.ndarray[Any, np.dtype[np.float64]], scorer: str = "", test: str = "t") -> Measurement:
    """Return right and wrong answers of numbered images."""
    names = [f"s/{i}" for i in range(len(right))]
    parts = np.column_stack([right, np.ones(len(right))])
    evidence = Evidence(groups=names, parts_NK=parts, statistic=mean_percent, items=names)
    slices = [["dataset=s", f"kind={i % SLICES}"] for i in range(len(right))]
    return Measurement(metric="accuracy", test=test, scorer=scorer, evidence=evidence, slices=slices)


def test_a_slice_that_lost_is_found_among_those_that_did_not() -> None:
    rng = np.random.default_rng(1)
    before = (rng.random(SLICES * 200) < 0.7).astype(float)
    after = before.copy()
    after[3::SLICES] = rng.random(200) < 0.35
    found = compare_slices(measured(after), measured(before), PARAMS)
    assert [gain.name for gain in found if gain.change == "worse"] == ["kind=3"]
    assert len(found) == SLICES and {gain.images for gain in found} == {200}, "`dataset=s` is the whole test"
    (worse,) = [gain for gain in found if gain.change == "worse"]
    assert worse.gain == pytest.approx(100 * (after[3::SLICES].mean() - before[3::SLICES].mean()))
    assert describe_slices(found) == f"worse: {worse}; {SLICES - 1} undecided"
    # Of a metric whose lower values are better, the same change is a gain.
    lower = compare_slices(measured(after), measured(before), PARAMS, sign=-1)
    assert [gain.name for gain in lower if gain.change == "better"] == ["kind=3"]


def test_equal_models_have_a_changed_slice_in_at_most_one_of_twenty_comparisons() -> None:
    rng, wrong, rounds = np.random.default_rng(3), 0, 400
    for _ in range(rounds):
        sides = [measured((rng.random(SLICES * IMAGES) < 0.6).astype(float)) for _ in range(2)]
        wrong += any(gain.change != "undecided" for gain in compare_slices(*sides, PARAMS))
    assert wrong / rounds <= 0.05


def test_small_slices_are_left_out_and_other_tests_are_refused() -> None:
    assert compare_slices(measured(np.zeros(30)), measured(np.ones(30)), PARAMS) == []
    others = [measured(np.ones(60), scorer="beam 5"), measured(np.ones(60), test="another")]
    for other in others:
        with pytest.raises(DataError):
            compare_slices(other, measured(np.ones(60)), PARAMS)


def test_an_answer_is_kept_with_its_version_and_shown_in_the_report(tmp_path: Path) -> None:
    registry = ToyRegistry(tmp_path, "toy-vqa")
    for _ in range(3):
        registry.add(answers(0.5))
    params, workspace = dataclasses.replace(load_params(), tracking=TRACKING), Workspace(tmp_path)
    reports = workspace.reports
    reports.mkdir()
    context = ReportContext(params=params, workspace=workspace, records=[], missing=[])
    assert report_section(context).below == "" and not is_missing_in_report(tmp_path)
    receipt = {"name": "toy-vqa", "version": 3, "challenger": True, "facts": {"since the champion (version 1)": "seed"}}
    (reports / "registered.json").write_text(json.dumps({"vqa": [receipt]}))
    page = reports / "index.html"
    page.write_text(report_section(context).below)
    assert "(version 1)" in page.read_text() and not is_missing_in_report(tmp_path)

    def answer(good: str, bad: str, sentence: str, kind: str = "causes") -> None:
        names = {"task": "vqa", "metric": "accuracy", "good": good, "bad": bad, "are_versions": "/" in bad}
        rest = {"seen": 5.0, "changes": [], "untried": {}, "unread": [], "notes": [], "trials": [], "command": "c"}
        write_answer(params, workspace, {**names, **rest, "answer": {"kind": kind, "sentence": sentence, "notes": []}})

    # Of another pair of versions: kept, and no line of the report.
    answer("toy-vqa/2", "toy-vqa/3", "The seed alone.", "seed")
    assert is_missing_in_report(tmp_path)
    page.write_text(report_section(context).below)
    assert "The seed alone" not in page.read_text() and not is_missing_in_report(tmp_path)
    sentence = "params seed: 1 -> 2 lowered accuracy (-5.00, -7.00 to -3.00)."
    answer("toy-vqa/1", "toy-vqa/3", sentence)
    answer("toy-vqa/1", "toy-vqa/3", "The budget is used up.", "out of time")
    answer("toy-vqa/1", "1a2b3c4d5e", "A commit has no tags.")
    version = registry.client.get_model_version("toy-vqa", "3")
    assert [read_answer(version, f"toy-vqa/{n}") for n in range(3)] == ["", sentence, "The seed alone."]
    answer("toy-vqa/1", "toy-vqa/3", sentence)
    assert "-7.00 to -3.00" in report_section(context).below
