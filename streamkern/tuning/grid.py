"""The bandwidths and ridges of a search: a grid, and rounds of refinement around the best.

In each round the bandwidth of the best combination gets two more neighbours: half way, on the log
scale, to its present ones; without one on one side, as far out as the one on the other side. A best
ridge at an end of those tried gets one more, as far out again; there is nothing below 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from streamkern.kernels import notation
from streamkern.tuning.table import SearchTable
from streamkern.tuning.trainings import Trainings, TrialKey

GRID_FACTORS = (
    0.25,
    0.5,
    1.0,
    2.0,
    4.0,
)  # times the median distance between centers, or the given bandwidth


@dataclass(frozen=True)
class SearchGrid:
    """The grid of a search.

    bandwidths : None is "auto"
    refine : number of rounds
    """

    kernels: list[Any]
    bandwidths: list[float] | None
    ridges: list[float]
    refine: int

    def most(self, given: TrialKey) -> int:
        """Return the trainings per split, including the settings as given if outside the grid."""
        with_width = sum(1 for kernel in self.kernels if notation.bandwidths(kernel))
        n_widths = len(GRID_FACTORS if self.bandwidths is None else self.bandwidths)
        more = 2 * bool(with_width and n_widths > 1) + (sum(map(bool, self.ridges)) > 1)
        each = with_width * n_widths + len(self.kernels) - with_width
        kernel, width, ridge = given
        inside = kernel in self.kernels and ridge in self.ridges
        if inside and width is not None:
            own = notation.bandwidths(kernel)
            inside = "auto" not in own if self.bandwidths is None else width in self.bandwidths
        return each * len(self.ridges) + more * self.refine + (not inside)

    def knows(self, ridge: float) -> bool:
        """Return whether trainings with this ridge are part of the search: in the grid, or beyond
        it.

        The refinement reaches ridges beyond the grid.
        """
        return ridge in self.ridges or not self.ridges[0] <= ridge <= self.ridges[-1]

    def fill(self, table: SearchTable, trainings: Trainings) -> None:
        """Train the combinations of the grid and its refinement, and add them to the table."""
        for kernel in self.kernels:
            for made, bandwidth in _grid(trainings, kernel, self.bandwidths, self.ridges[0]):
                for ridge in self.ridges:
                    table.add(trainings.measured(made, bandwidth, ridge))
        for _ in range(self.refine):
            best = table.best()
            for ridge in _beyond(best.ridge, table.tried("ridge", best.kernel)):
                table.add(trainings.measured(best.kernel, best.bandwidth, ridge))
            best = table.best()
            for bandwidth in _neighbours(best.bandwidth, table.tried("bandwidth", best.kernel)):
                table.add(trainings.measured(best.kernel, bandwidth, best.ridge))


def _grid(
    trainings: Trainings, kernel: Any, bandwidths: list[float] | None, ridge: float
) -> list[tuple[Any, float | None]]:
    """Return pairs of the kernel, with known ratios of bandwidths, and a bandwidth to try."""
    own = notation.bandwidths(kernel)
    if not own:
        return [(kernel, None)]
    if bandwidths is not None:
        return [(kernel, bandwidth) for bandwidth in bandwidths]
    kernel, scale = own_scale(trainings, kernel, ridge)
    return [(kernel, scale if factor == 1 else neat(factor * scale)) for factor in GRID_FACTORS]


def own_scale(trainings: Trainings, kernel: Any, ridge: float) -> tuple[Any, float]:
    """Return the kernel, with known ratios of bandwidths, and its own bandwidth.

    A kernel without one gets the median distance between centers.
    """
    own = notation.bandwidths(kernel)
    if "auto" not in own:
        return kernel, float(max(own))
    first = trainings.automatic(kernel, ridge)
    return first["kernel"], first["bandwidth"]


def _neighbours(best: float | None, tried: list[float]) -> list[float]:
    """Return two more bandwidths beside `best`, one of the ascending `tried`, if others exist."""
    if best is None or len(tried) < 2:
        return []
    at = tried.index(best)
    low = math.sqrt(tried[at - 1] * best) if at else best * best / tried[1]
    high = best * best / tried[at - 1] if best == tried[-1] else math.sqrt(tried[at + 1] * best)
    return [width for width in (neat(low), neat(high)) if width not in tried]


def _beyond(best: float, tried: list[float]) -> list[float]:
    """Return one more ridge, if `best` is at an end of the ascending `tried` other than 0."""
    above = [ridge for ridge in tried if ridge]
    if len(above) < 2 or best not in (above[-1], tried[0]) or not best:
        return []
    return [neat(best * best / above[-2 if best == above[-1] else 1])]


def neat(bandwidth: float) -> float:
    """Round to four digits: further ones have no influence."""
    return float(f"{bandwidth:.4g}")
