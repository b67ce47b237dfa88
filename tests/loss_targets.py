"""Rows with targets for losses other than the squared error, and the settings of such losses."""

from __future__ import annotations

from typing import Any

import numpy as np

from streamkern.stream.sources.arrays import ArraySource
from tests.runs import CLASSES

N, P = 200, 40
"""Numbers of rows and of centers."""
RNG = np.random.default_rng(4)
X = RNG.standard_normal((N, 3)).astype(np.float32)
VALUES = np.sin(2 * X[:, 0]) + X[:, 1] + RNG.standard_t(3, N)
LABELS = np.abs(X).argmax(axis=1)
FOR_CLASSES = ("log_loss", "squared_hinge")
LOSSES = (*FOR_CLASSES, "huber", "absolute_error", "quantile", "expectile")


def loss_settings(name: str, **overrides: Any) -> dict[str, Any]:
    """Return the settings of a run with P centers and the loss."""
    level = {"model.quantile": 0.8} if name in ("quantile", "expectile") else {}
    return {"model.loss": name, "model.n_centers": P} | level | overrides


def loss_source(name: str, rows: slice = slice(None)) -> ArraySource:
    """Return rows with targets for the loss: labels or values."""
    if name in FOR_CLASSES:
        return ArraySource(X[rows], LABELS[rows], classes=CLASSES)
    return ArraySource(X[rows], VALUES[rows])
