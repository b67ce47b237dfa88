"""A source whose epochs all have the rows of the first one.

Solvers whose centers are all training rows update the weight of a row's own center. They need the
rows of the centers in every epoch, and also in the samples of the setup.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from streamkern.store.row_block import RowBlock
from streamkern.store.statistics import ColumnMoments
from streamkern.stream.sources.base import BaseSource, DerivedSource
from streamkern.stream.sources.user import GeneratorSource, UserSource


class FirstEpochSource(DerivedSource):
    """The rows of epoch 0 of `base`, in every epoch. Its description is that of `base`."""

    kind = "first_epoch"

    def __init__(self, base: BaseSource) -> None:
        self._copy_from(base, *self._ROW_ATTRIBUTES)
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

    def read_unit(self, u: int, seed: int, epoch: int) -> RowBlock:
        return self.base.read_unit(u, seed, 0)

    def _read(self, u: int, seed: int, epoch: int) -> tuple[np.ndarray, ...]:
        return self.read_unit(u, seed, epoch).contents

    def _read_targets(self, u: int, seed: int, epoch: int) -> np.ndarray:
        return self.base.read_targets(u, seed, 0)

    def source_rows(self, u: int) -> np.ndarray:
        return self.base.source_rows(u)

    def origins(self, u: int, epoch: int) -> np.ndarray:
        return self.base.origins(u, 0)

    def target_moments(self) -> ColumnMoments | None:
        return self.base.target_moments()

    def describe(self) -> dict[str, Any]:
        return self.base.describe()


def with_first_epoch(source: BaseSource) -> BaseSource:
    """Return the same source, with generators and user-defined sources that repeat epoch 0.

    A user-defined source that declares `repeats` is left as it is.
    """
    if isinstance(source, GeneratorSource | UserSource):
        return source if source.repeats else FirstEpochSource(source)
    if not source.parts:
        return source
    return source._with_parts([with_first_epoch(part) for part in source.parts])
