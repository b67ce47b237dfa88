"""The two engines for remote storage: obstore for three clouds, and fsspec for all its protocols.

Both make one attempt at one request and leave retries to `objects.Objects`.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import inspect
import os
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import fsspec

from streamkern.basics.errors import ConfigError, StorageAccessError
from streamkern.basics.optional import on_demand
from streamkern.filesystem.objects import STALL_S, Bytes, ErrorKind, Listing, ObjectNames

_EXPIRED_CODES = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
# Codes of 4xx responses that concern only this request, which may succeed if it is repeated.
_TRANSIENT_CODES = {
    *("RequestTimeout", "XAmzContentSHA256Mismatch", "BadDigest", "IncompleteBody", "SlowDown"),
    *("XAmzContentChecksumMismatch", "RequestTimeTooSkewed", "OperationAborted"),
    "ConditionalRequestConflict",
}
_NO_BUCKET_CODES = ("NoSuchBucket", "ContainerNotFound")
NO_CREDENTIALS = (
    "no S3 credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or a profile), "
    "or storage_options anon = true for a public bucket"
)
_NO_TOKEN_TEXT = "Error performing token request"
NO_CLOUD_CREDENTIALS = (
    "no credentials were found; set them in the environment (GOOGLE_APPLICATION_CREDENTIALS, or "
    "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY), or storage_options anon = true "
    "for a public bucket"
)
# Options that s3fs passes on to fsspec and botocore; and options that are removed before s3fs.
_FSSPEC_OPTIONS = ("use_listings_cache", "listings_expiry_time", "max_paths", "profile")
_OUR_OPTIONS = ("engine", "deadline_s", "region")
_STATUS_PATTERN = re.compile(r"status code: (\d{3})")
_CODE_PATTERN = re.compile(r"<Code>(\w+)</Code>")
# Messages of OpenSSL and of rustls for a TLS connection that cannot be made.
_TLS_ERROR_TEXTS = (
    *("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER"),
    *("invalid peer certificate", "InvalidContentType"),
)
_BOTO_NETWORK_ERRORS = {
    *("HTTPClientError", "ConnectionError", "IncompleteReadError"),
    *("ChecksumError", "FlexibleChecksumError"),
}
_MEMORY_LOCK = threading.Lock()
# Open connections to one server; the loader has up to 64 readers with two requests each.
_MAX_POOL_CONNECTIONS = 128


def http_error_kind(status: int, code: str) -> ErrorKind:
    """Return the kind of error that an S3 response means.

    status : HTTP status
    code : the <Code> in the body of the response, or ""
    """
    # A response to HEAD has no body and so no code: there, S3 sends a bare 400 to a token
    # that has expired.
    if code in _EXPIRED_CODES or (status == 400 and not code):
        return ErrorKind.EXPIRED
    if code in _NO_BUCKET_CODES:
        return ErrorKind.REFUSED
    if status == 412 or code == "BlobAlreadyExists":
        return ErrorKind.EXISTS
    if code in _TRANSIENT_CODES or status in (408, 409, 425, 429) or status >= 500:
        return ErrorKind.TRANSIENT
    return ErrorKind.MISSING if status == 404 else ErrorKind.REFUSED


def http_message(status: int, code: str) -> str:
    """Return the meaning of an S3 response as text, with a remedy."""
    if code in _NO_BUCKET_CODES:
        return f"there is no such bucket ({code}); check its name"
    if status in (401, 403):
        return f"access denied ({code or status}); check the credentials and their permissions"
    return f"the server answered {status} {code}".rstrip()


class ObstoreEngine:
    """S3, Google or Azure by obstore: one request an object, with the waiting outside Python.

    open_stores : returns (store for reading, store for writing); called again to read the
        credentials again. The stores differ because the time limit of reading, between two pieces
        of a response, would end a long upload.
    """

    keys_per_delete = 1000
    attempt_s = 3600.0
    _pid: int | None = None  # of the first process that used obstore

    def __init__(self, open_stores: Callable[[], tuple[Any, Any]]) -> None:
        first_pid = ObstoreEngine._pid = ObstoreEngine._pid or os.getpid()
        if first_pid != os.getpid():  # without obstore's threads, requests would never end
            raise StorageAccessError(
                "obstore does not work in a process forked from one that used it",
                "start processes with the method 'spawn', or set the storage option engine = "
                '"s3fs"',
            )
        self._obstore, self._errors = on_demand("obstore"), on_demand("obstore.exceptions")
        self._open = open_stores
        self._reading, self._writing = open_stores()

    async def get(self, key: str, start: int, stop: int | None) -> Bytes:
        if stop is not None:
            return await self._obstore.get_range_async(self._reading, key, start=start, end=stop)
        byte_range = {"suffix": -start} if start < 0 else {"offset": start}
        options = {"range": byte_range} if start else None
        result = await self._obstore.get_async(self._reading, key, options=options)
        return await result.bytes_async()

    async def put(self, key: str, data: Bytes, create: bool) -> None:
        mode: Any = "create" if create else "overwrite"
        # An upload in parts that is killed leaves parts behind, and they are billed.
        await self._obstore.put_async(self._writing, key, data, mode=mode, use_multipart=False)

    async def delete(self, keys: Sequence[str]) -> None:
        await self._obstore.delete_async(self._reading, list(keys))

    async def list(self, prefix: str) -> Listing:
        listing = []
        async for page in self._obstore.list(self._reading, prefix=prefix or None):
            listing += [(entry["path"], entry["size"]) for entry in page]
        return listing

    async def entries(self, prefix: str) -> ObjectNames:
        page = await self._obstore.list_with_delimiter_async(self._reading, prefix or None)
        folders = [path.rstrip("/").rpartition("/")[2] + "/" for path in page["common_prefixes"]]
        paths = {entry["path"] for entry in page["objects"]} - {prefix}  # a marker of the folder
        return [*folders, *(path.rpartition("/")[2] for path in paths)]

    async def stat(self, key: str) -> tuple[int, str]:
        meta = await self._obstore.head_async(self._reading, key)
        return int(meta["size"]), str(meta["e_tag"] or meta["last_modified"])

    async def renew(self) -> None:
        self._reading, self._writing = await asyncio.to_thread(self._open)

    def explain(self, error: Exception) -> str:
        response = _response_in_text(str(error))
        if _NO_TOKEN_TEXT in str(error):
            return NO_CLOUD_CREDENTIALS
        if response is not None:
            return http_message(*response)
        # The sentence is vague ("error sending request"); the reason is in the dump below it.
        sentence, _, dump = str(error).partition("Debug source:")
        reasons = re.findall(r'(?:message|error): "([^"]+)"|kind: (TimedOut|Timeout)', dump)
        return f"{sentence.strip()} {' '.join(reasons[-1]) if reasons else ''}"

    def error_kind(self, error: Exception) -> ErrorKind:
        text = str(error)
        response = _response_in_text(text)
        if _NO_TOKEN_TEXT in text:
            return ErrorKind.REFUSED
        if response is not None:
            return http_error_kind(*response)
        if isinstance(error, FileNotFoundError):
            return ErrorKind.MISSING
        if isinstance(error, self._errors.AlreadyExistsError):
            return ErrorKind.EXISTS
        # A bucket of another region; a bad certificate; https to a server that uses http.
        if "Received redirect" in text or any(words in text for words in _TLS_ERROR_TEXTS):
            return ErrorKind.REFUSED
        is_transient = isinstance(error, self._errors.BaseError | OSError)
        return ErrorKind.TRANSIENT if is_transient else ErrorKind.OTHER


def _response_in_text(text: str) -> tuple[int, str] | None:
    """Return the HTTP status and the S3 code that an error message of obstore quotes, or None."""
    status, code = _STATUS_PATTERN.search(text), _CODE_PATTERN.search(text)
    return None if status is None else (int(status[1]), "" if code is None else code[1])


class FsspecEngine:
    """All file systems of fsspec, below `root`: s3fs, gcsfs, adlfs, http, memory, ...

    open_filesystem : returns (file system, root path), called again to read the credentials again
    """

    keys_per_delete = 1

    def __init__(self, open_filesystem: Callable[[], tuple[Any, str]]) -> None:
        self._open = open_filesystem
        self._fs, root = open_filesystem()
        # s3fs notices a stalled connection; the others may not.
        self.attempt_s = 3600.0 if "s3" in self._fs.protocol else 300.0
        self._root = root.rstrip("/")
        # Threads share memory://, which checks and changes its entries in separate steps: two of
        # them could create the same object, or a listing could meet an object that is deleted.
        is_shared = self._fs.protocol == "memory"
        self._lock: Any = _MEMORY_LOCK if is_shared else contextlib.nullcontext()

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    async def _call(self, name: str, *args: Any, **options: Any) -> Any:
        """Call a method of the file system; on a thread if it has no asynchronous methods."""
        if self._fs.async_impl:
            return await getattr(self._fs, f"_{name}")(*args, **options)

        def call() -> Any:
            with self._lock:
                return getattr(self._fs, name)(*args, **options)

        return await asyncio.to_thread(call)

    async def get(self, key: str, start: int, stop: int | None) -> Bytes:
        return await self._call("cat_file", self._path(key), start=start or None, end=stop)

    async def put(self, key: str, data: Bytes, create: bool) -> None:
        mode = "create" if create else "overwrite"
        if not self._fs.async_impl:
            await self._call("makedirs", self._fs._parent(self._path(key)), True)
        # With the largest chunk, s3fs uploads an object of up to 5 GiB in one request.
        in_one_request = {"chunksize": 5 << 30} if "s3" in self._fs.protocol else {}
        await self._call("pipe_file", self._path(key), bytes(data), mode=mode, **in_one_request)

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                await self._call("rm_file", self._path(key))

    async def list(self, prefix: str) -> Listing:
        entries = await self._list_folder("find", prefix, {})
        root_length = len(self._fs._strip_protocol(self._path("x"))) - 1
        return [(name[root_length:], int(entry["size"] or 0)) for name, entry in entries.items()]

    async def entries(self, prefix: str) -> ObjectNames:
        if not self._fs.async_impl:  # an empty folder, as memory:// keeps them, is not an entry
            n_skipped = len(prefix) + 1 if prefix else 0
            parts = (key[n_skipped:].partition("/") for key, _ in await self.list(prefix))
            return list({name + slash for name, slash, _ in parts if name})  # "" is the prefix
        entries = await self._list_folder("ls", prefix, [])
        paths = {entry["name"].rstrip("/"): entry["type"] == "directory" for entry in entries}
        paths.pop(self._fs._strip_protocol(self._path(prefix)), None)  # `prefix`, if it is a file
        return [path.rpartition("/")[2] + "/" * is_folder for path, is_folder in paths.items()]

    async def _list_folder(self, function: str, prefix: str, empty: Any) -> Any:
        """Return the entries below a folder, or `empty` if there is no such folder."""
        try:
            return await self._call(function, self._path(prefix), detail=True)
        except FileNotFoundError as error:
            if self.error_kind(error) is not ErrorKind.MISSING:  # s3fs: there is no such bucket
                raise
            return empty

    async def stat(self, key: str) -> tuple[int, str]:
        info = await self._call("info", self._path(key))
        if info["type"] == "directory":
            raise FileNotFoundError(key)
        versions = (info.get(name) for name in ("ETag", "etag", "mtime", "LastModified", "created"))
        return int(info["size"]), str(next((v for v in versions if v), ""))

    async def renew(self) -> None:
        self._fs, _ = await asyncio.to_thread(self._open)

    def explain(self, error: Exception) -> str:
        response = _error_response(error)
        if response is not None:
            return http_message(*response)
        if type(error).__name__ == "NoCredentialsError":
            return NO_CREDENTIALS
        return f"{type(error).__name__}: {error}"

    def error_kind(self, error: Exception) -> ErrorKind:
        response = _error_response(error)
        if response is not None:
            return http_error_kind(*response)
        if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError):
            return ErrorKind.MISSING
        if isinstance(error, FileExistsError):
            return ErrorKind.EXISTS
        if isinstance(error, PermissionError) or type(error).__name__ == "NoCredentialsError":
            return ErrorKind.REFUSED
        if any(words in str(error) for words in _TLS_ERROR_TEXTS):
            return ErrorKind.REFUSED
        origin = type(error).__module__.partition(".")[0]
        if origin in ("botocore", "aiobotocore"):
            names = {base.__name__ for base in type(error).__mro__}
            return ErrorKind.TRANSIENT if names & _BOTO_NETWORK_ERRORS else ErrorKind.REFUSED
        is_network_error = origin in ("aiohttp", "urllib3", "http", "requests")
        is_transient = is_network_error or isinstance(error, OSError)
        return ErrorKind.TRANSIENT if is_transient else ErrorKind.OTHER


def _error_response(error: BaseException) -> tuple[int, str] | None:
    """Return the HTTP status and the S3 code of the response that caused an error, or None.

    The causes of an error are searched, too, because s3fs drops the code of botocore's error.
    """
    cause: BaseException | None = error
    while cause is not None:
        response, status = getattr(cause, "response", None), getattr(cause, "status", None)
        if isinstance(response, dict) and "ResponseMetadata" in response:
            status = int(response["ResponseMetadata"].get("HTTPStatusCode", 0))
            code = str(response.get("Error", {}).get("Code", ""))
            # Without a body, botocore gives the status as the code.
            return status, "" if code.isdigit() else code
        if isinstance(status, int) and status >= 300:  # an error of aiohttp
            return status, ""
        cause = cause.__cause__
    return None


def open_s3fs(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    """Open s3fs with one request per object, no listing cache and no retries of its own.

    With its default of up to ten requests per object, it sends a HEAD before every GET.
    """
    s3fs = on_demand("s3fs")
    core = on_demand("s3fs.core")  # imports the client whose options are checked below
    known_names = {*_parameters(s3fs.S3FileSystem), *_FSSPEC_OPTIONS}
    _refuse_unknown("storage option", options, known_names)
    known_names = _parameters(core.aiobotocore.session.AioSession, "_create_client") - {
        "service_name",
        "config",
    }
    _refuse_unknown("key of client_kwargs", options.get("client_kwargs"), known_names)
    known_names = {*_parameters(core.AioConfig), *core.AioConfig.OPTION_DEFAULTS} - {"kwargs"}
    _refuse_unknown("key of config_kwargs", options.get("config_kwargs"), known_names)
    client_config = {
        "connect_timeout": STALL_S,
        "read_timeout": STALL_S,  # between two pieces
        "max_pool_connections": _MAX_POOL_CONNECTIONS,
        "retries": {"total_max_attempts": 1},
        **(options.get("config_kwargs") or {}),
    }
    defaults = {"max_concurrency": 1, "use_listings_cache": False, "skip_instance_cache": True}
    filesystem, root = fsspec.core.url_to_fs(
        url, **{**defaults, **options, "config_kwargs": client_config}
    )
    filesystem.retries = 1
    return filesystem, root


def _parameters(cls: type, function: str = "__init__") -> set[str]:
    """Return the names of the parameters of a method."""
    return set(inspect.signature(getattr(cls, function)).parameters) - {"self"}


def _refuse_unknown(noun: str, names: Any, known_names: set[str]) -> None:
    """Raise ConfigError for a name that is not among the known names of s3fs or its client.

    noun : noun for such a name, for the message
    """
    for name in sorted(set(names or ()) - known_names):
        candidates = [*known_names, *_OUR_OPTIONS] if noun == "storage option" else [*known_names]
        similar = difflib.get_close_matches(name, set(candidates) - {name}, n=1)
        hint = f"did you mean {similar[0]!r}?" if similar else "leave it out"
        raise ConfigError(f"{noun} {name!r} is not known to s3fs", hint)
