"""Choose the centers, as transformed rows, and the bandwidth of the kernel.

If centers are rows of the training data, these and their targets are known before streaming
(`CenterRows`), which `solver.precondition.block` uses. If random transforms or copies change the
rows, or if every epoch has other rows, no row is a center.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from streamkern.backend.base import Array
from streamkern.basics.array_types import Floats, HostArray, Ints
from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.centers import random_rows
from streamkern.centers.given_centers import given_centers
from streamkern.centers.selector import CenterWork
from streamkern.centers.selectors import SELECTORS
from streamkern.kernels.builtin import Kernel
from streamkern.kernels.fourier import FourierFeatures, frequencies
from streamkern.solver.method import Report
from streamkern.store.row_block import RowBlock, concatenate_blocks
from streamkern.stream.batch_reader import BatchReader
from streamkern.stream.feed import prepare
from streamkern.stream.sources.mixture import stored_rows
from streamkern.stream.sources.sampling import read_rows, rows_by_unit
from streamkern.stream.sources.transforms import SETUP_EPOCH
from streamkern.train.resolve.given_arrays import open_centers
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.restart.parent_run import ParentRun
from streamkern.train.restart.stored_centers import StoredCenters
from streamkern.train.setup.broadcast import CenterPart, mean, scatter
from streamkern.train.setup.choose_kernel import kernel_of_settings


class CenterRows(NamedTuple):
    """Rows that are centers.

    center_index : (q,) int64, index in storage order of the center that each row is
    block : the rows without features: X is (q, 0)
    """

    center_index: Ints
    block: RowBlock


class ChosenCenters(NamedTuple):
    """Centers and kernel of a run.

    Z : (p, d) transformed centers on the host, in storage order. If ranks partition the centers,
        the stripe of this rank, except for Fourier features; the other ranks have received theirs.
    order : (p,); row i of Z is row order[i] of the centers as selected
    kernel : kernel as given, or with the bandwidth found from the data
    rows : rows of the training data that are centers; None if they are not known
    shift : (d,), the mean of Z, which is subtracted from all rows. This changes no distance, but
        reduces the rounding errors of distances between rows far from 0.
    """

    Z: HostArray
    order: Ints
    kernel: Kernel
    rows: CenterRows | None
    shift: HostArray


def choose_centers(
    run: ResolvedRun, dtype: np.dtype[Any], report: Report, kernel: Kernel | None = None,
    metric: Floats | None = None,
) -> ChosenCenters:  # fmt: skip
    """Choose centers by the method of `model.centers`, or take the given ones.

    The fixed transforms are applied to the centers, or to the rows that a selection starts from,
    and `random_order` permutes them. Fourier features have random frequencies and phases in place
    of centers.

    dtype : dtype of the centers
    kernel : kernel with its bandwidth, if the setup has found one. If it is None and the bandwidth
        is "median", the bandwidth is the median distance, in the metric, of the rows that are read
        here: the centers, or the rows from which `CenterSelector.refine` starts.
    metric : scales (d,) or matrix (d, r); None for no metric
    """
    if run.inputs.continued_run is not None:
        return _read_parent_centers(run, run.inputs.continued_run, dtype, report)
    report("setup", {"doing": "centers"})
    start = time.perf_counter()
    if run.problem.features == "fourier":
        centers, fields = _draw_frequencies(run, dtype, kernel)
    elif run.problem.streams_centers:
        centers, fields = _select_in_stripes(run, dtype, kernel, metric)
    else:
        centers, fields = _select(run, dtype, kernel, metric)
    report("centers", {**fields, "seconds": time.perf_counter() - start})
    return centers


def _read_parent_centers(
    run: ResolvedRun, parent_run: ParentRun, dtype: np.dtype[Any], report: Report
) -> ChosenCenters:
    """Return the centers of the run that is continued; each rank reads its stripe.

    Raises ConfigError if the centers are not of this dtype.
    """
    p, ranks, reads_stripes = run.problem.p, run.inputs.ranks, run.problem.reads_stripes
    centers, kernel = parent_run.stored_centers, parent_run.full_kernel()
    if centers.dtype != dtype:
        raise ConfigError(
            f"{mention('run.precision')} gives {dtype.name} numbers, but the run that is "
            f"continued has {centers.dtype.name} ones",
            f"set {mention('run.precision')} to its value in that run",
        )
    if run.problem.features == "fourier":
        kernel = FourierFeatures(len(centers), kernel.describe())
    Z = centers.read(ranks.stripe(p) if reads_stripes else slice(0, p))
    report("centers", {"method": "continued", "centers": p, "rows": 0, "seconds": 0.0})
    shift = mean(Z, p, ranks).astype(dtype) if reads_stripes else _mean(Z)
    return ChosenCenters(Z, parent_run.order, kernel, None, shift)


def _mean(Z: HostArray) -> HostArray:
    return np.asarray(Z.mean(axis=0, dtype=np.float64), Z.dtype)


def _select(
    run: ResolvedRun, dtype: np.dtype[Any], kernel: Kernel | None, metric: Floats | None
) -> tuple[ChosenCenters, dict[str, Any]]:
    """Return the centers that a selector chooses, or the given ones, and facts for the log."""
    seed, method = run.config.run.random_state, run.centers_from
    block, n_read = _rows(run, method)
    in_order, selection = run.in_order, run.problem.selection
    p = len(block.X) if selection is None else run.problem.p
    order = np.arange(p) if in_order else random_rows.random_order(p, seed)
    if selection is None:
        block = block.take(order)
    rows = _find_center_rows(run, block, are_rows=method not in ("given", "file"))
    X = run.backend.to_host(transform_rows(run, block, dtype)[0])
    del block
    if kernel is None:
        bandwidth_rows = X
        if in_order:  # rows may be sorted by label; otherwise their order is already random
            bandwidth_rows = X[random_rows.random_order(p, seed)[: random_rows.BANDWIDTH_ROWS]]
        kernel = kernel_of_settings(run, bandwidth_rows, metric)
    fields: dict[str, Any] = {"method": method, "centers": p, "rows": n_read}
    if selection is not None:
        batches = partial(_batches, run, dtype)
        work = CenterWork(p, seed, kernel, run.backend, run.precision, run.grid, batches)
        centers, facts = SELECTORS[method].refine(X, selection, work)
        X = centers[order]
        fields |= facts
    run.backend.release()
    shift = _mean(X)
    if run.problem.center_ranks > 1:
        X, shift = scatter_all(run, X)
    return ChosenCenters(X, order, kernel, rows, shift), fields


def _select_in_stripes(
    run: ResolvedRun, dtype: np.dtype[Any], kernel: Kernel | None, metric: Floats | None
) -> tuple[ChosenCenters, dict[str, Any]]:
    """Choose rows as centers, and scatter them over the ranks unit by unit as they are read."""
    base, p, method = run.data.base, run.problem.p, run.centers_from
    seed, row_ids, n_read = run.config.run.random_state, np.arange(p), p
    if method != "all":
        row_ids, n_read = SELECTORS[method].choose(base, p, seed)
        row_ids = random_rows.weighted_numbers(base, row_ids, run.data.weight_factors, seed)
    order = random_rows.random_order(p, seed)
    storage_index = np.argsort(order)  # index in storage order of each selected row
    bandwidth_rows = np.empty((min(p, random_rows.BANDWIDTH_ROWS), run.data.d), dtype)
    streamed_indices, blocks = list[Ints](), list[RowBlock]()

    def parts() -> Iterator[CenterPart]:
        for selected, block in rows_by_unit(base, row_ids, seed):
            X = run.backend.to_host(transform_rows(run, block, dtype)[0])
            storage_indices = storage_index[selected]
            for_bandwidth = storage_indices < len(bandwidth_rows)
            bandwidth_rows[storage_indices[for_bandwidth]] = X[for_bandwidth]
            streamed_indices.append(storage_indices)
            blocks.append(random_rows.without_features(block))
            yield storage_indices, X

    Z = scatter(parts(), p, run.inputs.ranks)
    shift = mean(Z, p, run.inputs.ranks).astype(dtype)
    in_storage_order = concatenate_blocks(blocks).take(np.argsort(np.concatenate(streamed_indices)))
    rows = _find_center_rows(run, in_storage_order, are_rows=True)
    kernel = kernel or kernel_of_settings(run, bandwidth_rows, metric)
    run.backend.release()
    fields = {"method": method, "centers": p, "rows": n_read}
    return ChosenCenters(Z, order, kernel, rows, shift), fields


def scatter_all(run: ResolvedRun, Z: HostArray) -> tuple[HostArray, HostArray]:
    """Scatter all centers over the ranks; return the stripe of this rank, and the mean (d,)."""
    p, ranks = len(Z), run.inputs.ranks
    stripe = scatter([(np.arange(p), Z)], p, ranks)
    return stripe, mean(stripe, p, ranks).astype(Z.dtype)


def transform_rows(run: ResolvedRun, rows: RowBlock, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Return the features (m, d) and the targets (m, c) of rows after the fixed transforms."""
    source = run.data.source
    return prepare(
        run.backend, rows, transforms=run.data.fixed_transforms, dtype=dtype,
        seed=run.config.run.random_state, epoch=0,
        n_classes=source.n_classes if rows.y.ndim == 1 else None,
    )[:2]  # fmt: skip


