"""Load the arrays of a setup or a checkpoint that a rank needs, to its device or to the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from streamkern.backend.base import Array, Backend
from streamkern.basics.array_types import Ints
from streamkern.rundir.checkpoint_format import Saved
from streamkern.rundir.chunked_array import ChunkedArray, on_host
from streamkern.train.resolve import ResolvedRun
from streamkern.train.run_snapshot import AFTER_STEPS, is_computed_with


def setup_loader(run: ResolvedRun) -> DeviceLoader:
    """Return the loader of this rank's shards of a setup."""
    method, ranks = run.method, run.given.ranks
    share = method.share(run.problem, run.sizes, ranks)
    by_center = ("Z", *method.by_center)

    def stripe(name: str, n: int) -> slice | None:
        if name.startswith(method.in_columns) and not share.whole:
            return share.at[0]
        shared = name.startswith(method.sharded_arrays) and not ranks.is_single
        return ranks.triangle(n) if shared else None

    def pick(name: str, n: int) -> Ints | None:
        return share.rows(name) if name.startswith(by_center) and not share.whole else None

    return DeviceLoader(run.backend, is_computed_with, stripe, pick)


def state_loader(run: ResolvedRun) -> DeviceLoader:
    """Return the loader of a checkpoint; if the ranks share out the centers, it takes this rank's
    rows."""
    share = run.method.share(run.problem, run.sizes, run.given.ranks)

    def pick(name: str, n: int) -> Ints | None:
        shared = _is_of_state(name) and not share.whole
        return run.method.rows_of(name, n, share) if shared else None

    return DeviceLoader(run.backend, _is_of_state, pick=pick)


def _is_of_state(name: str) -> bool:
    """Return whether an array of a checkpoint lies on the device."""
    return name != "window" and not name.startswith(AFTER_STEPS)


class DeviceLoader:
    """Load arrays from a run directory to the device part by part (a `TargetFactory`).

    Otherwise a setup of p^2 numbers would first be held on the host as a whole.

    chosen : returns whether the array of a name goes to the device
    stripe : returns, for the name and length of an array, the rows of its lower triangle that are
        kept, in an array of their own; None keeps the whole array
    pick : returns, for the name and length of an array, on the host too, the numbers of the rows
        that are kept, ascending; None keeps all of them
    """

    def __init__(
        self, backend: Backend, chosen: Callable[[str], bool],
        stripe: Callable[[str, int], slice | None] = lambda name, n: None,
        pick: Callable[[str, int], Ints | None] = lambda name, n: None,
    ) -> None:  # fmt: skip
        self._backend, self._chosen, self._stripe, self._pick = backend, chosen, stripe, pick
        self._loaded: dict[str, Array] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ChunkedArray:
        ids = self._pick(name, shape[0]) if shape else None
        if not self._chosen(name):
            if ids is None:
                return on_host(name, shape, dtype)
            self._loaded[name] = kept = np.empty((len(ids), *shape[1:]), dtype)
            return Picked(shape, kept, ids)
        rows = self._stripe(name, shape[0]) if shape else None
        held = shape if rows is None else (rows.stop - rows.start, rows.stop)
        if ids is not None:
            held = (len(ids), *shape[1:])
        with self._backend.active():
            self._loaded[name] = self._backend.xp.empty(held, dtype)
        chunked: ChunkedArray = self._backend.by_parts(self._loaded[name])
        if ids is not None:
            return Picked(shape, chunked, ids)
        return chunked if rows is None else Striped(shape, chunked, rows)

    def arrays(self, saved: Saved) -> dict[str, Array]:
        """Return all arrays that were saved, those on the device included."""
        return saved.arrays | self._loaded


class Picked:
    """Target of an array that is read by parts, of which some rows are kept.

    ids : numbers of these rows, ascending
    """

    def __init__(self, shape: tuple[int, ...], kept: ChunkedArray, ids: Ints) -> None:
        self.shape, self.dtype, self.ndim = shape, kept.dtype, len(shape)
        self._kept, self._ids = kept, ids

    def __getitem__(self, part: Any) -> Any:
        raise KeyError(part)

    def __setitem__(self, part: Any, host: Any) -> None:
        first, stop = (int(k) for k in np.searchsorted(self._ids, (part.start, part.stop)))
        if first < stop:
            self._kept[first:stop] = host[self._ids[first:stop] - part.start]


class Striped:
    """Target of a square array that is read by parts, of whose lower triangle some rows are kept.

    kept : these rows, without the columns right of them
    """

    def __init__(self, shape: tuple[int, ...], kept: ChunkedArray, rows: slice) -> None:
        self.shape, self.dtype, self.ndim = shape, kept.dtype, len(shape)
        self._kept, self._rows = kept, rows

    def __getitem__(self, part: Any) -> Any:
        raise KeyError(part)

    def __setitem__(self, part: Any, host: Any) -> None:
        first, stop = max(part.start, self._rows.start), min(part.stop, self._rows.stop)
        if first < stop:
            at = slice(first - self._rows.start, stop - self._rows.start)
            self._kept[at] = host[first - part.start : stop - part.start, : self._rows.stop]
