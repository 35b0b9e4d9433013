"""Drift: statistics of training data and of new data, and measures between them, each with a limit.

    length_psi, resolution_psi, aspect_psi   population stability index of the bins (0.1 small, 0.25 large)
    vocabulary_js                            Jensen-Shannon divergence of word frequencies, in bits, 0 to 1
    unknown_words                            increase of the share of words that are not in the vocabulary
    embedding_mmd_p                          p-value of the kernel two-sample test (Gretton et al., 2012) on embeddings

A few captions differ from many by chance alone. `noise` is the 99th percentile of a measure between samples of these
sizes from one distribution; a value drifts only if it exceeds both its limit and its noise. The statistics are counts
and a sample of embeddings, small enough for JSON.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from vlp_models.contrib.drift.params import DriftParams
from vlp_models.data.tokenizer import Tokenizer

DRAWS = 300
PERMUTATIONS = 1000


def compare(reference: dict[str, Any], new: dict[str, Any], p: DriftParams) -> list[dict[str, Any]]:
    """Return every measure of texts and sizes: name, value, limit, noise, drifted. Both sides come from `describe`."""
    rng = np.random.default_rng(p.seed)
    measures = []
    for name, limit in (
        ("length", p.max_length_psi),
        ("resolution", p.max_resolution_psi),
        ("aspect", p.max_aspect_psi),
    ):
        measures.append(_measure(f"{name}_psi", psi, np.array(reference[name]), np.array(new[name]), limit, rng))
    listed = list(reference["words"])
    # per side: counts of the listed words and of all others; counts of unknown and of known words
    words, unknown = [], []
    for side in (reference, new):
        counts = [side["words"].get(word, 0) for word in listed]
        words.append(np.array([*counts, side["total_words"] - sum(counts)]))
        unknown.append(np.array([side["unknown_words"], side["total_words"] - side["unknown_words"]]))
    measures.append(_measure("vocabulary_js", js_divergence, words[0], words[1], p.max_vocabulary_divergence, rng))
    measures.append(_measure("unknown_words", rate_increase, unknown[0], unknown[1], p.max_unknown_words, rng))
    return measures


def compare_embeddings(reference: np.ndarray, new: np.ndarray, p: DriftParams) -> dict[str, Any]:
    """Return the kernel two-sample test on embeddings [N, D] and [M, D]."""
    squared, value = mmd(reference, new, np.random.default_rng(p.seed))
    return {
        "name": "embedding_mmd_p",
        "value": value,
        "limit": p.min_embedding_p,
        "mmd_squared": squared,
        "drifted": value < p.min_embedding_p,
    }


def psi(reference: np.ndarray, new: np.ndarray) -> float:
    """Return the population stability index of two histograms; 0.5 is added to every bin that either side uses."""
    # bins that neither side uses add nothing
    used = (reference + new) > 0
    # Half a count per bin: an empty bin would give an infinite logarithm.
    a, b = (side[used] + 0.5 for side in (reference, new))
    a, b = a / a.sum(), b / b.sum()
    return float(((b - a) * np.log(b / a)).sum())


def js_divergence(reference: np.ndarray, new: np.ndarray) -> float:
    """Return the Jensen-Shannon divergence of two histograms in bits: 0 if equal, 1 if disjoint."""
    a, b = (side / max(side.sum(), 1) for side in (reference, new))
    middle = (a + b) / 2

    def divergence(side: np.ndarray) -> float:
        # Empty bins contribute 0, the limit of x log x.
        some = side > 0
        return float((side[some] * np.log2(side[some] / middle[some])).sum())

    return (divergence(a) + divergence(b)) / 2


def rate_increase(reference: np.ndarray, new: np.ndarray) -> float:
    """Return by how much the new side's share of hits is larger; arguments are [hits, misses]."""
    return float(new[0] / max(new.sum(), 1) - reference[0] / max(reference.sum(), 1))


