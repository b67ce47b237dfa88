"""Selection of random centers with equal numbers of each class."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from streamkern.basics.array_types import Ints
from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.randomness import Stage, words
from streamkern.centers.selector import CenterSelector
from streamkern.stream.sources.base import BaseSource, read_labels
from streamkern.stream.sources.mixture import MixtureSource
from streamkern.stream.sources.sampling import SAMPLE_UNITS
from streamkern.stream.sources.stores import ZarrSource
from streamkern.stream.sources.unit_edges import unit_edges

BALANCED_STAGE = 24
"""Number that separates the random draws of this module from others of the same seed."""


class Balanced(CenterSelector):
    """Selector of the same number of random rows from each class."""

    name = "balanced"

    def check(self, source: BaseSource) -> None:
        """Raise ConfigError unless the targets are classes."""
        if source.classes is None:
            raise ConfigError(
                f"{mention('model.centers', 'balanced')} needs targets that are classes, but they "
                "are values",
                "set centers = 'random', or another selector",
            )

    def choose(self, source: BaseSource, n: int, seed: int) -> tuple[Ints, int]:
        """Return the row numbers of n rows, equally many of each class, and how many were read.

        The rows are distinct and random. All rows of a class are taken if it has too few. The
        remainder of n / c goes to classes that are drawn at random.

        The labels of `SAMPLE_UNITS` random units are read, without X if the source can. If a class
        has too few rows there, further units are read, each at most once. Rows of the first units
        are preferred, and each row of a class in them has the same probability. The choice depends
        on the seed and on the units alone.

        The memory is about 5 n row numbers, and the labels of a few units.
        """
        rng = np.random.default_rng([seed, Stage.SAMPLE, BALANCED_STAGE])
        edges = unit_edges(source)
        class_counts = _class_counts(source)
        c, order = source.n_outputs, rng.permutation(len(edges) - 1)
        favoured = rng.permutation(c)
        labels_of_units = read_labels(source, order, seed, 0)
        # Rows of each class in the pool. After SAMPLE_UNITS units, full classes get no more.
        n_seen = np.zeros(c, np.int64)
        pool = _Pool.empty()
        n_read = 0
        for i, (unit, labels) in enumerate(zip(order.tolist(), labels_of_units, strict=True)):
            rows = np.arange(edges[unit], edges[unit + 1])
            n_read += len(rows)
            # One more than the current quota, because a remainder may still move to this class.
            limit = quotas(n_seen, n, favoured) + 1
            if i >= SAMPLE_UNITS:  # only for classes with too few rows in the earlier units
                has_too_few = (n_seen < limit)[labels]
                rows, labels = rows[has_too_few], labels[has_too_few]
            n_seen += np.bincount(labels, minlength=c)
            turns = np.full(len(rows), max(0, i + 1 - SAMPLE_UNITS))
            pool = pool.with_rows(turns, _keys(seed, rows), rows, labels)
            if len(pool.rows) > 5 * n:
                pool = pool.smallest(quotas(n_seen, n, favoured) + 1)
            quota = quotas(n_seen if class_counts is None else class_counts, n, favoured)
            sufficient = quota if class_counts is not None else np.full(c, -(-n // c))
            if i + 1 >= min(SAMPLE_UNITS, len(order)) and (n_seen >= sufficient).all():
                break
        return pool.smallest(quota).rows, n_read


def quotas(counts: Ints, p: int, favoured: Ints) -> Ints:
    """Return the numbers of rows to choose from each class, (c,), as equal as `counts` allow.

    Their sum is min(p, sum(counts)).

    counts : (c,) available rows of each class.
    favoured : (c,) classes, in the order in which they receive one of the remaining rows.
    """
    ascending = np.sort(counts)
    # The smallest classes contribute all of their rows, and each of the others `share` rows.
    n_in_smaller = np.concatenate(([0], np.cumsum(ascending)[:-1]))
    shares = np.maximum(p - n_in_smaller, 0) // np.arange(len(counts), 0, -1)
    is_larger = ascending > shares
    share = int(shares[np.argmax(is_larger)]) if is_larger.any() else ascending[-1]
    numbers = np.minimum(counts, share)
    remainder = max(0, min(p, int(counts.sum())) - int(numbers.sum()))
    numbers[favoured[counts[favoured] > share][:remainder]] += 1
    return numbers


def _class_counts(source: BaseSource) -> Ints | None:
    """Return the number of rows of each class, (c,), if stores record it; else None."""
    if source.host_transforms:  # which may change y
        return None
    if isinstance(source, ZarrSource):
        counts = source.store.spec.class_counts
        return None if counts is None else np.array(counts, np.int64)
    if not isinstance(source, MixtureSource) or source.weights is not None:
        return None
    total = np.zeros(source.n_outputs, np.int64)
    for part in source.parts:
        part_counts = _class_counts(part)
        if part_counts is None:
            return None
        total += part_counts
    return total


class _Pool(NamedTuple):
    """Rows that may be chosen. Each field is (k,).

    turns : rows with a smaller turn are chosen first; 0 for the first `SAMPLE_UNITS` units, then
        1, 2, ... for each further unit.
    keys : random order of rows with the same turn.
    rows, labels : row numbers and classes.
    """

    turns: Ints
    keys: Ints
    rows: Ints
    labels: Ints

    @classmethod
    def empty(cls) -> _Pool:
        return cls(*(np.empty(0, np.int64) for _ in cls._fields))

    def with_rows(self, *fields: Ints) -> _Pool:
        """Return the pool with further rows, given by the values of each field."""
        return _Pool(*(np.concatenate(pair) for pair in zip(self, fields, strict=True)))

    def smallest(self, limit: Ints) -> _Pool:
        """Return the first limit[k] rows of each class k, sorted by class."""
        order = np.lexsort((self.rows, self.keys, self.turns, self.labels))
        labels = self.labels[order]
        position = np.arange(len(order)) - np.searchsorted(labels, labels)
        return _Pool(*(field[order[position < limit[labels]]] for field in self))


def _keys(seed: int, rows: Ints) -> Ints:
    """Return 63 random bits for each row."""
    high, low = words((seed, 0, Stage.SAMPLE, BALANCED_STAGE), rows, 2).T.astype(np.int64)
    keys: Ints = (high << 31) | (low >> 1)
    return keys
