"""Caption scores equal those of pycocoevalcap's programs, from the text on: of a caption, a corpus, and resamples."""

from __future__ import annotations

import itertools
import random
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from pycocoevalcap.bleu.bleu import Bleu
from pycocoevalcap.cider.cider import Cider
from pycocoevalcap.meteor.meteor import Meteor
from pycocoevalcap.rouge.rouge import Rouge
from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

from vlp_models.metrics import caption
from vlp_models.metrics.bootstrap import interval
from vlp_models.metrics.caption import CaptionSet, score_caption_sets
from vlp_models.metrics.cider_d import CiderD, DocumentFrequencies
from vlp_models.metrics.coco_tools import tokenize
from vlp_models.metrics.score import Evidence, FloatArray, Score

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("java"), reason="java not found"),
    pytest.mark.usefixtures("few_items_suffice"),
]
BLEU = [f"BLEU-{n}" for n in range(1, 5)]
WORDS = ["a", "the", "dog", "dogs", "cat", "runs", "running", "big", "large", "on", "in", "red", "ball", "and"]
PIECES = r"""
, . ! ? ; : - -- ... .. ?! ' '' `` " "" ( ) [x] {y} <b> <unk> & &amp; / # * _a_ | ||| |||| a|||b http://a|||b a@b.com
www.x.org @user #1 $20 £3 50% 3.5 10,000 1/2 ½ 1½ 5° x² 555-1234 3:30 12:30pm 1970s '90s 2nd U.S. p.m. e.g. Dr. no.5 B.
can't cannot don't it’s woman's dogs' o'clock gonna 'n' “x” ‘y’ « » – — … • ™ café naïve ß ñ я собака עברית -LRB- EVAL
""".split()  # noqa: SIM905
PIECES += ["1 1/2", "(555) 123-4567", "\n", "\t", "a\u00a0b", "a \n b"]
ODD = [  # caption, references
    ("A dog runs.", ["a dog runs"]),
    ("dog", ["dog"]),
    ("dog", ["cat"]),
    ("the", ["the"]),
    ("", ["a dog"]),
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
    ("1 1/2 cups", ["1 1/2 cups", "1 cup"]),  # U+00A0 within a token
    ("call (555) 123-4567", ["call (555) 123-4567 now"]),
    ("plan B.", ["plan B.", "The plan B"]),
    (" ".join(f"word{i}" for i in range(200)), [" ".join(f"word{i}" for i in range(1, 190))]),
]


def random_caption(rng: random.Random, words: Sequence[str] = WORDS) -> str:
    return " ".join(rng.choices(words, k=rng.randint(1, 9)))


def odd_caption(rng: random.Random) -> str:
    mixed = [random_caption(rng, WORDS * 4 + PIECES) for _ in range(5)]
    repeated = " ".join([rng.choice(WORDS)] * 5)
    return rng.choice([*mixed, repeated, random_caption(rng, PIECES[:16]), rng.choice(PIECES), rng.choice(WORDS), ""])


def caption_sets() -> dict[str, CaptionSet]:
    """Return sets of which all captions, every third and no caption equal a reference; odd captions; and one image."""
    rng = random.Random(0)
    sets = {}
    for name, (step, draw) in {
        "identical": (1, random_caption),
        "partly identical": (3, random_caption),
        "different": (1000, random_caption),
        "random odd": (4, odd_caption),
    }.items():
        references = {str(i): [draw(rng) for _ in range(rng.randint(1, 5))] for i in range(60)}
        candidates = {
            image_id: rng.choice(texts) if int(image_id) % step == step - 1 else draw(rng)
            for image_id, texts in references.items()
        }
        sets[name] = CaptionSet(candidates=candidates, references=references)
    sets["odd"] = CaptionSet(
        candidates={str(i): candidate for i, (candidate, _) in enumerate(ODD)},
        references={str(i): references for i, (_, references) in enumerate(ODD)},
    )
    sets["one image"] = CaptionSet(candidates={"0": "a dog runs"}, references={"0": ["a dog runs", "the dog"]})
    return sets


