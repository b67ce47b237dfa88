"""Open any URL: local paths, ``file://``, and all protocols of fsspec and obstore.

One syntax for all: a plain path and ``file://`` use zarr's LocalStore; everything else is
`objects.Objects`, over obstore for ``s3://`` if it is installed and supports the settings (one
request per chunk), and over fsspec otherwise, so ``memory://``, ``gs://``, ``https://``, ... work
with the package that fsspec names for them. Credentials stay inside the engine: use `redact` before
a URL goes into a message, a log or a repr.

Storage options are fsspec's (``key``, ``secret``, ``endpoint_url``, ``region``, ``anon``,
``profile``, ...), and two more: ``engine`` ("obstore" or "s3fs") overrides the choice for S3, and
``deadline_s`` is the time in seconds for which a failing request is retried.
"""

from __future__ import annotations

import importlib.util
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import fsspec
from zarr.core.sync import sync
from zarr.storage import LocalStore, WrapperStore, ZipStore

from streamkern.basics.errors import (
    ConfigError,
    CorruptChunkError,
    MissingDependencyError,
    StreamkernError,
)
from streamkern.basics.message import mention
from streamkern.basics.optional import install_command
from streamkern.basics.text import redact
from streamkern.filesystem.buckets import AZURE, GOOGLE, S3, open_buckets, unsupported_options
from streamkern.filesystem.durable import LocalFiles
from streamkern.filesystem.engines import FsspecEngine, ObstoreEngine, open_s3fs
from streamkern.filesystem.icechunk_repository import icechunk_store, is_icechunk
from streamkern.filesystem.objects import DEADLINE_S, Engine, Objects
from streamkern.filesystem.zarr_store import ObjectsStore

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zarr.abc.buffer import Buffer, BufferPrototype
    from zarr.abc.store import ByteRequest, Store

MISSING_CHUNK_TEXT = "is missing from the store"
_METADATA_FILES = frozenset({"zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata"})

_WINDOWS_DRIVE = re.compile(r"^[A-Za-z]:[\\/]")
_SINGLE_SLASH_URL = re.compile(r"(.*::)?(s3a?|gs|gcs|az|abfs|https?|memory):/(?!/)")
_HOST_AND_PORT = re.compile(r"(\[[^]]*\]|[^:]*)(:\d*)?")  # [host] is an IPv6 address


def zarr_store(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    read_only: bool = True,
) -> Store:
    """Return the zarr store at `url`; nothing is created yet, and only a zip archive is read.

    Raises the errors of `open_objects`, and ConfigError for storage options of a local path, for a
    zip archive that cannot be used, and for an icechunk repository that is to be written.
    """
    path = local_path(url)
    if is_icechunk(url):
        if not read_only:
            raise ConfigError(
                f"{redact(url)} is an icechunk repository, which streamkern reads and does not "
                "write",
                "give a path or URL of a Zarr store",
            )
        return icechunk_store(str(url), storage_options)
    if path is None:
        if str(url).endswith(".zarr.zip"):
            raise _zip_error(str(url), "not read from a URL; copy it to a disk")
        objects = open_objects(str(url), storage_options=storage_options)
        return ObjectsStore(objects, read_only=read_only)
    if storage_options:
        raise ConfigError(
            f"storage_options were given for the local path {path}",
            "leave them out: only remote URLs have storage options",
        )
    if path.suffix == ".zip" and path.is_file() and _holds_zarr(path):
        if not read_only:
            raise _zip_error(str(url), "not written to; write to another place")
        return sync(ZipStore.open(path, mode="r", read_only=True))
    return LocalStore(path, read_only=True) if read_only else LocalFiles(path)


def _zip_error(url: str, clause: str) -> ConfigError:
    """Return the error for a zipped store. clause : end of the sentence, with a remedy"""
    return ConfigError(f"{redact(url)} is a zipped Zarr store, which is {clause}, or unpack it")


