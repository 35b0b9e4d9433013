"""Fast CIDEr-D for many captions: the reward of self-critical training, and a similarity of captions.

R. Vedantam, C. L. Zitnick, D. Parikh: "CIDEr: Consensus-based Image Description Evaluation", CVPR 2015. The arithmetic
is that of the public CIDEr-D scorer: TF-IDF vectors of n-grams for n = 1..4, clipped cosine, a Gaussian penalty on the
difference in length (sigma 6; the length is the number of bigrams), the mean over n and over references, times ten.
coco-caption's "CIDEr" is the same with document frequencies of the references it scores against; here they come from
a fixed corpus, since a reward must not depend on the batch.

Shape suffixes: K candidates, R references, D distinct n-grams of one image's references, H n-grams of the candidates.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from vlp_models.common.io import atomic_write
from vlp_models.errors import DataError

ORDERS = 4
SIGMA = 6.0
_BITS = 21  # per word: an n-gram is one integer with a word number in every 21 bits
_MASK = (1 << _BITS) - 1

Words = Sequence[str]


class DocumentFrequencies:
    """In how many images of a corpus each n-gram occurs."""

    def __init__(self, images: int, words: dict[str, int], counts: dict[int, int]) -> None:
        """words: word -> its number, from 1. counts: n-gram -> number of images."""
        self.images = images
        self.words = words
        self.counts = counts

    @classmethod
    def count(cls, corpus: Iterable[Sequence[Words]]) -> DocumentFrequencies:
        """Count the n-grams of a corpus: the references of each image."""
        words: dict[str, int] = {}
        counts: Counter[int] = Counter()
        images = 0
        for references in corpus:
            images += 1
            ngrams: set[int] = set()  # of the image: each counts once, in however many references it is
            for reference in references:
                numbers = [words.setdefault(word, len(words) + 1) for word in reference]
                ngrams.update(ngrams_of(numbers))
            counts.update(ngrams)
        if len(words) > _MASK:
            raise DataError(f"the captions have {len(words):,} different words; CIDEr-D supports up to {_MASK:,}")
        return cls(images, words, dict(sorted(counts.items())))

    def save(self, file: Path) -> None:
        """Write the frequencies; equal frequencies give equal bytes."""
        keys = list(self.counts)
        # One column per word, because an n-gram's integer has up to 84 bits, more than a tensor's element.
        grams = [[key >> _BITS * position & _MASK for position in range(ORDERS)] for key in keys]
        tensors = {
            "ngrams": np.array(grams, dtype=np.int32).reshape(-1, ORDERS),  # last word first, 0 if shorter
            "images": np.fromiter(self.counts.values(), dtype=np.int32, count=len(keys)),
        }
        # One metadata entry, because safetensors writes several in no fixed order.
        metadata = {"corpus": json.dumps([self.images, list(self.words)])}
        with atomic_write(file) as partial:  # every rank of a run writes this file
            save_file(tensors, partial, metadata=metadata)

    @classmethod
    def load(cls, file: Path) -> DocumentFrequencies:
        """Read what `save` wrote.

        Raises:
            DataError: the file is missing, or was not written by `save`.
        """
        try:
            with safe_open(file, framework="np") as stored:
                size, names = json.loads(stored.metadata()["corpus"])
                grams, images = stored.get_tensor("ngrams").tolist(), stored.get_tensor("images").tolist()
            words = {word: number for number, word in enumerate(names, start=1)}
            # The inverse of `save`: the first column is the last word, which is in the lowest bits.
            keys = (d << 3 * _BITS | c << 2 * _BITS | b << _BITS | a for a, b, c, d in grams)
            return cls(int(size), words, dict(zip(keys, images, strict=True)))
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"{file}: invalid document frequencies: {error}; delete it to count them again") from None


@dataclass(frozen=True)
class _References:
    """One image's references: the TF-IDF weight of each n-gram in each reference."""

    ids_D: NDArray[np.int64]  # ascending
    weights_DR: NDArray[np.float64]
    norms_4R: NDArray[np.float64]
    bigrams_R: NDArray[np.float64]


