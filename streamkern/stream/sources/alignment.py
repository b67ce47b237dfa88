"""Align new data with a model: row shape, order of named columns, class ids."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from streamkern.basics.errors import ConfigError, DataError
from streamkern.basics.text import some
from streamkern.ingest.columns import in_order
from streamkern.ingest.tables.encoder import check_encoder
from streamkern.store.class_labels import KnownClasses
from streamkern.store.row_block import RowBlock
from streamkern.store.sparse_rows import is_packed, sparse_features
from streamkern.store.statistics import ColumnMoments
from streamkern.stream.sources.base import BaseSource, DerivedSource
from streamkern.stream.sources.transforms import Moments

AS_SPARSE = "give both as sparse rows, or both as dense ones"


def check_row_shape(
    subject: str, shape: Sequence[int], whose: str, wanted: Sequence[int], *, sparse: bool = False
) -> None:
    """Raise ConfigError unless rows of `shape` can stand for rows of the shape `wanted`.

    They can if both shapes are equal, (h, w) meaning (h, w, 1), or if one of them is flat and has
    the same number of features. Other shapes are refused: a row with its axes in another order
    would be another image.

    subject, whose : beginnings of the clauses of the message, "X has", "the model was trained on"
    sparse : whether rows of the shape `wanted` are packed sparse rows
    """
    if sparse:
        if not is_packed(shape):
            raise ConfigError(
                f"{subject} rows of shape {tuple(shape)}, {whose} {tuple(wanted)}, which are "
                "sparse",
                f"{AS_SPARSE}",
            )
        return  # of any lengths: the entries tell their features
    full, full_wanted = _with_channel(shape), _with_channel(wanted)
    if full == full_wanted or (
        math.prod(full) == math.prod(full_wanted) and 1 in (len(full), len(full_wanted))
    ):
        return
    remedy = "use data with the same features"
    if math.prod(full) == math.prod(full_wanted):
        remedy = "put its axes into that order and size"
    raise ConfigError(
        f"{subject} rows of shape {tuple(shape)}, {whose} {tuple(wanted)}", f"{remedy}"
    )


def check_same_rows(
    source: Any, like: Any, subject: str, whose: str = "the model was trained on"
) -> None:
    """Raise ConfigError unless the rows of `source` and `like` have the same shape and features.

    source, like : anything with the `row_shape` and `file_form` of rows
    subject, whose : as of `check_row_shape`
    """
    found, known = (sparse_features(rows.file_form) for rows in (source, like))
    if found is not None and known is None:
        raise ConfigError(f"{subject} sparse rows, and {whose} dense ones", f"{AS_SPARSE}")
    shape = source.row_shape
    if found is None and known is not None:  # images of one channel may have that shape
        shape = _with_channel(shape)
    check_row_shape(subject, shape, whose, like.row_shape, sparse=known is not None)
    if found != known:
        raise ConfigError(
            f"{subject} {found:,} features, {whose} {known:,}", "use data with the same features"
        )


def _with_channel(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a row, (h, w) as (h, w, 1)."""
    return (*shape, 1) if len(shape) == 2 else tuple(shape)


def in_columns(
    source: BaseSource,
    columns: Sequence[str] | None,
    where: str,
    target_columns: Sequence[str] | None = None,
    encoder: Mapping[str, Any] | None = None,
) -> BaseSource:
    """Return `source` with its columns and targets in the order of `columns` and `target_columns`.

    `source` itself is returned if they have that order. Columns are matched by position if either
    side has no names, and so is a single target.

    columns, target_columns : the names in the wanted order; None if the order does not matter
    encoder : of the table that the columns come from
    Raises DataError with the names that are missing or unexpected, or if the encoder of `source`
    differs; ConfigError if `source` has transforms of its own.
    """
    check_encoder(source.encoder, encoder, where)
    present, present_targets = source.columns, source.target_columns
    wanted = _names_in_order(present, columns, where, "x")
    wanted_targets = targets_in_order(present_targets, target_columns, where)
    if (wanted, wanted_targets) == (present, present_targets):
        return source
    if source.feed_transforms:
        raise ConfigError(
            f"the columns of {where} are in another order than those trained on, and cannot be "
            "put right behind its transforms",
            "leave the transforms out, or order the columns",
        )
    return Ordered(source, wanted, wanted_targets)


def targets_in_order(
    found: tuple[str, ...] | None, expected: Sequence[str] | None, where: str
) -> tuple[str, ...] | None:
    """Return the target names in the expected order, or as found if matched by position."""
    # Other numbers of targets are refused where the outputs are compared.
    several = found is not None and expected is not None and 1 < len(found) == len(expected)
    return _names_in_order(found, expected if several else None, f"y of {where}", "y")


def chosen_columns(source: BaseSource, columns: Sequence[str]) -> BaseSource:
    """Return `source`, whose columns have names, with only `columns`, in this order."""
    return _Chosen(source, columns)


