"""Check preconditioners against the dense reference, and the step that each of them allows."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from streamkern.backend.base import Backend
from streamkern.basics.errors import ConfigError
from streamkern.kernels.builtin import get_kernel
from streamkern.kernels.fourier import frequencies
from streamkern.kernels.products import KernelOperator
from streamkern.planning.problem import ProblemShape
from streamkern.solver.block import BlockMethod
from streamkern.solver.block_sizes import BlockSizes
from streamkern.solver.precondition import joint
from streamkern.solver.precondition.block import (
    JOINT_FACTOR,
    SKETCH,
    BlockPreconditioner,
    block_slices,
    build_block,
)
from streamkern.solver.precondition.block_factor import LEVERAGE_FRACTION, BlockInputs
from streamkern.solver.precondition.low_rank import build_low_rank
from streamkern.solver.precondition.noise import NO_NOISE, Noise
from streamkern.solver.precondition.norm import jittered_cholesky
from streamkern.solver.precondition.samples import Sample, merge_center_targets
from streamkern.solver.precondition.step_rule import (
    StepRule,
    blocks_due,
    fresh_eigenvalue,
    top_eigenvalue,
)
from tests import reference as ref
from tests.solver_problems import Array, block_inputs, both, featured, operator, rows
from tests.traced_memory import traced_memory

# --- the step rule ------------------------------------------------------------------------------


@given(st.floats(1e-2, 1e4), st.floats(1e-3, 1e2), st.integers(1, 10**6), st.floats(1e-3, 1.0))
def test_step_rule_equals_reference(leverage: float, lambda_1: float, m: int, scale: float) -> None:
    rule = StepRule(leverage, lambda_1)
    assert rule.eta(m) == pytest.approx(ref.step_size(m, ref.Spectrum(leverage, lambda_1)))
    assert StepRule(leverage, lambda_1, scale).eta(m) == pytest.approx(scale * rule.eta(m))
    assert rule.eta(1) == pytest.approx(1 / leverage)
    for top in (0.4, 1.0, 3.0):
        damped_rule = StepRule(900.0, top, damped=True, mean=60.0)
        half_step = damped_rule.eta(10**12) / 2  # half of the step of an infinite batch
        assert damped_rule.eta(damped_rule.critical_batch) == pytest.approx(half_step)
    # At the critical batch the step is half of the step of an infinite batch.
    critical = rule.critical_batch
    assert critical / (leverage + (critical - 1) * lambda_1) * 2 * lambda_1 == pytest.approx(
        1 + lambda_1 / leverage
    )


@given(st.floats(1e-2, 1e6), st.floats(1e-3, 1e2), st.integers(1, 10**6), st.floats(1e-3, 1.0))
def test_damped_step_is_limited_by_lambda_1_only(
    leverage: float, lambda_1: float, m: int, scale: float
) -> None:
    """Check that the step is at most a Newton step."""
    rule = StepRule(leverage, lambda_1, scale, damped=True)
    assert rule.eta(m) == pytest.approx(scale / max(1, lambda_1))


def growth(phi: Array, share: Array, w: Array, m: int, R: Array) -> tuple[Array, Array]:
    """Return S_w + R and E[(G_w + R)^2], for rows phi (n, d) of weights w with these shares."""
    ell = (phi**2).sum(axis=1)
    S_w = (phi.T * (share * w)) @ phi
    second = (phi.T * (share * w**2 * ell)) @ phi / m + (m - 1) / m * S_w @ S_w
    return S_w + R, second + S_w @ R + R @ S_w + R @ R


GROWTH_CASES: dict[str, Any] = {
    "d": st.integers(1, 6), "n": st.integers(1, 12), "seed": st.integers(0, 10**6),
    "spread": st.floats(0, 4), "m": st.sampled_from([1, 2, 3, 10, 1000]),
    "ridge": st.floats(0, 10),
}  # fmt: skip


def growth_case(
    d: int, n: int, seed: int, spread: float, ridge: float
) -> tuple[Array, Array, Array]:
    """Return rows phi (n, d), their shares (n,), and the Hessian R (d, d) of a ridge."""
    phi = rows(seed, n, d) * np.exp(spread * rows(seed + 1, n, 1))
    share = np.random.default_rng(seed).dirichlet(np.ones(n))
    root = rows(seed + 2, d, d)
    return phi, share, ridge * root @ root.T


def safe_step(phi: Array, share: Array, v: Array, R: Array) -> float:
    """Return 1 / (lambda_1(S_v) + |R|)."""
    return 1 / float(np.linalg.norm((phi.T * (share * v)) @ phi, 2) + np.linalg.norm(R, 2))


def assert_no_growth(
    phi: Array, share: Array, w: Array, m: int, R: Array, eta: float, factor: float,
    tolerance: float,
) -> None:  # fmt: skip
    """Check that factor (S_w + R) - eta E[(G_w + R)^2] has no negative eigenvalue."""
    mean, second_moment = growth(phi, share, w, m, R)
    smallest = np.linalg.eigvalsh(factor * mean - eta * second_moment)[0]
    assert smallest >= -tolerance * max(np.linalg.norm(mean, 2), 1e-300)


@given(**GROWTH_CASES)
def test_leverage_damping_bounds_error_growth(
    d: int, n: int, seed: int, spread: float, m: int, ridge: float
) -> None:
    """Check the theorem of the module for n rows, at eta = 1 / lambda_1(S), for any leverages."""
    phi, share, R = growth_case(d, n, seed, spread, ridge)
    eta = safe_step(phi, share, np.ones(n), R)
    w = 1 / (1 + eta * (phi**2).sum(axis=1) / m)
    assert_no_growth(phi, share, w, m, R, eta, 1, 1e-12)


@given(**GROWTH_CASES, leverage_factor=st.floats(0.75, 10))
def test_leverage_damping_bounds_growth_with_weighted_eigenvalue(
    d: int, n: int, seed: int, spread: float, m: int, ridge: float, leverage_factor: float
) -> None:
    """Check eta = 1 / lambda_1(S_v), with leverages a quarter too small, or too large."""
    phi, share, R = growth_case(d, n, seed, spread, ridge)
    ell = (phi**2).sum(axis=1)
    eta = safe_step(phi, share, np.ones(n), R)
    for k in range(50):  # from a step that is too short
        eta = safe_step(phi, share, 1 / (1 + LEVERAGE_FRACTION * eta * ell / m), R)
        if k in (0, 49):
            w = 1 / (1 + eta * leverage_factor * ell / m)
            assert_no_growth(phi, share, w, m, R, eta, 2, 1e-9)


def matrix_with_spectrum(values: Array, seed: int) -> Array:
    """Return a symmetric matrix of these eigenvalues in a random basis."""
    n = len(values)
    Q, _ = np.linalg.qr(rows(seed, n, n))
    return np.asarray((Q * values) @ Q.T)


@settings(max_examples=40)
@given(
    n=st.integers(1, 60),
    seed=st.integers(0, 10**6),
    decay=st.floats(0.0, 4.0),
    n_steps=st.sampled_from([8, 32, 100]),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_top_eigenvalue_is_an_upper_estimate(
    n: int, seed: int, decay: float, n_steps: int, dtype: Any
) -> None:
    A = matrix_with_spectrum(3.0 * np.arange(1.0, n + 1) ** -decay, seed).astype(dtype)
    start = rows(seed + 1, n).astype(dtype)
    values, vectors = np.linalg.eigh(A.astype(np.float64))
    # A start that is orthogonal to the top eigenvector cannot find it; this has probability 0.
    assume(abs(vectors[:, -1] @ start) > 1e-2 * np.linalg.norm(start))
    value, truth = top_eigenvalue(Backend(1), lambda v: A @ v, start, n_steps), float(values[-1])
    rounding = 50 * float(np.finfo(dtype).eps)
    assert value >= truth * (1 - rounding) - (0.0 if n_steps >= 32 else 0.05 * truth)
    # After n steps the Krylov space is the whole space; before, the residual is added.
    assert value <= truth * (1 + (rounding + 2e-6 if n_steps >= n else 0.5))


@pytest.mark.parametrize(
    "values",
    [
        np.r_[5.0, np.zeros(79)],
        np.r_[np.full(3, 5.0), np.full(77, 1e-8)],
        np.r_[5.0, 5.0 - 1e-9, np.full(78, 4.999)],
        np.full(80, 5.0),
        np.r_[5.0 * np.exp(-np.arange(80.0))],
        5.0 - 4.0 * np.linspace(0, 1, 80) ** 2,
    ],
    ids=["rank 1", "rank 3", "nearly equal pair", "identity", "exponential", "dense at the top"],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_top_eigenvalue_of_difficult_spectra_is_accurate(values: Array, dtype: Any) -> None:
    A = matrix_with_spectrum(values, 0).astype(dtype)
    value = top_eigenvalue(Backend(1), lambda v: A @ v, rows(1, 80).astype(dtype), 32)
    assert 5.0 * (1 - 20 * float(np.finfo(dtype).eps)) <= value <= 5.0 * 1.05


def test_top_eigenvalue_of_zero_matrix_is_zero() -> None:
    for n in (1, 10):
        assert top_eigenvalue(Backend(1), np.zeros_like, rows(0, n), 32) == 0.0


@pytest.mark.parametrize("spike", [1.0, 1.5, 3.0, 10.0])
def test_fresh_eigenvalue_excludes_sampling_noise(spike: float) -> None:
    """Check 400 rows of white noise, whose sample covariance has a top eigenvalue near 4."""
    for seed in range(5):
        phi = rows(10 * seed, 400, 400)
        phi[0] *= spike**0.5
        largest, start = float((phi**2).sum(axis=0).max()), rows(seed + 100, 400)
        estimate = fresh_eigenvalue(Backend(1), phi, largest, start)
        # Steps would be unsafe below half of the true eigenvalue.
        assert spike / 1.7 < estimate < 1.5 * max(spike, 1.7)
        assert (
            top_eigenvalue(Backend(1), lambda v, phi=phi: phi @ (phi.T @ v) / 400, start, 32) > 3.7
        )


@pytest.mark.parametrize("row", [3, 350])
def test_fresh_eigenvalue_keeps_direction_of_one_half(row: int) -> None:
    """Check one row far from all others, in either half."""
    phi = np.where(rows(1, 100, 400) > 1, 0.1, 0.0)
    phi[0], phi[0, row] = 0.0, 100.0
    estimate = fresh_eigenvalue(Backend(1), phi, 1e4, rows(2, 100))
    assert estimate >= 1e4 / 400


@pytest.mark.parametrize("h", [1, 2, 3])
def test_fresh_eigenvalue_of_few_rows_is_finite(h: int) -> None:
    for b in (1, 2, 5):
        phi = rows(h, b, h)
        largest = float((phi**2).sum(axis=0).max())
        assert largest / h <= fresh_eigenvalue(Backend(1), phi, largest, rows(9, b)) < np.inf


# --- block preconditioner -----------------------------------------------------------------------


@given(st.integers(1, 10**6), st.data())
def test_block_slices_are_nearly_equal_and_bounded(p: int, data: st.DataObject) -> None:
    block_size = data.draw(st.integers(max(1, p // 50), p))
    blocks = block_slices(p, block_size)
    sizes = [b.stop - b.start for b in blocks]
    assert [b.start for b in blocks] == [0, *np.cumsum(sizes)[:-1]]
    assert sum(sizes) == p
    assert len(blocks) == -(-p // block_size)
    assert max(sizes) == -(-p // len(blocks)) <= block_size
    assert min(sizes) >= p // len(blocks) - 1 >= 0


def targets(X: Array, seed: int, noise: float) -> Array:
    """Return two smooth functions of the rows with noise of this standard deviation, (n, 2)."""
    normal = np.random.default_rng(seed).standard_normal((len(X), 2))
    return np.stack([np.sin(X[:, 0]), X[:, 1]], axis=1) + noise * normal


def untargeted_inputs(op: KernelOperator, Z: Array, S: Array, probe: Array) -> BlockInputs:
    """Return the inputs of `build_block` for rows S and `probe` with targets of 0."""
    samples = (Sample(both(op, X), np.zeros((len(X), 1), op.dtype)) for X in (S, probe))
    return block_inputs(op, Z, *samples)


class BuiltBlocks:
    """A block preconditioner of 30 centers, its inputs, and the entries of its reports."""

    def __init__(
        self, op: KernelOperator, *, block_size: int = 30, Z: Array | None = None,
        noise: float = 0.3, estimate: Noise = NO_NOISE, batch: float = np.inf, seed: int = 0,
        **options: Any,
    ) -> None:  # fmt: skip
        self.op, self.Z = op, rows(1, 30, 3) if Z is None else Z
        self.S, self.probe = rows(2, 300, 3), rows(3, 200, 3)
        self.kernel = ref.make_kernel("laplace", op.kernel.bandwidth)
        self.Y, self.Y_probe = (targets(X, 4, noise) for X in (self.S, self.probe))
        self.events: list[dict[str, Any]] = []
        block_size = min(block_size, len(self.Z))
        inputs = block_inputs(
            op, self.Z, Sample(both(op, self.S), self.Y.astype(op.dtype)),
            Sample(both(op, self.probe), self.Y_probe.astype(op.dtype)), batch=batch, seed=seed,
        )  # fmt: skip
        self.pre: BlockPreconditioner = build_block(
            inputs, block_slices(len(self.Z), block_size), noise=estimate,
            report=lambda event, fields: self.events.append(fields), **options,
        )  # fmt: skip

    def factors(self, b: int) -> ref.BlockFactors:
        """Return the reference's factors of block b, at the mu and jitter that were reported."""
        Z_b = self.Z[self.pre.blocks[b]]
        mu, jitter = self.events[b]["mu"], self.events[b]["jitter"]
        return ref.block_factors(self.kernel(Z_b, Z_b), self.kernel(Z_b, self.S), mu, jitter)

    def features(self) -> list[ref.Array]:
        """Return the probe's features in every block, by the reference."""
        return [
            self.kernel(self.probe, self.Z[block]) @ self.factors(b).H.T
            for b, block in enumerate(self.pre.blocks)
        ]


