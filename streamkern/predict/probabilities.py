"""Fit probabilities of classes to the values of a model, on rows not used in training.

    temperature   p = softmax(f / T)
    vector        p = softmax(a f + b), with an a and b for each class
    isotonic      for each class a monotone function of f, fitted to the indicator of the class; p
                  are the values of these functions, divided by their sum

The first two minimise the weighted log loss of the rows and of one additional row that belongs
equally to all classes. Without it, T would become 0 if all rows were classified correctly, and all
probabilities 0 or 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.array_types import Floats
from streamkern.basics.optional import on_demand

CALIBRATION_FOLDS = 5
"""Number of folds of the cross-validation that chooses a method."""
MIN_ROWS_TO_CHOOSE = 500
"""Smallest number of rows for the method vector, and so for a choice among methods."""
MIN_ROWS_OF_ISOTONIC = 1000
"""Smallest number of rows for the method isotonic, which overfits with fewer."""
MAX_VECTOR_CLASSES = 100
"""Largest number of classes for the method vector, which solves equations of twice that size."""
CALIBRATION_GAIN_SE = 2.0
"""Number of standard errors by which a method must be better than a simpler one."""
_MAX_NEWTON_STEPS, _MAX_HALVINGS = 50, 30


@dataclass(frozen=True, eq=False)
class Softmax:
    """Probabilities p = softmax(slope f + shift).

    slope : (c,) factor of each output
    shift : (c,) constant of each output
    """

    slope: Floats
    shift: Floats

    def __call__(self, F: npt.NDArray[Any]) -> Floats:
        """Return probabilities (n, c) of values (n, c)."""
        p: Floats = np.exp(self.log(F))
        p /= p.sum(axis=1, keepdims=True)
        return p

    def log(self, F: npt.NDArray[Any]) -> Floats:
        """Return the logarithms (n, c) of the probabilities, which do not underflow."""
        z: Floats = F * self.slope + self.shift
        z -= z.max(axis=1, keepdims=True)
        z -= np.log(np.exp(z).sum(axis=1, keepdims=True))
        return z

    @property
    def method(self) -> str:
        """Name of the method."""
        is_temperature = not self.shift.any() and not np.ptp(self.slope)
        return "temperature" if is_temperature else "vector"

    def arrays(self) -> dict[str, Floats]:
        """Return the arrays to store."""
        return {"slope": self.slope, "shift": self.shift}


@dataclass(frozen=True, eq=False)
class Isotonic:
    """Piecewise linear function for each class, constant outside of its knots.

    ends : (c + 1,) index of the first knot of each class, and the number of knots
    knots : (k,) arguments of the functions at the knots
    values : (k,) values of the functions at the knots
    """

    ends: npt.NDArray[np.int64]
    knots: Floats
    values: Floats

    method = "isotonic"

    def __call__(self, F: npt.NDArray[Any]) -> Floats:
        """Return probabilities (n, c) of values (n, c)."""
        p: Floats = np.empty(F.shape)
        for k in range(F.shape[1]):
            of_class = slice(self.ends[k], self.ends[k + 1])
            p[:, k] = np.interp(F[:, k], self.knots[of_class], self.values[of_class])
        p /= p.sum(axis=1, keepdims=True)
        return p

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays to store."""
        return {"ends": self.ends, "at": self.knots, "height": self.values}


Probabilities = Softmax | Isotonic


def probabilities_from_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> Probabilities | None:
    """Return the probabilities that are stored in `arrays`; None if there are none."""
    for kind, names in ((Softmax, ("slope", "shift")), (Isotonic, ("ends", "at", "height"))):
        if names[0] in arrays:
            return kind(*(np.asarray(arrays[name]) for name in names))
    return None


def fit_probabilities(
    F: npt.NDArray[Any], labels: npt.NDArray[np.int64], w: Floats | None = None
) -> Probabilities:
    """Fit the method with the lowest log loss, the simpler one unless the gain is significant.

    The methods are tried in the order of the module docstring, as far as there are enough rows for
    them. Each replaces the best one before it if its cross-validated log loss is significantly
    lower.

    F : (m, c) values
    labels : (m,) classes of the rows
    w : (m,) weights
    """
    F = F.astype(np.float64)
    m, c = F.shape
    w = np.ones(m) if w is None else w / w.mean()
    fits: list[Callable[..., Probabilities]] = [fit_temperature]
    if m >= MIN_ROWS_TO_CHOOSE and c <= MAX_VECTOR_CLASSES:
        fits.append(fit_vector)
    if m >= MIN_ROWS_OF_ISOTONIC:
        fits.append(fit_isotonic)
    best = fits.pop(0)
    best_losses = _cross_validated_losses(best, F, labels, w) if fits else np.zeros(m)
    for fit in fits:
        losses = _cross_validated_losses(fit, F, labels, w)
        gain = w * (best_losses - losses)
        if gain.mean() > CALIBRATION_GAIN_SE * gain.std(ddof=1) / np.sqrt(m):
            best, best_losses = fit, losses
    return best(F, labels, w)


def log_losses(p: Floats, labels: npt.NDArray[np.int64]) -> Floats:
    """Return -log p (n,) of each row's class; p is clipped at the smallest normal float."""
    label_probabilities = np.take_along_axis(p, labels[:, None], axis=1)[:, 0]
    losses: Floats = -np.log(np.maximum(label_probabilities, np.finfo(np.float64).tiny))
    return losses


def _cross_validated_losses(
    fit: Callable[..., Probabilities], F: Floats, labels: npt.NDArray[np.int64], w: Floats
) -> Floats:
    """Return the log loss (m,) of every row, predicted by a fit to the other folds."""
    fold, losses = np.empty(len(F), np.int64), np.empty(len(F))
    # Stratified by class.
    fold[np.argsort(labels, kind="stable")] = np.arange(len(F)) % CALIBRATION_FOLDS
    for k in range(CALIBRATION_FOLDS):
        test, train = fold == k, fold != k
        probabilities = fit(F[train], labels[train], w[train])
        losses[test] = log_losses(probabilities(F[test]), labels[test])
    return losses


