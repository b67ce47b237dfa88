"""The random numbers of `basics.randomness` as loops for a compiler.

Words are the same as there, and normals are the same up to rounding. NumPy passes over memory once
per operation, about sixty times for normals. Compiled, a chunk of blocks stays in the L1 cache from
its counters to its normals. Nothing is compiled on import, because `fills` takes the compiler as
its argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from streamkern.backend.expression import once
from streamkern.basics.randomness import AnyArray, Fillers

NumbaFunction = Callable[..., Any]

# Number of Philox blocks in a chunk, whose words and normals take 8 KiB. Every loop with arithmetic
# runs over a whole chunk, including an unused end. Otherwise the scalar loop that compilers add
# after a vector loop would compute the last values; its rounding may differ, so that the numbers of
# a row would depend on its position.
DRAWN_CHUNK = 256

f4, i4, u4, u8 = np.float32, np.int32, np.uint32, np.uint64


@once
def fills(jit: Callable[[NumbaFunction], NumbaFunction]) -> Fillers:
    """Return functions for words and normals, each compiled by `jit` at its first call.

    They release the GIL. Normals are within 4 ulp of the exact values for their words.
    """
    count, encrypt, interleave = jit(_count), jit(_encrypt), jit(_interleave)
    box_muller = _make_box_muller(jit)

    def words(rows: AnyArray, round_keys: AnyArray, first_block: int, out: AnyArray) -> None:
        blocks = out.reshape(-1, 4)
        state = np.empty((4, DRAWN_CHUNK), u4)
        for start in range(0, len(blocks), DRAWN_CHUNK):
            count(rows, len(blocks) // len(rows), first_block, start, state)
            encrypt(state, round_keys)
            interleave(state, blocks[start : start + DRAWN_CHUNK])

    def normals(rows: AnyArray, round_keys: AnyArray, first_block: int, out: AnyArray) -> None:
        blocks = out.reshape(-1, 4)
        state = np.empty((4, DRAWN_CHUNK), u4)
        values = np.empty((4, DRAWN_CHUNK), f4)
        for start in range(0, len(blocks), DRAWN_CHUNK):
            count(rows, len(blocks) // len(rows), first_block, start, state)
            encrypt(state, round_keys)
            box_muller(state[0], state[1], values[0], values[1])
            box_muller(state[2], state[3], values[2], values[3])
            interleave(values, blocks[start : start + DRAWN_CHUNK])

    return Fillers(jit(words), jit(normals))


def _count(rows: AnyArray, n_blocks: int, first_block: int, start: int, state: AnyArray) -> None:
    """Set the counters (row low, row high, block, 0) of the chunk of blocks that begins at `start`.

    Blocks are counted over all rows, n_blocks for each. state : (4, DRAWN_CHUNK) uint32.
    """
    low, high, block, zero = state[0], state[1], state[2], state[3]
    i, b = start // n_blocks, start % n_blocks
    n_done = 0
    while n_done < DRAWN_CHUNK and i < len(rows):
        stop = min(n_done + n_blocks - b, DRAWN_CHUNK)
        row = rows[i]
        for j in range(n_done, stop):
            low[j] = u4(row)
            high[j] = u4(row >> 32)
            block[j] = u4(first_block + b + j - n_done)
        n_done, i, b = stop, i + 1, 0
    zero[:] = u4(0)


def _encrypt(state: AnyArray, round_keys: AnyArray) -> None:
    """Encrypt (4, DRAWN_CHUNK) uint32 by ten rounds, as in `philox.philox4x32`, in place."""
    m0, m1, low, half = u8(0xD2511F53), u8(0xCD9E8D57), u8(0xFFFFFFFF), u8(32)
    for j in range(DRAWN_CHUNK):
        c0, c1, c2, c3 = u8(state[0, j]), u8(state[1, j]), u8(state[2, j]), u8(state[3, j])
        for r in range(10):
            # Operands are 32-bit numbers in uint64, whose product is one instruction.
            k0, k1 = u8(round_keys[r, 0]), u8(round_keys[r, 1])
            p0, p1 = m0 * c0, m1 * c2
            c0, c1, c2, c3 = (p1 >> half) ^ c1 ^ k0, p1 & low, (p0 >> half) ^ c3 ^ k1, p0 & low
        state[0, j], state[1, j], state[2, j], state[3, j] = u4(c0), u4(c1), u4(c2), u4(c3)


def _interleave(planes: AnyArray, blocks: AnyArray) -> None:
    """Set blocks[j] = planes[:, j] for all of `blocks`, at most (DRAWN_CHUNK, 4)."""
    a, b, c, d, flat = planes[0], planes[1], planes[2], planes[3], blocks.reshape(-1)
    for j in range(len(blocks)):
        flat[4 * j], flat[4 * j + 1], flat[4 * j + 2], flat[4 * j + 3] = a[j], b[j], c[j], d[j]


def _make_box_muller(jit: Callable[[NumbaFunction], NumbaFunction]) -> NumbaFunction:
    """Compile words to normals: sqrt(-2 ln u) (cos 2πv, sin 2πv), u = (word div 2^8 + 1) / 2^24.

    Logarithm, sine and cosine by the polynomials of the Cephes library (S. Moshier, logf.c and
    sinf.c). The angle is reduced to an eighth of a turn in integers, without rounding.
    """
    # fmt: off
    log = tuple(f4(c) for c in (
        7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
        -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
    ))
    # fmt: on
    ln2_high, ln2_low = f4(0.693359375), f4(-2.12194440e-4)
    s2, s1, s0 = f4(-1.9515295891e-4), f4(8.3321608736e-3), f4(-1.6666654611e-1)
    c2, c1, c0 = f4(2.443315711809948e-5), f4(-1.388731625493765e-3), f4(4.166664568298827e-2)
    one, half, two, unit = f4(1), f4(0.5), f4(2), f4(2.0**-24)
    quarter_turn = f4(np.pi / 2 * 2.0**-22)

    @jit
    def minus_log(u: Any) -> Any:
        """Return -ln u; u = 2^e m with m in [sqrt(1/2), sqrt(2))."""
        bits = i4(f4(u).view(i4) - i4(0x3F3504F3))
        m = i4((bits & i4(0x7FFFFF)) + i4(0x3F3504F3)).view(f4)
        e, f = f4(i4(bits >> i4(23))), f4(m) - one
        p = log[0]
        for c in log[1:]:
            p = p * f + c
        return -(f + (p * f * f * f + ln2_low * e - half * f * f) + ln2_high * e)

    @jit
    def box_muller(
        radius_words: AnyArray, angle_words: AnyArray, z0: AnyArray, z1: AnyArray
    ) -> None:
        for j in range(DRAWN_CHUNK):
            u = f4(i4(i4(radius_words[j] >> u4(8)) + i4(1))) * unit
            radius = np.sqrt(two * minus_log(u))
            turn = i4(angle_words[j] >> u4(8))  # in units of 2^-24 of a turn
            quarter = i4((turn + i4(1 << 21)) >> i4(22))
            x = f4(i4(turn - i4(quarter << i4(22)))) * quarter_turn
            t = x * x
            sine = ((s2 * t + s1) * t + s0) * t * x + x
            cosine = ((c2 * t + c1) * t + c0) * t * t - half * t + one
            swap = (quarter & i4(1)) != i4(0)
            a, b = (sine, cosine) if swap else (cosine, sine)
            z0[j] = radius * (-a if ((quarter + i4(1)) & i4(2)) != i4(0) else a)
            z1[j] = radius * (-b if (quarter & i4(2)) != i4(0) else b)

    return box_muller
