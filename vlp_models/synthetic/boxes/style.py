"""How people type: sentences without capitals or full stops, a letter lost, "is" for "are"."""

from __future__ import annotations

import random

_SLIPS = (("at least", "atleast"), ("at least", "t least"), ("there is a ", "there is "), ("  ", " "), (" a ", " as "))


def scribble(rng: random.Random, text: str) -> str:
    """`text` as one of NLVR's writers might have typed it."""
    if text.startswith("there are") and rng.random() < 0.01:
        text = text.replace("there are", "there is", 1)
    if rng.random() < 0.02:
        old, new = rng.choice(_SLIPS)
        text = text.replace(old, new, 1)
    if rng.random() < 0.02:
        text = _typo(rng, text)
    if rng.random() < 0.75:
        text = text[0].upper() + text[1:]
    return text + "." if rng.random() < 0.55 else text


def _typo(rng: random.Random, text: str) -> str:
    at = rng.randrange(1, len(text) - 1)
    kind = rng.randrange(3)
    if kind == 0:
        return text[:at] + text[at + 1 :]
    if kind == 1:
        return text[:at] + text[at] + text[at:]
    return text[:at] + text[at + 1] + text[at] + text[at + 2 :]
