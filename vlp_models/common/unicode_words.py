r"""Words of a text in any script, for code that splits text by regular expressions.

In Python, `\w` has no combining marks, so it splits the words of Hindi, Tamil or Arabic with vowel signs, and
decomposed accents, into letters. A regular expression cannot find the words of a script without spaces between them;
the unit there is the character with its marks.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Iterable


def _ranges(codes: Iterable[int]) -> str:
    """Return sorted code points as the inside of a character class."""
    ranges: list[list[int]] = []
    for code in codes:
        # A code point that follows the last range extends it.
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges)


# The insides of character classes.
MARKS = _ranges(
    code
    for part in (range(0x300, 0x20000), range(0xE0100, min(0xE01F0, sys.maxunicode)))  # no other plane has marks
    for code in part
    if unicodedata.category(chr(code)).startswith("M")
)
# Han, kana, bopomofo and Yi; Thai, Lao, Burmese, Khmer and their neighbors (class SA of Unicode's line breaking);
# Balinese and Javanese.
UNSPACED = (
    r"\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3031-\u3035\u3038-\u303b\u3041-\u30fa\u30fc-\u312f\u31a0-\u31bf"
    r"\u31f0-\u31ff\u3400-\u4dbf\u4e00-\ua48c\uf900-\ufaff\uff66-\uff9f\U00016fe0-\U00018dff\U0001aff0-\U0001b2ff"
    r"\U00020000-\U0003ffff"
    r"\u0e01-\u0e3a\u0e40-\u0e4e\u0e81-\u0ecd\u0edc-\u0edf\u1000-\u103f\u1050-\u109f\u1780-\u17d3\u17d7\u17dc\u17dd"
    r"\u1950-\u19df\u1a20-\u1a7f\ua9e0-\ua9ef\ua9fa-\ua9fe\uaa60-\uaadf\u1b00-\u1b4c\ua980-\ua9c0"
)
JOINERS = r"\u200c\u200d"  # zero width, within words of Persian, Sinhala and Malayalam

# `[^\W\d_]` is a letter: `\w` without digits and the underscore.
LETTER = rf"[^\W\d_][{MARKS}]*"
# One character of a word: a letter, digit, underscore or combining mark.
CHARACTERS = rf"[\w{MARKS}]"
# Characters, with joiners between; one ends a word only in the older spelling of Malayalam's chillu letters.
WORD = rf"{CHARACTERS}+(?:[{JOINERS}]+{CHARACTERS}+)*(?:(?<=\u0d4d)\u200d)?"

_WORD = re.compile(WORD)
_UNSPACED = re.compile(rf"[{UNSPACED}]")
_UNSPACED_CHARACTER = re.compile(rf"[{UNSPACED}][{MARKS}{JOINERS}]*")


def split_words(text: str) -> list[str]:
    """Return the words, without punctuation; the characters where a script has no spaces between words."""
    return _WORD.findall(separate_characters(text))


def separate_characters(text: str) -> str:
    """Put spaces around each character, with its marks, of a script without spaces between words."""
    return text if text.isascii() else _UNSPACED_CHARACTER.sub(r" \g<0> ", text)


def unspaced_scripts(text: str) -> set[str]:
    """Return the names of the scripts without spaces between words that occur in a text: Thai, Han, ...

    Tibetan has a mark between syllables.
    """
    # The name of a character starts with its script: `THAI CHARACTER KO KAI`, `CJK UNIFIED IDEOGRAPH-4E00`.
    if text.isascii():
        return set()
    names = {unicodedata.name(character, "Han").split()[0] for character in _UNSPACED.findall(text)}
    names |= {"Tibetan"} if "\u0f0b" in text else set()
    return {"Han" if name in ("CJK", "KANGXI", "IDEOGRAPHIC") else name.title() for name in names}
