"""The English of the captions: one lexicon that annotators write from and the checker reads with.

Every phrase belongs to a part of speech (one letter, so that a sentence's parts are a string that a regular
expression can parse) and has a value, the canonical name of what it means.
"""

from __future__ import annotations

import string
from functools import lru_cache

import numpy as np

from vlp_models.synthetic.scenes.world import COLOURS, SHAPES

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")

# part of speech -> value -> phrases, the plainest first
LEXICON: dict[str, dict[str, tuple[str, ...]]] = {
    "D": {"a": ("a", "an")},
    "T": {"the": ("the", "all the")},
    "#": {word: (word,) for word in NUMBERS[1:]},
    "S": {"small": ("small", "little", "tiny"), "large": ("large", "big")},
    "X": {"solid": ("solid", "plain"), "striped": ("striped", "stripy"), "dotted": ("dotted", "spotted")},
    "W": {"striped": ("with stripes",), "dotted": ("with dots",)},
    "C": {colour: (colour,) for colour in COLOURS},
    "N": {
        "": ("shape", "shapes", "object", "objects"),
        "circle": ("circle", "circles", "disc", "discs"),
        **{shape: (shape, shape + "s") for shape in SHAPES[1:]},
    },
    "&": {"and": ("and",)},
    "R": {
        "left": ("left of", "to the left of"),
        "right": ("right of", "to the right of"),
        "above": ("above", "over", "higher than"),
        "below": ("below", "under", "lower than"),
    },
    "L": {
        "middle": ("in the middle", "in the centre", "near the middle"),
        "top": ("at the top", "near the top"),
        "bottom": ("at the bottom", "near the bottom"),
        "left": ("on the left", "on the left side"),
        "right": ("on the right", "on the right side"),
    },
    "B": {"be": ("is", "are", "sits", "lies")},
    "I": {  # what may stand before anything, and says nothing
        "one": ("there is", "here is"),
        "many": ("there are", "here are"),
        "any": ("i see", "you can see", "this picture shows", "the image shows", "a picture of", "a drawing of"),
    },
    "E": {"": ("in this picture", "in the picture", "in this image", "of the picture", "of the image")},
    "O": {"": ("and some other shapes", "among other shapes", "with other shapes around it", "and a few more shapes")},
    "M": {"in": ("in",)},
}
_PHRASES = {
    tuple(phrase.split()): (part, value)
    for part, values in LEXICON.items()
    for value, phrases in values.items()
    for phrase in phrases
}
_LONGEST = max(len(words) for words in _PHRASES)
VOCABULARY = frozenset(word for words in _PHRASES for word in words)


def words_of(caption: str) -> list[str]:
    """The caption's words, lower-case, without punctuation."""
    return caption.lower().translate(_NO_PUNCTUATION).split()


_NO_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation, " "))


@lru_cache(maxsize=65536)
def corrected(word: str) -> str | None:
    """The vocabulary's word that `word` is, or is one slip away from; None if there is none or several.

    A slip is a letter dropped, added or replaced, or two neighbours swapped.
    """
    if word in VOCABULARY:
        return word
    near = [known for known in VOCABULARY if abs(len(known) - len(word)) <= 1 and _one_slip(word, known)]
    return near[0] if len(near) == 1 else None


def _one_slip(a: str, b: str) -> bool:
    """Whether two different words are one slip apart (Damerau-Levenshtein distance 1)."""
    if len(a) > len(b):
        a, b = b, a
    start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
    if len(a) < len(b):
        return a[start:] == b[start + 1 :]
    swapped = a[start : start + 2] == b[start : start + 2][::-1] and a[start + 2 :] == b[start + 2 :]
    return swapped or a[start + 1 :] == b[start + 1 :]


def misspelled(word: str, rng: np.random.Generator) -> str:
    """`word` with a letter dropped or two swapped, such that it can be read back; short words stay as they are."""
    if len(word) < 4:
        return word
    for at in rng.permutation(np.arange(1, len(word) - 1)):
        if rng.random() < 0.5:
            slip = word[:at] + word[at + 1 :]
        else:
            slip = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
        if slip not in VOCABULARY and corrected(slip) == word:
            return slip
    return word


def parts_of(caption: str) -> list[tuple[str, str]] | None:
    """The caption as (part of speech, value) pairs, longest phrases first; None where a word fits nowhere."""
    words = [corrected(word) for word in words_of(caption)]
    parts, at = [], 0
    while at < len(words):
        for length in range(_LONGEST, 0, -1):
            found = _PHRASES.get(tuple(words[at : at + length]))  # type: ignore[arg-type]
            if found:
                parts.append(found)
                at += length
                break
        else:
            return None
    return parts
