"""Check the direct solver against least squares of the kernel matrix in float64."""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkern.backend.batch import Batch
from streamkern.basics.errors import DivergenceError, MemoryBudgetError
from streamkern.cli.run_info import run_overview, run_text
from streamkern.config.run_config import RunConfig
from streamkern.rundir.run_log import read_log
from streamkern.solver.direct import Direct
from streamkern.solver.methods import resolve
from streamkern.solver.precondition.held_out import FOLDS, held_out_parts
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.mixture import MixtureSource
from streamkern.stream.sources.transforms import GaussianNoise, Scale
from streamkern.stream.sources.user import GeneratorSource
from streamkern.train.saved_model import load_model
from tests import reference as ref
from tests.plans import PLAIN, solver_settings
from tests.runs import CLASSES, array_source, arrays, finished, settings, stopped, stream
from tests.solver_problems import (
    Array,
    Case,
    close,
    computed,
    make_case,
    one_pass,
    operator,
    problem_of,
    rows,
)

KERNEL = ref.make_kernel("laplace", 2.0)
DIRECT = {"solver.name": "direct"}


def replace_centers(case: Case, Z: Array) -> Case:
    """Return the case with other centers."""
    setup = computed(case.op, Z, case.X_s, case.probe, case.sizes, case.options)
    return replace(case, Z=Z, setup=setup)


def case_with_centers(Z: Array, precision: str = "float64", bandwidth: float = 2.0) -> Case:
    """Return the case of solver "direct" with these centers."""
    return replace_centers(
        make_case(operator(precision=precision, bandwidth=bandwidth), "direct"), Z
    )


@pytest.mark.parametrize(
    ("precision", "ridge"),
    [("float64", 0.0), ("float64", 1e-4), ("float64", 0.1), ("float64", 10.0), ("exact", 0.0),
     ("exact", 1e-3)],
)  # fmt: skip
def test_weights_equal_least_squares(precision: str, ridge: float) -> None:
    """Compare predictions, with an error that sums in float32 would exceed."""
    case = make_case(operator(precision=precision), "direct", options=solver_settings(ridge=ridge))
    solver = case.solver()
    state = solver.init()
    entries = one_pass(case, solver, state)
    K, K_zz = KERNEL(case.X, case.Z), KERNEL(case.Z, case.Z)
    truth = ref.ridge(K, case.Y, K_zz, ridge) if ridge else ref.exact_least_squares(K, case.Y)
    if precision == "exact":
        close(K @ solver.weights(state).astype(np.float64), K @ truth, 1e-5)
        return
    close(solver.weights(state), truth, 1e-9)
    assert entries == {"rows": 240, "jitter": pytest.approx(0, abs=1e-13)}


@given(cuts=st.lists(st.integers(1, 239), max_size=8), seed=st.integers(0, 99))
def test_weights_do_not_depend_on_batches_and_passes(cuts: list[int], seed: int) -> None:
    """Check epochs of any length, and losses with the weights of the epochs before."""
    case = make_case(operator(), "direct")
    solver = case.solver()
    state, ids = solver.init(), np.random.default_rng(seed).permutation(240)
    for part in np.split(ids, sorted(set(cuts))):
        one_pass(case, solver, state, part)
    K = KERNEL(case.X, case.Z)
    close(solver.weights(state), ref.exact_least_squares(K, case.Y), 1e-9)
    np.testing.assert_array_equal(state.alpha, solver.weights(state))
    X, Y = case.X[:20], case.Y[:20]
    loss = solver.step(state, Batch(X, Y, np.arange(20)))
    expected = ((K[:20] @ state.alpha - Y) ** 2).sum() / 20
    np.testing.assert_allclose(loss.sum(axis=1), [expected, (Y**2).sum() / 20], rtol=1e-10)


def test_mid_pass_weights_fit_rows_so_far() -> None:
    case = make_case(operator(), "direct")
    solver = case.solver()
    state = solver.init()
    assert not solver.weights(state).any()
    for t in range(4):
        case.step(solver, state, t)
    ids = np.concatenate([case.batch(t) for t in range(4)])
    weights = solver.weights(state)
    close(weights, ref.exact_least_squares(KERNEL(case.X[ids], case.Z), case.Y[ids]), 1e-8)
    state.pending["B"][...] = np.nan  # not solved for again
    assert solver.weights(state) is weights
    assert np.isfinite(weights).all()


