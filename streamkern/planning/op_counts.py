"""Operation counts of a run by kind of work, and the time that they take on a machine."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from streamkern.planning.problem import ProblemShape


@dataclass(frozen=True)
class OpCounts:
    """Operation counts by kind of work; each kind runs at its own speed.

    Only leading terms are counted. Operations are in the precision of the run, except those whose
    name begins with `wide`.

    entries : kernel values that are evaluated, and multiplied by the weights of all outputs.
    kept : kernel values that are evaluated, multiplied in the same way, and stored.
    swept : kernel values that are read from memory, and multiplied by the weights of all outputs.
    products : FLOPs of products of large matrices.
    factors : FLOPs of Cholesky factorisations and of inverses of triangular matrices.
    eigen : FLOPs of eigendecompositions.
    wide_products, wide_factors : as `products` and `factors`, in float64.
    calls : library calls, whose overhead does not depend on the size of the arrays.
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
        """The counts in the order of `WORK_KINDS`."""
        return tuple(getattr(self, name) for name in WORK_KINDS)

    def flops(self, problem: ProblemShape) -> int:
        """Return the total FLOPs. problem : determines the FLOPs of a kernel value"""
        evaluated, per_value = self.entries + self.kept, 2 * problem.c
        linear_algebra = sum(self._amounts[3:-1])  # products ... wide_factors
        products = per_value * (evaluated + self.swept)
        return int(2 * problem.d * evaluated + products + linear_algebra)

    def seconds(self, costs: OpCounts) -> float:
        """Return the seconds that all operations take.

        costs : seconds per operation, by kind.
        """
        return sum(a * b for a, b in zip(self._amounts, costs._amounts, strict=True))


WORK_KINDS = tuple(field.name for field in fields(OpCounts))
NO_WORK = OpCounts()


@dataclass(frozen=True)
class Speeds:
    """Times that the operations of one run take on a machine, in seconds.

    compute : seconds per operation, by kind.
    prepared : seconds to prepare a row for a step.
    read : seconds that one thread takes to read a row.
    busy : part of `read` that is processor time of the thread.
    compiled : seconds to compile a kernel, at its first evaluation in a process.
    """

    compute: OpCounts
    prepared: float
    read: float
    busy: float
    compiled: float

    def streaming(self, rows: float, compute_s: float, problem: ProblemShape) -> float:
        """Return the seconds to read rows and take steps on them, which overlap.

        rows : number of rows.
        compute_s : seconds of the steps alone.
        problem : numbers of threads and of readers.
        """
        readers = problem.readers or problem.threads
        processor_s = compute_s + rows * (self.prepared + self.busy / problem.threads)
        return max(processor_s, rows * self.read / readers)

    def as_rates(self) -> dict[str, Any]:
        """Return operations per second by kind, and rows per second, if measured."""
        costs = {name: getattr(self.compute, name) for name in WORK_KINDS}
        costs |= {"rows_prepared": self.prepared, "rows_read": self.read}
        return {name: 1 / seconds for name, seconds in costs.items() if seconds}
