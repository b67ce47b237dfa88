"""How far a model misses rows in one place, beside others: for intervals as wide as x is hard.

Of rows with features x_i that the model misses by r_i = |y_i - f(x_i)|, g is the kernel ridge
regression of log r_i less its mean, and sigma(x) = exp g(x), a number without a unit. The intervals
f(x) +- q sigma(x) hold as often as they are to, whatever sigma is, if q is the quantile of
r_i / sigma(x_i) of other rows, neither the model's nor these (normalised conformal prediction:
Papadopoulos, Gammerman and Vovk 2008).

The ridge, and of several kernels the one, are those of the least squared error of each row by the
others, which one eigensystem gives for all ridges. What the rows do not surely tell is not
believed: g is shrunk by the factor that is best for rows by the others, and is 0, so that all
intervals are as wide, unless it then is better than 0 by two standard errors. It stays within what
it was for these rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamkern.basics.array_types import Floats
from streamkern.predict.intervals import Intervals, without_prefix

RESIDUAL_SCALE_PREFIX = "normalised_"
"""Of the names of its arrays, among those of a calibration."""
SCALE_RIDGES = 10.0 ** np.arange(-2, 3.5, 0.5)
"""Beside the mean k(x, x)."""
SCALE_FLOOR = 0.01
"""Of the median of r, added to all, as a row that is met by chance is not easy."""
RESIDUAL_SCALE_GAIN_SE = 2.0
"""Standard errors by which g has to be better than 0."""
MIN_ROWS_OF_SCALE = 20
"""Rows that are asked for a difference between rows."""


@dataclass(frozen=True, eq=False)
class ResidualScale:
    """points : (q, d) rows, scaled as the kernel sees them. weights : (q, c) of k(x, points) in g.
    low, high : (c,) between which g is taken to be. bandwidth : of the Laplace kernel that is k, or
    0 for that of the model."""

    points: npt.NDArray[Any]
    weights: Floats
    low: Floats
    high: Floats
    bandwidth: float

    def spread(self, G: npt.NDArray[Any]) -> Floats:
        """sigma (n, c) of g (n, c) as the kernel has it."""
        found: Floats = np.exp(np.clip(G.astype(np.float64), self.low, self.high))
        return found


@dataclass(frozen=True, eq=False)
class Normalised:
    """difficulty : by one half of the rows. intervals : of the others, by r / sigma."""

    difficulty: ResidualScale
    intervals: Intervals

    @classmethod
    def kept(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Normalised | None:
        """What `arrays` gave, or None where it is not among them."""
        own = without_prefix(arrays, RESIDUAL_SCALE_PREFIX)
        if not own:
            return None
        bandwidth = float(own["bandwidth"][0])
        told = ResidualScale(own["points"], own["weights"], own["low"], own["high"], bandwidth)
        scores = without_prefix(own, "of_")
        return cls(told, Intervals.kept(scores))

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What it is made from."""
        own = {
            name: getattr(self.difficulty, name) for name in ("points", "weights", "low", "high")
        }
        own |= {"bandwidth": np.array([self.difficulty.bandwidth])}
        own |= {f"of_{name}": array for name, array in self.intervals.arrays().items()}
        return {f"{RESIDUAL_SCALE_PREFIX}{name}": array for name, array in own.items()}


class Regression(NamedTuple):
    """place : of the kernel among those tried; None where no rows are surely harder than others.
    weights, low, high : see `ResidualScale`."""

    place: int | None
    weights: Floats
    low: Floats
    high: Floats


def fit_difficulty(kernels: Sequence[Floats], missed: Floats, w: Floats | None) -> Regression:
    """g of rows that were missed by `missed` (q, c), with weights w (q,) or None.

    kernels : K (q, q) of the same rows, one or more. A q x q matrix more is held, and 9 q^3 FLOPs
    are for the eigensystem of each.
    """
    q, c = missed.shape
    best = Regression(None, np.zeros((0, c)), np.zeros(c), np.zeros(c))
    if q < MIN_ROWS_OF_SCALE:
        return best
    w = np.ones(q) if w is None else w / w.mean()
    logs = _logs(missed, w)
    logs -= w @ logs / w.sum()
    least = w @ logs**2
    told = np.where(least > 0, least, 1.0)
    reached = float((least / told).sum())
    for place, K in enumerate(kernels):
        weights, by_others = _by_others(K, logs, w)
        shrunk = _shrink(logs, by_others, w)
        by_others *= shrunk
        error = float((w @ (logs - by_others) ** 2 / told).sum())
        if shrunk.any() and error < reached:
            reached = error
            best = Regression(place, weights * shrunk, by_others.min(axis=0), by_others.max(axis=0))
    return best


def _logs(missed: Floats, w: Floats) -> Floats:
    mean = w @ missed / w.sum()
    floor = SCALE_FLOOR * np.maximum(np.median(missed, axis=0), 1e-3 * mean)
    logs: Floats = np.log(missed + np.where(floor > 0, floor, 1.0))
    return logs


def _by_others(K: Floats, logs: Floats, w: Floats) -> tuple[Floats, Floats]:
    """(weights (q, c), the values of rows by the others (q, c)), by the best ridge of each output.

    With D^2 the weights of the rows, D K D has the eigenvalues lam, and of D logs the fit has the
    shares lam / (lam + ridge); a row by the others is off by 1 / (1 - h) times what it is off by.
    """
    D = np.sqrt(w)[:, None]
    lam, U = np.linalg.eigh(D * K * D.T)
    lam = np.maximum(lam, 0.0)
    along, squares = U.T @ (D * logs), U**2
    unit = float(np.diagonal(K).mean())
    least = np.full(logs.shape[1], np.inf)
    ridges, errors = np.ones(logs.shape[1]), np.empty_like(logs)
    for ridge in SCALE_RIDGES * unit:
        left = ridge / (lam + ridge)
        off = U @ (left[:, None] * along) / (squares @ left)[:, None]
        error = np.square(off).sum(axis=0)
        better = error < least
        least[better], ridges[better], errors[:, better] = error[better], ridge, off[:, better]
    weights = D * (U @ (along / (lam[:, None] + ridges)))
    return weights, logs - errors / D


def _shrink(logs: Floats, by_others: Floats, w: Floats) -> Floats:
    """(c,) the factors that are best for the values by others; 0 where none surely is better."""
    squares = w @ by_others**2
    factor = np.clip((w @ (logs * by_others)) / np.where(squares > 0, squares, 1.0), 0.0, 1.0)
    gain = w[:, None] * (logs**2 - (logs - factor * by_others) ** 2)
    sure = gain.mean(axis=0) > RESIDUAL_SCALE_GAIN_SE * gain.std(axis=0, ddof=1) / np.sqrt(
        len(logs)
    )
    return np.where(sure, factor, 0.0)
