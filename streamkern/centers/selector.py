"""The interface of a center selector, which all other code uses.

A new selector is a file with a subclass of `CenterSelector`, and an entry in `selectors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamkern.backend.base import Backend
from streamkern.basics.array_types import HostArray, Ints
from streamkern.kernels.builtin import Kernel
from streamkern.kernels.points import Grid
from streamkern.kernels.products import KernelOperator
from streamkern.planning.problem import ProblemShape, Selection
from streamkern.store.row_block import RowBlock
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.sampling import read_rows


@dataclass(frozen=True)
class CenterWork:
    """Inputs of `CenterSelector.refine`.

    batches : (n, batch_size) -> n transformed rows of a stream, (m, d) each, in repeated passes.
    """

    p: int
    seed: int
    kernel: Kernel
    backend: Backend
    precision: str
    grid: Grid | None
    batches: Callable[[int, int], Iterator[HostArray]]

    def operator(self, X: HostArray) -> KernelOperator:
        """Return the operator of the kernel, in coordinates about the mean of X (n, d)."""
        shift = X.mean(axis=0, dtype=np.float64).astype(X.dtype)
        return KernelOperator(self.kernel, self.backend, self.precision, shift, self.grid)


class CenterSelector:
    """Base of the selectors, which have no state."""

    name: str
    of_rows = True
    """Whether the centers are rows of the data."""

    def check(self, source: BaseSource) -> None:
        """Raise ConfigError if it cannot select from these data."""

    def plan(self, problem: ProblemShape, n_rows: int, budget_bytes: int) -> Selection | None:
        """Return the cost of choosing p centers from n_rows distinct rows within the budget.

        None if the rows that are read are the centers.
        """
        return None

    def choose(self, source: BaseSource, n: int, seed: int) -> tuple[Ints, int]:
        """Return the numbers of n stored rows, and how many rows were read to choose them.

        The rows are the centers, or those that `refine` begins with.
        """
        raise NotImplementedError

    def rows(self, source: BaseSource, n: int, seed: int) -> tuple[RowBlock, int]:
        """Return the rows that `choose` selects, and how many rows were read to choose them."""
        chosen, looked_at = self.choose(source, n, seed)
        return read_rows(source, chosen, seed), looked_at

    def refine(
        self, X: HostArray, selection: Selection, work: CenterWork
    ) -> tuple[HostArray, dict[str, Any]]:
        """Return centers (p, d) from rows X (n, d) as the kernel receives them, and fields to log.

        Only for selectors that have a `Selection`.
        """
        raise NotImplementedError
