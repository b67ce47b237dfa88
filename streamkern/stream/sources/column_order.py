"""Put named columns in the order of others: one function, wherever a model meets new data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from streamkern.basics.errors import ConfigError
from streamkern.ingest.columns import in_order
from streamkern.ingest.tables.encoder import check_encoder
from streamkern.store.statistics import ColumnMoments
from streamkern.stream.sources.base import (
    BaseSource,
    Block,
)
from streamkern.stream.sources.derived import DerivedSource
from streamkern.stream.sources.transforms import Moments


def in_columns(
    source: BaseSource,
    columns: Sequence[str] | None,
    where: str,
    target_columns: Sequence[str] | None = None,
    encoder: Mapping[str, Any] | None = None,
) -> BaseSource:
    """Return `source` with its columns and targets in the order of `columns` and `target_columns`.

    `source` itself is returned if they have that order. If either side has no names, columns go by
    position, and so does a single target; None : the order does not matter. Raises DataError with
    the names that are missing or unexpected, ConfigError if `source` has transforms of its own.

    encoder : of the table that the columns come from; DataError if that of `source` differs
    """
    check_encoder(source.encoder, encoder, where)
    found, own = source.columns, source.target_columns
    wanted = _in_order(found, columns, where, "x")
    wanted_targets = targets_in_order(own, target_columns, where)
    if (wanted, wanted_targets) == (found, own):
        return source
    if source.feed_transforms:
        raise ConfigError(
            f"the columns of {where} are in another order than those trained on, and cannot be "
            "put right behind its transforms; leave the transforms out, or order the columns"
        )
    return Ordered(source, wanted, wanted_targets)


def targets_in_order(
    found: tuple[str, ...] | None, expected: Sequence[str] | None, where: str
) -> tuple[str, ...] | None:
    """Return the target names in the expected order; the names found if targets go by position."""
    # Other numbers of targets are refused where the outputs are compared.
    several = found is not None and expected is not None and 1 < len(found) == len(expected)
    return _in_order(found, expected if several else None, f"y of {where}", "y")


def chosen_columns(source: BaseSource, columns: Sequence[str]) -> BaseSource:
    """Return `source`, whose columns have names, with only `columns`, in this order."""
    return _Chosen(source, columns)


def _in_order(
    found: tuple[str, ...] | None, expected: Sequence[str] | None, where: str, role: str
) -> tuple[str, ...] | None:
    """Return the names in the expected order; the names found if columns go by position."""
    if found is None or expected is None or found == tuple(expected):
        return found
    return tuple(in_order(found, expected, where, role))


class Ordered(DerivedSource):
    """The rows of `base` with columns in the order of the given names; None: without names."""

    kind = "columns"

    def __init__(
        self,
        base: BaseSource,
        columns: tuple[str, ...] | None,
        target_columns: tuple[str, ...] | None,
    ) -> None:
        self.parts = (base,)
        self._set_rows_like(base)
        self.n_rows, self.strata, self.totals = base.n_rows, base.strata, base.totals
        self.files, self.n_origins, self.hides_copies = (
            base.files,
            base.n_origins,
            base.hides_copies,
        )
        self.remote, self.level, self.feed_transforms = (
            base.remote,
            base.level,
            base.feed_transforms,
        )
        self.repeats, self.statistics_read = base.repeats, base.statistics_read
        self.columns, self.target_columns = columns, target_columns
        self._places = places(base.columns, columns)
        self._target_places = places(base.target_columns, target_columns)

    @property
    def n_units(self) -> int:
        return self.base.n_units

    def unit_bounds(self, u: int) -> tuple[int, int]:
        return self.base.unit_bounds(u)

    def source_rows(self, u: int) -> np.ndarray:
        return self.base.source_rows(u)

    def origins(self, u: int, epoch: int) -> np.ndarray:
        return self.base.origins(u, epoch)

    def read_unit(self, u: int, seed: int, epoch: int) -> Block:
        block = self.base.read_unit(u, seed, epoch)
        X = np.ascontiguousarray(block.X[:, self._places])
        return block._replace(X=X, y=self._ordered_targets(block.y))

    def _ordered_targets(self, y: np.ndarray) -> np.ndarray:
        return y if y.ndim == 1 else np.ascontiguousarray(y[:, self._target_places])

    def _read(self, u: int, seed: int, epoch: int) -> tuple[np.ndarray, ...]:
        return self.read_unit(u, seed, epoch).read

    def _read_targets(self, u: int, seed: int, epoch: int) -> np.ndarray:
        return self._ordered_targets(self.base.read_targets(u, seed, epoch))

    def statistics(self) -> Moments:
        mean, scale, *features = self.base.statistics()
        of_each, spread = (None if k is None else k.reshape(-1)[self._places] for k in features)
        return mean, scale, of_each, spread

    def target_moments(self) -> ColumnMoments | None:
        moments = self.base.target_moments()
        return None if moments is None else moments.take(self._target_places)

    def describe(self) -> dict[str, Any]:
        names = {"columns": self.columns, "target_columns": self.target_columns}
        own = {name: None if found is None else list(found) for name, found in names.items()}
        return super().describe() | own | {"base": self.base.describe()}


class _Chosen(Ordered):
    """Some of the columns of `base`, which are other data than `base` if columns go by position."""

    kind = "chosen"

    def __init__(self, base: BaseSource, columns: Sequence[str]) -> None:
        super().__init__(base, tuple(columns), base.target_columns)
        self.row_shape = (len(columns),)

    @property
    def fingerprint(self) -> str:
        text = json.dumps([self.base.fingerprint, self.columns])
        return hashlib.sha256(text.encode()).hexdigest()

    def statistics(self) -> Moments:
        _, _, mean, scale = super().statistics()
        return None, None, mean, scale  # the global ones include columns left out


def places(found: Sequence[str] | None, wanted: Sequence[str] | None) -> Any:
    """Return the place of each wanted name among the found ones; a slice of all without names."""
    if found is None or wanted is None:
        return slice(None)
    place = {name: k for k, name in enumerate(found)}
    return np.array([place[name] for name in wanted])
