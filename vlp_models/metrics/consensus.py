"""The caption that a group of images agrees on: of all their captions the one that is most like the others.

J. Devlin et al., "Exploring Nearest Neighbor Approaches for Image Captioning" (2015): a photo borrows the caption of
the training photos that look most alike. Likeness of captions is CIDEr-D (metrics/cider_d.py), with document
frequencies of all captions that there are.

Shape suffixes: K captions of a group, each a candidate and a reference of the others; D distinct n-grams of one
length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from vlp_models.metrics.cider_d import (
    ORDERS,
    SIGMA,
    CiderD,
    DocumentFrequencies,
    Words,
    bigrams_of,
    ngrams_of,
    order_of,
)
from vlp_models.metrics.coco_tools import tokenize

KEPT = 30_000  # images whose captions stay counted: some 200 MB


class ConsensusCaptions:
    """Over the captions of a dataset's training images."""

    def __init__(self, captions: Mapping[str, Sequence[str]]) -> None:
        """captions: image id -> its captions, as written."""
        self._tokens, _ = tokenize([text for several in captions.values() for text in several])
        self._captions = captions
        frequencies = DocumentFrequencies.count(self._words(image) for image in captions)
        self._idf = np.log(max(frequencies.images, 1)) - np.log(
            np.maximum(np.fromiter(frequencies.counts.values(), np.float64, len(frequencies.counts)), 1)
        )
        self._numbers = frequencies.words
        self._place = {ngram: number for number, ngram in enumerate(frequencies.counts)}
        self.counted = lru_cache(KEPT)(self._count)

    def choose(self, images: Sequence[str]) -> str:
        """The caption, among those of these images, with the highest mean CIDEr-D to the other ones; the first of
        equals. Empty where they have none."""
        texts = [text for image in images for text in self._captions.get(image, ())]
        group = [counted for image in images for counted in self.counted(image)]
        if len(group) < 2:
            return texts[0] if texts else ""
        likeness_KK = self.likeness(group)
        np.fill_diagonal(likeness_KK, 0.0)
        return texts[int(likeness_KK.sum(1).argmax())]

    def _words(self, image: str) -> list[list[str]]:
        return [self._tokens[text].split() for text in self._captions.get(image, ())]

    def _count(self, image: str) -> list[_Counted]:
        return [_Counted(caption, self._numbers, self._place) for caption in self._words(image)]

    def likeness(self, group: Sequence[_Counted]) -> NDArray[np.float64]:
        """CIDEr-D of each caption (row) against each as the one reference (column), zero to ten. [K, K]"""
        total_KK = np.zeros((len(group), len(group)))
        for order in range(ORDERS):
            total_KK += self._cosines([counted.orders[order] for counted in group])
        lengths_K = np.array([counted.bigrams for counted in group], dtype=np.float64)
        penalty_KK = np.exp(-((lengths_K[:, None] - lengths_K) ** 2) / (2 * SIGMA**2))
        return 10 / ORDERS * total_KK * penalty_KK

    def _cosines(self, rows: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> NDArray[np.float64]:
        """The clipped cosines of one order: the candidate counts no n-gram oftener than the reference has it.

        min(c, r) is the sum over t = 1, 2, ... of [c >= t] [r >= t], which makes the clipped products matrix products.
        """
        lengths = [len(ids) for ids, _ in rows]
        distinct, columns = np.unique(np.concatenate([ids for ids, _ in rows]), return_inverse=True)
        count_KD = np.zeros((len(rows), len(distinct)))
        count_KD[np.repeat(np.arange(len(rows)), lengths), columns] = np.concatenate([counts for _, counts in rows])
        squared_D = self._idf[distinct] ** 2
        dots_KK = np.zeros((len(rows), len(rows)))
        for times in range(1, int(count_KD.max(initial=0)) + 1):
            often = (count_KD >= times).any(0)
            has_KD = (count_KD[:, often] >= times).astype(np.float64)
            dots_KK += has_KD @ (has_KD * count_KD[:, often] * squared_D[often]).T
        norm_K = np.sqrt((count_KD**2 * squared_D).sum(1))
        scale_KK = norm_K[:, None] * norm_K
        return dots_KK / np.where(scale_KK > 0, scale_KK, 1)


class _Counted:
    """A caption's n-grams: for each order their places among all, and how often each occurs."""

    def __init__(self, caption: Sequence[str], words: Mapping[str, int], place: Mapping[int, int]) -> None:
        found: list[list[tuple[int, int]]] = [[] for _ in range(ORDERS)]
        for ngram, count in ngrams_of([words[word] for word in caption]).items():
            found[order_of(ngram)].append((place[ngram], count))
        self.bigrams = bigrams_of(caption)
        self.orders = [
            (np.array([i for i, _ in pairs], np.int64), np.array([n for _, n in pairs], np.int64)) for pairs in found
        ]


_ALIKE = DocumentFrequencies(images=3, words={}, counts={})  # all n-grams unseen, so of one weight, log 3


def most_similar(captions: Sequence[Words]) -> int:
    """The place of the caption with the highest mean likeness to all of them; the first of equals.

    Args:
        captions: of one image, split into words; at least one. Its likeness to itself is the same for each of four
            words or more, and less for shorter ones.
    """
    return int(CiderD(_ALIKE, lambda image: captions).score("", captions).argmax())
