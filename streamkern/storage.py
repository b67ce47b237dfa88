"""Opens any URL as a zarr store: local paths, ``file://``, and what fsspec or obstore can reach.

One syntax for all: a plain path and ``file://`` use zarr's LocalStore; ``s3://`` uses obstore
when it is installed and can be given the same credentials (one request per chunk), else s3fs;
everything else goes through fsspec, so ``memory://``, ``gs://``, ``https://``, ... work with the
package fsspec names for them. Credentials stay inside the store object: use `redact` before a URL
goes into a message, a log or a repr.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit, urlunsplit

from zarr.storage import FsspecStore, LocalStore, ObjectStore, WrapperStore

from streamkern.errors import ConfigError, CorruptChunkError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zarr.abc.store import ByteRequest, Store
    from zarr.core.buffer import Buffer, BufferPrototype

_METADATA = frozenset({"zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata"})
_WINDOWS_DRIVE = re.compile(r"^[A-Za-z]:[\\/]")

# fsspec's names for S3 settings, and obstore's. Options outside this table mean s3fs is used.
_OBSTORE_NAMES = {
    "key": "aws_access_key_id",
    "secret": "aws_secret_access_key",
    "token": "aws_session_token",
    "endpoint_url": "aws_endpoint",
    "region": "aws_region",
    "anon": "aws_skip_signature",
}


def zarr_store(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    read_only: bool = True,
) -> Store:
    """The zarr store behind `url`; nothing is read or created yet.

    Raises
    ------
    MissingDependencyError
        fsspec knows the scheme, but the package behind it is not installed.
    ConfigError
        Nobody knows the scheme, or storage options were given for a local path.
    """
    path = local_path(url)
    if path is not None:
        if storage_options:
            raise ConfigError(
                f"storage_options were given for the local path {path}; they belong to remote URLs"
            )
        return LocalStore(path, read_only=read_only)
    text, options = str(url), dict(storage_options or {})
    scheme = urlsplit(text).scheme
    if scheme in ("s3", "s3a"):
        config = _obstore_config(options)
        if config is not None:
            return _s3_by_obstore(text, config, read_only)
        # Its default of 10 costs a HEAD request before every GET; we read whole objects.
        options.setdefault("max_concurrency", 1)
        options.setdefault("use_listings_cache", False)
    try:
        return FsspecStore.from_url(text, storage_options=options, read_only=read_only)
    except ImportError as error:
        extra = "streamkern[s3]" if scheme in ("s3", "s3a") else f"the fsspec package for {scheme}"
        raise MissingDependencyError(
            f"{redact(text)} needs a package that is not installed: pip install {extra}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"can not open {redact(text)}: {error}") from error


def local_path(url: str | os.PathLike[str]) -> Path | None:
    """The local path a URL names, or None for a remote one."""
    if isinstance(url, os.PathLike):
        return Path(url)
    if url.startswith(("file:", "local:")):
        return Path(unquote(urlsplit(url).path))
    if "://" in url and not _WINDOWS_DRIVE.match(url):
        return None
    return Path(url)


def redact(url: str | os.PathLike[str]) -> str:
    """The URL without user, password, query and fragment, where secrets travel."""
    text = os.fspath(url)
    if "://" not in text:
        return text
    parts = urlsplit(text)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _obstore_config(options: Mapping[str, Any]) -> dict[str, str] | None:
    """S3 settings in obstore's names, or None when only s3fs would understand them the same."""
    if importlib.util.find_spec("obstore") is None:
        return None
    flat = dict(options)
    client = flat.pop("client_kwargs", None) or {}
    flat.update({{"region_name": "region"}.get(name, name): v for name, v in client.items()})
    if not set(flat) <= set(_OBSTORE_NAMES):
        return None
    # s3fs also looks into ~/.aws; obstore does not, so it needs credentials it can see.
    seen = {"key", "secret"} <= set(flat) or flat.get("anon") or "AWS_ACCESS_KEY_ID" in os.environ
    if not seen:
        return None
    config = {_OBSTORE_NAMES[name]: str(value) for name, value in flat.items() if value is not None}
    if "anon" in flat:
        config["aws_skip_signature"] = "true" if flat["anon"] else "false"
    return config


def _s3_by_obstore(url: str, config: dict[str, str], read_only: bool) -> Store:
    from obstore.store import S3Store

    endpoint = config.get("aws_endpoint") or os.environ.get("AWS_ENDPOINT_URL", "")
    client_options: Any = {"allow_http": True} if endpoint.startswith("http://") else {}
    if endpoint:
        config = {**config, "aws_endpoint": endpoint}
    # boto's default region; obstore would otherwise refuse to start without one.
    if not {"AWS_REGION", "AWS_DEFAULT_REGION"} & set(os.environ):
        config.setdefault("aws_region", "us-east-1")
    settings: Any = config
    return ObjectStore(
        S3Store.from_url(
            url.replace("s3a://", "s3://", 1), config=settings, client_options=client_options
        ),
        read_only=read_only,
    )


class StrictStore(WrapperStore["Store"]):
    """A store in which a missing chunk is an error, not a fill value.

    Zarr reads an absent chunk as its fill value, so a lost file would train as zeros. Checking
    inside `get` costs no extra request and has no race. Errors of the store that are not
    OSErrors become OSErrors naming the key, so that callers can tell a fault of the storage,
    worth a retry, from bytes that do not decode.
    """

    @property
    def folder(self) -> Path | None:
        """Where the keys are files, or None."""
        return self._store.root if type(self._store) is LocalStore else None

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        try:
            value = await self._store.get(key, prototype, byte_range)
        except Exception as error:
            raise _as_oserror(key, error) from error
        return _present(key, value)

    async def get_partial_values(
        self,
        prototype: BufferPrototype,
        key_ranges: Iterable[tuple[str, ByteRequest | None]],
    ) -> list[Buffer | None]:
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    def get_sync(
        self,
        key: str,
        *,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        inner: Any = self._store  # zarr calls this only where the wrapped store has it
        try:
            value = inner.get_sync(key, prototype=prototype, byte_range=byte_range)
        except Exception as error:
            raise _as_oserror(key, error) from error
        return _present(key, value)


def _present(key: str, value: Buffer | None) -> Buffer | None:
    if value is None and key.rpartition("/")[2] not in _METADATA:
        raise CorruptChunkError(f"chunk {key} is missing from the store")
    return value


def _as_oserror(key: str, error: Exception) -> Exception:
    if isinstance(error, OSError):
        return error
    return OSError(f"reading {key} failed: {type(error).__name__}: {error}")