@pytest.mark.parametrize("max_batch", [1, 4, 1000])
def test_ridge_costs_at_most_one_batch(max_batch: int) -> None:
    """Check that a larger mu allows longer rounds, and that the start is the same."""
    unlimited = BuiltBlocks(operator(), block_size=1, ridge=10.0, batch=max_batch).pre
    limited = BuiltBlocks(
        operator(), block_size=1, ridge=10.0, batch=max_batch, max_batch=max_batch
    ).pre
    limited_blocks, unlimited_blocks = (
        blocks_due(30, max(rule.eta(max_batch) for rule in pre.rules) * 10.0 / pre.mu)
        for pre in (limited, unlimited)
    )
    if max_batch == 1000:
        assert limited.mu == unlimited.mu
    else:
        assert limited_blocks <= max_batch < unlimited_blocks
        assert limited.mu > unlimited.mu
    np.testing.assert_array_equal(limited.start, unlimited.start)


def test_the_parts_of_a_setup_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the times cover the setup, and wait for the device, which takes 20 ms here."""
    monkeypatch.setattr(Backend, "synchronize", lambda self: time.sleep(0.02))
    start = time.perf_counter()
    *blocks, sweeps = BuiltBlocks(operator(), block_size=15, sweeps=3, estimate=Noise(1e-3)).events
    elapsed = time.perf_counter() - start
    parts = ["covariance_s", "noise_s", "fit_s", "factor_s"]
    seconds_by_event = [
        {k: v for k, v in event.items() if k.endswith("_s")} for event in (*blocks, sweeps)
    ]
    assert [list(seconds) for seconds in seconds_by_event] == [
        parts,
        [*parts[:1], *parts[2:]],
        ["sweeps_s"],
    ]
    assert all(value >= 0.02 for seconds in seconds_by_event for value in seconds.values())
    total = sum(value for seconds in seconds_by_event for value in seconds.values())
    # 8 parts: 4 of the first block, 3 of the second, and the sweeps. Times are rounded to ms.
    assert 8 * 0.02 <= total <= elapsed + 0.004
    assert 1 <= sweeps["sweeps"] <= 4
    assert sweeps["penalty"] > 0


@pytest.mark.parametrize("block_size", [30, 11, 1])
@pytest.mark.parametrize("damping", [None, 1e-3])
def test_block_factors_equal_the_reference(block_size: int, damping: float | None) -> None:
    built = BuiltBlocks(operator(), block_size=block_size, damping=damping)
    n_blocks = len(built.pre.blocks)
    assert [e["block"] for e in built.events] == list(range(n_blocks))
    for b in range(n_blocks):
        H = built.factors(b).H
        np.testing.assert_allclose(built.pre.H[b], H, rtol=0, atol=1e-9 * np.abs(H).max())
        assert not np.triu(built.pre.H[b], 1).any()
    assert built.pre.mu == min(e["mu"] for e in built.events)
    assert built.pre.jitters == [e["jitter"] for e in built.events]
    assert built.pre.jitter == max(built.pre.jitters)


def test_apply_equals_h_transposed_h() -> None:
    built = BuiltBlocks(operator(), block_size=11)
    for b, block in enumerate(built.pre.blocks):
        g = rows(9, block.stop - block.start, 2)
        u = built.pre.apply(b, g.copy(), Backend(1), np.empty_like(g))
        H = built.pre.H[b]
        np.testing.assert_allclose(u, H.T @ (H @ g), rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("precision", ["exact", "float64"])
def test_duplicate_centers_are_factored_with_reported_jitter(precision: str) -> None:
    Z = rows(1, 15, 3)
    built = BuiltBlocks(operator(precision=precision), Z=np.concatenate([Z, Z]), damping=1e-4)
    assert 0 < built.pre.jitter < 1e-2
    assert np.isfinite(built.pre.H[0]).all()
    rule = built.pre.rules[0]
    without_copies = BuiltBlocks(operator(precision=precision), Z=Z, damping=1e-4).pre.rules[0]
    # The span of the functions is the same, so only the jitter makes a difference.
    assert rule.leverage == pytest.approx(without_copies.leverage, rel=0.02)
    assert rule.lambda_1 == pytest.approx(without_copies.lambda_1, rel=0.02)


@pytest.mark.slow
@pytest.mark.full(all_but_every=5)
@pytest.mark.parametrize("half_factors", [False, True])
@pytest.mark.parametrize("n_outputs", [1, 300])
@pytest.mark.parametrize("n_blocks", [1, 4])
@pytest.mark.parametrize(
    ("b", "s", "h"), [(150, 450, 150), (300, 600, 512), (300, 1500, 150), (400, 800, 200)]
)
def test_setup_uses_at_most_counted_memory(
    b: int, s: int, h: int, n_blocks: int, n_outputs: int, half_factors: bool
) -> None:
    """Check one and many outputs; memory that all runs need, and the input, are not included."""
    op = operator(precision="exact")
    op.backend.tile_rows = op.backend.tile_cols = 64
    Z = rows(0, n_blocks * b, 3)
    S, probe = (both(op, rows(k, n, 3)) for k, n in ((1, s), (2, h)))
    Y, Y_probe = (rows(k, n, n_outputs).astype(np.float32) for k, n in ((3, s), (4, h)))
    problem = ProblemShape(
        n_rows=10**6, epochs=1, d=3, c=n_outputs, p=n_blocks * b, row_bytes=12, unit_rows=1,
        itemsize=4, threads=1, width=5, tile_bytes=0,
    )  # fmt: skip
    sizes = BlockSizes("block", 1, s, h, 0, 0, block_size=b, keep=True, half_factors=half_factors)
    planned_bytes = {
        buffer_name: size for _, buffer_name, size in BlockMethod().count(problem, sizes).lines
    }
    names = (
        "block factors H", "weights learned from the sample", "factors of one block, probe",
        "kernel products with targets, residuals", "partial sums of products",
        "tiles of matrix products",
        "sketches of the leverage", "sweeps over the blocks: values, directions",
        "block factor before it is rounded", "gradient of one block in halves",
        "tiles of H in float32",
    )  # fmt: skip
    zeros = np.zeros((len(Z), n_outputs), np.float32)
    center_targets = merge_center_targets(
        op.backend, np.arange(len(Z)), zeros, None, p=len(Z), n_rows=10**6
    )
    inputs = block_inputs(
        op, Z, Sample(S, Y), Sample(probe, Y_probe), center_targets=center_targets,
        half_factors=half_factors,
    )  # fmt: skip
    with traced_memory() as traced:
        noise = Noise(1e-9)  # so small that the joint fit tries a second penalty
        build_block(inputs, block_slices(len(Z), b), sweeps=4, noise=noise)
    peak = traced.peak
    other_bytes = 1 << 17  # tiles, vectors of Lanczos steps, Python objects
    assert peak <= sum(planned_bytes.get(name, 0) for name in names) + other_bytes


def test_identical_centers_give_finite_factors() -> None:
    built = BuiltBlocks(operator(precision="exact"), Z=np.repeat(rows(1, 1, 3), 20, axis=0))
    assert np.isfinite(built.pre.H[0]).all()
    assert 0 < built.pre.rules[0].lambda_1 < 20


def covariance_scale(built: BuiltBlocks, b: int) -> float:
    """Return the largest eigenvalue of W W^T / s."""
    return float(np.linalg.norm(built.factors(b).W, 2) ** 2 / len(built.S))


@pytest.mark.parametrize("block_size", [30, 8])
@pytest.mark.parametrize("variance", [30.0, 0.3, 0.0])
def test_mu_is_noise_penalty_for_sample_rows(variance: float, block_size: int) -> None:
    """Check that it is equal in all blocks, except for a lower limit."""
    built = BuiltBlocks(operator(), block_size=block_size, estimate=Noise(variance, 100))
    lower_limit = 1e-5 * covariance_scale(built, 0)
    for event in built.events:
        expected = max(variance * 3**0.5 / 300, lower_limit)
        assert event["mu"] == pytest.approx(expected, rel=1e-3)
    assert built.pre.mu == min(event["mu"] for event in built.events)


@pytest.mark.parametrize(
    ("block_size", "options"),
    [(30, {}), (8, {}), (8, {"estimate": Noise(0.3, 100)}), (30, {"damping": 1e-3})],
)
def test_blocks_fit_residuals_of_earlier_blocks(block_size: int, options: dict[str, Any]) -> None:
    """Check each block's fit, whose penalty is the norm of the function of all blocks so far."""
    built = BuiltBlocks(operator(), block_size=block_size, **options)
    s, expected = len(built.S), np.zeros((30, 2))
    for event, block in zip(built.events, built.pre.blocks, strict=True):
        K_S, K_Z = (built.kernel(built.Z[block], A) for A in (built.S, built.Z))
        residuals = built.Y - built.kernel(built.S, built.Z) @ expected
        gradient = K_S @ residuals / s - event["mu"] * K_Z @ expected
        expected[block] = np.linalg.solve(K_S @ K_S.T / s + event["mu"] * K_Z[:, block], gradient)
    # The start is rescaled to fit the fresh rows of the probe.
    f = built.kernel(built.probe, built.Z) @ expected
    expected *= np.clip((f * built.Y_probe).sum() / (f * f).sum(), 0, 1)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(built.pre.start, expected, rtol=0, atol=1e-6 * scale)
    assert built.pre.start_rows == len(built.S)


