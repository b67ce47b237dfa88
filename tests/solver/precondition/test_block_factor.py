"""Check the noise that fresh rows show against fits with each penalty, and draws of known noise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streamkern import KernelRegressor
from streamkern.backend import split_products
from streamkern.solver.precondition.block import block_slices, build_block
from streamkern.solver.precondition.block_factor import (
    MIN_CENTER_SHARE,
    BlockFactor,
    noise_on_fresh_rows,
)
from streamkern.solver.precondition.noise import NO_NOISE, Noise
from streamkern.solver.precondition.samples import Sample
from tests import reference as ref
from tests.solver_problems import Array, block_inputs, operator, rows

N, H, P, D = 600, 800, 200, 6
LOW = Noise(1e-6, 1024, grows=False)
"""Noise of a thousand rows that do not determine it."""


def truth(X: Array) -> Array:
    """Return two smooth functions of the rows, (n, 2)."""
    return np.stack([np.sin(X[:, 0] + X[:, 1]), np.cos(X[:, 2])], axis=1)


class Case:
    """A block of centers, a sample and a probe whose targets have noise of this deviation."""

    def __init__(self, noise: float, weighted: bool = False, block: int = P) -> None:
        self.X, self.Z = rows(0, N + H, D), rows(1, P, D)
        self.Y = truth(self.X) + noise * rows(2, N + H, 2)
        self.w = np.random.default_rng(3).uniform(0.2, 3, N + H) if weighted else np.ones(N + H)
        self.op = operator(bandwidth=4.0)
        root = np.sqrt(self.w) if weighted else None
        S, probe = (
            Sample(self.op.points(self.X[at], left=True), self.Y[at].copy(), part, 0)
            for at, part in (
                (at, None if root is None else root[at]) for at in (slice(N), slice(N, N + H))
            )
        )
        self.inputs = block_inputs(self.op, self.Z, S, probe)
        self.factor = BlockFactor(self.inputs, slice(0, block), None, 0.0, None)

    def estimate(self, noise: Noise = LOW) -> Noise:
        """Return the noise that fresh rows show, or `noise`."""
        return noise_on_fresh_rows(self.factor, noise, N)

    def estimate_for(self, Y: Array) -> Noise:
        """Return the noise of other targets Y (N + H, 2), or `LOW`."""
        S, probe = Sample(self.inputs.S.X, Y[:N].copy()), Sample(self.inputs.probe.X, Y[N:])
        inputs = replace(self.inputs, S=S, probe=probe)
        return noise_on_fresh_rows(BlockFactor(inputs, slice(0, P), None, 0.0, None), LOW, N)

    def error(self, penalty: float) -> float:
        """Return the error on the probe of dense least squares on the sample, in float64."""
        K = ref.laplace(self.X, self.Z, 4.0)
        root = np.sqrt(self.w)[:, None]
        jitter = self.factor.norm.jitter * np.eye(P)
        K_zz = ref.laplace(self.Z, self.Z, 4.0) + jitter
        alpha = ref.ridge(root[:N] * K[:N], root[:N] * self.Y[:N], K_zz, penalty)
        left = root[N:] * (self.Y[N:] - K[N:] @ alpha)
        return float((left**2).sum(axis=1).mean())


@pytest.mark.parametrize("weighted", [False, True])
def test_tried_errors_equal_penalised_least_squares(weighted: bool) -> None:
    case = Case(0.5, weighted)
    noise = case.estimate()
    assert len(noise.trials) >= 4
    for kappa, error in noise.trials:
        assert error == pytest.approx(case.error(kappa / N), rel=1e-6)
    grid = [case.error(kappa / N) for kappa in 10.0 ** np.arange(-6, 3)]
    assert case.error(noise.penalty(N)) < 1.01 * min(grid)
    assert case.error(LOW.penalty(N)) > 1.02 * min(grid)
    assert not noise.grows


@pytest.mark.parametrize("noise", [0.1, 1.0])
def test_noise_of_gaussian_process_is_estimated(noise: float) -> None:
    """Check the variance for functions that are drawn in the span of the centers."""
    case, rng = Case(0.0), np.random.default_rng(5)
    K_zz = ref.laplace(case.Z, case.Z, 4.0)
    K = ref.laplace(case.X, case.Z, 4.0)
    weights = np.linalg.solve(np.linalg.cholesky(K_zz).T, rng.standard_normal((P, 2)))
    Y = K @ weights + np.sqrt(noise) * rng.standard_normal((N + H, 2))
    estimate = case.estimate_for(Y)
    assert noise / 3 < estimate.variance < 3 * noise


def test_noise_free_targets_keep_noise() -> None:
    """Check a function in the span of the centers, which the sample determines."""
    case = Case(0.0)
    Y = ref.laplace(case.X, case.Z, 4.0) @ rows(5, P, 2)
    assert case.estimate_for(Y) is LOW


@pytest.mark.parametrize(
    "noise",
    [Noise(1e-6, 1024), NO_NOISE, Noise(0.0, 1024, grows=False)],
    ids=["grows", "no estimate", "zero"],
)
def test_given_noise_is_kept(noise: Noise) -> None:
    assert Case(0.5).estimate(noise) is noise


def test_few_centers_or_learned_rows_keep_noise() -> None:
    few = Case(3.0, block=int(MIN_CENTER_SHARE * P) - 1)
    assert few.estimate() is LOW
    case = Case(3.0, block=int(MIN_CENTER_SHARE * P))
    assert case.estimate() is not LOW
    inputs = replace(case.inputs, probe=replace(case.inputs.probe, first_fresh=H))
    case.factor = BlockFactor(inputs, case.factor.block, None, 0.0, None)
    assert case.estimate() is LOW


@pytest.mark.parametrize("block", [P, P // 4])
def test_preconditioner_reports_ridge_of_run(block: int) -> None:
    case, events = Case(3.0), list[dict[str, Any]]()
    pre = build_block(
        case.inputs, block_slices(P, block), noise=LOW, n_effective_rows=1e5,
        ridge=LOW.penalty(1e5),
        report=lambda event, fields: events.append({"event": event, **fields}),
    )  # fmt: skip
    noise = [e for e in events if e["event"] == "fresh noise"]
    assert len(noise) == 1
    assert noise[0]["fresh"] == H
    assert pre.ridge == noise[0]["ridge"] == noise[0]["variance"] / 1e5
    assert pre.mu >= noise[0]["variance"] / N * (1 - 1e-12)


def test_given_ridge_is_kept() -> None:
    assert build_block(Case(0.5).inputs, [slice(0, P)], noise=LOW, ridge=1e-4).ridge == 1e-4


@pytest.mark.slow
def test_run_finds_noise_that_setup_rows_do_not_show() -> None:
    """Check a smooth function in 20 dimensions with a rough kernel.

    All small ridges have the same error on rows that are all centers. The default must be as good
    as the best of several ridges.
    """
    X = rows(7, 6000, 20).astype(np.float32)
    hidden, weights = rows(10, 100, 20), rows(8, 100, 1)
    clean = np.exp(-((X[:, None] - hidden[None]) ** 2).sum(axis=2) / 32) @ weights
    clean /= clean.std()
    Y = (clean + 0.5 * rows(9, 6000, 1)).astype(np.float32)

    def model(ridge: Any) -> KernelRegressor:
        return KernelRegressor(
            "laplace", bandwidth=6.0, n_centers=500, epochs=4, solver="block", block_size=500,
            ridge=ridge, threads=1, scale="none",
        ).fit(X[:3000], Y[:3000])  # fmt: skip

    def error(fitted: KernelRegressor) -> float:
        return float(((fitted.predict(X[3000:]).reshape(-1, 1) - clean[3000:]) ** 2).mean())

    automatic = model("auto")
    best = min(error(model(ridge)) for ridge in (0.0, 1e-6, 1e-5, 1e-4))
    assert error(automatic) < 1.02 * best


@pytest.mark.parametrize("weighted", [False, True])
def test_precision_high_uses_float16_parts_on_tensor_cores_alone(
    weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare C with that in float64, and its bits with those without tensor cores."""
    monkeypatch.setattr(split_products, "SPLIT_PANEL", 32)
    X, Z = rows(0, N, D), rows(1, 90, D)
    root = np.random.default_rng(3).uniform(0.5, 1.5, N) if weighted else None

    def covariance(precision: str, tensor_cores: bool) -> Array:
        op = operator(bandwidth=4.0, precision=precision)
        monkeypatch.setattr(op.backend, "tensor_cores", tensor_cores)
        weights = None if root is None else root.astype(op.dtype)
        S = Sample(op.points(X.astype(op.dtype), left=True), np.zeros((N, 1), op.dtype), weights)
        factor = BlockFactor(block_inputs(op, Z, S, S), slice(0, len(Z)), None, 1e-4, None)
        return factor.C

    true = covariance("float64", False)
    for precision in ("exact", "high", "fast"):
        plain, on_tensor_cores = (covariance(precision, has_any) for has_any in (False, True))
        assert (plain == on_tensor_cores).all() == (precision != "high")
        if precision != "fast":
            assert np.abs(plain - true).max() < 2e-5 * true.max()
            assert np.abs(on_tensor_cores - true).max() < 2e-5 * true.max()
