"""METEOR equals the original program's: the score of a corpus, of each caption, and of resampled captions."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest
from pycocoevalcap.meteor.meteor import Meteor as OriginalMeteor

from vlp_models.metrics.bootstrap import interval
from vlp_models.metrics.caption import CaptionSet, score_caption_sets
from vlp_models.metrics.coco_tools import Meteor, tokenize
from vlp_models.metrics.score import Evidence, Score, meteor_from_statistics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("java"), reason="java not found"),
    pytest.mark.usefixtures("few_items_suffice"),
]
WORDS = ["a", "the", "dog", "dogs", "cat", "runs", "running", "big", "large", "on", "in", "red", "ball", "and"]
ODD = [  # caption, references
    ("A dog runs.", ["a dog runs"]),
    ("dog", ["dog"]),
    ("dog", ["cat"]),
    ("the", ["the"]),
    ("...", ["a dog"]),  # no tokens
    ("a dog", ["?!"]),
    ("...", ["..."]),
    ("& / #tag", ["& / #tag"]),
    ("dog dog dog", ["dog dog dog"]),
    ("a a a", ["a a"]),
    ("a big dog", ["a large dog"]),  # a synonym: all words match in one chunk
    ("dogs running", ["dog runs"]),
    ("ran quickly", ["in a hurry ran", "ran in a hurry"]),  # a paraphrase
    ("runs dog a", ["a dog runs"]),  # all words match, in three chunks
    ("a dog", ["a dog runs", "a dog", "the dog"]),
]


def random_caption(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 9)))


def caption_sets() -> dict[str, CaptionSet]:
    """Return sets of which all captions, every third and no caption equal a reference, and one of odd captions."""
    rng = random.Random(0)
    sets = {}
    for name, step in {"identical": 1, "partly identical": 3, "different": 1000}.items():
        references = {str(i): [random_caption(rng) for _ in range(rng.randint(1, 5))] for i in range(60)}
        candidates = {
            image_id: rng.choice(texts) if int(image_id) % step == step - 1 else random_caption(rng)
            for image_id, texts in references.items()
        }
        sets[name] = CaptionSet(candidates=candidates, references=references)
    sets["odd"] = CaptionSet(
        candidates={str(i): caption for i, (caption, _) in enumerate(ODD)},
        references={str(i): references for i, (_, references) in enumerate(ODD)},
    )
    return sets


@pytest.fixture(scope="module")
def original() -> Iterator[OriginalMeteor]:
    meteor = OriginalMeteor()
    yield meteor
    meteor.meteor_p.kill()
    meteor.meteor_p.wait()


@pytest.fixture(scope="module")
def scores() -> dict[str, Score]:
    scored = score_caption_sets(caption_sets())
    return {name: next(score for score in own if score.metric == "METEOR") for name, own in scored.items()}


def original_scores(
    original: OriginalMeteor, caption_set: CaptionSet, ids: Sequence[str]
) -> tuple[float, Sequence[float]]:
    """Return the program's score of a corpus of these images, which may repeat, and of each of them; in percent."""
    texts = [*caption_set.candidates.values(), *(text for own in caption_set.references.values() for text in own)]
    tokens: Mapping[str, str] = tokenize(texts)[0]
    corpus, each = original.compute_score(
        {n: [tokens[text] for text in caption_set.references[i]] for n, i in enumerate(ids)},
        {n: [tokens[caption_set.candidates[i]]] for n, i in enumerate(ids)},
    )
    return 100 * corpus, [100 * value for value in each]


def evidence_of(score: Score) -> Evidence:
    assert score.evidence is not None
    return score.evidence


@pytest.mark.parametrize("name", caption_sets())
def test_scores_of_corpus_and_captions_equal_the_original(
    scores: dict[str, Score], original: OriginalMeteor, name: str
) -> None:
    caption_set = caption_sets()[name]
    corpus, each = original_scores(original, caption_set, list(caption_set.candidates))
    assert scores[name].value == pytest.approx(corpus, abs=1e-9)
    assert meteor_from_statistics(evidence_of(scores[name]).parts_NK) == pytest.approx(each, abs=1e-9)


@pytest.mark.parametrize("name", ["partly identical", "odd"])
def test_resampled_scores_equal_the_original(scores: dict[str, Score], original: OriginalMeteor, name: str) -> None:
    caption_set, parts_NK = caption_sets()[name], evidence_of(scores[name]).parts_NK
    ids, rng = list(caption_set.candidates), np.random.default_rng(0)
    for size in (1, 2, 5, *[len(ids)] * 5):
        rows = rng.integers(len(ids), size=size)
        corpus, _ = original_scores(original, caption_set, [ids[i] for i in rows])
        resampled = meteor_from_statistics(parts_NK[rows].sum(axis=0, keepdims=True))
        assert resampled[0] == pytest.approx(corpus, abs=1e-9), rows


def test_identical_captions_score_100(scores: dict[str, Score]) -> None:
    assert scores["identical"].value == pytest.approx(100, abs=1e-9)
    assert interval(evidence_of(scores["identical"]), resamples=200, seed=0) == pytest.approx((100, 100), abs=1e-9)


def test_field_separator_in_a_text(original: OriginalMeteor) -> None:
    """Both tokenizers keep `|||` in addresses only, which are one token."""
    with Meteor() as meteor:
        candidate, reference = "see http://a|||b here", "see http://ab now"
        statistics = meteor.statistics(candidate, [reference])
        assert statistics == [float(value) for value in original._stat(candidate, [reference]).split()]
        assert meteor.statistics("a b", ["a b ||| c d"]) == meteor.statistics("a b", ["a b c d"])
