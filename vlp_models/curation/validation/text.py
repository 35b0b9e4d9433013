"""What counts as text and as a word, in any language."""

from __future__ import annotations

import math
import re
import unicodedata

# Scripts without spaces between words: Han and kana (short words); Thai, Lao, Burmese and Khmer (long words).
_SHORT = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff]+")
_LONG = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]+")
_URL = re.compile(r"(?:https?://|www\.)\S+", re.IGNORECASE)


def caption_key(text: str) -> str:
    """Return a comparison key: NFKC, case-folded, whitespace collapsed."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def count_words(text: str) -> int:
    """Count words by spaces; in scripts without spaces, by average length: two letters of Chinese or Japanese, four of
    Thai, Lao, Khmer or Burmese."""
    if text.isascii():
        return len(text.split())
    # letters in scripts without spaces
    short = sum(map(str.isalpha, "".join(_SHORT.findall(text))))
    long = sum(map(str.isalpha, "".join(_LONG.findall(text))))
    if not short and not long:
        return len(text.split())
    # the remaining words are separated by spaces; punctuation alone is no word
    rest = _LONG.sub(" ", _SHORT.sub(" ", text)).split()
    return sum(any(map(str.isalnum, word)) for word in rest) + math.ceil(short / 2) + math.ceil(long / 4)


def has_letters(text: str) -> bool:
    """Return whether a text has a letter of some script; digits and punctuation alone do not count."""
    return any(character.isalpha() for character in text)


def is_clean(text: str) -> bool:
    """Return whether a text has no control character, lone surrogate or replacement character (U+FFFD)."""
    return not any(unicodedata.category(character) in ("Cc", "Cs") or character == "\ufffd" for character in text)


def has_text_besides_urls(text: str) -> bool:
    """Return whether something is left once URLs are removed; a text without a URL passes."""
    rest, addresses = _URL.subn(" ", text)
    return not addresses or has_letters(rest)
