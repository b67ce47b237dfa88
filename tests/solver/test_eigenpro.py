"""Check EigenPro 2, 3 and 4 against the reference, and checkpoints and bits of every solver."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from streamkern.backend.base import Backend
from streamkern.basics.errors import DivergenceError
from streamkern.solver.base import Solver, State
from streamkern.solver.method import Setup
from tests import reference as ref
from tests.plans import solver_settings
from tests.solver_problems import (
    RIDGED,
    SOLVERS,
    Array,
    Case,
    close,
    make_case,
    operator,
    rows,
)

KERNEL = ref.make_kernel("laplace", 2.0)


def eigenpro_reference(case: Case, **options: Any) -> ref.EigenProReference:
    """Return the reference for the centers and the sample of a case."""
    return ref.EigenProReference(
        KERNEL, case.Z, case.X_s, case.setup.meta["level"], 1.0, n_outputs=2, **options
    )


# --- EigenPro 3 and 4 ---------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [(512, 1024), (7, 5)])
@pytest.mark.parametrize("period", [1, 2, 5])
def test_steps_equal_the_reference(period: int, tile: tuple[int, int]) -> None:
    """Check batches of two sizes, each with its own step; the last period is shorter."""
    options = solver_settings(step_scale=0.9)
    case = make_case(operator(tile=tile), "eigenpro3", options=options)
    case.setup.meta["period"] = period
    solver, jitter = case.solver(), case.setup.meta["jitter"]
    truth = eigenpro_reference(case, period=period, jitter=jitter)
    average = np.zeros_like(truth.alpha)
    state, n_projections = solver.init(), 0
    n_steps = 12
    for t in range(n_steps):
        batch = case.batch(t)
        truth.eta = solver.rules()[0].eta(len(batch))
        assert truth.eta == pytest.approx(
            0.9 * ref.step_size(len(batch), ref.Spectrum(*measured_rule(case)))
        )
        loss = case.step(solver, state, t)
        g = truth.step(case.X[batch], case.Y[batch])
        assert loss == pytest.approx((g**2).sum() / len(batch), rel=1e-9)
        if (t + 1) % period == 0:
            n_projections += 1
            average = ref.running_average(average, truth.alpha, n_projections)
        close(state.alpha, truth.alpha)
        assert state.n_pending == len(truth.X_tmp)
        if period > 1 and state.n_pending:
            close(state.pending["delta"][: state.n_pending], truth.delta)
            close(state.pending["gamma"], truth.gamma)
        if average.any():
            close(solver.weights(state), average)
    solver.finish(state)
    if n_steps % period:
        truth.project()
        average = ref.running_average(average, truth.alpha, n_projections + 1)
    close(state.alpha, truth.alpha)
    close(state.average, average)
    assert state.n_pending == 0
    assert not any(state.pending[name].any() for name in ("gamma", "h"))
    alpha_before = state.alpha.copy()
    solver.finish(state)  # nothing is pending any more
    np.testing.assert_array_equal(state.alpha, alpha_before)


def measured_rule(case: Case) -> tuple[float, float]:
    """Return the leverage and lambda_1 that the setup measured."""
    [rule] = case.setup.meta["rules"]
    return rule["leverage"], rule["lambda_1"]


def test_step_size_is_measured_on_fresh_rows() -> None:
    case = make_case(operator(), "eigenpro3")
    eigen = ref.eigensystem(KERNEL(case.X_s, case.X_s), 12)
    truth = ref.eigenpro_spectrum(KERNEL, case.probe, case.X_s, eigen)
    leverage, lambda_1 = measured_rule(case)
    assert leverage == pytest.approx(truth.leverage)
    assert truth.lambda_1 * (1 - 1e-10) <= lambda_1 <= 1.01 * truth.lambda_1
    assert case.m == int(min(20, leverage / lambda_1 + 1))


def test_setup_lowers_batch_to_critical_and_lengthens_period() -> None:
    case = make_case(operator(), "eigenpro4", batch_size=200)
    leverage, lambda_1 = measured_rule(case)
    assert case.m == int(leverage / lambda_1 + 1) < 200
    assert case.setup.meta["period"] == round(3 * 200 / case.m)
    assert case.solver().rules()[0].eta(case.m) < case.m / leverage


@pytest.mark.parametrize("name", ["eigenpro2", "eigenpro3", "eigenpro4"])
def test_given_batch_is_lowered_with_warning(name: str) -> None:
    with pytest.warns(UserWarning, match=f"batch_size=200 is lowered to .* solver='{name}'"):
        make_case(operator(), name, batch_size=200, set_batch_size=200)


# --- EigenPro 2 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [(512, 1024), (7, 50)])
def test_eigenpro2_equals_the_reference(tile: tuple[int, int]) -> None:
    case = make_case(operator(tile=tile), "eigenpro2")
    assert case.sample_rows is not None
    solver = case.solver()
    truth = ref.EigenPro2Reference(
        KERNEL, case.X, case.sample_rows, case.setup.meta["level"], 1.0, n_outputs=2
    )
    state = solver.init()
    average = np.zeros_like(truth.alpha)
    for t in range(20):
        batch = case.batch(t)
        truth.eta = solver.rules()[0].eta(len(batch))
        loss = case.step(solver, state, t)
        g = truth.step(batch, case.Y[batch])
        average = ref.running_average(average, truth.alpha, t + 1)
        assert loss == pytest.approx((g**2).sum() / len(batch), rel=1e-9)
        close(state.alpha, truth.alpha, 1e-10)
        close(state.average, average, 1e-10)


# --- threads, precision, checkpoints: every solver ----------------------------------------------


def take_steps(case: Case, solver: Solver, state: State, start: int, stop: int) -> State:
    """Take the steps from `start` to `stop`, four in each epoch; return the state."""
    for t in range(start, stop):
        case.step(solver, state, t)
        if t % 4 == 3:
            solver.end_epoch(state)
    return state


STEPLESS = ("direct", "direct, all rows", "direct, fourier", "direct, nystrom", "falkon")


@pytest.mark.parametrize("name", sorted(SOLVERS))
def test_float32_stays_near_float64(name: str) -> None:
    predictions = []
    for precision in ("float64", "exact"):
        options = solver_settings(damping=1e-3, ridge=0.0)
        case = make_case(operator(precision=precision), name, options=options)
        case.setup.meta["batch_size"] = 8  # rounding may put the critical batch on either side
        case.setup.meta["projection_batch"] = 8
        solver = case.solver()
        state = take_steps(case, solver, solver.init(), 0, 10)
        solver.finish(state)
        assert state.alpha.dtype == case.op.dtype
        predictions.append(case.columns(case.X) @ solver.weights(state).astype(np.float64))
    close(predictions[1], predictions[0], 2e-3)


def checkpoint_of(solver: Solver, state: State) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return copies of the arrays and numbers of a checkpoint, as they are read from a file."""
    arrays = {name: np.array(a) for name, a in solver.arrays(state).items()}
    scalars: dict[str, Any] = json.loads(json.dumps(solver.scalars(state)))
    return arrays, scalars


