"""Groups of arrays on the disk that are either whole or not there.

A group is a plain zarr v3 group beside a manifest that names it: ``42/`` and ``42.json``. The
manifest lists size and SHA-256 of every file and carries the meta and a checksum of itself. It
is written aside, fsynced and renamed after every byte and folder it names has been fsynced, so
a group counts from one instant on. It is never written to twice: publishing under the same
name fills a fresh group (``42-1``) and lets the new manifest replace the old one in one rename.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.codecs import Crc32cCodec
from zarr.storage import LocalStore

from streamkern.errors import CheckpointError
from streamkern.report import utc_now

FORMAT = "streamkern-checkpoint"
VERSION = 1
STEM = re.compile(r"(\d{12}|setup)(-\d+)?")
TEMPORARY = ".json.tmp"
_NAME = re.compile(r"(?!__)[A-Za-z0-9_][A-Za-z0-9_.-]*")
_KINDS = frozenset("?bhilqBHILQefdFD")  # bool, integers, half to double, complex
_CHUNK_BYTES = (8 << 20, 64 << 20)
_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file would pass the largest size allowed",
    errno.EROFS: "the file system is read-only",
}


@dataclass(frozen=True)
class Saved:
    """What a save stored: arrays with their dtypes and bits, and the meta as it was given."""

    step: int
    arrays: dict[str, np.ndarray]
    meta: dict[str, Any]


class UnverifiedError(Exception):
    """A manifest or the data it names is torn, changed or gone; the text says which."""


def publish(
    root: Path,
    stem: str,
    step: int,
    arrays: Mapping[str, np.ndarray],
    meta: Mapping[str, object],
) -> None:
    """Write a fresh group, seal it on the disk, and only then let a manifest name it."""
    plain, manifest = checked_meta(meta, "meta"), root / f"{stem}.json"
    checked = checked_arrays(arrays)
    names = (stem, *(f"{stem}-{k}" for k in range(1, 1000)))
    group = next(root / name for name in names if not (root / name).exists())
    try:
        _write_arrays(group, checked)
        body = {
            "format": FORMAT,
            "version": VERSION,
            "step": step,
            "group": group.name,
            "saved": utc_now(),
            "arrays": {k: [list(x.shape), x.dtype.name] for k, x in checked.items()},
            "files": _seal(group),
            "meta": plain,
        }
        sync_folder(root)
        document = {"body": body, "sha256": hashlib.sha256(_canonical(body)).hexdigest()}
        write_atomic(manifest, json.dumps(document, indent=1).encode() + b"\n")
    except BaseException:
        # The rename may have happened already; what a manifest names is never deleted.
        if named_group(manifest) != group.name:
            shutil.rmtree(group, ignore_errors=True)
        raise


def _seal(group: Path) -> dict[str, list[Any]]:
    """Size and SHA-256 of every file in `group`, by path, with all of it fsynced."""

    def fail(error: OSError) -> None:
        raise error

    files: dict[str, list[Any]] = {}
    for folder, _, names in os.walk(group, topdown=False, onerror=fail):
        for name in sorted(names):
            path = Path(folder, name)
            with path.open("r+b") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                os.fsync(file.fileno())
                files[path.relative_to(group).as_posix()] = [file.tell(), digest]
        sync_folder(Path(folder))
    return files


def load(manifest: Path) -> Saved:
    """What `manifest` promises, after checking every byte of it."""
    try:
        raw = manifest.read_bytes()
        body = _body(raw)
        group = manifest.parent / body["group"]
        for name, (size, digest) in body["files"].items():
            with (group / name).open("rb") as file:
                if os.fstat(file.fileno()).st_size != size:
                    raise UnverifiedError(f"{group.name}/{name} is not {size} bytes long")
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    raise UnverifiedError(f"{group.name}/{name} does not match its checksum")
        arrays = _read_arrays(group, body["arrays"])
        # zarr reads a chunk that is gone as zeros. A manifest is deleted before its data, so
        # while it stands, nothing vanished between the checksums and the reading.
        if manifest.read_bytes() != raw:
            raise UnverifiedError("it was replaced while it was read")
    except OSError as error:
        name = Path(error.filename).name if isinstance(error.filename, str) else manifest.name
        raise UnverifiedError(f"{name}: {reason(error)}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UnverifiedError(f"{manifest.name} is damaged ({error})") from error
    return Saved(body["step"], arrays, body["meta"])


def _body(raw: bytes) -> dict[str, Any]:
    """The content of a manifest; ValueError when it is torn, changed or not one of ours."""
    try:
        document = json.loads(raw)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(document, dict) or not isinstance(body := document.get("body"), dict):
        raise ValueError("not a manifest")
    if hashlib.sha256(_canonical(body)).hexdigest() != document.get("sha256"):
        raise ValueError("its checksum does not match")
    if (body["format"], body["version"]) != (FORMAT, VERSION):
        raise ValueError(f"{body['format']} version {body['version']} is not known here")
    if not STEM.fullmatch(body["group"]):
        raise ValueError("it names a group outside the run directory")
    return body


def named_group(manifest: Path) -> str | None:
    """The group that `manifest` names, or None when it is missing or unreadable."""
    try:
        return str(_body(manifest.read_bytes())["group"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()


def checked_meta(meta: Mapping[str, object], name: str) -> dict[str, Any]:
    """A copy of `meta` that JSON gives back unchanged; tuples become lists."""
    if not isinstance(meta, Mapping):
        raise CheckpointError(f"{name} is {type(meta).__name__}, not a mapping")
    copied: dict[str, Any] = _checked_json(meta, name)
    return copied


def _checked_json(value: object, where: str) -> Any:
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise CheckpointError(f"{where} has the key {key!r}; keys must be strings")
        return {k: _checked_json(v, f"{where}[{k!r}]") for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_checked_json(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise CheckpointError(f"{where} is {value}; JSON holds finite numbers only, use None")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise CheckpointError(
        f"{where} is {type(value).__name__}, not JSON; convert it (NumPy scalars: .item())"
    )


# -- arrays in a group -------------------------------------------------------------------------


def checked_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same arrays, not copied; CheckpointError for a name or dtype that can not be kept."""
    lower: set[str] = set()
    for name, x in arrays.items():
        if not _NAME.fullmatch(name) or name == "zarr.json" or name.lower() in lower:
            raise CheckpointError(
                f"array name {name!r} must be letters, digits, '_', '-', '.' and differ from the"
                " others by more than case"
            )
        lower.add(name.lower())
        if not isinstance(x, np.ndarray) or x.dtype.char not in _KINDS or not x.dtype.isnative:
            kind = x.dtype if isinstance(x, np.ndarray) else type(x).__name__
            raise CheckpointError(
                f"array {name!r} is {kind}; a checkpoint takes NumPy arrays of native bool,"
                " integer, float or complex dtype"
            )
    return dict(arrays)


