"""Check the steps of the block solver against the reference, and its limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from scipy.special import gammaln

import streamkern as sk
from streamkern.backend.batch import Batch
from streamkern.config.solver import SolverConfig
from streamkern.kernels.products import KernelOperator
from streamkern.solver.block_ridge import ridge_schedule
from streamkern.solver.block_step import ORDER_STAGE, BlockSolver
from streamkern.solver.precondition.block import SKETCH
from streamkern.solver.precondition.block_factor import LEVERAGE_FRACTION
from tests import reference as ref
from tests.plans import solver_settings
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


def block_solver(case: Case) -> BlockSolver:
    """Return the solver of a case, with its type."""
    solver = case.solver()
    assert isinstance(solver, BlockSolver)
    return solver


def block_reference(case: Case, solver: BlockSolver) -> ref.BlockReference:
    """Return the reference with its own factors, each at the mu that setup chose for its block."""
    events: list[dict[str, Any]] = []
    computed(
        case.op, case.Z, case.X_s, case.probe, case.sizes, case.options,
        report=lambda event, fields: events.extend([fields] if event == "block" else []),
    )  # fmt: skip
    ids = np.arange(len(case.Z))
    blocks = [ids[b] for b in solver.preconditioner.blocks]
    truth = ref.BlockReference(
        KERNEL, case.Z, blocks, case.X_s, 1.0, n_outputs=case.Y.shape[1]
    )  # fmt: skip
    truth.factors = [
        ref.block_factors(
            KERNEL(case.Z[b], case.Z[b]), KERNEL(case.Z[b], case.X_s), e["mu"], e["jitter"]
        )
        for b, e in zip(blocks, events, strict=True)
    ]
    truth.sketches = solver.preconditioner.sketches
    return truth


@pytest.mark.parametrize("tile", [(512, 1024), (7, 5)])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("name", ["block", "blocks", "blocks, recomputed"])
def test_steps_equal_the_reference(name: str, average: bool, tile: tuple[int, int]) -> None:
    """Compare with the reference, also after 8 rows per center (192 rows), when steps decrease."""
    options = solver_settings(average=average, step_scale=0.7)
    case = make_case(operator(tile=tile), name, options=options)
    case.cycled = 240 if average else None
    solver = block_solver(case)
    truth, state = block_reference(case, solver), solver.init()
    truth.average_k = solver.average_k
    assert not solver.weights(state).any()
    truth.averaged = state.averaged
    assert state.averaged == (len(case.X_s) // 4 // len(case.batch(0)) if average else 0)
    n_rows = 0
    for t in range(16):
        batch = case.batch(t)
        state.scale = 1.0 if t < 6 else 0.5  # as after a back-off
        decay = 1.0 if n_rows <= 192 else (192 / n_rows) ** 0.5
        n_rows += len(batch)
        variance_ratio = solver._variance_ratio(len(batch))
        factor = state.scale * decay
        truth.eta = [factor * rule.eta(len(batch), variance_ratio) for rule in solver.rules()]
        truth.finite_population_factor = (240 - len(batch)) / 239 if average else 1.0
        order = np.random.default_rng([3, ORDER_STAGE, t]).permutation(len(truth.blocks))
        residuals = truth.predict(case.X[batch]) - case.Y[batch]
        loss = case.step(solver, state, t)
        truth.step(case.X[batch], case.Y[batch], order.tolist())
        assert loss == pytest.approx((residuals**2).sum() / len(batch), rel=1e-10)
        close(state.alpha, truth.alpha, 1e-10)
        if average:
            close(state.average, truth.average, 1e-10)
    assert solver.weights(state) is (state.average if average else state.alpha)
    assert n_rows > 192
    assert state.averaged == (truth.averaged + 16 if average else 0)


def test_step_sizes_equal_the_rule() -> None:
    """Compare with the leverage and lambda_1 of the reference on the same probe."""
    case = make_case(operator(), "blocks")
    solver = block_solver(case)
    truth = block_reference(case, solver)
    phis = [
        truth.kernel(case.probe, case.Z[block]) @ factors.H.T
        for block, factors in zip(truth.blocks, truth.factors, strict=True)
    ]
    mean = sum((phi**2).sum() for phi in phis) / len(case.probe)
    for m in (1, 20, 1000):
        for rule, phi in zip(solver.rules(), phis, strict=True):
            assert rule.leverage == pytest.approx(truth.total_leverage(case.probe))
            ell = (phi**2).sum(axis=1)
            # Rows are weighted as in a batch of the case, at the step for unweighted rows.
            steps = [
                1 / max(case.m, case.m * lam + ell.mean()) for lam in ref.held_out_lambda_1(phi)
            ]
            weighed = [phi / np.sqrt(1 + LEVERAGE_FRACTION * eta * ell)[:, None] for eta in steps]
            # lambda_1 is between the bounds of `held_out_lambda_1`, so the step has bounds as well.
            low, high = (ref.held_out_lambda_1(w)[i] for i, w in enumerate(weighed))
            for variance_ratio in (1.0, 0.25, 0.0):
                etas = [min(1, 1 / (lam + variance_ratio * mean / m)) for lam in (high, low)]
                assert etas[0] * (1 - 1e-9) <= rule.eta(m, variance_ratio) <= etas[1] * (1 + 1e-9)


@pytest.mark.parametrize(("name", "k"), [("block", 0.5), ("blocks", 0.5), ("blocks", 1)])
@pytest.mark.parametrize("counted", [0, 5])
def test_average_weights_are_rising_factorials(name: str, k: float, counted: int) -> None:
    """Check the weight Gamma(i + k) / Gamma(i) of step i; the start counts as `counted` steps."""
    case = make_case(operator(), name)
    solver = case.solver()
    solver.average_k = k
    state = solver.init()
    state.average[...] = start = rows(7, *state.average.shape)
    state.averaged, history = counted, [start] * counted
    for t in range(15):
        case.step(solver, state, t)
        history.append(state.alpha.copy())
        i = np.arange(1.0, counted + t + 2)
        weights = np.exp(gammaln(i + k) - gammaln(i))
        close(state.average, np.tensordot(weights / weights.sum(), np.array(history), 1), 1e-12)


def test_start_counts_as_a_quarter_of_its_rows() -> None:
    for average in (True, False):
        case = make_case(operator(), "block", options=solver_settings(average=average))
        case.setup.arrays["start"][...] = start = rows(7, *case.setup.arrays["start"].shape)
        case.setup.meta["start_rows"] = 45 * case.sizes.batch_size
        solver = case.solver()
        state = solver.init()
        assert state.averaged == (11 if average else 0)
        np.testing.assert_array_equal(solver.weights(state), start)
        np.testing.assert_array_equal(state.alpha, start)
        warm = solver.init(2 * start)
        assert warm.averaged == 0
        np.testing.assert_array_equal(solver.weights(warm), 2 * start)


# --- limits -------------------------------------------------------------------------------------


def grid_case(n_blocks: int, op: KernelOperator, options: SolverConfig) -> Case:
    """Return 200 rows around a grid of 16 centers, with blocks that hardly overlap."""
    rng = np.random.default_rng(5)
    Z = np.stack(np.meshgrid(np.arange(4.0), np.arange(4.0)), axis=-1).reshape(16, 2)
    Z = Z[rng.permutation(16)]
    X, S = rng.uniform(-0.5, 3.5, (200, 2)), rng.uniform(-0.5, 3.5, (80, 2))
    Y = rows(1, 200, 2)
    sizes = small_sizes(batch_size=200, block_size=16 // n_blocks)
    setup = computed(op, Z, S, X, sizes, options)
    return Case(op, sizes, options, X, Y, Z, S, X, setup, None, cycled=200)


def iterate(case: Case, n_steps: int, batch: int | None = None) -> tuple[Any, list[float]]:
    """Take steps on all rows, or on random batches; return the state and the losses."""
    solver = case.solver()
    state, losses = solver.init(), []
    for t in range(n_steps):
        ids = np.arange(len(case.X))
        if batch is not None:
            ids = np.random.default_rng([9, t]).permutation(len(case.X))[:batch]
        losses.append(float(solver.step(state, Batch(case.X[ids], case.Y[ids], ids))[0].sum()))
    return state, losses


@pytest.mark.parametrize(("n_blocks", "k"), [(1, 0.5), (4, 0.5), (8, 1)])
def test_average_forgets_faster_with_many_blocks(n_blocks: int, k: float) -> None:
    assert grid_case(n_blocks, operator(), solver_settings()).solver().average_k == k


@pytest.mark.parametrize("n_blocks", [1, 8])
def test_full_batch_converges_to_least_squares(n_blocks: int) -> None:
    op = operator(bandwidth=0.5)
    case = grid_case(n_blocks, op, solver_settings())
    state, losses = iterate(case, 600)
    exact = ref.exact_least_squares(ref.laplace(case.X, case.Z, 0.5), case.Y)
    close(state.alpha, exact, 1e-8)
    assert np.all(np.diff(losses) <= 1e-12 * losses[0])  # no sweep raises the loss


def mean_step(solver: BlockSolver, X: Array, Y: Array, alpha: Array) -> Array:
    """Return the mean step of batches of one row, over all rows and both orders of two blocks."""
    orders = {
        tuple(np.random.default_rng([3, ORDER_STAGE, t]).permutation(2).tolist()): t
        for t in range(20)
    }
    assert len(orders) == 2
    total = np.zeros_like(alpha)
    for i in range(len(X)):
        for t in orders.values():
            state = solver.init(alpha)
            state.steps = t
            solver.step(state, Batch(X[[i]], Y[[i]], np.array([i])))
            total += state.alpha - alpha
    return total / (len(X) * len(orders))


def fixed_point(scale: float, has_sketches: bool) -> tuple[BlockSolver, Case, Array]:
    """Return a solver of two blocks, its case, and the fixed point of its mean step on one row.

    scale : step size relative to the full one.
    has_sketches : whether rows are damped, by exact leverages, as G = H^T.
    """
    options = solver_settings(average=False, damping=1e-3, step_scale=scale)
    case = grid_case(2, operator(), options)
    for b in (0, 1):
        G = case.setup.arrays.pop(f"G.{b}")
        assert G.shape == (8, SKETCH)
        if has_sketches:
            case.setup.arrays[f"G.{b}"] = np.ascontiguousarray(case.setup.arrays[f"H.{b}"].T)
    solver = block_solver(case)
    p, zero = len(case.Z), np.zeros((len(case.Z), 2))
    step_at_zero = mean_step(solver, case.X, case.Y, zero)
    # The mean step is an affine function of the weights, with this matrix.
    steps = [mean_step(solver, case.X, case.Y, zero + e[:, None]) for e in np.eye(p)]
    matrix = np.stack([(step - step_at_zero)[:, 0] for step in steps], axis=1)
    return solver, case, -np.linalg.solve(matrix, step_at_zero)


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
@pytest.mark.parametrize("has_sketches", [False, True])
def test_two_blocks_converge_to_damped_least_squares(
    has_sketches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the fixed point of the mean step, with w_i = 1 / (1 + eta ell_i / m).

    Without sketches, rows have a different weight in each block.
    """
    monkeypatch.setattr("streamkern.solver.block_step.FULL_ROWS", 10**9)
    solver, case, fixed = fixed_point(1e-3, has_sketches)
    K, pre = KERNEL(case.X, case.Z), solver.preconditioner
    leverage = [((K[:, b] @ H.T) ** 2).sum(axis=1) for b, H in zip(pre.blocks, pre.H, strict=True)]
    etas = [rule.eta(1) for rule in pre.rules]
    if has_sketches:
        weights = [1 / (1 + max(etas) * sum(leverage))] * 2
    else:
        weights = [1 - eta / 2 * ell for eta, ell in zip(etas, leverage, strict=True)][::-1]
    assert min(map(np.min, weights)) > 0.9
    weighted_K = np.concatenate(
        [(w[:, None] * K[:, b]).T for w, b in zip(weights, pre.blocks, strict=True)]
    )
    weighted = np.linalg.solve(weighted_K @ K, weighted_K @ case.Y)
    squares = np.linalg.lstsq(K, case.Y, rcond=None)[0]
    gap = np.linalg.norm(K @ (weighted - squares))
    assert gap > 1e-4 * np.linalg.norm(K @ squares)
    assert np.linalg.norm(K @ (fixed - weighted)) < 0.1 * gap


