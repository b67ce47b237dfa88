"""Check rows that are centers: their sums, and the block preconditioner of the complete stream."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streamkern.backend.base import Backend
from streamkern.solver.precondition import joint
from streamkern.solver.precondition.block import (
    JOINT_FACTOR,
    BlockPreconditioner,
    block_slices,
    build_block,
)
from streamkern.solver.precondition.noise import Noise
from streamkern.solver.precondition.samples import CenterTargets, Sample, merge_center_targets
from tests import reference as ref
from tests.solver_problems import Array, block_inputs, operator, rows

N, P = 120, 30
X = rows(0, N, 3)
"""The stream, of which the first rows are the centers."""
Y = np.stack([np.sin(X[:, 0]), X[:, 1] ** 2], axis=1) + 0.3 * rows(1, N, 2)
CENTER_INDEX = np.where(np.arange(N) < P, np.arange(N), -1)
WEIGHTS = np.random.default_rng(2).uniform(0.2, 3, N)
PENALTY = 0.1
NOISE = Noise(PENALTY * N, N)


def kernel(A: Array, B: Array) -> Array:
    """Return the Laplace kernel matrix of A and B."""
    return ref.laplace(A, B, 2.0)


# --- by center ----------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
def test_rows_are_merged_by_center(weighted: bool) -> None:
    """Check that two rows of one center become one, with summed weights and the mean target."""
    center_index, targets = np.array([3, 0, 3, 1]), rows(3, 4, 2)
    w = np.array([2.0, 1.0, 0.5, 0.0]) if weighted else None
    merged = merge_center_targets(Backend(1), center_index, targets, w, p=5, n_rows=20)
    a, b = (2.0, 0.5) if weighted else (1.0, 1.0)
    np.testing.assert_array_equal(merged.counts, [1, 1, 0, 2, 0])
    np.testing.assert_allclose(merged.weights, [1, 0 if weighted else 1, 0, a + b, 0])
    np.testing.assert_allclose(merged.Y[3], (a * targets[0] + b * targets[2]) / (a + b))
    np.testing.assert_allclose(merged.Y[0], targets[1])
    np.testing.assert_array_equal(merged.Y[1], 0 * targets[3] if weighted else targets[3])
    assert not merged.Y[[2, 4]].any()
    assert [merged.share(part) for part in (slice(0, 5), slice(3, 4), slice(4, 5))] == [0.2, 0.1, 0]


def test_merged_targets_keep_dtype_of_run() -> None:
    merged = merge_center_targets(
        Backend(1), np.zeros(3, np.int64), np.ones((3, 1), np.float32), None, p=2, n_rows=3
    )
    assert merged.Y.dtype == merged.weights.dtype == np.float32


# --- a block with known centers -----------------------------------------------------------------


def merge_first_rows(w: Array | None) -> CenterTargets:
    """Return the targets of the first rows, which are the centers."""
    part = None if w is None else w[:P]
    return merge_center_targets(Backend(1), np.arange(P), Y[:P], part, p=P, n_rows=N)


def build_preconditioner(
    block_size: int, w: Array | None, sample_ids: Array | None = None, **options: Any
) -> tuple[BlockPreconditioner, list[dict[str, Any]]]:
    """Return the preconditioner, and its reports, of a sample of these rows; by default of all."""
    op, events = operator(), list[dict[str, Any]]()
    ids = np.arange(N) if sample_ids is None else sample_ids
    root = None if w is None else np.sqrt(w[ids])
    S = Sample(op.points(X[ids], left=True), Y[ids].copy(), root, 0, CENTER_INDEX[ids])
    probe = Sample(op.points(X, left=True), Y, None if w is None else np.sqrt(w), 1, CENTER_INDEX)
    pre = build_block(
        block_inputs(op, X[:P], S, probe, center_targets=merge_first_rows(w)),
        block_slices(P, block_size), noise=NOISE,
        report=lambda event, fields: events.append(fields), **options,
    )  # fmt: skip
    return pre, events


@pytest.mark.parametrize("sample_ids", [np.arange(N), np.arange(P, N)], ids=["all", "others"])
@pytest.mark.parametrize("w", [None, WEIGHTS], ids=["plain", "weighted"])
@pytest.mark.parametrize("block_size", [30, 10])
def test_rows_at_centers_and_sample_give_covariance_of_stream(
    block_size: int, w: Array | None, sample_ids: Array
) -> None:
    """Check that H^T H is the inverse of K_bX W K_Xb / n + mu K_bb over all rows.

    The sample need not have the rows of the block itself, but has the rows of other blocks.
    """
    if block_size < P and len(sample_ids) < N:
        sample_ids = np.arange(N)[10:]  # without the rows of the first block
    pre, events = build_preconditioner(block_size, w, sample_ids)
    scale = np.ones(N) if w is None else w
    for b, block in enumerate(pre.blocks):
        if b and len(sample_ids) < N:
            continue
        K, K_bb = kernel(X[block], X), kernel(X[block], X[block])
        K_bb += events[b]["jitter"] * np.eye(len(K_bb))
        inverse = (K * scale) @ K.T / N + events[b]["mu"] * K_bb
        H = pre.H[b]
        assert H is not None
        product = H @ inverse @ H.T
        np.testing.assert_allclose(product, np.eye(len(H)), rtol=0, atol=1e-8)


@pytest.mark.parametrize("w", [None, WEIGHTS], ids=["plain", "weighted"])
def test_single_block_start_is_penalised_least_squares_of_stream(w: Array | None) -> None:
    pre, events = build_preconditioner(P, w, np.arange(P, N))
    assert events[0]["mu"] == pytest.approx(PENALTY)  # the penalty for all N rows
    K, scale = kernel(X, X[:P]), (np.ones(N) if w is None else w)[:, None]
    root = np.sqrt(scale)
    truth = ref.ridge(root * K, root * Y, kernel(X[:P], X[:P]), PENALTY)
    assert pre.start is not None
    np.testing.assert_allclose(K @ pre.start, K @ truth, rtol=0, atol=1e-7)


@pytest.mark.parametrize("ridge", [1e-3, 2.5 * PENALTY, 10.0])
@pytest.mark.parametrize("block_size", [30, 10])
def test_start_uses_the_ridge(
    ridge: float, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check ridges above and below the noise; the steps lead to this ridge."""
    monkeypatch.setattr(joint, "SWEEP_TOLERANCE", 0.0)
    pre, _ = build_preconditioner(block_size, None, sweeps=600, ridge=ridge)
    K = kernel(X, X[:P])
    penalty = max(PENALTY if block_size == P else JOINT_FACTOR * PENALTY, ridge)
    truth = ref.ridge(K, Y, kernel(X[:P], X[:P]), penalty)
    assert pre.start is not None
    np.testing.assert_allclose(K @ pre.start, K @ truth, rtol=0, atol=1e-6)


