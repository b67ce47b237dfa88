"""Check standard deviations against scikit-learn's Gaussian processes and dense float64."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern

import streamkern
from streamkern.backend.base import Backend
from streamkern.basics.errors import ConfigError
from streamkern.estimator.estimators import KernelClassifier, KernelRegressor
from streamkern.kernels.builtin import Gaussian
from streamkern.kernels.products import KernelOperator
from streamkern.solver.direct import Direct
from streamkern.solver.methods import resolve
from streamkern.solver.posterior import Posterior
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from tests.plans import solver_settings
from tests.runs import finished, settings, stopped
from tests.solver_problems import problem_of, rows

pytestmark = pytest.mark.usefixtures("one_blas_thread")

X, FRESH = rows(0, 120, 3), 1.5 * rows(1, 50, 3)
Y = np.stack((50 * np.sin(X[:, 0]) + 300, X[:, 1] - 2e-3 * X[:, 2]), axis=1)
Y += (5, 0.3) * rows(2, 120, 2)
# Weights that float32, in which they are kept, represents exactly.
WEIGHTS = np.float32(np.random.default_rng(3).uniform(0.3, 2, 120)).astype(np.float64)
PLAIN: dict[str, Any] = {
    "kernel": "gaussian", "bandwidth": 1.5, "scale": "none", "ridge": 1e-3, "posterior": True,
    "precision": "float64", "threads": 1, "accelerator": "none",
}  # fmt: skip


def logged_value(model: KernelRegressor, name: str) -> np.ndarray:
    """Return "noise" or "prior" of each output, as the report has it."""
    return np.array(model.report_["posterior"][name])


@pytest.mark.parametrize("kernel", ["gaussian", "matern52"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("precision", "rtol"), [("float64", 1e-6), ("exact", 1e-3)])
def test_standard_deviations_equal_scikit_learn(
    kernel: str, weighted: bool, precision: str, rtol: float
) -> None:
    """Compare with scikit-learn at the measured noise and amplitude; values also use the ridge.

    Rounding of float32 values is 1e-6 of the prior's variance, and the smallest variance is 0.001.
    """
    w = WEIGHTS if weighted else np.ones(120)
    model = KernelRegressor(**PLAIN | {"kernel": kernel, "precision": precision})
    model.fit(X, Y, sample_weight=w if weighted else None)
    assert model.report_["solver"] == "direct"
    predictions, std = model.predict(FRESH, return_std=True)
    assert predictions.shape == std.shape == (50, 2)
    np.testing.assert_array_equal(predictions, model.predict(FRESH))
    shape = RBF(1.5) if kernel == "gaussian" else Matern(1.5, nu=2.5)
    w = w / w.mean()
    for k in range(2):
        noise, prior = logged_value(model, "noise")[k], logged_value(model, "prior")[k]
        mean = np.average(Y[:, k], weights=w)
        reference = GaussianProcessRegressor(
            ConstantKernel(prior**2) * shape, alpha=noise**2 / w, optimizer=None
        ).fit(X, Y[:, k] - mean)
        expected = reference.predict(FRESH, return_std=True)[1]
        np.testing.assert_allclose(std[:, k], expected, rtol=rtol)
        ridged = GaussianProcessRegressor(shape, alpha=120 * 1e-3 / w, optimizer=None)
        theirs = ridged.fit(X, Y[:, k] - mean).predict(FRESH)
        np.testing.assert_allclose(predictions[:, k] - mean, theirs, atol=rtol * np.ptp(theirs))
        on_rows = model.predict(X, return_std=True)[1][:, k]
        np.testing.assert_allclose(on_rows, reference.predict(X, return_std=True)[1], rtol=rtol)


def dense(Z: np.ndarray, w: np.ndarray, ridge: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return variances at FRESH, the noise and the prior variances, by the formulas in float64."""
    kernel, T = RBF(1.5), Y - np.average(Y, axis=0, weights=w)
    K_zz, K, k = kernel(Z), kernel(X, Z), kernel(FRESH, Z)
    G, B = (w[:, None] * K).T @ K, (w[:, None] * K).T
    to_alpha = np.linalg.solve((w > 0).sum() * ridge * K_zz + G, B)
    alpha, freedom = to_alpha @ T, np.trace(K @ to_alpha)
    noise = (w[:, None] * (T - K @ alpha) ** 2).sum(axis=0) / ((w > 0).sum() - freedom)
    prior = (alpha * (K_zz @ alpha)).sum(axis=0) / freedom
    variances = np.empty((len(FRESH), 2))
    for i, tau in enumerate(noise / prior):
        inverse = np.linalg.solve(K_zz, k.T) - tau * np.linalg.solve(tau * K_zz + G, k.T)
        variances[:, i] = prior[i] * (1 - (k * inverse.T).sum(axis=1))
    return variances, noise, prior