def mmd(x: np.ndarray, y: np.ndarray, rng: np.random.Generator) -> tuple[float, float]:
    """Return the squared maximum mean discrepancy (biased estimate) and its permutation p-value.

    The kernel is Gaussian; its width is the median distance between all points.
    """
    # squared distances of all pairs, [N + M, N + M]
    points = np.concatenate([x, y])
    # |x - y|^2 = |x|^2 + |y|^2 - 2 xy; rounding may make it slightly negative.
    norms = (points**2).sum(axis=1)
    distances = np.maximum(norms[:, None] + norms[None] - 2 * points @ points.T, 0)
    width = np.median(distances[np.triu_indices(len(points), 1)])
    kernel = np.exp(-distances / max(width, 1e-12))
    # MMD^2 = w' K w; a permutation of the weights is a random assignment to the two sides
    weights = np.concatenate([np.full(len(x), 1 / len(x)), np.full(len(y), -1 / len(y))])
    # (N + M, 1 + PERMUTATIONS): the first column has the true sides.
    shuffled = np.stack([weights, *(rng.permutation(weights) for _ in range(PERMUTATIONS))], axis=1)
    values = (shuffled * (kernel @ shuffled)).sum(axis=0)
    # The true sides count as one of the permutations, so p is never 0.
    return float(values[0]), float((values >= values[0] - 1e-12).mean())


def _measure(
    name: str,
    measure: Callable[[np.ndarray, np.ndarray], float],
    reference: np.ndarray,
    new: np.ndarray,
    limit: float,
    rng: np.random.Generator,
) -> dict[str, Any]:
    value = measure(reference, new)
    # noise: both sides drawn from the joint distribution
    # One histogram for both sides: what they would be drawn from without drift.
    joint = (reference + new) / max((reference + new).sum(), 1)
    by_chance = [
        measure(rng.multinomial(reference.sum(), joint), rng.multinomial(new.sum(), joint)) for _ in range(DRAWS)
    ]
    noise = float(np.quantile(by_chance, 0.99))
    return {"name": name, "value": value, "limit": limit, "noise": noise, "drifted": value > max(limit, noise)}


FORMAT = "vlp-statistics/1"
WORDS = 2000  # the most frequent words are counted separately, the others together
LENGTHS = [3, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 18, 20, 25, 30, 40, 60]  # words; bin i is [edge i-1, edge i)
SIDES = [32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096]  # pixels, square root of width x height
ASPECTS = [0.4, 0.55, 0.7, 0.8, 0.95, 1.05, 1.25, 1.4, 1.6, 1.9, 2.5]  # width over height
DIMENSIONS = 32  # dimensions of a projected embedding


def describe(
    captions: Iterable[str], sizes: Iterable[tuple[int, int]], tokenizer: Tokenizer, most_words: int | None = WORDS
) -> dict[str, Any]:
    """Return counts over captions and over image sizes (width, height), and the `most_words` most frequent words.

    A word is unknown if the vocabulary does not have it as a whole: it is split into pieces, or is [UNK].

    Args:
        most_words: None: all words.
    """
    # histograms: one bin more than edges
    lengths = np.zeros(len(LENGTHS) + 1, np.int64)
    words: Counter[str] = Counter()
    for caption in captions:
        split = tokenizer.split(caption)
        # `right`: a length equal to an edge belongs to the bin that starts there.
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
        "unknown_words": sum(count for word, count in words.items() if not _is_piece(tokenizer, word)),
        "words": dict(sorted(words.items(), key=lambda item: (-item[1], item[0]))[:most_words]),
    }


def _is_piece(tokenizer: Tokenizer, word: str) -> bool:
    """Return whether a word of `Tokenizer.split` is one piece."""
    ids = tokenizer.pieces(f" {word}")
    # Some tokenizers make the space before a word a piece of its own.
    written = [i for i in ids if len(ids) == 1 or tokenizer.vocabulary[i] not in ("▁", "Ġ")]
    return len(written) == 1 and written[0] != tokenizer.unk_id


def project(embeddings: np.ndarray, seed: int) -> np.ndarray:
    """Project [N, F] to [N, 32] by a random matrix of `seed`, which keeps distances (Johnson, Lindenstrauss, 1984).

    Not principal components: new data may differ in a direction in which old data had no variance.
    """
    matrix = np.random.default_rng(seed).standard_normal((embeddings.shape[1], DIMENSIONS))
    # (N, F) -> (N, 32); divided by the square root, squared lengths keep their expected value.
    return embeddings.astype(np.float64) @ matrix / DIMENSIONS**0.5
