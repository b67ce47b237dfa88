"""Centers that are random rows or all rows; their storage order, and their median distance."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.array_types import Ints
from streamkern.basics.optional import on_demand
from streamkern.centers.selector import CenterSelector
from streamkern.store.row_block import RowBlock, concatenate_blocks
from streamkern.store.sample_weights import has_weight, weigh_rows
from streamkern.store.sparse_rows import packed_distances
from streamkern.stream.sources.base import BaseSource, empty_rows, read_units
from streamkern.stream.sources.sampling import (
    SAMPLE_UNITS,
    choose_rows,
    read_rows,
    row_origins,
    rows_by_unit,
)

CENTERS_STAGE, CENTER_ORDER_STAGE, COPIES_STAGE, WEIGHTLESS_STAGE = 1, 21, 100, 200
"""Numbers that separate the random draws of this module from others of the same seed."""
BANDWIDTH_ROWS = 1000
"""Largest number of centers whose distances determine the bandwidth."""
DRAW_TRIES, DRAW_FACTOR = 4, 4
"""Number of draws to replace rows that are unsuitable as centers, and rows drawn for each."""


class Random(CenterSelector):
    """Selector of random rows, each with the same probability."""

    name = "random"

    def choose(self, source: BaseSource, n: int, seed: int) -> tuple[Ints, int]:
        """Return the row numbers of n random rows, and n."""
        return random_numbers(source, n, seed), n


def random_centers(source: BaseSource, p: int, seed: int) -> RowBlock:
    """Return p distinct rows of `source` in random order, see `random_numbers`."""
    return read_rows(source, random_numbers(source, p, seed), seed)


def random_numbers(source: BaseSource, p: int, seed: int) -> Ints:
    """Return the row numbers of p distinct rows of `source` in random order.

    In a store of augmented rows, no two of them have the same origin unless there are too few
    origins: copies of a row are near each other, so that a second one adds little as a center.
    """
    rows = choose_rows(source, p, seed, stage=CENTERS_STAGE, max_units=SAMPLE_UNITS)
    return _without_copies(source, rows, seed) if source.n_origins else rows


def _without_copies(source: BaseSource, rows: Ints, seed: int) -> Ints:
    """Replace rows with the origin of another row by new rows; keep some if too few are found."""
    chosen = _one_of_each_origin(source, rows)
    p = len(rows)
    for draw in range(DRAW_TRIES):
        n_missing = p - len(chosen)
        if not n_missing:
            break
        n = min(DRAW_FACTOR * n_missing, source.n_rows)
        ids = choose_rows(source, n, seed, stage=COPIES_STAGE + draw, max_units=SAMPLE_UNITS)
        chosen = _one_of_each_origin(source, np.concatenate([chosen, ids]))[:p]
    copies = np.setdiff1d(rows, chosen)[: p - len(chosen)]
    rng = np.random.default_rng([seed, COPIES_STAGE])
    return rng.permutation(np.concatenate([chosen, copies]))


def without_weightless(
    source: BaseSource, block: RowBlock, factors: npt.NDArray[np.float64] | None, seed: int
) -> RowBlock:
    """Replace rows of `block` with weight 0 by other rows of `source`, in place; return the block.

    They stay if too few other rows are found.

    factors : result of `weight_factors`, by which weights are multiplied.
    """
    if not source.weighted and (factors is None or factors.all()):
        return block
    weights = weigh_rows(block.y, block.w, factors)
    rows = _replace_weightless(source, block.row_ids, weights, factors, seed)
    replaced = np.flatnonzero(rows != block.row_ids)
    if len(replaced):
        block.put(replaced, read_rows(source, rows[replaced], seed))
    return block


def weighted_numbers(
    source: BaseSource, rows: Ints, factors: npt.NDArray[np.float64] | None, seed: int
) -> Ints:
    """Return the row numbers `rows` (n,), where rows of weight 0 are replaced by other rows.

    The new rows are those of `without_weightless`, but their features are held for one unit at a
    time. factors : as there
    """
    if not source.weighted and (factors is None or factors.all()):
        return rows
    return _replace_weightless(source, rows, _weights(source, rows, factors, seed), factors, seed)


def _replace_weightless(
    source: BaseSource,
    rows: Ints,
    weights: npt.NDArray[np.float64],
    factors: npt.NDArray[np.float64] | None,
    seed: int,
) -> Ints:
    """Return the numbers `rows` (n,) with rows of weight 0 replaced, as far as others are found.

    weights : (n,), see `weigh_rows`
    """
    rows, weights = rows.copy(), weights.copy()
    for draw in range(DRAW_TRIES):
        weightless = np.flatnonzero(~has_weight(weights))
        if not len(weightless):
            break
        n = min(DRAW_FACTOR * len(weightless), source.n_rows)
        ids = choose_rows(source, n, seed, stage=WEIGHTLESS_STAGE + draw, max_units=SAMPLE_UNITS)
        ids = ids[~np.isin(ids, rows)]
        new_weights = _weights(source, ids, factors, seed)
        ids, new_weights = ids[new_weights > 0], new_weights[new_weights > 0]
        replaced = weightless[: len(ids)]
        rows[replaced], weights[replaced] = ids[: len(replaced)], new_weights[: len(replaced)]
    return rows


def _weights(
    source: BaseSource, rows: Ints, factors: npt.NDArray[np.float64] | None, seed: int
) -> npt.NDArray[np.float64]:
    """Return the weights (n,) of the rows with these numbers; features are read, but not kept."""
    indices, blocks = [np.empty(0, np.int64)], [without_features(empty_rows(source, 0))]
    for index, block in rows_by_unit(source, rows, seed):
        indices.append(index)
        blocks.append(without_features(block))
    block = concatenate_blocks(blocks)
    block = block.take(np.argsort(np.concatenate(indices)))
    return weigh_rows(block.y, block.w, factors)


def without_features(block: RowBlock) -> RowBlock:
    """Return the block with X of shape (m, 0)."""
    return block._replace(X=np.empty((len(block.row_ids), 0), np.float32))


def _one_of_each_origin(source: BaseSource, rows: Ints) -> Ints:
    """Return the first row of each origin, in order."""
    return rows[np.sort(np.unique(row_origins(source, rows), return_index=True)[1])]


def all_rows(source: BaseSource, seed: int) -> RowBlock:
    """Return all rows of `source`, in its order."""
    return concatenate_blocks(list(read_units(source, range(source.n_units), seed, 0)))


def random_order(p: int, seed: int) -> npt.NDArray[np.int64]:
    """Return a random order of p centers. Blocks and projection batches are slices of it."""
    return np.random.default_rng([seed, CENTER_ORDER_STAGE]).permutation(p)


def median_bandwidth(
    Z: npt.NDArray[Any], norm: str = "euclidean", *, sparse: bool = False
) -> float:
    """Return the median distance of pairs of up to 1 000 centers (Gretton et al. 2012, section 8).

    Pairs of equal rows do not count. If all rows are equal, the result is 1.

    Z : (p, d) host array in random order, of which the first rows are used.
    norm : "euclidean", or "cityblock" for the L1 distance.
    sparse : whether Z contains packed sparse rows; their distances are Euclidean.
    """
    Z = np.asarray(Z[:BANDWIDTH_ROWS], np.float64)
    distances = (
        packed_distances(Z) if sparse else on_demand("scipy.spatial.distance").pdist(Z, norm)
    )
    is_positive = distances > 0
    if not is_positive.all():
        distances = distances[is_positive]
    return float(np.median(distances, overwrite_input=True)) if len(distances) else 1.0
