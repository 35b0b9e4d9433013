"""What a tokenizer makes of texts before a model reads them: words that it does not know, and words that it changes."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from vlp_models.data.tokenizer import Tokenizer

_POINTED = ("HEBREW", "ARABIC")  # whose writers leave out the points themselves


@dataclass(frozen=True, kw_only=True)
class Survey:
    """words: how many there are, punctuation marks among them. unknown: those that become [UNK]; changed: those that
    lose more than an accent (`loses_letters`); each with their numbers."""

    words: int
    unknown: Counter[str]
    changed: Counter[str]

    @property
    def unknown_share(self) -> float:
        return self.unknown.total() / max(1, self.words)

    @property
    def changed_share(self) -> float:
        return self.changed.total() / max(1, self.words)


def survey(tokenizer: Tokenizer, texts: Iterable[str]) -> Survey:
    words = 0
    unknown: Counter[str] = Counter()
    changed: Counter[str] = Counter()
    for text in texts:
        count, unfound = tokenizer.look_up(text)
        words += count
        unknown.update(unfound)
        if tokenizer.strips_accents and not text.isascii():
            changed.update(word for word in text.split() if loses_letters(word))
    return Survey(words=words, unknown=unknown, changed=changed)


def loses_letters(word: str) -> bool:
    """Whether stripping accents makes another word of it: vowels of Indic scripts and Thai are marks, and so are the
    dots of kana. A mark on a Latin, Greek or Cyrillic letter is an accent, without which BERT's uncased models do."""
    letter = ""
    for c in unicodedata.normalize("NFD", word):
        kind = unicodedata.category(c)
        if kind == "Mn" and letter:
            return True
        if not kind.startswith("M"):
            letter = c if kind == "Lo" and _script(c) not in _POINTED else ""
    return False


def _script(letter: str) -> str:
    return unicodedata.name(letter, "").partition(" ")[0]
