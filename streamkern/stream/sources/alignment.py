"""Align data with a model, or sources with each other: row shapes, named columns, class ids.

`PaddedSource` gives packed sparse rows of several sources one length.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from streamkern.basics.errors import ConfigError, DataError, RowShapeError
from streamkern.basics.text import some
from streamkern.ingest.column_roles import in_order
from streamkern.ingest.tables.encoder import check_encoder
from streamkern.store.class_labels import KnownClasses
from streamkern.store.row_block import RowBlock
from streamkern.store.sparse_rows import is_packed, sparse_features, widen_rows
from streamkern.store.statistics import ColumnMoments
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.transforms import Moments
from streamkern.stream.sources.unitwise import UnitwiseSource

SPARSITY_REMEDY = "give both as sparse rows, or both as dense ones"


def check_row_shape(
    subject: str,
    shape: Sequence[int],
    whose: str,
    expected_shape: Sequence[int],
    *,
    sparse: bool = False,
) -> None:
    """Raise RowShapeError unless rows of `shape` can be used as rows of `expected_shape`.

    They can if both shapes are equal, where (h, w) counts as (h, w, 1), or if one of them is flat
    and has the same number of features. Other shapes are refused: with its axes in another order, a
    row would be another image.

    subject, whose : beginnings of the two clauses of the message, about the rows and about the
        expected rows, such as "X has" and "the model was trained on"
    sparse : whether rows of `expected_shape` are packed sparse rows
    """
    if sparse:
        if not is_packed(shape):
            raise RowShapeError(
                f"{subject} rows of shape {tuple(shape)}, {whose} {tuple(expected_shape)}, which "
                "are sparse",
                SPARSITY_REMEDY,
            )
        return  # packed rows may have any length: each entry has its feature
    full, full_expected = _with_channel(shape), _with_channel(expected_shape)
    same_size = math.prod(full) == math.prod(full_expected)
    is_one_flat = 1 in (len(full), len(full_expected))
    if full == full_expected or (same_size and is_one_flat):
        return
    remedy = "use data with the same features"
    if same_size:
        remedy = "transpose or reshape its axes to the second shape"
    raise RowShapeError(
        f"{subject} rows of shape {tuple(shape)}, {whose} {tuple(expected_shape)}", remedy
    )


def check_same_rows(
    source: Any, expected: Any, subject: str, whose: str = "the model was trained on"
) -> None:
    """Raise RowShapeError unless rows of `source` have the shape and features of `expected`.

    source, expected : objects with the attributes `row_shape` and `file_form`, such as sources
    subject, whose : as for `check_row_shape`
    """
    n_features, n_expected = (sparse_features(rows.file_form) for rows in (source, expected))
    if n_features is not None and n_expected is None:
        raise RowShapeError(f"{subject} sparse rows, but {whose} dense ones", SPARSITY_REMEDY)
    shape = source.row_shape
    if n_features is None and n_expected is not None:
        shape = _with_channel(shape)  # an image (2, w) must not be taken for a packed row
    check_row_shape(subject, shape, whose, expected.row_shape, sparse=n_expected is not None)
    if n_features != n_expected:
        raise RowShapeError(
            f"{subject} {n_features:,} features, but {whose} {n_expected:,}",
            "use data with the same features",
        )


def _with_channel(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a row, (h, w) as (h, w, 1)."""
    return (*shape, 1) if len(shape) == 2 else tuple(shape)


