"""Hash the contents of each row to one number."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

_MIX = np.uint64(0xBF58476D1CE4E5B9)
"""The multiplier of the mixing function of SplitMix64 (Steele et al. 2014)."""


def row_hashes(X: npt.NDArray[np.number]) -> npt.NDArray[np.uint64]:
    """Return a hash for each row: equal for equal rows, and different for others but by chance.

    The chance is 2^-64 for each pair of rows that were not chosen to collide. -0.0 equals 0.0.

    Parameters
    ----------
    X : (k, ...) finite numbers, all of which are hashed.

    Returns
    -------
    (k,) uint64
    """
    words = _words(X.reshape(len(X), math.prod(X.shape[1:])) + X.dtype.type(0))
    odd = np.random.default_rng(0).integers(1 << 63, size=words.shape[1], dtype=np.uint64) * 2 + 1
    # Numbers such as 1.0 differ in few high bits, which a product alone would shift out.
    words ^= words >> np.uint64(32)
    words *= _MIX
    words ^= words >> np.uint64(29)
    hashes: npt.NDArray[np.uint64] = words @ odd.astype(np.uint64)
    return hashes


def _words(X: npt.NDArray[np.number]) -> npt.NDArray[np.uint64]:
    """Return the bytes of rows (k, d) as (k, ceil(bytes / 8)) words, the last filled with zeros."""
    data = np.ascontiguousarray(X).view(np.uint8).reshape(len(X), X.shape[1] * X.itemsize)
    spare = -data.shape[1] % 8
    if spare:
        data = np.pad(data, ((0, 0), (0, spare)))
    return data.view(np.uint64)