# --- the ridge, found on held-out rows ----------------------------------------------------------


def folds(case: Case) -> list[npt.NDArray[np.int64]]:
    """Return the rows held out in turn, by `held_out_parts`, without rows that are centers."""
    part = held_out_parts(np.arange(len(case.X)), FOLDS)
    part[(case.X[:, None] == case.Z).all(axis=2).any(axis=1)] = 0
    return [np.flatnonzero(part == k) for k in range(1, FOLDS + 1)]


@pytest.mark.parametrize("weighted", [False, True])
def test_ridge_is_chosen_on_held_out_rows(weighted: bool) -> None:
    """Compare the reported errors, and the weights, with least squares in float64.

    Half of the centers are rows.
    """
    case = make_case(operator(), "direct", options=solver_settings(), n_sums=1 + FOLDS)
    case = replace_centers(case, np.concatenate([case.Z[:12], case.X[:12]]))
    w = np.random.default_rng(5).uniform(0.2, 1.8, len(case.X)) if weighted else np.ones(240)
    solver = case.solver()
    state = solver.init()
    for ids in np.array_split(np.random.default_rng(1).permutation(240), 14):
        solver.step(state, Batch(case.X[ids], case.Y[ids], ids, w[ids] if weighted else None))
    facts = solver.end_epoch(state)
    K, K_zz, root = KERNEL(case.X, case.Z), KERNEL(case.Z, case.Z), np.sqrt(w)[:, None]

    def held_out_error(ridge: float) -> float:
        errors, n = 0.0, 0
        for out in folds(case):
            fit = np.setdiff1d(np.arange(240), out)
            alpha = ref.ridge(root[fit] * K[fit], root[fit] * case.Y[fit], K_zz, ridge)
            errors += (w[out, None] * (K[out] @ alpha - case.Y[out]) ** 2).sum()
            n += len(out)
        return errors / n

    assert facts["ridge"] == state.ridge > 0
    trials = dict(facts["tried"])
    assert len(trials) >= 4
    for ridge, error in trials.items():
        if ridge >= 1e-9:  # with less, rounding in float64 dominates the equations
            assert error == pytest.approx(held_out_error(ridge), rel=1e-5)
    best = min(trials, key=lambda ridge: trials[ridge])
    assert best / 10 < state.ridge / 0.8 < best * 10
    truth = ref.ridge(root * K, root * case.Y, K_zz, state.ridge)
    close(K @ solver.weights(state), K @ truth, 1e-7)  # normal equations square the condition


def test_killed_run_finds_the_same_ridge(tmp_path: Path) -> None:
    settings_of = {**DIRECT, "solver.ridge": "auto", "model.n_centers": 40}
    uninterrupted = finished(settings(**settings_of), source=stream())
    assert uninterrupted.ridge > 0
    stopped(settings(tmp_path, **settings_of), 5, source=stream())
    resumed = finished(settings(tmp_path, **settings_of), source=stream())
    assert resumed.ridge == uninterrupted.ridge
    np.testing.assert_array_equal(resumed.model.weights, uninterrupted.model.weights)
    text = run_text(run_overview(tmp_path))
    assert f"ridge         {uninterrupted.ridge:.5g}" in re.sub(r"ridge +", "ridge         ", text)


def test_copies_of_a_row_stay_on_one_side_of_split() -> None:
    """Check noisy rows, whose noise held-out copies would make the model learn."""
    X, y = arrays(150)
    config = settings(**DIRECT, **{"solver.ridge": "auto", "model.n_centers": 40})
    without_copies = finished(config, source=ArraySource(X, y, classes=CLASSES))
    copies = AugmentedSource(ArraySource(X, y, classes=CLASSES), 4, [GaussianNoise(1e-3)])
    with_copies = finished(config, source=copies)
    assert without_copies.ridge / 5 < with_copies.ridge < without_copies.ridge * 5


def test_rows_that_are_all_centers_use_noise_ridge(tmp_path: Path) -> None:
    result = finished(
        settings(tmp_path, **DIRECT, **{"solver.ridge": "auto", "model.n_centers": 135}),
        source=array_source(),
    )
    [noise] = [e for e in read_log(tmp_path / "log.jsonl") if e["event"] == "noise"]
    assert noise["ridge"] == result.ridge


