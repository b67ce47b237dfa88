"""Check exact projections against a dense solve, and iterative ones against EigenPro 2.0."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import streamkern as sk
from streamkern.backend.base import Backend
from streamkern.backend.rank_grid import RankGrid
from streamkern.backend.ranks import SINGLE, Communicator
from streamkern.basics.errors import ConfigError
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.solver.methods import find
from streamkern.solver.precondition.low_rank import build_low_rank
from streamkern.solver.precondition.norm import jittered_cholesky
from streamkern.solver.precondition.partition import Partition
from streamkern.solver.projection import (
    ExactProjection,
    IterativeProjection,
    PartitionedProjection,
    Projection,
    inner_centers,
    inner_rule,
)
from tests import reference as ref
from tests.plans import PLAIN, planned, solver_settings
from tests.rank_threads import on_threads
from tests.solver_problems import both, operator, rows

KERNEL = ref.make_kernel("laplace", 2.0)
GRIDS = [(1, 2), (1, 5), (2, 2), (3, 2), (2, 4)]


def exact_projection(op: KernelOperator, Z: ref.Array) -> ExactProjection:
    """Return the projection of one process."""
    L, _ = jittered_cholesky(op, both(op, Z))
    return ExactProjection(L, partition_of(SINGLE, 1, len(Z)))


def iterative_from_setup(
    op: KernelOperator, Z: Points, *, resident: bool = False, **sizes: int
) -> IterativeProjection:
    """Return an iterative projection, with the step rule and batch that a setup measures."""
    P, batch = inner_rule(op, Z[: inner_centers(len(Z), sizes["n_nystrom"])], len(Z), **sizes)
    return IterativeProjection(op, Z, P, batch=batch, resident=resident)


def partition_of(ranks: Communicator, columns: int, p: int) -> Partition:
    """Return the partition of p centers over this many columns of ranks."""
    grid = RankGrid(ranks.rank, ranks.size, columns)
    return Partition([slice(0, p)], grid, ranks, Backend(threads=1))


@pytest.mark.parametrize("c", [1, 3])
def test_exact_projection_equals_dense_solve(c: int) -> None:
    Z, h = rows(0, 50, 3), rows(1, 50, c)
    op = operator(tile=(16, 16))
    theta = exact_projection(op, Z).solve(h.copy())
    _, jitter = jittered_cholesky(op, both(op, Z))
    truth = np.linalg.solve(KERNEL(Z, Z) + jitter * np.eye(50), h)
    np.testing.assert_allclose(theta, truth, rtol=0, atol=1e-10 * np.abs(truth).max())


@pytest.mark.parametrize("precision", ["exact", "float64"])
def test_exact_projection_of_duplicate_centers_keeps_values(precision: str) -> None:
    """Check the values at the centers, because theta is not unique."""
    Z = np.concatenate([rows(0, 20, 3), rows(0, 20, 3)])
    op = operator(precision=precision)
    projection, (_, jitter) = exact_projection(op, Z), jittered_cholesky(op, both(op, Z))
    assert 0 < jitter < 1e-3
    h = KERNEL(Z, Z) @ np.concatenate([rows(1, 20, 2), np.zeros((20, 2))])
    theta = projection.solve(h.astype(op.dtype)).astype(np.float64)
    tolerance = 1e-7 if precision == "float64" else 2e-3
    np.testing.assert_allclose(KERNEL(Z, Z) @ theta, h, rtol=0, atol=tolerance * np.abs(h).max())


def iterative(
    batch: int, *, resident: bool = False, q: int = 8, s: int = 30, p: int = 50
) -> tuple[IterativeProjection, ref.Array]:
    """Return a projection in float64 and its centers."""
    op, Z = operator(tile=(7, 16)), rows(0, p, 3)
    z = both(op, Z)
    P = build_low_rank(op, z[:s], z, level=q)
    return IterativeProjection(op, z, P, batch=batch, resident=resident), Z


def solve_in_epochs(projection: Projection, Z: ref.Array, h: ref.Array, epochs: int) -> ref.Array:
    """Return theta after some epochs, each of which is a projection of the remaining values."""
    theta = np.zeros_like(h)
    for _ in range(epochs):
        theta += projection.solve(h - KERNEL(Z, Z) @ theta)
    return theta


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("batch", [10, 16, 50])  # 16 leaves a last batch of 2, with its own step
def test_iterative_projection_equals_the_reference(batch: int, epochs: int, resident: bool) -> None:
    projection, Z = iterative(batch, resident=resident)
    solver = ref.EigenPro2Reference(KERNEL, Z, np.arange(30), 8, 1.0, n_outputs=2)
    h = rows(1, 50, 2)
    for _ in range(epochs):
        for start in range(0, 50, batch):
            batch_rows = np.arange(start, min(start + batch, 50))
            solver.eta = projection.P.rule.eta(len(batch_rows))
            solver.step(batch_rows, h[batch_rows])
    theta = solve_in_epochs(projection, Z, h, epochs)
    np.testing.assert_allclose(theta, solver.alpha, rtol=0, atol=1e-10 * np.abs(theta).max())


def test_iterative_projection_is_pure() -> None:
    projection, _ = iterative(16)
    h = rows(1, 50, 2)
    theta = projection.solve(h)
    np.testing.assert_array_equal(h, rows(1, 50, 2))
    np.testing.assert_array_equal(projection.solve(h), theta)


@pytest.mark.parametrize("batch", [1, 4, 10])  # two below and one above the critical batch
def test_every_batch_size_approaches_exact_projection(batch: int) -> None:
    op, Z, h = operator(), rows(0, 10, 3), rows(1, 10, 2)
    exact = np.linalg.solve(KERNEL(Z, Z), h)
    P, critical = inner_rule(op, both(op, Z), 10, level=2, n_nystrom=10, max_batch=10)
    assert critical == 8
    errors = []
    for epochs in (1, 5, 25, 200):
        projection = IterativeProjection(op, both(op, Z), P, batch=batch, epochs=epochs)
        theta = projection.solve(h)
        errors.append(float(np.abs(theta - exact).max() / np.abs(exact).max()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-12


@pytest.mark.parametrize("resident", [True, False])
def test_projection_passes_continue_on_the_residual(resident: bool) -> None:
    one_epoch, Z = iterative(16, resident=resident)
    three_epochs = IterativeProjection(
        one_epoch.op, one_epoch.Z, one_epoch.P, batch=16, resident=resident, epochs=3
    )
    h = rows(1, 50, 2)
    theta = solve_in_epochs(one_epoch, Z, h, 3)
    tolerance = 1e-12 * np.abs(theta).max()
    np.testing.assert_allclose(three_epochs.solve(h), theta, rtol=0, atol=tolerance)


def train(**options: Any) -> tuple[ref.Array, dict[str, Any]]:
    """Return predictions of a run of EigenPro 3, and its recorded sizes."""
    X = rows(0, 100, 3).astype(np.float32)
    config = sk.RunConfig.from_tables(
        {
            "data": {"train": "in memory", "epochs": 1, "batch_size": 20},
            "model": {"kernel": "laplace", "bandwidth": 2.0, "n_centers": 24},
            "solver": {"name": "eigenpro3", "n_nystrom": 60, "level": 6, **options},
            "run": {"device": "cpu", "precision": "exact", "threads": 1},
        }
    )
    source = sk.ArraySource(X, np.sin(X.sum(axis=1)))
    result = sk.train_model(config, source=source)
    with result.model.backend:
        return result.model.predict(source), result.meta["sizes"]


def test_projection_settings_are_used_and_recorded_if_set() -> None:
    exact, _ = train(projection="exact")
    gaps = []
    for epochs in (1, 4, 64):
        predicted, sizes = train(projection="inexact", projection_epochs=epochs)
        gaps.append(float(np.abs(predicted - exact).max()))
        assert sizes.get("projection_epochs", 1) == epochs
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 0.02 * gaps[0]
    for batch in (1, 9, 24):  # 24 are all centers, more than a batch of the steps
        predicted, sizes = train(projection="inexact", projection_epochs=64, projection_batch=batch)
        assert np.abs(predicted - exact).max() < (0.02 if batch < 24 else 0.3) * gaps[0]
        assert sizes["projection_batch"] == batch
    assert not [name for name in train()[1] if name.startswith("projection_")]
    _, sizes = train(projection="resident", projection_nystrom=12, projection_level=5)
    assert (sizes["projection_nystrom"], sizes["projection_level"]) == (12, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"projection_nystrom": 25}, "solver.projection_nystrom=25 must lie between 2 and .*24"),
        ({"projection_nystrom": 1}, "solver.projection_nystrom=1 must lie between 2"),
        ({"projection_level": 24}, "solver.projection_level=24 must lie between 1 and .* 23"),
        (
            {"projection_nystrom": 20, "projection_level": 20},
            "solver.projection_level=20 must lie between 1 and .* 19",
        ),
        ({"projection_batch": 25}, "solver.projection_batch=25 must lie between 1 and .*24"),
        ({"projection_batch": 0}, "projection_batch=0 must be .*auto.* at least 1"),
    ],
)
def test_projection_settings_out_of_range_are_refused(
    options: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(projection="inexact", **options)


def test_projection_passes_are_counted_as_operations() -> None:
    method, counts = find("eigenpro3", "kernel"), {}
    for epochs in (1, 2, 3):
        options = solver_settings("eigenpro3", projection="inexact", projection_epochs=epochs)
        sizes = method.candidates(PLAIN, options)[0]
        counts[epochs] = method.op_counts(PLAIN, sizes)[1].entries
    assert counts[3] - counts[2] == counts[2] - counts[1] > 0


def test_projection_batch_is_counted_in_bytes() -> None:
    """Check its bytes; over ranks they are instead of the bytes of a step's batch."""
    for problem in (PLAIN, replace(PLAIN, ranks=4, center_ranks=2)):
        lines = {}
        for batch in ("auto", 5000):
            options = solver_settings("eigenpro3", projection="inexact", projection_batch=batch)
            lines[batch] = dict(line[1:] for line in planned(problem, options, 10**13)[1].lines)
        shared = problem.ranks > 1
        assert ("batch of the projection" in lines["auto"]) == shared
        expected = 5000 * 10 * 4 if not shared else (2 * 5000 + 2000) * 10 * 4
        assert lines[5000]["batch of the projection"] == expected
        partial = "partial sums of products"
        assert lines[5000][partial] >= lines["auto"][partial]
        if shared:
            assert lines[5000]["K(batch, sample) of the projection"] >= 2500 * 2000 * 4
            assert lines[5000]["centers being broadcast"] >= 5000 * problem.prepared_row_bytes


