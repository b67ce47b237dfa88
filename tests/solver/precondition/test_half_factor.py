"""Check factors that are rounded to float16: their errors, measurements on them, and runs."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from streamkern.backend.base import Backend
from streamkern.backend.half_products import half_scale
from streamkern.backend.ranks import SINGLE, Communicator
from streamkern.solver.block_sizes import BlockSizes
from streamkern.solver.methods import BLOCK
from streamkern.solver.precondition.block import BlockPreconditioner, block_slices, build_block
from streamkern.solver.precondition.half_factor import PANEL, round_factor
from streamkern.solver.precondition.noise import Noise
from streamkern.solver.precondition.samples import Sample
from tests import rank_runs
from tests import reference as ref
from tests.plans import PLAIN
from tests.rank_threads import on_threads
from tests.runs import METHODS, array_source, assert_resume_gives_same_bits, finished, settings
from tests.solver_problems import Array, block_inputs, both, operator, rows

P, MU, JITTER = PANEL + 60, 1e-6, 1e-6
ROUNDING = 3e-6
"""Bound of the relative error of a product of two halves, or of float32, with absolute terms."""
HALVES = METHODS["blocks, ridge"] | {"solver.factor_dtype": "float16"}


def make_ill_conditioned_factor() -> tuple[Array, Array]:
    """Return a factor in float32 and kernel values (n, P) of other rows, with a large mean."""
    Z, X = rows(1, P, 3), rows(2, 2000, 3)
    kernel = ref.make_kernel("laplace", 20.0)
    H = ref.block_factors(kernel(Z, Z), kernel(Z, rows(3, 4000, 3)), MU, JITTER).H
    return H.astype(np.float32), kernel(X, Z)


def test_errors_are_small_multiples_of_rows() -> None:
    """Check H' = (I + P) H with the norm of P that is returned, and values of float16."""
    H, K = make_ill_conditioned_factor()
    scale = half_scale(H)
    assert 2.0**13 < scale * np.abs(H).max() <= 2.0**14
    values, halves, growth = round_factor(Backend(1), H, scale)
    assert halves.dtype == np.float16
    np.testing.assert_array_equal(halves.astype(np.float32), scale * values)
    assert not np.triu(values, 1).any()
    error = np.linalg.solve(np.float64(H).T, np.float64(values).T).T - np.eye(P)
    assert growth == pytest.approx((1 + np.linalg.norm(error)) ** 2, rel=1e-3)
    assert growth < 1.5
    # Rounding each entry by itself changes features far more.
    by_entry = (H * scale).astype(np.float16) / np.float32(scale)
    features = K @ np.float64(H).T
    size = np.linalg.norm(features, 2)
    changes = [np.linalg.norm(K @ np.float64(H - A).T, 2) for A in (values, by_entry)]
    assert changes[0] < (growth**0.5 - 1) * size
    assert changes[1] > 10 * changes[0], changes


def build_preconditioner(
    ranks: Communicator = SINGLE, half_factors: bool = True
) -> BlockPreconditioner:
    """Return the preconditioner of two blocks; no row of the sample or the probe is a center."""
    op = operator(bandwidth=20.0, precision="exact")
    X, probe = rows(1, 900, 3), rows(2, 300, 3)
    Y = np.sin(X[:, :1]).astype(np.float32)
    inputs = block_inputs(
        op, rows(0, 80, 3), Sample(op.points(X, left=True), Y).shard(ranks),
        Sample(both(op, probe), np.sin(probe[:, :1]).astype(np.float32)),
        half_factors=half_factors,
    )  # fmt: skip
    noise = Noise(1e-4, 900)
    return build_block(inputs, block_slices(80, 40), noise=noise, ridge=1e-4, sweeps=4)


