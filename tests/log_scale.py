"""Made targets that are simple on a log scale, or not."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

OPEN: Final[dict[str, Any]] = {
    "model.kernel": "auto", "model.bandwidth": "auto", "model.n_centers": 100, "data.epochs": 1,
    "solver.name": "block",
}  # fmt: skip
"""Settings that leave the scale of the targets open."""


def skewed_data(kind: str, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return X (n, 3) float32 and skewed targets y (n,) above 0."""
    rng = np.random.default_rng([seed, 5])
    X = rng.uniform(-1.5, 1.5, (n, 3)).astype(np.float32)
    f, e = X[:, 0] + np.sin(2 * X[:, 1]), rng.standard_normal(n)
    y = {
        "exponential": 100 * np.exp(f + 0.1 * e),
        "additive": f**2 + rng.exponential(1, n),
        "noise": np.exp(e),
        "counts": rng.poisson(2 * np.exp(f / 2)).astype(float),
    }
    return X, y[kind].astype(float)