def test_projection_step_is_measured_on_all_of_few_centers() -> None:
    op, Z = operator(), rows(0, 60, 3)
    projection = iterative_from_setup(op, both(op, Z), level=10, n_nystrom=40, max_batch=1000)
    spectrum = ref.eigenpro_spectrum(KERNEL, Z, Z[:40], ref.eigensystem(KERNEL(Z[:40], Z[:40]), 10))
    rule = projection.P.rule
    assert rule.leverage == pytest.approx(spectrum.leverage)
    assert spectrum.lambda_1 * (1 - 1e-10) <= rule.lambda_1 <= 1.01 * spectrum.lambda_1
    assert projection.batch == int(min(rule.critical_batch, 60))
    assert projection.K is None


def test_too_high_level_is_lowered_and_single_center_refused() -> None:
    op = operator()
    projection = iterative_from_setup(
        op, both(op, rows(0, 9, 3)), level=50, n_nystrom=50, max_batch=4
    )
    assert projection.P.E.shape == (9, 8)
    assert projection.batch <= 4
    with pytest.raises(ConfigError, match="level=0"):
        iterative_from_setup(op, both(op, rows(0, 1, 3)), level=5, n_nystrom=5, max_batch=4)


@pytest.mark.parametrize("p", [3, 50])  # with 3 centers, some columns have none
@pytest.mark.parametrize(("rows_of_grid", "columns"), GRIDS)
def test_exact_projection_over_ranks_equals_one_process(
    rows_of_grid: int, columns: int, p: int
) -> None:
    """Check the projection by rows of the factor, in place."""
    Z, h = rows(0, p, 3), rows(1, p, 2)
    single = exact_projection(operator(), Z)
    theta = single.solve(h.copy())

    def solve_on_rank(ranks: Communicator) -> Any:
        part = partition_of(ranks, columns, p)
        own_centers = part.in_block[0]
        projection = ExactProjection(single.L, part)
        theta_part = h[own_centers].copy()
        assert projection.solve(theta_part) is theta_part
        return theta_part, own_centers

    for theta_part, own_centers in on_threads(rows_of_grid * columns, solve_on_rank):
        tolerance = 1e-12 * np.abs(theta).max()
        np.testing.assert_allclose(theta_part, theta[own_centers], rtol=0, atol=tolerance)


