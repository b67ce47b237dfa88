"""The interface of center selectors.

A new selector is a subclass of `CenterSelector` in a module of its own, and an entry in the table
`SELECTORS`. Its methods are called in this order:

1. `check`, with the source of the rows
2. `plan`, before memory is reserved
3. `choose`, or `rows` if the rows themselves are needed
4. `refine`, if `plan` returned a `Selection`: it computes the centers from the chosen rows
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

    p : number of centers.
    seed : seed of all random numbers.
    kernel, backend, precision, grid : as for `KernelOperator`.
    batches : function (n, batch_size) that yields n stored rows, without augmentation but scaled,
        in shuffled arrays (m, d). After a pass over all rows the next pass begins.
    """

    p: int
    seed: int
    kernel: Kernel
    backend: Backend
    precision: str
    grid: Grid | None
    batches: Callable[[int, int], Iterator[HostArray]]

    def operator(self, X: HostArray) -> KernelOperator:
        """Return the operator of the kernel, with points shifted by the mean of X (n, d)."""
        shift = X.mean(axis=0, dtype=np.float64).astype(X.dtype)
        return KernelOperator(self.kernel, self.backend, self.precision, shift, self.grid)


class CenterSelector:
    """Base class of the selectors, which have no state."""

    name: str
    """Value of the setting `model.centers`."""
    selects_rows = True
    """Whether the centers are rows of the data."""

    def check(self, source: BaseSource) -> None:
        """Raise ConfigError if the selector cannot be used for this source."""

    def plan(self, problem: ProblemShape, n_rows: int, budget_bytes: int) -> Selection | None:
        """Return the cost of choosing p centers from n_rows distinct rows within the budget.

        None if the rows of `choose` are the centers, so that `refine` is not called.
        """
        return None

    def choose(self, source: BaseSource, n: int, seed: int) -> tuple[Ints, int]:
        """Return the row numbers of n stored rows, and the number of rows read to choose them.

        The rows are the centers, or the input of `refine`.
        """
        raise NotImplementedError

    def rows(self, source: BaseSource, n: int, seed: int) -> tuple[RowBlock, int]:
        """Return the rows that `choose` selects, and the number of rows read to choose them."""
        chosen, n_read = self.choose(source, n, seed)
        return read_rows(source, chosen, seed), n_read

    def refine(
        self, X: HostArray, selection: Selection, work: CenterWork
    ) -> tuple[HostArray, dict[str, Any]]:
        """Return centers (p, d), and fields for the log, from rows X (n, d).

        X and the centers are features as the kernel receives them. The method is called only if
        `plan` returns a `Selection`.
        """
        raise NotImplementedError
