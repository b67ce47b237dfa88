"""The centers of a run directory, which stay there: seen part by part, and never as a whole.

Whoever goes on from a run needs to know which centers these are, and its own part of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.array_types import HostArray
from streamkern.basics.errors import ConfigError
from streamkern.planning.memory import CENTER_KEY
from streamkern.rundir.checkpoint_format import ChunkedArray, Saved
from streamkern.rundir.run_directory import RunDirectory


def center_digests(Z: HostArray) -> npt.NDArray[np.uint8]:
    """(p, 16) digests, equal where rows of Z are, bit by bit; of a billion others two are alike
    once in 10^20 times. Z : (p, d), or such keys."""
    if Z.dtype == np.uint8:
        return Z
    keys = (
        hashlib.blake2b(row, digest_size=CENTER_KEY).digest() for row in np.ascontiguousarray(Z)
    )
    return np.frombuffer(b"".join(keys), np.uint8).reshape(len(Z), CENTER_KEY)


class CentersSeen:
    """The centers of a setup as they come by (`sealed.Into`), of which nothing else is read.

    shape, dtype : of all of them; rows : those that are kept, (q, d). keys : `center_digests` of
    all, where they are asked for.
    """

    def __init__(self, rows: slice = slice(0, 0), *, keyed: bool = False) -> None:
        self._rows, self._keyed = rows, keyed
        self.shape: tuple[int, ...] = ()

    def __call__(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> ChunkedArray | None:
        """Let the array Z come by, and no other."""
        if name != "Z":
            return None
        self.shape, self.dtype, self.ndim = shape, dtype, len(shape)
        kept = self._rows.stop - self._rows.start
        self.rows = np.empty((kept, *shape[1:]), dtype)
        self.keys = np.empty((shape[0] * self._keyed, CENTER_KEY), np.uint8)
        return self if kept or self._keyed else None

    def wants(self, part: slice) -> bool:
        """Whether these rows are to come by."""
        first, stop = self._kept_of(part)
        return self._keyed or first < stop

    def _kept_of(self, part: slice) -> tuple[int, int]:
        return max(part.start, self._rows.start), min(part.stop, self._rows.stop)

    def __getitem__(self, part: Any) -> Any:
        raise KeyError(part)

    def __setitem__(self, part: Any, host: Any) -> None:
        first, stop = self._kept_of(part)
        if first < stop:
            start = self._rows.start
            self.rows[first - start : stop - start] = host[first - part.start : stop - part.start]
        if self._keyed:
            self.keys[part.start : part.start + len(host)] = center_digests(host)


@dataclass(frozen=True, eq=False)
class KeptCenters:
    """Those of a run, in kept order. shape : (p, d). opened : a reader of the run directory.

    sha256 : of what the manifest there says of their files, by which those that are read, a part
    or all of them, are told from others. recorded : what the record of a run that takes them over
    has in place of it, which was begun from them in another directory.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sha256: str
    opened: Callable[[], RunDirectory]
    recorded: str | None = None

    @classmethod
    def of(cls, setup: Saved, seen: CentersSeen, opened: Callable[[], RunDirectory]) -> KeptCenters:
        """Those of a setup, as it was loaded."""
        return cls(seen.shape, seen.dtype, setup.checksums["Z"], opened)

    @classmethod
    def there(cls, opened: Callable[[], RunDirectory]) -> KeptCenters | None:
        """Those of a run; None before its setup."""
        seen = CentersSeen()
        with opened() as run:
            setup = run.load_setup(seen)
        return None if setup is None else cls.of(setup, seen, opened)

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, rows: slice) -> HostArray:
        """Some of them, (q, d), of which the chunks that have them are read. ConfigError where the
        run has others by now."""
        return self._read(CentersSeen(rows)).rows

    def keys(self) -> npt.NDArray[np.uint8]:
        """`center_digests` of all, a chunk at a time. ConfigError where the run has others."""
        return self._read(CentersSeen(keyed=True)).keys

    def _read(self, seen: CentersSeen) -> CentersSeen:
        with self.opened() as run:
            setup = run.load_setup(seen)
        if setup is None or setup.checksums["Z"] != self.sha256:
            raise ConfigError(
                f"{run.place} has other centers than when this run was begun from it; begin anew, "
                "in another run_dir"
            )
        return seen
