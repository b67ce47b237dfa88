"""Scale of a model's residuals as a function of x, for intervals that widen with difficulty.

For rows with features x_i and residuals r_i = |y_i - f(x_i)|, g is the kernel ridge regression of
log r_i minus its mean, and sigma(x) = exp g(x), which has no unit. The intervals f(x) +- q sigma(x)
have the requested coverage for any sigma, if q is the quantile of r_i / sigma(x_i) over other rows,
used neither in training nor for g (normalised conformal prediction: Papadopoulos, Gammerman and
Vovk 2008).

The ridge and the kernel are chosen by the leave-one-out squared error, which one eigensystem gives
for all ridges. Insignificant structure is dropped: g is multiplied by the factor that is best in
leave-one-out, and is 0, so that all intervals are equally wide, unless it is then better than 0 by
two standard errors. It is clipped to its range over these rows.
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
"""Prefix of the names of its arrays, among those of a calibration."""
SCALE_RIDGES = 10.0 ** np.arange(-2, 3.5, 0.5)
"""Ridges that are tried, relative to the mean k(x, x)."""
SCALE_FLOOR = 0.01
"""Fraction of the median of r added to all r: a row predicted well by chance is not easy."""
RESIDUAL_SCALE_GAIN_SE = 2.0
"""Standard errors by which g must be better than 0."""
MIN_ROWS_OF_SCALE = 20
"""Smallest number of rows for fitting differences between rows."""


@dataclass(frozen=True, eq=False)
class ResidualScale:
    """Fitted g.

    points : (q, d) rows, scaled as for the kernel
    weights : (q, c) of k(x, points) in g
    low, high : (c,) range that g is clipped to
    bandwidth : of the Laplace kernel k, or 0 for the model's kernel
    """

    points: npt.NDArray[Any]
    weights: Floats
    low: Floats
    high: Floats
    bandwidth: float

    def spread(self, G: npt.NDArray[Any]) -> Floats:
        """Return sigma (n, c) for g (n, c) as evaluated by the kernel."""
        found: Floats = np.exp(np.clip(G.astype(np.float64), self.low, self.high))
        return found


@dataclass(frozen=True, eq=False)
class Normalised:
    """Normalised intervals.

    difficulty : fitted on one half of the rows
    intervals : of the other half, by r / sigma
    """

    difficulty: ResidualScale
    intervals: Intervals

    @classmethod
    def kept(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Normalised | None:
        """Return the normalised intervals stored in `arrays`; None if they hold none."""
        own = without_prefix(arrays, RESIDUAL_SCALE_PREFIX)
        if not own:
            return None
        bandwidth = float(own["bandwidth"][0])
        told = ResidualScale(own["points"], own["weights"], own["low"], own["high"], bandwidth)
        scores = without_prefix(own, "of_")
        return cls(told, Intervals.kept(scores))

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays to store, by prefixed names."""
        own = {
            name: getattr(self.difficulty, name) for name in ("points", "weights", "low", "high")
        }
        own |= {"bandwidth": np.array([self.difficulty.bandwidth])}
        own |= {f"of_{name}": array for name, array in self.intervals.arrays().items()}
        return {f"{RESIDUAL_SCALE_PREFIX}{name}": array for name, array in own.items()}


class Regression(NamedTuple):
    """Result of `fit_difficulty`.

    place : index of the chosen kernel; None if no rows are significantly harder than others
    weights, low, high : see `ResidualScale`
    """

    place: int | None
    weights: Floats
    low: Floats
    high: Floats


def fit_difficulty(kernels: Sequence[Floats], missed: Floats, w: Floats | None) -> Regression:
    """Fit g to rows with absolute residuals `missed` (q, c) and weights w (q,) or None.

    kernels : K (q, q) of the same rows, one or more. Another q x q matrix is held, and the
    eigensystem of each K takes 9 q^3 FLOPs.
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
    """Return weights (q, c) and leave-one-out values (q, c), by the best ridge of each output.

    With D^2 the weights of the rows, D K D has eigenvalues lam, and the fit retains the fraction
    lam / (lam + ridge) of D logs along each eigenvector; the leave-one-out residual of a row is its
    residual times 1 / (1 - h), h its leverage.
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
    """Return the best factors (c,) of the leave-one-out values; 0 if the gain is insignificant."""
    squares = w @ by_others**2
    factor = np.clip((w @ (logs * by_others)) / np.where(squares > 0, squares, 1.0), 0.0, 1.0)
    gain = w[:, None] * (logs**2 - (logs - factor * by_others) ** 2)
    sure = gain.mean(axis=0) > RESIDUAL_SCALE_GAIN_SE * gain.std(axis=0, ddof=1) / np.sqrt(
        len(logs)
    )
    return np.where(sure, factor, 0.0)