def fit_temperature(
    F: Floats, labels: npt.NDArray[np.int64], w: Floats, shift: Floats | None = None
) -> Softmax:
    """Fit one slope of at least 0 for all classes. shift : (c,) fixed shifts; None for 0"""
    c = F.shape[1]
    Q, w = _smooth_targets(c, labels, w)
    shift = np.zeros(c) if shift is None else shift

    def objective(theta: Floats) -> tuple[float, Floats, Floats]:
        z = theta[0] * F + shift
        loss, p = _weighted_log_loss(z, Q, w)
        mean = (p * F).sum(axis=1)
        curvature = w @ ((p * F * F).sum(axis=1) - mean**2)
        return loss, np.array([w @ ((p - Q) * F).sum(axis=1)]), np.array([[curvature]])

    slope = max(_minimise(objective, np.ones(1))[0], 0.0)
    return Softmax(np.full(c, slope), shift)


def fit_vector(F: Floats, labels: npt.NDArray[np.int64], w: Floats) -> Softmax:
    """Fit a slope and a shift for each class, starting from the common slope."""
    c = F.shape[1]
    start = np.concatenate((fit_temperature(F, labels, w).slope, np.zeros(c)))
    Q, w = _smooth_targets(c, labels, w)

    def objective(theta: Floats) -> tuple[float, Floats, Floats]:
        loss, p = _weighted_log_loss(F * theta[:c] + theta[c:], Q, w)
        V = np.concatenate((p * F, p), axis=1)
        wV, residuals = V * w[:, None], (p - Q) * w[:, None]
        hessian = -V.T @ wV
        k, cross_terms = np.arange(c), (wV[:, :c]).sum(axis=0)
        hessian[k, k] += (wV[:, :c] * F).sum(axis=0)
        hessian[k, k + c] += cross_terms
        hessian[k + c, k] += cross_terms
        hessian[k + c, k + c] += wV[:, c:].sum(axis=0)
        return loss, np.concatenate(((residuals * F).sum(axis=0), residuals.sum(axis=0))), hessian

    theta = _minimise(objective, start)
    return Softmax(theta[:c], theta[c:])


def fit_isotonic(F: Floats, labels: npt.NDArray[np.int64], w: Floats) -> Isotonic:
    """Fit a monotone function by least squares, for each class separately."""
    regress = on_demand("scipy.optimize").isotonic_regression
    min_probability = 1.0 / (len(F) + 2)  # probability of a class without rows
    ends, knots, heights = [0], list[Floats](), list[Floats]()
    for k in range(F.shape[1]):
        values, inverse = np.unique(F[:, k], return_inverse=True)
        weights = np.bincount(inverse, w, len(values))
        has_weight = weights > 0
        shares = (
            np.bincount(inverse, w * (labels == k), len(values))[has_weight] / weights[has_weight]
        )
        fitted = np.clip(
            regress(shares, weights=weights[has_weight]).x, min_probability, 1 - min_probability
        )
        is_knot = np.ones(len(fitted), bool)  # first and last point of every constant interval
        is_knot[1:-1] = (fitted[1:-1] != fitted[:-2]) | (fitted[1:-1] != fitted[2:])
        knots.append(values[has_weight][is_knot])
        heights.append(fitted[is_knot])
        ends.append(ends[-1] + len(knots[-1]))
    return Isotonic(np.array(ends), np.concatenate(knots), np.concatenate(heights))


def _smooth_targets(c: int, labels: npt.NDArray[np.int64], w: Floats) -> tuple[Floats, Floats]:
    """Return targets (m, c) that include the additional row, and weights that sum to 1."""
    m = len(labels)
    Q = np.full((m, c), 1.0 / (c * (m + 1)))
    Q[np.arange(m), labels] += m / (m + 1)
    return Q, w / w.sum()


def _weighted_log_loss(z: Floats, Q: Floats, w: Floats) -> tuple[float, Floats]:
    """Return the weighted log loss of softmax(z) (m, c) for targets Q, and the softmax."""
    z = z - z.max(axis=1, keepdims=True)
    p = np.exp(z)
    total = p.sum(axis=1, keepdims=True)
    losses = np.log(total[:, 0]) - (Q * z).sum(axis=1)
    return float(w @ losses), p / total


def _minimise(objective: Callable[[Floats], tuple[float, Floats, Floats]], theta: Floats) -> Floats:
    """Return the minimiser of a convex function, by Newton's method with backtracking.

    objective : returns value, gradient (k,) and Hessian (k, k) of the function at a point (k,)
    theta : (k,) starting point
    """
    loss, gradient, hessian = objective(theta)
    for _ in range(_MAX_NEWTON_STEPS):
        # A small multiple of the identity makes a singular Hessian invertible.
        diagonal = np.arange(len(theta))
        hessian[diagonal, diagonal] += 1e-9 * max(float(np.trace(hessian)) / len(theta), 1e-30)
        step = np.linalg.solve(hessian, gradient)
        decrease = float(gradient @ step)
        if decrease <= 1e-14 * max(abs(loss), 1e-300):  # no more than rounding errors
            break
        length = 1.0
        for _ in range(_MAX_HALVINGS):
            trial = objective(theta - length * step)
            if trial[0] <= loss - 1e-4 * length * decrease:  # the Armijo condition
                break
            length /= 2
        else:  # no shorter step decreases the loss either
            break
        theta = theta - length * step
        loss, gradient, hessian = trial
    return theta