def objective(K: Array, Y: Array, K_zz: Array, penalty: float, alpha: Array) -> Array:
    """Return the objective of each output on a sample."""
    value = ((Y - K @ alpha) ** 2).mean(axis=0) + penalty * (alpha * (K_zz @ alpha)).sum(axis=0)
    return np.asarray(value)


@pytest.mark.parametrize("features", ["kernel", "fourier"])
def test_sweeps_reach_joint_minimum_of_sample_objective(
    features: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that sweeps lower the penalised error of the sample, down to its minimum."""
    monkeypatch.setattr(joint, "SWEEP_TOLERANCE", 0.0)
    op, noise = featured(operator(), features, 30), Noise(30.0, 300)
    X, penalty = rows(2, 300, 3), JOINT_FACTOR * noise.penalty(300)
    Y = targets(X, 4, 0.3)
    Z = rows(1, 30, 3)
    if features == "fourier":
        Z = frequencies(get_kernel("laplace", 2.0), 3, 30, 3)
    K_zz = np.eye(30) if features == "fourier" else ref.laplace(Z, Z, 2.0)
    K = op.matrix(op.points(X, left=True), both(op, Z))
    probe = Sample(op.points(rows(3, 200, 3), left=True), Y[:200], None, 200)  # no row is fresh
    starts = []
    for sweeps in (0, 1, 2, 3, 6, 60):
        inputs = block_inputs(op, Z, Sample(op.points(X, left=True), Y.copy()), probe)
        pre = build_block(inputs, block_slices(30, 8), noise=noise, sweeps=sweeps)
        starts.append(pre.start)
    values = np.array([objective(K, Y, K_zz, penalty, start) for start in starts])
    assert (np.diff(values, axis=0) <= 1e-12 * values[0]).all()
    assert (values[1] < values[0] * (1 - 1e-4)).all()
    truth = ref.ridge(K, Y, K_zz, penalty)
    np.testing.assert_allclose(K @ starts[-1], K @ truth, rtol=0, atol=1e-5)
    minimum = objective(K, Y, K_zz, penalty, truth)
    np.testing.assert_allclose(values[-1], minimum, rtol=1e-8)


class BackendThatFailsTwice(Backend):
    """Backend whose third and fourth factorisations, of C + mu I, fail."""

    n_calls = 0

    def cholesky(self, A: Array) -> bool:
        self.n_calls += 1
        return super().cholesky(A) and self.n_calls not in (3, 4)


def test_reported_mu_is_the_mu_in_use() -> None:
    """Check a covariance that rounding makes indefinite, for which mu is raised."""
    plain = BuiltBlocks(operator(), damping=1e-6)
    built = BuiltBlocks(operator(backend=BackendThatFailsTwice(1)), damping=1e-6)
    assert built.pre.mu == pytest.approx(100 * plain.pre.mu)
    H = built.factors(0).H
    np.testing.assert_allclose(built.pre.H[0], H, rtol=0, atol=1e-9 * np.abs(H).max())


@pytest.mark.parametrize("precision", ["exact", "float64"])
def test_zero_damping_terminates(precision: str) -> None:
    """Check duplicate centers and a smooth kernel, whose C is singular."""
    Z = np.concatenate([rows(1, 15, 3)] * 2)
    built = BuiltBlocks(operator("gaussian", 8.0, precision), Z=Z, damping=0.0)
    assert built.pre.mu > 0
    assert np.isfinite(built.pre.H[0]).all()


@pytest.mark.parametrize("ridge", [0.0, 1e-2])
def test_too_small_bandwidth_is_refused(ridge: float) -> None:
    """Check that the search for mu ends."""
    with pytest.raises(ConfigError, match="bandwidth is too small"):
        BuiltBlocks(operator(bandwidth=1e-4, precision="exact"), ridge=ridge)


def test_probe_without_kernel_values_is_refused() -> None:
    op, Z = operator(bandwidth=1e-3, precision="exact"), rows(1, 30, 3)
    with pytest.raises(ConfigError, match="is zero or not finite"):
        build_block(untargeted_inputs(op, Z, Z, rows(2, 50, 3)), [slice(0, 30)])


@pytest.mark.parametrize("name", ["Z", "S", "probe"])
def test_non_finite_rows_are_refused(name: str) -> None:
    op = operator(precision="exact")
    data = {"Z": rows(1, 30, 3), "S": rows(2, 100, 3), "probe": rows(3, 50, 3)}
    data[name][7, 1] = np.nan
    with pytest.raises(ConfigError, match="not finite"):
        build_block(untargeted_inputs(op, **data), [slice(0, 30)])


def test_half_precision_overflow_is_named() -> None:
    op = operator(bandwidth=1e-5, precision="fast")
    with np.errstate(over="ignore", invalid="ignore"), pytest.raises(ConfigError, match="65504"):
        BuiltBlocks(op)


def test_ridge_is_included_in_damping_and_step() -> None:
    """Check the bound of `step_rule` for the second moment of a block's step, computed densely."""
    ridge, n = 0.05, 4
    built = BuiltBlocks(operator(), block_size=8, ridge=ridge)
    leverage = sum((f**2).sum(axis=1) for f in built.features())
    for b, (rule, phi) in enumerate(zip(built.pre.rules, built.features(), strict=True)):
        assert built.events[b]["mu"] >= n * ridge
        Z_b = built.Z[built.pre.blocks[b]]
        H = built.factors(b).H
        S, R = phi.T @ phi / 200, ridge * H @ built.kernel(Z_b, Z_b) @ H.T
        assert rule.leverage == pytest.approx(leverage.max())
        low, high = ref.held_out_lambda_1(phi)
        ridge_share = n * ridge / built.events[b]["mu"]
        assert low * (1 - 1e-9) <= rule.lambda_1 - ridge_share <= high * (1 + 1e-9)
        eta = 1 / (np.linalg.norm(S, 2) + ridge_share)
        for m in (1, 10, 1000):
            w = 1 / (1 + eta * leverage / m)
            S_w = (phi.T * w) @ phi / 200
            noise = (phi.T * (w**2 * (phi**2).sum(axis=1))) @ phi / 200
            second = noise / m + (m - 1) / m * S_w @ S_w + S_w @ R + R @ S_w + n * R @ R
            assert np.linalg.eigvalsh(S_w + R - eta * second)[0] > -1e-12


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
@pytest.mark.parametrize("precision", ["exact", "float64"])
def test_sketches_have_unbiased_leverage(precision: str) -> None:
    """Check each row, within five standard deviations of the mean of 100 draws."""
    leverages, truth = [], np.zeros(0)
    for seed in range(100):
        built = BuiltBlocks(operator(precision=precision), block_size=16, damping=1e-2, seed=seed)
        K = built.kernel(built.probe[:40], built.Z[built.pre.blocks[1]])
        assert built.pre.sketches is not None
        leverages.append(((K @ built.pre.sketches[1]) ** 2).sum(axis=1))
        truth = ((K @ np.float64(built.pre.H[1]).T) ** 2).sum(axis=1)
    ratios = np.mean(leverages, axis=0) / truth
    np.testing.assert_allclose(ratios, 1, atol=5 * (2 / 16 / 100) ** 0.5)
    [one] = BuiltBlocks(operator(precision=precision)).pre.sketches or []
    assert one.shape == (30, SKETCH)


# --- low-rank preconditioner --------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 6, 39])
def test_low_rank_eigensystem_equals_the_reference(level: int) -> None:
    op, X_s, probe = operator(), rows(0, 40, 3), rows(1, 150, 3)
    P = build_low_rank(op, both(op, X_s), both(op, probe), level=level)
    kernel = ref.make_kernel("laplace", 2.0)
    eigen = ref.eigensystem(kernel(X_s, X_s), level)
    np.testing.assert_allclose(P.D, eigen.D, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(np.abs(np.sum(P.E * eigen.E, axis=0)), 1.0, rtol=1e-8)
    scale = np.abs(eigen.Q).max()
    np.testing.assert_allclose((P.E * P.D) @ P.E.T, eigen.Q, rtol=0, atol=1e-10 * scale)
    spectrum = ref.eigenpro_spectrum(kernel, probe, X_s, eigen)
    assert P.rule.leverage == pytest.approx(spectrum.leverage, rel=1e-9)
    assert spectrum.lambda_1 * (1 - 1e-10) <= P.rule.lambda_1 <= spectrum.lambda_1 * 1.01
    g = rows(2, 150, 2)
    np.testing.assert_allclose(
        P.correction(op, both(op, probe), g, np.empty((len(X_s), 2))),
        eigen.Q @ kernel(X_s, probe) @ g,
        rtol=0, atol=1e-9,
    )  # fmt: skip


def test_directions_at_rounding_level_are_excluded() -> None:
    """Check a smooth kernel, with few eigenvalues above the rounding errors of float32."""
    op = operator("gaussian", 3.0, "exact")
    X_s, probe = rows(0, 100, 1), rows(1, 80, 1)
    P = build_low_rank(op, both(op, X_s), both(op, probe), level=60)
    assert 1 <= P.E.shape[1] < 20
    assert P.E.shape == (100, len(P.D))
    assert np.isfinite(P.D).all()
    assert P.D.min() >= 0
    assert 0 < P.rule.lambda_1 < 1e-2


@pytest.mark.parametrize("level", [0, -1, 20, 21])
def test_level_out_of_range_is_refused(level: int) -> None:
    op = operator()
    with pytest.raises(ConfigError, match=f"level={level} must lie between 1 and n_nystrom - 1"):
        build_low_rank(op, both(op, rows(0, 20, 2)), both(op, rows(1, 20, 2)), level=level)


def test_kernel_that_is_not_positive_definite_is_refused() -> None:
    class Negative(type(operator().kernel)):  # type: ignore[misc]
        def profile(self, sq: Array, xp: Any) -> Array:
            return -1 - sq

    op = KernelOperator(Negative(1.0), Backend(1), "float64")
    with pytest.raises(ConfigError, match="not positive definite"):
        jittered_cholesky(op, both(op, rows(0, 5, 2)))
