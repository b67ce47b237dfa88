"""Reads blocks of rows from the formats training data comes in, one small reader for each.

A reader yields `RawBlock`s of consecutive rows in source order, of about the bytes asked for,
starting at any row, and tells what it reads by an `identity` (sizes and times; of arrays in memory
a checksum) so that an interrupted ingest is not continued with other data. Arrays on disk are
streamed, not mapped: the same code reads local, compressed and remote files, and memory stays
bounded.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import chain
from typing import Any, Protocol

import google_crc32c
import numpy as np
import zarr
from numpy.typing import NDArray

from streamkern.basics.errors import ConfigError, DataError, StoreNotFoundError, StreamkernError
from streamkern.basics.optional import need
from streamkern.filesystem.ownership import ATTRIBUTE, STORE
from streamkern.filesystem.urls import StrictStore, redact, zarr_store
from streamkern.ingest.array_files import ArrayReader, idx_array, npy_array
from streamkern.ingest.arrow_tables import FrameReader, ParquetReader
from streamkern.ingest.columns import Asked, Files, listed, split_columns
from streamkern.ingest.conform import RawBlock
from streamkern.ingest.csv_files import CsvReader
from streamkern.ingest.hdf5_files import Hdf5File
from streamkern.ingest.input_files import Place, Url, explained_damage
from streamkern.store.store import open_store
from streamkern.store.zarr_json import own_mark, without_mark


class Reader(Protocol):
    """What `ingest` and prediction need of an input.

    n_rows : None where it is not known before the end was read
    natural_dtype : to store X in; None: whatever holds its dtype
    identity : JSON
    columns, target_columns : names of the columns of X and y as handed on; None where there are
        none
    files : the name of each file, without secrets, and its number of rows as `n_rows`; empty for
        what is in memory
    """

    @property
    def n_rows(self) -> int | None: ...
    @property
    def natural_dtype(self) -> np.dtype[Any] | None: ...
    @property
    def identity(self) -> Any: ...
    @property
    def columns(self) -> tuple[str, ...] | None: ...
    @property
    def target_columns(self) -> tuple[str, ...] | None: ...
    @property
    def files(self) -> Files: ...

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        """Blocks of rows from row `start` to the end."""


class BlockReader:
    """An iterable of (X, y) pairs of arrays, or of (X, y, w) with sample weights."""

    def __init__(self, pairs: Iterable[Any]) -> None:
        self.n_rows: int | None = None
        self.natural_dtype: np.dtype[Any] | None = None
        self.columns = self.target_columns = None
        self.files: Files = ()
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
            block = RawBlock(X, y, "the iterator", row, w=w[0] if w else None)
            step = max(1, block_bytes // max(1, X[:1].nbytes))
            for a in range(max(start - row, 0), len(X), step):
                yield block.part(a, a + step)
            row += len(X)


class FileReader:
    """A reader of a file, whose damage comes out with the file's name."""

    def __init__(self, reader: Reader, url: Url) -> None:
        self.natural_dtype, self.identity = reader.natural_dtype, reader.identity
        self.columns, self.target_columns = reader.columns, reader.target_columns
        self._reader, self._url = reader, url

    @property
    def n_rows(self) -> int | None:
        return self._reader.n_rows

    @property
    def files(self) -> Files:
        return ((redact(self._url), self.n_rows),)

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        with explained_damage(self._url):
            yield from self._reader.blocks(start, block_bytes)


class ManyReader:
    """Several files of the same columns, one after another."""

    def __init__(self, readers: Sequence[Reader]) -> None:
        self._readers = readers
        self.natural_dtype = readers[0].natural_dtype
        self.columns, self.target_columns = readers[0].columns, readers[0].target_columns
        self.identity = [reader.identity for reader in readers]

    @property
    def n_rows(self) -> int | None:
        counts = [n for _, n in self.files if n is not None]
        return sum(counts) if len(counts) == len(self._readers) else None

    @property
    def files(self) -> Files:
        return tuple(file for reader in self._readers for file in reader.files)

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        row = 0
        for reader in self._readers:
            if reader.n_rows is not None:
                if row + reader.n_rows > start:
                    yield from reader.blocks(max(start - row, 0), block_bytes)
                row += reader.n_rows
                continue
            for block in reader.blocks(0, block_bytes):  # only by reading its rows are counted
                skip = max(start - row, 0)
                row += len(block.X)
                if skip < len(block.X):
                    yield block.part(skip)


