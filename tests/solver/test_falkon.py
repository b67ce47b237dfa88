"""Check FALKON against preconditioned conjugate gradient in a few lines, and its limit."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern.backend.batch import Batch
from streamkern.basics.errors import ConfigError, DivergenceError
from streamkern.estimator.estimators import KernelRegressor
from streamkern.rundir.run_log import read_log
from streamkern.solver.base import Solver, State
from streamkern.solver.block_step import BlockSolver
from streamkern.solver.falkon_step import FalkonSolver
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.transforms import GaussianNoise, MixUp
from streamkern.train import trainer
from streamkern.train.online import Online
from tests import reference as ref
from tests.plans import solver_settings
from tests.runs import (
    array_source,
    arrays,
    assert_same_bits,
    final,
    finished,
    latest_step,
    settings,
    stream,
)
from tests.solver_problems import (
    Array,
    Case,
    close,
    computed,
    make_case,
    one_pass,
    operator,
    rows,
    small_sizes,
)

KERNEL = ref.make_kernel("laplace", 2.0)


def falkon_case(ridge: float = 0.0, tolerance: float = 1e-13, precision: str = "float64") -> Case:
    """Return the case of solver "falkon" with this ridge."""
    options = solver_settings(ridge=ridge, tolerance=tolerance)
    return make_case(operator(precision=precision), "falkon", options=options)


def conjugate_gradient(A: Array, b: Array, M: Array, alpha: Array, n: int) -> list[Array]:
    """Return the n + 1 iterates of one column by preconditioned conjugate gradient."""
    r = b - A @ alpha
    z = M @ r
    v, iterates = z, [alpha]
    for _ in range(n):
        a = (r @ z) / (v @ A @ v)
        alpha, r_new = alpha + a * v, r - a * (A @ v)
        z_new = M @ r_new
        v = z_new + (r_new @ z_new) / (r @ z) * v
        r, z = r_new, z_new
        iterates.append(alpha)
    return iterates


@pytest.mark.parametrize("start", ["zero", "warm"])
@pytest.mark.parametrize("ridge", [0.0, 1e-2])
def test_iterates_equal_conjugate_gradient(ridge: float, start: str) -> None:
    case = falkon_case(ridge)
    solver = case.solver()
    start_weights = rows(6, 24, 2) if start == "warm" else np.zeros((24, 2))
    state = solver.init(start_weights if start == "warm" else None)
    K, K_zz = KERNEL(case.X, case.Z), KERNEL(case.Z, case.Z)
    A, b = K.T @ K / 240 + ridge * K_zz, K.T @ case.Y / 240
    M = np.linalg.inv(K_zz @ K_zz / 24 + case.setup.meta["mu"] * K_zz)
    assert case.setup.meta["mu"] == ridge or not ridge
    columns = zip(b.T, start_weights.T, strict=True)
    truth = [conjugate_gradient(A, y, M, alpha, 8) for y, alpha in columns]
    for k in range(9):
        expected = np.stack([iterates[k] for iterates in truth], axis=1)
        facts = one_pass(case, solver, state)
        close(state.alpha, expected, 1e-8)
        r = b - A @ expected
        norms = [((x * (M @ x)).sum(axis=0)) for x in (r, b)]
        assert facts["iteration"] == k
        assert facts["residual"] == pytest.approx(np.sqrt(norms[0] / norms[1]).max(), rel=1e-5)
        # The loss that steps report is that of these weights.
        X, Y = case.X[:20], case.Y[:20]
        loss = solver.step(state, Batch(X, Y, np.arange(20)))
        assert loss[0].sum() == pytest.approx(((K[:20] @ expected - Y) ** 2).sum() / 20, rel=1e-7)
        for name in ("sums", "b"):  # and forget that step
            state.pending[name][...] = 0 if name == "sums" or k == 0 else state.pending[name]
        state.rows = 0


def run_to_convergence(case: Case, passes: int = 60) -> tuple[Solver, State]:
    """Return the solver and its state when it has finished."""
    solver = case.solver()
    state = solver.init()
    for _ in range(passes):
        one_pass(case, solver, state)
        if solver.why_finished(state):
            return solver, state
    raise AssertionError("it has not converged")


@pytest.mark.parametrize("ridge", [0.0, 1e-4, 0.1])
def test_falkon_converges_to_least_squares(ridge: float) -> None:
    case = falkon_case(ridge)
    _, state = run_to_convergence(case)
    K, K_zz = KERNEL(case.X, case.Z), KERNEL(case.Z, case.Z)
    truth = ref.ridge(K, case.Y, K_zz, ridge) if ridge else ref.exact_least_squares(K, case.Y)
    close(state.alpha, truth, 1e-9)


@pytest.mark.parametrize("ridge", [0.0, 1e-3])
@pytest.mark.parametrize("bandwidth", [2.0, 0.05])
def test_near_duplicates_in_float32_are_harmless(bandwidth: float, ridge: float) -> None:
    """Check that predictions stay of the size of the targets, and improve in every pass."""
    X = rows(0, 240, 3)
    Z = np.concatenate([X[:12], X[:12] + 1e-7, X[:12], X[:12] + 1e-4])
    case = falkon_case(ridge, precision="exact")
    op = operator(precision="exact", bandwidth=bandwidth)
    setup = computed(op, Z, X, X, case.sizes, case.options)
    case = replace(case, op=op, Z=Z, setup=setup)
    solver = case.solver()
    state, losses = solver.init(), []
    x = op.points(X.astype(np.float32), left=True)
    for _ in range(25):
        one_pass(case, solver, state)
        error = op.product(x, solver.Z, state.alpha) - case.Y
        losses.append(float((error**2).sum() / (case.Y**2).sum()))
    assert losses[0] == pytest.approx(1)
    assert max(losses[1:]) < 1
    assert losses[-1] < 1.02 * min(losses)


def test_falkon_does_not_depend_on_kernel_scale() -> None:
    """Check rows scaled by 2^20 or 2^-20, which changes every number by a power of 2.

    24 centers in 3 dimensions: what keeps their K(Z, Z) definite must grow with it.
    """
    op, predictions = operator("linear", precision="exact"), []
    X, Z, Y = rows(0, 240, 3), rows(1, 24, 3), rows(3, 240, 2)
    for unit in (1.0, 2.0**20, 2.0**-20):
        sizes, options = small_sizes(solver="falkon"), solver_settings(ridge=1e-2 * unit**2)
        setup = computed(op, unit * Z, unit * X, unit * X, sizes, options)
        case = Case(op, sizes, options, unit * X, Y, unit * Z, X, X, setup, None)
        solver = case.solver()
        state = solver.init()
        for _ in range(6):
            one_pass(case, solver, state)
        predictions.append(state.alpha * np.float32(unit) ** 2)
    assert predictions[0].any()
    for alpha in predictions[1:]:
        np.testing.assert_array_equal(alpha, predictions[0])


def test_zero_output_stays_zero() -> None:
    case = falkon_case(1e-3)
    case.Y = np.stack([case.Y[:, 0], np.zeros(240)], axis=1)
    _, state = run_to_convergence(case)
    assert np.isfinite(state.alpha).all()
    assert not state.alpha[:, 1].any()
    case.Y = np.zeros((240, 2))
    solver = case.solver()
    state = solver.init()
    one_pass(case, solver, state)
    assert "converged in 0 iterations" in str(solver.why_finished(state))


def test_non_finite_values_are_named() -> None:
    case = falkon_case(1e-3)
    case.Y[3] = np.inf
    solver = case.solver()
    with (
        pytest.raises(DivergenceError, match="'falkon' has a residual that is not finite after 1"),
        np.errstate(all="ignore"),
    ):
        one_pass(case, solver, solver.init())


# --- runs ---------------------------------------------------------------------------------------

FALKON = {"solver.name": "falkon", "solver.ridge": 1e-3, "data.epochs": 30}


@pytest.mark.parametrize("name", ["falkon", "block"])
def test_every_pass_has_same_augmented_samples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check also the batches, in which mix-up chooses partners; other solvers see new samples."""
    solver = {"falkon": FalkonSolver, "block": BlockSolver}[name]
    row_sums, step = [], solver.step

    def record_rows_and_step(self: Any, state: State, batch: Batch) -> Any:
        parts = (batch.X, batch.Y, batch.row_ids)
        row_sums.append(hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest())
        return step(self, state, batch)

    monkeypatch.setattr(solver, "step", record_rows_and_step)
    source = AugmentedSource(array_source(), 2, [GaussianNoise(0.1), MixUp(1.0)])
    finished(settings(**{"solver.name": name, "data.epochs": 3}), source=source)
    passes = [row_sums[i : i + 14] for i in range(0, 42, 14)]
    assert len(set(row_sums)) == (14 if name == "falkon" else 42)
    assert (passes[0] == passes[1] == passes[2]) == (name == "falkon")


