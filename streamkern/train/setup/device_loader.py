"""Load the arrays of a setup or a checkpoint that a rank needs, to its device or to the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from streamkern.backend.base import Array, Backend
from streamkern.basics.array_types import Ints
from streamkern.rundir.checkpoint_format import Saved
from streamkern.rundir.chunked_array import ChunkedArray, on_host
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.restart.run_snapshot import AFTER_STEPS, is_computed_with


def setup_loader(run: ResolvedRun) -> DeviceLoader:
    """Return the loader of this rank's shards of a setup."""
    method, ranks = run.method, run.inputs.ranks
    share = method.share(run.problem, run.sizes, ranks)

    def rows(name: str, n: int) -> Ints | slice | None:
        if not share.whole:
            if name.startswith(("Z", *method.by_center)):
                return share.rows(name)
            if name.startswith(method.in_columns):
                return share.in_block[0]
        shared = name.startswith(method.sharded_arrays) and not ranks.is_single
        return ranks.triangle(n) if shared else None

    return DeviceLoader(run.backend, is_computed_with, rows)


def state_loader(run: ResolvedRun) -> DeviceLoader:
    """Return the loader of a checkpoint; if the ranks share out the centers, it takes this rank's
    rows."""
    share = run.method.share(run.problem, run.sizes, run.inputs.ranks)

    def rows(name: str, n: int) -> Ints | None:
        shared = _is_of_state(name) and not share.whole
        return run.method.rows_of(name, n, share) if shared else None

    return DeviceLoader(run.backend, _is_of_state, rows)


def _is_of_state(name: str) -> bool:
    """Return whether an array of a checkpoint lies on the device."""
    return name != "window" and not name.startswith(AFTER_STEPS)


class DeviceLoader:
    """Load arrays from a run directory to the device part by part (a `TargetFactory`).

    Otherwise a setup of p^2 numbers would first be held on the host as a whole.

    on_device : returns whether the array of a name goes to the device
    rows : returns, for the name and length of an array, the rows that are loaded, in an array of
        their own: ascending row numbers; or a slice, for rows of a lower triangular matrix, which
        are held without the columns right of them; None for all rows
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
            held = shape
        elif isinstance(rows, slice):
            held, rows = (rows.stop - rows.start, rows.stop), np.arange(rows.start, rows.stop)
        else:
            held = (len(rows), *shape[1:])
        if self._on_device(name):
            with self._backend.active():
                self._loaded[name] = self._backend.xp.empty(held, dtype)
            target: ChunkedArray = self._backend.by_parts(self._loaded[name])
        elif rows is None:
            return on_host(name, shape, dtype)
        else:
            target = self._loaded[name] = np.empty(held, dtype)
        return target if rows is None else RowsTarget(shape, target, rows)

    def arrays(self, saved: Saved) -> dict[str, Array]:
        """Return all arrays that were saved, those on the device included."""
        return saved.arrays | self._loaded


class RowsTarget:
    """Target of an array that is read by parts, of which some rows and the first columns are kept.

    target : receives the rows
    rows : their numbers, ascending
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
            consecutive = rows[-1] - rows[0] == len(rows) - 1
            kept = host[rows[0] : rows[-1] + 1] if consecutive else host[rows]  # a view, or a copy
            self._target[first:stop] = kept if kept.ndim == 1 else kept[:, self._width]
