"""Choose the caption of a group that is most similar to the others.

Two uses:
- `most_similar`: minimum Bayes risk decoding. S. Kumar, W. Byrne: "Minimum Bayes-Risk Decoding for Statistical Machine
  Translation" (2004). Among captions sampled from a model, the one with the highest mean similarity to the others has
  the highest expected similarity to a reference, if people write as the model does. The most likely caption, which a
  beam finds, is often short and generic.
- `ConsensusCaptions`: the nearest-neighbor caption. J. Devlin et al., "Exploring Nearest Neighbor Approaches for Image
  Captioning" (2015): an image gets the consensus caption of the training images that look most similar.

Similarity is CIDEr-D (metrics/cider_d.py): with the document frequencies of all training captions for the second use,
with equal weights for all n-grams for the first, since a served model has no corpus to count them in.

Shape suffixes: K captions of a group, each a candidate and a reference of the others; D distinct n-grams of one order.
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

CACHED_IMAGES = 30_000  # whose n-gram counts are cached: about 200 MB
_EQUAL_WEIGHTS = DocumentFrequencies(images=3, words={}, counts={})  # no n-gram is known, so each weighs log 3


def most_similar(captions: Sequence[Words]) -> int:
    """Return the position of the caption with the highest mean similarity to all of them; the first of equals.

    Args:
        captions: of one image, split into words; at least one. A caption's similarity to itself is the same for all of
            four words or more, and less for shorter ones.
    """
    return int(CiderD(_EQUAL_WEIGHTS, lambda image: captions).score("", captions).argmax())


class ConsensusCaptions:
    """Consensus captions of groups of training images."""

    def __init__(self, captions: Mapping[str, Sequence[str]]) -> None:
        """captions: image id -> its captions, as written."""
        self._tokens, _ = tokenize([text for image_captions in captions.values() for text in image_captions])
        self._captions = captions
        frequencies = DocumentFrequencies.count(self._words(image) for image in captions)
        # The idf of each n-gram, at the position that `_index` gives it.
        counts = np.fromiter(frequencies.counts.values(), np.float64, len(frequencies.counts))
        self._idf = np.log(max(frequencies.images, 1)) - np.log(np.maximum(counts, 1))
        self._numbers = frequencies.words
        self._index = {ngram: number for number, ngram in enumerate(frequencies.counts)}
        # A cache per instance: as a decorator of the method it would keep every instance in memory.
        self.counted = lru_cache(CACHED_IMAGES)(self._count)

    def choose(self, images: Sequence[str]) -> str:
        """Return the caption of these images with the highest mean CIDEr-D to the others; the first of equals.

        Empty if the images have no captions.
        """
        texts = [text for image in images for text in self._captions.get(image, ())]
        group = [counted for image in images for counted in self.counted(image)]
        if len(group) < 2:
            return texts[0] if texts else ""
        similarity_KK = self.similarity(group)
        # Without itself, which would favor captions of four words or more over shorter ones.
        np.fill_diagonal(similarity_KK, 0.0)
        return texts[int(similarity_KK.sum(1).argmax())]

    def _words(self, image: str) -> list[list[str]]:
        return [self._tokens[text].split() for text in self._captions.get(image, ())]

    def _count(self, image: str) -> list[_NgramCounts]:
        return [_NgramCounts(caption, self._numbers, self._index) for caption in self._words(image)]

    def similarity(self, group: Sequence[_NgramCounts]) -> NDArray[np.float64]:
        """Return the CIDEr-D of each caption (row) with each as the only reference (column), 0 to 10. [K, K]"""
        total_KK = np.zeros((len(group), len(group)))
        for order in range(ORDERS):
            total_KK += self._cosines([counted.orders[order] for counted in group])
        lengths_K = np.array([counted.bigrams for counted in group], dtype=np.float64)
        penalty_KK = np.exp(-((lengths_K[:, None] - lengths_K) ** 2) / (2 * SIGMA**2))
        return 10 / ORDERS * total_KK * penalty_KK

    def _cosines(self, rows: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> NDArray[np.float64]:
        """Return the clipped cosines of one order: an n-gram counts at most as often as the reference has it.

        min(c, r) is the sum over t = 1, 2, ... of [c >= t] [r >= t], so the clipped products become matrix products.
        Most n-grams are in one caption only, and so count for its cosine with itself alone.
        """
        # (K, D): how often each caption has each n-gram
        lengths = [len(ids) for ids, _ in rows]
        distinct, columns = np.unique(np.concatenate([ids for ids, _ in rows]), return_inverse=True)
        count_KD = np.zeros((len(rows), len(distinct)))
        count_KD[np.repeat(np.arange(len(rows)), lengths), columns] = np.concatenate([counts for _, counts in rows])
        squared_D = self._idf[distinct] ** 2
        # N-grams of one caption go into the diagonal; the matrix products below need only the shared ones.
        shared_D = np.count_nonzero(count_KD, axis=0) > 1
        dots_KK = np.diag((count_KD[:, ~shared_D] ** 2) @ squared_D[~shared_D])
        norm_K = np.sqrt((count_KD**2) @ squared_D)
        count_KD, squared_D = count_KD[:, shared_D], squared_D[shared_D]
        for times in range(1, int(count_KD.max(initial=0)) + 1):
            # The other columns have no caption with the n-gram this often and would add zero.
            used_D = (count_KD >= times).any(0)
            has_KD = (count_KD[:, used_D] >= times).astype(np.float64)
            dots_KK += has_KD @ (has_KD * count_KD[:, used_D] * squared_D[used_D]).T
        scale_KK = norm_K[:, None] * norm_K
        return dots_KK / np.where(scale_KK > 0, scale_KK, 1)


class _NgramCounts:
    """A caption's n-grams: for each order, their indices among all n-grams and their counts."""

    def __init__(self, caption: Sequence[str], words: Mapping[str, int], index: Mapping[int, int]) -> None:
        pairs_by_order: list[list[tuple[int, int]]] = [[] for _ in range(ORDERS)]
        for ngram, count in ngrams_of([words[word] for word in caption]).items():
            pairs_by_order[order_of(ngram)].append((index[ngram], count))
        self.bigrams = bigrams_of(caption)
        self.orders: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        for pairs in pairs_by_order:
            indices, counts = [i for i, _ in pairs], [n for _, n in pairs]
            self.orders.append((np.array(indices, np.int64), np.array(counts, np.int64)))
