"""Compare kernel ridge regression on all rows with float64 algebra and scikit-learn."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from streamkern.backend.batch import Batch
from streamkern.estimator.estimators import KernelRegressor
from streamkern.rundir.run_log import read_log
from streamkern.solver import direct
from streamkern.solver.base import State
from streamkern.solver.direct import NARROW_ROWS, Direct
from streamkern.solver.equations import SINGULAR_NOTE
from streamkern.solver.kernel_ridge import KernelRidgeSolver as Solver
from streamkern.solver.method import Setup
from streamkern.solver.methods import resolve
from streamkern.stream.sources.arrays import ArraySource
from streamkern.train.online import Online
from tests import reference as ref
from tests import solver_problems
from tests.plans import solver_settings
from tests.runs import array_source, arrays, assert_same_bits, final, finished, settings, stopped

RIDGE = 1e-3
ALL = {"model.n_centers": "auto", "model.centers": "all", "solver.name": "direct"}


def make_case(ridge: float = RIDGE, precision: str = "float64") -> solver_problems.Case:
    """Return the case whose centers are all rows."""
    op = solver_problems.operator(precision=precision)
    return solver_problems.make_case(op, "direct, all rows", options=solver_settings(ridge=ridge))


def truth(case: solver_problems.Case, rows: np.ndarray, w: np.ndarray, ridge: float) -> np.ndarray:
    """Return the weights at `rows` with sample weights w, without square roots in the equations."""
    K = ref.laplace(case.X[rows], case.X[rows], 2.0)
    weighted = w > 0
    A = K[np.ix_(weighted, weighted)] + len(rows) * ridge * np.diag(1 / w[weighted])
    alpha = np.zeros((len(case.X), case.Y.shape[1]))
    alpha[rows[weighted]] = np.linalg.solve(A, case.Y[rows][weighted])
    return alpha


def read(case: solver_problems.Case, solver: Any, rows: np.ndarray, w: np.ndarray) -> State:
    """Return the state after these rows with their sample weights."""
    state: State = solver.init()
    for at in range(0, len(rows), case.m):
        part = rows[at : at + case.m]
        solver.step(state, Batch(case.X[part], case.Y[part], part, w[at : at + case.m]))
    return state


@pytest.mark.parametrize(("precision", "rtol"), [("float64", 1e-9), ("exact", 2e-3)])
def test_weights_solve_the_equations(precision: str, rtol: float) -> None:
    case = make_case(precision=precision)
    solver = case.solver()
    state = solver.init()
    order = np.random.default_rng(0).permutation(240)
    solver_problems.one_pass(case, solver, state, order)
    solver_problems.close(state.alpha, truth(case, np.arange(240), np.ones(240), RIDGE), rtol)
    assert solver.why_finished(state) is not None


@given(seed=st.integers(0, 1000), n=st.integers(1, 240), ridge=st.floats(1e-8, 1))
def test_partial_rows_with_zero_weights_are_solved(seed: int, n: int, ridge: float) -> None:
    case, rng = make_case(ridge), np.random.default_rng(seed)
    rows = np.sort(rng.choice(240, n, replace=False))
    w = rng.integers(0, 3, n) * 0.5
    solver = case.solver()
    state = read(case, solver, rows, w)
    desired = truth(case, rows, w, ridge)
    np.testing.assert_allclose(
        solver.weights(state), desired, rtol=0, atol=1e-6 * max(np.abs(desired).max(), 1e-30)
    )


def test_loo_prediction_equals_refit_without_row() -> None:
    """Check weights, some of them 0, and a separate ridge for an output."""
    case, rng = make_case(), np.random.default_rng(1)
    rows, w = np.arange(240), rng.integers(0, 3, 240) * 0.5
    solver = case.solver()
    c = case.Y.shape[1]
    solver.ridges = np.where(np.arange(c) == 0, 10 * RIDGE, RIDGE)
    state = read(case, solver, np.arange(240), w)
    F, Y, weights, origins = solver.leave_one_out(state)
    weighted = np.flatnonzero(w)
    np.testing.assert_allclose(weights, w[weighted])
    np.testing.assert_array_equal(origins, weighted)
    np.testing.assert_allclose(Y, case.Y[weighted], atol=1e-12)
    K = ref.laplace(case.X, case.X, 2.0)
    for location in (0, 7, len(weighted) - 1):
        other_weights = np.where(rows == weighted[location], 0.0, w)
        refits = [truth(case, rows, other_weights, ridge) for ridge in solver.ridges]
        alpha = np.stack([a[:, k] for k, a in enumerate(refits)], axis=1)
        np.testing.assert_allclose(F[location], K[weighted[location]] @ alpha, atol=1e-7)


@pytest.mark.parametrize("weighted", [False, True])
def test_search_measures_judged_rows_only(weighted: bool) -> None:
    """Compare the errors of all ridges with fits without one of the judged rows.

    The diagonal entries of so few rows are all computed. The Lanczos steps are exact for the ridge
    of the last factor, and have errors of up to 1 % for the ridges that are farthest from it.
    """
    case, rng, rows = make_case(), np.random.default_rng(4), np.arange(240)
    w = rng.integers(0, 3, 240) * 0.5 if weighted else np.ones(240)
    judged = np.zeros(240, bool)
    judged[rng.choice(240, 10, replace=False)] = True
    solver = case.solver(replace(case.setup, arrays=case.setup.arrays | {"judged": judged}))
    assert isinstance(solver, Solver)
    solver.ridge, solver.first_ridge, solver.leaves_rows_out = None, RIDGE, True
    state = read(case, solver, rows, w)
    solver.weights(state)
    counted = np.flatnonzero(judged & (w > 0))
    assert 3 < len(counted) <= 10
    K = ref.laplace(case.X, case.X, 2.0)
    assert len(solver.trials) > 10
    truths = []
    for ridge, _ in solver.trials:
        total = 0.0
        for row in counted:
            alpha = truth(case, rows, np.where(rows == row, 0.0, w), ridge)
            total += w[row] * ((K[row] @ alpha - case.Y[row]) ** 2).sum()
        truths.append(total / len(counted))
    errors = [error for _, error in solver.trials]
    np.testing.assert_allclose(errors, truths, rtol=0.03)
    assert np.abs(np.divide(errors, truths) - 1).min() < 1e-6


def test_loo_predictions_are_those_of_judged_rows() -> None:
    """Check rows of weight 0, and a row whose copy is not judged."""
    case, rng = make_case(), np.random.default_rng(5)
    X, Y = case.X[:240].copy(), case.Y[:240].copy()
    X[0], Y[0] = X[100], Y[100]
    case, judged = replace(case, X=X, Y=Y, Z=X), rng.random(240) < 0.3
    judged[0], judged[100] = False, True
    w = rng.integers(0, 3, 240) * 0.5
    w[[0, 100]] = 1
    results = []
    for mask in (None, judged):
        arrays = {} if mask is None else {"judged": mask}
        solver = case.solver(replace(case.setup, arrays=case.setup.arrays | arrays))
        results.append(solver.leave_one_out(read(case, solver, np.arange(240), w)))
    kept = judged[w > 0]
    assert 20 < kept.sum() < 100
    for every, of_judged in zip(*results, strict=True):
        np.testing.assert_array_equal(of_judged, every[kept])


def test_copies_are_left_out_together() -> None:
    """Check that equal rows with other targets, and more than `MAX_COPIES`, are not."""
    rng = np.random.default_rng(2)
    case = make_case()
    X, Y = case.X[:240].copy(), case.Y[:240].copy()
    X[:40], Y[:40] = X[40:80], Y[40:80]
    X[5] = X[6]
    X[100:120], Y[100:120] = X[100], Y[100]
    places = rng.permutation(240)
    case = replace(case, X=X[places], Y=Y[places], Z=X[places])
    solver, w = case.solver(), np.ones(240)
    state = read(case, solver, np.arange(240), w)
    F, _, _, origins = solver.leave_one_out(state)
    K = ref.laplace(case.X, case.X, 2.0)
    for row in (0, 30, 5, 6, 60, 110, 200):
        group = [row] if row in (5, 6, 110, 200) else [row % 40, row % 40 + 40]
        positions = [int(np.flatnonzero(places == k)[0]) for k in group]
        other_weights = w.copy()
        other_weights[positions] = 0
        alpha = truth(case, np.arange(240), other_weights, RIDGE)
        location = int(np.flatnonzero(places == row)[0])
        assert set(np.flatnonzero(origins == origins[location])) == set(positions)
        np.testing.assert_allclose(F[location], K[location] @ alpha, atol=1e-7, err_msg=str(row))


def test_kept_factor_gives_same_loo_bits() -> None:
    case, predictions = make_case(), []
    for keeps in (False, True):
        solver = case.solver()
        solver.keeps_factor = keeps
        state = solver.init()
        solver_problems.one_pass(case, solver, state)
        with patch.object(solver, "_factor_with", wraps=solver._factor_with) as factor:
            predictions.append(solver.leave_one_out(state)[0])
            assert factor.call_count == (not keeps)
            solver.leave_one_out(state)  # it was given up, and is made again
            assert factor.call_count == 1 + (not keeps)
    np.testing.assert_array_equal(*predictions)


@pytest.mark.slow
@examples(max_examples=30)
@given(seed=st.integers(0, 1000), ridge=st.floats(1e-6, 1), narrow=st.sampled_from([0.3, 2.0, 20]))
def test_float32_factor_is_refined(seed: int, ridge: float, narrow: float) -> None:
    """Check weights, some of them 0, and a separate ridge for an output."""
    rng, case = np.random.default_rng(seed), make_case(ridge, precision="exact")
    w, weights = rng.integers(0, 3, 240) * 0.5, []
    for dtype in (np.float64, np.float32):
        solver = case.solver()
        solver.factor_dtype = np.dtype(dtype)
        solver.ridges = np.where(np.arange(case.Y.shape[1]) == 0, narrow * ridge, ridge)
        state = read(case, solver, np.arange(240), w)
        weights.append((solver.weights(state).copy(), solver.leave_one_out(state).F))
    K = ref.laplace(case.X, case.X, 2.0)
    (wide, wide_left), (refined, refined_left) = weights
    np.testing.assert_allclose(K @ refined, K @ wide, atol=1e-5 * np.abs(case.Y).max())
    np.testing.assert_allclose(refined_left, wide_left, atol=1e-2 * np.abs(case.Y).max())


@pytest.mark.parametrize("weighted", [False, True])
def test_float32_kernel_values_are_evaluated_once(
    weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that steps of conjugate gradient evaluate only the squares on the diagonal again."""
    monkeypatch.setattr("streamkern.solver.equations.KERNEL_SLAB_ROWS", 64)
    monkeypatch.setattr("streamkern.solver.kernel_ridge.PRODUCT_COLUMNS", 32)
    monkeypatch.setattr("streamkern.backend.dense.SINGLE_THREAD_COLUMNS", 32)
    rng, case = np.random.default_rng(0), make_case(precision="exact")
    solver = case.solver()
    monkeypatch.setattr(solver.backend, "chunk", 64)
    solver.factor_dtype = np.dtype(np.float32)
    w = rng.integers(0, 3, 240) * 0.5 if weighted else np.ones(240)
    state, evaluated, product = read(case, solver, np.arange(240), w), [], solver.op.product

    def counted(A: Any, B: Any, *arguments: Any, **options: Any) -> Any:
        evaluated.append(len(A) * len(B))
        return product(A, B, *arguments, **options)

    weights = []
    for solver.keeps_upper in (True, False):
        state.averaged = 0
        evaluated.clear()
        with patch.object(solver.op, "product", counted):
            weights.append(solver.weights(state).copy())
        slabs = 4  # of 64 rows, the last of 48
        if solver.keeps_upper:
            assert evaluated[slabs : 2 * slabs] == [64**2] * 3 + [48**2]
        else:
            assert evaluated[:slabs] == evaluated[slabs : 2 * slabs]
    np.testing.assert_array_equal(*weights)
    desired = truth(case, np.arange(240), w, RIDGE)
    solver_problems.close(weights[0], desired, 2e-3)


