"""Leave out the rows of a reader that lack a target."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from streamkern.ingest.columns import FileRowCounts, ReadRequest
from streamkern.ingest.conform import RawBlock
from streamkern.ingest.tables.missing import Marks, missing_in


def with_targets(block: RawBlock, marks: Marks | None) -> RawBlock:
    """Return the block without the rows that lack a target."""
    missing = missing_in(block.y)
    if marks is not None:
        missing |= marks.found_in(block.y).reshape(len(missing), -1).any(axis=1)
    return block.without(missing)


def marked_missing(block: RawBlock, marks: Marks | None) -> RawBlock:
    """Return the block with "" in place of text targets that match a missing marker of the user."""
    if marks is None:
        return block
    found = marks.found_in(block.y)
    return block._replace(y=np.where(found, "", block.y)) if found.any() else block


class KeptRows:
    """Rows of `reader` that have a target, numbered without the others.

    Attributes
    ----------
    n_dropped : int
        Number of rows without a target so far; of all rows once all blocks were read.
    """

    def __init__(self, reader: Any, asked: ReadRequest) -> None:
        self.n_rows: int | None = None
        self.n_dropped = 0
        self._reader, self._asked = reader, asked
        self.natural_dtype, self.as_text = reader.natural_dtype, reader.as_text
        self.targets_as_text = reader.targets_as_text
        self.identity, self.encoder = reader.identity, reader.encoder
        self.has_cells, self.file_form = reader.has_cells, getattr(reader, "file_form", None)
        self.typed = getattr(reader, "typed", False)
        self.columns, self.target_columns = reader.columns, reader.target_columns
        self.weight_column = getattr(reader, "weight_column", None)

    @property
    def files(self) -> FileRowCounts:
        return self._reader.files  # type: ignore[no-any-return]

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        """Yield blocks from kept row `start` on; the rows before it are read again."""
        self.n_dropped = 0
        row, begins = 0, False
        for block in self._reader.blocks(0, block_bytes):
            begins = begins or block.start == 0
            block = with_targets(block, self._asked.marks)
            self.n_dropped += block.dropped
            skip = max(start - row, 0)
            row += len(block.X)
            if skip < len(block.X):
                yield _beginning(block) if begins and not skip else block.part(skip)
                begins = False


def _beginning(block: RawBlock) -> RawBlock:
    """Return the block as the first of its file if all rows before it were left out."""
    if block.start == 0 or block.rows is not None:
        return block._replace(start=0)
    rows = range(block.start, block.start + len(block.X))
    return block._replace(start=0, rows=np.array(rows, np.int64))