def assert_same_state(a: State, b: State) -> None:
    """Assert that two states have the same bits."""
    for name in ("averaged", "scale", "n_pending", "rows", "passes"):
        assert getattr(a, name) == getattr(b, name)
    np.testing.assert_array_equal(a.alpha, b.alpha)
    np.testing.assert_array_equal(a.average, b.average)
    assert a.pending.keys() == b.pending.keys()


@pytest.mark.full(all_but_every=3)
@pytest.mark.parametrize("precision", ["exact", "float64"])
@pytest.mark.parametrize(
    ("name", "ridge"),
    [(name, 0.0) for name in sorted(SOLVERS)]
    + [(name, 0.1) for name in ("blocks", "sgd", "sgd, nystrom", "eigenpro1, fourier")],
)
def test_restored_solver_continues_with_same_bits(name: str, ridge: float, precision: str) -> None:
    """Restore a solver from host copies of the setup on a new backend, as after a kill.

    The first checkpoint follows a back-off, whose factor is a part of the state.
    """
    options, n_steps = solver_settings(ridge=ridge), 8
    case = make_case(operator(precision=precision), name, options=options)
    arrays = {key: np.array(a) for key, a in case.setup.arrays.items()}
    meta = json.loads(json.dumps(case.setup.meta))
    solver = case.solver()
    state = take_steps(case, solver, solver.init(), 100, 104)
    if name not in STEPLESS:
        solver.back_off(state, state.alpha.copy(), 0.5)
    checkpoints = [checkpoint_of(solver, state)]
    for t in range(n_steps):
        take_steps(case, solver, state, t, t + 1)
        checkpoints.append(checkpoint_of(solver, state))
    solver.finish(state)
    assert state.scale == (1.0 if name in STEPLESS else 0.5)
    assert np.isfinite(state.alpha).all()
    assert state.alpha.any()
    for step, (saved_arrays, scalars) in enumerate(checkpoints):
        restored = case.solver(
            Setup({key: a.copy() for key, a in arrays.items()}, meta),
            operator(precision=precision),
        )
        resumed = take_steps(case, restored, restored.restore(saved_arrays, scalars), step, n_steps)
        restored.finish(resumed)
        assert_same_state(resumed, state)


