"""Find the rows of the training data that are centers, with their targets, before streaming.

`solver.precondition.block` uses them. If random transforms or copies change the rows, or if every
epoch has other rows, no row is a center.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from streamkern.basics.array_types import HostArray, Ints
from streamkern.store.row_block import RowBlock
from streamkern.stream.sources.mixture import stored_rows
from streamkern.stream.sources.sampling import read_rows
from streamkern.train.resolve.resolved_run import ResolvedRun


class CenterRows(NamedTuple):
    """Rows that are centers.

    center_index : (q,) int64, index in storage order of the center that each row is
    block : the rows without features: X is (q, 0)
    """

    center_index: Ints
    block: RowBlock


def rows_as_centers(run: ResolvedRun, block: RowBlock) -> CenterRows | None:
    """Return the rows of centers that were drawn as rows.

    block : rows in the storage order of the centers: row i is center i
    """
    if run.data.augmented or not run.data.repeats:
        return None
    return CenterRows(np.arange(len(block.row_ids)), without_features(block))


def rows_equal_to(run: ResolvedRun, centers: HostArray) -> CenterRows | None:
    """Return the rows that equal one of the centers; None without such rows, or if the data is not
    in memory.

    centers : (p, *row_shape) centers before all transforms, in storage order
    """
    if run.data.augmented or not run.data.repeats:
        return None
    matches = stored_rows(run.data.source).find_rows(centers)
    if matches is None or not len(matches[0]):
        return None
    rows, center_index = matches
    return CenterRows(center_index, without_features(read_rows(run.data.source, rows, 0)))


def without_features(block: RowBlock) -> RowBlock:
    """Return the block with X of shape (m, 0)."""
    return block._replace(X=np.empty((len(block.row_ids), 0), np.float32))


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
