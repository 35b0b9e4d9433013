"""vlp audit: planted mistakes are found, each with its reason, and the same data gives the same report."""

from __future__ import annotations

import csv
from collections.abc import Callable

import numpy as np
import pytest
from audited_project import COPIES, VLMO, Audited
from small_project import make_model

from vlp_models.common.io import hash_file
from vlp_models.contrib.audit.audit import audit
from vlp_models.contrib.audit.captions import find_copied, find_empty, find_language
from vlp_models.contrib.audit.decisions import REPORT
from vlp_models.contrib.audit.mismatch import CANDIDATES, estimate_probability, find_mismatches
from vlp_models.contrib.audit.pairs import read_pairs
from vlp_models.contrib.audit.vectors import embed, resolve_tower
from vlp_models.errors import CheckpointError, DataError, ParamsError
from vlp_models.params import ModelParams


def synthetic_pairs(images: int, captions: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return vectors [I, F], owners and captions: words whose topics are the image's, with noise in both."""
    topics = np.array([rng.choice(12, 3, replace=False) for _ in range(images)])
    vectors = np.zeros((images, 24), np.float32)
    np.put_along_axis(vectors, topics, 1.0, 1)
    vectors += rng.normal(0, 0.25, vectors.shape)
    owners = np.repeat(np.arange(images), captions)
    texts = [" ".join(f"w{topic}v{rng.integers(3)}" for topic in topics[owner]) + " the a" for owner in owners]
    return vectors, owners, texts


@pytest.mark.parametrize(("captions", "unit"), [(1, "caption"), (3, "caption"), (3, "image")])
def test_swaps_are_ranked_first_and_their_share_is_estimated(captions: int, unit: str) -> None:
    rng = np.random.default_rng(1)
    vectors, owners, texts = synthetic_pairs(600, captions, rng)
    count = 600 if unit == "image" else len(texts)
    chosen = rng.choice(count, count // 20, replace=False)
    source = np.arange(count)
    source[chosen] = np.roll(chosen, 1)
    if unit == "image":
        texts = [texts[source[owner] * captions + number % captions] for number, owner in enumerate(owners)]
    else:
        texts = [texts[row] for row in source]
    swapped = np.isin(owners if unit == "image" else np.arange(count), chosen)
    mismatch = find_mismatches(vectors, owners, texts, seed=1)
    first = np.argsort(mismatch.rank_P)[: swapped.sum()]
    assert swapped[first].mean() > 0.8, "one in 20 is chance"
    assert 0.02 < mismatch.share < 0.09
    assert mismatch.probability_P[swapped].mean() > 0.6 > 0.1 > mismatch.probability_P[~swapped].mean()
    if unit == "image":
        assert mismatch.all_P[swapped & (mismatch.probability_P > 0.5)].mean() > 0.8
    # what fits better is another image's caption about the same topics
    better = mismatch.better_P[swapped]
    assert (owners[better] != owners[swapped]).all()


def test_without_swaps_no_pair_is_probable_and_unrelated_captions_all_are() -> None:
    rng = np.random.default_rng(2)
    vectors, owners, texts = synthetic_pairs(600, 1, rng)
    clean = find_mismatches(vectors, owners, texts, seed=1)
    assert clean.share < 0.02 and (clean.probability_P > 0.5).mean() < 0.01
    shuffled = find_mismatches(vectors, owners, [texts[row] for row in rng.permutation(600)], seed=1)
    assert shuffled.share > 0.8


def test_memory_grows_with_the_pairs_and_not_with_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are compared `CANDIDATES` at a time: fewer find the same pairs."""
    vectors, owners, texts = synthetic_pairs(1500, 1, np.random.default_rng(3))
    texts[::100] = np.roll(np.array(texts[::100]), 1).tolist()
    ranks = []
    for limit in (CANDIDATES, 64):
        monkeypatch.setattr("vlp_models.contrib.audit.mismatch.CANDIDATES", limit)
        ranks.append(find_mismatches(vectors, owners, texts, seed=1).rank_P[::100])
    assert (np.median(ranks, 1) < 20).all()


def test_probability_of_a_mixture_with_known_densities() -> None:
    """True scores N(3, 1), mismatched ones N(0, 1), a fifth of the pairs: Bayes' rule gives the probability."""
    rng = np.random.default_rng(4)
    score = np.concatenate([rng.normal(3, 1, 40_000), rng.normal(0, 1, 10_000)])
    probability, share = estimate_probability(score, rng.normal(0, 1, 50_000))
    assert share == pytest.approx(0.2, abs=0.02)
    exact = 0.2 / (0.2 + 0.8 * np.exp(3 * score - 4.5))
    assert np.abs(probability - exact).mean() < 0.02


def test_planted_mistakes_are_found_with_a_reason(audited: Audited) -> None:
    planted, rows = audited.planted, {row["caption_id"]: row for row in audited.rows()}
    first = set(audited.listed("swapped")[: len(planted["swapped"])])
    # captions of the other kinds belong to no image either
    assert len(first & {name for names in planted.values() for name in names}) / len(first) > 0.5, "16% are chance"
    assert first & planted["swapped"] and all(rows[name]["better"] for name in first)
    assert set(audited.listed("empty")) == planted["empty"]
    assert set(audited.listed("copied")) == planted["copied"]
    assert set(audited.listed("language")[:8]) >= planted["language"], "file names have other letters, too"
    reasons = {f["reason"] for row in rows.values() for f in row["findings"]}
    assert {"a file name", "only photo", "no content word", f"the same caption is on {COPIES} images"} <= reasons
    assert "in Cyrillic script, most captions are in Latin" in reasons
    assert audited.summary.counts["empty"] == 3 and audited.summary.pairs == 316


def test_the_report_is_ranked_repeatable_and_a_spreadsheet_cannot_run_it(audited: Audited) -> None:
    report = audited.workspace.root / REPORT
    rows = audited.rows()
    assert [row["rank"] for row in rows] == list(range(1, len(rows) + 1))
    assert [row["score"] for row in rows] == sorted((row["score"] for row in rows), reverse=True)
    before = hash_file(report)
    audit(audited.params, audited.workspace, ["scenes"])
    assert hash_file(report) == before
    with report.with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        listed = list(csv.DictReader(file))
    assert [row["caption_id"] for row in listed] == [row["caption_id"] for row in rows]
    assert not any(row["text"].startswith(("=", "+", "@")) for row in listed)


def test_near_duplicates_of_training_images_are_listed(audited: Audited) -> None:
    rows = audited.rows()
    copies = [f for row in rows for f in row["findings"] if f["kind"] == "near_duplicate"]
    assert len(copies) == audited.summary.counts.get("near_duplicate", 0)
    of_copies = [row for row in rows if any(f["kind"] == "near_duplicate" for f in row["findings"])]
    assert all(row["split"] == "train" for row in of_copies)
    assert all((audited.workspace.root / row["copy_of_path"]).is_file() for row in of_copies)
    assert all(bool(row["copy_of"]) == (row in of_copies) for row in rows)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("DSC_0042", "a file name"),
        ("holiday-beach.png", "a file name"),
        ("Photo of the image", "only photo, image"),
        ("12.05.2024", "no content word"),
        ("...", "no content word"),
        ("untitled 3", "only untitled"),
    ],
)
def test_captions_without_content(text: str, reason: str) -> None:
    finding = find_empty(text)
    assert finding is not None and finding.reason == reason


