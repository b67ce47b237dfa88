"""A bounded sample of the training rows, split into rows to fit and rows held out.

The sample is of stored rows, before any augmentation, and without repetition: what is held out
shares no row with what is fitted, and is not augmented. It is read in units from all over the
data; memory is that of the sample, and of one split, whatever the size of the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.errors import ConfigError, DataError
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource, without_copies
from streamkern.stream.sources.base import BaseSource, concatenated
from streamkern.stream.sources.class_sampling import BalancedSource
from streamkern.stream.sources.derived import host_transforms
from streamkern.stream.sources.mixture import MixtureSource, stored_rows
from streamkern.stream.sources.sampling import MANY_UNITS, origins_of, sample_rows
from streamkern.stream.sources.transforms import transform_name
from streamkern.train.training_data import Data

TUNING_SAMPLE_STAGE, SPLIT_STAGE = 31, 32
MIN_ROWS = 5
HELD_OUT_PARTS_OF = 5  # one row in so many, or in as many as there are splits, if those are more


@dataclass(frozen=True, eq=False)
class SearchSample:
    """Stored rows in random order, with what it takes to train on a part of them.

    X : (n, *row_shape) as stored. y : (n,) class ids, or (n, c) values. stratum : (n,) int64, what
    every split has in the same shares: store (of a weighted mixture) and class.
    source : the stream they were drawn from, whose augmentation and scaling are put on them.
    w : (n,) sample weights, or None; they count in training and in what is held out.
    """

    X: npt.NDArray[Any]
    y: npt.NDArray[Any]
    stratum: npt.NDArray[np.int64]
    source: BaseSource
    w: npt.NDArray[Any] | None = None

    def held_out(self, fold: int, n_parts: int, seed: int) -> npt.NDArray[np.bool_]:
        """Which rows split `fold` holds out, (n,)."""
        found: npt.NDArray[np.bool_] = parts_of(self.stratum, n_parts, seed) == fold
        return found

    def split(
        self, fold: int, n_parts: int, seed: int, max_copies: int
    ) -> tuple[BaseSource, ArraySource]:
        """(rows to train on, rows held out) of split `fold`; those of two splits are disjoint.

        max_copies : at most so many replicas of an augmented source. Raises DataError where
        nothing is left to hold out.
        """
        out = self.held_out(fold, n_parts, seed)
        if not out.any():
            raise DataError(
                f"split {fold + 1} has no rows to hold out: {len(self.X)} rows in "
                f"{len(np.unique(self.stratum))} classes are too few for {n_parts} parts; take "
                "more rows"
            )
        fit, held_out = (
            ArraySource(
                self.X[rows],
                self.y[rows],
                classes=self.source.classes,
                sample_weight=None if self.w is None else self.w[rows],
            )
            for rows in (~out, out)
        )
        return _like(self.source, fit, max_copies), held_out


def draw(data: Data, n: int, seed: int) -> SearchSample:
    """About n distinct stored rows, fewer where the data has fewer.

    Stores of a weighted mixture are in it in their shares.
    """
    _check_plain(data)
    parts, shares = _parts(data)
    total = min(n, *(part.n_rows / share for part, share in zip(parts, shares, strict=True)))
    blocks = []
    for k, (part, share) in enumerate(zip(parts, shares, strict=True)):
        block = sample_rows(
            part, max(1, int(total * share)), seed, stage=TUNING_SAMPLE_STAGE + k * 100,
            max_units=max(1, MANY_UNITS // len(parts)),
        )  # fmt: skip
        # Of copies in a store one: others would be learned by heart where it is held out.
        first = np.unique(origins_of(part, block.rows), return_index=True)[1]
        blocks.append(block.take(np.sort(first)))
    X, y, _, w = blocks[0] if len(blocks) == 1 else concatenated(blocks)
    stratum = np.repeat(np.arange(len(blocks)), [len(block.X) for block in blocks])
    if data.source.classes is not None:
        stratum = stratum * data.source.n_outputs + y
    if len(X) < MIN_ROWS:
        raise DataError(f"a sample of {len(X)} rows can not be split; it takes {MIN_ROWS} at least")
    return SearchSample(X, y, stratum, data.source, w)


def parts_of(stratum: npt.NDArray[np.int64], n_parts: int, seed: int) -> npt.NDArray[np.int64]:
    """Part 0 … n_parts - 1 of every row, (n,), a pure function of its arguments.

    The rows of a stratum are dealt out in random order, and dealing goes on with the next one, so
    that parts differ by a row at most, in all and in every stratum. A row that is alone in its
    stratum is in no part, -1: held out, it could not be learned.
    """
    rng = np.random.default_rng([seed, SPLIT_STAGE])
    part, dealt = np.full(len(stratum), -1), 0
    names, counts = np.unique(stratum, return_counts=True)
    for name in names[counts > 1]:
        rows = rng.permutation(np.flatnonzero(stratum == name))
        part[rows] = (dealt + np.arange(len(rows))) % n_parts
        dealt += len(rows)
    return part


def _parts(data: Data) -> tuple[list[BaseSource], list[float]]:
    """The stores that are drawn from, and the share of each."""
    source = without_copies(data.source)
    if not isinstance(source, MixtureSource) or source.weights is None:
        return [data.base], [1.0]
    total = sum(source.weights)
    return [stored_rows(part) for part in source.parts], [w / total for w in source.weights]


def _like(source: BaseSource, rows: ArraySource, max_copies: int) -> BaseSource:
    """`rows` with the augmentation, the scaling and the shares of classes of `source`."""
    if isinstance(source, AugmentedSource):
        below = _like(source.base, rows, max_copies)
        transforms = [*source.host_transforms, *source._own_feed()]
        return AugmentedSource(below, min(source.copies, max_copies), transforms)
    own = BalancedSource(rows, source.wish) if isinstance(source, BalancedSource) else rows
    return AugmentedSource(own, 1, source.feed_transforms) if source.feed_transforms else own


def _check_plain(data: Data) -> None:
    """Raise unless the rows that are read are the stored ones."""
    done = host_transforms(data.base)
    source = without_copies(data.source)
    inner = [part for part in source.parts if isinstance(part, AugmentedSource)]
    if done or inner:
        what = f"by {transform_name(done[0])!r}" if done else "in a part of the mixture"
        raise ConfigError(
            f"the source is augmented {what}, where rows held out would be as well; augment it as "
            "a whole, by an AugmentedSource around it"
        )
