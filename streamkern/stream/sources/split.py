"""Split rows into those to train on and a share set aside for validation or calibration.

The split is a function of seed and rows alone, so a resumed run sets the same rows aside. It is
made for the original rows, not for their copies: no replica of a row set aside is trained on, and
this row is read without augmentation. Equal rows are kept on one side where `split_rows` searches
for them, which reads rows. No array of n entries is stored.

    store of chunks      the share of the rows, from 256 random chunks, or from more if these hold
                         too few rows; an evaluation reads only these chunks
    array in memory      the same, with the same share of each class
    store of copies      all rows of randomly drawn origins; reads the origins of all rows
    mixture, augmented,  each member or base is split, and the source is made anew from the rows to
    class shares         train on
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from streamkern.basics.errors import ConfigError, DataError
from streamkern.basics.message import mention
from streamkern.basics.randomness import RowRandom, Stage
from streamkern.store.row_block import RowBlock
from streamkern.store.sample_weights import add_totals
from streamkern.store.statistics import ColumnMoments
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.base import BaseSource, DerivedSource, prefetch_results
from streamkern.stream.sources.class_sampling import BalancedSource
from streamkern.stream.sources.mixture import MixtureSource
from streamkern.stream.sources.repeated_rows import (
    NO_MOVES,
    Draw,
    DuplicateMoves,
    moves_of_equal_rows,
)
from streamkern.stream.sources.sampling import SAMPLE_UNITS
from streamkern.stream.sources.unit_edges import unit_edges
from streamkern.stream.sources.user import GeneratorSource, UserSource


class SplitPurpose(NamedTuple):
    """The purpose of rows set aside.

    stage : stage that keys the random draw
    setting : setting that requests the rows, for messages
    share : format of the setting that determines their share, for messages
    remedy : advice if there are too few rows
    """

    stage: Stage
    setting: str
    share: str
    remedy: str


TO_VALIDATE = SplitPurpose(
    Stage.VALIDATION, "early_stopping", "validation_fraction={:g}", "or change the fraction"
)
TO_CALIBRATE = SplitPurpose(Stage.CALIBRATION, "calibrate", "calibrate=True", "or leave it out")


def split_rows(
    source: BaseSource, share: float, seed: int, purpose: SplitPurpose = TO_VALIDATE
) -> tuple[BaseSource, BaseSource]:
    """Return (rows to train on, rows set aside, without augmentation) of `source`.

    share : share of the stored rows, between 0 and 1

    Reads the origins of the rows of a store of copies. Equal rows of other sources are searched for
    (`moves_of_equal_rows`) if these are in memory or have at most `SAMPLE_UNITS` units; otherwise
    equal rows may be on both sides.

    Raises
    ------
    ConfigError
        If rows are made by a function or a user's source, or come in the shares of a mixture; if
        the origins of copies in a store are unknown, or may be rows of another source; or if
        columns are reordered after an augmentation.
    DataError
        If too few rows would be set aside or left to train on.
    """
    splits = [_Split(leaf, share, seed, purpose) for leaf in _leaves(source, purpose)]
    without_origins = [split for split in splits if not split.base.n_origins]
    stored_splits = [split for split in without_origins if not _in_memory(split.base)]
    if sum(len(split.sizes) for split in stored_splits) <= SAMPLE_UNITS:  # else too much is read
        moves_of_splits = moves_of_equal_rows([split.draw() for split in without_origins])
        for split, moves in zip(without_origins, moves_of_splits, strict=True):
            split.apply_moves(moves)
    for split in splits:
        split.check(purpose)
    return _split_sources(source, iter(splits))


def _leaves(source: BaseSource, purpose: SplitPurpose) -> Iterator[BaseSource]:
    """Yield the stored sources that are split separately; raise ConfigError as `split_rows`."""
    if isinstance(source, MixtureSource):
        if source.weights is not None:
            raise ConfigError(
                f"{purpose.setting} cannot be used with the shares of a mixture "
                f"({mention('data.weights')}), but the rows that are set aside would not have "
                "these shares",
                "leave one of them out",
            )
        if len({part.hides_copies for part in _stored_sources(source)}) > 1:
            raise ConfigError(
                f"{purpose.setting} cannot be used with a store of copies in a mixture, because "
                "the copies may come from rows of the other sources",
                f"leave {purpose.setting} out, or train on the store alone",
            )
    if isinstance(source, AugmentedSource | BalancedSource | MixtureSource):
        for part in source.parts:
            yield from _leaves(part, purpose)
        return
    _check_stored(source, purpose.setting)
    yield source


def _split_sources(source: BaseSource, splits: Iterator[_Split]) -> tuple[BaseSource, BaseSource]:
    """Return the result of `split_rows`.

    splits : splits of the `_leaves` of the source, in order
    """
    if isinstance(source, AugmentedSource):
        train, held_out = _split_sources(source.base, splits)
        return source.with_base(train), held_out
    if isinstance(source, BalancedSource):
        train, held_out = _split_sources(source.base, splits)
        return BalancedSource(train, source.requested_shares), held_out
    if isinstance(source, MixtureSource):
        parts = [_split_sources(part, splits) for part in source.parts]
        transforms = (*source.host_transforms, *source.feed_transforms)
        train = MixtureSource([train_part for train_part, _ in parts], transforms=transforms)
        return train, MixtureSource([held_out for _, held_out in parts])
    split = next(splits)
    return SplitSource(split, held_out=False), SplitSource(split, held_out=True)


def n_distinct_rows(held_out: BaseSource) -> int:
    """Return the number of rows set aside, counting equal rows once.

    held_out : second result of `split_rows`
    """
    n_copies = sum(part.n_rows - n_distinct_rows(part) for part in held_out.parts)
    if isinstance(held_out, SplitSource) and held_out.held_out:
        n_copies += len(held_out.split.moves.copies)
    return held_out.n_rows - n_copies


def _stored_sources(source: BaseSource) -> Iterator[BaseSource]:
    """Yield the stores and arrays from which a source is made."""
    if not source.parts:
        yield source
    for part in source.parts:
        yield from _stored_sources(part)


def _check_stored(source: BaseSource, setting: str) -> None:
    """Raise ConfigError unless the source is the rows of one store or array."""
    if isinstance(source, GeneratorSource | UserSource):
        raise ConfigError(
            f"{setting} cannot be used with rows that your own function or source generates, "
            "because streamkern cannot detect copies of the same row among them",
            f"leave {setting} out, or write them to a store first",
        )
    if source.hides_copies and not source.n_origins:
        raise ConfigError(
            f"{setting} cannot be used with a store that mixes copies and other data, because "
            "streamkern cannot detect which rows are copies of the same row",
            f"leave {setting} out",
        )
    for part in source.parts:  # columns in another order
        if isinstance(part, AugmentedSource | MixtureSource) or part.host_transforms:
            raise ConfigError(
                f"{setting} cannot be used if columns are reordered after an augmentation or a "
                "mixture",
                "store the columns of all sources in the same order",
            )
        _check_stored(part, setting)


def max_rows_read(source: BaseSource) -> int:
    """Return the largest number of rows that one read of `source` decodes and partly discards."""
    largest = 0
    if isinstance(source, SplitSource):
        largest = source.split.largest
    if isinstance(source, BalancedSource):
        largest = source.largest
    return max([largest, *map(max_rows_read, source.parts)])


class _Split:
    """The rows of each unit of `base` that are set aside.

    share : share of the rows
    edges, sizes : (n_units + 1,) edges of the units, and (n_units,) their numbers of rows
    largest : number of rows of the largest unit
    by_class : whether the same share of each class is set aside
    counts : (n_units,) number of rows of each unit that are set aside
    drawn_counts : the same before equal rows were moved to one side
    moves : the rows that were moved
    """

    def __init__(self, base: BaseSource, share: float, seed: int, purpose: SplitPurpose) -> None:
        self.base, self.share, self.seed, self.stage = base, share, seed, purpose.stage
        self.edges = unit_edges(base)
        self.sizes = np.diff(self.edges)
        self.largest = int(self.sizes.max())
        self.by_class = base.classes is not None and _in_memory(base)
        if base.n_origins:  # the origins of all rows are read
            calls = (partial(self.drawn_mask, u) for u in range(len(self.sizes)))
            counts = [np.count_nonzero(mask) for mask in prefetch_results(base, calls)]
            self.counts = np.array(counts, np.int64)
        else:
            self.counts = _rows_per_unit(self.sizes, share, seed, self.stage)
        self.drawn_counts, self.moves = self.counts, NO_MOVES

    def draw(self) -> Draw:
        """Return the rows set aside before equal rows are moved together."""
        read_unit = partial(read_stored_block, self.base)
        return Draw(self.base, self.edges, self.drawn_counts, self.drawn_mask, read_unit)

    def apply_moves(self, moves: DuplicateMoves) -> None:
        """Move rows to the other side."""
        self.moves = moves
        units = np.searchsorted(self.edges, moves.rows, side="right") - 1
        self.counts = self.drawn_counts.copy()
        np.add.at(self.counts, units, np.where(moves.is_drawn, 1, -1))

    def check(self, purpose: SplitPurpose) -> None:
        """Raise DataError unless there are rows on both sides."""
        n = int(self.counts.sum())
        if not 2 <= n < self.base.n_rows:
            raise DataError(
                f"{purpose.share.format(self.share)} sets {n} of {self.base.n_rows} rows aside",
                "at least two rows must be set aside, and one left for training: give more "
                f"rows, {purpose.remedy}",
            )

    def drawn_mask(self, u: int) -> np.ndarray:
        """Return whether each row of unit u is set aside, (k,) bool; moves are applied if any."""
        if self.base.n_origins:
            origins = self.base.origins(u, 0).astype(np.int64)
            draws = RowRandom(np, self.seed, 0, self.stage, origins, np.float64)
            has_drawn_origin: np.ndarray = draws.uniform() < self.share
            return has_drawn_origin
        # The random draw of `count` rows: at equal steps through a random order.
        n_rows, count = int(self.sizes[u]), int(self.drawn_counts[u])
        rng = np.random.default_rng([self.seed, self.stage, 1, u])
        order, start = rng.permutation(n_rows), rng.random()
        if self.by_class:  # equal steps through the classes take the same share of each
            labels = self.base.read_targets(u, 0, 0)
            order = order[np.argsort(labels[order], kind="stable")]
        is_drawn = np.zeros(n_rows, bool)
        if count:
            steps = (np.arange(count) + start) * (n_rows / count)
            is_drawn[order[steps.astype(np.int64)]] = True
        # The rows of the unit that were moved.
        in_unit = slice(*np.searchsorted(self.moves.rows, self.edges[u : u + 2]))
        is_drawn[self.moves.rows[in_unit] - self.edges[u]] = self.moves.is_drawn[in_unit]
        return is_drawn


def _rows_per_unit(sizes: np.ndarray, share: float, seed: int, stage: Stage) -> np.ndarray:
    """Return the number of rows to set aside in each unit, (n_units,) int64.

    The sum is `share` of all rows, rounded. Rows are taken from all units if there are at most
    `SAMPLE_UNITS`, otherwise from that many random units, or more if the share needs them.
    """
    n_units = len(sizes)
    n_chosen = max(math.ceil(share * n_units), min(n_units, SAMPLE_UNITS))
    rng = np.random.default_rng([seed, stage, 0])
    chosen = np.sort(rng.permutation(n_units)[:n_chosen])
    available = np.cumsum(sizes[chosen])
    share_of_chosen = min(share * sizes.sum() / available[-1], 1.0)
    counts = np.zeros(n_units, np.int64)
    counts[chosen] = np.diff(
        np.floor(available * share_of_chosen + 0.5).astype(np.int64), prepend=0
    )
    return np.asarray(np.minimum(counts, sizes))


def _in_memory(source: BaseSource) -> bool:
    """Return whether the rows, before any host transform, are in memory."""
    if isinstance(source, SplitSource):
        return _in_memory(source.base)
    is_array = isinstance(source, ArraySource) and not source.host_transforms
    return is_array and not source.statistics_read


def read_stored_block(source: BaseSource, u: int) -> RowBlock:
    """Return the rows of unit u, before any host transforms."""
    return source.read_stored(u) if isinstance(source, SplitSource) else source.read_rows(u, 0, 0)


class SplitSource(DerivedSource):
    """The rows that a split sets aside, or the rows that are left to train on.

    The units are the units of the base that hold such rows. The statistics describe all rows of the
    base.

    held_out : whether these are the rows set aside, which are read without transforms
    """

    kind = "split"

    def __init__(self, split: _Split, *, held_out: bool) -> None:
        base = split.base
        self.split, self.held_out, self.parts = split, held_out, (base,)
        self._copy_from(base, *self._ROW_ATTRIBUTES)
        self._copy_from(base, "remote", "level", "repeats", "hides_copies", "statistics_read")
        counts = split.counts if held_out else split.sizes - split.counts
        self._units = np.flatnonzero(counts)
        self._edges = np.concatenate(([0], np.cumsum(counts[self._units])))
        self._base_edges = unit_edges(base)
        self.n_rows = int(self._edges[-1])
        self.n_origins = round(base.n_origins * self.n_rows / base.n_rows)
        self.feed_transforms = () if held_out else base.feed_transforms
        self.totals = self._totals()

    def describe(self) -> dict[str, Any]:
        description = super().describe()
        description |= {"share": self.split.share, "base": self.base.describe()}
        n_moved = len(self.split.moves.rows)
        return description | {"moved": n_moved} if n_moved else description

    def _totals(self) -> np.ndarray | None:
        """Return `totals`, counted if the rows are in memory, else in proportion to the rows."""
        base = self.base
        if base.totals is None:
            return None
        if not _in_memory(base):
            return np.asarray(base.totals * (self.n_rows / base.n_rows))
        totals = np.zeros_like(base.totals)
        for u in range(self.n_units):
            block = self.read_stored(u)
            add_totals(totals, block.y, block.w, base.classes is not None)
        return totals

    def read_stored(self, u: int) -> RowBlock:
        """Return the rows of unit u as stored."""
        return read_stored_block(self.base, int(self._units[u])).take(self._index(u))

    def _index(self, u: int) -> np.ndarray:
        """Return the positions of the rows of unit u in the unit of the base, (k,) ascending."""
        is_held_out = self.split.drawn_mask(int(self._units[u]))
        return np.flatnonzero(is_held_out if self.held_out else ~is_held_out)

    def _read(self, u: int, seed: int, epoch: int) -> tuple[np.ndarray, ...]:
        if self.held_out:
            return self.read_stored(u).contents
        unit = int(self._units[u])
        block = self.base.read_unit(unit, seed, epoch)
        is_whole = not self.split.counts[unit]  # no row was set aside, and none has to be copied
        return block.contents if is_whole else block.take(self._index(u)).contents

    def _read_targets(self, u: int, seed: int, epoch: int) -> np.ndarray:
        targets = self.base.read_targets(int(self._units[u]), seed, epoch)
        return np.asarray(targets[self._index(u)])

    def source_rows(self, u: int) -> np.ndarray:
        return np.asarray(self.base.source_rows(int(self._units[u]))[self._index(u)])

    def origins(self, u: int, epoch: int) -> np.ndarray:
        """Return the origins in the base; equal rows set aside have one origin, the first row."""
        unit, index, moves = int(self._units[u]), self._index(u), self.split.moves
        if not self.held_out or not len(moves.copies):
            return np.asarray(self.base.origins(unit, epoch)[index])
        rows = index + self._base_edges[unit]
        nearest = np.minimum(np.searchsorted(moves.copies, rows), len(moves.copies) - 1)
        first_equal = np.where(moves.copies[nearest] == rows, moves.firsts[nearest], rows)
        return np.asarray(first_equal, np.uint64)

    def find_rows(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Find rows as `BaseSource` does, among the rows that the base finds."""
        matches = self.base.find_rows(X)
        if matches is None:
            return None
        base_rows, index = matches
        position = np.full(len(base_rows), -1)  # in this source; -1 for rows of the other side
        unit_of_match = np.searchsorted(self._base_edges, base_rows, side="right") - 1
        units_of_matches = np.flatnonzero(np.isin(self._units, unit_of_match))
        for u in units_of_matches.tolist():
            rows_of_unit = self._index(u) + self._base_edges[self._units[u]]
            nearest = np.minimum(np.searchsorted(rows_of_unit, base_rows), len(rows_of_unit) - 1)
            is_found = rows_of_unit[nearest] == base_rows
            position[is_found] = self._edges[u] + nearest[is_found]
        return position[position >= 0], index[position >= 0]

    def target_moments(self) -> ColumnMoments | None:
        return self.base.target_moments()
