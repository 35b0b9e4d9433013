"""VQA scores: the official accuracy (Antol et al., 2015), WUPS, and baselines that do not look at the image.

Accuracy: for each annotator left out, min(1, agreeing others / 3), averaged.

A question with one right answer (DAQUAR) is scored as by the program of Malinowski and Fritz (2014), to which an
answer is the set of its parts between commas: their order and repeats do not count. Accuracy (the program's threshold
-1) is the share of equal sets. WUPS (equation 12) gives credit for similar words, by Wu and Palmer's similarity: the
highest over the two words' nouns in WordNet; below the threshold it counts a tenth. WordNet comes with nltk and needs a
separate download, so neither is a dependency: without them WUPS is `not computed`.
"""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from vlp_models.data.answers import is_exact, normalize_answer
from vlp_models.errors import DataError
from vlp_models.metrics.score import Score, mean_score, not_computed


@dataclass(frozen=True, kw_only=True)
class AnsweredQuestion:
    """A question with its annotators' answers (ten; fewer are averaged alike), or with its one right answer."""

    question_id: str
    image_id: str
    text: str
    question_type: str
    answer_type: str
    answers: Sequence[str]


def question_accuracy(prediction: str, answers: Sequence[str]) -> float:
    """Return the accuracy of one prediction: 0, .3, .6, .9 or 1 with ten annotators.

    As in the official code, both sides are normalized only if the annotators differ: if all ten answered `yes`, then
    `Yes` scores 0. A single right answer (DAQUAR) scores 1 if its set of words is predicted, else 0.
    """
    if not answers:
        raise ValueError("no answers: this question cannot be scored")
    if is_exact(answers):
        return float(set(_split_words(prediction)) == set(_split_words(answers[0])))
    prediction, true_answers = _trim(prediction), [_trim(answer) for answer in answers]
    if len(set(true_answers)) > 1:
        prediction, true_answers = normalize_answer(prediction), [normalize_answer(answer) for answer in true_answers]
    agreeing = sum(answer == prediction for answer in true_answers)
    # Without each annotator in turn
    agreeing_others = [agreeing - (answer == prediction) for answer in true_answers]
    return sum(min(1.0, count / 3) for count in agreeing_others) / len(true_answers)


def score_vqa(predictions: dict[str, str], questions: Sequence[AnsweredQuestion]) -> list[Score]:
    """Return the accuracy overall, per answer type and per question type, without questions with hidden answers.

    Raises:
        DataError: a question has no prediction.
    """
    scored = [question for question in questions if question.answers]
    missing = [question.question_id for question in scored if question.question_id not in predictions]
    if missing:
        raise DataError(f"{len(missing)} of {len(scored)} questions have no prediction, such as {missing[0]}")
    values = [question_accuracy(predictions[q.question_id], q.answers) for q in scored]
    images = [question.image_id for question in scored]
    scores = [mean_score("accuracy", values, images, items=[question.question_id for question in scored])]
    for label, key in (("", "answer_type"), ("question type ", "question_type")):
        kinds = [getattr(question, key) for question in scored]
        for kind in sorted(set(kinds) - {""}):
            numbers = [i for i, question_kind in enumerate(kinds) if question_kind == kind]
            kind_values, kind_images = [values[i] for i in numbers], [images[i] for i in numbers]
            # Not kept: gates read the types as slices of the overall accuracy.
            scores.append(mean_score(f"accuracy ({label}{kind})", kind_values, kind_images, kept=False))
    return scores


PRIORS = ("majority answer", "per question type", "per question text")


def prior_predictions(
    train: Iterable[AnsweredQuestion], questions: Sequence[AnsweredQuestion]
) -> dict[str, dict[str, str]]:
    """Answer questions without the image, from the training answers: baseline name -> question id -> answer.

    `majority answer`, the most common answer; `per question type`; `per question text`. Types and texts that train
    does not have fall back on the previous baseline.
    """
    overall: Counter[str] = Counter()
    by_type: dict[str, Counter[str]] = {}
    by_text: dict[str, Counter[str]] = {}
    for question in train:
        overall.update(question.answers)
        by_type.setdefault(question.question_type, Counter()).update(question.answers)
        by_text.setdefault(question.text.lower(), Counter()).update(question.answers)
    if not overall:
        return {}
    majority = _most_common(overall)
    # Where a type or text is unknown, the next broader baseline answers.
    types = {key: _most_common(counts) for key, counts in by_type.items() if counts}
    texts = {key: _most_common(counts) for key, counts in by_text.items() if counts}
    per_type = {q.question_id: types.get(q.question_type, majority) for q in questions}
    overall_answers = {q.question_id: majority for q in questions}
    per_text = {q.question_id: texts.get(q.text.lower(), per_type[q.question_id]) for q in questions}
    return dict(zip(PRIORS, (overall_answers, per_type, per_text), strict=True))


def _most_common(counts: Counter[str]) -> str:
    """Return the most common answer, the first by text among equals, so that the order of rows does not matter."""
    return min(counts, key=lambda answer: (-counts[answer], answer))


def _trim(text: str) -> str:
    return text.replace("\n", " ").replace("\t", " ").strip()


THRESHOLDS = (0.9, 0.0)
BELOW = 0.1  # the factor of a similarity below the threshold
WORDNET_MISSING = "needs nltk and its WordNet: pip install nltk && python -m nltk.downloader wordnet"

Similarity = Callable[[str, str], float]  # of two words, 0 to 1


def score_wups(
    predictions: Sequence[str], answers: Sequence[str], items: Sequence[str], images: Sequence[str]
) -> list[Score]:
    """Return `WUPS@0.9` and `WUPS@0.0`.

    predictions, answers: of each question; several words are separated by commas.
    """
    similarity = wordnet_similarity()
    names = [f"WUPS@{threshold}" for threshold in THRESHOLDS]
    if similarity is None:
        return [not_computed(name, len(answers), WORDNET_MISSING) for name in names]
    scores = []
    for name, threshold in zip(names, THRESHOLDS, strict=True):
        values = [wups(p, a, threshold, similarity) for p, a in zip(predictions, answers, strict=True)]
        scores.append(mean_score(name, values, images, items=items, kept=False))
    return scores


def wups(prediction: str, answer: str, threshold: float, similarity: Similarity) -> float:
    """Return the WUPS of one question, 0 to 1: the smaller of recall and precision of its words."""
    predicted, right = _split_words(prediction), _split_words(answer)

    def match(word: str, other_word: str) -> float:
        value = 1.0 if word == other_word else similarity(word, other_word)
        return value if value >= threshold else BELOW * value

    # The similarity of a word is that of its best partner on the other side.
    recall = math.prod(max(match(word, other_word) for other_word in predicted) for word in right)
    precision = math.prod(max(match(word, other_word) for other_word in right) for word in predicted)
    return min(recall, precision)


def wordnet_similarity() -> Similarity | None:
    """Return Wu and Palmer's similarity, the highest over two words' nouns; None without nltk or its WordNet."""
    try:
        wordnet = importlib.import_module("nltk.corpus").wordnet
        wordnet.synsets("table")
    except (ImportError, LookupError):
        return None

    @lru_cache(maxsize=100_000)
    def similarity(word: str, other_word: str) -> float:
        nouns, other_nouns = (wordnet.synsets(text, pos=wordnet.NOUN) for text in (word, other_word))
        pairs = ((a, b) for a in nouns for b in other_nouns)
        return max((a.wup_similarity(b) or 0.0 for a, b in pairs), default=0.0)

    return similarity


def _split_words(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]
