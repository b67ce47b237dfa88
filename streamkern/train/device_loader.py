"""What comes back from a run directory, each array on the device, on the host or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from streamkern.backend.base import Array, Backend
from streamkern.backend.rank_grid import CenterPartition
from streamkern.backend.ranks import Communicator
from streamkern.basics.array_types import Ints
from streamkern.predict import calibration
from streamkern.rundir.checkpoint_format import ChunkedArray, Saved, TargetFactory, on_host
from streamkern.rundir.run_directory import RunDirectory
from streamkern.solver import posterior

AFTER = (calibration.CALIBRATION_PREFIX, posterior.POSTERIOR_PREFIX)
"""How the names of arrays begin that a run makes when it has ended, for predictions."""


def is_computed_with(name: str) -> bool:
    """Whether it is an array of the solver's, which lies on the device; the others describe the
    model, and stay on the host."""
    described = ("Z", "order", "shift", "sample_rows", "metric")
    return name not in described and not name.startswith(("scaling", "target_"))


def is_of_model(name: str) -> bool:
    """Whether it is an array of a checkpoint that predictions are made from."""
    return name in ("alpha", "average", "ridges") or name.startswith(AFTER)


def is_of_state(name: str) -> bool:
    """Whether it is an array of a checkpoint that lies on the device."""
    return name != "window" and not name.startswith(AFTER)


def describing(centers: TargetFactory) -> TargetFactory:
    """Of a setup, what a model is made of beside its weights. centers : takes the centers."""

    def described(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ChunkedArray | None:
        if name == "Z":
            return centers(name, shape, dtype)
        kept = name == "ridges" or not is_computed_with(name)
        return on_host(name, shape, dtype) if kept else None

    return described


def load_trained(
    run: RunDirectory, centers: TargetFactory = on_host
) -> tuple[Saved | None, Saved | None]:  # fmt: skip
    """Of setup and newest checkpoint, what a model is made of; p^2 numbers stay where they are.
    centers : takes the centers."""

    def weights(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ChunkedArray | None:
        return on_host(name, shape, dtype) if is_of_model(name) else None

    return run.load_setup(describing(centers)), run.load_latest(weights)


def stripes(names: tuple[str, ...], ranks: Communicator) -> Callable[[str, int], slice | None]:
    """Of an array of the setup, by its name and rows, those that this rank computes with; None is
    all of them. names : how those begin that are shared out."""

    def stripe(name: str, n: int) -> slice | None:
        shared = name.startswith(names) and not ranks.alone
        return ranks.triangle(n) if shared else None

    return stripe


def picks(names: tuple[str, ...], share: CenterPartition) -> Callable[[str, int], Ints | None]:
    """Of an array, by its name and rows, those that are of this rank's centers; None is all of
    them. names : how those begin that have a row for each center."""

    def pick(name: str, n: int) -> Ints | None:
        return share.rows(name) if name.startswith(names) and not share.whole else None

    return pick


class DeviceLoader:
    """Takes arrays from a run directory straight to the device, part by part (`sealed.Into`).

    A setup of p^2 numbers would otherwise be on the host as a whole first. chosen : which. stripe :
    of the array of a name with so many rows, the rows of its lower triangle that are kept, in
    memory of their own; None: all of it. pick : of the array of a name with so many rows, on the
    host too, the numbers of those that are kept, ascending; None: all of them.
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
        """All that was saved, each where it arrived."""
        return saved.arrays | self._there


class Picked:
    """Takes an array part by part, and keeps some rows. ids : their numbers, ascending."""

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
    """Takes a square array part by part, and keeps some rows of its lower triangle. kept : that
    stripe, without the columns right of it."""

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