def test_jitter_grows_only_if_equations_are_unsolvable() -> None:
    """Check copies of rows without a ridge, for which a float32 factor needs a larger jitter."""
    X = np.repeat(solver_problems.rows(0, 120, 3), 2, axis=0).astype(np.float32)
    case = make_case(1e-9, precision="exact")
    case = replace(case, X=X, Z=X, Y=np.repeat(case.Y[:120], 2, axis=0))
    solvers = []
    for dtype in (np.float64, np.float32):
        solver = case.solver()
        solver.factor_dtype = np.dtype(dtype)
        solver_problems.one_pass(case, solver, state := solver.init())
        solvers.append((solver.jitter, ref.laplace(X, X, 2.0) @ state.average))
    (wide, F), (narrow, refined) = solvers
    assert narrow <= 10 * wide
    np.testing.assert_allclose(refined, F, atol=1e-2 * np.abs(case.Y).max())


def test_float32_is_used_for_many_rows_without_posterior() -> None:
    problem = solver_problems.problem_of(solver_problems.rows(0, 5000, 3), 2, cycled=5000)
    problem = solver_problems.replace(problem, rows_are_centers=True, p=NARROW_ROWS, itemsize=4)
    for changes, dtype in (
        ({}, np.float32), ({"p": NARROW_ROWS - 1}, np.float64), ({"itemsize": 8}, np.float64),
        ({"posterior": True}, np.float64),
    ):  # fmt: skip
        assert Direct.factor_dtype(solver_problems.replace(problem, **changes)) == dtype


