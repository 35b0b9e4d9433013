"""What more labels would gain, by a learning curve: a score as a line in the logarithm of the number of labeled photos.

- From the registry, if a run has versions that were trained on `MIN_SIZES` different numbers of images or more, and
  scored on the same test.
- Otherwise from the labels: held-out photos get the caption of the most similar other photo, drawn from more and more
  of them. This is about captions of similar photos, which a model's need not follow.

Shape suffixes: N labeled photos, F features, D draws, S sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vlp_models.contrib.label.similar import FloatArray
from vlp_models.metrics.cider_d import CiderD, DocumentFrequencies
from vlp_models.metrics.coco_tools import ptb_like

MIN_SIZES = 3  # different numbers of training images
MIN_LABELS = 40
SHARES = (0.125, 0.25, 0.5, 1.0)  # of the photos that are not held out
HELD_OUT, MAX_HELD_OUT = 0.2, 200  # a share, and a number
DRAWS = 40
LEVEL = 0.95


@dataclass(frozen=True, kw_only=True)
class DoublingGain:
    """What twice the labels add to a score, with the ends of an interval of `LEVEL`."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:+.1f} ({self.low:+.1f} to {self.high:+.1f})"


@dataclass(frozen=True, kw_only=True)
class VersionScores:
    """Scores of a run's versions on one test. sizes: images of their training splits."""

    run: str
    metric: str
    test: str
    sizes: Sequence[int]
    scores: Sequence[float]


def fit_versions(versions: VersionScores) -> DoublingGain | None:
    """Fit a line to the scores over the logarithm of the sizes, with Student's interval; None with too few sizes."""
    from scipy import stats

    if len(set(versions.sizes)) < MIN_SIZES:
        return None
    line = stats.linregress(np.log2(versions.sizes), versions.scores)
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(versions.sizes) - 2) * line.stderr)
    return DoublingGain(value=float(line.slope), low=float(line.slope) - half, high=float(line.slope) + half)


def fit_labels(
    captions: Mapping[str, Sequence[str]], features: Mapping[str, FloatArray], seed: int = 0
) -> DoublingGain | None:
    """Fit the curve of captions of similar photos, CIDEr-D against a held-out photo's own captions.

    Each draw holds out other photos and shuffles the rest; the interval is the middle `LEVEL` of the draws' slopes.
    None with fewer labels than `MIN_LABELS`.
    """
    photos = [photo for photo, texts in captions.items() if texts and photo in features]
    if len(photos) < MIN_LABELS:
        return None
    words = {photo: [ptb_like(text).split() for text in captions[photo]] for photo in photos}
    scorer = CiderD(DocumentFrequencies.count(words.values()), words.__getitem__)
    features_NF = np.stack([features[photo] for photo in photos])
    rng = np.random.default_rng(seed)
    held_out = min(MAX_HELD_OUT, round(HELD_OUT * len(photos)))
    sizes = sorted({max(2, round(share * (len(photos) - held_out))) for share in SHARES})
    scores_DS = np.zeros((DRAWS, len(sizes)))
    for draw in range(DRAWS):
        order = rng.permutation(len(photos))
        tested, rest = order[:held_out], order[held_out:]
        # (tested, F) @ (F, rest): the columns of the first s photos are those of a listing of s labels.
        similarity = features_NF[tested] @ features_NF[rest].T
        nearest = np.stack([rest[similarity[:, :size].argmax(1)] for size in sizes], axis=1)
        for row, photo in enumerate(tested):
            # One candidate per size.
            scores_DS[draw] += scorer.score(photos[photo], [words[photos[other]][0] for other in nearest[row]])
    scores_DS *= 100 / held_out  # CIDEr-D is 0 to 10 here, and reported as 0 to 1,000
    # (S, D): a line for each draw; the slope is the gain of a doubling.
    slopes_D = np.polyfit(np.log2(sizes), scores_DS.T, 1)[0]
    low, high = np.quantile(slopes_D, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return DoublingGain(value=float(slopes_D.mean()), low=float(low), high=float(high))


def describe_gain(
    versions: VersionScores | None, captions: Mapping[str, Sequence[str]], features: Mapping[str, FloatArray]
) -> str:
    """Return what as many labels again would add, and what this follows from; or that there are too few."""
    labels = sum(photo in features for photo in captions)
    if versions and (gain := fit_versions(versions)):
        distinct = len(set(versions.sizes))
        return (
            f"Another {labels:,} labels: {versions.metric} {gain}, from versions of {versions.run} trained on "
            f"{distinct} different numbers of images and scored on {versions.test}."
        )
    gain = fit_labels(captions, features)
    if gain is None:
        return f"What more labels would gain: {MIN_LABELS} labels are needed for an estimate, {labels:,} are there."
    caveat = "" if gain.low > 0 else " No gain is shown: the interval includes 0."
    return (
        f"Another {labels:,} labels: CIDEr-D {gain} for captions of similar photos, cross-validated on these "
        f"{labels:,}; a trained model may gain more or less.{caveat}"
    )
