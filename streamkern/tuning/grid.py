"""The bandwidths and ridges that are tried: a grid, and rounds of refinement around the best.

In each round the bandwidth of the best combination gets two more neighbours: half way, on the log
scale, to those it has; where it has none on one side, as far out again as the other one is. A best
ridge with none beyond it gets one more, as far out again; there is nothing below 0.
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
)  # of the median distance between centers, or what is given


@dataclass(frozen=True)
class SearchGrid:
    """bandwidths : None is "auto". refine : rounds."""

    kernels: list[Any]
    bandwidths: list[float] | None
    ridges: list[float]
    refine: int

    def most(self, given: TrialKey) -> int:
        """Trainings of each split, with that of the settings as given if it is beside the grid."""
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
        """Whether trainings with it are asked for: of the grid, and what the refinement goes on
        to."""
        return ridge in self.ridges or not self.ridges[0] <= ridge <= self.ridges[-1]

    def fill(self, table: SearchTable, trainings: Trainings) -> None:
        """Train what is asked for, and take it in."""
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
    """The kernel, with ratios of bandwidths that are known, and each bandwidth to try."""
    own = notation.bandwidths(kernel)
    if not own:
        return [(kernel, None)]
    if bandwidths is not None:
        return [(kernel, bandwidth) for bandwidth in bandwidths]
    kernel, scale = own_scale(trainings, kernel, ridge)
    return [(kernel, scale if factor == 1 else neat(factor * scale)) for factor in GRID_FACTORS]


def own_scale(trainings: Trainings, kernel: Any, ridge: float) -> tuple[Any, float]:
    """The kernel, with ratios of bandwidths that are known, and the bandwidth that it says, or the
    median distance between centers."""
    own = notation.bandwidths(kernel)
    if "auto" not in own:
        return kernel, float(max(own))
    first = trainings.automatic(kernel, ridge)
    return first["kernel"], first["bandwidth"]


def _neighbours(best: float | None, tried: list[float]) -> list[float]:
    """Two more bandwidths beside `best`, one of the ascending `tried`; none without others."""
    if best is None or len(tried) < 2:
        return []
    at = tried.index(best)
    low = math.sqrt(tried[at - 1] * best) if at else best * best / tried[1]
    high = best * best / tried[at - 1] if best == tried[-1] else math.sqrt(tried[at + 1] * best)
    return [width for width in (neat(low), neat(high)) if width not in tried]


def _beyond(best: float, tried: list[float]) -> list[float]:
    """One more ridge, if `best` is at an end of the ascending `tried` other than 0."""
    above = [ridge for ridge in tried if ridge]
    if len(above) < 2 or best not in (above[-1], tried[0]) or not best:
        return []
    return [neat(best * best / above[-2 if best == above[-1] else 1])]


def neat(bandwidth: float) -> float:
    """To four digits: more of them decide nothing."""
    return float(f"{bandwidth:.4g}")
