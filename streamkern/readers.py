"""Reads blocks of rows from the formats training data comes in, one small reader for each.

A reader yields `RawBlock`s of consecutive rows in source order, of about the bytes asked for,
starting at any row, and tells what it reads by an `identity` (sizes and times, no content) so
that an interrupted ingest is not continued with other data. Arrays on disk are streamed, not
mapped: the same code reads local, compressed and remote files, and memory stays bounded.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import chain
from typing import Any, Protocol

import fsspec
import numpy as np
import zarr
from numpy.typing import NDArray

from streamkern.arrayfiles import ArrayReader, idx_array, is_idx, npy_array
from streamkern.conform import RawBlock
from streamkern.errors import (
    ConfigError,
    DataError,
    MissingDependencyError,
    StoreNotFoundError,
    StreamkernError,
)
from streamkern.optional import need
from streamkern.remotefile import is_object, open_object, split_object
from streamkern.storage import StrictStore, local_path, redact, zarr_store
from streamkern.tables import CsvReader, ParquetReader

_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_KINDS = {
    ".npy": "npy", ".npz": "npz", ".csv": "csv", ".tsv": "csv", ".txt": "csv",
    ".parquet": "parquet", ".pq": "parquet", ".h5": "hdf5", ".hdf5": "hdf5", ".hdf": "hdf5",
    ".idx": "idx", ".zarr": "zarr",
}  # fmt: skip


class Reader(Protocol):
    """What `ingest` needs of an input."""

    n_rows: int | None  # None: not known before the end
    natural_dtype: np.dtype[Any] | None  # to store X in; None: whatever holds its dtype
    identity: Any  # JSON

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        """Blocks of rows from row `start` to the end."""


class BlockReader:
    """An iterable of (X, y) pairs of arrays, or of (X, y, w) with sample weights."""

    def __init__(self, pairs: Iterable[Any]) -> None:
        self.n_rows: int | None = None
        self.natural_dtype: np.dtype[Any] | None = None
        self._rest = enumerate(pairs)
        first = next((p for p in map(self._pair, self._rest) if len(p[0])), None)
        if first is None:
            raise DataError("the iterator gave no rows; there is nothing to ingest")
        self._first = first
        # The only thing known of an iterator without running it: how it begins.
        self.identity = {"kind": "iterator", "begins": _digest(*self._first)}

    @staticmethod
    def _pair(numbered: tuple[int, Any]) -> tuple[NDArray[Any], ...]:
        index, pair = numbered
        if not isinstance(pair, tuple | list) or len(pair) not in (2, 3):
            raise DataError(
                f"block {index} of the iterator is not a pair (X, y) of arrays, or (X, y, w) with "
                "sample weights"
            )
        X, y, *w = (np.asarray(a) for a in pair)
        if X.ndim < 2 or y.ndim < 1 or len(X) != len(y):
            raise DataError(
                f"block {index} of the iterator has X {X.shape} and y {y.shape}; they must have "
                "the same rows"
            )
        return X, y, *w

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        row = 0
        for X, y, *w in chain([self._first], map(self._pair, self._rest)):
            skip = min(max(start - row, 0), len(X))
            row += len(X)
            step = max(1, block_bytes // max(1, X[:1].nbytes))
            for a in range(skip, len(X), step):
                first = row - len(X) + a
                rows = slice(a, a + step)
                weights = w[0][rows] if w else None
                yield RawBlock(X[rows], y[rows], "the iterator", first, w=weights)


class FileReader:
    """A reader of a file, whose damage comes out with the file's name."""

    def __init__(self, reader: Reader, url: str | os.PathLike[str]) -> None:
        self.n_rows, self.natural_dtype = reader.n_rows, reader.natural_dtype
        self.identity = reader.identity
        self._reader, self._url = reader, url

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        with _decompressing(self._url):
            yield from self._reader.blocks(start, block_bytes)


@contextmanager
def _decompressing(url: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile, lzma.LZMAError) as error:
        # What gzip and bz2 raise for damage is an OSError, as most is that is none.
        damage = isinstance(error, gzip.BadGzipFile) or str(error) == "Invalid data stream"
        if isinstance(error, OSError) and not damage:
            raise
        raise DataError(
            f"{redact(url)} does not decompress ({error}); it is damaged or cut short, or was "
            "on its way here: try again, or get it again from where it came"
        ) from error