# ------------------------------------------------------------------------------ choosing a reader


def open_reader(
    inputs: Any,
    y: Any,
    files: ExitStack,
    *,
    x: Any = None,
    sample_weight: Any = None,
    targets: bool = True,
    columns: Sequence[str] | None = None,
    input_options: Mapping[str, Any] | None = None,
    missing: str = "error",
    external: bool = False,
    foreign: bool = False,
) -> Reader:
    """The reader for `inputs`: a path or URL, several of them, arrays, or an iterable of blocks.

    What it opens is closed by `files`.

    Parameters
    ----------
    x, y, sample_weight
        As `ingest` takes them.
    targets : bool
        False reads features alone: the y of blocks is (k, 0), and columns of a table that `y` and
        `sample_weight` name are left out where they are there.
    columns : sequence of str, optional
        The names that the features must have where they have names. Another order is put right;
        DataError names what is missing or not among them.
    external : bool
        Whether links of HDF5 to other files are followed.
    foreign : bool
        Whether a Zarr group of ours is read as if another program had written it.
    """
    place = Place(dict(input_options or {}), files, missing, external, foreign)
    asked = Asked(x, y, sample_weight, targets, None if columns is None else tuple(columns))
    if _is_path(inputs):
        return _file_reader(inputs, asked, place)
    if hasattr(inputs, "__arrow_c_stream__"):
        return FrameReader(inputs, asked)
    if hasattr(inputs, "shape") and hasattr(inputs, "dtype"):
        return _array_reader(inputs, asked)
    if isinstance(inputs, Sequence) and inputs and all(_is_path(k) for k in inputs):
        return ManyReader(list(_file_readers(inputs, asked, place)))
    if isinstance(inputs, Iterable) and not isinstance(inputs, Mapping):
        if y is not None or sample_weight is not None:
            raise ConfigError(
                "y or sample_weight was given beside an iterable; its blocks must be pairs (X, y), "
                "or (X, y, w) with sample weights"
            )
        return BlockReader(inputs)
    raise ConfigError(
        f"can not ingest a {type(inputs).__name__}; give a path, paths, arrays, a data frame, or "
        "an iterable of (X, y) blocks"
    )


def _file_readers(urls: Sequence[Url], asked: Asked, place: Place) -> Iterator[Reader]:
    """A reader for each file; those after the first have its columns, in its order."""
    kind = place.kind(urls[0])
    targets = _one_each(asked.y, len(urls), kind in _FILES, "y")
    weights = _one_each(asked.w, len(urls), kind in _FILES, "sample weights")
    first: Reader | None = None
    for url, y, w in zip(urls, targets, weights, strict=True):
        one = asked._replace(y=y, w=w)
        if first is not None and first.columns is not None:
            one = one._replace(columns=first.columns)
            if kind in _TABLES:
                one = _by_name(one, first)
        reader = _file_reader(url, one, place)
        first = first or reader
        if (reader.columns is None) != (first.columns is None):
            raise DataError(
                f"of {first.files[0][0]} and {reader.files[0][0]}, one names its columns and the "
                "other does not; give all files a header, or none"
            )
        yield reader


def _by_name(asked: Asked, first: Reader) -> Asked:
    """The same columns as in the first file: positions may mean others in the next."""
    if isinstance(asked.w, int):
        raise ConfigError(
            f"sample_weight={asked.w} is a position, which may be another column in each file; "
            "give the name"
        )
    x = None if asked.x is None else first.columns
    return asked._replace(x=x, y=first.target_columns if asked.targets else asked.y)


