"""Limits of the work that "auto" may take, by `model.effort`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple


class EffortLevel(NamedTuple):
    """Limits that stand for "auto".

    n_centers : largest number of centers that are drawn.
    all_rows : largest number of rows that are all taken as centers, if that is one equation in the
        kernel matrix: see `solver.kernel_ridge`. It may exceed `n_centers`.
    metric_rows : rows from which a metric is learned, a third of which its steps draw from: more
        rows have more stages of steps, see `setup.metric_steps`.
    """

    n_centers: int
    all_rows: int
    metric_rows: int


EFFORT_LEVELS: Final[Mapping[str, EffortLevel]] = MappingProxyType({
    "quick": EffortLevel(2000, 4096, 6144),
    "default": EffortLevel(10_000, 16_384, 15_360),
    "best": EffortLevel(10_000, 100_000, 24_576),
})  # fmt: skip
