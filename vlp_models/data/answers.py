"""VQA answers: the official normalization, the answer vocabulary, and soft labels.

The normalization reproduces the evaluation code of the VQA challenge (Antol et al., 2015) exactly, including its bugs:
scores are comparable only if all of them are kept.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

# Official average over leave-one-out subsets of ten annotators, by the number of them that gave the answer.
SOFT_SCORES = (0.0, 0.3, 0.6, 0.9, 1.0)

_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
# ASCII digits only: the official code runs without re.UNICODE
_COMMA_IN_NUMBER = re.compile(r"\d,\d", re.ASCII)
# Intended: "keep a period between digits"; the typo in the lookbehind makes it "keep a period before a digit".
_PERIOD = re.compile(r"(?!<=\d)(\.)(?!\d)", re.ASCII)
_PERIOD_COUNT = 32  # value of re.UNICODE, passed as the number of replacements
_NUMBERS = {
    word: str(number)
    for number, word in enumerate(
        ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    )
} | {"none": "0"}
_ARTICLES = frozenset({"a", "an", "the"})
_CONTRACTED = """
ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've he's
how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've needn't not've o'clock
oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's someone'd
someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've there're there's
they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've when's
where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't wouldn't've
y'all y'all'll y'all'd've you'd you'd've you'll you're you've
"""


# Each known misspelling lacks one apostrophe; one official entry is reversed.
_CONTRACTIONS = {"somebody'd": "somebodyd"}
for _word in _CONTRACTED.split():
    for _i, _character in enumerate(_word):
        if _character == "'":
            _CONTRACTIONS[_word[:_i] + _word[_i + 1 :]] = _word


def normalize_answer(text: str) -> str:
    """Return the officially normalized answer: punctuation, then numbers, articles and contractions, in lower case.

    The official accuracy normalizes both sides only if the ten answers differ; the metric decides that.
    """
    # a mark next to a space anywhere, or of a text with a comma between two digits, is deleted; others become a space
    without_marks = text
    comma_in_number = _COMMA_IN_NUMBER.search(text) is not None
    for mark in _PUNCTUATION:
        # the official code looks in the original text, not in what is left of it
        is_deleted = f"{mark} " in text or f" {mark}" in text or comma_in_number
        without_marks = without_marks.replace(mark, "" if is_deleted else " ")
    without_periods = _PERIOD.sub("", without_marks, count=_PERIOD_COUNT)
    words = (_NUMBERS.get(word, word) for word in without_periods.lower().split())
    return " ".join(_CONTRACTIONS.get(word, word) for word in words if word not in _ARTICLES)


def is_exact(answers: Sequence[str]) -> bool:
    """Return whether a question has one right answer (DAQUAR), not several annotators' answers."""
    return len(answers) == 1


def most_frequent(answers: Sequence[str]) -> str:
    """Return VQA's multiple-choice answer: the most frequent of the annotators' answers, the first one among equals."""
    return Counter(answers).most_common(1)[0][0]


def build_answer_vocabulary(questions: Iterable[Sequence[str]], min_count: int) -> list[str]:
    """Return the answers a classifier chooses from, most frequent first, ties by text.

    The rule of Teney et al. (2018), as in ViLT and VLMo: the multiple-choice answer, normalized, commas deleted. The
    one right answer of a question (`is_exact`) is used unchanged.

    Args:
        questions: the annotators' answers, one sequence per question; empty ones (hidden answers) are skipped.
        min_count: minimum number of questions with an answer (VQA v2: 9, which gives 3,129 answers).
    """
    counts: Counter[str] = Counter()
    for answers in questions:
        if answers:
            frequent_answer = normalize_answer(most_frequent(answers)).replace(",", "")
            counts[answers[0] if is_exact(answers) else frequent_answer] += 1
    frequent = [answer for answer, n in counts.items() if n >= min_count]
    return sorted(frequent, key=lambda answer: (-counts[answer], answer))


def soft_scores(answers: Sequence[str], vocabulary: Mapping[str, int]) -> dict[int, float]:
    """Return the soft label of a question: answer index -> score, 0.3, 0.6, 0.9, 1 for 1, 2, 3, 4 or more annotators.

    The one right answer of a question (`is_exact`) scores 1. Counts the annotators' strings unchanged, as the published
    recipe does.

    Args:
        vocabulary: answer -> index.
    """
    if is_exact(answers):
        return {vocabulary[answer]: 1.0 for answer in answers if answer in vocabulary}
    # Answer -> how many annotators gave it.
    counts = Counter(answers)
    return {
        vocabulary[answer]: SOFT_SCORES[min(n, len(SOFT_SCORES) - 1)]
        for answer, n in counts.items()
        if answer in vocabulary
    }
