"""The sentence in an alt text of the scenes."""

from __future__ import annotations

from vlp_models.synthetic.scenes.captions import BOILERPLATE


def without_boilerplate(text: str) -> tuple[str, bool]:
    """Return the sentence in an alt text, and whether it had boilerplate around it."""
    for phrase in BOILERPLATE:
        before, after = phrase.split("{}")
        if text.startswith(before) and text.endswith(after) and len(text) > len(before) + len(after):
            return text[len(before) : len(text) - len(after)], True
    return text, False
