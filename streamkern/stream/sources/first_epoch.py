"""A source whose epochs all have the rows of the first one.

Solvers whose centers are all training rows update the weight of a row's own center. They need the
rows of the centers in every epoch, and also in the samples of the setup.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from streamkern.store.row_block import RowBlock
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.unitwise import UnitwiseSource
from streamkern.stream.sources.user import GeneratorSource, UserSource


class FirstEpochSource(UnitwiseSource):
    """The rows of epoch 0 of `base`, in every epoch; described as `base` is."""

    kind = "first_epoch"

    def read_unit(self, u: int, seed: int, epoch: int) -> RowBlock:
        return self.base.read_unit(u, seed, 0)

    def _read_targets(self, u: int, seed: int, epoch: int) -> np.ndarray:
        return self.base.read_targets(u, seed, 0)

    def origins(self, u: int, epoch: int) -> np.ndarray:
        return self.base.origins(u, 0)

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
