"""Rows of named columns in the order of others: one function, wherever a model meets new data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from streamkern.augment import Moments
from streamkern.columns import in_order
from streamkern.errors import ConfigError
from streamkern.source_base import BaseSource, Block, Source, is_weighted, read_targets, source_rows

_SAME = (
    "n_rows", "dtype", "row_shape", "n_outputs", "classes", "y_dtype", "feed_transforms", "remote",
    "strata", "repeats", "totals", "target_columns", "target_mean", "target_scale",
)  # fmt: skip


def in_columns(source: Source, expected: Sequence[str] | None, where: str) -> Source:
    """`source` with its columns in the `expected` order; `source` itself where they have it.

    Where either has no names, columns go by position. Raises DataError naming what is missing or
    not among the expected ones, ConfigError where transforms of its own came first.
    """
    found = getattr(source, "columns", None)
    if expected is None or found is None or tuple(found) == tuple(expected):
        return source
    in_order(found, expected, where)
    if source.feed_transforms:
        raise ConfigError(
            f"the columns of {where} are in another order than those trained on, and can not be "
            "put right behind its transforms; leave the transforms out, or order the columns"
        )
    return _Ordered(source, tuple(expected))


class _Ordered(BaseSource):
    """The rows of `base`, whose columns are these in another order."""

    kind = "columns"

    def __init__(self, base: Any, columns: tuple[str, ...]) -> None:
        self.base, self.parts, self.columns = base, (base,), columns
        for name in _SAME:
            setattr(self, name, getattr(base, name, getattr(BaseSource, name, None)))
        self.weighted = is_weighted(base)
        self.level = getattr(base, "level", 0)
        place = {name: k for k, name in enumerate(base.columns)}
        self._places = np.array([place[name] for name in columns])

    @property
    def n_units(self) -> int:
        return int(self.base.n_units)

    @property
    def fingerprint(self) -> str:
        return str(self.base.fingerprint)

    def unit_bounds(self, u: int) -> tuple[int, int]:
        start, stop = self.base.unit_bounds(u)
        return start, stop

    def source_rows(self, u: int) -> np.ndarray:
        return source_rows(self.base, u)

    def read_unit(self, u: int, seed: int, epoch: int) -> Block:
        block: Block = self.base.read_unit(u, seed, epoch)
        return block._replace(X=np.ascontiguousarray(block.X[:, self._places]))

    def _read(self, u: int, seed: int, epoch: int) -> tuple[np.ndarray, ...]:
        return self.read_unit(u, seed, epoch).read

    def _read_targets(self, u: int, seed: int, epoch: int) -> np.ndarray:
        return read_targets(self.base, u, seed, epoch)

    def statistics(self) -> Moments:
        mean, scale, *features = self.base.statistics()
        of_each, spread = (None if k is None else k.reshape(-1)[self._places] for k in features)
        return mean, scale, of_each, spread

    def describe(self) -> dict[str, Any]:
        own = {"columns": list(self.columns or ()), "base": self.base.describe()}
        return super().describe() | own
