"""Score how likely a caption belongs to another image, without weights that were trained on images and texts.

Images are vectors (vectors.py), captions are TF-IDF vectors of their words. Both are reduced to principal components.
Canonical correlation analysis (Hotelling 1936; regularized as in Vinod 1976) then maps both into one space. It is
cross-fitted: the images are divided into folds, and the pairs of a fold are scored by the map of the other folds, so no
pair is scored by what was fitted to it. A pair's score is the log-probability of its caption among other images'
captions, plus that of its image among other images.

What the scores of mismatched pairs look like is known: pair each caption with another image. Against these, the share
of mismatched pairs is estimated, and each pair's probability to be one of them. Nothing is labeled by hand.

Shape suffixes: P captions, I images, V words, D components, F features of an image vector, K signals.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.linalg
import scipy.optimize
import scipy.sparse
from numpy.typing import NDArray

from vlp_models.common.unicode_words import split_words

Floats = NDArray[np.floating]
Ints = NDArray[np.int64]
# images [I, E] and captions [P, E] of unit length in one space; only those of one fold are comparable
Space = tuple[Floats, Floats]

FOLDS = 5
COMPONENTS = 512  # of images and of captions
SHARED = 128  # dimensions of the common space
RIDGE = 1.0  # of either side, times the mean of its eigenvalues
SHARPNESS = 20.0  # factor of similarities before a softmax
MAX_WORDS = 3000  # most frequent words; their covariance has MAX_WORDS squared numbers
CANDIDATES = 1024  # images that are compared with each other: time and memory grow with the pairs, not their square
MIN_IMAGES = 20
LEVELS = (0.1, 0.15, 0.2, 0.3, 0.5)  # quantiles at which the share of mismatched pairs is estimated


@dataclass(frozen=True)
class Mismatch:
    """
    probability_P  that the caption belongs to another image
    rank_P         0: the most suspicious
    all_P          whether all captions of the image are suspicious, rather than this one alone
    better_P       row of a caption that fits the image better
    share          estimated share of mismatched captions
    """

    probability_P: Floats
    rank_P: Ints
    all_P: NDArray[np.bool_]
    better_P: Ints
    share: float


def find_mismatches(
    vectors_IF: Floats, owner_P: Ints, texts: Sequence[str], *, seed: int, towers: Space | None = None
) -> Mismatch:
    """Score all captions.

    Args:
        vectors_IF: of the images; may have no columns if there are towers.
        owner_P: the image of each caption; every image has one at least.
        seed: for the folds and the comparisons.
        towers: image and text embeddings by a model that has both; a second space.
    """
    rng = np.random.default_rng(seed)
    fold_I = rng.permutation(len(vectors_IF)) % FOLDS
    texts_PD = reduce_texts(texts)
    spaces: list[Space] = []
    if vectors_IF.shape[1]:
        # Signed square roots: a few large features would otherwise dominate the components.
        roots_IF = np.sign(vectors_IF) * np.sqrt(np.abs(vectors_IF))
        spaces.append(cross_fit(reduce(roots_IF.astype(np.float32)), texts_PD, owner_P, fold_I))
    if towers:
        spaces.append(towers)
    signals_PK, shifted_PK, better_P = compare(spaces, texts_PD, owner_P, fold_I, rng)
    return judge(signals_PK, shifted_PK, better_P, owner_P)


# ---- Vectors ------------------------------------------------------------------------------------------------------


def reduce_texts(texts: Sequence[str]) -> Floats:
    """Return the principal components of the captions' TF-IDF vectors, [P, D]."""
    words = [Counter(split_words(text.casefold())) for text in texts]
    frequency = Counter(word for counts in words for word in counts)
    # A word of a single caption correlates with nothing. Ties in alphabetical order.
    frequent = sorted((word for word, count in frequency.items() if count > 1), key=lambda w: (-frequency[w], w))
    columns = {word: number for number, word in enumerate(frequent[:MAX_WORDS])}
    cells = [[(columns[word], count) for word, count in counts.items() if word in columns] for counts in words]
    values = np.array([1 + math.log(count) for row in cells for _, count in row], np.float32)
    indices = np.array([column for row in cells for column, _ in row], np.int32)
    starts = np.cumsum([0, *map(len, cells)])
    matrix_PV = scipy.sparse.csr_matrix((values, indices, starts), shape=(len(texts), len(columns)))
    weight_V = np.array([1 + math.log((1 + len(texts)) / (1 + frequency[word])) for word in columns], np.float32)
    matrix_PV = matrix_PV.multiply(weight_V)
    norm_P = np.sqrt(matrix_PV.multiply(matrix_PV).sum(1))
    return reduce(scipy.sparse.csr_matrix(matrix_PV.multiply(1 / np.maximum(norm_P, 1e-9))))


