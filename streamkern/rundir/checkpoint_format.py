"""The format of setups and checkpoints: groups of arrays that exist completely or not at all.

A group is a plain zarr v3 group next to a manifest that names it: ``42/`` and ``42.json``. The
manifest lists size and SHA-256 of every file, contains the metadata and a checksum of itself, and
is written atomically after every byte that it names is durable. A group is never written to twice:
publishing under the same name fills a new group (``42-1``), whose manifest replaces the old one.

Sizes and checksums are computed while zarr writes, and compared while it reads. Nothing is read
twice, and no array receives a byte that the manifest does not list.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import zarr
from zarr.codecs import Crc32cCodec

from streamkern.basics.errors import CheckpointError, StorageError, StreamkernError
from streamkern.basics.text import utc_now
from streamkern.planning.memory import SAVED_CHUNK_BYTES
from streamkern.rundir.checksums import CheckedStore, RecordingStore, UnverifiedError, seal, unseal
from streamkern.rundir.chunked_array import (
    ChunkedArray,
    SelectiveTarget,
    TargetFactory,
    allocate_on_host,
)
from streamkern.rundir.run_storage import RunStorage, os_error_text

CHECKPOINT_KIND = "checkpoint"
_MANIFEST_KEYS = {"step", "group", "saved", "arrays", "files", "meta", "run", "log"}
"""Entries of a manifest. "saved" is the time, and "log" the number of stored lines of the log."""
GROUP_NAME = re.compile(r"((?:\d{12}-)?(?:\d{12}|setup))(-\d{1,3})?")
"""Name of a group: number of the writer (on object stores), step or "setup", and number of the
attempt after the first."""
_ARRAY_NAME = re.compile(r"(?!__)[A-Za-z0-9_][A-Za-z0-9_.-]*")
_DTYPE_CHARS = frozenset("?bhilqBHILQefdFD")  # bool, integers, half to double, complex
_CHUNK_BYTES = (8 << 20, SAVED_CHUNK_BYTES)
"""Preferred and largest size of a chunk in bytes."""
_CONCURRENT_CHUNKS = (2, 16)
"""Smallest and largest number of chunks that are transferred at once to or from an object store."""


@dataclass(frozen=True)
class SavedGroup:
    """A group that was saved: the content of a checkpoint or of a setup.

    step : step of the checkpoint; 0 for a setup
    arrays : arrays by name, bit for bit as they were saved
    meta : JSON values as they were saved
    run : record of the run to which it belongs, or None
    skipped : a sentence for each newer checkpoint that is damaged and was skipped
    checksums : for each array of a loaded group, the SHA-256 of the manifest's entries for its
        files
    """

    step: int
    arrays: dict[str, np.ndarray]
    meta: dict[str, Any]
    run: dict[str, Any] | None = None
    skipped: tuple[str, ...] = ()
    checksums: Mapping[str, str] = field(default_factory=dict)


Saved = SavedGroup  # the name in pickles of earlier versions


@contextlib.contextmanager
def checkpoint_errors(location: str) -> Iterator[None]:
    """Convert errors of looking up entries of a document in `location` to CheckpointError.

    A document with a valid checksum may still lack entries, because a checksum is not a signature:
    a user who edits a document can compute it again.
    """
    try:
        yield
    except StreamkernError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(
            f"{location} holds a JSON file that was edited, together with its checksum "
            f"({type(error).__name__}: {error})",
            "restore it from a copy, or start again in a new run directory",
        ) from error


def publish_checkpoint(
    folder: RunStorage, stem: str, step: int, arrays: Mapping[str, ChunkedArray],
    meta: Mapping[str, object], *, run: Mapping[str, Any] | None,
    existing_names: Collection[str], before_publishing: Callable[[], int],
) -> str:  # fmt: skip
    """Write a new group durably, publish it by the manifest ``stem.json``, and return its name.

    stem : name of the manifest without ``.json``, with its folder
    step : step of the checkpoint; 0 for a setup
    run : record of the run, or None
    existing_names : names that exist already in the folder of the manifest
    before_publishing : called when only the manifest is missing; returns the number of stored lines
        of the run log, or raises an error to prevent the publication

    Raises CheckpointError for arrays or `meta` that cannot be stored, OSError if the storage fails,
    and the error of `before_publishing`.
    """
    meta_json, manifest = checked_meta(meta, "meta"), f"{stem}.json"
    checked = checked_arrays(arrays)
    names = (stem, *(f"{stem}-{k}" for k in range(1, 1000)))
    group = next(name for name in names if _base_name(name) not in existing_names)
    try:
        files = _write_arrays(folder, group, checked)
        folder.sync(group)
        body = {
            "step": step,
            "group": _base_name(group),
            "saved": utc_now(),
            "arrays": {name: [list(x.shape), x.dtype.name] for name, x in checked.items()},
            "files": files,
            "meta": meta_json,
            "run": run,
            "log": before_publishing(),
        }
        document = seal(CHECKPOINT_KIND, body)
    except StorageError:
        raise  # deleting would wait for the same storage; a later `CheckpointRetention` does it
    except BaseException:
        with contextlib.suppress(OSError):  # a later `CheckpointRetention` does it
            folder.delete_group(group)
        raise
    try:
        folder.write(manifest, document)
    except StorageError:
        raise
    except Exception:  # not Ctrl-C, after which the manifest may still arrive
        if named_group(folder, manifest) != _base_name(group):
            with contextlib.suppress(OSError):
                folder.delete_group(group)
        raise
    return _base_name(group)


def load_checkpoint(
    folder: RunStorage, manifest: str, into: TargetFactory = allocate_on_host
) -> SavedGroup:
    """Load the group that `manifest` names, and verify every byte that is read.

    into : returns, for the name, shape and dtype of an array, the array that receives its parts;
        None if the array is not needed

    Raises UnverifiedError if the group is incomplete or differs from its manifest, and StorageError
    if the storage fails before this can be decided.
    """
    body = read_manifest(folder, manifest)
    group = f"{manifest.rpartition('/')[0]}/{body['group']}".strip("/")
    with _unverified_errors(manifest):
        arrays = _read_arrays(folder, group, body, into)
        checksums = _checksums(body["files"])
    return SavedGroup(body["step"], arrays, body["meta"], body["run"], checksums=checksums)


def read_manifest(folder: RunStorage, manifest: str) -> dict[str, Any]:
    """Return the content of a manifest; raise UnverifiedError if it is missing or damaged."""
    with _unverified_errors(manifest):
        body = unseal(CHECKPOINT_KIND, folder.read(manifest))
    if body.keys() != _MANIFEST_KEYS or not isinstance(body["log"], int):
        raise UnverifiedError(f"{_base_name(manifest)} has other entries than a manifest")
    if not GROUP_NAME.fullmatch(str(body["group"])):
        raise UnverifiedError(f"{_base_name(manifest)} names a group outside the run directory")
    return body


@contextlib.contextmanager
def _unverified_errors(manifest: str) -> Iterator[None]:
    """Convert errors of reading a manifest, or the group that it names, to UnverifiedError."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise UnverifiedError(f"{_base_name(manifest)}: {os_error_text(error)}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UnverifiedError(f"{_base_name(manifest)} is damaged ({error})") from error


