"""What a zarr group holds, found out when it is opened: one of our stores, or a foreign one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import zarr
from zarr.errors import ContainsArrayError, NodeTypeValidationError

from streamkern import layout
from streamkern.errors import CorruptChunkError, DataError, StoreNotFoundError, StreamkernError
from streamkern.layout import StoreSpec
from streamkern.ownership import ATTRIBUTE
from streamkern.storage import StrictStore, redact
from streamkern.weights import add_totals, as_weights

MAX_INFERRED_CLASSES = 10_000  # foreign integer targets up to this many become classes
Names = tuple[str, str | None, str | None]
"""Of the arrays of rows, targets and sample weights."""
Arrays = tuple[Any, Any, Any]
"""The zarr arrays of these names."""


def read_metadata(
    inner: Any, prefix: str, text: str, names: Names, missing: str
) -> tuple[zarr.Group, Arrays, Any, Names, StoreSpec]:
    """The group, X, y and w, row, names, what they hold; CorruptChunkError for altered ones.

    Of our own stores the sample weights are read with the targets, where there are some.
    """
    group = _strict_group(inner, prefix, text)
    state: Any = group.attrs.get(ATTRIBUTE)
    known = (("X",), ("y", None), ("w", None))
    ours = isinstance(state, Mapping) and all(n in k for n, k in zip(names, known, strict=True))
    weighted = ours and state.get("weight_totals") is not None
    if ours:
        layout.check_state(state, text)
        if names[1] is None:
            names = (names[0], None, None)
        elif weighted:
            names = (names[0], names[1], "w")
    elif missing == "fill":
        group = zarr.open_group(inner, path=group.path, mode="r")
    # Our own y and w are read in any case: they belong to what the metadata's digest covers.
    wanted = ("X", "y", "w" if weighted else names[2]) if ours else names
    arrays = [None if name is None else group.get(name) for name in wanted]
    row = group.get("row") if ours else None
    for name, array in zip(names, arrays, strict=True):
        if name is not None and not isinstance(array, zarr.Array):
            raise StoreNotFoundError(
                f"{redact(text)} has no array {name!r}; it has {_array_names(group)}"
            )
    if ours:
        layout.check_metadata(state, [a for a in (*arrays, row) if a is not None], text)
    X, y, w = (None if n is None else a for n, a in zip(names, arrays, strict=True))
    spec = (
        layout.spec_from_attributes(X, y, w, state)
        if ours
        else _foreign_spec((X, y, w), names, text)
    )
    return group, (X, y, w), row, names, spec


def _strict_group(store: Any, path: str, url: str) -> zarr.Group:
    """The group on `store` with missing chunks turned into errors."""
    strict = StrictStore(store)
    try:
        try:  # without a format zarr asks for the metadata of both: four requests
            return zarr.open_group(strict, path=path, mode="r", zarr_format=3)
        except FileNotFoundError:
            return zarr.open_group(strict, path=path, mode="r", zarr_format=2)
    except FileNotFoundError as error:
        raise StoreNotFoundError(f"there is no zarr store at {redact(url)}") from error
    except (ContainsArrayError, NodeTypeValidationError) as error:
        raise DataError(
            f"{redact(url)} is a single zarr array; give the group that holds X and y"
        ) from error
    except (OSError, StreamkernError):
        raise
    except Exception as error:
        raise DataError(f"the metadata of {redact(url)} can not be read: {error}") from error


def _foreign_spec(arrays: Arrays, names: Names, url: str) -> StoreSpec:
    X, y, w = arrays
    where = f"{names[0]!r} of {redact(url)}"
    if X.ndim < 2 or X.shape[0] < 1:
        raise DataError(f"{where} has shape {X.shape}; it needs rows along a first axis")
    x_dtype = np.dtype(X.dtype).newbyteorder("=")
    layout.check_row_layout(X.shape[1:], x_dtype, where)
    classes, counts, n_outputs = None, None, 0
    if y is not None:
        if y.ndim not in (1, 2) or y.shape[0] != X.shape[0]:
            raise DataError(
                f"{names[1]!r} of {redact(url)} has shape {y.shape}; {X.shape[0]} rows of X need "
                f"({X.shape[0]},) class ids or ({X.shape[0]}, c) values"
            )
        n_outputs = 1 if y.ndim == 1 else y.shape[1]
        if y.ndim == 1 and np.dtype(y.dtype).kind in "iub":
            counts = _scan_classes(y, f"{names[1]!r} of {redact(url)}")
            classes, n_outputs = tuple(str(k) for k in range(len(counts))), len(counts)
        elif np.dtype(y.dtype).kind not in "iuf":
            raise DataError(f"{names[1]!r} of {redact(url)} has dtype {y.dtype}; ingest it first")
    return StoreSpec(
        n_rows=X.shape[0],
        row_shape=tuple(X.shape[1:]),
        x_dtype=x_dtype,
        chunk_rows=min(chunk_rows(X), X.shape[0]),
        n_outputs=n_outputs,
        classes=classes,
        class_counts=counts,
        fingerprint=foreign_fingerprint(arrays, names),
        y_dtype=None if y is None else np.dtype(y.dtype).newbyteorder("="),
        weight_totals=None if w is None else _scan_weights(y, w, classes, names, url),
    )


def foreign_fingerprint(arrays: Arrays, names: Names) -> str:
    return layout.metadata_fingerprint(
        [
            [name, list(a.shape), np.dtype(a.dtype).str, list(a.chunks), dict(a.attrs)]
            for name, a in zip(names, arrays, strict=True)
            if a is not None
        ]
    )


def _scan_classes(y: Any, where: str) -> tuple[int, ...]:
    """Rows per class id 0..max of a foreign integer y, in one pass of a chunk at a time."""
    counts = np.zeros(0, np.int64)
    for _, stored in _slabs(where, y):
        ids = stored.astype(np.int64)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= MAX_INFERRED_CLASSES:
            raise DataError(
                f"{where} holds the integer {low if low < 0 else high}; integers are taken for "
                f"class ids 0..{MAX_INFERRED_CLASSES - 1}: ingest the store to map its labels"
            )
        block = np.bincount(ids, minlength=len(counts))
        block[: len(counts)] += counts
        counts = block
    return tuple(int(k) for k in counts)


def _scan_weights(
    y: Any, w: Any, classes: tuple[str, ...] | None, names: Names, url: str
) -> tuple[float, ...]:
    """Sums of foreign sample weights, as in `StoreSpec`, in one pass over w, and y of classes."""
    where = f"{names[2]!r} of {redact(url)}"
    if y is None or w.shape != y.shape[:1]:
        raise DataError(
            f"{where} has shape {w.shape}; sample weights are one number for each row, beside y"
        )
    totals = np.zeros(1 if classes is None else len(classes))
    for start, part, *ids in _slabs(where, w, *([] if classes is None else [y])):
        part = as_weights(part, len(part), where, start)
        add_totals(totals, ids[0] if ids else part, part, classes is not None)
    return tuple(totals.tolist())


def _slabs(where: str, *arrays: Any) -> Iterator[Any]:
    """First row and rows of `arrays`, some chunks of the first one at a time."""
    step = max(chunk_rows(arrays[0]), 1 << 16)
    for start in range(0, arrays[0].shape[0], step):
        try:
            parts = [np.asarray(array[start : start + step]) for array in arrays]
        except (StreamkernError, OSError, MemoryError):
            raise
        except Exception as error:
            raise CorruptChunkError(f"{where} does not decode near row {start}: {error}") from error
        yield start, *parts


def chunk_rows(array: Any) -> int:
    """Rows of the unit of reading: the shard where there is one."""
    return int((array.shards or array.chunks)[0])


def _array_names(group: zarr.Group) -> str:
    try:
        names = sorted(name for name, _ in group.arrays())
    except Exception:  # plain HTTP can not list
        return "no names to list"
    return ", ".join(names) if names else "no arrays"