def _one_each(given: Any, n_files: int, apart: bool, what: str) -> list[Any]:
    """What goes with each of several files; `apart` : it may be a file for each."""
    if not apart or not isinstance(given, list | tuple):
        return [given] * n_files
    if len(given) != n_files:
        raise ConfigError(f"{n_files} files of X and {len(given)} of {what} were given")
    return list(given)


def _array_reader(X: Any, asked: Asked) -> ArrayReader:
    if asked.y is None and asked.targets:
        raise ConfigError("X is an array, so y must be given too")
    beside = [k for k in (asked.y, asked.w) if k is not None and asked.targets]
    arrays = [X, *(a if hasattr(a, "shape") else np.asarray(a) for a in beside)]
    identity: dict[str, Any] = {
        "kind": "arrays",
        "arrays": [[list(a.shape), str(a.dtype)] for a in arrays],
    }
    if all(type(a) is np.ndarray for a in arrays):
        identity |= {"kind": "arrays in memory", "contents": [_contents(a) for a in arrays]}
    else:  # reading them may take as long as the ingest
        identity["ends"] = _digest(*(np.asarray(a[part]) for a in arrays[:2] for part in _ENDS))
        if asked.weighted:
            identity["w"] = _digest(np.asarray(arrays[2]))
    chunks = getattr(X, "chunks", None)
    rows = np.ravel(chunks[0])[0] if chunks else 1  # zarr and h5py: (k, ...); dask: ((k, ...), ...)
    return ArrayReader(arrays, "the array", identity, aligned=max(int(rows), 1))


_ENDS = (slice(0, 256), slice(-256, None))
_SLAB = 2**20  # bytes of an array that are made contiguous and digested at a time


# ------------------------------------------------------------------------------ a reader of a file


def _file_reader(url: Url, asked: Asked, place: Place) -> Reader:
    with explained_damage(url):  # a header may be damaged already
        kind = place.kind(url)
        if kind not in _FILES and asked.w is not None and not isinstance(asked.w, str | int):
            raise ConfigError(
                f"the sample weights of {redact(url)} are in it: give the name of their array or "
                "column"
            )
        return FileReader(_READERS[kind](url, asked, place), url)


def _apart_reader(kind: str, url: Url, asked: Asked, place: Place) -> Reader:
    """A .npy or IDX file of X, with y and w in other such files or in memory."""
    where = redact(url)
    found = [_array_in(url, kind, place)]
    if asked.targets:
        target = _labels_beside(url) if kind == "idx" and asked.y is None else asked.y
        if target is None:
            raise ConfigError(f"{where} holds X alone; give y=, a file or an array")
        found.append(_array_beside(target, "y", place, where))
    if asked.weighted:
        found.append(_array_beside(asked.w, "sample_weight", place, where))
    arrays, identities = zip(*found, strict=True)
    return ArrayReader(arrays, where, list(identities))


_FILES = {"npy": npy_array, "idx": idx_array}


def _array_in(url: Url, kind: str, place: Place) -> tuple[Any, Any]:
    """The array of a .npy or IDX file, and its identity."""
    identity = place.identity(url)
    return _FILES[kind](place.open(url), redact(url)), identity


def _array_beside(given: Any, name: str, place: Place, where: str) -> tuple[Any, Any]:
    """The same of `given`, which may also be in memory."""
    if not _is_path(given):
        array = np.asarray(given)
        return array, _digest(array)
    kind = place.kind(given)
    if kind not in _FILES:
        raise ConfigError(f"{name}={redact(given)} must be a .npy or IDX file like {where}")
    return _array_in(given, kind, place)


def _csv_reader(url: Url, asked: Asked, place: Place) -> Reader:
    opened = partial(place.open_once, url)
    return CsvReader(redact(url), opened, asked, [place.identity(url), asked.json()])


def _parquet_reader(url: Url, asked: Asked, place: Place) -> Reader:
    identity = [place.identity(url), asked.json()]
    reader = ParquetReader(redact(url), place.file(url), asked, identity)
    place.keep(closing(reader))
    return reader


