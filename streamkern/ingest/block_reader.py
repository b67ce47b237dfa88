"""Read an iterable of blocks of rows, which yields each of them once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import DataError
from streamkern.ingest.array_reader import ends_digest
from streamkern.ingest.columns import FileRowCounts, ReadRequest
from streamkern.ingest.conform import RawBlock
from streamkern.ingest.frames import is_frame, numbers_of
from streamkern.ingest.given import received, received_targets
from streamkern.ingest.kept_rows import with_targets
from streamkern.ingest.plain_arrays import numeric


class BlockReader:
    """Reader of an iterable of (X, y) pairs of arrays, or of (X, y, w) with sample weights."""

    encoder, has_cells = None, False

    def __init__(self, pairs: Iterable[Any], asked: ReadRequest) -> None:
        self.n_rows: int | None = None
        self.natural_dtype: np.dtype[Any] | None = None
        self.as_text = self.targets_as_text = False
        self.columns = self.target_columns = None
        self.files: FileRowCounts = ()
        self._rest = enumerate(pairs)
        self._begins = self._up_to_first_rows(asked)
        if not self._begins:
            raise DataError(
                "the iterator gave no rows; give a new one where it was read before, as a "
                "generator gives its blocks once"
            )
        # An iterator can be identified only by its first rows.
        self.identity = {"kind": "iterator", "begins": ends_digest(*self._begins[0])}

    def _up_to_first_rows(self, asked: ReadRequest) -> list[tuple[NDArray[Any], ...]]:
        """Return the blocks up to the first one with rows to keep.

        They are stored because an iterator yields them once, and the first rows are needed in
        advance.
        """
        begins = []
        for X, y, *w in map(self._pair, self._rest):
            if len(X):
                begins.append((X, y, *w))
                block = RawBlock(X, y, "the iterator", 0)
                if not asked.drop_missing or len(with_targets(block, asked.marks).X):
                    break
        return begins

    @staticmethod
    def _pair(numbered: tuple[int, Any]) -> tuple[NDArray[Any], ...]:
        index, pair = numbered
        if not isinstance(pair, tuple | list) or len(pair) not in (2, 3):
            raise DataError(
                f"block {index} of the iterator is not a pair (X, y) of arrays, or (X, y, w) with "
                "sample weights"
            )
        X, y, *w = (_block_array(a, k, index) for k, a in enumerate(pair))
        if X.ndim < 2 or y.ndim < 1 or len(X) != len(y):
            raise DataError(
                f"block {index} of the iterator has X {X.shape} and y {y.shape}; give X as (n, d) "
                "and a target for each row"
            )
        return X, y, *w

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        row = 0
        for X, y, *w in chain(self._begins, map(self._pair, self._rest)):
            block = RawBlock(X, y, "the iterator", row, w=w[0] if w else None)
            step = max(1, block_bytes // max(1, X[:1].nbytes))
            for a in range(max(start - row, 0), len(X), step):
                yield block.part(a, a + step)
            row += len(X)


def _block_array(given: Any, place: int, index: int) -> NDArray[Any]:
    """Return X, y or the weights of a block as an array. place : 0, 1 or 2 in this order."""
    if place:
        return np.asarray(received_targets(given, ("", "y", "sample_weight")[place]))
    X = received(given, "X")
    if is_frame(X):
        X = numbers_of(X, "X")
        if X is None:
            raise DataError(
                f"block {index} of the iterator is a data frame with columns that are not numbers, "
                "or lack some; give the table as a whole, or as files"
            )
    return np.asarray(numeric(X))
