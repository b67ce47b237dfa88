"""How long a step of the block solver takes on W ranks that share it. Pure numbers.

    step = kernel / W + factors / W + sums + each + waiting

kernel : K(X, Z) of a rank's rows, K u and K^T r; no less than reading all of Z, which every rank
does. factors : H^T H g by stripes of H, and what a ridge takes. sums : a latency for each, and the
transfer of their numbers. each : what every rank does, vectors of p x c and calls of the library.
waiting : for the rank with the most rows, and for the slowest. No sum goes on beside other work.

Reading is not in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist

from streamkern.planning.op_counts import OpCounts
from tools.rank_times.hardware import Machine

SMALL_SUMS = 2
"""Of a step: the losses, and what ranks agree on."""
TOUCHED = 16
"""How often a step reads or writes each of the p x c weights on every rank: the steps of blocks, a
copy beside the sketches, the average."""


@dataclass(frozen=True)
class Step:
    """One of the block solver, of all ranks together.

    rows : of a batch. kernel : work that is shared out by rows. factors : by stripes. calls : of
    the library, of every rank. weights : p c. n_sums, summed : sums of a block's weights, and
    numbers in them. itemsize : bytes of a number. points : bytes of all centers. dealt : up to so
    many ranks it is by chance how many rows of a batch each has, because units of a store are
    shared out.
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
    """Seconds of a step by what they go to."""

    kernel: float
    factors: float
    latency: float
    transfer: float
    each: float
    waiting: float

    @property
    def seconds(self) -> float:
        """Of all of it."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """By name."""
        return dict(vars(self))

    @property
    def shares(self) -> dict[str, float]:
        """Of each part in the whole."""
        return {name: part / self.seconds for name, part in self.parts.items()}

    @property
    def bottleneck(self) -> str:
        """What takes the most."""
        return max(self.parts, key=self.parts.__getitem__)


def step_time(step: Step, machine: Machine, ranks: int) -> StepTime:
    """Of `ranks` ranks."""
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
    """One rank's time over the time of all of these, added up."""
    alone, shared = (step_time(step, machine, n).seconds for n in (1, ranks))
    return alone / (ranks * shared)


def highest(n: int) -> float:
    """The largest of n normal deviates, in the mean (Blom's approximation)."""
    return NormalDist().inv_cdf((n - 0.375) / (n + 0.25)) if n > 1 else 0.0


def _excess(step: Step, ranks: int) -> float:
    """Of the largest share of a batch over an equal one: binomial, where units are dealt."""
    if ranks > step.dealt:
        return 0.0
    return min(ranks - 1.0, math.sqrt(ranks / step.rows) * highest(ranks))


def doublings(most: int) -> Iterator[int]:
    """1, 2, 4, ... and `most`."""
    n = 1
    while n < most:
        yield n
        n *= 2
    yield most