def _npz_reader(url: Url, asked: Asked, place: Place) -> Reader:
    where, names = redact(url), array_names(asked, redact(url))
    identity = [place.identity(url), *names]
    try:
        archive = place.keep(zipfile.ZipFile(place.open(url)))
    except (zipfile.BadZipFile, NotImplementedError) as error:  # or of a version to come
        raise DataError(f"{where} is not a .npz file: {error}") from error
    held = [k.removesuffix(".npy") for k in archive.namelist() if k.endswith(".npy")]
    for name in names:
        if name not in held:
            raise _no_array(name, held, where)
    arrays = [
        npy_array(place.keep(_entry(archive, name, where)), f"{name} of {where}") for name in names
    ]
    return ArrayReader(arrays, where, identity)


def _entry(archive: zipfile.ZipFile, name: str, where: str) -> Any:
    """An array's file in an archive, open."""
    try:
        return archive.open(f"{name}.npy")
    except (RuntimeError, NotImplementedError) as error:  # encrypted; a compression of others
        raise DataError(f"{name} of {where} can not be read: {error}; save it again") from error


def _hdf5_reader(url: Url, asked: Asked, place: Place) -> Reader:
    where, identity = redact(url), [place.identity(url), asked.json()]
    h5py = need("h5py")
    given = place.fetched(url)
    try:
        opened = place.keep(h5py.File(given, "r"))
        file = Hdf5File(opened, where, fill=place.missing == "fill", external=place.external)
        table = file.table(asked)
        if table is None:
            arrays, columns, targets = file.arrays(array_names(asked, where)), None, None
        else:
            arrays, columns, targets = table[0], table[1].features, table[1].targets
    except (StreamkernError, MemoryError):
        raise
    except FileNotFoundError as error:
        raise StoreNotFoundError(f"there is no file {where}") from error
    except Exception as error:  # whatever the library raises for damage
        raise DataError(f"{where} is not a readable HDF5 file: {error}") from error
    chunks = arrays[0].chunks
    return ArrayReader(
        arrays,
        where,
        identity,
        aligned=chunks[0] if chunks else 1,
        columns=columns,
        target_columns=targets,
    )


def _zarr_reader(url: Url, asked: Asked, place: Place) -> Reader:
    where = redact(url)
    store = zarr_store(url, storage_options=place.options or None)
    state = own_state(url, place)
    # Of ours the metadata are checked, and chunks bound to their places.
    opened = None if state is None else open_store(url, storage_options=place.options or None)
    try:
        group = zarr.open_group(store if place.missing == "fill" else StrictStore(store), mode="r")
    except FileNotFoundError as error:
        raise StoreNotFoundError(f"there is no zarr group at {where}") from error
    columns = target_columns = order = None
    if state is not None:
        asked, columns, target_columns, order = own_columns(state, asked, where)
    names, own = array_names(asked, where), {} if opened is None else opened.rows
    own_targets = opened is not None and asked.targets and asked.y is None
    if own_targets and asked.w is None and "w" in own:
        names.append("w")  # our own weights go along
    members = {name: _member(group, name, where) for name in names if name not in own}
    signed = (array.attrs.get(ATTRIBUTE) == STORE for array in members.values())
    if state is None and not place.foreign and any(signed):
        raise without_mark(str(url))
    arrays = [own[name] if name in own else members[name] for name in names]
    identity: dict[str, Any] = {"kind": "zarr", "url": where, "asked": asked.json()}
    if opened is not None:
        identity["fingerprint"] = opened.spec.fingerprint
    else:
        identity["arrays"] = [[list(a.shape), str(a.dtype), list(a.chunks)] for a in arrays]
    return ArrayReader(
        arrays,
        where,
        identity,
        aligned=int((arrays[0].shards or arrays[0].chunks)[0]),
        names=opened.spec.classes if opened is not None and own_targets else None,
        columns=columns,
        target_columns=target_columns,
        order=order,
    )


