"""Which rows are held out to choose a ridge, and the search over powers of ten.

What is summed over rows, as normal equations are, can be summed over some of them apart: then what
the others teach is measured on these without another pass. All rows made from one stored row fall
on the same side, or the copies of a row would tell how well it was learned by heart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

FOLDS = 5
SMALL = 1024
"""Centers up to which rows are held out in turn, a fifth at a time: sums for each of the folds cost
nothing there, and few rows are no measure. Above, one row in `PARTS` is held out for good."""
PARTS = 10
NOTABLE = 1e-3
"""Of an error: a search goes on for no less."""
TINY = 1e-300


def n_parts(p: int) -> int:
    """Parts of the rows that are held out in turn, for p centers."""
    return FOLDS if p <= SMALL else 1


def part_of(rows: npt.NDArray[np.int64], n_stored: int, n: int) -> npt.NDArray[np.int64]:
    """The part, 1 to n, in which each row is held out, or 0: by a hash of its stored row.

    rows : (m,) numbers of virtual rows, row v made from the stored row v mod n_stored.
    """
    x = (rows % n_stored).astype(np.uint64)
    # The finaliser of SplitMix64: neighbours, and rows in step with anything, are told apart.
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    part = (x ^ (x >> np.uint64(31))) % np.uint64(FOLDS if n == FOLDS else PARTS)
    return np.where(part < n, part + 1, 0).astype(np.int64)


def search(measure: Callable[[float], float], start: int, low: int, high: int) -> dict[int, float]:
    """Errors at powers of ten, by exponent: hundredfold steps both ways from `start` for as long as
    they gain a notable part, and then the neighbours of the best.

    Infinite where there was no answer. low, high : the last ones that are tried.
    """
    errors = {start: measure(10.0**start)}

    def try_at(at: int) -> bool:
        if at in errors or not low <= at <= high:
            return False
        least = min(errors.values())
        errors[at] = measure(10.0**at)
        return errors[at] < (1 - NOTABLE) * least or math.isinf(least)

    for step in (-2, 2):
        at = start + step
        while try_at(at):
            at += step
    best = min(errors, key=lambda at: errors[at])
    for at in (best - 1, best + 1):
        try_at(at)
    return dict(sorted(errors.items()))


def vertex(errors: Mapping[int, float]) -> float:
    """Exponent of the least error: of the parabola through its logarithm at three trials.

    In the middle is the best that was tried on both sides; at most one step away from it.
    """
    best = min(errors, key=lambda at: errors[at])
    inner = [
        at for at in errors if math.isfinite(sum(errors.get(at + k, math.inf) for k in (-1, 1)))
    ]
    if not inner:
        return float(best)
    middle = min(inner, key=lambda at: errors[at])
    below, least, above = (math.log(max(errors[middle + k], TINY)) for k in (-1, 0, 1))
    curvature = below - 2 * least + above
    if curvature <= 0:
        return float(best)
    return middle + min(max(0.5 * (below - above) / curvature, -1.0), 1.0)