def polynomial(X: np.ndarray, Z: np.ndarray, _: float) -> np.ndarray:
    return np.asarray((X @ Z.T + 1) ** 6)


@pytest.mark.parametrize(
    ("kernel", "n", "tau"),
    [(ref.laplace, 200, 1e-4), (ref.laplace, 200, 1e-2), (ref.laplace, 800, 1e-4),
     (ref.laplace, 800, 1e-2), (polynomial, 400, 10.0)],
)  # fmt: skip
def test_rounding_bound_equals_simulated_rounding(kernel: Any, n: int, tau: float) -> None:
    """Compare the bound of the rule with rounded kernel values and weights in float64.

    Polynomial kernels have values far above 1, and so larger rounding errors.
    """
    rng = np.random.default_rng(0)
    X = rng.standard_normal((n, 4))
    y = np.sin(X[:, 0]) + 0.3 * rng.standard_normal(n)
    K = kernel(X, X, 2.0)
    values = float(np.sqrt((K**2).mean())) if kernel is polynomial else 1.0
    alpha = np.linalg.solve(K + tau * np.eye(n), y)
    change = (K.astype(np.float32) - K) @ alpha
    measured = np.linalg.norm(change) / np.linalg.norm(tau * alpha)
    bound = direct.ROUNDOFF * np.sqrt(n) * values / tau
    assert 0.01 * bound < measured < bound
    problem = solver_problems.replace(
        solver_problems.problem_of(X, 1, cycled=n), rows_are_centers=True, p=n
    )
    with patch.object(direct, "NARROW_ROWS", 1):
        assert Direct.rounding_shows(problem, tau / n, values) == (bound >= direct.MIN_ROUNDING)
        assert not (kernel is polynomial and Direct.rounding_shows(problem, tau / n))