def _rows(run: ResolvedRun, method: str) -> tuple[RowBlock, int]:
    """Return the rows that are centers, or from which a selection starts, and the number of rows
    that were examined."""
    base, seed, selection = run.data.base, run.config.run.random_state, run.problem.selection
    if method in SELECTORS:
        n = run.problem.p if selection is None else selection.first
        block, n_read = SELECTORS[method].rows(base, n, seed)
        weighted_block = random_rows.without_weightless(base, block, run.data.weight_factors, seed)
        return weighted_block, n_read
    if method == "all":
        block = random_rows.all_rows(base, seed)
    else:
        array = run.inputs.centers
        assert not isinstance(array, StoredCenters)
        if array is None:
            array = open_centers(run.config, base.columns, base.encoder)
        block = given_centers(array, base.row_shape, base.n_outputs)
    return block, len(block.X)


def _draw_frequencies(
    run: ResolvedRun, dtype: np.dtype[Any], known_kernel: Kernel | None
) -> tuple[ChosenCenters, dict[str, Any]]:
    """Draw frequencies and phases (D, d + 1), as the centers of random features of the kernel."""
    base, seed, n_features = run.data.base, run.config.run.random_state, run.problem.p
    n_read = 0
    kernel = known_kernel or run.config.model.kernel
    if not isinstance(kernel, Kernel) or kernel.is_open:
        block = random_rows.random_centers(base, min(random_rows.BANDWIDTH_ROWS, base.n_rows), seed)
        X, _ = transform_rows(run, block, dtype)
        kernel, n_read = kernel_of_settings(run, run.backend.to_host(X)), len(block.X)
    order = random_rows.random_order(n_features, seed)
    Z = frequencies(kernel, run.data.d, n_features, seed)[order].astype(dtype)
    fields = {"method": "fourier", "centers": n_features, "rows": n_read}
    features = FourierFeatures(n_features, kernel.describe())
    return ChosenCenters(Z, order, features, None, _mean(Z)), fields


