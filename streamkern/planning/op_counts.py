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
    half_swept : entries of a float16 matrix that are read from memory, and multiplied in the same
        way; a product multiplies two halves of each weight.
    products : FLOPs of products of large matrices.
    factors : FLOPs of Cholesky factorisations and of inverses of triangular matrices.
    eigen : FLOPs of eigendecompositions.
    wide_products, wide_factors : as `products` and `factors`, in float64.
    calls : library calls, whose overhead does not depend on the size of the arrays.
    """

    entries: float = 0
    kept: float = 0
    swept: float = 0
    half_swept: float = 0
    products: float = 0
    factors: float = 0
    eigen: float = 0
    wide_products: float = 0
    wide_factors: float = 0
    calls: float = 0

    def __add__(self, other: OpCounts) -> OpCounts:
        pairs = zip(self._by_kind, other._by_kind, strict=True)
        return OpCounts(*(a + b for a, b in pairs))

    def scaled(self, factor: float) -> OpCounts:
        """Return all counts multiplied by a factor."""
        return OpCounts(*(factor * count for count in self._by_kind))

    @property
    def _by_kind(self) -> tuple[float, ...]:
        """The counts in the order of `WORK_KINDS`."""
        return tuple(getattr(self, name) for name in WORK_KINDS)

    def flops(self, problem: ProblemShape) -> int:
        """Return the total FLOPs. problem : its d and c determine the FLOPs of a kernel value"""
        n_evaluated = self.entries + self.kept
        distances = 2 * problem.d * n_evaluated
        products = 2 * problem.c * (n_evaluated + self.swept + 2 * self.half_swept)
        linear_algebra = sum(getattr(self, kind) for kind in LINEAR_ALGEBRA_KINDS)
        return int(distances + products + linear_algebra)

    def seconds(self, costs: OpCounts) -> float:
        """Return the seconds that all operations take.

        costs : seconds per operation, by kind.
        """
        pairs = zip(self._by_kind, costs._by_kind, strict=True)
        return sum(count * seconds for count, seconds in pairs)


WORK_KINDS = tuple(field.name for field in fields(OpCounts))
"""Kinds of work: the fields of `OpCounts`, in order."""
LINEAR_ALGEBRA_KINDS = ("products", "factors", "eigen", "wide_products", "wide_factors")
"""Kinds of work that are counted in FLOPs."""
NO_WORK = OpCounts()


@dataclass(frozen=True)
class Speeds:
    """Times that the operations of one run take on a machine, in seconds.

    compute : seconds per operation, by kind.
    prepare_s : seconds to prepare a row for a step.
    read_s : seconds that one thread takes to read a row.
    busy_s : part of `read_s` in which the thread uses a processor, and does not wait.
    compile_s : seconds to compile a kernel, at its first evaluation in a process.
    """

    compute: OpCounts
    prepare_s: float
    read_s: float
    busy_s: float
    compile_s: float

    def streaming_seconds(self, rows: float, compute_s: float, problem: ProblemShape) -> float:
        """Return the seconds to read rows and take steps on them, which overlap.

        rows : number of rows.
        compute_s : seconds of the steps alone.
        problem : numbers of threads and of readers.
        """
        readers = problem.readers or problem.threads
        processor_s = compute_s + rows * (self.prepare_s + self.busy_s / problem.threads)
        return max(processor_s, rows * self.read_s / readers)

    def as_rates(self) -> dict[str, Any]:
        """Return operations per second by kind, and rows per second, if measured."""
        costs = {name: getattr(self.compute, name) for name in WORK_KINDS}
        costs |= {"rows_prepared": self.prepare_s, "rows_read": self.read_s}
        return {name: 1 / seconds for name, seconds in costs.items() if seconds}
