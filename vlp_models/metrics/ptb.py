"""Caption tokenisation: Stanford's Penn Treebank tokenizer, or a Python stand-in where there is no Java.

The stand-in's rules are those that captions need. It gives all 28 probes of tests/golden/golden_caption_metrics.json
exactly; tests/metrics/test_ptb.py states how often it agrees with Java on other text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from vlp_models.errors import DataError, MissingToolError
from vlp_models.metrics.java import ptb_lines

# Dropped after tokenisation, as coco-caption does. Lower-casing comes first there, so brackets (`-lrb-`) stay.
DROPPED = frozenset(
    ["''", "'", "``", "`", "-LRB-", "-RRB-", "-LCB-", "-RCB-", ".", "?", "!", ",", ":", "-", "--", "...", ";"]
)

_TITLES = (
    "mr|mrs|ms|dr|st|jr|sr|co|inc|ltd|corp|vs|etc|ave|blvd|rd|mt|ft|prof|gen|rep|sen|gov|rev|no|"
    "jan|feb|mar|apr|jun|jul|aug|sept|sep|oct|nov|dec"
)
_BRACKETS = {"(": "-lrb-", ")": "-rrb-", "[": "-lsb-", "]": "-rsb-", "{": "-lcb-", "}": "-rcb-"}
_SPLIT_WORDS = {
    "cannot": "can not", "gonna": "gon na", "gotta": "got ta", "wanna": "wan na", "lemme": "lem me", "gimme": "gim me",
    "'tis": "'t is", "'twas": "'t was", "d'ye": "d' ye",
}  # fmt: skip
_TOKEN = re.compile(
    rf"""
      https?://[^\s"<>]+ | www\.[^\s"<>]+
    | [\w.+-]+@[\w-]+(?:\.[\w-]+)+                                  # mail address
    | [#@][^\W\d_]\w*                                               # tag, user
    | (?:cannot|gonna|gotta|wanna|lemme|gimme|'tis|'twas|d'ye)\b
    | 'n' | '(?:n|em|til|cause|\d\ds)(?![\w'])
    | \w+?(?=n't\b) | n't\b                                         # is n't
    | '(?:s|re|ve|ll|d|m)\b
    | y'(?=all\b)
    | (?:[^\W\d_]\.){{2,}}                                            # u.s.
    | (?:{_TITLES})\.(?=\s|$) | no\.(?=\d)                                 # mr.
    | o'[^\W\d_]+ | c\+\+ | c\#
    | \d+(?:[.,:/-]\d+)+ | [.,]\d+
    | \w+(?:[-.&/_]\w+)*
    | \.{{2,}} | -{{2,}} | `` | ''
    | \S
    """,
    re.VERBOSE,
)


def tokenize(texts: Sequence[str]) -> tuple[dict[str, str], str]:
    """Each text -> its tokens joined by spaces, and a note: empty, or that the stand-in was used and why.

    Raises:
        DataError: a text with a letter or digit came out empty; a score of it would be a silent zero.
    """
    unique = sorted(set(texts))
    try:
        lines, note = [_without_punctuation(line.split()) for line in ptb_lines(unique)], ""
    except MissingToolError as error:
        lines, note = [ptb_like(text) for text in unique], f"ptb-like tokenizer ({error})"
    for text, line in zip(unique, lines, strict=True):
        if not line and any(character.isalnum() for character in text):
            raise DataError(f"the caption {text[:80]!r} came out of the tokenizer empty")
    return dict(zip(unique, lines, strict=True)), note


def ptb_like(text: str) -> str:
    """Tokens of one caption as Stanford's tokenizer gives them for ordinary English, joined by spaces."""
    text = text.lower().translate(_PLAIN)
    tokens: list[str] = []
    for token in _TOKEN.findall(text):
        tokens.extend(_SPLIT_WORDS[token].split() if token in _SPLIT_WORDS else [_BRACKETS.get(token, token)])
    return _without_punctuation(tokens)


_PLAIN = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "--", "—": "--", "…": "..."})


def _without_punctuation(tokens: Sequence[str]) -> str:
    return " ".join(token for token in tokens if token not in DROPPED and token != '"')
