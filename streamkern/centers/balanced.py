"""Centers with equal numbers per class, chosen from the labels of some units."""

from __future__ import annotations

from collections.abc import Iterator
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


class Balanced(CenterSelector):
    """Selector of the same number of random rows from each class."""

    name = "balanced"

    def check(self, source: BaseSource) -> None:
        """Raise ConfigError unless the targets are classes."""
        if source.classes is None:
            raise ConfigError(
                f"{mention('model.centers', 'balanced')} needs classes and the targets are values",
                "set centers = 'random', or another way to choose",
            )

    def choose(self, source: BaseSource, n: int, seed: int) -> tuple[Ints, int]:
        """Choose rows by `balanced_numbers`."""
        return balanced_numbers(source, n, seed)


def balanced_numbers(source: BaseSource, p: int, seed: int) -> tuple[Ints, int]:
    """Return p distinct random rows, equally many of each class or all it has, and rows read.

    The remainder of p / c goes to classes drawn at random. The labels of 256 random units are read,
    without X if the source can, and those of further units for the classes that have too few rows
    in them: at most all units, once. The rows of a class in the 256 units are taken first, each
    with the same probability. The choice depends on the seed and the units alone.

    Memory: about 5 p row numbers, and the labels of a few units.
    """
    rng = np.random.default_rng([seed, Stage.SAMPLE, BALANCED_STAGE])
    edges = unit_edges(source)
    known = _class_counts(source)
    c, order = source.n_outputs, rng.permutation(len(edges) - 1)
    favoured = rng.permutation(c)
    # Rows of a class that is full are not counted any further.
    seen, pool, looked_at = np.zeros(c, np.int64), _Pool.empty(), 0
    for turn, (u, labels) in enumerate(_labels(source, order, seed)):
        rows = np.arange(edges[u], edges[u + 1])
        looked_at += len(rows)
        # One more than now: a later class may leave its remainder to this one.
        limit = quotas(seen, p, favoured) + 1
        if turn >= SAMPLE_UNITS:  # rows of earlier units come first
            lacking = (seen < limit)[labels]
            rows, labels = rows[lacking], labels[lacking]
        seen += np.bincount(labels, minlength=c)
        turns = np.full(len(rows), max(0, turn + 1 - SAMPLE_UNITS))
        pool = pool.with_rows(turns, _keys(seed, rows), rows, labels)
        if len(pool.rows) > 5 * p:
            pool = pool.smallest(quotas(seen, p, favoured) + 1)
        wanted = quotas(seen if known is None else known, p, favoured)
        enough = wanted if known is not None else np.full(c, -(-p // c))
        if turn + 1 >= min(SAMPLE_UNITS, len(order)) and (seen >= enough).all():
            break
    chosen = pool.smallest(wanted).rows
    return chosen, looked_at


def quotas(counts: Ints, p: int, favoured: Ints) -> Ints:
    """Return the rows of each class: (c,), as equal as `counts` (c,) allow.

    Their sum is min(p, sum(counts)).

    favoured : the classes in the order in which they get one of the remaining rows.
    """
    ordered = np.sort(counts)
    # Level L: the smallest classes contribute all rows they have, the others L each.
    before = np.concatenate(([0], np.cumsum(ordered)[:-1]))
    levels = np.maximum(p - before, 0) // np.arange(len(counts), 0, -1)
    level = int(levels[np.argmax(levels < ordered)]) if (levels < ordered).any() else ordered[-1]
    shares = np.minimum(counts, level)
    left = max(0, min(p, int(counts.sum())) - int(shares.sum()))
    shares[favoured[counts[favoured] > level][:left]] += 1
    return shares


def _class_counts(source: BaseSource) -> Ints | None:
    """Return the rows of each class, (c,), if stores know them; None if they have to be counted."""
    if source.host_transforms:  # they may change y
        return None
    if isinstance(source, ZarrSource):
        counts = source.store.spec.class_counts
        return None if counts is None else np.array(counts, np.int64)
    if not isinstance(source, MixtureSource) or source.weights is not None:
        return None
    parts = [rows for part in source.parts if (rows := _class_counts(part)) is not None]
    return np.sum(parts, axis=0) if len(parts) == len(source.parts) else None


class _Pool(NamedTuple):
    """Rows that may be chosen, in the order of (turn, key). Each field is (k,)."""

    turns: Ints
    keys: Ints
    rows: Ints
    labels: Ints

    @classmethod
    def empty(cls) -> _Pool:
        return cls(*(np.empty(0, np.int64) for _ in cls._fields))

    def with_rows(self, *more: Ints) -> _Pool:
        return _Pool(*(np.concatenate(pair) for pair in zip(self, more, strict=True)))

    def smallest(self, limit: Ints) -> _Pool:
        """Return the first limit[k] rows of each class k, in order of classes."""
        order = np.lexsort((self.rows, self.keys, self.turns, self.labels))
        labels = self.labels[order]
        position = np.arange(len(order)) - np.searchsorted(labels, labels)
        return _Pool(*(part[order[position < limit[labels]]] for part in self))


def _labels(source: BaseSource, order: Ints, seed: int) -> Iterator[tuple[int, Ints]]:
    return zip((int(u) for u in order), read_labels(source, order, seed, 0), strict=True)


def _keys(seed: int, rows: Ints) -> Ints:
    """Return 63 random bits for each row."""
    high, low = words((seed, 0, Stage.SAMPLE, BALANCED_STAGE), rows, 2).T.astype(np.int64)
    keys: Ints = (high << 31) | (low >> 1)
    return keys
