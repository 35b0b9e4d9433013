"""Alt texts as the web has them: one sentence an image, and its faults with stated shares.

A sentence of the annotators' language (captions.py) goes through four faults, each of its own share: it may describe
another scene, its nouns may be replaced by their hypernym (`square` -> `shape`), words may be lost, and a shop's or an
agency's words may stand around it. So what a model can learn from such a text is known.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vlp_models.params import GeneratorParams
from vlp_models.synthetic.scenes.captions import captions
from vlp_models.synthetic.scenes.world import SHAPES, Scene

# What stands around a sentence, `{}`. No phrase is the beginning or the end of an annotator's sentence.
BOILERPLATE = (
    "stock photo of {}",
    "royalty free picture: {}",
    "{} buy now",
    "{} free shipping",
    "click to enlarge {}",
    "{} hd wallpaper download",
    "photo gallery - {}",
    "{} (page 1 of 3)",
)
_MIN_WORDS = 2  # that losing words leaves
_PLURALS = {shape + "s" for shape in SHAPES} | {"discs"}
NOUNS = frozenset({*SHAPES, "disc", *_PLURALS})  # the words that have a hypernym


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How often each fault occurs, 0 to 1.

    mismatched   of the alt texts, describe another scene
    hypernyms    of the nouns, replaced by `shape`
    dropped_words  of the words, left out
    boilerplate  of the alt texts, stand between words that say nothing about the picture
    """

    mismatched: float = 0.25
    hypernyms: float = 0.10
    dropped_words: float = 0.06
    boilerplate: float = 0.30

    @classmethod
    def of(cls, params: GeneratorParams) -> Noise:
        return cls(
            mismatched=params.mismatched,
            hypernyms=params.hypernyms,
            dropped_words=params.dropped_words,
            boilerplate=params.boilerplate,
        )


@dataclass(frozen=True, kw_only=True)
class AltText:
    """text: what the web says. clean: the sentence before its faults, true of the scene that it describes.
    mismatched: that is another scene than the image's."""

    text: str
    clean: str
    mismatched: bool


def alt_text(scene: Scene, other: Scene, rng: np.random.Generator, noise: Noise) -> AltText:
    """One alt text for `scene`; where it is mismatched, it describes `other`."""
    mismatched = bool(rng.random() < noise.mismatched)
    described = other if mismatched else scene
    told = captions(described, rng, misspelled=0.0)
    clean = told[rng.integers(len(told))]
    words = [hypernym(word) if rng.random() < noise.hypernyms else word for word in clean.split()]
    words = _lose(words, noise.dropped_words, rng)
    text = " ".join(words)
    if rng.random() < noise.boilerplate:
        text = BOILERPLATE[rng.integers(len(BOILERPLATE))].format(text)
    return AltText(text=text, clean=clean, mismatched=mismatched)


def hypernym(word: str) -> str:
    """`squares,` -> `shapes,`; a word that names no shape stays."""
    bare = word.rstrip(".,")
    if bare.lower() not in NOUNS:
        return word
    return ("shapes" if bare.lower() in _PLURALS else "shape") + word[len(bare) :]


def without_boilerplate(text: str) -> tuple[str, bool]:
    """The sentence in an alt text, and whether there were other words around it."""
    for phrase in BOILERPLATE:
        before, after = phrase.split("{}")
        if text.startswith(before) and text.endswith(after) and len(text) > len(before) + len(after):
            return text[len(before) : len(text) - len(after)], True
    return text, False


def _lose(words: list[str], share: float, rng: np.random.Generator) -> list[str]:
    kept = rng.random(len(words)) >= share
    if kept.sum() < min(_MIN_WORDS, len(words)):
        return words
    return [word for word, stays in zip(words, kept, strict=True) if stays]
