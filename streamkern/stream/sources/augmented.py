"""Copies of a source that differ by their transforms; nothing is stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.values import checked_int
from streamkern.store.statistics import ColumnMoments
from streamkern.stream.sources.base import (
    UNIT_BYTES,
    BaseSource,
    DerivedSource,
    Source,
    empty_rows,
)
from streamkern.stream.sources.transforms import Transform, bind_transforms
from streamkern.stream.sources.user import as_source

MAX_UNITS = 1 << 21  # 8 TiB of rows; the order of an epoch takes 200 bytes of memory per unit
MAX_REPLICAS_WITH_FILES = 100  # with more, `files` is empty: it has an entry for each replica


class AugmentedSource(DerivedSource):
    """`copies` replicas of a source that differ by their transforms; nothing is stored.

    Virtual row v is row v mod n of the base in replica v div n (n = base.n_rows), and every draw is
    keyed by v. A unit is one unit of one replica, or, if the whole base is below 4 MiB, several
    whole replicas; its virtual rows are consecutive in both cases. Host transforms of the base draw
    the same numbers in every replica; its feed transforms draw new numbers. If the rows of the base
    differ between passes, each replica is a separate pass.

    Parameters
    ----------
    base : the source of the rows
    copies : number of replicas in an epoch
    transforms : transforms of the replicas, after those of the base
    """

    kind = "augmented"

    def __init__(self, base: Source, copies: int, transforms: Sequence[Transform] = ()) -> None:
        copies = checked_int("copies", copies)
        base = as_source(base)
        self.parts, self.copies = (base,), copies
        self.n_rows = copies * base.n_rows
        self._copy_from(base, *self._ROW_ATTRIBUTES)
        self.remote, self.level = base.remote, base.level + 1
        self.files = base.files * copies if copies <= MAX_REPLICAS_WITH_FILES else ()
        self.n_origins, self.hides_copies = base.n_origins, base.hides_copies
        if not base.n_origins or base.n_rows % base.n_origins:
            self.n_origins = base.n_rows
        self.totals = None if base.totals is None else copies * base.totals
        base_bytes = base.n_rows * self.widest_bytes
        # Number of whole replicas in a unit, or 0 if a unit is one unit of a replica.
        self._replicas_per_unit = min(copies, UNIT_BYTES // max(1, base_bytes))
        if self.n_units > MAX_UNITS:
            raise ConfigError(
                f"{mention('copies', copies)} gives {self.n_units} units in an epoch, more than "
                f"{MAX_UNITS}",
                "lower copies, and raise epochs instead",
            )
        if base.strata is not None and not self._replicas_per_unit:
            self.strata = np.tile(base.strata, copies)
        host, feed = bind_transforms(transforms, self, before=base.feed_transforms)
        self.host_transforms, self.feed_transforms = host, (*base.feed_transforms, *feed)

    @property
    def n_units(self) -> int:
        if self._replicas_per_unit:
            return -(-self.copies // self._replicas_per_unit)
        return self.copies * self.base.n_units

    def unit_bounds(self, u: int) -> tuple[int, int]:
        n = self.base.n_rows
        if self._replicas_per_unit:
            start = u * self._replicas_per_unit
            return start * n, min(start + self._replicas_per_unit, self.copies) * n
        replica, unit = divmod(u, self.base.n_units)
        start, stop = self.base.unit_bounds(unit)
        return replica * n + start, replica * n + stop

    def source_rows(self, u: int) -> np.ndarray:
        """Return row numbers: in replica r, those of the base plus r times its row count."""
        numbers = np.concatenate([self.base.source_rows(unit) for unit in self._units(u)])
        n, (start, stop) = self.base.n_rows, self.unit_bounds(u)
        replicas = np.arange(start // n, -(-stop // n), dtype=np.uint64)
        rows: np.ndarray = (replicas[:, None] * np.uint64(n) + numbers).reshape(-1)
        return rows

    def origins(self, u: int, epoch: int) -> np.ndarray:
        """Return the origins of the rows of the base."""
        origins = []
        for start, stop in self._replicas_of_same_rows(u):
            pass_number = self._pass_number(start, epoch)
            replica_origins = np.concatenate(
                [self.base.origins(unit, pass_number) for unit in self._units(u)]
            )
            origins.append(np.tile(replica_origins, stop - start))
        return np.concatenate(origins)

    def with_base(self, base: BaseSource) -> AugmentedSource:
        """Return the copies of another base, with the same transforms."""
        return AugmentedSource(
            base, self.copies, (*self.host_transforms, *self._own_feed_transforms())
        )

    def _replicas_of_same_rows(self, u: int) -> list[tuple[int, int]]:
        """Return ranges (start, stop) of replicas in unit u that are made from the same rows."""
        n, (first_row, row_stop) = self.base.n_rows, self.unit_bounds(u)
        start, stop = first_row // n, -(-row_stop // n)
        if self.base.passes_differ:
            return [(replica, replica + 1) for replica in range(start, stop)]
        return [(start, stop)]

    def _pass_number(self, replica: int, epoch: int) -> int:
        """Return the number of the pass over the base that makes a replica."""
        return epoch * self.copies + replica if self.base.passes_differ else epoch

    def _units(self, u: int) -> Sequence[int]:
        """Return the units of the base that unit u holds in each of its replicas."""
        n_base = self.base.n_units
        return range(n_base) if self._replicas_per_unit else [u % n_base]

    def target_moments(self) -> ColumnMoments | None:
        base_moments = self.base.target_moments()
        if base_moments is None:
            return None
        moments = ColumnMoments(self.n_outputs)
        moments.merge(base_moments, self.copies)
        return moments

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "copies": self.copies, "base": self.base.describe()}

    def _own_feed_transforms(self) -> tuple[Transform, ...]:
        return self.feed_transforms[len(self.base.feed_transforms) :]

    def _read(self, u: int, seed: int, epoch: int) -> tuple[np.ndarray, ...]:
        if not self._replicas_per_unit:
            replica, unit = divmod(u, self.base.n_units)
            return self.base.read_unit(unit, seed, self._pass_number(replica, epoch)).contents
        start, stop = self.unit_bounds(u)
        rows = empty_rows(self, stop - start)
        n = self.base.n_rows
        first_replica = start // n
        for replica, replica_stop in self._replicas_of_same_rows(u):
            in_unit = slice(replica - first_replica, replica_stop - first_replica)
            for unit in range(self.base.n_units):
                block = self.base.read_unit(unit, seed, self._pass_number(replica, epoch))
                base_rows = slice(*self.base.unit_bounds(unit))
                for target, part in zip(rows.contents, block.contents, strict=True):
                    replicas = target.reshape(-1, n, *target.shape[1:])
                    replicas[in_unit, base_rows] = part
        return rows.contents


def without_copies(source: BaseSource) -> BaseSource:
    """Return the source that `source` augments; a source without copies is returned unchanged."""
    while isinstance(source, AugmentedSource):
        source = source.base
    return source
