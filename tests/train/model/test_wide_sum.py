"""Test predictions of models with large weights against sums in extended precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamkern as sk
from streamkern.backend.base import Backend
from streamkern.kernels.builtin import Gaussian
from streamkern.kernels.products import KernelOperator
from streamkern.train.model.wide_sum import MAX_RELATIVE_ROUNDING, KernelSum, rounding_shows

RNG = np.random.default_rng(0)
X = RNG.standard_normal((1200, 4))
Y = np.sin(X).sum(axis=1)
NEW = RNG.standard_normal((400, 4))


def exact_values(model: Any, rows: np.ndarray) -> np.ndarray:
    """Return the values of a model in extended precision, from differences of coordinates."""
    differences = rows.astype(np.longdouble)[:, None] - model.centers_.astype(np.longdouble)[None]
    K = np.exp(-(differences**2).sum(axis=2) / (2 * np.longdouble(model.bandwidth_) ** 2))
    f: np.ndarray = K @ model.dual_coef_.astype(np.longdouble) + model.intercept_
    return f.astype(np.float64).ravel()


def fit(run_dir: Path | None = None, **changes: Any) -> Any:
    """Return a model of a Gaussian kernel with a tiny ridge, trained in float32."""
    parameters = {
        "kernel": "gaussian", "metric": "none", "n_centers": 300, "ridge": 1e-9, "scale": "none",
        "solver": "direct", "run_dir": run_dir,
    }  # fmt: skip
    return sk.KernelRegressor(**parameters | changes).fit(X, Y)


@pytest.mark.parametrize("bandwidth", [0.5, 2.0, 6.0])
def test_predictions_are_as_accurate_as_float64(bandwidth: float) -> None:
    model = fit(bandwidth=bandwidth)
    assert model._state.precision == "exact"
    truth = exact_values(model, NEW)
    error = model.predict(NEW) - truth
    assert np.sqrt(np.mean(error**2)) <= MAX_RELATIVE_ROUNDING * truth.std()


def test_float32_is_inaccurate_with_large_weights() -> None:
    """Check that the same model with precision="exact", which stays in float32, has larger
    errors."""
    wide, narrow = fit(bandwidth=6.0), fit(bandwidth=6.0, precision="exact")
    np.testing.assert_array_equal(wide.dual_coef_, narrow.dual_coef_)
    truth = exact_values(wide, NEW)
    errors = [np.abs(model.predict(NEW) - truth).max() for model in (wide, narrow)]
    assert errors[0] < 1e-3 * errors[1]
    assert fit(bandwidth=0.5).predict(NEW).dtype == wide.predict(NEW).dtype


def test_small_weights_are_summed_in_float32() -> None:
    model, narrow = fit(bandwidth=0.5), fit(bandwidth=0.5, precision="exact")
    np.testing.assert_array_equal(model.predict(NEW), narrow.predict(NEW))


def test_loaded_model_and_single_row_have_same_bits(tmp_path: Path) -> None:
    model = fit(tmp_path / "run", bandwidth=6.0)
    full = model.predict(NEW)
    np.testing.assert_array_equal(sk.load(tmp_path / "run").predict(NEW), full)
    model.save(tmp_path / "saved")
    np.testing.assert_array_equal(sk.load(tmp_path / "saved").predict(NEW), full)
    assert model.score(NEW, full) == 1


class InaccurateBackend(Backend):
    """Backend whose products have large errors in float32."""

    def gemm(self, A: Any, B: Any, out: Any) -> None:
        super().gemm(A, B, out)
        if out.dtype == np.float32:
            out *= 1.01


@pytest.mark.parametrize(("bandwidth", "shows"), [(0.5, False), (6.0, True)])
def test_rounding_is_measured_equally_on_all_backends(bandwidth: float, shows: bool) -> None:
    model = fit(bandwidth=bandwidth)
    centers = np.float32(model.centers_)
    for backend in (Backend(), InaccurateBackend()):
        op = KernelOperator(Gaussian(bandwidth), backend, "exact")
        f = KernelSum(op, op.points(centers, right=True), np.float32(model.dual_coef_))
        assert rounding_shows(f, centers) is shows


def test_class_scores_keep_their_dtype() -> None:
    labels = (Y > 0).astype(int)
    parameters = {
        "kernel": "gaussian", "metric": "none", "n_centers": 300, "bandwidth": 6.0, "ridge": 1e-9,
        "solver": "direct",
    }  # fmt: skip
    wide = sk.KernelClassifier(**parameters).fit(X, labels)
    narrow = sk.KernelClassifier(precision="exact", **parameters).fit(X, labels)
    scores, rounded = wide.decision_function(NEW), narrow.decision_function(NEW)
    assert scores.dtype == rounded.dtype == np.float32
    assert np.abs(scores - rounded).max() > 1e-4


def test_deviations_accompany_float64_sum() -> None:
    model = fit(bandwidth=6.0, posterior=True)
    f, deviation = model.predict(NEW, return_std=True)
    np.testing.assert_array_equal(f, model.predict(NEW))
    assert np.isfinite(deviation).all()