def _batches(
    run: ResolvedRun, dtype: np.dtype[Any], n: int, batch_size: int
) -> Iterator[HostArray]:
    """Yield n stored rows in shuffled batches, in passes over all rows."""
    n_left, base, sizes = n, run.data.base, run.sizes
    with BatchReader(
        base, batch_size=min(batch_size, base.n_rows), seed=run.config.run.random_state,
        block_bytes=sizes.loader_block_bytes, in_flight_bytes=sizes.loader_in_flight_bytes,
        threads=run.config.data.prefetch_threads,
    ) as reader:  # fmt: skip
        n_epochs = -(-n_left // base.n_rows)
        for batch in reader.epochs(SETUP_EPOCH, SETUP_EPOCH + n_epochs):
            X = run.backend.to_host(transform_rows(run, batch, dtype)[0])
            yield X[:n_left]
            n_left -= len(X)
            if n_left <= 0:
                return


def _find_center_rows(run: ResolvedRun, block: RowBlock, *, are_rows: bool) -> CenterRows | None:
    """Return the rows of the training data that are centers; None if they are not known, or if the
    method does not use their targets.

    block : centers before all transforms, in storage order, or the rows from which a selection
        starts
    are_rows : whether row i of the block is center i; otherwise rows that equal a center are
        searched, if the data is in memory
    """
    uses_targets = run.method.uses_center_targets and run.problem.selection is None
    if not (uses_targets and run.data.repeats):
        return None
    if are_rows:
        return CenterRows(np.arange(len(block.row_ids)), random_rows.without_features(block))
    matches = stored_rows(run.data.source).find_rows(block.X)
    if matches is None or not len(matches[0]):
        return None
    rows, center_index = matches
    return CenterRows(
        center_index, random_rows.without_features(read_rows(run.data.source, rows, 0))
    )


def center_indices(row_ids: Ints, centers: CenterRows | None) -> Ints:
    """Return the index (m,) of the center that each row is; -1 for rows that are no center.

    row_ids : (m,) row numbers
    centers : the rows that are centers; None if no row is one
    """
    indices = np.full(len(row_ids), -1)
    if centers is not None:
        order = np.argsort(centers.block.row_ids)
        ascending = centers.block.row_ids[order]
        position = np.minimum(np.searchsorted(ascending, row_ids), len(order) - 1)
        is_center = ascending[position] == row_ids
        indices[is_center] = centers.center_index[order[position[is_center]]]
    return indices
