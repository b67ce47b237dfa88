"""A model of the time of one step of the block solver on W ranks.

    step = kernel / W + factors / W + sums + each + waiting

kernel : K(X, Z) for the rows of a rank, K u and K^T r; at least the time to read all centers Z,
    which every rank does
factors : H^T H g, with the rows of H divided among the ranks, and the work for a ridge
sums : all-reduces over the ranks: `latency`, and `transfer` of their numbers
each : work that every rank repeats: passes over p x c numbers, and calls of the array library
waiting : for the rank with the most rows of a batch, and for the slowest rank

Nothing is computed during an all-reduce. Reading is not modelled. docs/explanation/scaling.md
explains the symbols.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist

from streamkern.planning.op_counts import OpCounts
from tools.rank_times.hardware import Machine

SMALL_SUMS = 2
"""Number of small all-reduces in a step: of the losses, and of decisions such as to stop."""
TOUCHED = 16
"""Number of times that a step reads or writes each of the p x c weights on every rank: in the
updates of the blocks, in a copy with the sketches, and in the average."""


@dataclass(frozen=True)
class Step:
    """The work of one step of the block solver, summed over all ranks.

    rows : rows of a batch
    kernel : operations that are divided by the rows of the batch
    factors : operations that are divided by the rows of the factors H
    calls : calls of the array library by every rank
    weights : number of weights, p c
    n_sums : number of all-reduces of the weights of a block
    summed : total of the numbers in these all-reduces
    itemsize : bytes of a number
    points : bytes of all centers
    dealt : largest number of ranks among which whole units of a store are divided, so that the
        number of rows of a batch differs between ranks by chance
    """

    rows: int
    kernel: OpCounts
    factors: OpCounts
    calls: float
    weights: int
    n_sums: float
    summed: float
    itemsize: int
    points: int
    dealt: int = 0


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by its parts; see the module docstring."""

    kernel: float
    factors: float
    latency: float
    transfer: float
    each: float
    waiting: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of each part, by its name."""
        return dict(vars(self))

    @property
    def shares(self) -> dict[str, float]:
        """The share of each part in the step."""
        return {name: part / self.seconds for name, part in self.parts.items()}

    @property
    def bottleneck(self) -> str:
        """The name of the longest part."""
        return max(self.parts, key=self.parts.__getitem__)


def step_time(step: Step, machine: Machine, ranks: int) -> StepTime:
    """Return the seconds of a step on this many ranks."""
    kernel = max(step.kernel.seconds(machine.each) / ranks, step.points * machine.byte)
    factors = step.factors.seconds(machine.each) / ranks
    bytes_of_weights = step.weights * step.itemsize
    each = step.calls * machine.each.calls + TOUCHED * bytes_of_weights * machine.byte
    slowest = machine.skew * highest(ranks)
    network = machine.network
    return StepTime(
        kernel,
        factors,
        latency=(step.n_sums + SMALL_SUMS) * network.latency_s(ranks),
        transfer=network.transfer_s(ranks, step.summed * step.itemsize),
        each=each,
        waiting=kernel * _excess(step, ranks) + (kernel + factors) * slowest,
    )


def efficiency(step: Step, machine: Machine, ranks: int) -> float:
    """Return the time of a step on one rank, divided by `ranks` times its time on `ranks` ranks."""
    alone, shared = (step_time(step, machine, n).seconds for n in (1, ranks))
    return alone / (ranks * shared)


def highest(n: int) -> float:
    """Return the expected maximum of n standard normal numbers (Blom's approximation)."""
    return NormalDist().inv_cdf((n - 0.375) / (n + 0.25)) if n > 1 else 0.0


def _excess(step: Step, ranks: int) -> float:
    """Return the expected excess of the largest share of a batch over an equal share, relative.

    The number of rows of a rank is binomial if units are divided, otherwise all are equal.
    """
    if ranks > step.dealt:
        return 0.0
    return min(ranks - 1.0, math.sqrt(ranks / step.rows) * highest(ranks))


def doublings(most: int) -> Iterator[int]:
    """Yield 1, 2, 4, ..., and at last `most`."""
    n = 1
    while n < most:
        yield n
        n *= 2
    yield most
