"""Which slices of the test set got better or worse between two models, with intervals corrected for their number.

The gate asks about the whole test; a model that gains on it may lose on `question_type=how many`. All intervals hold
together with 95% probability (Bonferroni). They are over test images: another seed of the same run is not in them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from vlp_models.contrib.bisect.decision import select_items
from vlp_models.errors import DataError
from vlp_models.metrics.bootstrap import MIN_GROUPS
from vlp_models.metrics.gain import gain_over_seeds
from vlp_models.params.operations import PromotionParams
from vlp_models.registry.promotion.gate import Measurement, NotComparableError, check_comparable

ERROR = 0.05  # of all intervals together
MAX_SLICES = 20  # more would take minutes


@dataclass(frozen=True, kw_only=True)
class SliceGain:
    """The gain on a slice, negative if worse, with its simultaneous 95% interval; over how many test images."""

    name: str
    images: int
    gain: float
    low: float
    high: float

    @property
    def change(self) -> Literal["better", "worse", "undecided", "unchanged"]:
        if self.low == self.high == 0:  # no item changed
            return "unchanged"
        if self.low > 0:
            return "better"
        return "worse" if self.high < 0 else "undecided"

    def __str__(self) -> str:
        return f"{self.name} {self.gain:+.2f} ({self.low:+.2f} to {self.high:+.2f})"


def compare_slices(
    after: Measurement, before: Measurement, params: PromotionParams, *, sign: float = 1.0
) -> list[SliceGain]:
    """Return the gain on every slice with at least `MIN_GROUPS` images, the `MAX_SLICES` largest, the worst first.

    Args:
        sign: -1 if lower values of the metric are better.

    Raises:
        DataError: the two were not measured on the same test by the same scorer.
    """
    try:
        check_comparable(after, before)
    except NotComparableError as error:
        raise DataError(str(error)) from None
    new, old = after.evidence, before.evidence
    items_of: dict[str, set[str]] = {}
    for item, names in zip(new.items, after.slices, strict=True):
        for name in names:
            items_of.setdefault(name, set()).add(item)
    # Slices of the same items are one; that of all items is the whole test, which is the gate's question.
    names_of: dict[frozenset[str], list[str]] = {}
    for name, items in sorted(items_of.items()):
        if len(items) < len(new.items):
            names_of.setdefault(frozenset(items), []).append(name)
    largest = sorted(names_of.items(), key=lambda entry: -len(entry[0]))[:MAX_SLICES]
    sides = [(_join(names), select_items(new, items), select_items(old, items)) for items, names in largest]
    sides = [(name, a, b) for name, a, b in sides if len(set(a.groups)) >= MIN_GROUPS]
    alpha = ERROR / 2 / max(1, len(sides))  # beyond each end of one interval
    gains = []
    for name, a, b in sides:
        # As many draws as put ten of them beyond the end.
        resamples = max(params.resamples, math.ceil(10 / alpha))
        gain = gain_over_seeds([a], [b], seed_std=0.0, resamples=resamples, seed=params.seed, sign=sign)
        if gain is not None and gain.is_finite:
            low, high = gain.interval(alpha)
            gains.append(SliceGain(name=name, images=gain.groups, gain=gain.value, low=low, high=high))
    return sorted(gains, key=lambda gain: gain.gain)


def _join(names: list[str]) -> str:
    first, *same = names
    return f"{first} (also {', '.join(same)})" if same else first


def describe_slices(gains: Iterable[SliceGain]) -> str:
    """Return what got better and worse in a sentence; empty if there are no slices."""
    by_change: dict[str, list[str]] = defaultdict(list)
    for gain in gains:
        by_change[gain.change].append(str(gain))
    named = [f"{change}: {', '.join(by_change[change])}" for change in ("better", "worse") if change in by_change]
    counted = [f"{len(by_change[name])} {name}" for name in ("undecided", "unchanged") if name in by_change]
    return "; ".join([*named, *counted])
