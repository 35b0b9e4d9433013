"""Sentences that are tested on and were there to learn from: the same words, or all but one of them.

Case, punctuation and spaces don't count. Two sentences are one word apart if they are equal once one word of each is
left out, at most: a word exchanged, added or dropped. Both are known by hashes of what is left, so no sentence is
compared with another, and memory holds a hash for each word of the tested ones.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Literal

FEWEST = 4  # words, below which only equal sentences count: of "a red ball" little is left without a word
Likeness = Literal["equal", "one word apart"]
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]|\w+")


def likenesses(tested: Sequence[str], learnt: Iterable[str]) -> list[Likeness | None]:
    """Of each tested sentence, how the nearest of the learnt is like it; None: none is. The tested are held in memory,
    the learnt, which are many, pass by."""
    equal: dict[bytes, list[int]] = defaultdict(list)
    shortened: dict[bytes, list[int]] = defaultdict(list)
    long = [False] * len(tested)
    for number, text in enumerate(tested):
        words = words_of(text)
        if words:
            equal[_hash(words)].append(number)
            long[number] = len(words) >= FEWEST
            for part in set(_without_one(words)):
                shortened[part].append(number)
    found: list[Likeness | None] = [None] * len(tested)
    for text in learnt:
        words = words_of(text)
        whole = _hash(words)
        near = set(shortened.get(whole, ()))
        for part in _without_one(words):
            near.update(number for number in equal.get(part, ()) if long[number])
            near.update(shortened.get(part, ()))
        for number in near:
            found[number] = found[number] or "one word apart"
        for number in equal.get(whole, ()):
            found[number] = "equal"
    return found


def words_of(text: str) -> list[str]:
    """Without case and punctuation; a letter each of scripts that put no spaces between words."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def _without_one(words: list[str]) -> Iterator[bytes]:
    if len(words) >= FEWEST:
        for left_out in range(len(words)):
            yield _hash(words[:left_out] + words[left_out + 1 :])


def _hash(words: list[str]) -> bytes:
    return blake2b(" ".join(words).encode(), digest_size=8).digest()