# --- ridge --------------------------------------------------------------------------------------


def test_ridge_includes_jitter_of_each_block() -> None:
    """Check the ridge term with K(Z, Z) that has the jitter of each block on its diagonal."""
    case = grid_case(4, operator(bandwidth=0.5), solver_settings(ridge=0.1))
    solver = block_solver(case)
    jitters = [0.0, 0.1, 1.0, 0.01]
    solver.ridge_term.preconditioner = replace(solver.preconditioner, jitters=jitters)
    state = solver.init(rows(5, len(case.Z), case.Y.shape[1]))
    jittered = ref.make_kernel("laplace", 0.5)(case.Z, case.Z)
    for b, block in enumerate(solver.preconditioner.blocks):
        jittered[block, block] += jitters[b] * np.eye(block.stop - block.start)
    expected = 0.1 * jittered @ state.alpha
    for b, block in enumerate(solver.preconditioner.blocks):
        g = np.zeros((block.stop - block.start, case.Y.shape[1]))
        state.steps = b
        solver.ridge_term.add(g, state, b)
        close(g, expected[block], 1e-10)


def test_single_block_ridge_uses_its_factor() -> None:
    """Check that no entries of K(Z, Z) are computed."""
    case = grid_case(1, operator(bandwidth=0.5), solver_settings(ridge=0.1))
    solver = block_solver(case)
    state = solver.init(rows(5, len(case.Z), case.Y.shape[1]))
    K_ZZ = ref.make_kernel("laplace", 0.5)(case.Z, case.Z)
    L = solver.preconditioner.L
    assert L is not None
    close(L @ L.T, K_ZZ + solver.preconditioner.jitter * np.eye(len(case.Z)), 1e-10)
    jittered = K_ZZ + 0.1 * np.eye(len(case.Z))
    solver.ridge_term.preconditioner = replace(
        solver.preconditioner, L=np.linalg.cholesky(jittered), jitters=[0.1]
    )
    g = np.ones((len(case.Z), case.Y.shape[1]))
    solver.ridge_term.add(g, state, 0)
    close(g, 1 + 0.1 * jittered @ state.alpha, 1e-10)