@pytest.mark.parametrize("p", [30, 120])
@pytest.mark.parametrize("weighted", [False, True])
def test_standard_deviations_equal_formula_for_any_centers(p: int, weighted: bool) -> None:
    """Check a tenth of the rows with weights of 0, which do not count.

    K has a condition of 1e10, so float64 loses that many digits in the formulas, too.
    """
    w = np.where(np.arange(120) % 10, WEIGHTS, 0) if weighted else np.ones(120)
    Z = X[w > 0] if p == 120 else X[:p] + 0.1
    centers: Any = "all" if p == 120 else Z
    sample_weight = w if weighted else None
    model = KernelRegressor(centers=centers, **PLAIN).fit(X, Y, sample_weight=sample_weight)
    variances, noise, prior = dense(Z, w / w[w > 0].mean(), 1e-3)
    np.testing.assert_allclose(logged_value(model, "noise"), np.sqrt(noise), rtol=1e-5)
    np.testing.assert_allclose(logged_value(model, "prior"), np.sqrt(prior), rtol=1e-5)
    std = model.predict(FRESH, return_std=True)[1]
    np.testing.assert_allclose(std, np.sqrt(variances), rtol=1e-5)
    far_std = model.predict(np.full((1, 3), 1e3), return_std=True)[1]
    np.testing.assert_allclose(far_std[0], logged_value(model, "prior"))  # as if there were no rows


@pytest.mark.parametrize(("kernel", "p"), [("polynomial", 120), ("laplace", 30)])
def test_standard_deviations_in_float32_and_of_nonstationary_kernels(kernel: str, p: int) -> None:
    """Compare with float64.

    Rounding is 1e-6 of the largest prior variance, which a polynomial has far from 0. At a center,
    float32 does not show a kink.
    """
    at = X if kernel == "polynomial" else FRESH
    options = PLAIN | {"kernel": kernel, "centers": X[:p]}
    if kernel == "polynomial":
        options |= {"bandwidth": "auto"}
    exact = KernelRegressor(**options).fit(X, Y).predict(at, return_std=True)[1]
    single = KernelRegressor(**options | {"precision": "exact"}).fit(X, Y)
    single_std = single.predict(at, return_std=True)[1]
    assert (single_std > 0).all()
    largest_variance = 1.0 if kernel == "laplace" else float((1 + (X**2).sum(axis=1)).max()) ** 3
    off = np.abs(single_std**2 - exact**2) - 1e-3 * exact**2
    assert (off < 3e-6 * logged_value(single, "prior") ** 2 * largest_variance).all()


def test_memory_of_standard_deviations_is_linear_in_rows() -> None:
    """Check the bytes that the docstring gives, which exclude an (m, m) matrix of the rows."""
    m, p = 4000, 100
    op = KernelOperator(Gaussian(2.0), Backend(1), "float64")
    Z, many = op.points(rows(4, p, 3), right=True), rows(5, m, 3)
    posterior = Posterior(np.eye(p), np.ones(p), np.ones(1), np.ones(1))
    posterior.deviations(op, Z, many)  # allocates workspaces
    tracemalloc.start()
    try:
        posterior.deviations(op, Z, many)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 16 * m * p <= peak < 1.5 * 16 * m * p


# -- saved models and files ----------------------------------------------------------------------


