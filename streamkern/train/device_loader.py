"""Load arrays of a run directory to the device or to the host, or skip them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from streamkern.backend.base import Array, Backend
from streamkern.backend.rank_grid import CenterPartition
from streamkern.backend.ranks import Communicator
from streamkern.basics.array_types import Ints
from streamkern.predict import calibration
from streamkern.rundir.checkpoint_format import Saved
from streamkern.rundir.chunked_array import ChunkedArray, TargetFactory, on_host
from streamkern.rundir.run_directory import RunDirectory
from streamkern.solver import posterior

AFTER = (calibration.CALIBRATION_PREFIX, posterior.POSTERIOR_PREFIX)
"""Prefixes of the arrays that a run computes after its last step, for predictions."""


def is_computed_with(name: str) -> bool:
    """Return whether an array of a setup belongs to the solver and lies on the device.

    The others describe the model and stay on the host.
    """
    described = ("Z", "order", "shift", "sample_rows", "metric")
    return name not in described and not name.startswith(("scaling", "target_"))


def is_of_model(name: str) -> bool:
    """Return whether an array of a checkpoint is needed for predictions."""
    return name in ("alpha", "average", "ridges") or name.startswith(AFTER)


def is_of_state(name: str) -> bool:
    """Return whether an array of a checkpoint lies on the device."""
    return name != "window" and not name.startswith(AFTER)


def describing(centers: TargetFactory) -> TargetFactory:
    """Return a factory that loads from a setup the parts of a model except its weights.

    centers : factory for the array of the centers
    """

    def described(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ChunkedArray | None:
        if name == "Z":
            return centers(name, shape, dtype)
        kept = name == "ridges" or not is_computed_with(name)
        return on_host(name, shape, dtype) if kept else None

    return described


def load_trained(
    run: RunDirectory, centers: TargetFactory = on_host
) -> tuple[Saved | None, Saved | None]:  # fmt: skip
    """Load from the setup and the newest checkpoint the parts of a model; p^2 numbers are skipped.

    centers : factory for the array of the centers
    """

    def weights(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ChunkedArray | None:
        return on_host(name, shape, dtype) if is_of_model(name) else None

    return run.load_setup(describing(centers)), run.load_latest(weights)


def stripes(names: tuple[str, ...], ranks: Communicator) -> Callable[[str, int], slice | None]:
    """Return a function that selects the rows of an array of the setup that this rank uses.

    It is called with the name and length of the array; None selects all rows. names : prefixes of
    the arrays that are divided over the ranks.
    """

    def stripe(name: str, n: int) -> slice | None:
        shared = name.startswith(names) and not ranks.is_single
        return ranks.triangle(n) if shared else None

    return stripe


def picks(names: tuple[str, ...], share: CenterPartition) -> Callable[[str, int], Ints | None]:
    """Return a function that selects the rows of an array that belong to this rank's centers.

    It is called with the name and length of the array; None selects all rows. names : prefixes of
    the arrays that have a row for each center.
    """

    def pick(name: str, n: int) -> Ints | None:
        return share.rows(name) if name.startswith(names) and not share.whole else None

    return pick


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
        self._there: dict[str, Array] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ChunkedArray:
        ids = self._pick(name, shape[0]) if shape else None
        if not self._chosen(name):
            if ids is None:
                return on_host(name, shape, dtype)
            self._there[name] = kept = np.empty((len(ids), *shape[1:]), dtype)
            return Picked(shape, kept, ids)
        rows = self._stripe(name, shape[0]) if shape else None
        held = shape if rows is None else (rows.stop - rows.start, rows.stop)
        if ids is not None:
            held = (len(ids), *shape[1:])
        with self._backend.active():
            self._there[name] = self._backend.xp.empty(held, dtype)
        by_parts: ChunkedArray = self._backend.by_parts(self._there[name])
        if ids is not None:
            return Picked(shape, by_parts, ids)
        return by_parts if rows is None else Striped(shape, by_parts, rows)

    def arrays(self, saved: Saved) -> dict[str, Array]:
        """Return all arrays that were saved, those on the device included."""
        return saved.arrays | self._there


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
