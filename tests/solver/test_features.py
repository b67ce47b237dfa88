"""Check Fourier and Nystrom features against their kernels, and the methods that train them."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given
from hypothesis import strategies as st

from streamkern.backend.batch import Batch
from streamkern.basics.errors import ConfigError
from streamkern.kernels import builtin
from streamkern.kernels.builtin import get_kernel
from streamkern.kernels.fourier import FourierFeatures, frequencies
from streamkern.kernels.products import KernelOperator
from streamkern.solver.base import Solver
from streamkern.train.resolve.resolved_run import open_run
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.saved_model import load_model
from tests import reference as ref
from tests.plans import solver_settings
from tests.runs import METHODS, array_source, arrays, finished, settings, stopped, stream
from tests.solver_problems import (
    Array,
    Case,
    close,
    computed,
    make_case,
    operator,
    rows,
    small_sizes,
)

KERNEL = ref.make_kernel("laplace", 2.0)


def dispersal(gamma: float, A: Array, B: Array, bandwidth: float) -> Array:
    """Return exp(-r^gamma)."""
    return np.asarray(np.exp(-((ref.distances(A, B) / bandwidth) ** gamma)))


SAMPLED = {
    "gaussian": ref.gaussian,
    "laplace": ref.laplace,
    "laplace_l1": ref.laplace_l1,
    "cauchy": ref.cauchy,
    "matern32": ref.matern32,
    "matern52": ref.matern52,
    **{f"dispersal {gamma}": partial(dispersal, gamma) for gamma in (0.5, 1.3, 2.0)},
}


def features(X: Array, Z: Array) -> Array:
    """Return phi(X), (n, D), in float64."""
    return np.asarray(np.sqrt(2 / len(Z)) * np.cos(X @ Z[:, :-1].T + Z[:, -1]))


# --- what Fourier features approximate ----------------------------------------------------------


@pytest.mark.parametrize("name", sorted(SAMPLED))
def test_spectral_measure_of_every_kernel_is_exact(name: str) -> None:
    """Check 50 000 draws within 5 standard errors, each at most 1 / sqrt(50 000)."""
    A, B = rows(0, 12, 3), rows(1, 12, 3)
    gamma = {"gamma": float(name.split()[1])} if " " in name else {}
    kernel = get_kernel({"kind": name.split()[0], "bandwidth": 1.7, **gamma})
    phi = [features(X, frequencies(kernel, 3, 100_000, 1)) for X in (A, B)]
    error = phi[0] @ phi[1].T - SAMPLED[name](A, B, 1.7)
    assert np.abs(error).max() < 5 / math.sqrt(50_000)


@pytest.mark.parametrize("name", ["gaussian", "laplace", "laplace_l1"])
def test_feature_error_decreases_as_inverse_square_root(name: str) -> None:
    """Check the slope of log error against log D over 8 seeds: -1/2 within 0.1."""
    A, B = rows(0, 20, 4), rows(1, 20, 4)
    kernel, truth = get_kernel(name, 3.0), SAMPLED[name](A, B, 3.0)
    numbers = [2**k for k in range(4, 14)]
    errors = []
    for D in numbers:
        Z = [frequencies(kernel, 4, D, seed) for seed in range(8)]
        squares = [((features(A, z) @ features(B, z).T - truth) ** 2).mean() for z in Z]
        errors.append(math.sqrt(np.mean(squares)))
    slope = np.polyfit(np.log(numbers), np.log(errors), 1)[0]
    assert -0.6 < slope < -0.4
    # A pair has at most the variance of a cosine.
    assert all(e < math.sqrt(2 / D) for e, D in zip(errors, numbers, strict=True))


@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 1000))
def test_operator_evaluates_fourier_features(half: int, d: int, seed: int) -> None:
    """Check any number of columns, and that every row has norm 1."""
    Z = frequencies(get_kernel("laplace", 2.0), d, 2 * half, seed)
    assert Z.shape == (2 * half, d + 1)
    X = rows(seed, 9, d)
    op = KernelOperator(FourierFeatures(2 * half, {"kernel": "laplace"}), operator().backend)
    op64 = KernelOperator(op.kernel, op.backend, "float64")
    phi = op64.matrix(op64.points(X, left=True), op64.points(Z, right=True))
    np.testing.assert_allclose(phi, features(X, Z), atol=1e-12 * (1 + np.abs(Z).max()))
    np.testing.assert_allclose((phi**2).sum(axis=1), 1, atol=1e-12 * (1 + np.abs(Z).max()))
    single = op.matrix(op.points(X, left=True), op.points(Z, right=True))
    # float32 knows x.omega to about eps |x| |omega|
    np.testing.assert_allclose(single, phi, atol=2e-6 * (1 + np.abs(Z).max()))


@pytest.mark.parametrize("name", ["gaussian", "laplace_l1"])
@pytest.mark.parametrize("shape", [(3,), (3, 2)])
def test_metric_transforms_frequencies(name: str, shape: tuple[int, ...]) -> None:
    A, B, metric = rows(0, 8, 3), rows(1, 8, 3), rows(2, *shape)
    kernel = get_kernel(name, 1.7, metric=metric)
    phi = [features(X, frequencies(kernel, 3, 100_000, 1)) for X in (A, B)]
    transformed = [X * metric if metric.ndim == 1 else X @ metric for X in (A, B)]
    error = phi[0] @ phi[1].T - SAMPLED[name](*transformed, 1.7)
    assert np.abs(error).max() < 5 / math.sqrt(50_000)


def test_frequencies_depend_on_seed_only() -> None:
    one, two, other_seed = (frequencies(builtin.Cauchy(2.0), 3, 10, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, two)
    assert not np.isclose(one[:, :-1], other_seed[:, :-1]).any()
    np.testing.assert_array_equal(one[:5, :-1], one[5:, :-1])


# --- methods step by step -----------------------------------------------------------------------


def feature_matrices(case: Case) -> tuple[Array, Array, Array]:
    """Return phi of the rows, of the sample and of the probe, in float64."""
    if case.features == "fourier":
        phi = [features(X, case.Z) for X in (case.X, case.X_s, case.probe)]
    else:
        K = KERNEL(case.Z, case.Z) + case.setup.meta["jitter"] * np.eye(len(case.Z))
        L = np.linalg.cholesky(K)
        phi = [
            scipy.linalg.solve_triangular(L, KERNEL(X, case.Z).T, lower=True).T
            for X in (case.X, case.X_s, case.probe)
        ]
    return phi[0], phi[1], phi[2]


@pytest.mark.parametrize("ridge", [0.0, 0.05])
@pytest.mark.parametrize("features", ["fourier", "nystrom"])
@pytest.mark.parametrize("solver", ["sgd", "eigenpro1"])
def test_steps_equal_explicit_feature_iteration(solver: str, features: str, ridge: float) -> None:
    """Check w <- w - eta P (Phi^T (Phi w - Y) / m + ridge w), and its measured quantities."""
    options = solver_settings(ridge=ridge)
    case = make_case(operator(), f"{solver}, {features}", options=options)
    phi, sample, probe = feature_matrices(case)
    p, q = len(case.Z), case.setup.meta["level"]
    P = np.eye(p)
    if solver == "eigenpro1":
        lam, e = (a[..., ::-1] for a in np.linalg.eigh(sample.T @ sample / len(sample)))
        P -= (e[:, :q] * (1 - 0.25 * (lam[q] + ridge) / (lam[:q] + ridge))) @ e[:, :q].T
    solved, w = case.solver(), np.zeros((p, 2))
    [rule] = solved.rules()
    S = probe @ P @ probe.T
    top = np.linalg.eigvalsh(S / len(probe))[-1]
    assert top * (1 - 1e-9) <= rule.lambda_1 - ridge <= 1.01 * top
    assert rule.leverage == pytest.approx(S.diagonal().max() + (rule.lambda_1 if ridge else 0))
    state = solved.init()
    for t in range(12):
        batch = case.batch(t)
        r = phi[batch] @ w - case.Y[batch]
        w -= rule.eta(len(batch)) * P @ (phi[batch].T @ r / len(batch) + ridge * w)
        assert case.step(solved, state, t) == pytest.approx((r**2).sum() / len(batch), rel=1e-8)
        close(case.columns(case.X) @ state.alpha, phi @ w, 1e-8)
    # The block solver has another average, and a damping.
    assert (solved.average_k, "damping" in solved.remedy) == (Solver.average_k, False)
    if features == "fourier":
        close(state.alpha, w, 1e-8)
        assert not state.pending


@pytest.mark.parametrize("ridge", [0.0, 0.02])
def test_direct_on_features_equals_ridge_regression(ridge: float) -> None:
    case = make_case(operator(), "direct, fourier", options=solver_settings(ridge=ridge))
    solver, phi = case.solver(), feature_matrices(case)[0]
    state, n = solver.init(), len(case.X)
    for part in np.array_split(np.arange(n), n // case.sizes.batch_size + 1):
        solver.step(state, Batch(case.X[part], case.Y[part], part))
    solver.end_epoch(state)
    w = np.linalg.solve(phi.T @ phi / n + ridge * np.eye(phi.shape[1]), phi.T @ case.Y / n)
    close(case.columns(case.X) @ state.alpha, phi @ w, 1e-6)


def test_many_features_are_summed_in_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that products of the sample are summed over columns that are evaluated in parts."""
    full = make_case(operator(), "eigenpro1, fourier")
    monkeypatch.setattr("streamkern.solver.linear.FEATURE_COLUMNS", 5)
    parts = make_case(operator(), "eigenpro1, fourier")
    for name in ("E", "D"):
        close(parts.setup.arrays[name], full.setup.arrays[name], 1e-7)
    assert parts.setup.meta["rules"][0] == pytest.approx(full.setup.meta["rules"][0])


