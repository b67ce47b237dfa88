"""Read X from a file or store without targets, with y and weights from other files or memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from streamkern.basics.errors import ConfigError, DataError
from streamkern.basics.text import redact
from streamkern.ingest.array_files import idx_array, npy_array
from streamkern.ingest.array_reader import ArrayReader, ends_digest
from streamkern.ingest.columns import ReadRequest
from streamkern.ingest.input_files import FileOpener, Url, is_path
from streamkern.ingest.npz_files import sparse_names, sparse_rows
from streamkern.ingest.zarr_groups import zarr_array

# Formats of one array: y and w are given separately.
APART = {"npy": npy_array, "idx": idx_array}


def holds_one_array(url: Url, kind: str, place: FileOpener) -> bool:
    """Return whether a file or store of this kind holds X alone."""
    if kind == "zarr":
        return zarr_array(url, place) is not None
    return kind in APART or (kind == "npz" and sparse_names(url, place) is not None)


def open_apart(kind: str, url: Url, asked: ReadRequest, place: FileOpener) -> ArrayReader:
    """Return a reader of a file or store of X alone, with y and w in others or in memory."""
    where = redact(url)
    found = [_array_in(url, kind, place)]
    if getattr(found[0][0].dtype, "names", None):
        raise DataError(
            f"{where} holds a structured array, whose fields are columns; give the array itself, "
            f"numpy.load({where!r}), in place of the file"
        )
    if asked.targets:
        target = _labels_beside(url) if kind == "idx" and asked.y is None else asked.y
        if target is None:
            raise ConfigError(f"{where} holds X alone; give y=, a file or an array")
        found.append(_array_beside(target, "y", place, where, keep=asked.drop_missing))
    if asked.weighted:
        found.append(_array_beside(asked.w, "sample_weight", place, where))
    arrays, identities = zip(*found, strict=True)
    chunks = getattr(arrays[0], "shards", None) or getattr(arrays[0], "chunks", None)
    return ArrayReader(arrays, where, list(identities), aligned=(chunks or (1,))[0])


def _array_in(url: Url, kind: str, place: FileOpener, *, keep: bool = False) -> tuple[Any, Any]:
    """Return the array of such a file or store, and its identity."""
    if kind == "zarr" and (array := zarr_array(url, place, keep=keep)) is not None:
        return array, ["zarr", redact(url), list(array.shape), str(array.dtype)]
    identity = place.identity(url)
    if kind == "npz" and (names := sparse_names(url, place)) is not None:
        return sparse_rows(url, names, place), identity
    return APART[kind](place.open(url), redact(url), place), identity


def _array_beside(
    given: Any, name: str, place: FileOpener, where: str, *, keep: bool = False
) -> tuple[Any, Any]:
    """Return the array of `given`, a file or data in memory, and its identity."""
    if not is_path(given):
        array = np.asarray(given)
        return array, ends_digest(array)
    kind = place.kind(given)
    if not holds_one_array(given, kind, place):
        raise ConfigError(
            f"{name}={redact(given)} must be a .npy or IDX file, or a Zarr array, beside {where}"
        )
    return _array_in(given, kind, place, keep=keep)


def _labels_beside(url: Url) -> str | None:
    """Return the labels file by MNIST's naming, if the images file follows it; otherwise None."""
    text = str(url)
    for old, new in (("images-idx3", "labels-idx1"), ("images.idx3", "labels.idx1")):
        if old in text:
            return text.replace(old, new)
    return None
