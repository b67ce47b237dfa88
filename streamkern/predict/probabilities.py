"""Probabilities of classes from the values of a model, by rows that it has not learned from.

    temperature   p = softmax(f / T)
    vector        p = softmax(a f + b), of each class its own a and b
    isotonic      of each class a monotone function of f, fitted to whether a row is of it; these
                  divided by their sum

The first two are the least weighted log loss of the rows and of one more that is of all classes
alike: without it, rows that are all told right would make T zero and every answer certain.
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
MIN_ROWS_TO_CHOOSE = 500
"""Rows below which there is no choice among the ways."""
FEWEST_MONOTONE = 1000
"""Rows below which a monotone function of any form follows single rows."""
MAX_VECTOR_CLASSES = 100
"""With their own a and b; the equations are of twice as many."""
CALIBRATION_GAIN_SE = 2.0
"""Standard errors by which a way has to be better than a simpler one."""
_NEWTON_STEPS, _HALVINGS = 50, 30


@dataclass(frozen=True, eq=False)
class Softmax:
    """slope, shift : (c,), p = softmax(slope f + shift)."""

    slope: Floats
    shift: Floats

    def __call__(self, F: npt.NDArray[Any]) -> Floats:
        """(n, c) probabilities of values (n, c)."""
        p: Floats = np.exp(self.log(F))
        p /= p.sum(axis=1, keepdims=True)
        return p

    def log(self, F: npt.NDArray[Any]) -> Floats:
        """(n, c) their logarithms, also of those that are 0 but for rounding."""
        z: Floats = F * self.slope + self.shift
        z -= z.max(axis=1, keepdims=True)
        z -= np.log(np.exp(z).sum(axis=1, keepdims=True))
        return z

    @property
    def way(self) -> str:
        """Its name."""
        alike = not self.shift.any() and not np.ptp(self.slope)
        return "temperature" if alike else "vector"

    def arrays(self) -> dict[str, Floats]:
        """What it is made from."""
        return {"slope": self.slope, "shift": self.shift}


@dataclass(frozen=True, eq=False)
class Isotonic:
    """ends : (c + 1,) where the points of each class begin and end; at, height : (k,) them, between
    which it is linear, and outside of which constant."""

    ends: npt.NDArray[np.int64]
    at: Floats
    height: Floats

    way = "isotonic"

    def __call__(self, F: npt.NDArray[Any]) -> Floats:
        """(n, c) probabilities of values (n, c)."""
        p: Floats = np.empty(F.shape)
        for k in range(F.shape[1]):
            own = slice(self.ends[k], self.ends[k + 1])
            p[:, k] = np.interp(F[:, k], self.at[own], self.height[own])
        p /= p.sum(axis=1, keepdims=True)
        return p

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What it is made from."""
        return {"ends": self.ends, "at": self.at, "height": self.height}


Probabilities = Softmax | Isotonic


def kept_probabilities(arrays: Mapping[str, npt.NDArray[Any]]) -> Probabilities | None:
    """Those of which `arrays` are, or None where they are of none."""
    for kind, names in ((Softmax, ("slope", "shift")), (Isotonic, ("ends", "at", "height"))):
        if names[0] in arrays:
            return kind(*(np.asarray(arrays[name]) for name in names))
    return None


def fit_probabilities(
    F: npt.NDArray[Any], labels: npt.NDArray[np.int64], w: Floats | None = None
) -> Probabilities:
    """Of the ways the first that no later one is surely better than, by the log loss of rows that
    it is not fitted to. F : (m, c) values of rows of these classes (m,), w : (m,) weights."""
    F = F.astype(np.float64)
    m, c = F.shape
    w = np.ones(m) if w is None else w / w.mean()
    ways: list[Callable[..., Probabilities]] = [temperature]
    if m >= MIN_ROWS_TO_CHOOSE and c <= MAX_VECTOR_CLASSES:
        ways.append(vector)
    if m >= FEWEST_MONOTONE:
        ways.append(isotonic)
    best = ways[0]
    if len(ways) > 1:
        losses = [_missed(way, F, labels, w) for way in ways]
        least = losses[0]
        for way, loss in zip(ways[1:], losses[1:], strict=True):
            gain = w * (least - loss)
            if gain.mean() > CALIBRATION_GAIN_SE * gain.std(ddof=1) / np.sqrt(m):
                best, least = way, loss
    return best(F, labels, w)


def log_losses(p: Floats, labels: npt.NDArray[np.int64]) -> Floats:
    """(n,) -log of the probability of the class of each row, at least the smallest above 0."""
    told = np.take_along_axis(p, labels[:, None], axis=1)[:, 0]
    losses: Floats = -np.log(np.maximum(told, np.finfo(np.float64).tiny))
    return losses