class ManyReader:
    """Several files, one after another."""

    def __init__(self, readers: Sequence[Reader]) -> None:
        self._readers = readers
        counts = [reader.n_rows for reader in readers]
        known = [n for n in counts if n is not None]
        self.n_rows: int | None = sum(known) if len(known) == len(counts) else None
        self.natural_dtype = readers[0].natural_dtype
        self.identity = [reader.identity for reader in readers]

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        row = 0
        for reader in self._readers:
            if reader.n_rows is not None and row + reader.n_rows <= start:
                row += reader.n_rows
                continue
            for block in reader.blocks(max(start - row, 0) if reader.n_rows else 0, block_bytes):
                if reader.n_rows is None:  # its rows are only known by reading them
                    skip = min(max(start - row, 0), len(block.X))
                    row += len(block.X)
                    if skip == len(block.X):
                        continue
                    w = None if block.w is None else block.w[skip:]
                    block = block._replace(
                        X=block.X[skip:], y=block.y[skip:], start=block.start + skip, w=w
                    )
                yield block
            row += reader.n_rows or 0


# ------------------------------------------------------------------------------ choosing a reader


def open_reader(
    inputs: Any,
    y: Any,
    files: ExitStack,
    *,
    x_name: str = "X",
    y_name: str = "y",
    sample_weight: Any = None,
    input_options: Mapping[str, Any] | None = None,
    missing: str = "error",
) -> Reader:
    """The reader for `inputs`: a path or URL, several of them, arrays, or an iterable of blocks.

    What it opens is closed by `files`.
    """
    if isinstance(inputs, str | os.PathLike):
        place = _Place(dict(input_options or {}), files)
        return _file_reader(inputs, y, sample_weight, x_name, y_name, place, missing)
    if hasattr(inputs, "shape") and hasattr(inputs, "dtype"):
        return _array_reader(inputs, y, sample_weight)
    if isinstance(inputs, Sequence) and inputs and all(_is_path(k) for k in inputs):
        place = _Place(dict(input_options or {}), files)
        apart = place.kind(inputs[0]) in ("npy", "idx")
        return ManyReader(
            [
                _file_reader(path, target, weight, x_name, y_name, place, missing)
                for path, target, weight in zip(
                    inputs,
                    _one_each(y, len(inputs), apart, "y"),
                    _one_each(sample_weight, len(inputs), apart, "sample weights"),
                    strict=True,
                )
            ]
        )
    if isinstance(inputs, Iterable) and not isinstance(inputs, Mapping):
        if y is not None or sample_weight is not None:
            raise ConfigError(
                "y or sample_weight was given beside an iterable; its blocks must be pairs (X, y), "
                "or (X, y, w) with sample weights"
            )
        return BlockReader(inputs)
    raise ConfigError(
        f"can not ingest a {type(inputs).__name__}; give a path, paths, arrays, or an iterable of "
        "(X, y) blocks"
    )


def _one_each(given: Any, n_files: int, apart: bool, what: str) -> list[Any]:
    """What goes with each of several files; `apart` : it may be a file for each."""
    if not apart or not isinstance(given, list | tuple):
        return [given] * n_files
    if len(given) != n_files:
        raise ConfigError(f"{n_files} files of X and {len(given)} of {what} were given")
    return list(given)


def _array_reader(X: Any, y: Any, w: Any) -> ArrayReader:
    if y is None:
        raise ConfigError("X is an array, so y must be given too")
    y = y if hasattr(y, "shape") else np.asarray(y)
    identity = {
        "kind": "arrays",
        "X": [list(X.shape), str(X.dtype)],
        "y": [list(y.shape), str(y.dtype)],
        "ends": _digest(*(np.asarray(a[part]) for a in (X, y) for part in _ENDS)),
    }
    if w is not None:
        w = w if hasattr(w, "shape") else np.asarray(w)
        identity["w"] = _digest(np.asarray(w))
    chunks = getattr(X, "chunks", None)
    rows = np.ravel(chunks[0])[0] if chunks else 1  # zarr and h5py: (k, ...); dask: ((k, ...), ...)
    return ArrayReader(X, y, "the array", identity, aligned=max(int(rows), 1), w=w)


_ENDS = (slice(0, 256), slice(-256, None))


def _file_reader(
    url: str | os.PathLike[str],
    y: Any,
    w: Any,
    x_name: str,
    y_name: str,
    place: _Place,
    missing: str,
) -> Reader:
    with _decompressing(url):  # a header may be damaged already
        return FileReader(_reader_of(url, y, w, x_name, y_name, place, missing), url)


