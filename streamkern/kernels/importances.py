"""Summary of a metric: the features' shares of its trace, its spectrum and main directions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.kernels.categorical import CategoricalFeatures

MAX_SUMMARY_ENTRIES = 20
"""Largest number of features, and of eigenvalues, in a summary."""
MAX_SUMMARY_EIGENVECTORS = 3
"""Largest number of eigenvectors in a summary."""
MAX_EIGENVECTOR_ENTRIES = 6
"""Largest number of entries of an eigenvector in a summary."""


def importances(
    metric: npt.NDArray[np.float64], categorical: CategoricalFeatures = ()
) -> npt.NDArray[np.float64]:
    """Return the (d,) shares of the features in the trace of M = A A^T; zeros if the trace is 0.

    metric : A, (d,) scales or a (d, r) matrix.
    categorical : pairs of a feature and its weight w, which adds w / 2 to the feature's part of the
        trace: a feature of variance 1 with the squared scale w / 2 has the mean squared distance w
        between two random rows.
    """
    categorical_scales = np.zeros(len(metric))
    for column, weight in categorical:
        categorical_scales[column] = math.sqrt(weight / 2)
    A = _divide_by_largest(np.column_stack([metric, categorical_scales]))
    squares = (A**2).sum(axis=1)
    return np.asarray(squares / max(squares.sum(), np.finfo(np.float64).tiny))


def _divide_by_largest(metric: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Divide a metric by its largest absolute entry, so that squares do not overflow."""
    return np.asarray(metric / max(np.abs(metric).max(), np.finfo(np.float64).tiny))


def describe_metric(
    metric: npt.NDArray[np.float64], names: Sequence[str], categorical: CategoricalFeatures = ()
) -> dict[str, Any]:
    """Return a summary of a metric A, M = A A^T, as JSON values.

    The key "kind" is "scales" or "matrix", "features" d, and "directions" the rank of M.
    "importances" are the features with the largest `importances`, as pairs [name, share], and
    "spectrum" the largest eigenvalues of M, divided by the sum of all. "first" are, for a matrix,
    the eigenvectors of the largest eigenvalues, each as its largest entries [name, entry], the
    first of them positive; it is empty for scales.

    metric : A, (d,) scales or a matrix (d, r).
    names : names of the d features.
    categorical : pairs (feature, weight).
    """
    shares = importances(metric, categorical)
    order = np.argsort(-shares, kind="stable")[:MAX_SUMMARY_ENTRIES]
    summary: dict[str, Any] = {
        "kind": "scales" if metric.ndim == 1 else "matrix",
        "features": len(metric),
        "directions": int((metric != 0).sum()),
        "importances": [[names[j], float(shares[j])] for j in order],
    }
    if metric.ndim == 1:
        spectrum = np.sort(importances(metric))[::-1]
        return summary | {
            "spectrum": [float(x) for x in spectrum[:MAX_SUMMARY_ENTRIES]],
            "first": [],
        }
    U, s, _ = np.linalg.svd(_divide_by_largest(metric), full_matrices=False)
    summary["directions"] = int((s > max(metric.shape) * np.finfo(np.float64).eps * s[0]).sum())
    spectrum = s**2 / max((s**2).sum(), np.finfo(np.float64).tiny)
    return summary | {
        "spectrum": [float(x) for x in spectrum[:MAX_SUMMARY_ENTRIES]],
        "first": [_largest_entries(u, names) for u in U.T[:MAX_SUMMARY_EIGENVECTORS]],
    }


def _largest_entries(u: npt.NDArray[np.float64], names: Sequence[str]) -> list[list[Any]]:
    """Return the largest entries of an eigenvector, with the sign that makes the first positive."""
    order = np.argsort(-np.abs(u), kind="stable")[:MAX_EIGENVECTOR_ENTRIES]
    u = u * np.sign(u[order[0]])
    return [[names[j], float(u[j])] for j in order]