@dataclass(frozen=True)
class _Candidates:
    """The n-grams of several captions, concatenated.

    row_H     caption and order: k * ORDERS + n - 1
    id_H      row in the frequency table; -1 if it is not in the table
    weight_H  TF-IDF
    """

    row_H: NDArray[np.int64]
    id_H: NDArray[np.int64]
    weight_H: NDArray[np.float64]
    norms_K41: NDArray[np.float64]
    bigrams_K: NDArray[np.float64]


class CiderD:
    """Scores candidates of an image against all its references.

    The references' vectors are computed on first use and cached (about 6 KB per image with five captions). A score
    depends only on candidate, references and corpus, to the last bit.
    """

    def __init__(self, frequencies: DocumentFrequencies, references: Callable[[str], Sequence[Words]]) -> None:
        """references: image id -> its captions, split into words like the corpus and the candidates; may be empty."""
        self._sources = references
        self._log_images = math.log(max(frequencies.images, 1))
        self._words = dict(frequencies.words)
        self._ids = {ngram: i for i, ngram in enumerate(frequencies.counts)}
        # As in the public scorer, idf = log(images) - log(max(1, images that have the n-gram)).
        self._idf = [self._log_images - math.log(max(count, 1)) for count in frequencies.counts.values()]
        self._references: dict[str, _References] = {}

    def score(self, image_id: str, candidates: Sequence[Words]) -> NDArray[np.float64]:
        """Return the CIDEr-D of each candidate, 0 to 10. [K]

        Raises:
            DataError: the image has no reference.
        """
        references = self._references_of(image_id)
        return self._compare(references, self._count(candidates))

    def mean_score(self, image_ids: Sequence[str], candidates: Sequence[Words]) -> NDArray[np.float64]:
        """Return the mean CIDEr-D over several images, each with its own references. [K]

        Raises:
            DataError: one of them has no reference.
        """
        references = [self._references_of(image_id) for image_id in image_ids]
        counted = self._count(candidates)
        return np.mean([self._compare(image_references, counted) for image_references in references], axis=0)

    def _references_of(self, image_id: str) -> _References:
        references = self._references.get(image_id)
        if references is None:
            references = self._references[image_id] = self._vectors(image_id)
        return references

    def _count(self, candidates: Sequence[Words]) -> _Candidates:
        """Count the candidates' n-grams. Call it after `_references_of`, which adds n-grams outside the corpus."""
        unknown: dict[str, int] = {}  # words of no reference; they only lengthen a candidate's vector

        def number(word: str) -> int:
            word_id = self._words.get(word)
            return word_id if word_id is not None else unknown.setdefault(word, len(self._words) + len(unknown) + 1)

        rows: list[int] = []
        ids: list[int] = []
        weights: list[float] = []
        for k, candidate in enumerate(candidates):
            for ngram, count in ngrams_of([number(word) for word in candidate]).items():
                i = self._ids.get(ngram, -1)
                rows.append(k * ORDERS + order_of(ngram))
                ids.append(i)
                # An n-gram outside the table has the highest idf; it matches nothing and only lengthens the vector.
                weights.append(count * (self._log_images if i < 0 else self._idf[i]))
        row_H, weight_H = np.array(rows, dtype=np.int64), np.array(weights, dtype=np.float64)
        # (H,) -> (K * 4,): the squared length of each caption's vector of each order
        squares = np.bincount(row_H, weight_H**2, minlength=len(candidates) * ORDERS)
        return _Candidates(
            row_H=row_H,
            id_H=np.array(ids, dtype=np.int64),
            weight_H=weight_H,
            norms_K41=np.sqrt(squares).reshape(-1, ORDERS, 1),
            bigrams_K=np.array([bigrams_of(candidate) for candidate in candidates], dtype=np.float64),
        )

    def _compare(self, references: _References, candidates: _Candidates) -> NDArray[np.float64]:
        """Return the mean CIDEr-D over an image's references. [K]"""
        row, weight = candidates.row_H, candidates.weight_H
        dots = np.zeros((len(candidates.bigrams_K) * ORDERS, len(references.bigrams_R)))
        if len(references.ids_D) and len(row):
            # Of each n-gram of the candidates, its row among the references' n-grams; a hit if it is one of them.
            position = np.searchsorted(references.ids_D, candidates.id_H).clip(max=len(references.ids_D) - 1)
            hit = references.ids_D[position] == candidates.id_H
            shared_HR = references.weights_DR[position[hit]]
            # The candidate's weight is clipped at the reference's, so repeating a word does not raise the score.
            np.add.at(dots, row[hit], np.minimum(weight[hit, None], shared_HR) * shared_HR)
        # (K, 4, R): the cosine of each order; a vector of zeros, as a one-word caption has of pairs, gives zero.
        scale_K4R = candidates.norms_K41 * references.norms_4R
        cosine_K4R = dots.reshape(scale_K4R.shape) / np.where(scale_K4R > 0, scale_K4R, 1)
        # (K, R): the Gaussian penalty on the difference in length, which keeps long captions from collecting matches.
        penalty_KR = np.exp(-((candidates.bigrams_K[:, None] - references.bigrams_R) ** 2) / (2 * SIGMA**2))
        return 10 * (cosine_K4R.mean(1) * penalty_KR).mean(1)

    def _vectors(self, image_id: str) -> _References:
        captions = self._sources(image_id)
        if not captions:
            raise DataError(f"image {image_id} has no reference caption to score a caption with")
        counts = []
        for caption in captions:
            numbers = [self._words.setdefault(word, len(self._words) + 1) for word in caption]
            counts.append(ngrams_of(numbers))
        # (D, R): the weight of each n-gram in each reference, in ascending order of the ids for `searchsorted`
        ngrams = sorted(set().union(*counts), key=self._id)
        weights_DR = np.zeros((len(ngrams), len(captions)))
        for d, ngram in enumerate(ngrams):
            for r, count in enumerate(counts):
                weights_DR[d, r] = count.get(ngram, 0) * self._idf[self._id(ngram)]
        # (4, R): the length of each reference's vector of each order.
        norms_4R = np.zeros((ORDERS, len(captions)))
        np.add.at(norms_4R, [order_of(ngram) for ngram in ngrams], weights_DR**2)
        return _References(
            ids_D=np.array([self._id(ngram) for ngram in ngrams], dtype=np.int64),
            weights_DR=weights_DR,
            norms_4R=np.sqrt(norms_4R),
            bigrams_R=np.array([bigrams_of(caption) for caption in captions], dtype=np.float64),
        )

    def _id(self, ngram: int) -> int:
        """Return the n-gram's row in the table; one outside the corpus gets a new row, with frequency zero."""
        i = self._ids.setdefault(ngram, len(self._idf))
        if i == len(self._idf):
            self._idf.append(self._log_images)
        return i


def ngrams_of(numbers: Sequence[int]) -> Counter[int]:
    """Count the n-grams of a caption, n = 1..4."""
    counts: Counter[int] = Counter()
    # From each word on, an n-gram grows by a word at a time: the key shifts by 21 bits.
    for start in range(len(numbers)):
        ngram = 0
        for word in numbers[start : start + ORDERS]:
            ngram = ngram << _BITS | word
            counts[ngram] += 1
    return counts


def order_of(ngram: int) -> int:
    """Return n - 1; no word has the number 0, so the bit length determines n."""
    return (ngram.bit_length() - 1) // _BITS


def bigrams_of(words: Words) -> int:
    return max(0, len(words) - 1)
