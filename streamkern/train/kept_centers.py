"""The centers of a run directory, read part by part and never held as a whole.

A run that begins from another one needs their identity, and its own part of them.
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
from streamkern.rundir.checkpoint_format import Saved
from streamkern.rundir.chunked_array import ChunkedArray
from streamkern.rundir.run_directory import RunDirectory


def center_digests(Z: HostArray) -> npt.NDArray[np.uint8]:
    """Return (p, 16) digests of centers, equal for rows that are equal bit by bit.

    Among a billion distinct rows two digests agree with a probability of about 1e-20. Z : (p, d),
    or such digests, which are returned.
    """
    if Z.dtype == np.uint8:
        return Z
    keys = (
        hashlib.blake2b(row, digest_size=CENTER_KEY).digest() for row in np.ascontiguousarray(Z)
    )
    return np.frombuffer(b"".join(keys), np.uint8).reshape(len(Z), CENTER_KEY)


class CentersSeen:
    """Target of the centers of a setup as they are loaded (`TargetFactory`); nothing else is read.

    shape, dtype : of all centers
    rows : the centers that are kept, (q, d)
    keys : `center_digests` of all centers, if requested
    """

    def __init__(self, rows: slice = slice(0, 0), *, keyed: bool = False) -> None:
        self._rows, self._keyed = rows, keyed
        self.shape: tuple[int, ...] = ()

    def __call__(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> ChunkedArray | None:
        """Return this object for the array Z, None for all other arrays."""
        if name != "Z":
            return None
        self.shape, self.dtype, self.ndim = shape, dtype, len(shape)
        kept = self._rows.stop - self._rows.start
        self.rows = np.empty((kept, *shape[1:]), dtype)
        self.keys = np.empty((shape[0] * self._keyed, CENTER_KEY), np.uint8)
        return self if kept or self._keyed else None

    def wants(self, part: slice) -> bool:
        """Return whether these rows have to be read."""
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
    """The centers of a run, in kept order.

    shape : (p, d)
    sha256 : digest of the entries of the centers' files in the manifest, which identifies them when
        all or a part of them are read
    opened : function that opens the run directory
    recorded : digest in the record of a run that took them over, in place of sha256; that run began
        from them in another directory
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sha256: str
    opened: Callable[[], RunDirectory]
    recorded: str | None = None

    @classmethod
    def of(cls, setup: Saved, seen: CentersSeen, opened: Callable[[], RunDirectory]) -> KeptCenters:
        """Return the centers of a setup as it was loaded."""
        return cls(seen.shape, seen.dtype, setup.checksums["Z"], opened)

    @classmethod
    def there(cls, opened: Callable[[], RunDirectory]) -> KeptCenters | None:
        """Return the centers of a run; None before its setup."""
        seen = CentersSeen()
        with opened() as run:
            setup = run.load_setup(seen)
        return None if setup is None else cls.of(setup, seen, opened)

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, rows: slice) -> HostArray:
        """Return some of the centers, (q, d), reading the chunks that hold them.

        Raises ConfigError if the run has other centers by now.
        """
        return self._read(CentersSeen(rows)).rows

    def keys(self) -> npt.NDArray[np.uint8]:
        """Return `center_digests` of all centers, reading a chunk at a time.

        Raises ConfigError if the run has other centers by now.
        """
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
