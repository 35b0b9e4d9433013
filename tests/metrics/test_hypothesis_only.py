"""Naive Bayes over a hypothesis' words: by hand, and on words that give a label away."""

from __future__ import annotations

import math

from vlp_models.metrics.classification import HypothesisOnly

TRAIN = [
    ("nobody is here", "contradiction"),
    ("the man sleeps", "contradiction"),
    ("a man outside", "entailment"),
    ("a man outside", "entailment"),
    ("tall man", "neutral"),
]


def test_words_that_give_a_label_away_are_found() -> None:
    guess = HypothesisOnly(TRAIN)
    assert [guess.predict(text) for text in ("Nobody!", "outside, a dog", "tall man")] == [
        "contradiction",
        "entailment",
        "neutral",
    ]
    assert guess.predict("words never seen") == "contradiction", "the commonest label, the first of equals"
    assert HypothesisOnly([]).predict("a man") == ""


def test_the_arithmetic_is_that_of_the_definition() -> None:
    """P(label) times P(feature | label) of each feature, with one added to every count."""
    guess = HypothesisOnly(TRAIN)
    distinct = {"nobody", "is", "here", "the", "man", "sleeps", "a", "outside", "tall"}
    distinct |= {"nobody is", "is here", "the man", "man sleeps", "a man", "man outside", "tall man"}
    totals = {"contradiction": 10, "entailment": 10, "neutral": 3}  # words and pairs, a hypothesis at a time
    for label, prior, man, tall in (("contradiction", 2, 1, 0), ("entailment", 2, 2, 0), ("neutral", 1, 1, 1)):
        total = totals[label] + len(distinct)
        expected = math.log(prior) + sum(math.log((count + 1) / total) for count in (man, tall, tall))
        assert math.isclose(guess._score("tall man", label), expected)
