"""Find the rows of the training data that are centers, with their targets, before streaming.

`solver.precondition.block` uses them. If random transforms or copies change the rows, or if every
epoch has other rows, no row is a center.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamkern.store.row_block import RowBlock
from streamkern.stream.sources.mixture import stored_rows
from streamkern.stream.sources.sampling import read_rows
from streamkern.train.resolve.resolved_run import ResolvedRun


class CenterRows(NamedTuple):
    """Rows that are centers.

    place : (q,) int64, index of the center that each row is, in storage order
    block : the rows without features: X is (q, 0)
    """

    place: npt.NDArray[np.int64]
    block: RowBlock


def of_rows(run: ResolvedRun, block: RowBlock) -> CenterRows | None:
    """Return the rows of centers that were drawn as rows.

    block : rows in the storage order of the centers: row i is center i
    """
    if run.data.augmented or not run.data.repeats:
        return None
    return CenterRows(np.arange(len(block.row_ids)), without_features(block))


def given(run: ResolvedRun, centers: npt.NDArray[Any]) -> CenterRows | None:
    """Return the rows that equal given centers; None if there are none or the data is not in
    memory.

    centers : (p, *row_shape) centers before all transforms, in storage order
    """
    if run.data.augmented or not run.data.repeats:
        return None
    found = stored_rows(run.data.source).find_rows(centers)
    if found is None or not len(found[0]):
        return None
    rows, place = found
    return CenterRows(place, without_features(read_rows(run.data.source, rows, 0)))


def without_features(block: RowBlock) -> RowBlock:
    """Return the block with X of shape (m, 0)."""
    return block._replace(X=np.empty((len(block.row_ids), 0), np.float32))


def center_places(
    numbers: npt.NDArray[np.int64], known: CenterRows | None
) -> npt.NDArray[np.int64]:
    """Return the index of the center that each row is, (m,), or -1. numbers : (m,) row numbers."""
    places = np.full(len(numbers), -1)
    if known is not None:
        order = np.argsort(known.block.row_ids)
        ascending = known.block.row_ids[order]
        at = np.minimum(np.searchsorted(ascending, numbers), len(order) - 1)
        hit = ascending[at] == numbers
        places[hit] = known.place[order[at[hit]]]
    return places