def test_step_uses_the_rounded_factor() -> None:
    """Check leverages, the bound of the ridge and the step against dense matrices in float64."""
    pre, Z, probe = build_preconditioner(), rows(0, 80, 3), rows(2, 300, 3)
    kernel, leverage = ref.make_kernel("laplace", 20.0), np.zeros(300)
    assert pre.scales is not None
    for b, (block, scale) in enumerate(zip(pre.blocks, pre.scales, strict=True)):
        assert pre.H[b].dtype == np.float16
        H = np.float64(pre.H[b]) / scale
        leverage += ((kernel(probe, Z[block]) @ H.T) ** 2).sum(axis=1)
        norm = kernel(Z[block], Z[block]) + pre.jitters[b] * np.eye(40)
        assert np.linalg.norm(H @ norm @ H.T, 2) <= 1.001 / pre.mu
        g = rows(3, 40, 2).astype(np.float32)
        u = pre.apply(b, g, Backend(1), np.empty_like(g))
        truth = H.T @ (H @ g)
        assert (np.abs(u - truth) <= ROUNDING * np.abs(H.T) @ (np.abs(H) @ np.abs(g))).all()
    assert pre.rules[0].mean == pytest.approx(leverage.mean(), rel=1e-4)
    float32_mu = build_preconditioner(half_factors=False).mu
    assert float32_mu / 1.5 < pre.mu < float32_mu  # `mu` is `ridge_mu`, reduced by rounding


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_have_rows_of_the_rounded_factor(size: int) -> None:
    single, on_ranks = build_preconditioner(), on_threads(size, build_preconditioner)
    assert all(pre.scales == single.scales and pre.mu == on_ranks[0].mu for pre in on_ranks)
    for b in range(2):
        parts = [np.pad(pre.H[b], ((0, 0), (0, 40 - pre.H[b].shape[1]))) for pre in on_ranks]
        gathered = np.float32(np.concatenate(parts))
        assert {pre.H[b].dtype for pre in on_ranks} == {np.dtype(np.float16)}
        expected = np.float32(single.H[b])
        # Entries may differ in their last bit, and in its compensation.
        assert np.abs(gathered - expected).max() < 1e-2 * np.abs(expected).max()
        g = rows(3, 40, 2).astype(np.float32)
        terms = [pre.apply(b, g, Backend(1), np.empty_like(g)) for pre in on_ranks]
        H = np.float64(gathered) / single.scales[b]
        bound = ROUNDING * np.abs(H.T) @ (np.abs(H) @ np.abs(g))
        assert (np.abs(sum(terms) - H.T @ (H @ g)) <= bound).all()


def test_resumed_run_has_same_bits(tmp_path: Path) -> None:
    """Check also that weights are nearly those of a run with factors in float32."""
    result = assert_resume_gives_same_bits(tmp_path, [1, 7], HALVES, array_source())
    plain = finished(settings(**METHODS["blocks, ridge"]), source=array_source())
    weights = [np.asarray(run.model.weights) for run in (result, plain)]
    assert np.linalg.norm(weights[0] - weights[1]) < 1e-2 * np.linalg.norm(weights[1])
    assert not np.array_equal(*weights)


def test_ranks_save_and_resume_shared_factors(tmp_path: Path) -> None:
    """Check that two ranks reach nearly the weights of one rank."""
    store = rank_runs.write_store(tmp_path)
    changes = rank_runs.SMALL | {"solver.factor_dtype": "float16", "run.precision": "exact"}
    for name, size in (("one", 1), ("many", 2)):
        config = rank_runs.settings(store, tmp_path / name, **changes | rank_runs.grid(size, 1))
        rank_runs.on_ranks(size, config)
    on_one_rank, on_two_ranks = (rank_runs.alpha(tmp_path / name) for name in ("one", "many"))
    assert np.linalg.norm(on_two_ranks - on_one_rank) < 1e-2 * np.linalg.norm(on_one_rank)


def test_inaccurate_factor_warns() -> None:
    """Check the entries of a smooth kernel with hardly any noise, whose sizes differ widely."""
    X, probe = rows(1, 900, 3), rows(2, 300, 3)
    for damping, n_warnings in ((1e-2, 0), (1e-7, 1)):
        op = operator("gaussian", bandwidth=10.0, precision="exact")
        Y = np.sin(X[:, :1]).astype(np.float32)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            inputs = block_inputs(
                op, rows(0, 80, 3), Sample(op.points(X, left=True), Y),
                Sample(both(op, probe), np.sin(probe[:, :1]).astype(np.float32)),
                half_factors=True,
            )  # fmt: skip
            build_block(inputs, block_slices(80, 80), damping=damping)
        messages = [str(w.message) for w in caught]
        warnings_of_factor = [m for m in messages if "is too inaccurate for this kernel" in m]
        assert len(warnings_of_factor) == n_warnings, damping


def test_half_of_the_memory_of_factors_is_planned() -> None:
    p = 40_000
    problem = replace(PLAIN, p=p, n_rows=10**6)
    sizes = BlockSizes("block", 4096, 20_000, 4096, 0, 0, block_size=10_000, keep=True)
    plain, halves = (
        BLOCK.count(problem, replace(sizes, half_factors=half)) for half in (False, True)
    )
    saved = plain.peak - halves.peak
    assert p * 10_000 * 2 - 3 * 10_000**2 * 4 < saved < p * 10_000 * 2
    entries = [
        BLOCK.needs(replace(problem, ridge=False), replace(sizes, half_factors=half)).setup
        for half in (False, True)
    ]
    assert entries == [p * 10_000, p * 10_000 / 2]
