"""What makes a text a text, in any language."""

from __future__ import annotations

import math
import re
import unicodedata

# Han, kana; Thai, Lao, Burmese, Khmer, with their marks
_SHORT = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff]+")
_LONG = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]+")
_URL = re.compile(r"(?:https?://|www\.)\S+", re.IGNORECASE)


def caption_key(text: str) -> str:
    """What two captions must share to be one: all but case, spaces and forms of writing the same letters."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def count_words(text: str) -> int:
    """Words between spaces; in scripts that put none between words, by their usual length: two letters of Chinese or
    Japanese, four of Thai, Lao, Khmer or Burmese."""
    if text.isascii():
        return len(text.split())
    short, long = (sum(c.isalpha() for c in "".join(script.findall(text))) for script in (_SHORT, _LONG))
    if not short and not long:
        return len(text.split())
    rest = _LONG.sub(" ", _SHORT.sub(" ", text)).split()
    return sum(any(map(str.isalnum, word)) for word in rest) + math.ceil(short / 2) + math.ceil(long / 4)


def has_letters(text: str) -> bool:
    """At least one letter of some script; digits and punctuation alone say nothing."""
    return any(character.isalpha() for character in text)


def is_clean(text: str) -> bool:
    """No control character, no half of a surrogate pair, no mark of a failed decoding (U+FFFD)."""
    return not any(unicodedata.category(character) in ("Cc", "Cs") or character == "\ufffd" for character in text)


def is_more_than_url(text: str) -> bool:
    """Something is left when addresses are taken out; a text without any address passes."""
    rest, addresses = _URL.subn(" ", text)
    return not addresses or has_letters(rest)