class SharedProgram(Meteor):
    """pycocoevalcap's METEOR with the program that all tests share: another one takes seconds to start."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.meteor_p, self.lock = process, threading.Lock()

    def __del__(self) -> None:
        """Leave the program running."""


@dataclass
class Official:
    """The programs, and their tokens of each text."""

    meteor: Meteor
    tokens: Mapping[str, str]

    def score(self, caption_set: CaptionSet, ids: Sequence[str]) -> dict[str, tuple[float, FloatArray]]:
        """Return metric -> score of a corpus of these images, which may repeat, and of each image; in percent."""
        references = {i: [self.tokens[text] for text in caption_set.references[name]] for i, name in enumerate(ids)}
        candidates = {i: [self.tokens[caption_set.candidates[name]]] for i, name in enumerate(ids)}
        bleu, bleu_each = Bleu(4).compute_score(references, candidates, verbose=0)
        scores = dict(zip(BLEU, zip(bleu, bleu_each, strict=True), strict=True))
        for name, scorer in (("METEOR", self.meteor), ("ROUGE-L", Rouge()), ("CIDEr", Cider())):
            scores[name] = scorer.compute_score(references, candidates)
        return {name: (100 * corpus, 100 * np.array(each)) for name, (corpus, each) in scores.items()}


@pytest.fixture(scope="module")
def official() -> Iterator[Official]:
    texts = []
    for caption_set in caption_sets().values():
        texts += [*caption_set.candidates.values(), *itertools.chain(*caption_set.references.values())]
    # Its tokens of a line depend on how the next line starts; ours are those before a lower-case word.
    tokens = PTBTokenizer().tokenize({text: [{"caption": text}, {"caption": "a"}] for text in texts})
    with caption._meteor_process(None) as meteor:
        assert not isinstance(meteor, str)
        meteor_program = SharedProgram(meteor._process)
        yield Official(meteor=meteor_program, tokens={text: captions[0] for text, captions in tokens.items()})


@pytest.fixture(scope="module")
def scores() -> dict[str, dict[str, Score]]:
    return {name: {s.metric: s for s in own} for name, own in score_caption_sets(caption_sets()).items()}


def evidence_of(score: Score) -> Evidence:
    assert score.evidence is not None
    return score.evidence


def test_tokens_equal_the_official_ones_whatever_the_other_captions_are(official: Official) -> None:
    tokens, note = tokenize(list(official.tokens))
    assert tokens == official.tokens and note == ""
    for other in ("Zebras run", "zebras run"):
        assert tokenize(["Plan B.", other])[0]["Plan B."] == "plan b."


@pytest.mark.parametrize("name", caption_sets())
def test_scores_of_corpus_and_captions_equal_the_official_ones(
    scores: dict[str, dict[str, Score]], official: Official, name: str
) -> None:
    caption_set = caption_sets()[name]
    for metric, (corpus, each) in official.score(caption_set, list(caption_set.candidates)).items():
        score = scores[name][metric]
        assert score.value == pytest.approx(corpus, abs=1e-9), metric
        evidence = evidence_of(score)
        assert evidence.statistic(evidence.parts_NK) == pytest.approx(each, abs=1e-9), metric
        assert evidence.statistic(evidence.parts_NK.sum(0, keepdims=True)) == pytest.approx(corpus, abs=1e-9), metric


def test_reward_equals_the_official_cider(official: Official) -> None:
    """Self-critical training's CIDEr-D is CIDEr, if it counts the n-grams of the same references."""
    caption_set = caption_sets()["random odd"]
    _, each = official.score(caption_set, list(caption_set.candidates))["CIDEr"]
    words = {i: [official.tokens[text].split() for text in texts] for i, texts in caption_set.references.items()}
    reward = CiderD(DocumentFrequencies.count(words.values()), words.__getitem__)
    scores = [reward.score(i, [official.tokens[text].split()])[0] for i, text in caption_set.candidates.items()]
    assert 100 * np.array(scores) == pytest.approx(each, abs=1e-9)


@pytest.mark.parametrize("name", ["partly identical", "random odd", "odd"])
def test_resampled_scores_equal_the_official_ones(
    scores: dict[str, dict[str, Score]], official: Official, name: str
) -> None:
    """CIDEr keeps the document frequencies of the whole test set, so its resamples are means of its scores there."""
    caption_set = caption_sets()[name]
    ids, rng = list(caption_set.candidates), np.random.default_rng(0)
    _, cider_each = official.score(caption_set, ids)["CIDEr"]
    for size in (1, 2, 5, *[len(ids)] * 5):
        rows = rng.integers(len(ids), size=size)
        drawn = official.score(caption_set, [ids[i] for i in rows])
        expected = {metric: corpus for metric, (corpus, _) in drawn.items()}
        expected["CIDEr"] = float(np.mean(cider_each[rows]))
        for metric, corpus in expected.items():
            evidence = evidence_of(scores[name][metric])
            resampled = evidence.statistic(evidence.parts_NK[rows].sum(axis=0, keepdims=True))
            assert resampled[0] == pytest.approx(corpus, abs=1e-9), (metric, rows)


def test_identical_captions_score_100_meteor(scores: dict[str, dict[str, Score]]) -> None:
    score = scores["identical"]["METEOR"]
    assert score.value == pytest.approx(100, abs=1e-9)
    assert interval(evidence_of(score), resamples=200, seed=0) == pytest.approx((100, 100), abs=1e-9)


def test_field_separator_in_a_text(official: Official) -> None:
    """Only the Python tokenizer keeps `|||`, in addresses. The program reads a reference with it as two references."""
    with caption._meteor_process(None) as meteor:
        assert not isinstance(meteor, str)
        for candidate, reference in [
            ("see http://a|||b here", "see http://ab now"),
            ("a cat", "a dog ||| a cat runs"),
            ("|||", "a"),
            ("a", "x|||||||y"),
        ]:
            expected = [float(value) for value in official.meteor._stat(candidate, [reference]).split()]
            assert meteor.statistics(candidate, [reference]) == expected


def test_references_without_a_word_score_zero_cider() -> None:
    """The official program fails, because there is no n-gram to count."""
    captions = CaptionSet(candidates={"1": "a dog", "2": "..."}, references={"1": ["..."], "2": ["", "?!"]})
    scores = {s.metric: s for s in score_caption_sets({"": captions})[""]}
    assert [scores[metric].value for metric in ("CIDEr", "METEOR", "BLEU-1")] == pytest.approx([0, 0, 0], abs=1e-9)
