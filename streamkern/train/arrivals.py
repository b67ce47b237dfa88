"""What comes back from a run directory, each array on the device, on the host or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from streamkern.backend.base import Array, Backend
from streamkern.rundir.run_directory import RunDirectory
from streamkern.rundir.sealed import Parts, Saved, on_host


def is_computed_with(name: str) -> bool:
    """Whether it is an array of the solver's, which lies on the device; the others describe the
    model, and stay on the host."""
    described = ("Z", "order", "shift", "sample_rows", "metric")
    return name not in described and not name.startswith(("scaling", "target_"))


def load_trained(run: RunDirectory) -> tuple[Saved | None, Saved | None]:
    """Of setup and newest checkpoint, what a model is made of; p^2 numbers stay where they are."""

    def described(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Parts | None:
        return None if is_computed_with(name) else on_host(name, shape, dtype)

    def weights(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Parts | None:
        return on_host(name, shape, dtype) if name in ("alpha", "average") else None

    return run.load_setup(described), run.load_latest(weights)


class Arrivals:
    """Takes arrays from a run directory straight to the device, part by part (`sealed.Into`).

    A setup of p^2 numbers would otherwise be on the host as a whole first. chosen : which.
    """

    def __init__(self, backend: Backend, chosen: Callable[[str], bool]) -> None:
        self._backend, self._chosen = backend, chosen
        self._there: dict[str, Array] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Parts:
        if not self._chosen(name):
            return on_host(name, shape, dtype)
        with self._backend.active():
            self._there[name] = self._backend.xp.empty(shape, dtype)
        by_parts: Parts = self._backend.by_parts(self._there[name])
        return by_parts

    def arrays(self, saved: Saved) -> dict[str, Array]:
        """All that was saved, each where it arrived."""
        return saved.arrays | self._there
