"""The order of the rows in an epoch: a function of (seed, epoch), without I/O or arrays of n rows.

A source is read in units (chunks, usually). One epoch visits them in a random order; `mix_units`
consecutive units make a shuffle block, whose rows are put into a random order; batches are
consecutive runs of rows through the blocks and may straddle their edges.

    units    u₀ u₁ u₂ | u₃ u₄ u₅ | u₆         permuted by (seed, epoch)
    blocks   ~~ 0 ~~~ | ~~ 1 ~~~ | 2          rows permuted by (seed, epoch, block)
    batches  [  0  ][  1  ][  2  ][ 3 ]

Units of a mixture come from several strata. A block holds few units, so in a random order the
shares of the strata in a batch would fluctuate as in a sorted store. The strata are interleaved
evenly instead.

Planning an epoch costs O(units log units) time and O(units) memory. The state of an iteration is
(epoch, batch); a resumed iteration computes the same plan and skips the batches before.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.randomness import Stage

_SLAB_ROWS = 1 << 16
PLAN_VERSION = 1  # part of a run's order; increase it whenever the same seed gives other batches


class BlockSlice(NamedTuple):
    """Rows [start, stop) of a shuffled block."""

    block: int
    start: int
    stop: int


class EpochPlan:
    """The assignment of rows to the batches of one epoch.

    Parameters
    ----------
    sizes : (n_units,) int64 rows in each unit, from `unit_sizes`
    seed, epoch : the keys of the random order, whole numbers of at least 0
    batch_size : rows in every batch except the last
    mix_units : units per shuffle block
    strata : (n_units,) integers, the stratum of each unit, or None. Any m consecutive units then
        hold m · share units of a stratum, to within 1 + share · n_strata, where share is the share
        of the stratum in all units.
    in_order : keep units and rows in their order; `strata` are then ignored

    Raises ConfigError for a value out of range, a source without rows, or a wrong number of strata.
    """

    def __init__(
        self,
        sizes: np.ndarray,
        *,
        seed: int,
        epoch: int,
        batch_size: int,
        mix_units: int,
        strata: np.ndarray | None = None,
        in_order: bool = False,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("mix_units", mix_units)):
            if value < 1:
                raise ConfigError(f"{mention(name, value)} must be at least 1", "raise it")
        if seed < 0 or epoch < 0:
            raise ConfigError(
                f"{mention('seed', seed)} and epoch={epoch} must be at least 0",
                "give whole numbers, 0 or above",
            )
        if sizes.sum() < 1:
            raise ConfigError("the source has no rows", "give a source with rows")
        if strata is not None and len(strata) != len(sizes):
            raise ConfigError(
                f"strata has {len(strata)} entries for {len(sizes)} units",
                "give one entry for each unit",
            )
        self.seed, self.epoch = seed, epoch
        self.batch_size, self.mix_units = batch_size, mix_units
        self._in_order = in_order
        rng = np.random.default_rng([seed, epoch, Stage.UNITS])
        self._units = np.arange(len(sizes)) if in_order else _unit_order(len(sizes), strata, rng)
        self._sizes = sizes[self._units]  # in the order of the epoch
        block_rows = np.add.reduceat(self._sizes, np.arange(0, len(sizes), mix_units))
        self._edges = np.concatenate(([0], np.cumsum(block_rows)))  # first position of each block
        self.n_rows = int(self._edges[-1])
        self.n_blocks = len(block_rows)
        self.n_batches = -(-self.n_rows // batch_size)

    def block_units(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the units of block k in reading order, (u,), and their edges in it, (u + 1,)."""
        part = slice(k * self.mix_units, (k + 1) * self.mix_units)
        return self._units[part], np.concatenate(([0], np.cumsum(self._sizes[part])))

    def block_rows(self, k: int) -> int:
        """Return the number of rows in block k."""
        return int(self._edges[k + 1] - self._edges[k])

    def shuffle(self, k: int, out: np.ndarray) -> None:
        """Fill ``out[r]`` with the position in the shuffled block of the r-th row in reading order.

        out : (block_rows(k),) int64
        """
        for start in range(0, len(out), _SLAB_ROWS):  # a whole arange would double the memory
            out[start : start + _SLAB_ROWS] = np.arange(start, min(start + _SLAB_ROWS, len(out)))
        if not self._in_order:
            np.random.default_rng([self.seed, self.epoch, Stage.ROWS, k]).shuffle(out)

    def batch(self, i: int) -> list[BlockSlice]:
        """Return the pieces of batch i, in order; several if the batch straddles block edges."""
        if not 0 <= i < self.n_batches:
            raise ConfigError(f"batch {i} does not exist", f"give 0 to {self.n_batches - 1}")
        start = i * self.batch_size
        stop = min(start + self.batch_size, self.n_rows)
        pieces = []
        k = int(np.searchsorted(self._edges, start, side="right")) - 1
        while start < stop:
            block_start, block_stop = self._edges[k : k + 2].tolist()
            piece_stop = min(stop, block_stop)
            pieces.append(BlockSlice(k, start - block_start, piece_stop - block_start))
            start, k = piece_stop, k + 1
        return pieces


def _unit_order(n_units: int, strata: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
    """Return a random order of the units in which every stratum is spread evenly: (n_units,) int64.

    Unit i of the k units of a stratum, in random order, gets the position (i + u) / k in the epoch,
    where u is one uniform draw per stratum. Without strata, the order is a random permutation.
    """
    units = rng.permutation(n_units)
    if strata is None:
        return units
    units = units[np.argsort(strata[units], kind="stable")]  # random order within a stratum
    counts = np.unique(strata, return_counts=True)[1]
    stratum_units = np.repeat(counts, counts)
    index_in_stratum = np.arange(n_units) - np.repeat(np.cumsum(counts) - counts, counts)
    position = (index_in_stratum + np.repeat(rng.random(len(counts)), counts)) / stratum_units
    order: np.ndarray = units[np.argsort(position, kind="stable")]
    return order