def own_state(url: Url, place: Place) -> Mapping[str, Any] | None:
    """The attribute of a store of ours; None for another group, or what is to be taken for one."""
    if place.foreign:
        return None
    store = StrictStore(zarr_store(url, storage_options=place.options or None))
    state = own_mark(store, "", str(url))
    # Of another kind are predictions, say, whose arrays are asked for by their names.
    return state if state is not None and state.get("kind") == STORE else None


def own_columns(
    state: Mapping[str, Any], asked: Asked, where: str
) -> tuple[Asked, Any, Any, list[int] | None]:
    """What to ask of a store of ours, whose columns have the names of the table they came from.

    x and y are left in it where they are no columns of these names but, perhaps, arrays. Also the
    names of the columns of X and y, and which columns of X those are.
    """
    names, targets = state.get("columns"), state.get("target_columns")
    if _is_name(asked.y) and listed(asked.y) in (["y"], list(targets or ())):
        asked = asked._replace(y=None)
    x = None if asked.x == "X" else asked.x
    if names is None or (isinstance(x, str) and x not in names):
        return asked, None, targets, None
    wish = Asked(x, (), targets=False, columns=asked.columns)
    columns = split_columns(names, wish, where).features
    order = [names.index(name) for name in columns]
    whole = order == list(range(len(names)))
    return asked._replace(x=None), columns, targets, None if whole else order


_TABLES = ("csv", "parquet")
_READERS: dict[str, Callable[[Url, Asked, Place], Reader]] = {
    **{kind: partial(_apart_reader, kind) for kind in _FILES},
    "npz": _npz_reader,
    "csv": _csv_reader,
    "parquet": _parquet_reader,
    "hdf5": _hdf5_reader,
    "zarr": _zarr_reader,
}


def array_names(asked: Asked, where: str) -> list[str]:
    """The names of X, y and w; ConfigError for one that is none."""
    for what, name in zip(("x", "y", "sample_weight"), asked.arrays, strict=False):
        if not isinstance(name, str):
            given = name if isinstance(name, int | list | tuple) else type(name).__name__
            raise ConfigError(f"{what}={given} must be the name of an array of {where}")
    return asked.arrays


def _member(group: Any, name: str, where: str) -> Any:
    member = group.get(name)
    if member is None or not hasattr(member, "shape"):
        raise _no_array(name, sorted(group), where)
    return member


def _no_array(name: str, held: Sequence[str], where: str) -> StoreNotFoundError:
    return StoreNotFoundError(
        f"{where} has no array {name!r}; it has {', '.join(held) or 'none'}: name them with x= and "
        "y="
    )


def _labels_beside(url: str | os.PathLike[str]) -> str | None:
    """The labels file by MNIST's naming, if the images file follows it."""
    text = os.fspath(url)
    for old, new in (("images-idx3", "labels-idx1"), ("images.idx3", "labels.idx1")):
        if old in text:
            return text.replace(old, new)
    return None


def _is_name(value: Any) -> bool:
    return isinstance(value, str | list | tuple)


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike)


def _contents(array: NDArray[Any]) -> str:
    """What tells all that is in an array from something else, at the speed of memory."""
    if array.dtype.hasobject or not array.ndim:
        return _digest(array)
    crc, rows = 0, max(1, _SLAB // max(1, array[:1].nbytes))
    for start in range(0, len(array), rows):
        slab = np.ascontiguousarray(array[start : start + rows])
        crc = google_crc32c.extend(crc, slab.reshape(-1).view(np.uint8))
    return f"crc32c:{crc:08x}"


def _digest(*arrays: NDArray[Any]) -> str:
    """A hash of a few rows of arrays, whatever their dtype."""
    digest = hashlib.sha256()
    for array in arrays:
        plain = array
        if array.dtype.kind == "O":  # hex: a long integer has no decimal text
            plain = np.array([hex(k) if type(k) is int else str(k) for k in array.ravel().tolist()])
        digest.update(f"{plain.shape} {plain.dtype}".encode())
        digest.update(np.ascontiguousarray(plain).tobytes())
    return digest.hexdigest()