def align_columns(
    source: BaseSource,
    columns: Sequence[str] | None,
    location: str,
    target_columns: Sequence[str] | None = None,
    encoder: Mapping[str, Any] | None = None,
) -> BaseSource:
    """Return `source` with its columns and targets in the order of `columns` and `target_columns`.

    `source` itself is returned if they have that order. Columns are matched by position if one of
    the two has no names, and so is a single target.

    Parameters
    ----------
    columns : names of the features in the expected order; None if the order does not matter
    location : name of the data in messages
    target_columns : the same for the targets
    encoder : the encoder of the table that the columns come from

    Raises
    ------
    DataError
        If names are missing or unexpected, or if the encoder of `source` differs.
    ConfigError
        If columns must be reordered and `source` has feed transforms.
    """
    check_encoder(source.encoder, encoder, location)
    present, present_targets = source.columns, source.target_columns
    order = _names_in_order(present, columns, location, "x")
    target_order = targets_in_order(present_targets, target_columns, location)
    if (order, target_order) == (present, present_targets):
        return source
    if source.feed_transforms:
        raise ConfigError(
            f"the columns of {location} are in another order than in training, and cannot be "
            "reordered after its transforms",
            "leave the transforms out, or give the columns in the order of training",
        )
    return ReorderedSource(source, order, target_order)


def targets_in_order(
    names: tuple[str, ...] | None, expected: Sequence[str] | None, location: str
) -> tuple[str, ...] | None:
    """Return the target names in the expected order; `names` if they are matched by position.

    location : name of the data in messages

    Raises DataError if as many names as expected are other names.
    """
    # Different numbers of targets are refused where the outputs are compared.
    by_name = names is not None and expected is not None and 1 < len(names) == len(expected)
    return _names_in_order(names, expected if by_name else None, f"y of {location}", "y")


def _names_in_order(
    names: tuple[str, ...] | None, expected: Sequence[str] | None, location: str, role: str
) -> tuple[str, ...] | None:
    """Return the names in the expected order; `names` if columns are matched by position."""
    if names is None or expected is None or names == tuple(expected):
        return names
    return tuple(in_order(names, expected, location, role))


class ReorderedSource(UnitwiseSource):
    """The rows of `base` with the columns and targets in another order.

    columns, target_columns : names in the new order, or None for the order of `base`
    """

    kind = "columns"

    def __init__(
        self,
        base: BaseSource,
        columns: tuple[str, ...] | None,
        target_columns: tuple[str, ...] | None,
    ) -> None:
        super().__init__(base)
        self.columns, self.target_columns = columns, target_columns
        self._index = column_index(base.columns, columns)
        self._target_index = column_index(base.target_columns, target_columns)

    def with_base(self, base: BaseSource) -> ReorderedSource:
        """Return the rows of another base, with the same columns and targets, in this order."""
        source = copy.copy(self)
        source._set_base(base)
        return source

    def read_unit(self, u: int, seed: int, epoch: int) -> RowBlock:
        block = self.base.read_unit(u, seed, epoch)
        X = np.ascontiguousarray(block.X[:, self._index])
        return block._replace(X=X, y=self._ordered_targets(block.y))

    def _ordered_targets(self, y: np.ndarray) -> np.ndarray:
        return y if y.ndim == 1 else np.ascontiguousarray(y[:, self._target_index])

    def _read_targets(self, u: int, seed: int, epoch: int) -> np.ndarray:
        return self._ordered_targets(self.base.read_targets(u, seed, epoch))

    def statistics(self) -> Moments:
        mean, scale, *feature_moments = self.base.statistics()
        feature_mean, feature_scale = (
            None if moments is None else moments.reshape(-1)[self._index]
            for moments in feature_moments
        )
        return mean, scale, feature_mean, feature_scale

    def target_moments(self) -> ColumnMoments | None:
        moments = self.base.target_moments()
        return None if moments is None else moments.take(self._target_index)

    def describe(self) -> dict[str, Any]:
        names = {"columns": self.columns, "target_columns": self.target_columns}
        as_lists = {
            name: None if column_names is None else list(column_names)
            for name, column_names in names.items()
        }
        return super().describe() | as_lists | {"base": self.base.describe()}


class ColumnSubset(ReorderedSource):
    """Some columns of `base`, which must have names; the fingerprint depends on the choice."""

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
        return None, None, mean, scale  # the global moments include the other columns


def column_index(names: Sequence[str] | None, selected: Sequence[str] | None) -> Any:
    """Return the position in `names` of each selected name, (k,); without names, all columns."""
    if names is None or selected is None:
        return slice(None)
    position = {name: k for k, name in enumerate(names)}
    return np.array([position[name] for name in selected])