def test_posterior_is_saved_and_written_to_files(tmp_path: Path) -> None:
    y = Y[:, 0]
    model = KernelRegressor(n_centers=40, run_dir=tmp_path / "run", **PLAIN).fit(X, y)
    values, std = model.predict(FRESH, return_std=True)
    assert std.shape == (50,)
    model.save(tmp_path / "saved")
    for location in ("run", "saved"):
        loaded = streamkern.load(tmp_path / location)
        assert loaded.posterior
        assert loaded.report_["posterior"] == model.report_["posterior"]
        loaded_values = loaded.predict(FRESH, return_std=True)
        np.testing.assert_allclose(loaded_values, (values, std), rtol=1e-12)
    loaded.predict(FRESH, return_std=True, out=tmp_path / "a.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), np.stack(loaded_values, axis=1))
    loaded.predict(ArraySource(FRESH), return_std=True, out=tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text().startswith("row,value,value_std\n")
    from_source = loaded.predict(ArraySource(FRESH), return_std=True)
    np.testing.assert_allclose(from_source, loaded_values, rtol=1e-12)


def test_killed_run_gives_same_posterior(tmp_path: Path) -> None:
    options = {"solver.name": "direct", "solver.posterior": True, "solver.ridge": 1e-3,
        "model.n_centers": 30}  # fmt: skip
    source = ArraySource(X.astype(np.float32), Y.astype(np.float32), unit_rows=16)
    uninterrupted = finished(settings(**options), source=source).model.posterior
    stopped(settings(tmp_path, **options), 2, source=source, test=source)
    resumed, resumed_twice = (
        finished(settings(tmp_path, **options), source=source).model.posterior for _ in range(2)
    )
    assert uninterrupted is not None
    for result in (resumed, resumed_twice):
        assert result is not None
        for name, array in uninterrupted.arrays().items():
            np.testing.assert_array_equal(result.arrays()[name], array)


def test_constant_output_has_zero_deviation() -> None:
    """Check it alone and beside other outputs."""
    X = np.random.default_rng(0).normal(size=(60, 2))
    one = KernelRegressor(kernel="gaussian", posterior=True, solver="direct", n_centers=60)
    y, std = one.fit(X, np.full(60, 5.0)).predict(X, return_std=True)
    np.testing.assert_array_equal(std, 0)
    np.testing.assert_allclose(y, 5)
    both_std = one.fit(X, np.c_[X[:, 0], np.full(60, 5.0)]).predict(X, return_std=True)[1]
    np.testing.assert_array_equal(both_std[:, 1], 0)
    assert (both_std[:, 0] > 0).all()


def test_posterior_memory_is_planned() -> None:
    problem = replace(problem_of(rows(0, 500, 3), 2, cycled=2000), complete=True, n_rows=2000)
    options = solver_settings(ridge=1e-3, posterior=True)
    method, _, buffers, why = resolve(replace(problem, posterior=True), options, 1 << 40)
    without_posterior = Direct().plan(problem, options, 1 << 40)[1]
    assert method.name == "direct"
    assert "posterior" in why
    # Three matrices while it is computed, and one while it is saved.
    assert buffers.peak - without_posterior.peak == (3 + 1) * 8 * 500**2


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"ridge": 0}, "needs a ridge"),
        ({"features": "nystrom", "n_centers": 20}, "nystrom features"),
        ({"solver": "block"}, "posterior=true is not defined for solver 'block'"),
    ],
)
def test_incompatible_settings_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        KernelRegressor(**PLAIN | changes).fit(X, Y)


def test_copies_classes_blocks_and_noise_free_targets_are_refused() -> None:
    with pytest.raises(ConfigError, match="every row as one more observation"):
        KernelRegressor(**PLAIN).fit(AugmentedSource(ArraySource(X, Y), 2))
    with pytest.raises(ConfigError, match="posterior"):
        KernelRegressor(**PLAIN).partial_fit(X, Y)
    with pytest.raises(ConfigError, match="partial_fit"):
        KernelRegressor(**PLAIN, solver="direct").partial_fit(X, Y)
    source = ArraySource(X, X[:, 0] > 0, classes=("a", "b"))
    config = settings(**{"solver.posterior": True, "solver.name": "direct"})
    with pytest.raises(ConfigError, match="data has classes"):
        finished(config, source=source)
    assert "posterior" not in KernelClassifier().get_params()


def test_model_without_posterior_suggests_remedy() -> None:
    model = KernelRegressor(**PLAIN | {"posterior": False}).fit(X, Y)
    with pytest.raises(ConfigError, match=r"return_std=True needs .* train with posterior=True"):
        model.predict(FRESH, return_std=True)
    with pytest.raises(ConfigError, match=r"std=True needs .* train with posterior=True"):
        model.predict(FRESH, return_std=True, out="a.csv")
    with_posterior = clone(model).set_params(posterior=True).fit(X, Y)
    with pytest.raises(ConfigError, match="cannot be combined"):
        with_posterior.predict(FRESH, return_std=True, interval=0.9)