def chunk_rows(shape: tuple[int, ...], itemsize: int) -> int:
    """Rows per chunk: 8 MiB, up to 64 MiB for large arrays, split evenly to avoid padding."""
    n_rows, row_bytes = shape[0], itemsize * math.prod(shape[1:])
    small, large = _CHUNK_BYTES
    target = min(max(n_rows * row_bytes // 64, small), large)
    n_chunks = math.ceil(n_rows / max(1, target // max(1, row_bytes)))
    return max(1, math.ceil(n_rows / max(1, n_chunks)))


def _write_arrays(group: Path, arrays: Mapping[str, np.ndarray]) -> None:
    root = zarr.create_group(LocalStore(group))
    for name, x in arrays.items():
        rows = chunk_rows(x.shape, x.dtype.itemsize) if x.ndim else 1
        stored = root.create_array(
            name,
            shape=x.shape,
            dtype=x.dtype,
            chunks=(rows, *(max(1, n) for n in x.shape[1:])) if x.ndim else (),
            filters=None,
            compressors=(Crc32cCodec(),),
            fill_value=0,
            # A chunk of zeros that is not there could not be told from a lost one.
            config={"write_empty_chunks": True},
        )
        if x.ndim == 0:
            stored[()] = x
        elif x.size:
            # One chunk at a time: zarr would copy ten at once to add their checksums.
            for start in range(0, len(x), rows):
                stored[start : start + rows] = x[start : start + rows]


def _read_arrays(group: Path, promised: Mapping[str, Any]) -> dict[str, np.ndarray]:
    root = zarr.open_group(LocalStore(group, read_only=True), mode="r")
    arrays = {}
    for name, (shape, dtype) in promised.items():
        stored = root[name]
        if not isinstance(stored, zarr.Array) or stored.shape != tuple(shape):
            raise UnverifiedError(f"array {name} is not of shape {shape}")
        out = np.empty(tuple(shape), np.dtype(dtype))
        if out.ndim == 0:
            out[()] = stored[()]
        elif out.size:
            rows = stored.chunks[0]
            for start in range(0, len(out), rows):
                out[start : start + rows] = stored[start : start + rows]
        arrays[name] = out
    return arrays


# -- files -------------------------------------------------------------------------------------


def reason(error: OSError) -> str:
    return _REASONS.get(error.errno or 0) or (error.strerror or str(error)).lower()


def write_atomic(path: Path, data: bytes) -> None:
    """Put `data` at `path` so that a reader, or a restart, sees all of it or none of it."""
    aside = path.with_name(f"{path.stem}{TEMPORARY}")
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    if os.name == "nt":  # Windows can not open a folder to sync it
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