def test_ridge_is_searched_if_a_fifth_of_rows_are_not_centers() -> None:
    problem = problem_of(rows(0, 80, 3), 1, cycled=100)
    assert Direct().finds_ridge(problem)
    assert not Direct().finds_ridge(replace(problem, p=81))


@pytest.mark.parametrize("equal_targets", [True, False])
def test_ridge_of_rows_that_coincide_with_centers_is_near_the_best(equal_targets: bool) -> None:
    """Compare errors at new points with dense float64 fits of all ridges.

    Each row occurs twice, once with the same target or another one; both are centers, so that no
    row can be held out.
    """
    rng = np.random.default_rng(0)
    X, new = rng.normal(size=(200, 3)), rng.normal(size=(500, 3))
    f, f_new = np.sin(2 * X[:, :1]) + X[:, 1:2], np.sin(2 * new[:, :1]) + new[:, 1:2]
    y = f + rng.normal(size=f.shape)
    other_y = y if equal_targets else f + rng.normal(size=f.shape)
    X_twice, y_twice = np.concatenate([X, X]), np.concatenate([y, other_y])
    kernel = ref.make_kernel("gaussian", 2.0)
    K, K_zz, mean = kernel(X_twice, X), kernel(X, X), y_twice.mean()

    def error(ridge: float) -> float:
        alpha = ref.ridge(K, y_twice - mean, K_zz, ridge)
        return float(((kernel(new, X) @ alpha + mean - f_new) ** 2).mean())

    changed = {
        "solver.ridge": "auto", "model.n_centers": "auto", "model.kernel": "gaussian",
        "model.bandwidth": 2.0, "run.precision": "float64",
    }  # fmt: skip
    result = finished(
        settings(**DIRECT, **changed), source=ArraySource(X_twice, y_twice), centers=X
    )
    # The leave-one-out estimate from 200 points is off by a factor of a few.
    best = min(error(10.0**k) for k in range(-7, 1))
    assert error(result.ridge) < 1.5 * best < 0.75 * error(1e-6)


@pytest.mark.parametrize("solver", ["block", "falkon"])
def test_other_solvers_use_noise_ridge(solver: str, tmp_path: Path) -> None:
    """Check the ridge kappa sqrt(n / 135) / n for n different rows."""
    result = finished(
        settings(tmp_path, **{"solver.name": solver, "solver.ridge": "auto"}), source=array_source()
    )
    [noise] = [e for e in read_log(tmp_path / "log.jsonl") if e["event"] == "noise"]
    assert noise["ridge"] == result.ridge == pytest.approx(noise["variance"] / 135)


@pytest.mark.parametrize("solver", ["eigenpro4", "eigenpro1"])
def test_solvers_without_ridge_find_none(solver: str, tmp_path: Path) -> None:
    options = {"solver.name": solver, "solver.ridge": "auto"}
    if solver != "eigenpro4":
        options |= {"model.n_centers": "auto", "model.centers": "all"}
    finished(settings(tmp_path, **options), source=array_source())
    assert "noise" not in {e["event"] for e in read_log(tmp_path / "log.jsonl")}


# --- equal centers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "offset"), [("float64", 0.0), ("float64", 1e-12), ("exact", 0.0), ("exact", 1e-6)]
)
def test_equal_and_nearly_equal_centers_are_solved(precision: str, offset: float) -> None:
    """Check that predictions are as good as without these centers."""
    Z = rows(1, 24, 3)
    doubled = np.concatenate([Z, Z[:16] + offset * rows(8, 16, 3)])
    case = case_with_centers(doubled, precision)
    solver = case.solver()
    state = solver.init()
    facts = one_pass(case, solver, state)
    alpha = solver.weights(state)
    exact, op = ref.exact_least_squares(KERNEL(case.X, Z), case.Y), case.op
    assert 0 < facts["jitter"] < 1e-9
    assert "singular to rounding" in facts["note"]
    limit = 1e-9 if precision == "float64" else 1e-5 if offset == 0 else 1e-2
    for X in (case.X, rows(9, 100, 3)):
        x = op.points(X.astype(op.dtype), left=True)
        close(op.product(x, solver.Z, alpha), KERNEL(X, Z) @ exact, limit)


