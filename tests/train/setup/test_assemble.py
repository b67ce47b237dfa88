"""Test the ridge of a run."""

from __future__ import annotations

import numpy as np
import pytest

from streamkern.train.setup import assemble
from tests import reference as ref
from tests.runs import Array, N, array_source, arrays, finished, settings

ALL = {"model.n_centers": "auto", "model.centers": "all", "solver.name": "direct"}


def leave_one_out_error(K: Array, Y: Array, tau: float) -> float:
    """Return the sum of the squared leave-one-out errors of kernel ridge regression."""
    inverse = np.linalg.inv(K + tau * np.eye(len(K)))
    return float(((inverse @ Y / inverse.diagonal()[:, None]) ** 2).sum())


@pytest.mark.parametrize("noise_rows", [64, N])
def test_ridge_is_found_from_all_rows_read(
    noise_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "NOISE_ROWS", noise_rows)
    result = finished(settings(**ALL), source=array_source())
    X, y = arrays()
    K, Y = ref.laplace(X, X, 3.0), np.eye(3)[y]
    Y -= Y.mean(axis=0)
    ridges = np.geomspace(1e-8, 10, 60)
    smallest = min(leave_one_out_error(K, Y, N * ridge) for ridge in ridges)
    assert leave_one_out_error(K, Y, N * result.ridge) <= 1.03 * smallest
