"""Which rows of the training data are centers, with their targets: known before a row is streamed.

See `solver.precondition.block` for what they are good for. Where rows come in changed forms, by
transforms that draw or by copies, or every epoch brings others, none of them is a center.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamkern.stream.sources.base import Block
from streamkern.stream.sources.mixture import stored_rows
from streamkern.stream.sources.sampling import read_rows
from streamkern.train.resolve import ResolvedRun


class CenterRows(NamedTuple):
    """place : (q,) int64, which center a row is, in kept order. block : these rows, X (q, 0)."""

    place: npt.NDArray[np.int64]
    block: Block


def of_rows(run: ResolvedRun, block: Block) -> CenterRows | None:
    """Of centers that were drawn as rows: row i of `block` is the i-th kept."""
    if run.data.augmented or not run.data.repeats:
        return None
    return CenterRows(np.arange(len(block.rows)), without_features(block))


def given(run: ResolvedRun, centers: npt.NDArray[Any]) -> CenterRows | None:
    """Of centers in storage form, (p, *row_shape) in kept order: found among rows in memory."""
    if run.data.augmented or not run.data.repeats:
        return None
    found = stored_rows(run.data.source).find_rows(centers)
    if found is None or not len(found[0]):
        return None
    rows, place = found
    return CenterRows(place, without_features(read_rows(run.data.source, rows, 0)))


def without_features(block: Block) -> Block:
    """With X (m, 0)."""
    return block._replace(X=np.empty((len(block.rows), 0), np.float32))


def center_places(
    numbers: npt.NDArray[np.int64], known: CenterRows | None
) -> npt.NDArray[np.int64]:
    """Which center each row is, by its number, or -1. numbers : (m,)."""
    places = np.full(len(numbers), -1)
    if known is not None:
        order = np.argsort(known.block.rows)
        ascending = known.block.rows[order]
        at = np.minimum(np.searchsorted(ascending, numbers), len(order) - 1)
        hit = ascending[at] == numbers
        places[hit] = known.place[order[at[hit]]]
    return places
