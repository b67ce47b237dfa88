"""Find the rows of the training data that are centers, with their targets, before streaming.

`solver.precondition.block` uses them. If random transforms or copies change the rows, or if every
epoch has other rows, no row is a center.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from streamkern.basics.array_types import Ints
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


def known_center_rows(
    run: ResolvedRun, block: RowBlock, *, are_rows: bool
) -> CenterRows | None:  # fmt: skip
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
        return CenterRows(np.arange(len(block.row_ids)), without_features(block))
    matches = stored_rows(run.data.source).find_rows(block.X)
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
