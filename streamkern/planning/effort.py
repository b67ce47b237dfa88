"""What a run does, in the few kinds of work whose speeds differ, and how long that takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from streamkern.planning.problem import ProblemShape


@dataclass(frozen=True)
class OpCounts:
    """Leading terms, in the precision of the run where they are not wide.

    entries : of kernel matrices that are evaluated and multiplied with all outputs. kept : the
    same, where they are kept as well. swept : entries of matrices that are there, each multiplied
    with all outputs.
    products : FLOPs of products of large matrices. factors : of Cholesky factors and of inverses of
    triangles. eigen : of eigensystems. wide_products, wide_factors : the same in float64.
    calls : of the library, which take time however small the arrays are.
    """

    entries: float = 0
    kept: float = 0
    swept: float = 0
    products: float = 0
    factors: float = 0
    eigen: float = 0
    wide_products: float = 0
    wide_factors: float = 0
    calls: float = 0

    def __add__(self, other: OpCounts) -> OpCounts:
        return OpCounts(*(a + b for a, b in zip(self._amounts, other._amounts, strict=True)))

    def times(self, factor: float) -> OpCounts:
        """So often."""
        return OpCounts(*(factor * a for a in self._amounts))

    @property
    def _amounts(self) -> tuple[float, ...]:
        return tuple(getattr(self, name) for name in WORK_KINDS)

    def flops(self, problem: ProblemShape) -> int:
        """Of all kinds together."""
        evaluated, outputs = self.entries + self.kept, 2 * problem.c
        own = sum(self._amounts[3:-1])
        return int(2 * problem.d * evaluated + outputs * (evaluated + self.swept) + own)

    def seconds(self, each: OpCounts) -> float:
        """each : seconds of one of each kind."""
        return sum(a * b for a, b in zip(self._amounts, each._amounts, strict=True))


WORK_KINDS = tuple(field.name for field in fields(OpCounts))
NO_WORK = OpCounts()


def together(efforts: Iterable[OpCounts]) -> OpCounts:
    """Their sum."""
    return sum(efforts, NO_WORK)


@dataclass(frozen=True)
class Speeds:
    """Of a machine, for one run.

    compute : seconds of one of each kind. prepared : of a row, until a step takes it. read, busy :
    seconds that a thread reads a row, and of them those in which it computes. compiled : seconds
    until a kernel is evaluated for the first time in a process.
    """

    compute: OpCounts
    prepared: float
    read: float
    busy: float
    compiled: float

    def streaming(self, rows: float, computing: float, problem: ProblemShape) -> float:
        """Seconds of so many rows from the source, while steps take `computing`.

        Reading goes on beside the steps, whose threads it takes its own share of.
        """
        at_once = problem.readers or problem.threads
        beside = computing + rows * (self.prepared + self.busy / problem.threads)
        return max(beside, rows * self.read / at_once)

    def told(self) -> dict[str, Any]:
        """Units of each kind per second, of those that were measured."""
        found = {name: getattr(self.compute, name) for name in WORK_KINDS}
        found |= {"rows_prepared": self.prepared, "rows_read": self.read}
        return {name: 1 / seconds for name, seconds in found.items() if seconds}
