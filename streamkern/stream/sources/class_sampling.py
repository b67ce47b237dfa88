"""Resample a source to given shares of the classes: rare classes repeat, frequent ones are thinned.

The resampled rows are a mixture over the classes; units are read in their order, and nothing is
written. With shares s (sum 1), N rows in all and n_k rows of class k, a row of class k occurs
r_k = s_k N / n_k times in an epoch on average. The rates r_k of all rows, laid end to end, are a
line of length N. An epoch takes the rows into whose part of the line the points i + phi,
i = 0 … N - 1, fall (systematic sampling), each floor(r_k) or ceil(r_k) times. From pass to pass,
phi moves by the golden ratio modulo 1, a sequence that fills the interval [0, 1) evenly: over T
passes a row occurs T r_k times to within O(log T), where independent draws would deviate by about
sqrt(T r_k).

    rows of a unit, by class  |a a a a a a a a|b b|
    their rates               |--------|----------|
    points of this pass        ^   ^   ^   ^   ^   ^    three of the rows a; one b twice, one once

Units have about the size of the units of the base. Base units whose rows are rarely taken are
joined to a group, which is one unit. A base unit whose rows are often taken is cut into several
units, each of which reads all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf
from numbers import Real
from typing import Any, Literal, NamedTuple

import numpy as np

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.text import some
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.base import (
    BaseSource,
    DerivedSource,
    Source,
    empty_rows,
    host_transforms,
    read_labels,
    same_rows,
)
from streamkern.stream.sources.mixture import stored_rows
from streamkern.stream.sources.unit_edges import unit_edges
from streamkern.stream.sources.user import as_source

# Steps of phi, times 2^64: 1 / 1.6180 (golden ratio) between passes, and between groups
# 1 / 1.2207, so that their phi differ.
_PASS_STEP, _GROUP_STEP = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03


class BalancedSource(DerivedSource):
    """The rows of `base` resampled to a given share of each class; an epoch keeps its row count.

    The constructor reads the classes of all rows, and keeps only the length of each unit's part of
    the line in memory. The rows of a pass depend on its number and on no seed. A repeated row
    counts as a separate virtual row: feed transforms of `base` draw new random numbers for it, and
    so do the transforms of an `AugmentedSource` of this source, which reads a pass for each
    replica.

    Parameters
    ----------
    base : source of rows with classes, each once in an epoch, without host transforms
    shares : shares of the classes by name, numbers above 0 that are divided by their sum; or
        "balanced", the same share for every class that has rows. Classes without rows get none.

    Raises
    ------
    ConfigError
        If the rows have no classes, `base` resamples or transforms rows, or `shares` are invalid.
    """

    kind = "balanced"
    repeats = False
    passes_differ = True
    hides_copies = True

    def __init__(
        self, base: Source, shares: Mapping[Any, float] | Literal["balanced"] = "balanced"
    ) -> None:
        base = as_source(base)
        _check_base(base)
        self.parts, self.requested_shares = (base,), shares
        if not isinstance(shares, str):
            self.requested_shares = {str(name): share for name, share in shares.items()}
        self._copy_from(base, *self._ROW_ATTRIBUTES)
        self._copy_from(base, "remote", "level", "feed_transforms", "statistics_read", "n_rows")
        # The rates: (c,) number of times that a row of each class is taken in an epoch.
        counts = _ClassCounts.read(base)
        class_rows = counts.class_rows(len(base.classes or ()))
        self.shares = _normalise_shares(base.classes or (), class_rows, self.requested_shares)
        self.rates = self.shares * self.n_rows / np.maximum(class_rows, 1)
        base_totals = base.totals if base.weighted else class_rows
        self.totals = None if base_totals is None else np.asarray(base_totals * self.rates)
        # The line of all rates, and its units.
        self.largest = int(np.diff(unit_edges(base)).max())  # rows of the largest unit of the base
        lengths = counts.unit_sums(counts.counts * self.rates[counts.classes])
        self._line = _Line.cut(lengths, self.n_rows, self.largest)
        self._edges = self._line.unit_points
        # Units of each class, of each of the base's strata, are spread evenly over an epoch.
        strata = counts.most_taken_classes(self.rates)
        if base.strata is not None:
            pairs = np.stack([strata, base.strata])
            strata = np.unique(pairs, axis=1, return_inverse=True)[1].reshape(-1)
        self.strata = strata[self._line.first_units[self._line.groups]]

    def describe(self) -> dict[str, Any]:
        return {
            **super().describe(),
            "shares": [float(f"{share:.12g}") for share in self.shares],
            "base": self.base.describe(),
        }

    def origins(self, u: int, epoch: int) -> np.ndarray:
        """Return the origins of the base."""
        origins = np.empty(self._size(u), np.uint64)
        for v, positions, points in self._line.points(u, epoch):
            rows = self._rows_at(self.base.read_targets(v, 0, 0), points)
            origins[positions] = self.base.origins(v, 0)[rows]
        return origins

    def _size(self, u: int) -> int:
        """Return the number of rows of unit u."""
        start, stop = self.unit_bounds(u)
        return stop - start

    def _rows_at(self, y: np.ndarray, points: np.ndarray) -> np.ndarray:
        """Return the rows, of a base unit with classes y (k,), into which points in [0, 1] fall."""
        order = np.argsort(y, kind="stable")
        ends = np.cumsum(self.rates[y[order]])
        index = np.searchsorted(ends, points * ends[-1], side="right")
        rows: np.ndarray = order[np.minimum(index, len(y) - 1)]
        return rows

    def _read(self, u: int, seed: int, epoch: int) -> tuple[np.ndarray, ...]:
        sample = empty_rows(self, self._size(u))
        for v, positions, points in self._line.points(u, epoch):
            block = self.base.read_unit(v, seed, 0)
            sample.put(positions, block.take(self._rows_at(block.y, points)))
        return sample.contents

    def _read_targets(self, u: int, seed: int, epoch: int) -> np.ndarray:
        sample = np.empty(self._size(u), np.int64)
        for v, positions, points in self._line.points(u, epoch):
            y = self.base.read_targets(v, seed, 0)
            sample[positions] = y[self._rows_at(y, points)]
        return sample


def with_class_shares(
    source: BaseSource, shares: Mapping[str, float] | Literal["balanced"] | None
) -> BaseSource:
    """Return `source` with class shares, applied to the rows before they are copied.

    shares : as for `BalancedSource`; with None, `source` is returned
    """
    if shares is None:
        return source
    if isinstance(source, AugmentedSource):
        return source.with_base(with_class_shares(source.base, shares))
    return BalancedSource(source, shares)


def without_class_shares(source: BaseSource) -> tuple[BaseSource, np.ndarray | None]:
    """Return `source` without class shares, and the weights (c,) that replace the shares.

    Other sources are returned unchanged, with None for the weights. It is needed where rows predict
    other rows, because these must not be repetitions of the same row.
    """
    if isinstance(source, AugmentedSource):
        base, rates = without_class_shares(source.base)
        if rates is None:
            return source, None
        return source.with_base(base), rates
    if isinstance(source, BalancedSource):
        return source.base, source.rates
    return source, None


class _ClassCounts(NamedTuple):
    """Number of rows of each class in each unit: an entry for each class of each unit.

    ends : (n_units,) end of the entries of each unit
    classes, counts : (ends[-1],) int32, class of each entry, and its number of rows, above 0
    """

    ends: np.ndarray
    classes: np.ndarray
    counts: np.ndarray

    @classmethod
    def read(cls, source: BaseSource) -> _ClassCounts:
        """Return the counts of a source, whose targets are read."""
        classes, counts = [], []
        for y in read_labels(source, range(source.n_units), 0, 0):
            unit_counts = np.bincount(y)
            classes.append(np.flatnonzero(unit_counts).astype(np.int32))
            counts.append(unit_counts[classes[-1]].astype(np.int32))
        ends = np.cumsum([len(part) for part in classes])
        return cls(ends, np.concatenate(classes), np.concatenate(counts))

    def class_rows(self, n_classes: int) -> np.ndarray:
        """Return the number of rows of each class, (c,)."""
        return np.bincount(self.classes, self.counts, minlength=n_classes)

    def unit_sums(self, values: np.ndarray) -> np.ndarray:
        """Return the sums of values (ends[-1],) over each unit, (n_units,)."""
        sums = np.concatenate(([0.0], np.cumsum(values)))
        unit_sums: np.ndarray = np.diff(sums[np.concatenate(([0], self.ends))])
        return unit_sums

    def most_taken_classes(self, rates: np.ndarray) -> np.ndarray:
        """Return the class from which most rows of each unit are taken, (n_units,) int32.

        rates : (c,) number of times that a row of each class is taken
        """
        unit_of_entry = np.searchsorted(self.ends, np.arange(len(self.classes)), side="right")
        # Sorted by unit, then by the number of taken rows: the last entry of a unit has the most.
        order = np.lexsort((self.counts * rates[self.classes], unit_of_entry))
        classes: np.ndarray = self.classes[order[self.ends - 1]]
        return classes


class _Line(NamedTuple):
    """The line of all rates, cut into groups of base units, which are cut into units.

    ends : (n + 1,) start of each base unit on the line, and the end of the line
    first_units : (g + 1,) first base unit of each group, and n
    group_points : (g + 1,) int64 first point of each group, and the number of all points
    groups : (n_units,) group of each unit
    unit_points : (n_units + 1,) first point of each unit, and the number of all points
    """

    ends: np.ndarray
    first_units: np.ndarray
    group_points: np.ndarray
    groups: np.ndarray
    unit_points: np.ndarray

    @classmethod
    def cut(cls, lengths: np.ndarray, n_rows: int, largest: int) -> _Line:
        """Cut the line of the base units.

        lengths : (n,) lengths of the base units on the line; their sum is `n_rows`
        largest : rows of the largest base unit
        """
        ends = np.concatenate(([0.0], np.cumsum(lengths)))
        ends *= n_rows / ends[-1]  # without the rounding error of the sum
        # Join short base units to groups of about half the size of the largest unit, or more.
        min_length = max(largest / 2, 1.0)
        first_units = [0]
        for v in range(1, len(lengths)):
            if ends[v] - ends[first_units[-1]] >= min_length:
                first_units.append(v)
        if len(first_units) > 1 and ends[-1] - ends[first_units[-1]] < min_length:
            first_units.pop()
        bounds = np.array([*first_units, len(lengths)])
        # Cut each group into units of about the size of the largest base unit.
        group_points = np.floor(ends[bounds] + 0.5).astype(np.int64)
        n_points = np.diff(group_points)
        n_units = np.maximum(1, np.floor(n_points / largest + 0.5).astype(np.int64))  # of a group
        groups = np.repeat(np.arange(len(first_units)), n_units)
        index_in_group = np.arange(len(groups)) - np.repeat(np.cumsum(n_units) - n_units, n_units)
        unit_points = group_points[groups] + n_points[groups] * index_in_group // n_units[groups]
        return cls(ends, bounds, group_points, groups, np.append(unit_points, n_rows))

    def points(self, u: int, pass_number: int) -> Iterator[tuple[int, slice, np.ndarray]]:
        """Yield (base unit, positions in unit u, points) for each base unit that has points.

        The points are positions within the base unit, from 0 to 1. A group gets a whole number of
        points, and its part of the line is scaled to that length.
        """
        g = int(self.groups[u])
        group_start = int(self.group_points[g])
        low, high = int(self.unit_points[u]), int(self.unit_points[u + 1])
        units = np.arange(self.first_units[g], self.first_units[g + 1])
        # The base units of the group, as positions in it, scaled to its number of points.
        ends = self.ends[units[0] : units[-1] + 2] - self.ends[units[0]]
        bounds = ends * ((int(self.group_points[g + 1]) - group_start) / ends[-1])
        # The upper 53 of 64 bits, which a float64 holds exactly.
        phi = (((pass_number + 1) * _PASS_STEP + (g + 1) * _GROUP_STEP) % (1 << 64) >> 11) / 2.0**53
        # The first point in each base unit, among the points low … high - 1 of this unit.
        cuts = np.clip(np.ceil(bounds - phi).astype(np.int64) + group_start, low, high)
        cuts[0], cuts[-1] = max(cuts[0], low), high
        for v, start, stop, left, right in zip(
            units, cuts[:-1], cuts[1:], bounds[:-1], bounds[1:], strict=True
        ):
            if start < stop:
                position = np.arange(start - group_start, stop - group_start) + phi
                yield int(v), slice(start - low, stop - low), (position - left) / (right - left)


def _check_base(base: BaseSource) -> None:
    """Raise ConfigError unless `base` can be resampled by class."""
    if base.classes is None:
        raise ConfigError(
            "class_sampling needs classes, but the targets are values",
            "leave it out, or give sample weights instead",
        )
    if base.passes_differ:
        raise ConfigError(
            "class_sampling cannot be applied to rows that are already resampled by class",
            "leave it out",
        )
    if stored_rows(base) is not base:
        raise ConfigError(
            "class_sampling cannot be used with the shares of a mixture "
            f"({mention('data.weights')}), or within copies",
            "leave one of them out",
        )
    if host_transforms(base) or not same_rows(base):
        raise ConfigError(
            "class_sampling needs rows that are the same in every epoch, but these are generated "
            "or transformed when they are read",
            "write them to a store first, or give the transforms to an AugmentedSource of the rows",
        )


def _normalise_shares(
    classes: tuple[str, ...], class_rows: np.ndarray, requested: Mapping[str, Any] | str
) -> np.ndarray:
    """Return the shares (c,), with sum 1; raise ConfigError if the requested ones are invalid.

    class_rows : (c,) number of rows of each class
    """
    has_rows = class_rows > 0
    if isinstance(requested, str):
        if requested != "balanced":
            raise ConfigError(
                f'{mention("class_sampling", requested)} must be "balanced" or shares by class '
                'name; give for example {"rare": 1, "frequent": 3}'
            )
        return np.asarray(has_rows / has_rows.sum())
    if not all(isinstance(s, Real) and 0 < float(s) < inf for s in requested.values()):
        raise ConfigError(
            f"{mention('class_sampling', dict(requested))} must be finite numbers above 0 by class "
            "name",
            "to exclude a class, drop its rows instead of giving it the share 0",
        )
    unknown = [name for name in requested if name not in classes]
    if unknown:
        raise ConfigError(
            f"class_sampling has the class {unknown[0]!r}, which the data does not have",
            f"the classes of the data are {some(classes)}",
        )
    for name, needs_share in zip(classes, has_rows, strict=True):
        if needs_share and name not in requested:
            raise ConfigError(
                f"class_sampling has no share for the class {name!r}",
                "give a share for each class that has rows",
            )
    shares = np.where(has_rows, [float(requested.get(name, 0.0)) for name in classes], 0.0)
    return np.asarray(shares / shares.sum())