def test_single_block_factor_is_read_by_schedule() -> None:
    """Check also a checkpoint of an earlier version, without the values of the ridge."""
    case = grid_case(1, operator(bandwidth=0.5), solver_settings(ridge=1e-3))
    solver = block_solver(case)
    assert solver.ridge_term.stride > 1
    state, L, is_updated = solver.init(), solver.preconditioner.L, []
    assert L is not None
    for t in range(2 * solver.ridge_term.stride + 1):
        values = L @ (L.T @ state.alpha)
        case.step(solver, state, t)
        ridge_values = state.pending["ridge_values"]
        is_updated.append(bool(np.allclose(ridge_values, values, rtol=1e-10, atol=0)))
    assert [t for t, now in enumerate(is_updated) if now] == [
        k * solver.ridge_term.stride for k in range(3)
    ]
    arrays = {"alpha": state.alpha, "average": state.average}
    restored = case.solver().restore(arrays, solver.scalars(state))
    close(restored.pending["ridge_values"], L @ (L.T @ state.alpha), 1e-10)


@pytest.mark.parametrize(("stride", "count"), [(1, 1), (3, 1), (5, 1), (1, 2), (1, 3), (1, 4)])
def test_ridge_gradient_updates_blocks_in_turn(stride: int, count: int) -> None:
    """Check that `count` blocks are evaluated every `stride` steps, at the weights of that step."""
    options = solver_settings(ridge=0.3)
    case = make_case(operator(tile=(7, 5)), "blocks", options=options)
    solver = block_solver(case)
    state, blocks = solver.init(rows(5, 24, 2)), solver.preconditioner.blocks
    n, history = len(blocks), []
    assert n == 4
    assert (solver.ridge_term.stride, solver.ridge_term.count) == (1, 1)
    solver.ridge_term.stride, solver.ridge_term.count = stride, count
    last_update = [-1] * n
    at_start = 0.3 * KERNEL(case.Z, case.Z) @ state.alpha
    for t in range(12 * stride):
        if t % stride == 0:
            for k in range(count):
                last_update[(t // stride * count + k) % n] = t
        state.steps, state.alpha[...] = t, rows(100 + t, 24, 2)
        history.append(0.3 * KERNEL(case.Z, case.Z) @ state.alpha)
        for b, block in enumerate(blocks):
            g = np.ones((block.stop - block.start, 2))
            solver.ridge_term.add(g, state, b)
            expected = (history[last_update[b]] if last_update[b] >= 0 else at_start)[block]
            close(g, 1 + expected, 1e-12)


def test_start_uses_ridge_values_of_setup() -> None:
    case = make_case(operator(), "blocks", options=solver_settings(ridge=0.3))
    solver, start, values = block_solver(case), rows(5, 24, 2), rows(6, 24, 2)
    solver.preconditioner = replace(solver.preconditioner, start=start, values=values)
    state = solver.init()
    close(state.alpha, start, 0)
    close(state.pending["ridge_values"], values, 0)


def test_back_off_uses_ridge_of_restored_weights() -> None:
    case = make_case(operator(), "blocks", options=solver_settings(ridge=0.3))
    solver = block_solver(case)
    state, good_weights = solver.init(), rows(5, 24, 2)
    for t in range(3):
        case.step(solver, state, t)
    solver.back_off(state, good_weights, 0.5)
    close(state.pending["ridge_values"], KERNEL(case.Z, case.Z) @ good_weights, 1e-10)


@pytest.mark.slow
@examples(max_examples=40)
@given(n=st.integers(1, 64), weak=st.floats(1, 1000))
def test_ridge_is_stable_along_shared_direction(n: int, weak: float) -> None:
    """Check a direction without rows: f is the function, v its values when blocks were updated."""
    # The step rule has mu >= n ridge, so its share is at most 1 / n.
    share = 1 / (n * weak)
    stride, count = ridge_schedule(n, share)
    assert stride == 1 or count == 1
    assert n * stride * share <= 0.5 or stride == 1
    f, v, peaks = 1.0, np.ones(n), []
    T = -(-n * stride // count)
    for t in range(40 * T):
        if t % stride == 0:
            v[(t // stride * count + np.arange(count)) % n] = f
        f -= share * v.sum()
        if t % T == 0:
            peaks.append(abs(f) + np.abs(v).max())
    assert peaks[-1] <= 0.2 * peaks[4]


def test_negligible_ridge_is_rarely_evaluated() -> None:
    for share in (0.0, 1e-320, 1e-20):
        stride, count = ridge_schedule(4, share)
        assert (stride > 10**12, count) == (True, 1)


@pytest.mark.parametrize("ridge", [1e-6, 1e-4, 1e-3, 0.1])
def test_weak_ridge_is_rarely_evaluated(ridge: float) -> None:
    """Check that a round takes at most half of the time in which the ridge would act."""
    options = solver_settings(ridge=ridge, damping=1e-2)
    case = grid_case(4, operator(bandwidth=0.5), options)
    solver = block_solver(case)
    pre, stride = solver.preconditioner, solver.ridge_term.stride
    rate = max(rule.eta(solver.max_batch) for rule in pre.rules) * ridge / pre.mu
    assert stride == 1 or 4 * stride * rate <= 0.5
    assert 4 * (stride + 1) * rate > 0.5
    second_solver = block_solver(case)
    assert second_solver.ridge_term.stride == stride
    assert stride > 20 or ridge > 1e-6
    assert stride == 1 or ridge < 0.1


@pytest.mark.full(all_but_every=5)
@pytest.mark.parametrize("ridge", [1e-5, 1e-4, 1e-3, 0.1, 10.0])
@pytest.mark.parametrize("n_blocks", [1, 2, 8])
def test_blocks_converge_to_ridge_solution(n_blocks: int, ridge: float) -> None:
    """Check strong ridges, whose values are n_blocks steps old, and weaker ones."""
    case = grid_case(n_blocks, operator(bandwidth=0.5), solver_settings(ridge=ridge))
    state, losses = iterate(case, 600 if n_blocks == 2 and ridge >= 1e-3 else 800)
    K_xz, K_zz = ref.laplace(case.X, case.Z, 0.5), ref.laplace(case.Z, case.Z, 0.5)
    close(state.alpha, ref.ridge(K_xz, case.Y, K_zz, ridge), 1e-8)
    assert max(losses) < 1.5 * losses[0]


def test_more_rows_than_buffers_raise_an_error() -> None:
    case = make_case(operator(), "block")
    solver = case.solver()
    with pytest.raises(ValueError, match=r"shape|dimension|broadcast"):
        solver.step(solver.init(), Batch(rows(0, 30, 3), rows(1, 30, 2), np.arange(30)))


def test_many_blocks_are_summed_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the bits equal those of a single sum."""
    weights = []
    for at_once in (16, 3):
        monkeypatch.setattr("streamkern.solver.block_step.BLOCKS_AT_ONCE", at_once)
        case = make_case(operator(), "blocks", block_size=3)
        solver = case.solver()
        state = solver.init()
        for t in range(4):
            case.step(solver, state, t)
        weights.append(solver.weights(state))
    np.testing.assert_array_equal(*weights)


@pytest.mark.full
def test_shorter_steps_end_nearer_to_least_squares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that the distance from least squares is proportional to the step size."""
    monkeypatch.setattr("streamkern.solver.block_step.FULL_ROWS", 10**9)
    gaps = []
    for scale in (1e-3, 1e-4):
        _, case, fixed = fixed_point(scale, has_sketches=True)
        K = KERNEL(case.X, case.Z)
        squares = np.linalg.lstsq(K, case.Y, rcond=None)[0]
        gaps.append(np.linalg.norm(K @ (fixed - squares)))
    assert gaps[1] == pytest.approx(gaps[0] / 10, rel=0.2)


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
@pytest.mark.parametrize("n_blocks", [8, 1])
def test_minibatches_reach_a_realisable_target(
    n_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that steps of full size reach a target in the span, where batches have no noise."""
    monkeypatch.setattr("streamkern.solver.block_step.FULL_ROWS", 10**9)
    case = grid_case(n_blocks, operator(bandwidth=0.5), solver_settings())
    truth = rows(4, 16, 2)
    case.Y = ref.laplace(case.X, case.Z, 0.5) @ truth
    state, losses = iterate(case, 1500, batch=60)
    close(state.alpha, truth, 1e-10)
    assert losses[-1] < 1e-20 * losses[0]


@pytest.mark.full(all_but_every=5)
@pytest.mark.parametrize(("n_blocks", "ridge"), [(1, 0.0), (1, 0.1), (8, 0.1)])
@pytest.mark.parametrize("steps_fall", [False, True])
def test_average_is_nearer_than_last_iterate(
    n_blocks: int, ridge: float, steps_fall: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare predictions with the least-squares or ridge model of noisy targets.

    With steps that fall, the iterate converges, too.
    """
    if not steps_fall:
        monkeypatch.setattr("streamkern.solver.block_step.FULL_ROWS", 10**9)
    op = operator(bandwidth=0.5)
    case = grid_case(n_blocks, op, solver_settings(ridge=ridge))
    K_xz, K_zz = ref.laplace(case.X, case.Z, 0.5), ref.laplace(case.Z, case.Z, 0.5)
    truth = ref.ridge(K_xz, case.Y, K_zz, ridge or 1e-14)
    state, _ = iterate(case, 600, batch=40)
    iterate_error, average_error = (
        float(np.linalg.norm(K_xz @ (weights - truth))) for weights in (state.alpha, state.average)
    )
    assert average_error < (1.5 * iterate_error if steps_fall else iterate_error / 3)
    assert average_error < 0.25 * float(np.linalg.norm(K_xz @ truth))


def test_centers_without_rows_stay_at_ridge_solution() -> None:
    """Check centers that only the ridge determines.

    With too long rounds, the error at these centers would reach 80 after 400 steps.
    """
    rng, p, n, ridge = np.random.default_rng(0), 160, 300, 3e-2
    X, noise, Z = (rng.standard_normal((size, 1)) for size in (n, n, p))
    Y = np.sin(2 * X) + 0.1 * noise
    Z[rng.permutation(p)[: p // 2]] += 4
    config = sk.RunConfig.from_tables(
        {
            "data": {"epochs": 400, "batch_size": n},
            "model": {"kernel": "gaussian", "bandwidth": 0.7},
            "solver": {
                "name": "block", "block_size": p // 16, "ridge": ridge, "damping": 0.1,
                "average": False,
            },
            "run": {"device": "cpu"},
        }
    )  # fmt: skip
    source = sk.ArraySource(X.astype(np.float32), Y.astype(np.float32))
    model = sk.train_model(config, source=source, centers=Z).model
    K_xz, K_zz = ref.gaussian(X, Z, 0.7), ref.gaussian(Z, Z, 0.7)
    truth = np.linalg.lstsq(K_xz.T @ K_xz / n + ridge * K_zz, K_xz.T @ Y / n, rcond=1e-12)[0]
    places = np.linspace(-8, 10, 200)[:, None]
    errors = model.values(places.astype(np.float32)) - ref.gaussian(places, Z, 0.7) @ truth
    assert np.abs(errors).max() < 0.1
