"""Centers that stay in a run directory, and are read in part.

A run that starts from another run needs the identity of its centers, and each rank its own part.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.array_types import HostArray
from streamkern.basics.errors import ConfigError
from streamkern.planning.memory import CENTER_DIGEST_BYTES
from streamkern.rundir.chunked_array import ChunkedArray
from streamkern.rundir.run_directory import RunDirectory


def center_digests(Z: HostArray, dtype: np.dtype[Any] | None = None) -> npt.NDArray[np.uint8]:
    """Return digests (p, 16) of the rows of Z (p, d), which are equal for bit-identical rows.

    Among a billion distinct rows, two digests agree with a probability of about 1e-20.

    dtype : dtype to which the rows are rounded first; None to keep theirs
    """
    digests = (
        hashlib.blake2b(row, digest_size=CENTER_DIGEST_BYTES).digest()
        for row in np.ascontiguousarray(Z, dtype)
    )
    return np.frombuffer(b"".join(digests), np.uint8).reshape(len(Z), CENTER_DIGEST_BYTES)


class CentersTarget:
    """Target for loading a setup (`TargetFactory`) that reads the centers only.

    Parameters
    ----------
    rows : the q centers to read
    digest_dtype : dtype in which digests of all centers are computed; None to compute none

    Attributes
    ----------
    shape, dtype : shape (p, d) and dtype of all centers, once the setup is loaded
    rows : (q, d), the centers that were read
    digests : (p, 16) `center_digests` of all centers, or empty
    """

    def __init__(
        self, rows: slice = slice(0, 0), *, digest_dtype: np.dtype[Any] | None = None
    ) -> None:
        self._rows, self._digest_dtype = rows, digest_dtype
        self.shape: tuple[int, ...] = ()

    def __call__(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> ChunkedArray | None:
        """Return this object for the array Z, None for all other arrays."""
        if name != "Z":
            return None
        self.shape, self.dtype, self.ndim = shape, dtype, len(shape)
        n_rows = self._rows.stop - self._rows.start
        self.rows = np.empty((n_rows, *shape[1:]), dtype)
        self.digests = np.empty(
            (shape[0] * (self._digest_dtype is not None), CENTER_DIGEST_BYTES), np.uint8
        )
        return self if n_rows or self._digest_dtype is not None else None

    def needs(self, part: slice) -> bool:
        """Return whether these rows have to be read."""
        first, stop = self._overlap(part)
        return self._digest_dtype is not None or first < stop

    def _overlap(self, part: slice) -> tuple[int, int]:
        return max(part.start, self._rows.start), min(part.stop, self._rows.stop)

    def __getitem__(self, part: Any) -> Any:
        raise KeyError(part)

    def __setitem__(self, part: Any, host: Any) -> None:
        first, stop = self._overlap(part)
        if first < stop:
            start = self._rows.start
            self.rows[first - start : stop - start] = host[first - part.start : stop - part.start]
        if self._digest_dtype is not None:
            digests = center_digests(host, self._digest_dtype)
            self.digests[part.start : part.start + len(host)] = digests


@dataclass(frozen=True, eq=False)
class StoredCenters:
    """The centers of a run, in storage order, which stay in the run directory.

    location, storage_options : run directory
    shape, dtype : shape (p, d) and dtype of all centers
    sha256 : digest of the entries of the centers' files in the manifest, which identifies them
    recorded_sha256 : digest in the record of this run if it took the centers over from a parent
        run; the record has the digest of the files in the parent's directory
    """

    location: str | os.PathLike[str]
    storage_options: Mapping[str, Any] | None = field(repr=False)
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sha256: str
    recorded_sha256: str | None = None

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, rows: slice) -> HostArray:
        """Return some of the centers, (q, d), reading only the chunks that hold them.

        Raises ConfigError if the run has other centers now.
        """
        return self._read(CentersTarget(rows)).rows

    def digests(self, dtype: np.dtype[Any] | None = None) -> npt.NDArray[np.uint8]:
        """Return `center_digests` of all centers, reading one chunk at a time.

        Raises ConfigError if the run has other centers now.
        """
        digest_dtype = self.dtype if dtype is None else dtype
        return self._read(CentersTarget(digest_dtype=digest_dtype)).digests

    def _read(self, target: CentersTarget) -> CentersTarget:
        """Load the setup with a target; raise ConfigError if its centers have changed."""
        run = RunDirectory(self.location, writable=False, storage_options=self.storage_options)
        with run:
            setup = run.load_setup(target)
        if setup is None or setup.checksums["Z"] != self.sha256:
            raise ConfigError(
                f"{run.location} has other centers than when this run was started from it",
                "start again in another run_dir",
            )
        return target