def _checksums(files: Mapping[str, list[Any]]) -> dict[str, str]:
    """Return `SavedGroup.checksums`. files : [size, SHA-256] of each file"""
    digests: dict[str, Any] = {}
    for key, (size, sha256) in sorted(files.items()):
        digest = digests.setdefault(key.partition("/")[0], hashlib.sha256())
        digest.update(f"{key} {size} {sha256}\n".encode())
    return {name: digest.hexdigest() for name, digest in digests.items()}


def _base_name(name: str) -> str:
    return name.rpartition("/")[2]


def named_group(folder: RunStorage, manifest: str) -> str | None:
    """Return the group that `manifest` names, or None if it is missing or unreadable."""
    try:
        return str(read_manifest(folder, manifest)["group"])
    except (OSError, UnverifiedError):
        return None


def checked_meta(meta: Mapping[str, object], name: str) -> dict[str, Any]:
    """Return a copy of `meta` as JSON values, in which tuples are lists.

    name : name of `meta` in messages

    Raises CheckpointError for a value that JSON would not restore.
    """
    if not isinstance(meta, Mapping):
        raise CheckpointError(f"{name} is {type(meta).__name__}, not a dict; give a dict")
    copied: dict[str, Any] = _checked_json(meta, name)
    return copied


def _checked_json(value: object, location: str) -> Any:
    """Return a copy of a value as JSON values. location : name of the value in messages"""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise CheckpointError(f"{location} has the key {key!r}", "keys must be strings")
        return {k: _checked_json(v, f"{location}[{k!r}]") for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_checked_json(v, f"{location}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise CheckpointError(f"{location} is {value}", "JSON has only finite numbers: use None")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise CheckpointError(
        f"{location} is {type(value).__name__}, not JSON", "convert it (NumPy scalars: .item())"
    )


# -- arrays in a group -------------------------------------------------------------------------


def checked_arrays(arrays: Mapping[str, object]) -> dict[str, ChunkedArray]:
    """Return the same arrays; raise CheckpointError for a name or dtype that is not allowed."""
    checked: dict[str, ChunkedArray] = {}
    lower_names: set[str] = set()  # some file systems do not distinguish upper and lower case
    for name, x in arrays.items():
        if not _ARRAY_NAME.fullmatch(name) or name == "zarr.json" or name.lower() in lower_names:
            raise CheckpointError(
                f"array name {name!r} must be letters, digits, '_', '-', '.' and differ from the"
                " others by more than case"
            )
        lower_names.add(name.lower())
        if (
            not isinstance(x, ChunkedArray)
            or x.dtype.char not in _DTYPE_CHARS
            or not x.dtype.isnative
        ):
            kind = x.dtype if isinstance(x, ChunkedArray) else type(x).__name__
            raise CheckpointError(
                f"array {name!r} is {kind}",
                "a checkpoint takes NumPy arrays of native bool, integer, float or complex dtype",
            )
        checked[name] = x
    return checked


def chunk_rows(shape: tuple[int, ...], itemsize: int) -> int:
    """Return the rows per chunk: one chunk, or several of 8 to 64 MiB, of nearly equal size."""
    n_rows, row_bytes = shape[0], itemsize * math.prod(shape[1:])
    preferred_bytes, max_bytes = _CHUNK_BYTES
    chunk_bytes = min(max(n_rows * row_bytes // 64, preferred_bytes), max_bytes)
    n_chunks = math.ceil(n_rows / max(1, chunk_bytes // max(1, row_bytes)))
    return max(1, math.ceil(n_rows / max(1, n_chunks)))


def _write_arrays(
    folder: RunStorage, group: str, arrays: Mapping[str, ChunkedArray]
) -> dict[str, list[Any]]:
    """Write a group that does not exist yet; return [size, SHA-256] of every file."""
    store = RecordingStore(folder.store(group, read_only=False))
    root = zarr.create_group(store)
    n_concurrent = _n_concurrent(folder, arrays.values())

    def create(name: str, x: ChunkedArray) -> zarr.Array[Any]:
        return root.create_array(
            name,
            shape=x.shape,
            dtype=x.dtype,
            chunks=_chunk_shape(x),
            filters=None,
            compressors=(Crc32cCodec(),),
            fill_value=0,
            # An omitted chunk of zeros would look like a lost one.
            config={"write_empty_chunks": True},
        )

    stored_arrays = _run_all((partial(create, name, x) for name, x in arrays.items()), n_concurrent)
    pairs = list(zip(arrays.values(), stored_arrays, strict=True))
    _copy_chunks(pairs, [_chunk_selections(stored) for stored in stored_arrays], n_concurrent)
    return store.files


def _read_arrays(
    folder: RunStorage, group: str, body: Mapping[str, Any], into: TargetFactory
) -> dict[str, Any]:
    """Read a manifest's arrays; raise UnverifiedError if a file differs from its entry."""
    if {key.partition("/")[0] for key in body["files"]} != {"zarr.json", *body["arrays"]}:
        raise UnverifiedError(f"the arrays and the files of {_base_name(group)} are not the same")
    store = CheckedStore(folder.store(group, read_only=True), body["files"], _base_name(group))
    root = zarr.open_group(store, mode="r", zarr_format=3)
    targets = {
        name: into(name, tuple(shape), np.dtype(dtype))
        for name, (shape, dtype) in body["arrays"].items()
    }
    arrays = {name: target for name, target in targets.items() if target is not None}
    n_concurrent = _n_concurrent(folder, arrays.values())

    def open_array(name: str, x: ChunkedArray) -> zarr.Array[Any]:
        stored = root[name]
        if not isinstance(stored, zarr.Array) or stored.shape != x.shape:
            raise UnverifiedError(f"array {name} is not of shape {list(x.shape)}")
        return stored

    stored_arrays = _run_all(
        (partial(open_array, name, x) for name, x in arrays.items()), n_concurrent
    )
    pairs = list(zip(stored_arrays, arrays.values(), strict=True))
    _copy_chunks(pairs, [_needed_chunks(stored, x) for stored, x in pairs], n_concurrent)
    return arrays


def _copy_chunks(
    pairs: Iterable[tuple[Any, Any]], selections: Iterable[list[Any]], n_concurrent: int
) -> None:
    """Copy chunks of arrays. pairs : source and target; selections : chunks of each pair"""

    def copy(source: Any, target: Any, part: Any) -> None:
        target[part] = source[part]

    _run_all(
        (
            partial(copy, source, target, part)
            for (source, target), parts in zip(pairs, selections, strict=True)
            for part in parts
        ),
        n_concurrent,
    )


def _chunk_shape(x: ChunkedArray) -> tuple[int, ...]:
    if x.ndim == 0:
        return ()
    return (chunk_rows(x.shape, x.dtype.itemsize), *(max(1, n) for n in x.shape[1:]))


def _chunk_selections(stored: zarr.Array[Any]) -> list[Any]:
    """Return the selection of each chunk; zarr would read several chunks of a larger selection."""
    if stored.ndim == 0:
        return [()]
    chunk, n_rows = stored.chunks[0], stored.shape[0]
    return [slice(i, i + chunk) for i in range(0, n_rows, chunk)] if stored.size else []


def _needed_chunks(stored: zarr.Array[Any], x: ChunkedArray) -> list[Any]:
    """Return the selections of the chunks that the target needs."""
    chunks = _chunk_selections(stored)
    return [part for part in chunks if x.needs(part)] if isinstance(x, SelectiveTarget) else chunks


def _n_concurrent(folder: RunStorage, arrays: Iterable[ChunkedArray]) -> int:
    """Return the number of chunks to transfer at once; 1 if the storage has no latency to hide."""
    if not folder.in_flight_bytes:
        return 1
    largest = max((math.prod(_chunk_shape(x)) * x.dtype.itemsize for x in arrays), default=1)
    min_chunks, max_chunks = _CONCURRENT_CHUNKS
    return min(max(min_chunks, folder.in_flight_bytes // max(1, largest)), max_chunks)


def _run_all(calls: Iterable[Callable[[], Any]], n_concurrent: int) -> list[Any]:
    """Return the results of the calls; after an error no further call is started."""
    if n_concurrent == 1:
        return [call() for call in calls]
    with ThreadPoolExecutor(n_concurrent, thread_name_prefix="streamkern-chunk") as pool:
        futures = [pool.submit(call) for call in calls]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