def test_near_duplicates_with_small_bandwidth_in_float32() -> None:
    """Compare with least squares on the centers without duplicates, up to rounding of the kernel.

    Squared distances have errors of eps (|x|^2 + |z|^2) / bandwidth^2, here 3e-4. Where centers and
    rows coincide, a kernel with a kink has the square root of this error. Weights that fitted these
    errors would be 5e5, and predictions of other rows 1900 times the targets.
    """
    X, fresh = rows(0, 240, 3), rows(9, 100, 3)
    Z = np.concatenate([X[:12], X[:12] + 1e-7, X[:12]])
    case = case_with_centers(Z, "exact", bandwidth=0.05)
    solver, op = case.solver(), case.op
    state = solver.init()
    one_pass(case, solver, state)
    alpha, kernel = solver.weights(state), ref.make_kernel("laplace", 0.05)
    exact = ref.exact_least_squares(kernel(X, X[:12]), case.Y)
    norms = [(np.float32(A) ** 2).sum(axis=1) / 0.05**2 for A in (X, Z)]
    noise = np.sqrt(np.finfo(np.float32).eps * (norms[0].max() + norms[1].max()))
    group_sums = np.abs(alpha).reshape(3, 12, 2).sum(axis=0).max()  # sums over equal centers
    assert noise < 0.03
    assert group_sums < 5 * np.abs(exact).max()
    for rows_ in (X, fresh):
        x = op.points(rows_.astype(np.float32), left=True)
        truth = kernel(rows_, X[:12]) @ exact
        # With the kernel of the fit, the remaining error is of second order.
        for K, limit in ((op.matrix(x, solver.Z), noise**2), (kernel(rows_, Z), noise)):
            error = np.abs(K @ np.float64(alpha) - truth).max()
            assert error < limit * group_sums


SINGULAR = "of solver 'direct' for 16 {} are singular .* give solver.ridge"


def doubled_centers_run(**overrides: Any) -> tuple[RunConfig, Array]:
    """Return a run of two different passes, with 8 centers that occur twice."""
    config = settings(**DIRECT, **{"model.n_centers": "auto", "solver.ridge": 0.0} | overrides)
    return config, np.repeat(arrays(8, 1)[0], 2, axis=0)


@pytest.mark.parametrize("features", ["kernel", "nystrom"])
@pytest.mark.parametrize("precision", ["float64", "exact"])
def test_run_without_ridge_warns_of_singular_equations(
    precision: str, features: str, tmp_path: Path
) -> None:
    """Check that there is one warning, although two passes find them, and that the log has both."""
    names = {"run.precision": precision, "model.features": features, "run.run_dir": str(tmp_path)}
    config, centers = doubled_centers_run(**names)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        finished(config, source=stream(), centers=centers)
    [warning] = caught
    assert re.search(SINGULAR.format("centers"), str(warning.message))
    passes = [e for e in read_log(tmp_path / "log.jsonl") if e["event"] == "pass"]
    assert [e["note"] for e in passes] == [str(warning.message)] * 2


def test_run_with_fewer_rows_than_features_warns() -> None:
    names = {"model.features": "fourier", "model.n_features": 16, "model.n_centers": "auto"}
    names |= {"data.batch_size": 10, "solver.ridge": 0.0}
    with pytest.warns(UserWarning, match=SINGULAR.format("features")):
        finished(settings(**DIRECT, **names), source=array_source(10))


@pytest.mark.parametrize("precision", ["float64", "exact"])
def test_regular_equations_give_no_warning(precision: str, tmp_path: Path) -> None:
    """Check that there is no warning, and no note in the log."""
    for ridge, every in ((1e-4, 1), (0.0, 2)):
        path = tmp_path / str(every)
        config, centers = doubled_centers_run(
            **{"run.precision": precision, "solver.ridge": ridge, "run.run_dir": str(path)}
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            finished(config, source=stream(), centers=centers[::every])
        assert not caught
        passes = [e for e in read_log(path / "log.jsonl") if e["event"] == "pass"]
        assert [e.get("note") for e in passes] == [None, None]


def test_increased_jitter_is_always_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = make_case(operator(), "direct")
    solver, answers = case.solver(), [False]
    cholesky = solver.backend.cholesky
    monkeypatch.setattr(
        solver.backend,
        "cholesky",
        lambda A, **options: answers.pop() if answers else cholesky(A, **options),
    )
    assert "note" in one_pass(case, solver, solver.init())
    assert "note" not in one_pass(case, solver, solver.init())


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("quantity", "value"), [("X", np.nan), ("Y", np.inf), ("X", 1e9)])
def test_non_finite_or_zero_sums_are_named(quantity: str, value: float) -> None:
    case = make_case(operator(precision="exact"), "direct")
    getattr(case, quantity)[slice(None) if value == 1e9 else 3] = value
    solver = case.solver()
    with (
        pytest.raises(
            DivergenceError,
            match=r"'direct' .* of 240 rows, because kernel values .*zero or not finite",
        ),
        np.errstate(all="ignore"),
    ):
        one_pass(case, solver, solver.init())