def reduce(matrix: Floats | scipy.sparse.csr_matrix) -> Floats:
    """Return the principal components of the rows, scaled to a standard deviation of 1 over all of them."""
    rows, columns = matrix.shape
    if not columns:
        return np.zeros((rows, 1), np.float32)
    exact: Any = matrix.astype(np.float64)
    products = exact.T @ exact
    mean = np.asarray(exact.mean(0)).ravel()
    dense = products.toarray() if scipy.sparse.issparse(products) else products
    first = max(0, columns - min(COMPONENTS, rows))
    _, axes = scipy.linalg.eigh(dense / rows - np.outer(mean, mean), subset_by_index=(first, columns - 1))
    # Largest first. An axis has no fixed sign: its largest entry is positive.
    axes = axes[:, ::-1]
    axes = (axes * np.sign(axes[np.abs(axes).argmax(0), np.arange(axes.shape[1])])).astype(np.float32)
    components: Floats = matrix @ axes - mean.astype(np.float32) @ axes
    return components / max(float(components.std()), 1e-9)


# ---- Spaces -------------------------------------------------------------------------------------------------------


def cross_fit(images_ID: Floats, texts_PD: Floats, owner_P: Ints, fold_I: Ints) -> Space:
    """Map the images and captions of each fold into a space that was fitted to the pairs of the other folds."""
    fold_P, width = fold_I[owner_P], images_ID.shape[1]
    # Counts, sums and products of each fold's pairs, as the products of rows (1, image, caption).
    products = []
    for fold in range(FOLDS):
        rows = np.flatnonzero(fold_P == fold)
        joined = np.hstack([np.ones((len(rows), 1)), images_ID[owner_P[rows]], texts_PD[rows]])
        products.append(joined.T @ joined)
    images = np.zeros((len(images_ID), min(SHARED, width, texts_PD.shape[1])), np.float32)
    texts = np.zeros((len(texts_PD), images.shape[1]), np.float32)
    for fold in range(FOLDS):
        others = np.sum(products[:fold] + products[fold + 1 :], axis=0)
        others /= others[0, 0]
        mean, covariance = others[0, 1:], others[1:, 1:] - np.outer(others[0, 1:], others[0, 1:])
        image_map, text_map = _correlate(covariance, width, images.shape[1])
        rows_i, rows_p = fold_I == fold, fold_P == fold
        images[rows_i] = _unit((images_ID[rows_i] - mean[:width]) @ image_map)
        texts[rows_p] = _unit((texts_PD[rows_p] - mean[width:]) @ text_map)
    return images, texts


def _correlate(covariance: Floats, width: int, size: int) -> Space:
    """Return the maps of images (the first `width` columns) and captions into the common space, by correlation."""
    whiten_a, whiten_b = _whiten(covariance[:width, :width]), _whiten(covariance[width:, width:])
    left, correlation, right = np.linalg.svd(whiten_a @ covariance[:width, width:] @ whiten_b)
    scale = correlation[:size]
    return whiten_a @ (left[:, :size] * scale), whiten_b @ (right[:size].T * scale)


def _whiten(covariance: Floats) -> Floats:
    """Return the inverse square root of a covariance with a ridge."""
    values, axes = np.linalg.eigh(covariance)
    values = np.maximum(values, 0)
    whitened: Floats = (axes / np.sqrt(values + RIDGE * values.mean() + 1e-9)) @ axes.T
    return whitened


