"""What a metric says of the features: their shares, its spectrum, its first directions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

SHOWN, DIRECTIONS, TERMS = 20, 3, 6
"""Features and eigenvalues, directions, and features of a direction."""


def importances(metric: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """(d,) shares of the features in the trace of M = A A^T, A (d,) or (d, r); zeros where that
    is 0."""
    A = _bounded(metric)
    squares = A**2 if A.ndim == 1 else (A**2).sum(axis=1)
    return np.asarray(squares / max(squares.sum(), np.finfo(np.float64).tiny))


def _bounded(metric: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """In units in which its squares are finite."""
    return np.asarray(metric / max(np.abs(metric).max(), np.finfo(np.float64).tiny))


def describe_metric(
    metric: npt.NDArray[np.float64], columns: Sequence[str] | None
) -> dict[str, Any]:
    """JSON. columns : names of the features, which else go by their number.

    kind : "scales" or "matrix". features : d. directions : the rank of M. importances : the
    largest shares, [name, share]. spectrum : the largest eigenvalues of M over their sum. first :
    of a matrix the eigenvectors of the largest eigenvalues, each as its largest entries [name,
    entry], of which the first is above 0.
    """
    names = [f"feature {j}" for j in range(len(metric))] if columns is None else list(columns)
    shares = importances(metric)
    order = np.argsort(-shares, kind="stable")[:SHOWN]
    found: dict[str, Any] = {
        "kind": "scales" if metric.ndim == 1 else "matrix",
        "features": len(metric),
        "directions": int((metric != 0).sum()),
        "importances": [[names[j], float(shares[j])] for j in order],
    }
    if metric.ndim == 1:
        return found | {"spectrum": [float(shares[j]) for j in order], "first": []}
    U, s, _ = np.linalg.svd(_bounded(metric), full_matrices=False)
    found["directions"] = int((s > max(metric.shape) * np.finfo(np.float64).eps * s[0]).sum())
    spectrum = s**2 / max((s**2).sum(), np.finfo(np.float64).tiny)
    return found | {
        "spectrum": [float(x) for x in spectrum[:SHOWN]],
        "first": [_terms(u, names) for u in U.T[:DIRECTIONS]],
    }


def _terms(u: npt.NDArray[np.float64], names: Sequence[str]) -> list[list[Any]]:
    """The largest entries of a direction, whose sign is anybody's."""
    order = np.argsort(-np.abs(u), kind="stable")[:TERMS]
    u = u * np.sign(u[order[0]])
    return [[names[j], float(u[j])] for j in order]