@pytest.mark.full(all_but_every=5)
@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize(("rows_of_grid", "columns"), GRIDS)
@pytest.mark.parametrize(
    ("s", "batch", "epochs"), [(30, 16, 3), (10, 7, 1), (50, 1, 1), (8, 50, 2)]
)
def test_iterative_projection_over_ranks_equals_one_process(
    rows_of_grid: int, columns: int, s: int, batch: int, epochs: int, resident: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Check a sample that one column or all have, and a second projection.

    With a small limit, the centers of one batch are broadcast at a time.
    """
    monkeypatch.setattr("streamkern.solver.projection.BROADCAST_CENTERS", 20)
    Z, h = rows(0, 50, 3), rows(1, 50, 2)
    op = operator(tile=(7, 16))
    z = both(op, Z)
    P = build_low_rank(op, z[:s], z, level=6)
    theta = IterativeProjection(op, z, P, batch=batch, epochs=epochs).solve(h)

    def solve_on_rank(ranks: Communicator) -> Any:
        part = partition_of(ranks, columns, 50)
        own_op, own_centers = operator(backend=part.backend), part.in_block[0]
        projection = PartitionedProjection(
            own_op, both(own_op, Z)[own_centers], P, part, batch=batch,
            resident=resident, epochs=epochs,
        )  # fmt: skip
        h_part = h[own_centers].copy()
        thetas = [projection.solve(h_part).copy() for _ in range(2)]
        np.testing.assert_array_equal(*thetas)
        np.testing.assert_array_equal(h_part, h[own_centers])
        return thetas[0], own_centers, 0 if projection.K is None else projection.K.size

    results = on_threads(rows_of_grid * columns, solve_on_rank)
    for thetas, own_centers, n_kept in results:
        tolerance = 1e-12 * np.abs(theta).max()
        np.testing.assert_allclose(thetas, theta[own_centers], rtol=0, atol=tolerance)
        assert n_kept <= (50 / rows_of_grid + rows_of_grid) * -(-50 // columns)
    if resident:
        assert sum(n_kept for _, _, n_kept in results) == 50 * 50
