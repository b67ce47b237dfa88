"""What a way to choose centers is: the one record that everything else asks.

A new way is a file with a subclass of `CenterSelector`, and a line in `ways`.
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
from streamkern.planning.center_costs import Selection
from streamkern.planning.problem import ProblemShape
from streamkern.stream.sources.base import BaseSource, Block
from streamkern.stream.sources.sampling import read_rows


@dataclass(frozen=True)
class CenterWork:
    """What `Way.refine` works with.

    batches : (n, batch_size) -> n transformed rows of a stream, (m, d) each, in passes over all.
    """

    p: int
    seed: int
    kernel: Kernel
    backend: Backend
    precision: str
    grid: Grid | None
    batches: Callable[[int, int], Iterator[HostArray]]

    def operator(self, X: HostArray) -> KernelOperator:
        """Of the kernel, in coordinates about the mean of X (n, d)."""
        shift = X.mean(axis=0, dtype=np.float64).astype(X.dtype)
        return KernelOperator(self.kernel, self.backend, self.precision, shift, self.grid)


class CenterSelector:
    """Base of the ways, which have no state of their own."""

    name: str
    of_rows = True
    """Whether the centers are rows of the data."""

    def check(self, source: BaseSource) -> None:
        """Raise ConfigError where the data are not such that it can choose."""

    def plan(self, problem: ProblemShape, n_rows: int, budget_bytes: int) -> Selection | None:
        """What choosing p centers from n_rows different rows takes, so that it fits the budget;
        None where the rows that it reads are the centers."""
        return None

    def choose(self, source: BaseSource, n: int, seed: int) -> tuple[Ints, int]:
        """The numbers of n stored rows that are the centers, or that `refine` begins with; how many
        rows were looked at."""
        raise NotImplementedError

    def rows(self, source: BaseSource, n: int, seed: int) -> tuple[Block, int]:
        """Those rows."""
        chosen, looked_at = self.choose(source, n, seed)
        return read_rows(source, chosen, seed), looked_at

    def refine(
        self, X: HostArray, selection: Selection, work: CenterWork
    ) -> tuple[HostArray, dict[str, Any]]:
        """Centers (p, d) from the rows X (n, d) as the kernel sees them, and fields for the log.

        Of the ways that have a `Selection`.
        """
        raise NotImplementedError