def _missed(
    way: Callable[..., Probabilities], F: Floats, labels: npt.NDArray[np.int64], w: Floats
) -> Floats:
    """The log loss of every row, by what is fitted to the folds it is not in."""
    fold = np.empty(len(F), np.int64)
    fold[np.argsort(labels, kind="stable")] = (
        np.arange(len(F)) % CALIBRATION_FOLDS
    )  # of each class its share
    losses = np.empty(len(F))
    for k in range(CALIBRATION_FOLDS):
        inside, outside = fold == k, fold != k
        made = way(F[outside], labels[outside], w[outside])
        losses[inside] = log_losses(made(F[inside]), labels[inside])
    return losses


def temperature(F: Floats, labels: npt.NDArray[np.int64], w: Floats) -> Softmax:
    """One slope for all classes, 0 or above."""
    c = F.shape[1]
    Q, w = _wanted(c, labels, w)

    def at(theta: Floats) -> tuple[float, Floats, Floats]:
        z = theta[0] * F
        loss, p = _loss(z, Q, w)
        mean = (p * F).sum(axis=1)
        curve = w @ ((p * F * F).sum(axis=1) - mean**2)
        return loss, np.array([w @ ((p - Q) * F).sum(axis=1)]), np.array([[curve]])

    slope = max(_least(at, np.ones(1))[0], 0.0)
    return Softmax(np.full(c, slope), np.zeros(c))


def vector(F: Floats, labels: npt.NDArray[np.int64], w: Floats) -> Softmax:
    """A slope and a shift for each class, from the one slope of all."""
    c = F.shape[1]
    start = np.concatenate((temperature(F, labels, w).slope, np.zeros(c)))
    Q, w = _wanted(c, labels, w)

    def at(theta: Floats) -> tuple[float, Floats, Floats]:
        loss, p = _loss(F * theta[:c] + theta[c:], Q, w)
        V = np.concatenate((p * F, p), axis=1)
        wV, rest = V * w[:, None], (p - Q) * w[:, None]
        curve = -V.T @ wV
        own, between = np.arange(c), (wV[:, :c]).sum(axis=0)
        curve[own, own] += (wV[:, :c] * F).sum(axis=0)
        curve[own, own + c] += between
        curve[own + c, own] += between
        curve[own + c, own + c] += wV[:, c:].sum(axis=0)
        return loss, np.concatenate(((rest * F).sum(axis=0), rest.sum(axis=0))), curve

    theta = _least(at, start)
    return Softmax(theta[:c], theta[c:])


def isotonic(F: Floats, labels: npt.NDArray[np.int64], w: Floats) -> Isotonic:
    """Least squares among the monotone functions, of each class by itself."""
    regress = on_demand("scipy.optimize").isotonic_regression
    least = 1.0 / (len(F) + 2)  # what a class is told of no row of which was seen
    ends, at, height = [0], list[Floats](), list[Floats]()
    for k in range(F.shape[1]):
        values, place = np.unique(F[:, k], return_inverse=True)
        weights = np.bincount(place, w, len(values))
        counted = weights > 0
        of = np.bincount(place, w * (labels == k), len(values))[counted] / weights[counted]
        found = np.clip(regress(of, weights=weights[counted]).x, least, 1 - least)
        bend = np.ones(len(found), bool)  # the ends of every stretch that is constant
        bend[1:-1] = (found[1:-1] != found[:-2]) | (found[1:-1] != found[2:])
        at.append(values[counted][bend])
        height.append(found[bend])
        ends.append(ends[-1] + len(at[-1]))
    return Isotonic(np.array(ends), np.concatenate(at), np.concatenate(height))


def _wanted(c: int, labels: npt.NDArray[np.int64], w: Floats) -> tuple[Floats, Floats]:
    """(targets (m, c), weights that sum to 1), with the one row more that is of all classes."""
    m = len(labels)
    Q = np.full((m, c), 1.0 / (c * (m + 1)))
    Q[np.arange(m), labels] += m / (m + 1)
    return Q, w / w.sum()


def _loss(z: Floats, Q: Floats, w: Floats) -> tuple[float, Floats]:
    """Weighted log loss of softmax(z) (m, c) for targets Q, and the softmax."""
    z = z - z.max(axis=1, keepdims=True)
    p = np.exp(z)
    total = p.sum(axis=1, keepdims=True)
    losses = np.log(total[:, 0]) - (Q * z).sum(axis=1)
    return float(w @ losses), p / total


def _least(at: Callable[[Floats], tuple[float, Floats, Floats]], theta: Floats) -> Floats:
    """Where a convex function is least, by Newton. at : its value, gradient and curvature."""
    loss, gradient, curve = at(theta)
    for _ in range(_NEWTON_STEPS):
        diagonal = np.arange(len(theta))
        curve[diagonal, diagonal] += 1e-9 * max(float(np.trace(curve)) / len(theta), 1e-30)
        step = np.linalg.solve(curve, gradient)
        falls = float(gradient @ step)
        if falls <= 1e-14 * max(abs(loss), 1e-300):
            break
        length = 1.0
        for _ in range(_HALVINGS):
            found = at(theta - length * step)
            if found[0] <= loss - 1e-4 * length * falls:
                break
            length /= 2
        else:
            break
        theta = theta - length * step
        loss, gradient, curve = found
    return theta