def test_nystrom_features_equal_block_model() -> None:
    """Check that the block preconditioner uses the same norm of the weights."""
    case = make_case(operator(), "block")
    block_setup = make_case(operator(), "block, nystrom").setup
    np.testing.assert_array_equal(block_setup.arrays["H.0"], case.setup.arrays["H.0"])


def test_features_that_vanish_on_all_rows_are_refused() -> None:
    op, far_rows = operator(bandwidth=1e-3), 100 + rows(2, 60, 3)
    sizes = small_sizes("sgd", "nystrom", level=0)
    Z = rows(1, 24, 3)
    with pytest.raises(ConfigError, match="bandwidth is too small"):
        computed(op, Z, far_rows, far_rows, sizes, solver_settings(), features="nystrom")


# --- runs ---------------------------------------------------------------------------------------

FOURIER = {"model.features": "fourier", "model.n_centers": "auto", "model.n_features": 80}


@pytest.mark.parametrize("is_given", [False, True])
def test_run_stores_frequencies_with_model(is_given: bool, tmp_path: Path) -> None:
    """Check that its frequencies are stored with the run, and used for predictions."""
    config = settings(tmp_path, **METHODS["fourier"], **{"model.bandwidth": "auto"})
    if is_given:
        config = config.with_overrides({"model.kernel": builtin.Gaussian(3.0)})
    stopped(config, 5, source=stream("fourier"))
    result = finished(config, source=stream("fourier"))
    assert result.Z.shape == (80, 6)
    described = result.meta["kernel"]
    width = described["of"]["bandwidth"]
    assert (width == 3.0) is is_given
    seeded = frequencies(get_kernel("gaussian", width), 5, 80, 0)[result.order]
    np.testing.assert_array_equal(result.Z, seeded.astype(np.float32))
    model = load_model(tmp_path, device="cpu", threads=1)
    X, _ = arrays(20, 7)
    with model.backend:
        values = model.values(X)
    Z, weights = result.Z.astype(np.float64), np.asarray(result.model.weights, np.float64)
    expected = model.targets.mean + features(np.float64(X), Z) @ weights
    np.testing.assert_allclose(values, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({**FOURIER, "model.n_features": 0}, "n_features=0 must be .auto. or a whole number, at l"),
        ({**FOURIER, "model.n_features": 81}, "n_features=81 must be even"),
        ({**FOURIER, "solver.name": "eigenpro2"}, "use one of block, sgd, eigenpro1"),
        ({"model.features": "nystrom", "solver.name": "eigenpro4"}, "cannot be trained by"),
        ({**FOURIER, "model.centers": "all"}, "has no centers; leave centers and n_centers out"),
        ({**FOURIER, "model.n_centers": 9}, "has no centers"),
        ({"model.n_features": 10}, "n_features=10 is for model.features='fourier'"),
        ({**FOURIER, "model.kernel": "polynomial"}, "does not support Polynomial"),
        (
            {**FOURIER, "model.kernel": {"kind": "sum", "parts": ["laplace", "cauchy"]}},
            "does not support",
        ),
        ({"solver.name": "sgd"}, "or features='nystrom' for chosen centers"),
    ],
)
def test_invalid_feature_settings_are_refused(overrides: dict[str, Any], message: str) -> None:
    width = {"model.bandwidth": "auto"} if overrides.get("model.kernel") == "polynomial" else {}
    with pytest.raises(ConfigError, match=message):
        finished(settings(**(width | overrides)), source=array_source())


def test_given_centers_are_refused_with_features() -> None:
    with pytest.raises(ConfigError, match="has no centers; leave centers and n_centers out"):
        finished(settings(**FOURIER), source=array_source(), centers=np.zeros((4, 5)))


@pytest.mark.parametrize("method", ["sgd", "eigenpro1", "block"])
@pytest.mark.parametrize("name", ["fourier", "nystrom"])
def test_plan_counts_memory_of_features(name: str, method: str) -> None:
    overrides = {"model.features": name, "solver.name": method, "run.memory": "4 GiB"}
    if name == "fourier":
        overrides |= {"model.n_features": 80, "model.n_centers": "auto"}
    run = open_run(settings(**overrides), RunInputs(array_source()))
    run.backend.close()
    assert (run.sizes.solver, run.method.in_place) == (method, False)
    squares = [
        buffer_name for _, buffer_name, size in run.buffers.lines if "L^-1" in buffer_name and size
    ]
    assert len(squares) == (name == "nystrom" and method != "block")