def _holds_zarr(path: Path) -> bool:
    """Return whether an archive is a Zarr store; raise ConfigError if it holds one in a folder."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    roots = [
        name.rpartition("/")[0] for name in names if name.rpartition("/")[2] in _METADATA_FILES
    ]
    if roots and "" not in roots:
        folder = min(roots, key=len)
        raise ConfigError(
            f"{path} holds the Zarr store {folder} in a folder",
            f"zip the content of that folder (cd {folder} && zip -r0 ../{path.name} .)",
        )
    return bool(roots)


def open_objects(url: str, *, storage_options: Mapping[str, Any] | None = None) -> Objects:
    """Return the objects below a remote URL; nothing is read or created yet.

    Raises
    ------
    MissingDependencyError
        If fsspec supports the scheme, but the package for it is not installed.
    StorageAccessError
        If there are no credentials for S3.
    ConfigError
        If the scheme is unknown, or an option is wrong.
    """
    try:
        options = dict(storage_options or {})
        deadline_s = options.pop("deadline_s", DEADLINE_S)
        is_number = isinstance(deadline_s, int | float) and not isinstance(deadline_s, bool)
        if not is_number or deadline_s < 0:
            raise ConfigError(
                f"storage option deadline_s={deadline_s!r} must be seconds, 0 or more",
                "give a number, such as 300",
            )
        return Objects(url, _engine(url, options), deadline_s=float(deadline_s))
    except StreamkernError:
        raise
    except ImportError as error:
        package_text = install_command("s3") if urlsplit(url).scheme in S3 else str(error)
        raise MissingDependencyError(
            f"{redact(url)} needs a package that is not installed: {package_text}"
        ) from error
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"cannot open {redact(url)} ({redact(str(error))})",
            "correct the URL or the storage options",
        ) from None


def _engine(url: str, options: dict[str, Any]) -> Engine:
    """Return the engine for a URL; raise ConfigError if an option does not fit it.

    options : storage options, of which `engine` and, for s3fs, `region` are removed
    """
    scheme = urlsplit(url).scheme
    engine, engines = options.pop("engine", None), _engine_names(scheme)
    check_no_credentials(url)
    if engine is not None and not engines:
        raise ConfigError(
            f"storage option engine={engine!r} is for s3:// URLs only", "leave it out"
        )
    if engine not in (None, *engines):
        use = " or ".join(f'"{name}"' for name in engines)
        raise ConfigError(f"storage option engine={engine!r} is unknown", f"use {use}")
    if engines and not urlsplit(url).netloc:
        raise ConfigError(f"{redact(url)} names no bucket", f"write {scheme}://bucket/key")
    if engines and _is_for_obstore(scheme, engine, options):
        return ObstoreEngine(lambda: open_buckets(url, options))
    if scheme not in S3:
        return FsspecEngine(lambda: fsspec.core.url_to_fs(url, **options))
    if "region" in options:
        client = {"region_name": options.pop("region"), **(options.get("client_kwargs") or {})}
        options["client_kwargs"] = client
    return FsspecEngine(lambda: open_s3fs(url, options))


def _engine_names(scheme: str) -> tuple[str, ...]:
    """Return the values of the storage option `engine` for a scheme."""
    if scheme in S3:
        return "obstore", "s3fs"
    return ("obstore",) if scheme in (*GOOGLE, *AZURE) else ()


def _is_for_obstore(scheme: str, engine: str | None, options: Mapping[str, Any]) -> bool:
    """Return whether obstore is requested, or is installed and supports the options.

    For Google and Azure, fsspec's packages are preferred if they are installed, because they
    support more kinds of login.
    """
    packages = ("obstore", "botocore") if scheme in S3 else ("obstore",)
    are_installed = all(importlib.util.find_spec(name) for name in packages)
    unsupported = unsupported_options(scheme, options)
    if engine == "obstore":
        if not are_installed:
            raise MissingDependencyError(
                f"engine='obstore' needs packages that are not installed: {install_command('s3')}"
            )
        if unsupported:
            raise ConfigError(
                "storage option engine='obstore' cannot be combined with the option "
                f"{unsupported[0]!r}",
                "leave that option out, or use engine='s3fs'",
            )
        return True
    package = {**dict.fromkeys(GOOGLE, "gcsfs"), **dict.fromkeys(AZURE, "adlfs")}.get(scheme)
    prefers_fsspec = package is not None and importlib.util.find_spec(package) is not None
    return are_installed and engine is None and not unsupported and not prefers_fsspec


def path_text(location: str | os.PathLike[str]) -> str:
    """Return a path or URL as text. Raises ConfigError for an object that is neither."""
    value: Any = location
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{value!r} is not a path or URL", "give one as text, or a pathlib.Path")
    return os.fspath(value)


def local_path(url: str | os.PathLike[str]) -> Path | None:
    """Return the local path that a URL names, or None for a remote one.

    Every URL passes here before it is used. Raises ConfigError for a URL with a single slash after
    its scheme, and as `check_no_credentials` does.
    """
    if isinstance(url, os.PathLike):
        return Path(url)
    url = path_text(url)
    _check_hosts(url)
    if _SINGLE_SLASH_URL.match(url):
        raise ConfigError(
            f"{redact(url)!r} has one slash after its scheme", "write two, as in s3://bucket"
        )
    if url.startswith(("file:", "local:")):
        return Path(unquote(urlsplit(url).path))
    if "://" in url and not _WINDOWS_DRIVE.match(url):
        check_no_credentials(url)
        return None
    return Path(url)


def _check_hosts(url: str) -> None:
    """Raise ConfigError if a URL has an invalid host."""
    try:
        if "://" in url:
            for part in url.split("::"):
                urlsplit(part)
    except ValueError:  # the message may hold credentials
        raise ConfigError(
            f"the host of {redact(url)} cannot be read", "give a name or an IPv4 address"
        ) from None


def check_no_credentials(url: str) -> None:
    """Raise ConfigError if a URL, or a URL chained in it, holds a secret.

    Libraries name hosts and buckets in their errors, and may split a URL differently from its
    author. So no URL with credentials may reach a library. A query is refused for S3, because it
    may hold credentials; elsewhere it is a part of the name.
    """
    if any(_holds_credentials(part) for part in url.split("::")):  # simplecache::s3://bucket
        raise ConfigError(
            f"{redact(url)} holds credentials or a query",
            "put them into the environment or storage_options (write an @ after a port as %40)",
        )


def _holds_credentials(url: str) -> bool:
    """Return whether a remote URL may hold a user name, a password or a key."""
    scheme, remote, after_scheme = url.partition("://")
    if not remote:
        return False
    authority = re.split(r"[/?#]", after_scheme, maxsplit=1)[0]
    before_query = re.split(r"[?#]", url, maxsplit=1)[0]
    # A raw secret may hold slashes, and then its @ seems to be part of the path.
    return (
        "@" in authority
        or _HOST_AND_PORT.fullmatch(authority) is None
        or redact(before_query) != before_query
        or (scheme in S3 and redact(url) != url)
    )


def check_missing(missing: str) -> None:
    """Raise ConfigError unless `missing` is "error" or "fill", the meaning of an absent chunk."""
    if missing not in ("error", "fill"):
        raise ConfigError(f"{mention('missing', missing)} is unknown", 'use "error" or "fill"')


class StrictStore(WrapperStore["Store"]):
    """A store in which a missing chunk is an error, not a fill value.

    Zarr reads an absent chunk as its fill value, so a lost file would train as zeros. The check
    inside `get` needs no extra request and has no race. Errors of the store that are not OSErrors
    become OSErrors naming the key, so that callers can distinguish a storage failure, which may be
    retried, from bytes that do not decode.
    """

    @property
    def folder(self) -> Path | None:
        """The folder, if the keys are files, or None."""
        return self._store.root if type(self._store) is LocalStore else None

    @property
    def objects(self) -> Objects | None:
        """The objects, if the keys are objects, or None."""
        return self._store.objects if isinstance(self._store, ObjectsStore) else None

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        try:
            value = await self._store.get(key, prototype, byte_range)
        except Exception as error:
            raise _as_oserror(key, error) from error
        return _check_present(key, value)

    async def get_partial_values(
        self,
        prototype: BufferPrototype,
        key_ranges: Iterable[tuple[str, ByteRequest | None]],
    ) -> list[Buffer | None]:
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    async def getsize(self, key: str) -> int:
        return await self._store.getsize(key)

    async def getsize_prefix(self, prefix: str) -> int:
        return await self._store.getsize_prefix(prefix)

    def get_sync(
        self,
        key: str,
        *,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        inner: Any = self._store  # zarr calls this only if the wrapped store has it
        try:
            value = inner.get_sync(key, prototype=prototype, byte_range=byte_range)
        except Exception as error:
            raise _as_oserror(key, error) from error
        return _check_present(key, value)


def _check_present(key: str, value: Buffer | None) -> Buffer | None:
    """Return the value; raise CorruptChunkError if a chunk has none, as metadata may."""
    if value is None and key.rpartition("/")[2] not in _METADATA_FILES:
        raise CorruptChunkError(f"chunk {key} {MISSING_CHUNK_TEXT}")
    return value


def _as_oserror(key: str, error: Exception) -> Exception:
    """Return an OSError that names the key; an OSError is returned unchanged."""
    if isinstance(error, OSError):
        return error
    return OSError(f"reading {key} failed: {type(error).__name__}: {error}")
