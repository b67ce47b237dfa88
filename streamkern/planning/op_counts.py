"""Operation counts of a run, by kinds of work whose speeds differ, and the time they take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from streamkern.planning.problem import ProblemShape


@dataclass(frozen=True)
class OpCounts:
    """Leading terms of the work, in the precision of the run unless the name begins with `wide`.

    entries : kernel values that are evaluated and multiplied by the weights of all outputs.
    kept : kernel values that are evaluated, multiplied and also stored.
    swept : stored kernel values, each multiplied by the weights of all outputs.
    products : FLOPs of products of large matrices.
    factors : FLOPs of Cholesky factors and of inverses of triangles.
    eigen : FLOPs of eigendecompositions.
    wide_products, wide_factors : as `products` and `factors`, in float64.
    calls : library calls, which take time however small the arrays are.
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

    def scaled(self, factor: float) -> OpCounts:
        """Return all counts multiplied by a factor."""
        return OpCounts(*(factor * a for a in self._amounts))

    @property
    def _amounts(self) -> tuple[float, ...]:
        return tuple(getattr(self, name) for name in WORK_KINDS)

    def flops(self, problem: ProblemShape) -> int:
        """Return the FLOPs of all kinds together."""
        evaluated, outputs = self.entries + self.kept, 2 * problem.c
        own = sum(self._amounts[3:-1])
        return int(2 * problem.d * evaluated + outputs * (evaluated + self.swept) + own)

    def seconds(self, each: OpCounts) -> float:
        """Return the seconds of all operations. each : seconds of one operation of each kind."""
        return sum(a * b for a, b in zip(self._amounts, each._amounts, strict=True))


WORK_KINDS = tuple(field.name for field in fields(OpCounts))
NO_WORK = OpCounts()


def together(counts: Iterable[OpCounts]) -> OpCounts:
    """Return the sum of several operation counts."""
    return sum(counts, NO_WORK)


@dataclass(frozen=True)
class Speeds:
    """Speeds of a machine, for one run.

    compute : seconds of one operation of each kind.
    prepared : seconds to prepare a row for a step.
    read, busy : seconds in which a thread reads a row, and the part of them in which it computes.
    compiled : seconds until a kernel is evaluated for the first time in a process.
    """

    compute: OpCounts
    prepared: float
    read: float
    busy: float
    compiled: float

    def streaming(self, rows: float, computing: float, problem: ProblemShape) -> float:
        """Return the seconds of streaming `rows` rows while the steps take `computing` seconds.

        Reading overlaps the steps, and shares their threads.
        """
        at_once = problem.readers or problem.threads
        beside = computing + rows * (self.prepared + self.busy / problem.threads)
        return max(beside, rows * self.read / at_once)

    def as_rates(self) -> dict[str, Any]:
        """Return the operations, or rows, per second of each kind whose speed was measured."""
        found = {name: getattr(self.compute, name) for name in WORK_KINDS}
        found |= {"rows_prepared": self.prepared, "rows_read": self.read}
        return {name: 1 / seconds for name, seconds in found.items() if seconds}
