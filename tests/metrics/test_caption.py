"""Caption scores equal the recorded ones of the official programs, and say so where a program is missing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest

from vlp_models.errors import DataError
from vlp_models.metrics.bootstrap import interval
from vlp_models.metrics.caption import (
    CaptionSet,
    constant_caption,
    human_agreement,
    score_caption_sets,
    score_captions,
)
from vlp_models.metrics.coco_tools import Meteor, ptb_lines
from vlp_models.metrics.score import Score, meteor_from_statistics

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "golden_caption_metrics.json").read_text())
CANDIDATES = {image_id: captions[0] for image_id, captions in GOLDEN["res_raw"].items()}
REFERENCES = GOLDEN["gts_raw"]
EXPECTED = {f"BLEU-{n}": GOLDEN["Bleu"][n - 1] for n in range(1, 5)} | {
    "ROUGE-L": GOLDEN["ROUGE_L"],
    "CIDEr": GOLDEN["CIDEr"],
    "METEOR": GOLDEN["METEOR"],
}
needs_java = pytest.mark.skipif(not shutil.which("java"), reason="java not found")


def by_name(scores: list[Score]) -> dict[str, Score]:
    return {score.metric: score for score in scores}


@pytest.fixture(scope="module")
def golden_scores() -> dict[str, dict[str, Score]]:
    human = human_agreement(REFERENCES)
    assert human is not None
    sets = {"model": CaptionSet(candidates=CANDIDATES, references=REFERENCES), "human": human}
    return {name: by_name(scores) for name, scores in score_caption_sets(sets).items()}


@needs_java
def test_scores_equal_the_official_ones(golden_scores: dict[str, dict[str, Score]]) -> None:
    scores = golden_scores["model"]
    for name, value in EXPECTED.items():
        assert scores[name].value == pytest.approx(100 * value, abs=1e-9), name
        assert scores[name].note == ""
    assert scores["SPICE"].value is None
    assert "not computed" in scores["SPICE"].note


@needs_java
def test_statistics_of_all_items_give_the_score_itself(golden_scores: dict[str, dict[str, Score]]) -> None:
    """What the interval resamples is the metric, not a mean of something else: BLEU and METEOR are corpus scores."""
    for name in EXPECTED:
        score = golden_scores["model"][name]
        assert score.evidence is not None and score.value is not None
        whole = score.evidence.statistic(score.evidence.parts_NK.sum(axis=0, keepdims=True))
        assert whole[0] == pytest.approx(score.value, abs=1e-9), name
        low, high = interval(score.evidence, resamples=200, seed=0)  # type: ignore[misc]
        assert low <= score.value <= high, name


@needs_java
def test_meteor_of_single_segments_equals_the_official_one(golden_scores: dict[str, dict[str, Score]]) -> None:
    evidence = golden_scores["model"]["METEOR"].evidence
    assert evidence is not None
    assert meteor_from_statistics(evidence.parts_NK) / 100 == pytest.approx(GOLDEN["METEOR_per_image"], abs=1e-9)
    assert not [child for child in psutil.Process().children() if "java" in child.name()]


@needs_java
def test_meteor_that_takes_too_long_is_ended_and_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlp_models.metrics.caption.Meteor", lambda: Meteor(timeout=0.05))
    score = by_name(score_captions(CANDIDATES, REFERENCES))["METEOR"]
    assert score.value is None
    assert score.note.startswith("not computed: METEOR failed")


def test_without_java_nothing_turns_into_a_zero(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    scores = by_name(score_captions(CANDIDATES, REFERENCES))
    for name in ("METEOR", "SPICE"):
        assert scores[name].value is None
    assert scores["METEOR"].note == "not computed: java not found"
    for name in ("BLEU-1", "BLEU-4", "ROUGE-L", "CIDEr"):
        assert scores[name].note == "ptb-like tokenizer (java not found)"
        assert scores[name].value == pytest.approx(100 * EXPECTED[name], abs=1e-9)


@needs_java
def test_odd_line_ends_shift_no_caption() -> None:
    texts = ["a\rb", "c\fd", "e\vf", "g\u2028h", "i\u0085j", "", "k\nl", "caf\u00e9"]
    assert ptb_lines(texts) == ["a b", "c d", "e f", "g h", "i j", "", "k l", "caf\u00e9"]


@needs_java
def test_tokenizer_reads_utf8_in_any_locale() -> None:
    code = "from vlp_models.metrics.coco_tools import ptb_lines; print(ascii(ptb_lines(['caf\\xe9'])))"
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "1"}
    done = subprocess.run(["python", "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == r"['caf\xe9']"


def test_one_image_scores_zero_cider(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CIDEr's document frequency over one image is log 1: the official zero, kept."""
    monkeypatch.setenv("PATH", str(tmp_path))
    score = by_name(score_captions({"1": CANDIDATES["1"]}, {"1": REFERENCES["1"]}))["CIDEr"]
    assert score.value == GOLDEN["CIDEr_single_image"]


def test_missing_ids_are_named() -> None:
    with pytest.raises(DataError, match="1 images have no caption, such as 2"):
        score_captions({"1": "a"}, {"1": ["a"], "2": ["b"]})
    with pytest.raises(DataError, match="1 images have no reference"):
        score_captions({"1": "a"}, {"1": []})


def test_a_caption_that_tokenises_to_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlp_models.metrics.coco_tools.ptb_lines", lambda texts: ["" for _ in texts])
    with pytest.raises(DataError, match="came out of the tokenizer empty"):
        score_captions({"1": "a cat"}, {"1": ["a cat"]})


def test_constant_caption_is_the_commonest() -> None:
    assert constant_caption(["A cat", "a dog", "a  cat", "two birds"]) == "a cat"
    assert constant_caption(["the red cat", "a cat", "a dog"]) == "a cat"  # equals: commoner words
    assert constant_caption([]) == ""


def test_human_agreement_needs_two_references() -> None:
    assert human_agreement({"1": ["a"]}) is None
    human = human_agreement({"1": ["a", "b", "c"]})
    assert human is not None
    assert human.candidates == {"1": "c"} and human.references == {"1": ["a", "b"]}
