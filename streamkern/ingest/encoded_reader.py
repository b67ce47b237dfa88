"""Reader of encoded rows of a table, from a reader of its cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from streamkern.basics.text import some
from streamkern.ingest.columns import FileRowCounts
from streamkern.ingest.conform import RawBlock
from streamkern.ingest.tables.cells import MISSING
from streamkern.ingest.tables.encoder import Encoder, UnknownWords
from streamkern.ingest.tables.fit import FittedEncoder
from streamkern.ingest.tables.missing import Marks


class EncodedReader:
    """Rows of `reader`, whose blocks have Arrow tables as X, encoded by an encoder.

    fitted : given if these are the rows that the encoder was fitted on
    """

    as_text = has_cells = False
    natural_dtype: np.dtype[Any] | None = np.dtype(np.float32)

    def __init__(self, reader: Any, encoder: Encoder, fitted: FittedEncoder | None = None) -> None:
        self._reader, self._fitted = reader, fitted
        self.encoder: dict[str, Any] | None = encoder.json()
        self._encoder = encoder
        self.columns: tuple[str, ...] | None = encoder.features
        self.target_columns = reader.target_columns
        self.identity, self.targets_as_text = reader.identity, reader.targets_as_text
        self.file_form = getattr(reader, "file_form", None)
        self.weight_column = getattr(reader, "weight_column", None)

    @property
    def n_rows(self) -> int | None:
        return self._reader.n_rows  # type: ignore[no-any-return]

    @property
    def n_dropped(self) -> int:
        """Number of rows without a target that were left out."""
        return getattr(self._reader, "n_dropped", 0)

    @property
    def files(self) -> FileRowCounts:
        return self._reader.files  # type: ignore[no-any-return]

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        row, step = start, max(1, block_bytes // (12 * len(self._encoder.features)))
        blocks, unknown = self._reader.blocks(start, block_bytes), UnknownWords(self._encoder)
        # Features may take far more bytes than the cells they are made of.
        for block in (
            whole.part(at, at + step) for whole in blocks for at in range(0, len(whole.X), step)
        ):
            if self._fitted is None:
                X = self._encoder.encode(block.X, block.where, block.numbers)
                unknown.add(block.X)
            else:
                X = self._fitted.encode(block.X, block.where, block.numbers, row)
            row += len(X)
            yield block._replace(X=X, columns=self.columns)
        unknown.tell(some([name for name, _ in self.files]) if self.files else "the input")


def encoded_reader(
    open_cells: Callable[..., Any], encoder: Encoder, dropped: Sequence[str] = ()
) -> EncodedReader:
    """Return a reader of a table by an existing encoder.

    dropped : columns that are left out, if they exist, besides those that the encoder drops
    open_cells : opens the table, given `columns`, `dropped` and `cells` as in `Asked`
    """
    marks = Marks(text for text in encoder.missing if text not in MISSING)
    reader = open_cells(
        columns=encoder.columns,
        dropped=(*encoder.dropped, *dropped),
        cells=encoder.missing,
        marks=marks,
    )
    return EncodedReader(reader, encoder)