def _unit(rows: Floats) -> Floats:
    unit: Floats = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)
    return unit


# ---- Comparison ---------------------------------------------------------------------------------------------------


def compare(
    spaces: Sequence[Space], texts_PD: Floats, owner_P: Ints, fold_I: Ints, rng: np.random.Generator
) -> tuple[Floats, Floats, Ints]:
    """Compare the captions and images of each fold, `CANDIDATES` images at a time.

    Returns:
        signals_PK: how well each caption fits its image: the score in each space, and the likeness to the image's other
            captions, if any image has several.
        shifted_PK: the same for the caption with another image.
        better_P: row of the caption that fits the image best among those of other images that it was compared with.
    """
    count_I = np.bincount(owner_P, minlength=len(fold_I))
    rows_of = np.split(np.argsort(owner_P, kind="stable"), np.cumsum(count_I)[:-1])  # image -> its captions
    signals_PK = np.zeros((len(owner_P), len(spaces) + bool((count_I > 1).any())))
    shifted_PK, better_P = np.zeros_like(signals_PK), np.zeros(len(owner_P), np.int64)
    for fold in range(FOLDS):
        members = rng.permutation(np.flatnonzero(fold_I == fold))
        for images in np.array_split(members, max(1, -(-len(members) // CANDIDATES))):
            rows = np.concatenate([rows_of[image] for image in images])
            # the image of each caption, and another image, numbered within this comparison
            home = np.repeat(np.arange(len(images)), count_I[images])
            other = (home + 1) % len(images)
            fit = np.zeros((len(rows), len(images)))
            for number, (images_IE, texts_PE) in enumerate(spaces):
                similarity = SHARPNESS * (texts_PE[rows] @ images_IE[images].T).astype(np.float64)
                signals_PK[rows, number], shifted_PK[rows, number] = _score(np.exp(similarity), home, other)
                fit += similarity
            if signals_PK.shape[1] > len(spaces):
                signals_PK[rows, -1], shifted_PK[rows, -1] = _agree(_unit(texts_PD[rows]), home, other)
            # the caption of another image that fits the image best
            fit[np.arange(len(rows)), home] = -np.inf
            better_P[rows] = rows[fit.argmax(0)][home]
    return signals_PK, shifted_PK, better_P


def _score(weight: Floats, home: Ints, other: Ints) -> tuple[Floats, Floats]:
    """Return the log-probability of each caption's image among images, plus that of the caption for the image.

    Other captions of the same image do not compete.

    Args:
        weight: exponentials of similarities, (captions, images).

    Returns:
        The scores with the caption's image, and with the other one. The true image does not compete with the other one:
        where a caption was swapped, its image is mostly in another fold.
    """
    rows = np.arange(len(home))
    right, wrong = weight[rows, home], weight[rows, other]
    same = np.zeros(weight.shape[1])
    np.add.at(same, home, right)
    rivals = weight.sum(0) - same  # of an image: captions of others
    all_images = weight.sum(1)
    score = np.log(right / (right + rivals[home])) + np.log(right / all_images)
    # `wrong` is among the rivals already
    shifted = np.log(wrong / rivals[other]) + np.log(wrong / np.maximum(all_images - right, wrong))
    return score, shifted


def _agree(unit: Floats, home: Ints, other: Ints) -> tuple[Floats, Floats]:
    """Return the mean cosine of each caption with the other captions of its image, and with those of another image.

    An image with a single caption has NaN.
    """
    totals = np.zeros((home.max() + 1, unit.shape[1]))
    np.add.at(totals, home, unit)
    counts = np.bincount(home)
    with np.errstate(invalid="ignore", divide="ignore"):
        same = (np.einsum("pd,pd->p", unit, totals[home]) - np.einsum("pd,pd->p", unit, unit)) / (counts[home] - 1)
    same[counts[home] == 1] = np.nan
    different = np.einsum("pd,pd->p", unit, totals[other]) / counts[other]
    return same, np.where(np.isnan(same), np.nan, different)


# ---- Judgment -----------------------------------------------------------------------------------------------------


def judge(signals_PK: Floats, shifted_PK: Floats, better_P: Ints, owner_P: Ints) -> Mismatch:
    """Return the probabilities that a caption is another image's, or that all captions of its image are."""
    count_I = np.bincount(owner_P)
    several_P = count_I[owner_P] > 1
    fit_P, alone_P, all_P = np.zeros((3, len(owner_P)))
    share_alone = 0.0
    # A caption alone. With other captions of its image, their likeness is a signal, too.
    for group in (several_P, ~several_P):
        if group.any():
            columns = ~np.isnan(signals_PK[group]).any(0)
            right, wrong = signals_PK[group][:, columns], shifted_PK[group][:, columns]
            weights = _separate(right, wrong)
            fit_P[group] = right @ weights
            alone_P[group], share = estimate_probability(fit_P[group], wrong @ weights)
            share_alone += share * group.mean()
    # All captions of an image: the mean of their scores.
    if several_P.any():
        score_I, shifted_I = (np.bincount(owner_P, values[:, 0]) / count_I for values in (signals_PK, shifted_PK))
        probability_I, share = estimate_probability(score_I, shifted_I)
        all_P = np.where(several_P, probability_I[owner_P], 0.0)
        fit_P = np.where(several_P, fit_P / fit_P[several_P].std() + score_I[owner_P] / score_I.std(), fit_P)
        share_alone = max(share_alone, share)
    probability_P = 1 - (1 - alone_P) * (1 - all_P)
    # The most probable first; equal ones by their fit. The inverse of this order has the ranks.
    rank_P = np.argsort(np.lexsort((fit_P, -probability_P)))
    return Mismatch(probability_P, rank_P, all_P > alone_P, better_P, share_alone)


def _separate(right: Floats, wrong: Floats) -> Floats:
    """Return the weights of the signals that separate true pairs from shifted ones best: logistic regression."""
    if right.shape[1] == 1:
        return np.ones(1)
    both = np.concatenate([right, wrong])
    mean, scale = both.mean(0), both.std(0) + 1e-9
    x = np.column_stack([(both - mean) / scale, np.ones(len(both))])
    y = np.repeat([1.0, 0.0], [len(right), len(wrong)])

    def loss(w: Floats) -> tuple[float, Floats]:
        z = x @ w
        gradient = x.T @ (1 / (1 + np.exp(-z)) - y) / len(y) + 1e-3 * w
        return float(np.mean(np.logaddexp(0, z) - y * z) + 5e-4 * w @ w), gradient

    weights: Floats = scipy.optimize.minimize(loss, np.zeros(x.shape[1]), jac=True, method="L-BFGS-B").x[:-1] / scale
    return weights


def estimate_probability(score: Floats, shifted: Floats) -> tuple[Floats, float]:
    """Return the probability of each score to be that of a mismatched pair, and the share of those.

    All pairs are a mixture of true pairs and mismatched ones, which are distributed like `shifted`. The share is the
    largest that fits the lower end of the mixture (Blanchard, Lee and Scott 2010). The ratio of the two densities comes
    from isotonic regression: it falls as the score rises.
    """
    below = [(float(np.sum(score <= np.quantile(shifted, level))), level * len(score)) for level in LEVELS]
    # One is added, so that few pairs do not give a share of zero by chance.
    share = min(1.0, *((count + 1) / (expected + 1) for count, expected in below))
    order = np.argsort(np.concatenate([score, shifted]), kind="stable")
    is_shifted = (order >= len(score)).astype(float)
    # (P + P,): the local share of shifted pairs, from 1 down to 0
    local = np.empty(len(order))
    local[order] = scipy.optimize.isotonic_regression(is_shifted, increasing=False).x
    local = np.clip(local[: len(score)], 0, 1 - 1e-6)
    ratio = local / (1 - local) * len(score) / len(shifted)
    return np.clip(share * ratio, 0.0, 1.0), float(share)