def _names_in_order(
    found: tuple[str, ...] | None, expected: Sequence[str] | None, where: str, role: str
) -> tuple[str, ...] | None:
    """Return the names in the expected order, or as found if columns are matched by position."""
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
        self._copy_from(
            base, "n_rows", "strata", "totals", "files", "n_origins", "hides_copies", "remote",
            "level", "feed_transforms", "repeats", "statistics_read",
        )  # fmt: skip
        self.columns, self.target_columns = columns, target_columns
        self._index = column_index(base.columns, columns)
        self._target_index = column_index(base.target_columns, target_columns)

    @property
    def n_units(self) -> int:
        return self.base.n_units

    def unit_bounds(self, u: int) -> tuple[int, int]:
        return self.base.unit_bounds(u)

    def source_rows(self, u: int) -> np.ndarray:
        return self.base.source_rows(u)

    def origins(self, u: int, epoch: int) -> np.ndarray:
        return self.base.origins(u, epoch)

    def read_unit(self, u: int, seed: int, epoch: int) -> RowBlock:
        block = self.base.read_unit(u, seed, epoch)
        X = np.ascontiguousarray(block.X[:, self._index])
        return block._replace(X=X, y=self._ordered_targets(block.y))

    def _ordered_targets(self, y: np.ndarray) -> np.ndarray:
        return y if y.ndim == 1 else np.ascontiguousarray(y[:, self._target_index])

    def _read(self, u: int, seed: int, epoch: int) -> tuple[np.ndarray, ...]:
        return self.read_unit(u, seed, epoch).contents

    def _read_targets(self, u: int, seed: int, epoch: int) -> np.ndarray:
        return self._ordered_targets(self.base.read_targets(u, seed, epoch))

    def statistics(self) -> Moments:
        mean, scale, *features = self.base.statistics()
        of_each, spread = (None if k is None else k.reshape(-1)[self._index] for k in features)
        return mean, scale, of_each, spread

    def target_moments(self) -> ColumnMoments | None:
        moments = self.base.target_moments()
        return None if moments is None else moments.take(self._target_index)

    def describe(self) -> dict[str, Any]:
        names = {"columns": self.columns, "target_columns": self.target_columns}
        listed = {
            name: None if column_names is None else list(column_names)
            for name, column_names in names.items()
        }
        return super().describe() | listed | {"base": self.base.describe()}


class _Chosen(Ordered):
    """Some columns of `base`, with a fingerprint of its own."""

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


def column_index(found: Sequence[str] | None, wanted: Sequence[str] | None) -> Any:
    """Return the index in `found` of each wanted name; a slice of all columns without names."""
    if found is None or wanted is None:
        return slice(None)
    position = {name: k for k, name in enumerate(found)}
    return np.array([position[name] for name in wanted])


def in_classes(
    source: BaseSource, classes: Sequence[str] | None, label_dtype: str | None, where: str
) -> BaseSource:
    """Return `source` with class ids into `classes`; unchanged if it has these, or for values.

    Its own classes may be a subset, in any order, and of labels of another type. Raises DataError
    if rows may have a class outside `classes`, or if two classes of `source` map to one.
    """
    present = source.classes
    if classes is None or present is None or present == tuple(classes):
        return source
    known = KnownClasses(classes, label_dtype)
    new_ids = known.class_ids(present, source.label_dtype)
    new = [
        name
        for name, new_id, total in zip(present, new_ids, _totals(source), strict=True)
        if new_id is None and total != 0
    ]
    if new:
        raise DataError(
            f"{where} has rows of the class{'es' if len(new) > 1 else ''} {some(new)}, and only "
            f"{some(tuple(classes))} are known",
            "leave such rows out, or train on rows of all classes",
        )
    for new_id, count in Counter(new_ids).items():
        if new_id is not None and count > 1:
            alike = [name for name, at in zip(present, new_ids, strict=True) if at == new_id]
            raise DataError(
                f"{where} has rows of the classes {some(alike)}, which all stand for the class "
                f"'{classes[new_id]}' that is known",
                "write them alike",
            )
    ids = np.array([-1 if new_id is None else new_id for new_id in new_ids], np.int64)
    return _Relabelled(source, tuple(classes), label_dtype, ids)


def _totals(source: BaseSource) -> Sequence[float]:
    """Return the weight of the rows of each class; 1 if it is not known."""
    if source.totals is None or source.weighted:  # rows of weight 0 have a class, too
        return [1.0] * source.n_outputs
    return [float(total) for total in source.totals]


class _Relabelled(Ordered):
    """The rows of `base` with other class ids.

    ids : (c,) new id of each old one
    """

    kind = "classes"

    def __init__(
        self, base: BaseSource, classes: tuple[str, ...], label_dtype: str | None, ids: np.ndarray
    ) -> None:
        super().__init__(base, base.columns, base.target_columns)
        self.classes, self.n_outputs, self.label_dtype = classes, len(classes), label_dtype
        self._ids = ids
        if base.totals is not None:
            self.totals = np.zeros(len(classes))
            np.add.at(self.totals, ids[ids >= 0], base.totals[ids >= 0])

    def _ordered_targets(self, y: np.ndarray) -> np.ndarray:
        ids: np.ndarray = self._ids[y]
        return ids
