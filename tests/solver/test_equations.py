"""Compare a ridge for each output with searches and least squares of one output in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamkern
from streamkern.estimator.estimators import KernelClassifier, KernelRegressor
from streamkern.solver.direct import Direct
from streamkern.solver.equations import outputs_by_ridge, round_to_grid
from streamkern.stream.sources.arrays import ArraySource
from tests import reference as ref
from tests.plans import solver_settings
from tests.runs import finished, settings, stopped
from tests.solver_problems import problem_of, replace, rows

pytestmark = pytest.mark.usefixtures("one_blas_thread")

X = rows(0, 300, 3)
# Of the same function, with little and much noise, and of another one.
Y = np.stack([np.sin(X[:, 0]), np.sin(X[:, 0]), 1e3 * X[:, 1] * X[:, 2]], axis=1)
Y += (0.01, 1.0, 300) * rows(1, 300, 3)
PLAIN: dict[str, Any] = {
    "kernel": "laplace", "bandwidth": 3.0, "scale": "none", "solver": "direct", "threads": 1,
    "precision": "float64", "accelerator": "none", "metric": "none",
}  # fmt: skip


@pytest.mark.parametrize("p", [40, 300])
def test_each_output_equals_its_separate_model(p: int) -> None:
    """Check ridges that are rounded to quarter powers of ten, and their weights."""
    options: dict[str, Any] = PLAIN | {"n_centers": p}
    joint_model = KernelRegressor(**options).fit(X, Y)
    ridges = np.array(joint_model.report_["ridges"])
    assert ridges[1] > 20 * ridges[0]
    assert joint_model.report_["ridge"] == pytest.approx(np.exp(np.log(ridges).mean()))
    Z, values = joint_model.centers_, joint_model.predict(X)
    K_zz, K = ref.laplace(Z, Z, 3.0), ref.laplace(X, Z, 3.0)
    for k in range(3):
        single_model = KernelRegressor(**options).fit(X, Y[:, k])
        assert "ridges" not in single_model.report_
        assert ridges[k] == pytest.approx(float(round_to_grid(single_model.report_["ridge"])))
        y = Y[:, k] - Y[:, k].mean()
        A = K.T @ K / 300 + ridges[k] * K_zz
        truth = K @ np.linalg.solve(A, K.T @ y / 300)
        np.testing.assert_allclose(values[:, k] - Y[:, k].mean(), truth, atol=1e-6 * np.ptp(truth))


def test_labels_and_classes_share_one_ridge() -> None:
    """Check classes, whose values are compared with each other."""
    y = (X[:, 0] > 0).astype(int) + (X[:, 1] > 1)
    model = KernelClassifier(**PLAIN | {"n_centers": 40}).fit(X, y)
    assert "ridges" not in model.report_
    np.testing.assert_allclose(model.predict_values(X).sum(axis=1), 1, atol=1e-9)
    fixed = KernelRegressor(ridge=1e-3, **PLAIN).fit(X, Y)
    assert "ridges" not in fixed.report_


def test_standard_deviations_use_ridge_of_each_output() -> None:
    """Compare with models of one output.

    All outputs have the jitter that the smallest ridge needs, 2e-4 of k(x, x); a single output has
    1e-10.
    """
    joint_model = KernelRegressor(posterior=True, n_centers=60, **PLAIN).fit(X, Y)
    std = joint_model.predict(X, return_std=True)[1]
    for k, ridge in enumerate(joint_model.report_["ridges"]):
        single_model = KernelRegressor(posterior=True, ridge=ridge, n_centers=60, **PLAIN)
        single_model.fit(X, Y[:, k])
        for name, values in joint_model.report_["posterior"].items():
            assert single_model.report_["posterior"][name][0] == pytest.approx(values[k], rel=1e-3)
        single_std = single_model.predict(X, return_std=True)[1]
        np.testing.assert_allclose(std[:, k], single_std, rtol=1e-3)


@pytest.mark.parametrize("p", [40, 300])
def test_killed_run_and_saved_model_keep_ridges(p: int, tmp_path: Path) -> None:
    options = {"solver.name": "direct", "solver.ridge": "auto", "model.n_centers": p}
    source = ArraySource(X.astype(np.float32), Y.astype(np.float32), unit_rows=16)
    uninterrupted = finished(settings(**options), source=source)
    stopped(settings(tmp_path / "run", **options), 3, source=source, test=source)
    resumed = finished(settings(tmp_path / "run", **options), source=source)
    assert uninterrupted.ridges is not None
    assert len(set(uninterrupted.ridges)) > 1
    np.testing.assert_array_equal(resumed.ridges, uninterrupted.ridges)
    np.testing.assert_array_equal(resumed.model.weights, uninterrupted.model.weights)
    loaded = streamkern.load(tmp_path / "run")
    assert loaded.report_["ridges"] == list(uninterrupted.ridges)
    loaded.save(tmp_path / "saved")
    assert streamkern.load(tmp_path / "saved").report_["ridges"] == list(uninterrupted.ridges)


def test_outputs_are_grouped_by_ridge() -> None:
    ridges = round_to_grid([1e-3, 1.2e-3, 0, 5e-2, 1e-3])
    np.testing.assert_allclose(ridges, [1e-3, 1e-3, 0, 10**-1.25, 1e-3])
    groups = [(ridge, outputs.tolist()) for ridge, outputs in outputs_by_ridge(ridges)]
    assert [outputs for _, outputs in groups] == [[2], [0, 1, 4], [3]]


def test_time_of_several_factors_is_planned() -> None:
    problem = replace(problem_of(rows(0, 500, 3), 9, cycled=2000), n_rows=2000, finds_ridge=True)
    several = replace(problem, several_targets=True)
    sizes = Direct().plan(problem, solver_settings(), 1 << 40)[0]
    single_factor, several_factors = (
        Direct().op_counts(shape, sizes)[1].wide_factors for shape in (problem, several)
    )
    assert several_factors > single_factor
    assert Direct().time(several) > Direct().time(problem)