def _reader_of(
    url: str | os.PathLike[str],
    y: Any,
    w: Any,
    x_name: str,
    y_name: str,
    place: _Place,
    missing: str,
) -> Reader:
    kind = place.kind(url)
    where = redact(url)
    if kind in ("npy", "idx"):
        return _apart_reader(url, kind, y, w, place)
    if w is not None and not isinstance(w, str | int):
        raise ConfigError(
            f"the sample weights of {where} are in it: give the name of their array or column"
        )
    if kind == "zarr":
        names = (x_name, y_name if y is None else y, None if w is None else str(w))
        return _zarr_reader(url, names, place.options, missing)
    weight = [] if w is None else [str(w)]
    identity = [place.identity(url), x_name, y_name, *weight]
    if kind == "npz":
        X, labels, *weights = _npz_members(place, url, (x_name, y_name, *weight))
        return ArrayReader(X, labels, where, identity, w=weights[0] if weights else None)
    if kind == "hdf5":
        X, labels, *weights = _hdf5_members(place, url, (x_name, y_name, *weight))
        rows = X.chunks[0] if X.chunks else 1
        return ArrayReader(
            X, labels, where, identity, aligned=rows, w=weights[0] if weights else None
        )
    target = y_name if y is None else y
    identity = [place.identity(url), _columns_json(target)]
    if kind == "csv":
        return CsvReader(where, lambda: place.open_once(url), target, identity + weight, w)
    path = local_path(url)
    file = path if path is not None else place.open(url)
    reader = ParquetReader(where, file, target, x_name, [*identity, x_name, *weight], w)
    place.keep(closing(reader))
    return reader


def _apart_reader(
    url: str | os.PathLike[str], kind: str, y: Any, w: Any, place: _Place
) -> ArrayReader:
    """A .npy or IDX file of X, with y and w in other such files or in memory."""
    where = redact(url)
    target = _labels_beside(url) if kind == "idx" and y is None else y
    if target is None:
        raise ConfigError(f"{where} holds X alone; give y, a file or an array")
    identity = place.identity(url)
    X = _FILES[kind](place.open(url), where)
    labels, labels_identity = _array_beside(target, "y", place, where)
    identities = [identity, labels_identity]
    if w is None:
        return ArrayReader(X, labels, where, identities)
    weights, weights_identity = _array_beside(w, "sample_weight", place, where)
    return ArrayReader(X, labels, where, [*identities, weights_identity], w=weights)


_FILES = {"npy": npy_array, "idx": idx_array}


def _array_beside(given: Any, name: str, place: _Place, where: str) -> tuple[Any, Any]:
    """An array from a .npy or IDX file, or from memory, and its identity."""
    if not isinstance(given, str | os.PathLike):
        array = np.asarray(given)
        return array, _digest(array)
    kind = place.kind(given)
    if kind not in _FILES:
        raise ConfigError(f"{name}={redact(given)} must be a .npy or IDX file like {where}")
    return _FILES[kind](place.open(given), redact(given)), place.identity(given)


def _hdf5_members(place: _Place, url: str | os.PathLike[str], names: Sequence[str]) -> list[Any]:
    h5py = need("h5py")
    path = local_path(url)
    try:
        file = place.keep(h5py.File(path if path is not None else place.open(url), "r"))
    except FileNotFoundError as error:
        raise StoreNotFoundError(f"there is no file {redact(url)}") from error
    except OSError as error:
        raise DataError(f"{redact(url)} is not a readable HDF5 file: {error}") from error
    return [_member(file, name, redact(url)) for name in names]


def _zarr_reader(
    url: str | os.PathLike[str],
    names: tuple[str, str, str | None],
    options: dict[str, Any],
    missing: str,
) -> Reader:
    where = redact(url)
    store = zarr_store(url, storage_options=options or None)
    try:
        group = zarr.open_group(store if missing == "fill" else StrictStore(store), mode="r")
    except FileNotFoundError as error:
        raise StoreNotFoundError(f"there is no zarr group at {where}") from error
    state: Any = group.attrs.get("streamkern")
    if isinstance(state, Mapping) and state.get("status") != "complete":
        raise DataError(f"{where} is an unfinished store; finish its ingest first")
    ours = isinstance(state, Mapping) and names[1] == "y"
    if ours and names[2] is None and state.get("weight_totals") is not None:
        names = (*names[:2], "w")  # our own weights go along
    found = [_member(group, name, where) for name in names if name is not None]
    X, labels, *weights = found
    identity: dict[str, Any] = {"kind": "zarr", "url": where, "names": [k for k in names if k]}
    if isinstance(state, Mapping):
        identity["fingerprint"] = state["fingerprint"]
    else:
        identity["arrays"] = [[list(a.shape), str(a.dtype), list(a.chunks)] for a in found]
    return ArrayReader(
        X,
        labels,
        where,
        identity,
        aligned=int((X.shards or X.chunks)[0]),
        names=state["classes"] if ours else None,
        w=weights[0] if weights else None,
    )