def test_rows_at_centers_do_not_select_smaller_penalty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check rows that are all centers, which would look better with a smaller penalty."""
    monkeypatch.setattr(joint, "SWEEP_TOLERANCE", 0.0)
    op, z = operator(), X[:P]
    center_targets = merge_center_targets(Backend(1), np.arange(P), Y[:P], None, p=P, n_rows=P)
    S, probe = (
        Sample(op.points(z[part], left=True), Y[:P][part].copy(), None, 0, CENTER_INDEX[:P][part])
        for part in (slice(0, 20), slice(20, P))
    )
    pre = build_block(
        block_inputs(op, z, S, probe, center_targets=center_targets), block_slices(P, 10),
        noise=Noise(1e-12 * P, P), damping=1e-3, sweeps=2000,
    )  # fmt: skip
    K = kernel(z, z)
    truth = np.linalg.solve(K + P * JOINT_FACTOR * pre.mu * np.eye(P), Y[:P])
    np.testing.assert_allclose(K @ pre.start, K @ truth, rtol=0, atol=1e-5)


@pytest.mark.parametrize("w", [None, WEIGHTS], ids=["plain", "weighted"])
def test_start_is_scaled_by_fresh_rows(w: Array | None) -> None:
    op, alpha = operator(), 0.1 * rows(4, P, 2)
    root = None if w is None else np.sqrt(w)
    probe = Sample(op.points(X, left=True), Y, root, 50)
    inputs = block_inputs(op, X[:P], probe, probe)
    factor, least_error = joint.fit_to_fresh_rows(inputs, alpha)
    f, scale = kernel(X[50:], X[:P]) @ alpha, np.ones(N) if w is None else w

    def error(factor: float) -> float:
        return float((scale[50:, None] * (Y[50:] - factor * f) ** 2).sum())

    factors = np.linspace(0, 1, 10_001)
    assert least_error == pytest.approx(error(factor))
    assert least_error <= min(error(t) for t in factors) * (1 + 1e-12)
    assert 0 <= factor <= 1


@pytest.mark.parametrize(("block_size", "ridge"), [(10, 1e-3), (10, 0.0), (30, 1e-3)])
def test_start_values_at_centers_are_kept_for_ridge(block_size: int, ridge: float) -> None:
    """Check several blocks; a single block has the factor instead."""
    pre, _ = build_preconditioner(block_size, None, sweeps=2, ridge=ridge)
    assert pre.start is not None
    assert np.abs(pre.start).max() > 1e-3
    if block_size == P or not ridge:
        assert pre.values is None
    else:
        np.testing.assert_allclose(pre.values, kernel(X[:P], X[:P]) @ pre.start, atol=1e-10)


def test_step_size_uses_rows_at_centers_and_others() -> None:
    """Check lambda_1 against the top eigenvalue, and the leverage of rows that are not centers."""
    pre, _ = build_preconditioner(P, None)
    H = pre.H[0]
    assert H is not None
    phi = kernel(X, X[:P]) @ H.T
    other_phi = phi[P:]
    assert pre.rules[0].leverage == pytest.approx((other_phi**2).sum(axis=1).max())
    low, high = ref.held_out_lambda_1(other_phi)
    center_eigenvalue = np.linalg.norm(phi[:P], 2) ** 2 / N
    largest_row = (other_phi**2).sum(axis=1).max() / len(other_phi)
    for bound, sign in ((max(low, largest_row), 1), (max(high, largest_row), -1)):
        expected = (1 - P / N) * bound + center_eigenvalue
        assert sign * (pre.rules[0].lambda_1 - expected) >= -1e-6 * center_eigenvalue
