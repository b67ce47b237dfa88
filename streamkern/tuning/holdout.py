"""Draw a bounded sample of the training rows, and split it into rows to fit and held-out rows.

The sample has distinct stored rows, before any augmentation. Held-out rows are therefore no copies
of rows to fit, and are not augmented. The sample is read from units that are spread over the data.
Memory holds the sample and one fold, whatever the size of the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.errors import ConfigError, DataError
from streamkern.store.row_block import concatenate_blocks
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource, without_copies
from streamkern.stream.sources.base import BaseSource, host_transforms
from streamkern.stream.sources.class_sampling import BalancedSource
from streamkern.stream.sources.mixture import MixtureSource, stored_rows
from streamkern.stream.sources.sampling import SAMPLE_UNITS, row_origins, sample_rows
from streamkern.stream.sources.transforms import transform_name
from streamkern.train.resolve.training_data import Data

TUNING_SAMPLE_STAGE, SPLIT_STAGE = 31, 32
"""Keys of the random draws by which the sample is drawn, and split."""
MIN_ROWS = 5
"""Smallest number of rows of a sample."""
MIN_PARTS = 5
"""Smallest number of parts of the sample; each fold holds out one part."""


@dataclass(frozen=True, eq=False)
class SearchSample:
    """Stored rows in random order, and the source whose transforms they need for training.

    X : (n, *row_shape) stored rows
    y : (n,) class ids, or (n, c) values
    stratum : (n,) int64, which identifies the store of a row (in a weighted mixture) and its class;
        every fold has the same shares of the strata
    source : source from which they were drawn, whose augmentation and scaling are applied to them
    w : (n,) sample weights, or None; they count in training and in held-out figures
    """

    X: npt.NDArray[Any]
    y: npt.NDArray[Any]
    stratum: npt.NDArray[np.int64]
    source: BaseSource
    w: npt.NDArray[Any] | None = None

    def held_out(self, fold: int, n_parts: int, seed: int) -> npt.NDArray[np.bool_]:
        """Return a mask (n,) of the rows that a fold holds out."""
        is_held_out: npt.NDArray[np.bool_] = part_of_rows(self.stratum, n_parts, seed) == fold
        return is_held_out

    def split(
        self, fold: int, n_parts: int, seed: int, max_copies: int
    ) -> tuple[BaseSource, ArraySource]:
        """Return (rows to fit, held-out rows) of a fold.

        The held-out rows of two folds are disjoint.

        n_parts : number of parts of the sample
        max_copies : largest number of replicas of an augmented source

        Raises DataError if there are no rows to hold out.
        """
        is_held_out = self.held_out(fold, n_parts, seed)
        if not is_held_out.any():
            raise DataError(
                f"fold {fold + 1} has no rows to hold out: {len(self.X)} rows in "
                f"{len(np.unique(self.stratum))} classes are too few for {n_parts} parts",
                "give more rows",
            )
        fit, held_out = (
            ArraySource(
                self.X[rows],
                self.y[rows],
                classes=self.source.classes,
                sample_weight=None if self.w is None else self.w[rows],
            )
            for rows in (~is_held_out, is_held_out)
        )
        return _with_transforms_of(self.source, fit, max_copies), held_out


def draw_sample(data: Data, n: int, seed: int) -> SearchSample:
    """Draw about n distinct stored rows, or fewer if the data has fewer.

    A weighted mixture is represented according to its weights.

    Raises ConfigError if the rows are augmented before they can be split, and DataError if there
    are too few.
    """
    _check_unaugmented(data)
    parts, shares = _stores_and_shares(data)
    total = min(n, *(part.n_rows / share for part, share in zip(parts, shares, strict=True)))
    blocks = []
    for k, (part, share) in enumerate(zip(parts, shares, strict=True)):
        block = sample_rows(
            part, max(1, int(total * share)), seed, stage=TUNING_SAMPLE_STAGE + k * 100,
            max_units=max(1, SAMPLE_UNITS // len(parts)),
        )  # fmt: skip
        # Of several stored copies, take one: a copy of a fitted row must not be held out.
        first_copies = np.unique(row_origins(part, block.row_ids), return_index=True)[1]
        blocks.append(block.take(np.sort(first_copies)))
    X, y, w, _ = concatenate_blocks(blocks)
    stratum = np.repeat(np.arange(len(blocks)), [len(block.X) for block in blocks])
    if data.source.classes is not None:
        stratum = stratum * data.source.n_outputs + y
    if len(X) < MIN_ROWS:
        raise DataError(
            f"a sample of {len(X)} rows cannot be split", f"give at least {MIN_ROWS} rows"
        )
    return SearchSample(X, y, stratum, data.source, w)


def part_of_rows(stratum: npt.NDArray[np.int64], n_parts: int, seed: int) -> npt.NDArray[np.int64]:
    """Return the part of every row, (n,), from 0 to n_parts - 1.

    The rows of a stratum, in random order, are assigned to the parts in turn, and the next stratum
    continues where it ended. The sizes of the parts thus differ by at most one row, in total and in
    every stratum. A row that is alone in its stratum has the part -1 and is never held out, since
    its class could not be learned without it.
    """
    rng = np.random.default_rng([seed, SPLIT_STAGE])
    part = np.full(len(stratum), -1)
    n_assigned = 0
    names, counts = np.unique(stratum, return_counts=True)
    for name in names[counts > 1]:
        rows = rng.permutation(np.flatnonzero(stratum == name))
        part[rows] = (n_assigned + np.arange(len(rows))) % n_parts
        n_assigned += len(rows)
    return part


def _stores_and_shares(data: Data) -> tuple[list[BaseSource], list[float]]:
    """Return the stores to draw from, and the share of each."""
    source = without_copies(data.source)
    if not isinstance(source, MixtureSource) or source.weights is None:
        return [data.base], [1.0]
    total = sum(source.weights)
    return [stored_rows(part) for part in source.parts], [w / total for w in source.weights]


def _with_transforms_of(source: BaseSource, rows: ArraySource, max_copies: int) -> BaseSource:
    """Return `rows` with the augmentation, the scaling and the class shares of `source`."""
    if isinstance(source, AugmentedSource):
        base = _with_transforms_of(source.base, rows, max_copies)
        transforms = [*source.host_transforms, *source._own_feed_transforms()]
        return AugmentedSource(base, min(source.copies, max_copies), transforms)
    resampled = (
        BalancedSource(rows, source.requested_shares)
        if isinstance(source, BalancedSource)
        else rows
    )
    return (
        AugmentedSource(resampled, 1, source.feed_transforms)
        if source.feed_transforms
        else resampled
    )


def _check_unaugmented(data: Data) -> None:
    """Raise ConfigError if rows are augmented before they can be split."""
    applied = host_transforms(data.base)
    source = without_copies(data.source)
    inner = [part for part in source.parts if isinstance(part, AugmentedSource)]
    if applied or inner:
        place = f"by {transform_name(applied[0])!r}" if applied else "in a part of the mixture"
        raise ConfigError(
            f"the source is augmented {place}, so its held-out rows would be augmented, too",
            "augment the whole source instead, by an AugmentedSource around it",
        )
