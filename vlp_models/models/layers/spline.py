"""Cubic splines as matrices, for tables of positions that are read at another resolution."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def spline_matrix(places: Array, wanted: Array) -> Array:
    """[len(wanted), len(places)]: times the values at `places`, which rise, it gives those at `wanted`.

    The interpolating cubic spline, not-a-knot at both ends. Beyond the ends it stays what it is there.
    With fewer than four places: straight lines.
    """
    inside: Any = np.clip(wanted, places[0], places[-1])
    if len(places) < 4:
        return np.asarray([np.interp(inside, places, row) for row in np.eye(len(places))]).T
    knots = np.concatenate([[places[0]] * 4, places[2:-2], [places[-1]] * 4])
    basis: Any = np.linalg.solve(_basis(knots, places).T, _basis(knots, inside).T).T
    return basis


def _basis(knots: Array, at: Array) -> Array:
    """[len(at), len(knots) - 4]: the cubic B-splines of these knots (Cox and de Boor)."""
    last = np.searchsorted(knots, knots[-1]) - 1  # the last interval that is one holds its right end, too
    interval = np.minimum(np.searchsorted(knots, at, side="right") - 1, last)
    basis = np.zeros((len(at), len(knots) - 1))
    basis[np.arange(len(at)), interval] = 1.0
    for degree in range(1, 4):
        count = basis.shape[1] - 1
        left, right = knots[:count], knots[degree + 1 : degree + 1 + count]
        rising = _share(at[:, None] - left, knots[degree : degree + count] - left)
        falling = _share(right - at[:, None], right - knots[1 : count + 1])
        basis = rising * basis[:, :-1] + falling * basis[:, 1:]
    return basis


def _share(part: Array, whole: Array) -> Array:
    return np.divide(
        part, whole, out=np.zeros(np.broadcast(part, whole).shape), where=np.broadcast_to(whole > 0, part.shape)
    )
