"""Look up the row numbers of virtual rows that come in any order."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from streamkern.store import layout
from streamkern.stream.sources.base import BaseSource, unit_sizes


class RowNumbers:
    """The numbers of `BaseSource.source_rows`, for several threads.

    kept : units whose numbers stay in memory, 8 bytes for each row, to be read once
    """

    def __init__(self, source: BaseSource, kept: int) -> None:
        self._source, self._kept = source, kept
        self._starts = np.concatenate(([0], np.cumsum(unit_sizes(source))))
        self._units: OrderedDict[int, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Return the row numbers, (k,) uint64, of virtual rows (k,)."""
        units = np.searchsorted(self._starts, rows, side="right") - 1
        order = np.argsort(units, kind="stable")
        found, first = np.unique(units[order], return_index=True)
        numbers = np.empty(len(rows), layout.ROW)
        for u, places in zip(found.tolist(), np.split(order, first[1:]), strict=True):
            numbers[places] = self._of_unit(u)[rows[places] - self._starts[u]]
        return numbers

    def _of_unit(self, u: int) -> np.ndarray:
        with self._lock:
            if u in self._units:
                self._units.move_to_end(u)
                return self._units[u]
        numbers = self._source.source_rows(u)  # other threads may read the same unit meanwhile
        with self._lock:
            self._units[u] = numbers
            while len(self._units) > self._kept:
                self._units.popitem(last=False)
        return numbers
