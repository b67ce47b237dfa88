"""The cipher Philox4x32-10, and its keys: the basis of `basics.randomness`.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np

# Constants of Philox4x32: multipliers, increments of the key words (Weyl sequence), rounds.
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
LOW_WORD_MASK = 0xFFFFFFFF  # low 32 of 64 bits


def philox_key(*parts: int) -> tuple[int, int]:
    """Hash integers, whose order matters, to two 32-bit key words."""
    text = ",".join(str(int(part)) for part in parts)
    digest = blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def round_keys(key: tuple[int, int]) -> np.ndarray:
    """Return the key words of each round: (10, 2) uint32."""
    rounds = np.arange(_ROUNDS, dtype=np.uint64)[:, None]
    schedule: np.ndarray = (np.array(key, np.uint64) + rounds * np.array(_WEYL, np.uint64)).astype(
        np.uint32
    )
    return schedule


def philox4x32(xp: Any, even: Any, odd: Any, key: tuple[int, int]) -> tuple[Any, Any]:
    """Encrypt counters (c0, c1, c2, c3) in place; ten rounds of

        (c0, c1, c2, c3) <- (hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0 c0))
        (k0, k1) <- (k0 + W0, k1 + W1)  mod 2^32

    where hi and lo are the halves of a 64-bit product; M and W are constants of the paper.

    Parameters
    ----------
    xp : numpy or cupy
    even, odd : (2, ...) uint64 holding 32-bit values, (c0, c2) and (c1, c3); both are overwritten
    key : (k0, k1)

    Returns
    -------
    (even, odd) : words (0, 2) and words (1, 3), (2, ...) uint64 holding 32-bit values
    """
    column = (2,) + (1,) * (even.ndim - 1)
    multipliers = xp.asarray(_MULTIPLIERS, dtype=np.uint64).reshape(column)
    keys = xp.asarray(round_keys(key), dtype=np.uint64).reshape((_ROUNDS, *column))
    low, shift = np.uint64(LOW_WORD_MASK), np.uint64(32)
    product = xp.empty_like(even)
    for r in range(_ROUNDS):
        xp.multiply(even, multipliers, out=product)
        crossed = product[::-1]
        xp.right_shift(crossed, shift, out=even)
        even ^= odd  # odd may have bits above 32, which the mask below clears
        even ^= keys[r]
        even &= low
        product, odd = odd, crossed
    odd &= low
    return even, odd
