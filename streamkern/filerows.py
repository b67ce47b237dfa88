"""Rows of raw files, evaluated as they are read: in file order, converted as `ingest` does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkern.augment import Transform
from streamkern.conform import Features, RawBlock, Targets
from streamkern.errors import DataError
from streamkern.readers import Reader
from streamkern.source_base import UNIT_BYTES, Block, joined


class FileRows:
    """What a model takes in place of a source: the rows of `reader`, once and in their order.

    Parameters
    ----------
    reader : of files or arrays, opened with or without targets
    classes : of the model, or None for values. targets : whether blocks have the targets
    """

    feed_transforms: tuple[Transform, ...] = ()

    def __init__(self, reader: Reader, classes: Sequence[str] | None, *, targets: bool) -> None:
        self._reader = reader
        first = next(reader.blocks(0, UNIT_BYTES), None)
        if first is None or not len(first.X):
            raise DataError("the input has no rows; there is nothing to predict")
        self._features = Features(first, reader.natural_dtype)
        self._targets = None
        self.row_shape, self.n_rows = self._features.row_shape, reader.n_rows
        self.columns = getattr(reader, "columns", None)
        self.files = getattr(reader, "files", ())
        self.classes: tuple[str, ...] | None = None
        self.n_outputs = 0
        if targets:
            self._targets = Targets(first, "values" if classes is None else "classes")
            self.classes = None if classes is None else tuple(classes)
            self.n_outputs = self._targets.shape[0] if classes is None else len(classes)
        row_bytes = int(np.prod(self.row_shape)) * self._features.dtype.itemsize
        self._unit_rows = max(1, UNIT_BYTES // row_bytes)

    @property
    def fingerprint(self) -> str:
        """Of the names, sizes and dates of the files."""
        text = json.dumps(self._reader.identity, sort_keys=True)
        return "name:" + hashlib.sha256(text.encode()).hexdigest()

    def numbered_blocks(self, start: int) -> Iterator[tuple[int, Block]]:
        """As `source_base.numbered_blocks`; blocks are as long wherever it starts."""
        place = end = start - start % self._unit_rows
        waiting: list[Block] = []
        for raw in self._reader.blocks(place, UNIT_BYTES):
            waiting.append(self._block(raw, end))
            end += len(raw.X)
            while end - place >= self._unit_rows:
                rows = joined(waiting)
                yield place, rows.take(slice(self._unit_rows))
                waiting = [rows.take(slice(self._unit_rows, None))]
                place += self._unit_rows
        if end > place:
            yield place, joined(waiting)
        self.n_rows = end

    def _block(self, raw: RawBlock, first: int) -> Block:
        y: NDArray[Any] = np.empty((len(raw.X), 0), np.float32)
        if self._targets is not None:
            y = self._targets.convert(raw)
            if self.classes is not None:
                y = self._ids(raw, self._targets, y)
        rows = np.arange(first, first + len(raw.X))
        return Block(self._features.convert(raw), y, rows, raw.weights())

    def _ids(self, raw: RawBlock, targets: Targets, codes: NDArray[Any]) -> NDArray[np.int64]:
        """Class ids of the model; DataError for a label that it does not know."""
        assert self.classes is not None
        place = {name: i for i, name in enumerate(self.classes)}
        known = [place.get(str(label), -1) for label in targets.labels]
        ids: NDArray[np.int64] = np.array(known, np.int64)[codes]
        if (ids < 0).any():
            row = int(np.argmin(ids))
            raise DataError(
                f"the label of {raw.place(row)} is {targets.labels[codes[row]]!r}, which is none "
                f"of the {len(self.classes)} classes of the model"
            )
        return ids
