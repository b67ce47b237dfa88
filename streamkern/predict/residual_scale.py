"""Scale of a model's residuals as a function of x, for intervals of varying width.

For rows with features x_i and residuals r_i = |y_i - f(x_i)| (for targets on a log scale, the
distance of the logarithms), g is the kernel ridge regression of log r_i minus its mean, and
sigma(x) = exp g(x), which has no unit. The intervals f(x) +- s sigma(x) have the requested coverage
for any sigma, if s is the quantile of r_i / sigma(x_i) over rows that were used neither in training
nor for g (normalised conformal prediction: Papadopoulos, Gammerman and Vovk 2008).

The ridge and the kernel are chosen by the leave-one-out squared error, which one eigensystem gives
for all ridges. Then g is multiplied by the factor in [0, 1] that minimises this error. The factor
is set to 0, so that all intervals have the same width, unless the error is smaller than without g
by two standard errors. g is clipped to the range of its leave-one-out values at these rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.array_types import Floats

SCALE_RIDGES = 10.0 ** np.arange(-2, 3.5, 0.5)
"""Ridges that are tried, relative to the mean k(x, x)."""
SCALE_FLOOR = 0.01
"""Fraction of the median of r that is added to all r, since r can be near 0 by chance. If 1/1000 of
the mean is larger than the median, it replaces the median."""
RESIDUAL_SCALE_GAIN_SE = 2.0
"""Number of standard errors by which g must be better than 0."""
MIN_ROWS_OF_SCALE = 20
"""Smallest number of rows to which g is fitted; with fewer, it is 0."""


@dataclass(frozen=True, eq=False)
class ResidualScale:
    """Fitted function g(x) = sum_j weights[j] k(x, points[j]); see the module docstring.

    points : (q, d) rows, scaled as for the kernel; (0, d) if g is 0
    weights : (q, c) weights of the rows
    low : (c,) lower bound of g, to which g is clipped
    high : (c,) upper bound of g
    bandwidth : bandwidth of the Laplace kernel k, or 0 for the model's kernel
    """

    points: npt.NDArray[Any]
    weights: Floats
    low: Floats
    high: Floats
    bandwidth: float

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> ResidualScale:
        """Return the scale from the result of `arrays`."""
        points, weights, low, high = (arrays[k] for k in ("points", "weights", "low", "high"))
        return cls(points, weights, low, high, float(arrays["bandwidth"][0]))

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays to store."""
        bandwidth = np.array([self.bandwidth])
        return {
            "points": self.points, "weights": self.weights, "low": self.low, "high": self.high,
            "bandwidth": bandwidth,
        }  # fmt: skip

    def sigma(self, G: npt.NDArray[Any]) -> Floats:
        """Return sigma (n, c) for g (n, c) as evaluated by the kernel."""
        sigma: Floats = np.exp(np.clip(G.astype(np.float64), self.low, self.high))
        return sigma


def fit_residual_scale(
    X: npt.NDArray[Any], kernels: Mapping[float, Floats], residuals: Floats, w: Floats | None
) -> ResidualScale:
    """Fit g to rows X (q, d) with absolute residuals (q, c) and weights w (q,) or None.

    kernels : K(X, X) (q, q) by bandwidth; the best bandwidth is chosen. The eigensystem of each K
        takes 9 q^3 FLOPs, and the memory of another (q, q) array.
    """
    q, c = residuals.shape
    best = ResidualScale(X[:0], np.zeros((0, c)), np.zeros(c), np.zeros(c), 0.0)
    if q < MIN_ROWS_OF_SCALE:
        return best
    w = np.ones(q) if w is None else w / w.mean()
    logs = _logs(residuals, w)
    logs -= w @ logs / w.sum()
    squares = w @ logs**2
    unit = np.where(squares > 0, squares, 1.0)
    min_error = float((squares / unit).sum())
    for bandwidth, K in kernels.items():
        weights, loo_values = _leave_one_out_fit(K, logs, w)
        factor = _shrinkage(logs, loo_values, w)
        loo_values *= factor
        error = float((w @ (logs - loo_values) ** 2 / unit).sum())
        if factor.any() and error < min_error:
            min_error = error
            low = loo_values.min(axis=0)
            high = loo_values.max(axis=0)
            best = ResidualScale(X, weights * factor, low, high, bandwidth)
    return best


def _logs(residuals: Floats, w: Floats) -> Floats:
    """Return log(residuals + floor), (q, c); see `SCALE_FLOOR`."""
    mean = w @ residuals / w.sum()
    floor = SCALE_FLOOR * np.maximum(np.median(residuals, axis=0), 1e-3 * mean)
    logs: Floats = np.log(residuals + np.where(floor > 0, floor, 1.0))
    return logs


def _leave_one_out_fit(K: Floats, logs: Floats, w: Floats) -> tuple[Floats, Floats]:
    """Return weights (q, c) and leave-one-out values (q, c), by the best ridge of each output.

    K is (q, q), logs (q, c), and w (q,). With D = diag(sqrt(w)), D K D has eigenvalues lam, and the
    fit retains the fraction lam / (lam + ridge) of D logs along each eigenvector. The leave-one-out
    error of a row with leverage h is its error divided by 1 - h.
    """
    D = np.sqrt(w)[:, None]
    eigenvalues, U = np.linalg.eigh(D * K * D.T)
    eigenvalues = np.maximum(eigenvalues, 0.0)
    projections, squares = U.T @ (D * logs), U**2
    unit = float(np.diagonal(K).mean())
    min_errors = np.full(logs.shape[1], np.inf)
    best_ridges, loo_errors = np.ones(logs.shape[1]), np.empty_like(logs)
    for ridge in SCALE_RIDGES * unit:
        residual_fractions = ridge / (eigenvalues + ridge)
        row_errors = (
            U
            @ (residual_fractions[:, None] * projections)
            / (squares @ residual_fractions)[:, None]
        )
        error = np.square(row_errors).sum(axis=0)
        is_better = error < min_errors
        min_errors[is_better] = error[is_better]
        best_ridges[is_better] = ridge
        loo_errors[:, is_better] = row_errors[:, is_better]
    weights = D * (U @ (projections / (eigenvalues[:, None] + best_ridges)))
    return weights, logs - loo_errors / D


def _shrinkage(logs: Floats, loo_values: Floats, w: Floats) -> Floats:
    """Return the best factors (c,) of the leave-one-out values; 0 if the gain is insignificant."""
    squares = w @ loo_values**2
    factor = np.clip((w @ (logs * loo_values)) / np.where(squares > 0, squares, 1.0), 0.0, 1.0)
    gain = w[:, None] * (logs**2 - (logs - factor * loo_values) ** 2)
    standard_error = gain.std(axis=0, ddof=1) / np.sqrt(len(logs))
    return np.where(gain.mean(axis=0) > RESIDUAL_SCALE_GAIN_SE * standard_error, factor, 0.0)
