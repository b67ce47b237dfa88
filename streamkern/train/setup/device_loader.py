"""Load a rank's part of the arrays of a setup or a checkpoint, to its device or to the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from streamkern.backend.base import Array, Backend
from streamkern.basics.array_types import Ints
from streamkern.rundir.checkpoint_format import Saved
from streamkern.rundir.chunked_array import ChunkedArray, on_host
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.restart.run_snapshot import POST_TRAINING_PREFIXES, is_solver_array


def setup_loader(run: ResolvedRun) -> DeviceLoader:
    """Return the loader of this rank's shards of a setup."""
    method, ranks = run.method, run.inputs.ranks
    partition = method.share(run.problem, run.sizes, ranks)

    def rows(name: str, n: int) -> Ints | slice | None:
        if not partition.whole:
            if name.startswith(("Z", *method.by_center)):
                return partition.rows(name)
            if name.startswith(method.in_columns):
                return partition.in_block[0]
        is_sharded = name.startswith(method.sharded_arrays) and not ranks.is_single
        return ranks.triangle(n) if is_sharded else None

    return DeviceLoader(run.backend, is_solver_array, rows)


def state_loader(run: ResolvedRun) -> DeviceLoader:
    """Return the loader of a checkpoint; if ranks partition the centers, it loads the rows of this
    rank."""
    partition = run.method.share(run.problem, run.sizes, run.inputs.ranks)

    def rows(name: str, n: int) -> Ints | None:
        is_sharded = _is_state_array(name) and not partition.whole
        return run.method.rows_of(name, n, partition) if is_sharded else None

    return DeviceLoader(run.backend, _is_state_array, rows)


def _is_state_array(name: str) -> bool:
    """Return whether an array of a checkpoint lies on the device."""
    return name != "window" and not name.startswith(POST_TRAINING_PREFIXES)


class DeviceLoader:
    """Load arrays from a run directory to the device part by part (a `TargetFactory`).

    Thus the host never holds an entire setup, which may have p^2 numbers.

    on_device : returns whether the array of a name goes to the device
    rows : returns the rows to load, from the name and the length of an array: ascending row
        numbers; a slice for rows of a lower triangular matrix, whose zero columns at the right are
        left out; or None for all rows
    """

    def __init__(
        self, backend: Backend, on_device: Callable[[str], bool],
        rows: Callable[[str, int], Ints | slice | None] = lambda name, n: None,
    ) -> None:  # fmt: skip
        self._backend, self._on_device, self._rows = backend, on_device, rows
        self._loaded: dict[str, Array] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ChunkedArray:
        rows = self._rows(name, shape[0]) if shape else None
        if rows is None:
            loaded_shape = shape
        elif isinstance(rows, slice):
            loaded_shape, rows = (
                (rows.stop - rows.start, rows.stop),
                np.arange(rows.start, rows.stop),
            )
        else:
            loaded_shape = (len(rows), *shape[1:])
        if self._on_device(name):
            with self._backend.active():
                self._loaded[name] = self._backend.xp.empty(loaded_shape, dtype)
            target: ChunkedArray = self._backend.by_parts(self._loaded[name])
        elif rows is None:
            return on_host(name, shape, dtype)
        else:
            target = self._loaded[name] = np.empty(loaded_shape, dtype)
        return target if rows is None else RowsTarget(shape, target, rows)

    def arrays(self, saved: Saved) -> dict[str, Array]:
        """Return all loaded arrays, on the host and on the device."""
        return saved.arrays | self._loaded


class RowsTarget:
    """Target of an array that is read by parts; it keeps some rows, and their first columns.

    shape : shape of the array that is read
    target : receives the rows that are kept; its width is the number of columns kept
    rows : numbers of these rows, ascending
    """

    def __init__(self, shape: tuple[int, ...], target: ChunkedArray, rows: Ints) -> None:
        self.shape, self.dtype, self.ndim = shape, target.dtype, len(shape)
        self._target, self._rows = target, rows
        self._width = slice(None) if target.ndim == 1 else slice(target.shape[1])

    def __getitem__(self, part: Any) -> Any:
        raise KeyError(part)

    def __setitem__(self, part: Any, host: Any) -> None:
        first, stop = (int(k) for k in np.searchsorted(self._rows, (part.start, part.stop)))
        if first < stop:
            rows = self._rows[first:stop] - part.start
            are_consecutive = rows[-1] - rows[0] == len(rows) - 1
            # A slice is a view, which saves a copy.
            part_rows = host[rows[0] : rows[-1] + 1] if are_consecutive else host[rows]
            self._target[first:stop] = (
                part_rows if part_rows.ndim == 1 else part_rows[:, self._width]
            )
