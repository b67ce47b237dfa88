"""Check the block preconditioner: factors, start and step rules against the dense reference."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
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
from streamkern.solver.precondition.block_factor import BlockInputs
from streamkern.solver.precondition.noise import NO_NOISE, Noise
from streamkern.solver.precondition.samples import Sample, merge_center_targets
from streamkern.solver.precondition.step_rule import (
    blocks_due,
)
from tests import reference as ref
from tests.solver_problems import Array, block_inputs, both, featured, operator, rows
from tests.traced_memory import traced_memory


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