def test_targets_near_float32_limit_are_learned(tmp_path: Path) -> None:
    X, y = rows(0, 135, 5), rows(1, 135, 2)
    y[50] = 3e38
    source = ArraySource(X.astype(np.float32), y.astype(np.float32), unit_rows=16)
    result = finished(settings(tmp_path, **{"solver.name": "direct"}), source=source, test=source)
    assert math.isfinite(result.metrics["test_mse"])
    small = ArraySource(X.astype(np.float32), y * 2.0**-100, unit_rows=16)
    small_result = finished(settings(**{"solver.name": "direct"}), source=small)
    close(result.model.weights, small_result.model.weights, 1e-4)


def test_memory_error_names_alternative_solver() -> None:
    options = solver_settings("direct")
    needed = resolve(PLAIN, options, 10**15)[2]
    assert needed.peak > 2 * PLAIN.p**2 * 8
    with pytest.raises(MemoryBudgetError, match=re.escape("use solver='auto': 'dir")):
        resolve(PLAIN, options, PLAIN.p**2 * 8)


# --- runs ---------------------------------------------------------------------------------------


def test_mid_pass_checkpoint_contains_model(tmp_path: Path) -> None:
    """Check that it holds the model of the evaluation at this step."""
    test = array_source(40, 5)
    stopped(settings(tmp_path, **DIRECT), 5, source=stream(), test=test)
    last = [e for e in read_log(tmp_path / "log.jsonl") if e["event"] == "evaluation"][-1]
    model = load_model(tmp_path, device="cpu", threads=1)
    with model.backend:
        metrics = model.evaluate(test)
    assert last["step"] == 5
    assert metrics["mse"] == last["test_mse"] < 0.2


def test_repeated_rows_are_read_once(tmp_path: Path) -> None:
    """Check that further epochs and a resume change nothing."""
    source = array_source()
    one_epoch = finished(settings(**DIRECT, **{"data.epochs": 1}), source=source)
    two_epochs = finished(settings(tmp_path, **DIRECT), source=source)
    assert (one_epoch.ended, two_epochs.samples) == (None, 135)
    assert two_epochs.ended == (
        "all 135 rows are in the equations; another epoch would change nothing"
    )
    np.testing.assert_array_equal(two_epochs.model.weights, one_epoch.model.weights)
    resumed = finished(settings(tmp_path, **DIRECT), source=source)
    np.testing.assert_array_equal(resumed.model.weights, one_epoch.model.weights)


def make_sources() -> dict[str, tuple[BaseSource, int]]:
    """Return sources and the number of rows that a run of two epochs reads of each."""
    X, y = arrays()
    base, other_rows = array_source(), array_source(20, 3)
    generator = GeneratorSource(
        lambda seed, epoch, start, stop: (X[start:stop], y[start:stop]), 135, (5,), np.float32, 3,
        classes=CLASSES,
    )  # fmt: skip
    return {
        "scaled": (AugmentedSource(base, 1, [Scale("feature").bind(base)]), 135),
        "mixture": (MixtureSource([base, other_rows]), 155),
        "generator": (generator, 270),
        "mixture with generator": (MixtureSource([generator, base]), 540),
        "copies": (AugmentedSource(base, 2), 540),
        "weighted": (MixtureSource([base, other_rows], weights=[1, 1], n_rows=64), 128),
    }


@pytest.mark.parametrize("name", make_sources())
def test_only_sources_with_new_rows_are_read_twice(name: str) -> None:
    """Check runs with a ridge, as a mixture may give a center twice."""
    source, n_read = make_sources()[name]
    config = settings(**DIRECT, **{"solver.ridge": 1e-4, "data.scale": "auto"})
    assert finished(config, source=source).samples == n_read
