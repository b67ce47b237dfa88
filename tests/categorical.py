"""Make a table with an effect of a category that is not a function of distances."""

from __future__ import annotations

import numpy as np

from tests.solver_problems import Array

LEVEL = 3
"""The column of the numbers of groups."""
N_LEVELS = 100


def panel(n: int, seed: int = 0, effect: float = 1.5) -> tuple[Array, Array]:
    """Return X (n, 4) float32, the last column one of 100 numbers, and y (n,).

    effect : standard deviation of the effect of a group; the noise has 0.3.
    """
    rng, of_level = np.random.default_rng(seed), np.random.default_rng(99).normal(size=N_LEVELS)
    X = np.column_stack([rng.normal(size=(n, 3)), rng.integers(0, N_LEVELS, n)])
    y = np.sin(X[:, 0]) + 0.5 * X[:, 1] + effect * of_level[X[:, LEVEL].astype(int)]
    return X.astype(np.float32), y + 0.3 * rng.normal(size=n)