def _member(group: Any, name: str, where: str) -> Any:
    member = group.get(name)
    if member is None or not hasattr(member, "shape"):
        raise StoreNotFoundError(
            f"{where} has no array {name!r}; it has {', '.join(sorted(group)) or 'none'}: name "
            "them with x_name and y_name"
        )
    return member


def _npz_members(place: _Place, url: str | os.PathLike[str], names: Sequence[str]) -> list[Any]:
    where = redact(url)
    try:
        archive = place.keep(zipfile.ZipFile(place.open(url)))
    except zipfile.BadZipFile as error:
        raise DataError(f"{where} is not a .npz file: {error}") from error
    held = [name.removesuffix(".npy") for name in archive.namelist()]
    for name in names:
        if name not in held:
            raise StoreNotFoundError(
                f"{where} has no array {name!r}; it has {', '.join(held)}: name them with x_name "
                "and y_name"
            )
    return [
        npy_array(place.keep(archive.open(f"{name}.npy")), f"{name} of {where}") for name in names
    ]


@contextmanager
def _named(url: str | os.PathLike[str]) -> Iterator[None]:
    """fsspec's errors as ours, with the URL and without its secrets."""
    try:
        yield
    except StreamkernError:
        raise
    except FileNotFoundError as error:
        raise StoreNotFoundError(f"there is no file {redact(url)}") from error
    except ImportError as error:
        raise MissingDependencyError(
            f"reading {redact(url)} needs a package that is not installed: {error}"
        ) from error
    except ValueError as error:  # an unknown protocol or compression
        raise ConfigError(f"can not open {redact(url)}: {error}") from error


class _Place:
    """Where files are: the options to open them with, and who closes them."""

    def __init__(self, options: dict[str, Any], files: ExitStack) -> None:
        self.options = options
        self._files = files

    def open(self, url: str | os.PathLike[str]) -> Any:
        """An open binary file, decompressed by its ending, closed with the rest."""
        return self._files.enter_context(self.open_once(url))

    def keep(self, file: Any) -> Any:
        """Close `file`, a context manager, with the rest."""
        return self._files.enter_context(file)

    def open_once(self, url: str | os.PathLike[str]) -> Any:
        """The same, closed by the caller."""
        with _named(url):
            if is_object(url):
                return open_object(str(url), self.options)
            return fsspec.open(os.fspath(url), "rb", compression="infer", **self.options).open()

    def identity(self, url: str | os.PathLike[str]) -> dict[str, str]:
        """What tells this file from a changed one, without reading it."""
        with _named(url):
            if is_object(url):
                objects, name = split_object(str(url), self.options)
                size, version = objects.stat(name)
                return {"url": redact(url), "size": str(size), "version": version}
            filesystem, path = fsspec.core.url_to_fs(os.fspath(url), **self.options)
            info = filesystem.info(path)
        kept = {k: str(info[k]) for k in ("size", "mtime", "ETag", "LastModified") if k in info}
        return {"url": redact(url), **kept}

    def kind(self, url: str | os.PathLike[str]) -> str:
        """The format, by the ending; IDX files also by their content, stores by being folders."""
        text = redact(url).rstrip("/")
        for suffix in _COMPRESSED:
            text = text.removesuffix(suffix)
        ending = os.path.splitext(text)[1].lower()
        if ending in _KINDS:
            return _KINDS[ending]
        path = local_path(url)
        if path is not None and not path.exists():
            raise StoreNotFoundError(f"there is no file or store at {path}")
        if path is None or path.is_dir():
            return "idx" if "-ubyte" in text else "zarr"
        with self.open_once(url) as file:
            head = file.read(4)
        if is_idx(head):
            return "idx"
        raise DataError(
            f"can not tell the format of {redact(url)}; known endings are {', '.join(_KINDS)}, "
            "also compressed, and IDX files by their content"
        )


def _labels_beside(url: str | os.PathLike[str]) -> str | None:
    """The labels file by MNIST's naming, if the images file follows it."""
    text = os.fspath(url)
    for old, new in (("images-idx3", "labels-idx1"), ("images.idx3", "labels.idx1")):
        if old in text:
            return text.replace(old, new)
    return None


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike)


def _columns_json(target: Any) -> Any:
    return target if isinstance(target, str | int) else list(target)


def _digest(*arrays: NDArray[Any]) -> str:
    """A hash of a few rows of arrays, whatever their dtype."""
    digest = hashlib.sha256()
    for array in arrays:
        plain = array.astype(str) if array.dtype.kind == "O" else array
        digest.update(f"{plain.shape} {plain.dtype}".encode())
        digest.update(np.ascontiguousarray(plain).tobytes())
    return digest.hexdigest()