def test_zero_ridge_interpolates_targets() -> None:
    case = make_case(0.0)
    solver = case.solver()
    state = solver.init()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solver_problems.one_pass(case, solver, state)
    np.testing.assert_allclose(ref.laplace(case.X, case.X, 2.0) @ state.alpha, case.Y, atol=1e-9)


def test_equal_rows_without_ridge_give_singular_warning() -> None:
    X = np.repeat(solver_problems.rows(0, 100, 3), 2, axis=0).astype(np.float32)
    y = np.sin(X[:, 0]) + 0.1 * solver_problems.rows(1, 200, 1)[:, 0].astype(np.float32)
    with pytest.warns(UserWarning, match=SINGULAR_NOTE):
        KernelRegressor(kernel="laplace", solver="direct", ridge=0.0, bandwidth=2.0).fit(X, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = KernelRegressor(kernel="laplace", solver="direct", ridge=1e-4, bandwidth=2.0).fit(
            X, y
        )
    K = ref.laplace(X, X, 2.0)
    mean = y.mean()
    alpha = np.linalg.solve(K + 200 * 1e-4 * np.eye(200), y - mean)
    np.testing.assert_allclose(model.predict(X), K @ alpha + mean, atol=2e-3)


# -------------------------------------------------------------------------------- where it is


def sizes_of(**changes: object) -> object:
    options = solver_settings(ridge=RIDGE)
    plain = solver_problems.problem_of(solver_problems.rows(0, 500, 3), 2, cycled=500)
    return Direct().plan(solver_problems.replace(plain, **changes), options, 1 << 40)[0].n_sums


def test_kernel_ridge_requires_unmodified_rows_as_centers() -> None:
    assert sizes_of(rows_are_centers=True) == 0
    assert sizes_of() == 1


def test_auto_chooses_kernel_ridge_for_few_rows() -> None:
    problem = solver_problems.replace(
        solver_problems.problem_of(solver_problems.rows(0, 2000, 3), 1, cycled=2000),
        rows_are_centers=True,
        finds_ridge=True,
    )  # fmt: skip
    method, sizes, _, _ = resolve(problem, solver_settings(), 1 << 40)
    assert method.takes_rows(sizes)


@pytest.mark.parametrize("weighted", [False, True])
def test_ridge_has_least_leave_one_out_error(weighted: bool) -> None:
    """Check a Gaussian kernel for a dense and a wide group of rows, some of them without weight.

    The dense group hides the errors of the wide one from generalised cross-validation, whose ridge
    has more than twice the least error.
    """
    rng, n = np.random.default_rng(0), 1200
    wide = rng.random(n) < 0.5
    X = rng.normal(size=(n, 20)) * np.where(wide, 2.0, 1.0)[:, None]
    w = rng.choice([0.0, 0.5, 2.0], n, p=[0.1, 0.5, 0.4]) if weighted else np.ones(n)
    model = KernelRegressor(
        kernel="gaussian", bandwidth=9.0, metric="none", scale="none", solver="direct",
        centers="all", precision="float64",
    ).fit(X, wide, sample_weight=w if weighted else None)  # fmt: skip
    root = np.sqrt(w / w.mean())[w > 0]
    K = ref.gaussian(X, X, 9.0)[np.ix_(w > 0, w > 0)] * np.outer(root, root)
    y = (wide - np.average(wide, weights=w))[w > 0] * root

    def left_out_error(ridge: float) -> float:
        inverse = np.linalg.inv(K + n * ridge * np.eye(len(K)))
        return float(((inverse @ y / inverse.diagonal()) ** 2).sum())

    least = min(map(left_out_error, np.geomspace(1e-8, 1e-2, 13)))
    assert left_out_error(model.report_["ridge"]) <= 1.05 * least


def test_runs_of_earlier_versions_keep_generalised_cross_validation() -> None:
    case = make_case()
    for recorded, leaves_rows_out in ((True, False), (direct.LEAVE_ONE_OUT, True)):
        meta = {"rules": [], "batch_size": case.m, "refines_ridge": recorded}
        solver = case.solver(Setup({}, meta))
        assert isinstance(solver, Solver)
        assert solver.leaves_rows_out is leaves_rows_out


@pytest.mark.parametrize("threads", [1, 2])
def test_stopped_run_finds_the_same_ridge(threads: int, tmp_path: Path) -> None:
    """Check runs with more rows than the sample has, of which one stops before the epoch's end."""
    uninterrupted, parts = tmp_path / "whole", tmp_path / "parts"
    options = {**ALL, "model.kernel": "gaussian", "model.bandwidth": 3.0, "solver.ridge": "auto"}
    expected = finished(settings(uninterrupted, **options), source=array_source(1100))
    stopped(settings(parts, **options), 3, source=array_source(1100))
    resumed = finished(
        settings(parts, **options, **{"run.threads": threads}), source=array_source(1100)
    )
    assert resumed.ridge == expected.ridge
    [end] = [event for event in read_log(parts / "log.jsonl") if event["event"] == "pass"]
    assert len(end["tried"]) > 5
    assert_same_bits(final(parts), final(uninterrupted))


def test_stopped_run_resumes_to_same_bits(tmp_path: Path) -> None:
    uninterrupted, parts = tmp_path / "whole", tmp_path / "parts"
    finished(settings(uninterrupted, **ALL), source=array_source())
    stopped(settings(parts, **ALL), 3, source=array_source())
    finished(settings(parts, **ALL), source=array_source())
    assert_same_bits(final(parts), final(uninterrupted))
    assert (final(uninterrupted)["root"] == 1).all()


def test_kernel_ridge_holds_no_sums_and_takes_one_pass() -> None:
    X, y = arrays()
    values = (y == 1) + X[:, 0]
    model = KernelRegressor(
        kernel="laplace", centers="all", epochs=3, bandwidth=3.0, scale="none", solver="direct"
    ).fit(X, values)  # fmt: skip
    ridge = model.report_["ridge"]
    assert ridge > 0
    assert model.report_["samples"] == len(X)
    K, mean = ref.laplace(X, X, 3.0), values.mean()
    alpha = np.linalg.solve(K + len(X) * ridge * np.eye(len(X)), values - mean)
    fresh = arrays(seed=1)[0]  # of a row and itself, float32 knows the distance to 1e-3
    expected = ref.laplace(fresh, X, 3.0) @ alpha + mean
    np.testing.assert_allclose(model.predict(fresh), expected, atol=1e-4)


def test_partial_fit_sums_later_blocks() -> None:
    """Check `partial_fit`, whose centers are the rows of the first block."""
    config = settings(**{"solver.name": "direct", "solver.ridge": RIDGE, "model.n_centers": 60})
    online = Online(config)
    for k in range(3):
        X, y = arrays(60, seed=k)
        result = online.advance(ArraySource(X, y, classes=("ant", "bee", "cat")))
    result.model.backend.close()
    X, y = (np.concatenate([arrays(60, seed=k)[i] for k in range(3)]) for i in range(2))
    Z = np.float64(result.Z)
    K, mean = ref.laplace(X, Z, 3.0), np.eye(3)[y[:60]].mean(axis=0)
    A = K.T @ K / 180 + RIDGE * ref.laplace(Z, Z, 3.0)
    alpha = np.linalg.solve(A, K.T @ (np.eye(3)[y] - mean) / 180)
    np.testing.assert_allclose(result.model.predict(ArraySource(X)), K @ alpha + mean, atol=1e-3)


def test_smooth_noise_free_targets_need_few_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check equations whose ridge rounding hides, so that a float32 factor needs a jitter."""
    rng, products, factors = np.random.default_rng(0), 0, 0
    X = rng.uniform(-1, 1, (1500, 3)).astype(np.float32)
    y, times, factor = np.sin(X[:, 0]) + X[:, 1] * X[:, 2], Solver._kernel_times, Solver._fill

    def counted(self: Solver, L: Any, v: Any) -> Any:
        nonlocal products
        products += 1
        return times(self, L, v)

    def filled(self: Solver, A: Any, root: Any) -> None:
        nonlocal factors
        factors += 1
        factor(self, A, root)

    monkeypatch.setattr(Solver, "_kernel_times", counted)
    monkeypatch.setattr(Solver, "_fill", filled)
    errors = []
    for rows in (10_000, 100):  # a factor in float64, and one in float32
        monkeypatch.setattr(direct, "NARROW_ROWS", rows)
        model = KernelRegressor(kernel="matern52", bandwidth=8.0, metric="none")
        model.fit(X[:1200], y[:1200])
        errors.append(float(np.abs(model.predict(X[1200:]) - y[1200:]).max()))
    assert 0 < products <= 60
    assert factors <= 20
    assert errors[1] <= 3 * errors[0] + 1e-3


def test_factor_precision_is_kept_at_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a run of a version that chose another precision for this number of rows."""
    config = settings(tmp_path / "a", **(ALL | {"run.checkpoint_every": 1}))
    stopped(config, 1, source=array_source(), test=array_source(10, 5))
    monkeypatch.setattr(direct, "NARROW_ROWS", 1)
    resumed = finished(config, source=array_source(), test=array_source(10, 5))
    assert resumed.meta["setup"]["factor"] == "float64"
    changed = finished(settings(tmp_path / "b", **ALL), source=array_source())
    assert changed.meta["setup"]["factor"] == "float32"
    with pytest.raises(AssertionError):
        assert_same_bits(final(tmp_path / "a"), final(tmp_path / "b"))


@pytest.mark.parametrize(("kernel", "n", "tau"), [("gaussian", 400, 3e-6), ("matern52", 900, 3e-7)])
def test_equations_near_factor_rounding_are_solved(
    kernel: str, n: int, tau: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check smooth kernels without noise, for which a default fit of 6000 rows failed."""
    monkeypatch.setattr(direct, "NARROW_ROWS", 1)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n + 300, 3))
    y = np.sin(X[:, 0]) + X[:, 1] * X[:, 2]
    options: dict[str, Any] = {
        "kernel": kernel, "bandwidth": 30.0, "metric": "none", "ridge": tau / n, "random_state": 0,
    }  # fmt: skip
    errors = []
    for precision in ("float64", "exact"):
        model = KernelRegressor(precision=precision, **options).fit(X[:n], y[:n])
        errors.append(float(np.sqrt(np.mean((model.predict(X[n:]) - y[n:]) ** 2))))
    assert errors[1] <= 1.5 * errors[0] + 0.03
