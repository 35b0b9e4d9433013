"""CIDEr-D against a slow reference, pycocoevalcap, and its recorded numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlp_models.errors import DataError
from vlp_models.metrics.cider_d import CiderD, DocumentFrequencies

GOLDEN = Path(__file__).parent.parent / "golden" / "golden_caption_metrics.json"


def slow(candidate: Sequence[str], references: list[list[str]], corpus: list[list[list[str]]]) -> float:
    """Compute the definition, n-gram by n-gram."""

    def grams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
        return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]

    total = 0.0
    for reference in references:
        for n in range(1, 5):
            everything = sorted(set(grams(candidate, n)) | set(grams(reference, n)))
            c, r = np.zeros(len(everything)), np.zeros(len(everything))
            for i, gram in enumerate(everything):
                df = sum(any(gram in grams(caption, n) for caption in image) for image in corpus)
                idf = math.log(len(corpus)) - math.log(max(1.0, df))
                c[i], r[i] = grams(candidate, n).count(gram) * idf, grams(reference, n).count(gram) * idf
            if not c.any() or not r.any():
                continue
            cosine = float((np.minimum(c, r) * r).sum() / np.sqrt((c**2).sum() * (r**2).sum()))
            difference = len(grams(candidate, 2)) - len(grams(reference, 2))
            total += cosine * math.exp(-(difference**2) / 72) / 4
    return 10 * total / len(references)


caption = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=7)
unknown = st.lists(st.sampled_from(["a", "b", "x", "y"]), max_size=9)


@settings(max_examples=60, deadline=None)
@given(
    corpus=st.lists(st.lists(caption, min_size=1, max_size=3), min_size=1, max_size=5),
    other=st.lists(unknown, min_size=1, max_size=3),
    candidates=st.lists(unknown, min_size=1, max_size=4),
)
def test_equals_the_definition(
    corpus: list[list[list[str]]], other: list[list[str]], candidates: list[list[str]]
) -> None:
    """Images of the corpus and one outside it, unknown words, and empty captions."""
    references = {**{str(i): image for i, image in enumerate(corpus)}, "other": other}
    scorer = CiderD(DocumentFrequencies.count(corpus), references.__getitem__)
    for image_id in ("0", "other", "0"):
        expected = [slow(c, references[image_id], corpus) for c in candidates]
        np.testing.assert_allclose(scorer.score(image_id, candidates), expected, rtol=1e-9, atol=1e-12)


def test_equals_pycocoevalcap_and_the_recorded_numbers() -> None:
    """coco-caption's CIDEr takes document frequencies from the references, so the corpus is the references."""
    from pycocoevalcap.cider.cider import Cider

    golden = json.loads(GOLDEN.read_text())
    references = {i: [c.split() for c in captions] for i, captions in golden["gts_tok"].items()}
    scorer = CiderD(DocumentFrequencies.count(references.values()), references.__getitem__)
    own = [float(scorer.score(i, [golden["res_tok"][i][0].split()])[0]) for i in references]
    np.testing.assert_allclose(own, golden["CIDEr_per_image"], rtol=1e-9)

    changed = {i: [" ".join([*captions[1].split()[::-1], "zebra"])] for i, captions in golden["gts_tok"].items()}
    _, theirs = Cider().compute_score(golden["gts_tok"], changed)
    own = [float(scorer.score(i, [changed[i][0].split()])[0]) for i in references]
    np.testing.assert_allclose(own, theirs, rtol=1e-9)


def test_score_does_not_depend_on_earlier_scores() -> None:
    rng = np.random.default_rng(0)
    words = [f"w{i}" for i in range(30)]
    references = {
        str(i): [list(rng.choice(words, rng.integers(3, 12))) for _ in range(5)] for i in range(40)
    }  # the last ten are outside the corpus
    frequencies = DocumentFrequencies.count(list(references.values())[:30])
    candidates = [list(rng.choice([*words, "new"], 10)) for _ in range(6)]
    forwards, backwards = (CiderD(frequencies, references.__getitem__) for _ in range(2))
    first = {i: forwards.score(i, candidates) for i in references}
    for i in reversed(references):
        assert [float(backwards.score(i, [c])[0]) for c in candidates] == first[i].tolist()


def test_mean_over_images_equals_the_mean_of_scores() -> None:
    corpus = {"one": [["a", "b", "c"], ["a", "b"]], "two": [["c", "d"]], "three": [["d", "x", "y"]]}
    frequencies = DocumentFrequencies.count(list(corpus.values())[:2])
    candidates = [["a", "b", "new"], ["d", "x", "y"], []]
    apart = [CiderD(frequencies, corpus.__getitem__).score(image, candidates) for image in corpus]
    together = CiderD(frequencies, corpus.__getitem__).mean_score(list(corpus), candidates)
    np.testing.assert_allclose(together, np.mean(apart, axis=0), rtol=1e-12)
    assert together[:2].all() and together[2] == 0


def test_saved_frequencies_are_equal_in_bytes_and_content(tmp_path: Path) -> None:
    corpus = [[["a", "b", "a", "b", "c"], ["a"]], [["b", "c", "é"]], [[]]]
    frequencies = DocumentFrequencies.count(corpus)
    assert frequencies.images == 3
    for name in ("one", "two"):
        DocumentFrequencies.count(corpus).save(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    loaded = DocumentFrequencies.load(tmp_path / "one")
    assert (loaded.images, loaded.words, loaded.counts) == (frequencies.images, frequencies.words, frequencies.counts)
    (tmp_path / "two").write_bytes(b"x")
    for name in ("two", "absent"):
        with pytest.raises(DataError, match=name):
            DocumentFrequencies.load(tmp_path / name)


def test_image_without_references_is_an_error() -> None:
    scorer = CiderD(DocumentFrequencies.count([[["a"]]]), lambda image_id: {"here": [["a"]]}.get(image_id, []))
    for image_id in ("bare", "absent"):
        with pytest.raises(DataError, match=image_id):
            scorer.score(image_id, [["a"]])
    assert scorer.score("here", [["a"]]) == [0.0], "one image: each n-gram occurs in all images, log 1 = 0"
