"""Centers that are random rows, all rows, or given; and the bandwidth that fits them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.array_types import Ints
from streamkern.basics.errors import DataError, NonFiniteError
from streamkern.basics.optional import on_demand
from streamkern.centers.selector import CenterSelector
from streamkern.ingest.numeric import is_sparse
from streamkern.store.row_block import RowBlock, concatenated
from streamkern.store.sample_weights import weights_of
from streamkern.store.sparse_rows import (
    PackedRows,
    is_packed,
    packed_distances,
    stays_sparse,
    widened,
)
from streamkern.stream.sources.alignment import SPARSITY_REMEDY, check_row_shape
from streamkern.stream.sources.base import BaseSource, read_units
from streamkern.stream.sources.sampling import SAMPLE_UNITS, choose_rows, origins_of, read_rows

CENTERS_STAGE = 1
CENTER_ORDER_STAGE = 21
BANDWIDTH_ROWS = 1000
DRAW_TRIES, DRAW_FACTOR = 4, 4
"""Number of draws to replace centers that are copies, and rows drawn for each of them."""
COPIES_STAGE, WEIGHTLESS_STAGE = 100, 200


class Random(CenterSelector):
    """Selector of random rows, each with the same probability."""

    name = "random"

    def choose(self, source: BaseSource, n: int, seed: int) -> tuple[Ints, int]:
        """Return n random rows, and n."""
        return random_numbers(source, n, seed), n


def random_centers(source: BaseSource, p: int, seed: int) -> RowBlock:
    """Return p distinct rows of `source` in random order, see `random_numbers`."""
    return read_rows(source, random_numbers(source, p, seed), seed)


def random_numbers(source: BaseSource, p: int, seed: int) -> Ints:
    """Return the numbers of p distinct rows of `source` in random order.

    Of a store of augmented rows, no two have the same origin unless there are too few origins:
    copies are near each other, and as centers worth little more than one of them.
    """
    rows = choose_rows(source, p, seed, stage=CENTERS_STAGE, max_units=SAMPLE_UNITS)
    return _no_copies(source, rows, seed) if source.n_origins else rows


def _no_copies(source: BaseSource, rows: Ints, seed: int) -> Ints:
    """Replace rows that are copies of others by new ones; keep copies only if too few are found."""
    found, p = _firsts(source, rows), len(rows)
    for draw in range(DRAW_TRIES):
        missing = p - len(found)
        if not missing:
            break
        n = min(DRAW_FACTOR * missing, source.n_rows)
        more = choose_rows(source, n, seed, stage=COPIES_STAGE + draw, max_units=SAMPLE_UNITS)
        found = _firsts(source, np.concatenate([found, more]))[:p]
    copies = np.setdiff1d(rows, found)[: p - len(found)]
    rng = np.random.default_rng([seed, COPIES_STAGE])
    return rng.permutation(np.concatenate([found, copies]))


def without_weightless(
    source: BaseSource, block: RowBlock, factors: npt.NDArray[np.float64] | None, seed: int
) -> RowBlock:
    """Replace rows of `block` with weight 0 by other rows of `source`; return the block.

    Such rows stay only if too few others are found. factors : from `weight_factors`.
    """
    if not source.weighted and (factors is None or factors.all()):
        return block
    for draw in range(DRAW_TRIES):
        empty = np.flatnonzero(weights_of(block.y, block.w, factors) == 0)
        if not len(empty):
            break
        n = min(DRAW_FACTOR * len(empty), source.n_rows)
        more = choose_rows(source, n, seed, stage=WEIGHTLESS_STAGE + draw, max_units=SAMPLE_UNITS)
        found = read_rows(source, more[~np.isin(more, block.row_ids)], seed)
        found = found.take(weights_of(found.y, found.w, factors) > 0)
        count = min(len(empty), len(found.row_ids))
        block.put(empty[:count], found.take(slice(count)))
    return block


def _firsts(source: BaseSource, rows: Ints) -> Ints:
    """Return the rows whose origin is not that of an earlier row."""
    return rows[np.sort(np.unique(origins_of(source, rows), return_index=True)[1])]


def all_rows(source: BaseSource, seed: int) -> RowBlock:
    """Return every row of `source`, in its order."""
    return concatenated(list(read_units(source, range(source.n_units), seed, 0)))


def as_centers(array: Any) -> npt.NDArray[Any]:
    """Return centers given by the user as an array: (p, ...), finite numbers; packed if sparse."""
    if is_sparse(array):
        rows = PackedRows.of_matrix(array)
        long = stays_sparse(rows.n_features, rows.shape[2])
        X = rows[:] if long else np.asarray(array.toarray())
    else:
        X = np.asarray(array)
    if X.dtype.kind not in "fiu":
        raise DataError(f"centers have dtype {X.dtype}", "convert them to a floating type")
    if X.ndim < 2 or len(X) == 0:
        raise DataError(f"centers have shape {X.shape}", "give at least one row, (p, d)")
    if not np.isfinite(X).all():
        row = int(np.argwhere(~np.isfinite(X).reshape(len(X), -1).all(axis=1))[0, 0])
        raise NonFiniteError(f"centers hold NaN or infinity in row {row}", "remove that row")
    return X


def check_center_features(shape: tuple[int, ...], row_shape: tuple[int, ...]) -> None:
    """Raise an error unless centers of a shape (p, ...) have the shape of rows of the data."""
    if is_packed(shape[1:]) and len(row_shape) == 1:
        raise DataError(
            "centers are sparse rows, and the data has dense ones", f"{SPARSITY_REMEDY}"
        )
    whose, sparse = "the data has rows of shape", is_packed(row_shape)
    check_row_shape("centers have", shape[1:], whose, row_shape, sparse=sparse)


def given_centers(array: npt.ArrayLike, row_shape: tuple[int, ...], n_outputs: int) -> RowBlock:
    """Return a block of centers given by the user, checked; its targets are not used."""
    X = as_centers(array)
    check_center_features(X.shape, row_shape)
    if is_packed(row_shape):
        X = widened(X, row_shape)
    if X.dtype.kind == "i" or X.dtype.itemsize > 8:
        X = X.astype(np.float64)
    rows = np.arange(len(X), dtype=np.int64)
    y = np.zeros((len(X), n_outputs), np.float32)
    return RowBlock(X.reshape(len(X), *row_shape), y, None, rows)


def random_order(p: int, seed: int) -> npt.NDArray[np.int64]:
    """Return the order of the centers: blocks and projection batches are slices of it."""
    return np.random.default_rng([seed, CENTER_ORDER_STAGE]).permutation(p)


def median_bandwidth(
    Z: npt.NDArray[Any], norm: str = "euclidean", *, sparse: bool = False
) -> float:
    """Return the median distance of pairs of up to 1 000 centers (Gretton et al. 2012, section 8).

    Z : (p, d) host array in random order. Equal rows do not count; if all are equal, any bandwidth
        is as good, and 1 is returned.
    norm : "euclidean", or "cityblock" for the L1 distance.
    sparse : whether Z holds packed sparse rows; their distances are Euclidean
    """
    Z = np.asarray(Z[:BANDWIDTH_ROWS], np.float64)
    distances = (
        packed_distances(Z) if sparse else on_demand("scipy.spatial.distance").pdist(Z, norm)
    )
    apart = distances > 0
    if not apart.all():
        distances = distances[apart]
    return float(np.median(distances, overwrite_input=True)) if len(distances) else 1.0
