"""Read the rows that a setup needs: the setup sample, the probe, and rows from which the noise, the
kernel and the metric are estimated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from streamkern.backend.base import Array, tiles
from streamkern.basics.array_types import Floats, HostArray, Ints
from streamkern.kernels.builtin import Laplace
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.solver.copies import (
    COPIES,
    MIN_ROWS_OF_COPIES,
    effective_sample_size,
    intraclass_correlation,
)
from streamkern.solver.precondition.held_out import is_not_center
from streamkern.solver.precondition.noise import (
    MIN_ROWS_OF_NOISE,
    NOISE_ROWS,
    distinct_origins,
    find_noise,
)
from streamkern.solver.precondition.samples import (
    CenterTargets,
    SampleRows,
    merge_center_targets,
    merge_equal_rows,
)
from streamkern.store.row_block import RowBlock
from streamkern.store.sample_weights import NEGLIGIBLE_WEIGHT
from streamkern.stream.feed import prepare
from streamkern.stream.sources.class_sampling import without_class_shares
from streamkern.stream.sources.sampling import (
    choose_copies,
    choose_rows,
    read_rows,
    row_origins,
    sample_rows,
)
from streamkern.stream.sources.transforms import SETUP_EPOCH, Transform
from streamkern.stream.target_scale import TargetScale
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.setup.choose_centers import CenterRows, center_indices
from streamkern.train.setup.choose_kernel import median_distances, search_operator
from streamkern.train.setup.log_link_start import FirstModel
from streamkern.train.setup.outliers import BoundedTargets

SAMPLE_STAGE = 2
"""Index of the random stream from which all these rows are drawn."""
MAX_COPIED_UNITS = 16
"""Largest number of units, each read `COPIES` times, to estimate the correlation of copies of a
row."""
MIN_HELD_OUT_SHARE = 0.1
"""Smallest share of rows off the centers with which a solver finds its ridge on held-out rows."""
HELD_OUT_TILE = 64
"""Number of rows whose kernel values with all centers are computed at a time."""


SquareTargets = BoundedTargets | FirstModel
"""Targets and weights with which least squares approximate a loss; `in_rows` sets them in rows."""


class FewRows(NamedTuple):
    """Cached functions that read the rows from which noise and loss parameters are estimated.

    read : returns the rows with outliers replaced
    read_stored : returns the same rows with their original targets
    bounded_targets : replaces outliers; None if there are none, or if the loss is not robust
    """

    read: Callable[[], SampleRows]
    read_stored: Callable[[], SampleRows]
    bounded_targets: BoundedTargets | None = None


def draw_samples(
    run: ResolvedRun, dtype: np.dtype[Any], targets: TargetScale, known_centers: CenterRows | None,
    squares: SquareTargets | None = None,
) -> tuple[SampleRows, SampleRows, Ints]:  # fmt: skip
    """Return the setup sample, the probe, and the row numbers (s,) of the sample.

    targets : mean and scale by which the targets are transformed
    known_centers : rows that are centers; None if there are none
    squares : replaces targets and weights for least squares; None to keep them
    """
    source, sizes, seed = run.data.source, run.sizes, run.config.run.random_state
    n_rows = min(sizes.n_sample + sizes.n_probe, source.n_rows)
    # A method may take no sample; one row then provides the shapes.
    block = sample_rows(source, max(1, n_rows), seed, stage=SAMPLE_STAGE, epoch=SETUP_EPOCH)
    if run.in_order:  # no augmentation: the stream delivers these rows
        ascending = np.argsort(block.row_ids[: sizes.n_sample])
        order = np.concatenate([ascending, np.arange(sizes.n_sample, n_rows)])
        block = block.take(order)
    rows = _to_sample_rows(run, block, dtype, targets, known_centers)
    assert rows.center_index is not None
    # If there are too few rows for sample and probe, the probe is all rows (`sizes.sample_sizes`).
    sample_part, probe_part = slice(sizes.n_sample), slice(n_rows - sizes.n_probe, n_rows)
    n_shared = max(0, sizes.n_sample - probe_part.start)
    sample, probe = (
        rows.part(part)._replace(first_fresh=fresh, center_index=rows.center_index[part])
        for part, fresh in ((sample_part, 0), (probe_part, n_shared))
    )
    if squares is not None:
        sample, probe = squares.in_rows(sample), squares.in_rows(probe)
    return sample, probe, block.row_ids[sample_part]


def read_merged_rows(
    run: ResolvedRun, dtype: np.dtype[Any], targets: TargetScale, max_rows: int,
    squares: SquareTargets | None = None,
) -> SampleRows:  # fmt: skip
    """Return rows to estimate metric, kernel and noise from, with equal rows merged.

    See `read_unmerged_rows`; rows of weight 0 are left out.

    max_rows : largest number of rows, before equal rows are merged
    squares : replaces targets and weights; None to keep them
    """
    if isinstance(squares, FirstModel):
        targets = squares.targets
    rows = read_unmerged_rows(run, dtype, targets, max_rows)
    rows = merge_equal_rows(run.backend, rows if squares is None else squares.in_rows(rows))
    return rows._replace(repeats=None) if _are_copies(run, rows) else rows


def read_unmerged_rows(
    run: ResolvedRun, dtype: np.dtype[Any], targets: TargetScale, max_rows: int
) -> SampleRows:
    """Return rows of the stream in random order, no two of them made from the same stored row.

    If the stream draws classes in fixed shares, each row occurs once and weights represent the
    shares. Negligible weights are set to 0.

    max_rows : largest number of rows
    """
    source, rates = without_class_shares(run.data.source)
    n_rows, seed = min(max_rows, source.n_rows), run.config.run.random_state
    block = sample_rows(source, n_rows, seed, stage=SAMPLE_STAGE, epoch=SETUP_EPOCH)
    block = block.take(distinct_origins(row_origins(source, block.row_ids, SETUP_EPOCH), max_rows))
    rows = _to_sample_rows(run, block, dtype, targets, None, rates)
    if rows.root is not None:
        small = math.sqrt(NEGLIGIBLE_WEIGHT) * float(rows.root.max())
        rows = rows._replace(root=run.backend.xp.where(rows.root > small, rows.root, 0))
    return rows


def _are_copies(run: ResolvedRun, rows: SampleRows) -> bool:
    """Return whether equal rows are treated as copies of one row.

    They are if their targets are equal too, and if different rows predict each other, so that the
    noise can be estimated without the copies. At most `NOISE_ROWS` rows are tested.
    """
    if rows.repeats is None or not rows.repeats.may_be_copies() or len(rows.X) < MIN_ROWS_OF_NOISE:
        return False
    rows = rows.part(slice(NOISE_ROWS))
    host = run.backend.to_host(rows.X)
    kernel = run.data.kernel_of(Laplace(median_distances(run, host)("distance")))
    return find_noise(search_operator(run, kernel, host), None, rows).rows_are_predictive


def center_targets(
    run: ResolvedRun, dtype: np.dtype[Any], targets: TargetScale, known_centers: CenterRows | None,
    Z: HostArray, squares: SquareTargets | None,
) -> CenterTargets | None:  # fmt: skip
    """Return the targets and weights of the centers, as solvers take them; None if they are not
    known.

    known_centers : rows that are centers
    Z : (p, d), the centers
    squares : replaces targets and weights for least squares; None to keep them
    """
    if known_centers is None:
        return None
    seed, center_index = run.config.run.random_state, known_centers.center_index
    _, Y, w = _transform_block(run, known_centers.block, dtype, targets, seed, transforms=())
    if squares is not None:
        xp = run.backend.xp
        X = run.backend.asarray(Z[center_index])
        root = None if w is None else xp.sqrt(w)
        _, Y, root, *_ = squares.in_rows(SampleRows(X, Y, root))
        w = None if root is None else root * root
    to_host = run.backend.to_host
    targets_by_center = merge_center_targets(
        run.backend, center_index, to_host(Y), None if w is None else to_host(w),
        p=run.problem.p, n_rows=run.data.source.n_rows,
    )  # fmt: skip
    return replace(targets_by_center, is_complete=run.problem.complete)


def n_effective(
    run: ResolvedRun, op: KernelOperator, dtype: np.dtype[Any], targets: TargetScale
) -> float:
    """Return the effective sample size of the run: the number of independent rows that carry as
    much information as all its rows, with their copies."""
    problem, source = run.problem, run.data.source
    n_stored = source.n_origins if problem.repeats else problem.n_stored or problem.n_rows
    copies = _choose_stored_copies(run) if problem.repeats else _draw_copies(run)
    if op.kernel.explicit or copies is None:
        return problem.n_samples
    blocks = ((read_rows(source, rows, seed, SETUP_EPOCH), seed) for rows, seed in copies)
    rho = intraclass_correlation(
        op, (_transform_block(run, block, dtype, targets, seed) for block, seed in blocks)
    )
    return effective_sample_size(n_stored, problem.n_samples, rho)


def noise_gives_ridge(run: ResolvedRun, op: KernelOperator, Z: Points, rows: SampleRows) -> bool:
    """Return whether a ridge of "auto" follows from the noise of the targets.

    It does if the solver cannot find the ridge on held-out rows, because more than half of the rows
    equal an earlier one, or because nearly all rows coincide with centers.

    rows : rows from which the noise is estimated.
    """
    method, problem = run.method, run.problem
    if method.estimates_ridge(problem) or run.config.solver.ridge != "auto":
        return method.estimates_ridge(problem)
    if rows.repeats is not None and rows.repeats.are_common():
        return True
    return method.finds_ridge(problem) and _share_off_centers(op, Z, rows) < MIN_HELD_OUT_SHARE


def _share_off_centers(op: KernelOperator, Z: Points, rows: SampleRows) -> float:
    """Return the share of the rows that do not coincide with a center.

    At most `NOISE_ROWS` rows are examined, after equal rows were merged.
    """
    X, n_off_centers = rows.X[:NOISE_ROWS], 0
    for part in tiles(len(X), HELD_OUT_TILE):
        K = op.matrix(op.points(X[part], left=True), Z)
        n_off_centers += int(is_not_center(op, Z, K).sum())
    return n_off_centers / len(X)


def _draw_copies(run: ResolvedRun) -> list[tuple[Ints, int]]:
    """Return `COPIES` pairs of the same row numbers (m,) and a seed that draws other copies."""
    source, seed = run.data.source, run.config.run.random_state
    n_rows = min(NOISE_ROWS, source.n_rows)
    rows = choose_rows(source, n_rows, seed, stage=SAMPLE_STAGE, max_units=MAX_COPIED_UNITS)
    rows = rows[distinct_origins(row_origins(source, rows, SETUP_EPOCH))]
    # The row numbers of a mixture do not depend on the seed.
    return [(rows, (seed + r) % (1 << 32)) for r in range(COPIES)]


def _choose_stored_copies(run: ResolvedRun) -> list[tuple[Ints, int]] | None:
    """Return pairs of row numbers (m,) and the seed; row i of each pair is a copy of one origin.

    None if the source does not store several rows per origin, or too few.
    """
    source, seed = run.data.source, run.config.run.random_state
    if not source.n_origins:
        return None
    copies = choose_copies(
        source, NOISE_ROWS, COPIES, MIN_ROWS_OF_COPIES, seed, SAMPLE_STAGE, MAX_COPIED_UNITS
    )
    return None if copies is None else [(rows, seed) for rows in copies]


def _to_sample_rows(
    run: ResolvedRun, block: RowBlock, dtype: np.dtype[Any], targets: TargetScale,
    known_centers: CenterRows | None, rates: Floats | None = None,
) -> SampleRows:  # fmt: skip
    """Return rows after the transforms of the stream. rates : (c,) factors of the class weights."""
    X, Y, w = _transform_block(run, block, dtype, targets, run.config.run.random_state, rates)
    root = None if w is None else run.backend.xp.sqrt(w)
    return SampleRows(X, Y, root, 0, center_indices(block.row_ids, known_centers))


def _transform_block(
    run: ResolvedRun, block: RowBlock, dtype: np.dtype[Any], targets: TargetScale, seed: int,
    rates: Floats | None = None, transforms: Sequence[Transform] | None = None,
) -> tuple[Array, Array, Array | None]:  # fmt: skip
    """Return X, Y and w after transforms, with the random draws of the setup.

    transforms : None for the feed transforms
    """
    source, factors = run.data.source, run.data.weight_factors
    if rates is not None:
        factors = rates if factors is None else factors * rates
    if run.check_targets is not None:
        run.check_targets(block.y, block.row_ids)
    return prepare(
        run.backend, block, factors, dtype=dtype,
        transforms=source.feed_transforms if transforms is None else transforms,
        seed=seed, epoch=SETUP_EPOCH, n_classes=source.n_classes, targets=targets,
    )  # fmt: skip
