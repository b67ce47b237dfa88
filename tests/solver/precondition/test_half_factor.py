"""Factors that are rounded to float16: their errors, what is measured on them, and runs."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from streamkern.backend.base import Backend
from streamkern.backend.ranks import SINGLE, Communicator
from streamkern.solver.block_sizes import BlockSizes
from streamkern.solver.methods import BLOCK
from streamkern.solver.precondition.block import BlockPreconditioner, block_slices, build_block
from streamkern.solver.precondition.half_factor import PANEL, half_scale, round_factor
from streamkern.solver.precondition.noise import Noise
from streamkern.solver.precondition.samples import Sample
from tests import rank_runs
from tests import reference as ref
from tests.plans import PLAIN
from tests.rank_threads import on_threads
from tests.runs import METHODS, array_source, assert_resume_gives_same_bits, finished, settings
from tests.solver_problems import Array, both, operator, rows

P, MU, JITTER = PANEL + 60, 1e-6, 1e-6
ROUNDING = 3e-6
"""Bound of the errors of a product, of two halves and of float32, over its absolute terms."""
HALVES = METHODS["blocks, ridge"] | {"solver.factor_dtype": "float16"}


def ill_conditioned() -> tuple[Array, Array]:
    """Return a factor in float32 and kernel values (n, P) of other rows, with a large mean."""
    Z, X = rows(1, P, 3), rows(2, 2000, 3)
    kernel = ref.make_kernel("laplace", 20.0)
    H = ref.block_factors(kernel(Z, Z), kernel(Z, rows(3, 4000, 3)), MU, JITTER).H
    return H.astype(np.float32), kernel(X, Z)


def test_errors_are_small_multiples_of_rows() -> None:
    """Check H' = (I + P) H with the norm of P that is returned, and values of float16."""
    H, K = ill_conditioned()
    scale = half_scale(H)
    assert 2.0**13 < scale * np.abs(H).max() <= 2.0**14
    found = round_factor(Backend(1), H, scale)
    assert found.halves.dtype == np.float16
    np.testing.assert_array_equal(found.halves.astype(np.float32), scale * found.values)
    assert not np.triu(found.values, 1).any()
    error = np.linalg.solve(np.float64(H).T, np.float64(found.values).T).T - np.eye(P)
    assert found.growth == pytest.approx((1 + np.linalg.norm(error)) ** 2, rel=1e-3)
    assert found.growth < 1.5
    # Each entry alone changes features far more than any multiple of rows.
    alone = (H * scale).astype(np.float16) / np.float32(scale)
    features = K @ np.float64(H).T
    size = np.linalg.norm(features, 2)
    changes = [np.linalg.norm(K @ np.float64(H - near).T, 2) for near in (found.values, alone)]
    assert changes[0] < (found.growth**0.5 - 1) * size
    assert changes[1] > 10 * changes[0], changes


def built(ranks: Communicator = SINGLE, halves: bool = True) -> BlockPreconditioner:
    """Return two blocks, in float16 or not, with a sample and a probe that have no center."""
    op = operator(bandwidth=20.0, precision="exact")
    X, probe = rows(1, 900, 3), rows(2, 300, 3)
    Y = np.sin(X[:, :1]).astype(np.float32)
    return build_block(
        op, both(op, rows(0, 80, 3)), Sample(op.points(X, left=True), Y).shared(ranks),
        Sample(both(op, probe), np.sin(probe[:, :1]).astype(np.float32)), block_slices(80, 40),
        noise=Noise(1e-4, 900), ridge=1e-4, sweeps=4, halves=halves,
    )  # fmt: skip


def test_the_step_is_that_of_the_rounded_factor() -> None:
    """Check leverages, the bound of the ridge and the step against dense matrices in float64."""
    pre, Z, probe = built(), rows(0, 80, 3), rows(2, 300, 3)
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
    assert built(halves=False).mu / 1.5 < pre.mu < built(halves=False).mu  # that of the ridge


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_have_rows_of_the_rounded_factor(size: int) -> None:
    alone, many = built(), on_threads(size, built)
    assert all(pre.scales == alone.scales and pre.mu == many[0].mu for pre in many)
    for b in range(2):
        parts = [np.pad(pre.H[b], ((0, 0), (0, 40 - pre.H[b].shape[1]))) for pre in many]
        whole = np.float32(np.concatenate(parts))
        assert {pre.H[b].dtype for pre in many} == {np.dtype(np.float16)}
        expected = np.float32(alone.H[b])
        # Entries may differ in their last bit, and in its compensation.
        assert np.abs(whole - expected).max() < 1e-2 * np.abs(expected).max()
        g = rows(3, 40, 2).astype(np.float32)
        terms = [pre.apply(b, g, Backend(1), np.empty_like(g)) for pre in many]
        H = np.float64(whole) / alone.scales[b]
        bound = ROUNDING * np.abs(H.T) @ (np.abs(H) @ np.abs(g))
        assert (np.abs(sum(terms) - H.T @ (H @ g)) <= bound).all()


def test_a_stop_leaves_no_trace(tmp_path: Path) -> None:
    """Check also that weights are nearly those of a run with factors in float32."""
    result = assert_resume_gives_same_bits(tmp_path, [1, 7], HALVES, array_source())
    plain = finished(settings(**METHODS["blocks, ridge"]), source=array_source())
    weights = [np.asarray(each.model.weights) for each in (result, plain)]
    assert np.linalg.norm(weights[0] - weights[1]) < 1e-2 * np.linalg.norm(weights[1])
    assert not np.array_equal(*weights)


def test_factors_travel_between_ranks_and_runs(tmp_path: Path) -> None:
    """Check that ranks save the factors that they share, and go on with them."""
    store = rank_runs.write_store(tmp_path)
    changes = rank_runs.SMALL | {"solver.factor_dtype": "float16", "run.precision": "exact"}
    for name, size in (("one", 1), ("many", 2)):
        config = rank_runs.settings(store, tmp_path / name, **changes | rank_runs.grid(size, 1))
        rank_runs.on_ranks(size, config)
    one, many = (rank_runs.alpha(tmp_path / name) for name in ("one", "many"))
    assert np.linalg.norm(many - one) < 1e-2 * np.linalg.norm(one)


def test_inaccurate_factor_warns() -> None:
    """Check the entries of a smooth kernel with hardly any noise, whose sizes differ widely."""
    X, probe = rows(1, 900, 3), rows(2, 300, 3)
    for damping, n_warnings in ((1e-2, 0), (1e-7, 1)):
        op = operator("gaussian", bandwidth=10.0, precision="exact")
        Y = np.sin(X[:, :1]).astype(np.float32)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            build_block(
                op, both(op, rows(0, 80, 3)), Sample(op.points(X, left=True), Y),
                Sample(both(op, probe), np.sin(probe[:, :1]).astype(np.float32)),
                block_slices(80, 80), damping=damping, halves=True,
            )  # fmt: skip
        found = [w for w in caught if "is too inaccurate for this kernel" in str(w.message)]
        assert len(found) == n_warnings, damping


def test_half_of_the_memory_of_factors_is_planned() -> None:
    p = 40_000
    problem = replace(PLAIN, p=p, n_rows=10**6)
    sizes = BlockSizes("block", 4096, 20_000, 4096, 0, 0, block_size=10_000, keep=True)
    plain, halves = (
        BLOCK.count(problem, replace(sizes, half_factors=half)) for half in (False, True)
    )
    saved = plain.peak - halves.peak
    assert p * 10_000 * 2 - 3 * 10_000**2 * 4 < saved < p * 10_000 * 2