@pytest.mark.parametrize(
    "text", ["a dog", "Two dogs in a picture frame", "犬", "ein Bild von einem Hund", "Δύο σκύλοι"]
)
def test_captions_with_content(text: str) -> None:
    assert find_empty(text) is None


def test_copies_are_unusual_only_where_few_captions_repeat() -> None:
    """Generated scenes repeat captions by design; a stock sentence among different captions does not."""
    different = [f"caption number {n}" for n in range(100)] + ["click to enlarge"] * 12
    findings = find_copied(different, range(112))
    assert [finding is not None for finding in findings] == [False] * 100 + [True] * 12
    assert not any(find_copied([f"a {color} ball" for color in ("red", "blue") * 50], range(100)))
    assert not any(find_copied(["a red ball"] * 5, [0] * 5)), "five captions of one image"


def test_languages_are_compared_within_the_code_that_captions_name() -> None:
    english = [f"a {a} dog {b} on the {c}" for a in ("black", "brown") for b in ("runs", "sits") for c in ENDS]
    german = [f"ein {a} Hund {b} auf dem {c}" for a in ("alter", "kleiner") for b in ("läuft", "sitzt") for c in GERMAN]
    stray = "Der Junge springt über die Mauer und lacht"
    marked = find_language([*english, stray], ["unknown"] * (len(english) + 1))
    assert [row for row, finding in enumerate(marked) if finding] == [len(english)]
    by_code = find_language([*english, *german], ["en"] * len(english) + ["de"] * len(german))
    assert not any(by_code)


XGPT = ModelParams(family="xgpt", config={"hidden": 16, "heads": 2, "intermediate": 32, "layers": 1})
ENDS = ("grass", "beach", "sofa", "street", "table", "snow", "stairs", "road")
GERMAN = ("Rasen", "Strand", "Sofa", "Weg", "Tisch", "Schnee", "Platz", "Dach")


def test_a_model_with_two_towers_is_a_second_space(copied: Callable[[], Audited]) -> None:
    """VLMo embeds images from pixels and texts apart; a family without this ability is refused in one sentence."""
    project = copied()
    workspace, params = project.workspace, project.params
    with pytest.raises(ParamsError, match=r"--tower finetune/nothing: not in params\.yaml"):
        resolve_tower("finetune/nothing", params)
    assert resolve_tower("tden", params) == "initial/tden"
    pairs = read_pairs(workspace, ["scenes"])
    with pytest.raises(DataError, match="not found; run `dvc repro"):
        embed(workspace, "finetune/absent", pairs)
    make_model(workspace, 1, "towers", made=VLMO, name="vlmo", task="retrieval")
    images, texts = embed(workspace, "finetune/towers", pairs)
    assert images.shape[0] == len(pairs.image_ids) and texts.shape[0] == len(pairs.texts)
    np.testing.assert_allclose(np.linalg.norm(images, axis=1), 1, atol=1e-4)
    summary = audit(params, workspace, ["scenes"], tower="finetune/towers", near_duplicates=False)
    assert summary.share is not None
    make_model(workspace, 1, "writer", made=XGPT, name="xgpt", task="captioning")
    with pytest.raises(CheckpointError, match="does not embed images and texts separately"):
        embed(workspace, "finetune/writer", pairs)