@pytest.mark.parametrize("name", STEPLESS)
def test_solver_without_step_size_is_not_backed_off(name: str) -> None:
    case = make_case(operator(), name)
    solver = case.solver()
    state = solver.init()
    with pytest.raises(DivergenceError, match=f"{solver.name}.* not finite, and has no step size"):
        solver.back_off(state, state.alpha, 0.5)


@pytest.mark.parametrize("name", sorted(SOLVERS.keys() - set(STEPLESS)))
def test_back_off_discards_pending_state(name: str) -> None:
    case = make_case(
        operator(), name, options=solver_settings(ridge=0.1 if "b" in name[:1] else 0.0)
    )
    solver = case.solver()
    state = take_steps(case, solver, solver.init(), 0, 5)
    for a in state.pending.values():
        a[...] = np.nan  # as a diverging take_steps leaves it
    state.average[...] = np.nan
    good_weights = rows(5, *state.alpha.shape)
    solver.back_off(state, good_weights, 0.5)
    solver.back_off(state, good_weights, 0.5)
    np.testing.assert_array_equal(solver.weights(state), good_weights)
    assert (state.scale, state.averaged, state.n_pending) == (0.25, 0, 0)
    take_steps(case, solver, state, 5, 12)
    solver.finish(state)
    assert np.isfinite(solver.weights(state)).all()


@pytest.mark.full(all_but_every=4)
@pytest.mark.parametrize("name", sorted(SOLVERS))
def test_tile_shape_changes_only_rounding(name: str) -> None:
    """Check tiles of one and of several groups of centers, whose products are summed."""
    alphas = []
    for tile in ((512, 1024), (5, 24), (3, 7)):
        options = solver_settings(ridge=0.1 if name in RIDGED else 0.0)
        case = make_case(operator(tile=tile), name, options=options)
        solver = case.solver()
        state = take_steps(case, solver, solver.init(), 0, 9)
        solver.finish(state)
        alphas.append(state.alpha)
    for alpha in alphas[1:]:
        close(alpha, alphas[0], 1e-8)


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
@pytest.mark.parametrize("name", sorted(SOLVERS))
def test_bits_do_not_depend_on_threads(name: str) -> None:
    weights = []
    for threads in (1, 3):
        with Backend(threads) as backend:
            backend.chunk = 8
            options = solver_settings(ridge=0.1 if name in RIDGED else 0.0)
            op = operator(precision="exact", backend=backend, tile=(8, 8))
            case = make_case(op, name, options=options)
            solver = case.solver()
            weights.append(checkpoint_of(solver, take_steps(case, solver, solver.init(), 0, 6))[0])
    assert weights[0].keys() == weights[1].keys()
    for key, a in weights[0].items():
        np.testing.assert_array_equal(weights[1][key], a, err_msg=key)
