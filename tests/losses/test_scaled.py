"""Check the scaled loss that solvers minimise."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import softmax

from streamkern.backend.devices import get_backend
from streamkern.losses.errors import Quantile
from streamkern.losses.log_loss import LogLoss
from streamkern.losses.scaled import ScaledLoss


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_zero_function_prediction_keeps_mean_unchanged(dtype: type) -> None:
    """Check that the mean is not overwritten, although `predict` overwrites its argument."""
    mean, backend = np.log([0.2, 0.3, 0.5]), get_backend("cpu", 1)
    loss = ScaledLoss(LogLoss(), backend, np.dtype(dtype), mean, np.full(3, 4.0))
    Y = np.eye(3, dtype=dtype)
    errors = loss.errors(np.zeros((3, 3), dtype), Y)
    backend.close()
    np.testing.assert_array_equal(mean, np.log([0.2, 0.3, 0.5]))
    np.testing.assert_allclose(loss.of_zero, softmax(mean), rtol=1e-6)
    np.testing.assert_allclose(errors, softmax(mean) - Y, rtol=1e-6)


def test_ramp_width_follows_age_of_weights() -> None:
    backend, rows = get_backend("cpu", 1), np.linspace(-1, 1, 21)[:, None]
    quantile = Quantile(0.8, width=[1.0])

    def residual(age: float, rows_per_center: float) -> np.ndarray:
        loss = ScaledLoss(quantile, backend, np.dtype("f8"), np.zeros(1), np.full(1, 2.0), age)
        return np.asarray(loss.residual(rows.copy(), rows, rows_per_center)[0])

    np.testing.assert_array_equal(residual(3.0, 2.0), residual(0.0, 5.0))
    assert np.abs(residual(3.0, 2.0) - residual(0.0, 2.0)).max() > 0.1
    backend.close()
