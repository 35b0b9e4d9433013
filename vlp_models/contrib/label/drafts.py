"""Drafts of captions, and how sure they are: the caption of the most similar labeled photo (versions.py: a model's)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vlp_models.contrib.label.features import FloatArray

COMPARED = 5  # similar photos whose captions agree or do not


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A draft. origin: what wrote it; uncertainty: comparable between drafts of one origin, higher is less sure."""

    text: str = ""
    origin: str = ""
    uncertainty: float = 0.0


class SimilarDrafts:
    """Captions of labeled photos.

    Shape suffixes: L labeled photos, F features.
    """

    def __init__(self) -> None:
        self._photos: list[str] = []
        self._captions: list[str] = []  # the first of each photo
        self._features_LF: FloatArray = np.zeros((0, 0), np.float32)

    def fit(self, captions: Mapping[str, Sequence[str]], features: Mapping[str, FloatArray]) -> None:
        """Use the labeled photos whose features are known."""
        self._photos = [photo for photo in captions if photo in features]
        self._captions = [captions[photo][0] for photo in self._photos]
        self._features_LF = np.array([features[photo] for photo in self._photos], np.float32)

    def draft(self, vector_F: FloatArray) -> Draft:
        """Return the first caption of the most similar photo; it is uncertain if other similar photos' differ."""
        if not self._photos:
            return Draft()
        # (L, F) @ (F,): cosines, since the vectors have unit length; equal ones in their order
        first, *others = np.argsort(-(self._features_LF @ vector_F), kind="stable")[:COMPARED].tolist()
        text = self._captions[first]
        agreement = [share_of_words(text, self._captions[row]) for row in others]
        uncertainty = 1 - float(np.mean(agreement)) if agreement else 0.0
        return Draft(text=text, origin=f"the caption of {self._photos[first]}", uncertainty=uncertainty)


def share_of_words(text: str, other: str) -> float:
    """Return the share of two captions' words that both have; of their characters, where a script has no spaces."""
    words, others = set(text.casefold().split()), set(other.casefold().split())
    if min(len(words), len(others)) < 2:
        words, others = set(text.casefold()), set(other.casefold())
    return len(words & others) / max(1, len(words | others))
