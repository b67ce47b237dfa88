"""Random numbers that are a pure function of (seed, epoch, stage, row): Philox4x32-10.

A counter-based generator (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy
as 1, 2, 3", SC 2011) has no state: word w of row r is a function of the key, r and w. Threads, any
grouping of rows into batches, and resumed runs therefore produce the same numbers.

    key      64 bits hashed from (seed, epoch, stage...), so that stages have different keys
    counter  (row mod 2^32, row div 2^32, block, 0); a block gives words 4·block … 4·block + 3
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.philox import LOW_WORD_MASK, philox4x32, philox_key, round_keys

AnyArray = Any  # numpy.ndarray or cupy.ndarray
RunSlices = Callable[[Callable[[slice], None], Iterable[slice]], None]
Empty = Callable[[tuple[int, ...], Any], AnyArray]

# Counters per tile on the host. Ten uint64 temporaries of 2 x 16 384 fit into an L2 cache of 2 MB;
# in much smaller tiles, the call overhead of 60 ufuncs dominates.
_HOST_TILE = 16_384
DEVICE_TILE = 1 << 22  # counters per tile on a device
COUNTER_BYTES = 72
"""Largest number of bytes per counter of a tile while numbers are drawn: three pairs of 64-bit
words in the rounds; for normals, two pairs and copies of one in three widths."""


def call_each(function: Callable[[slice], None], parts: Iterable[slice]) -> None:
    """Call `function` on every part, on this thread; a `RunSlices`."""
    for part in parts:
        function(part)


class Fillers(NamedTuple):
    """Compiled functions that fill an array `out`; the last two may be None.

    The first three are functions (rows, round_keys, first_block, out) for a tile of rows, where

    rows : (k,) int64
    round_keys : (10, 2) uint32
    first_block : the first of n_blocks blocks of each row
    out : (k, 4 · n_blocks), C-ordered

    The fields are:

    words : writes the words of `philox4x32` into uint32 `out`
    normals : writes the numbers z of `RowRandom.normal`, up to rounding, into float32 `out`
    noise : writes X + sigma z; it also has the arguments X, of the shape and dtype of `out`, and
        sigma
    standardise : function (X, mean, scale, out) that writes (X - mean) / scale, computed in float64
        and rounded once, into float32 or float64 `out`. X, mean and scale broadcast to the shape of
        `out`; mean and scale are float64, on the host or on the device
    """

    words: Callable[..., None]
    normals: Callable[..., None]
    noise: Callable[..., None] | None = None
    standardise: Callable[..., None] | None = None


class Stage(IntEnum):
    """Purpose of a draw; part of every key, so that no two purposes share numbers."""

    UNITS = 1
    ROWS = 2
    HOST_TRANSFORM = 3
    FEED_TRANSFORM = 4
    SAMPLE = 5
    VALIDATION = 6
    CALIBRATION = 7


def _by_tiles(
    xp: Any, run: RunSlices, fill: Callable[[slice, AnyArray], None], out: AnyArray, per_block: int
) -> None:
    """Fill `out`, (k, n), with tiles of rows.

    run : calls a function for each slice of the rows
    fill : writes all blocks of a slice of the rows into an array (rows, n_blocks · per_block)
    per_block : numbers that a block gives; if n is not a multiple, the last ones are dropped
    """
    k, n = out.shape
    n_blocks = -(-n // per_block)

    def fill_part(part: slice) -> None:
        if n == n_blocks * per_block:
            fill(part, out[part])
        else:
            tile = xp.empty((part.stop - part.start, n_blocks * per_block), out.dtype)
            fill(part, tile)
            out[part] = tile[:, :n]

    if n:
        step = max(1, (_HOST_TILE if xp is np else DEVICE_TILE) // n_blocks)
        run(fill_part, [slice(i, min(i + step, k)) for i in range(0, k, step)])


def _cipher(
    xp: Any, key: tuple[int, int], rows: AnyArray, first_block: int, n_blocks: int
) -> tuple[AnyArray, AnyArray]:
    """Return words (0, 2) and words (1, 3) of each block: two (2, k, n_blocks) uint64."""
    even = xp.empty((2, len(rows), n_blocks), dtype=np.uint64)
    odd = xp.empty_like(even)
    ids = rows.astype(np.uint64)[:, None]
    even[0] = ids & np.uint64(LOW_WORD_MASK)
    even[1] = xp.arange(first_block, first_block + n_blocks, dtype=np.uint64)
    odd[0], odd[1] = ids >> np.uint64(32), 0
    return philox4x32(xp, even, odd, key)


def words(
    key: Sequence[int],
    rows: AnyArray,
    n_words: int,
    *,
    first_block: int = 0,
    xp: Any = np,
    run: RunSlices = call_each,
    fills: Fillers | None = None,
) -> AnyArray:
    """Return 32 random bits for each row and word index.

    Parameters
    ----------
    key : integers, usually (seed, epoch, stage)
    rows : (k,) int64, any order, repeats allowed
    first_block : the words start at word index 4 · first_block
    xp : numpy or cupy
    run : calls a function for each slice of the rows; `Backend.run` does so on several threads
    fills : compiled functions, which give the same words

    Returns
    -------
    (k, n_words) uint32; entry [i, w] depends on key, rows[i] and 4 · first_block + w alone.
    """
    out = xp.empty((len(rows), n_words), dtype=np.uint32)
    hashed = philox_key(*key)
    keys = round_keys(hashed)

    def fill(part: slice, tile: AnyArray) -> None:
        if fills is not None:
            fills.words(rows[part], keys, first_block, tile)
            return
        blocks = tile.reshape(len(tile), -1, 4)
        even, odd = _cipher(xp, hashed, rows[part], first_block, blocks.shape[1])
        blocks[..., 0], blocks[..., 2] = even[0], even[1]
        blocks[..., 1], blocks[..., 3] = odd[0], odd[1]

    _by_tiles(xp, run, fill, out, per_block=4)
    return out


class RowRandom:
    """Random numbers for functions that generate or transform rows.

    The numbers of row i depend on (seed, epoch, stage), ``rows[i]`` and the number of words drawn
    before, not on the other rows: blocks of any size, threads and resumed runs get the same ones.
    Each call draws new numbers. Results are arrays of `xp` with a first axis of k rows.

    Parameters
    ----------
    xp : numpy, or cupy for results on the GPU
    seed, epoch : integers, as a generator receives them; another seed or epoch gives other numbers
    stage : any integer, or a tuple of integers; functions with different stages get independent
        numbers for the same rows
    rows : (k,) int64 row numbers, on the host or on the device; for a generator, from its `start`
        to its `stop`
    dtype : dtype of `uniform` and `normal`: float32 (uniforms of 24 bits) or float64 (53 bits)
    run : calls a function for each slice of the rows, on threads or one after the other
    fills : compiled functions that give the same words, and the same normals up to rounding
    empty : (shape, dtype) -> array, allocates the results of `normal` and of transforms, so that
        arrays can be reused for the next batch

    Raises
    ------
    ConfigError
        dtype is neither float32 nor float64.

    Examples
    --------
    >>> rng = RowRandom(np, seed=0, epoch=0, stage=0, rows=np.arange(5, 8))
    >>> rng.normal((2,)).shape, rng.integers(0, 10).shape
    ((3, 2), (3,))
    """

    def __init__(
        self,
        xp: Any,
        seed: int,
        epoch: int,
        stage: int | tuple[int, ...],
        rows: AnyArray,
        dtype: Any = np.float32,
        *,
        run: RunSlices = call_each,
        fills: Fillers | None = None,
        empty: Empty | None = None,
    ) -> None:
        self.xp = xp
        self.empty: Empty = empty or xp.empty
        self.run, self.fills = run, fills
        self.rows = xp.asarray(rows)
        self.dtype = np.dtype(dtype)
        if self.dtype not in (np.float32, np.float64):
            raise ConfigError(
                f"{mention('dtype', self.dtype)} is no dtype of random numbers",
                "use float32 or float64",
            )
        stages = stage if isinstance(stage, tuple) else (stage,)
        self._key = (seed, epoch, *stages)
        self._next_block = 0

    def uniform(self, shape: tuple[int, ...] = ()) -> AnyArray:
        """Draw uniform numbers on [0, 1).

        Returns
        -------
        u : (k, *shape) in the dtype of this object, multiples of 2^-24 (float32) or 2^-53 (float64)
        """
        n = math.prod(shape)
        if self.dtype == np.float32:
            unit = _unit24(self._words(n))
        else:
            pairs = self._words(2 * n).astype(np.uint64)
            unit = _unit53(pairs[:, 0::2], pairs[:, 1::2])
        return unit.reshape(len(self.rows), *shape)

    def normal(self, shape: tuple[int, ...] = ()) -> AnyArray:
        """Draw normal numbers with mean 0 and standard deviation 1, by Box and Muller.

        (z0, z1) = sqrt(-2 ln u) (cos 2πv, sin 2πv), u in (0, 1], v in [0, 1).

        Returns
        -------
        z : (k, *shape) in the dtype of this object; abs(z) is at most 5.8 in float32, and 8.6 in
            float64
        """
        n = math.prod(shape)
        per_block = 4 if self.dtype == np.float32 else 2
        out = self.empty((len(self.rows), n), self.dtype)
        hashed, first_block = philox_key(*self._key), self._next_block
        keys = round_keys(hashed)

        def fill(part: slice, tile: AnyArray) -> None:
            if self.fills is not None and self.dtype == np.float32:
                self.fills.normals(self.rows[part], keys, first_block, tile)
                return
            n_blocks = tile.shape[1] // per_block
            self._box_muller(
                *_cipher(self.xp, hashed, self.rows[part], first_block, n_blocks), tile
            )

        _by_tiles(self.xp, self.run, fill, out, per_block)
        self._next_block += -(-n // per_block)
        return out.reshape(len(self.rows), *shape)

    def noisy(self, X: AnyArray, sigma: float) -> AnyArray:
        """Return X + sigma z for the numbers z that `normal` would draw.

        X : (k, *shape) in the dtype of this object
        """
        k, n = len(X), math.prod(X.shape[1:])
        noise = None if self.fills is None else self.fills.noise
        if noise is None or self.dtype != np.float32 or n % 4:
            noisy = self.normal(X.shape[1:])
            noisy *= noisy.dtype.type(sigma)
            noisy += X
            return noisy
        out, flat = self.empty((k, n), self.dtype), X.reshape(k, n)
        keys, first_block = round_keys(philox_key(*self._key)), self._next_block

        def fill(part: slice, tile: AnyArray) -> None:
            noise(self.rows[part], keys, first_block, tile, flat[part], sigma)

        _by_tiles(self.xp, self.run, fill, out, per_block=4)
        self._next_block += n // 4
        return out.reshape(X.shape)

    def integers(self, low: int, high: int, shape: tuple[int, ...] = ()) -> AnyArray:
        """Draw integers from low to high - 1, by multiplication of a 32-bit word and a shift.

        The probability of a value differs from 1 / (high - low) by at most 2^-32.

        Returns
        -------
        i : (k, *shape) int64

        Raises
        ------
        ConfigError
            high - low is not from 1 to 2^32.
        """
        span = high - low
        if not 1 <= span <= 1 << 32:
            raise ConfigError(
                f"integers({low}, {high}) spans {span} values",
                "choose low and high so that they span 1 to 2**32 values",
            )
        scaled = self._words(math.prod(shape)).astype(np.uint64)
        scaled *= np.uint64(span)
        scaled >>= np.uint64(32)
        values = scaled.astype(np.int64)
        values += low
        return values.reshape(len(self.rows), *shape)

    def permutation(self) -> AnyArray:
        """Draw a random order of the k rows, all orders equally likely.

        It sorts one 64-bit word per row. This is the only draw that depends on the other rows of
        the batch, so a generator, whose row i must be the same in any block, must not use it.

        Returns
        -------
        order : (k,) int64 positions from 0 to k - 1
        """
        pair = self._words(2).astype(np.uint64)
        return self.xp.argsort((pair[:, 0] << np.uint64(32)) | pair[:, 1], kind="stable")

    def _words(self, n_words: int) -> AnyArray:
        """Draw (k, n_words) uint32 from the next blocks."""
        first = self._next_block
        self._next_block += -(-n_words // 4)
        return words(
            self._key,
            self.rows,
            n_words,
            first_block=first,
            xp=self.xp,
            run=self.run,
            fills=self.fills,
        )

    def _box_muller(self, even: AnyArray, odd: AnyArray, out: AnyArray) -> None:
        """Convert pairs of uniform numbers to pairs of normal ones, and write them to `out`.

        even, odd : words (0, 2) and words (1, 3) of the blocks, (2, k, n_blocks); overwritten
        out : (k, 4 · n_blocks) float32 or (k, 2 · n_blocks) float64
        """
        xp = self.xp
        if self.dtype == np.float32:  # a uniform takes one word: two pairs per block
            radius, angle = _unit24(even), _unit24(odd)
            radius += np.float32(2.0**-24)  # is exact, and avoids the logarithm of 0
        else:  # a uniform takes two words: one pair per block
            radius, angle = _unit53(even[:1], odd[:1]), _unit53(even[1:], odd[1:])
            radius += 2.0**-53
        xp.log(radius, out=radius)
        radius *= self.dtype.type(-2)
        xp.sqrt(radius, out=radius)
        angle *= self.dtype.type(2 * math.pi)
        pairs = out.reshape(*even.shape[1:], len(radius), 2)
        for half in range(len(radius)):
            xp.multiply(radius[half], xp.cos(angle[half]), out=pairs[..., half, 0])
            xp.multiply(radius[half], xp.sin(angle[half]), out=pairs[..., half, 1])


def _unit24(bits: AnyArray) -> AnyArray:
    """Return the top 24 of 32 bits as float32 in [0, 1)."""
    # A conversion from int32 is several times as fast as one from uint64.
    unit = (bits >> bits.dtype.type(8)).astype(np.int32).astype(np.float32)
    unit *= np.float32(2.0**-24)
    return unit


def _unit53(high: AnyArray, low: AnyArray) -> AnyArray:
    """Return the top 53 of the 64 bits (high, low) as float64 in [0, 1)."""
    bits = (high << np.uint64(21)) | (low >> np.uint64(11))
    unit = bits.astype(np.float64)
    unit *= 2.0**-53
    return unit