def align_classes(
    source: BaseSource, classes: Sequence[str] | None, label_dtype: str | None, location: str
) -> BaseSource:
    """Return `source` with its class ids as indices of `classes`; unchanged if they already are.

    The classes of `source` may be a subset of `classes`, in any order, with labels of another type.
    Sources of values are returned unchanged.

    classes, label_dtype : names and dtype of the known classes, as for `KnownClasses`
    location : name of the data in messages

    Raises DataError if rows may have a class outside `classes`, or if two classes of `source` are
    the same known class.
    """
    present = source.classes
    if classes is None or present is None or present == tuple(classes):
        return source
    known_classes = KnownClasses(classes, label_dtype)
    ids_in_classes = known_classes.class_ids(present, source.label_dtype)
    totals = source.totals
    if totals is None or source.weighted:  # a class of weight 0 may have rows, too
        totals = np.ones(source.n_outputs)
    unknown = [
        name
        for name, class_id, total in zip(present, ids_in_classes, totals, strict=True)
        if class_id is None and total != 0
    ]
    if unknown:
        raise DataError(
            f"{location} has rows of the unknown class{'es' if len(unknown) > 1 else ''} "
            f"{some(unknown)}; the known classes are {some(tuple(classes))}",
            "leave such rows out, or train on rows of all classes",
        )
    for class_id, count in Counter(ids_in_classes).items():
        if class_id is not None and count > 1:
            pairs = zip(present, ids_in_classes, strict=True)
            same_class = [name for name, class_id_of_name in pairs if class_id_of_name == class_id]
            raise DataError(
                f"{location} has rows of the classes {some(same_class)}, which all correspond to "
                f"the known class '{classes[class_id]}'",
                "give them the same label",
            )
    id_map = [-1 if class_id is None else class_id for class_id in ids_in_classes]
    return _RelabelledSource(source, tuple(classes), label_dtype, np.array(id_map, np.int64))


class _RelabelledSource(ReorderedSource):
    """The rows of `base` with other class ids.

    classes, label_dtype : names and dtype of the new classes
    ids : (c,) new id of each class of `base`, -1 for a class without rows
    """

    kind = "classes"

    def __init__(
        self, base: BaseSource, classes: tuple[str, ...], label_dtype: str | None, ids: np.ndarray
    ) -> None:
        self._ids, self._n_classes = ids, len(classes)
        super().__init__(base, base.columns, base.target_columns)
        self.classes, self.n_outputs, self.label_dtype = classes, len(classes), label_dtype

    def _set_base(self, base: BaseSource) -> None:
        super()._set_base(base)
        if base.totals is not None:
            is_known = self._ids >= 0
            self.totals = np.bincount(self._ids[is_known], base.totals[is_known], self._n_classes)

    def _ordered_targets(self, y: np.ndarray) -> np.ndarray:
        ids: np.ndarray = self._ids[y]
        return ids


class PaddedSource(ReorderedSource):
    """The packed sparse rows of `base`, padded with zeros from (2, k) to (2, width)."""

    kind = "widened"

    def __init__(self, base: BaseSource, width: int) -> None:
        super().__init__(base, base.columns, base.target_columns)
        self.row_shape = (2, width)

    def read_unit(self, u: int, seed: int, epoch: int) -> RowBlock:
        block = self.base.read_unit(u, seed, epoch)
        return block._replace(X=widen_rows(block.X, self.row_shape))

    def statistics(self) -> Moments:
        return None, None, None, None


def pad_to_one_length(sources: Sequence[BaseSource]) -> list[BaseSource]:
    """Return the sources, with packed sparse rows padded to one length; others unchanged."""
    widths = [source.row_shape[1] if is_packed(source.row_shape) else 0 for source in sources]
    return [
        PaddedSource(source, max(widths)) if 0 < width < max(widths) else source
        for source, width in zip(sources, widths, strict=True)
    ]
