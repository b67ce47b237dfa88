"""Base class of sources that change the rows of one other source unit by unit."""

from __future__ import annotations

import numpy as np

from streamkern.store.statistics import ColumnMoments
from streamkern.stream.sources.base import BaseSource, DerivedSource


class UnitwiseSource(DerivedSource):
    """The rows of `base` in the same units; a subclass defines `read_unit`, which changes them."""

    def __init__(self, base: BaseSource) -> None:
        self._copy_from(base, *self._ROW_ATTRIBUTES)
        self._set_base(base)

    def _set_base(self, base: BaseSource) -> None:
        """Take the units from `base`, and all attributes that do not describe a row."""
        self.parts = (base,)
        self._copy_from(
            base, "n_rows", "strata", "totals", "files", "n_origins", "hides_copies", "remote",
            "level", "feed_transforms", "repeats", "passes_differ", "statistics_read",
        )  # fmt: skip

    @property
    def n_units(self) -> int:
        return self.base.n_units

    def unit_bounds(self, u: int) -> tuple[int, int]:
        return self.base.unit_bounds(u)

    def source_rows(self, u: int) -> np.ndarray:
        return self.base.source_rows(u)

    def origins(self, u: int, epoch: int) -> np.ndarray:
        return self.base.origins(u, epoch)

    def _read(self, u: int, seed: int, epoch: int) -> tuple[np.ndarray, ...]:
        return self.read_unit(u, seed, epoch).contents

    def target_moments(self) -> ColumnMoments | None:
        return self.base.target_moments()