def test_falkon_stops_and_reports_convergence(tmp_path: Path) -> None:
    config, test = settings(tmp_path, **FALKON), array_source(40, 5)
    result = finished(config, source=stream(), test=test)
    passes = result.samples // 135
    assert 4 < passes < 20
    assert f"converged in {passes - 1} iterations" in str(result.ended)
    log = read_log(tmp_path / "log.jsonl")
    residuals = [e["residual"] for e in log if e["event"] == "pass"]
    assert len(residuals) == passes
    assert residuals[-1] <= 1e-4 < residuals[-2]
    assert [e["why"] for e in log if e["event"] == "finished"] == [result.ended]
    assert [r["step"] for r in result.history] == [7 * passes]  # and is evaluated once
    resumed = finished(config, source=stream(), test=test)
    assert (resumed.samples, resumed.ended) == (result.samples, result.ended)
    assert len(read_log(tmp_path / "log.jsonl")) <= len(log) + 2


def test_kill_after_last_pass_resumes_without_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the checkpoint after the last pass records that no other pass is needed."""
    finished(settings(tmp_path / "plain", **FALKON), source=stream())
    config = settings(tmp_path / "run", **FALKON, **{"run.checkpoint_every": 7})
    finish = trainer.Trainer._finish

    def power_cut(self: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer.Trainer, "_finish", power_cut)
    with pytest.raises(KeyboardInterrupt):
        finished(config, source=stream())
    monkeypatch.setattr(trainer.Trainer, "_finish", finish)
    step = latest_step(tmp_path / "run")
    finished(config, source=stream())
    assert latest_step(tmp_path / "run") == step
    assert_same_bits(final(tmp_path / "run"), final(tmp_path / "plain"))


def test_partial_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="solver='falkon' needs the same rows in every epoch"):
        Online(settings(**FALKON)).advance(array_source())


# --- warm start ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of the direct solver on the rows without noise, with given centers."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    config = settings(run_dir, **{"solver.name": "direct", "solver.ridge": 1e-3})
    finished(config.with_overrides({"model.n_centers": "auto"}), source=stream(), centers=CENTERS)
    return run_dir


CENTERS = arrays(40, 1)[0]
GIVEN = {"model.n_centers": "auto"}


def test_warm_start_saves_iterations(trained_run: Path) -> None:
    """Check centers in another order, which are matched by their rows."""
    same_settings = GIVEN | {"run.random_state": 5, "solver.tolerance": 1e-6}
    config = settings(**FALKON, **same_settings)
    cold = finished(config, source=array_source(), centers=CENTERS)
    warm = finished(
        config.with_overrides({"solver.warm_start": str(trained_run)}),
        source=array_source(), centers=CENTERS,
    )  # fmt: skip
    assert warm.samples <= cold.samples - 2 * 135
    close(warm.model.weights, cold.model.weights, 1e-4)


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        ({"centers": CENTERS + 1}, {}, "has other centers than this run"),
        ({"centers": CENTERS[:30]}, {}, "has other centers than this run"),
        ({}, {"solver.name": "direct"}, "solver.warm_start is not defined for solver 'direct'"),
    ],
    ids=["moved", "fewer", "direct"],
)
def test_invalid_warm_start_is_refused(
    options: dict[str, Any], change: dict[str, Any], message: str, trained_run: Path
) -> None:
    options = {"source": stream(), "centers": CENTERS} | options
    overrides = GIVEN | {"solver.name": "block", "solver.warm_start": str(trained_run)} | change
    with pytest.raises((ConfigError, RuntimeError), match=message):
        finished(settings(**overrides), **options)


@pytest.mark.parametrize("epochs", [4, 10, 30])
def test_heavy_tails_and_tiny_ridge_give_finite_model(epochs: int) -> None:
    """Compare with least squares with this ridge.

    With the ridge alone in the preconditioner, rounding gave test errors of 1.4 to 1.6, 0.8 to 1.6
    and 0.2 to 0.4 times the variance.
    """
    rng = np.random.default_rng(0)
    X = rng.standard_t(1.5, size=(900, 5))
    y = np.tanh(X[:, 0])
    model = KernelRegressor(
        kernel="gaussian", bandwidth=0.5, ridge=1e-9, solver="falkon", n_centers=400,
        epochs=epochs, random_state=0,
    )  # fmt: skip
    values = model.fit(X[:450], y[:450]).predict(X[450:])
    assert np.mean((values - y[450:]) ** 2) < 0.3 * y.var()


def test_weights_with_larger_residual_are_rejected() -> None:
    case = falkon_case(ridge=1e-3)
    solver = case.solver()
    state = solver.init()
    one_pass(case, solver, state)
    assert one_pass(case, solver, state)["taken"]
    accepted = state.alpha.copy()
    state.pending["least"][...] = 1e-9
    assert not one_pass(case, solver, state)["taken"]
    np.testing.assert_array_equal(state.alpha, accepted)
    assert not np.array_equal(state.pending["both"][:, : accepted.shape[1]], accepted)
