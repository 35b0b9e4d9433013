"""What is kept of a set of pairs for later comparison: counts and a sample of embeddings, small enough for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from vlp_models.data.tokenizer import Tokenizer

FORMAT = "vlp-statistics/1"
WORDS = 2000  # the most frequent are counted one by one, the others together
LENGTHS = [3, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 18, 20, 25, 30, 40, 60]  # words; bin i is [edge i-1, edge i)
SIDES = [32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096]  # pixels, the root of width x height
ASPECTS = [0.4, 0.55, 0.7, 0.8, 0.95, 1.05, 1.25, 1.4, 1.6, 1.9, 2.5]  # width over height
DIMENSIONS = 32  # of an embedding after projection


def describe(
    captions: Iterable[str], sizes: Iterable[tuple[int, int]], tokenizer: Tokenizer, most_words: int | None = WORDS
) -> dict[str, Any]:
    """Counts over captions and over image sizes (width, height); of the words, `most_words` (None: all).

    A word is unknown if the vocabulary does not have it whole: it is then spelt in pieces, or is [UNK].
    """
    vocabulary = frozenset(tokenizer.vocabulary)
    lengths = np.zeros(len(LENGTHS) + 1, np.int64)
    words: Counter[str] = Counter()
    for caption in captions:
        split = tokenizer.split(caption)
        lengths[np.searchsorted(LENGTHS, len(split), "right")] += 1
        words.update(split)
    sides = np.zeros(len(SIDES) + 1, np.int64)
    aspects = np.zeros(len(ASPECTS) + 1, np.int64)
    for width, height in sizes:
        sides[np.searchsorted(SIDES, (width * height) ** 0.5, "right")] += 1
        aspects[np.searchsorted(ASPECTS, width / height, "right")] += 1
    return {
        "format": FORMAT,
        "captions": int(lengths.sum()),
        "images": int(sides.sum()),
        "length": lengths.tolist(),
        "resolution": sides.tolist(),
        "aspect": aspects.tolist(),
        "total_words": words.total(),
        "unknown_words": sum(count for word, count in words.items() if word not in vocabulary),
        "words": dict(sorted(words.items(), key=lambda item: (-item[1], item[0]))[:most_words]),
    }


def project(embeddings: np.ndarray, seed: int) -> np.ndarray:
    """[N, F] -> [N, 32] by a random matrix of `seed`, which keeps distances (Johnson and Lindenstrauss, 1984).

    Not by principal components: what is new about new data may lie where the old had no variance.
    """
    matrix = np.random.default_rng(seed).standard_normal((embeddings.shape[1], DIMENSIONS))
    return embeddings.astype(np.float64) @ matrix / DIMENSIONS**0.5
