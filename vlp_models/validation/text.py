"""What makes a text a text, in any language."""

from __future__ import annotations

import re
import unicodedata

_URL = re.compile(r"(?:https?://|www\.)\S+", re.IGNORECASE)


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
