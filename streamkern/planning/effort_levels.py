"""Limits of the automatic choices, for each value of the setting model.effort."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple


class EffortLevel(NamedTuple):
    """Limits of the automatic choices.

    n_centers : largest number of centers that are drawn.
    all_rows : largest number of rows that may all be centers, if solver "direct" can solve the
        equations of their kernel matrix (`solver.kernel_ridge`); may exceed `n_centers`.
    metric_rows : largest number of rows from which a metric is learned. Its gradient steps use a
        third of them, in more stages if there are more rows, see `setup.metric_steps`.
    """

    n_centers: int
    all_rows: int
    metric_rows: int


EFFORT_LEVELS: Final[Mapping[str, EffortLevel]] = MappingProxyType({
    "quick": EffortLevel(2000, 4096, 6144),
    "default": EffortLevel(10_000, 16_384, 15_360),
    "best": EffortLevel(10_000, 100_000, 24_576),
})  # fmt: skip
