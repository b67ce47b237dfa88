"""The bandwidths and ridges that are tried: a grid, and rounds of refinement around the best.

In each round the bandwidth of the best combination gets two more neighbours: half way, on the log
scale, to those it has; where it has none on one side, as far out again as the other one is. A best
ridge with none beyond it gets one more, as far out again; there is nothing below 0.
"""

from __future__ import annotations

import math
from typing import Any

from streamkern.kernels import notation
from streamkern.tuning.table import Table
from streamkern.tuning.trainings import Asked, Trainings

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the median distance between centers, or what is given


def search_grid(
    trainings: Trainings,
    table: Table,
    kernels: list[Any],
    bandwidths: list[float] | None,
    ridges: list[float],
    refine: int,
) -> None:
    """Fill the table. bandwidths : None is "auto". refine : rounds."""
    for kernel in kernels:
        for made, bandwidth in _grid(trainings, kernel, bandwidths, ridges[0]):
            for ridge in ridges:
                table.add(trainings.measured(made, bandwidth, ridge))
    for _ in range(refine):
        best = table.best()
        for ridge in _beyond(best.ridge, table.tried("ridge", best.kernel)):
            table.add(trainings.measured(best.kernel, best.bandwidth, ridge))
        best = table.best()
        for bandwidth in _neighbours(best.bandwidth, table.tried("bandwidth", best.kernel)):
            table.add(trainings.measured(best.kernel, bandwidth, best.ridge))


def most_trainings(
    given: Asked,
    kernels: list[Any],
    bandwidths: list[float] | None,
    ridges: list[float],
    refine: int,
) -> int:
    """That `search_grid` can ask for, of each split, and the settings as given if beside them."""
    with_width = sum(1 for kernel in kernels if notation.bandwidths(kernel))
    n_widths = len(FACTORS if bandwidths is None else bandwidths)
    more = 2 * bool(with_width and n_widths > 1) + (sum(map(bool, ridges)) > 1)
    grid = (with_width * n_widths + len(kernels) - with_width) * len(ridges)
    kernel, width, ridge = given
    inside = kernel in kernels and ridge in ridges
    if inside and width is not None:
        own = notation.bandwidths(kernel)
        inside = "auto" not in own if bandwidths is None else width in bandwidths
    return grid + more * refine + (not inside)


def _grid(
    trainings: Trainings, kernel: Any, bandwidths: list[float] | None, ridge: float
) -> list[tuple[Any, float | None]]:
    """The kernel, with ratios of bandwidths that are known, and each bandwidth to try."""
    own = notation.bandwidths(kernel)
    if not own:
        return [(kernel, None)]
    if bandwidths is not None:
        return [(kernel, bandwidth) for bandwidth in bandwidths]
    if "auto" not in own:
        scale = float(max(own))
    else:  # the engine says what it is
        first = trainings.automatic(kernel, ridge)
        kernel, scale = first["kernel"], first["bandwidth"]
    return [(kernel, scale if factor == 1 else _neat(factor * scale)) for factor in FACTORS]


def _neighbours(best: float | None, tried: list[float]) -> list[float]:
    """Two more bandwidths beside `best`, one of the ascending `tried`; none without others."""
    if best is None or len(tried) < 2:
        return []
    at = tried.index(best)
    low = math.sqrt(tried[at - 1] * best) if at else best * best / tried[1]
    high = best * best / tried[at - 1] if best == tried[-1] else math.sqrt(tried[at + 1] * best)
    return [width for width in (_neat(low), _neat(high)) if width not in tried]


def _beyond(best: float, tried: list[float]) -> list[float]:
    """One more ridge, if `best` is at an end of the ascending `tried` other than 0."""
    above = [ridge for ridge in tried if ridge]
    if len(above) < 2 or best not in (above[-1], tried[0]) or not best:
        return []
    return [_neat(best * best / above[-2 if best == above[-1] else 1])]


def _neat(bandwidth: float) -> float:
    """To four digits: more of them decide nothing."""
    return float(f"{bandwidth:.4g}")
