"""The centers of a run directory, which stay there: seen part by part, and never as a whole.

Whoever goes on from a run needs to know which centers these are, and its own part of them.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.errors import ConfigError
from streamkern.planning.memory import CENTER_KEY
from streamkern.rundir.run_directory import RunDirectory
from streamkern.rundir.sealed import Parts

Host = npt.NDArray[Any]


def row_keys(Z: Host) -> npt.NDArray[np.uint8]:
    """(p, 16) digests, equal where rows of Z are, bit by bit; of a billion others two are alike
    once in 10^20 times. Z : (p, d), or such keys."""
    if Z.dtype == np.uint8:
        return Z
    keys = (
        hashlib.blake2b(row, digest_size=CENTER_KEY).digest() for row in np.ascontiguousarray(Z)
    )
    return np.frombuffer(b"".join(keys), np.uint8).reshape(len(Z), CENTER_KEY)


class CentersSeen:
    """The centers of a setup as they come by (`sealed.Into`).

    shape, dtype : of all of them; rows : those that are kept, (q, d). keys : `row_keys` of all,
    where they are asked for. sha256 : of all, where that is.
    """

    def __init__(
        self, rows: slice = slice(0, 0), *, keyed: bool = False, hashed: bool = False
    ) -> None:
        self._rows, self._keyed, self._hashed = rows, keyed, hashed
        self._sha256, self._next = hashlib.sha256(), 0
        self._early: dict[int, Host] = {}  # from an object store parts come in any order
        self._hashing = threading.Lock()
        self.shape: tuple[int, ...] = ()

    def __call__(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Parts | None:
        """Let the array Z come by, and no other."""
        if name != "Z":
            return None
        self.shape, self.dtype, self.ndim = shape, dtype, len(shape)
        kept = self._rows.stop - self._rows.start
        self.rows = np.empty((kept, *shape[1:]), dtype)
        self.keys = np.empty((shape[0] * self._keyed, CENTER_KEY), np.uint8)
        return self if kept or self._keyed or self._hashed else None

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def __getitem__(self, part: Any) -> Any:
        raise KeyError(part)

    def __setitem__(self, part: Any, host: Any) -> None:
        rows = self._rows
        first, stop = max(part.start, rows.start), min(part.stop, rows.stop)
        if first < stop:
            found = host[first - part.start : stop - part.start]
            self.rows[first - rows.start : stop - rows.start] = found
        if self._keyed:
            self.keys[part] = row_keys(host)
        if self._hashed:
            with self._hashing:
                self._early[part.start] = host
                while (host := self._early.pop(self._next, None)) is not None:
                    self._sha256.update(np.ascontiguousarray(host).data)
                    self._next += len(host)


def keys_in(directory: RunDirectory) -> npt.NDArray[np.uint8]:
    """`row_keys` of the centers of a run that has a setup."""
    seen = CentersSeen(keyed=True)
    directory.load_setup(seen)
    return seen.keys


@dataclass(frozen=True, eq=False)
class KeptCenters:
    """Those of a run, in kept order. shape : (p, d). sha256 : of all of them. opened : a reader of
    the run directory."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sha256: str
    opened: Callable[[], RunDirectory]

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, rows: slice) -> Host:
        """Some of them, (q, d). ConfigError where the run has others by now."""
        seen = CentersSeen(rows, hashed=True)
        with self.opened() as run:
            run.load_setup(seen)
        if seen.shape != self.shape or seen.sha256 != self.sha256:
            raise ConfigError(
                f"{run.place} has other centers than when it was begun to continue it; continue "
                "it in another run_dir"
            )
        return seen.rows
