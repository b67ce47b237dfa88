"""Read rows of an iterable of blocks, each a pair of arrays or three arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import DataError
from streamkern.ingest.array_reader import ends_digest
from streamkern.ingest.columns import ReadRequest
from streamkern.ingest.conform import RawBlock
from streamkern.ingest.convert_input import convert_input, convert_targets
from streamkern.ingest.frames import is_frame
from streamkern.ingest.numeric import frame_numbers, numeric
from streamkern.ingest.reader import Reader, rows_with_targets


class BlockReader(Reader):
    """Reader of an iterable of (X, y) pairs of arrays, or of (X, y, w) with sample weights.

    The iterable is read once: a second pass over `blocks` yields only what the first one left.
    """

    def __init__(self, pairs: Iterable[Any], request: ReadRequest) -> None:
        self._numbered_pairs = enumerate(pairs)
        self._first_blocks = self._blocks_to_first_rows(request)
        if not self._first_blocks:
            raise DataError(
                "the iterator gave no rows",
                "give a new iterator: a generator gives its blocks only once",
            )
        # An iterator can be identified only by its first rows.
        self.identity = {"kind": "iterator", "begins": ends_digest(*self._first_blocks[0])}

    def _blocks_to_first_rows(self, request: ReadRequest) -> list[tuple[NDArray[Any], ...]]:
        """Return the blocks up to the first one with rows to keep, without empty blocks.

        The reader holds these blocks, because their rows are needed before the first pass, and an
        iterator yields them only once.
        """
        first_blocks = []
        for X, y, *w in map(self._pair, self._numbered_pairs):
            if len(X):
                first_blocks.append((X, y, *w))
                block = RawBlock(X, y, "the iterator", 0)
                if not request.drop_missing or len(rows_with_targets(block, request.markers).X):
                    break
        return first_blocks

    @staticmethod
    def _pair(numbered_pair: tuple[int, Any]) -> tuple[NDArray[Any], ...]:
        """Return the arrays of a block, given with its number; raise DataError if they differ."""
        index, pair = numbered_pair
        if not isinstance(pair, tuple | list) or len(pair) not in (2, 3):
            raise DataError(
                f"block {index} of the iterator is not a tuple of two or three arrays; give "
                "pairs (X, y), or (X, y, w) with sample weights"
            )
        names = ("X", "y", "sample_weight")
        X, y, *w = (
            _block_array(array, name, index) for array, name in zip(pair, names, strict=False)
        )
        if X.ndim < 2 or y.ndim < 1 or len(X) != len(y):
            raise DataError(
                f"block {index} of the iterator has X of shape {X.shape} and y of shape {y.shape}",
                "give X as (n, d) and a target for each row",
            )
        return X, y, *w

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        row = 0
        for X, y, *w in chain(self._first_blocks, map(self._pair, self._numbered_pairs)):
            block = RawBlock(X, y, "the iterator", row, w=w[0] if w else None)
            step = max(1, block_bytes // max(1, X[:1].nbytes))
            for offset in range(max(start - row, 0), len(X), step):
                yield block.part(offset, offset + step)
            row += len(X)


def _block_array(values: Any, name: str, index: int) -> NDArray[Any]:
    """Return X, y or the sample weights, by `name`, of block `index` as an array."""
    if name != "X":
        return np.asarray(convert_targets(values, name))
    X = convert_input(values, "X")
    if is_frame(X):
        X = frame_numbers(X, "X")
        if X is None:
            raise DataError(
                f"block {index} of the iterator is a data frame with columns that are not "
                "numbers, or with missing numbers",
                "give the whole table as one data frame, or give files",
            )
    return np.asarray(numeric(X))
