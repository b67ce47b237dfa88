"""Summary of a metric: shares of the features, its spectrum, its first directions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.kernels.categorical import CategoricalFeatures

SHOWN, DIRECTIONS, TERMS = 20, 3, 6
"""Number of features and eigenvalues, of directions, and of features of a direction that are
shown."""


def importances(
    metric: npt.NDArray[np.float64], categorical: CategoricalFeatures = ()
) -> npt.NDArray[np.float64]:
    """Return the (d,) shares of the features in the trace of M = A A^T, A (d,) or (d, r).

    All are zero if the trace is. A level of weight w counts as w / 2, the square of a scale with
    which two rows of a feature of variance 1 have the mean squared distance w.
    """
    of_categorical = np.zeros(len(metric))
    for column, weight in categorical:
        of_categorical[column] = math.sqrt(weight / 2)
    A = _bounded(np.column_stack([metric, of_categorical]))
    squares = (A**2).sum(axis=1)
    return np.asarray(squares / max(squares.sum(), np.finfo(np.float64).tiny))


def _bounded(metric: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Scale a metric such that its squares are finite."""
    return np.asarray(metric / max(np.abs(metric).max(), np.finfo(np.float64).tiny))


def describe_metric(
    metric: npt.NDArray[np.float64], names: Sequence[str], categorical: CategoricalFeatures = ()
) -> dict[str, Any]:
    """Return a summary of a metric as JSON. names : names of the features.

    kind : "scales" or "matrix".
    features : d.
    directions : the rank of M.
    importances : the largest shares, [name, share], with those of the categorical.
    spectrum : the largest eigenvalues of M over their sum.
    first : for a matrix, the eigenvectors of the largest eigenvalues, each as its largest entries
        [name, entry], the first of them positive.
    """
    shares = importances(metric, categorical)
    order = np.argsort(-shares, kind="stable")[:SHOWN]
    summary: dict[str, Any] = {
        "kind": "scales" if metric.ndim == 1 else "matrix",
        "features": len(metric),
        "directions": int((metric != 0).sum()),
        "importances": [[names[j], float(shares[j])] for j in order],
    }
    if metric.ndim == 1:
        spectrum = np.sort(importances(metric))[::-1]
        return summary | {"spectrum": [float(x) for x in spectrum[:SHOWN]], "first": []}
    U, s, _ = np.linalg.svd(_bounded(metric), full_matrices=False)
    summary["directions"] = int((s > max(metric.shape) * np.finfo(np.float64).eps * s[0]).sum())
    spectrum = s**2 / max((s**2).sum(), np.finfo(np.float64).tiny)
    return summary | {
        "spectrum": [float(x) for x in spectrum[:SHOWN]],
        "first": [_terms(u, names) for u in U.T[:DIRECTIONS]],
    }


def _terms(u: npt.NDArray[np.float64], names: Sequence[str]) -> list[list[Any]]:
    """Return the largest entries of a direction, with the sign that makes the first positive."""
    order = np.argsort(-np.abs(u), kind="stable")[:TERMS]
    u = u * np.sign(u[order[0]])
    return [[names[j], float(u[j])] for j in order]
