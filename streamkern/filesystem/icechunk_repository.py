"""Open snapshots of icechunk repositories as zarr stores, which are read and never written.

A URL is ``icechunk+``, the URL of the repository, and the version to read: ``@tag=v1``,
``@branch=main`` or ``@snapshot=ID``; by default the branch main. A branch changes with every
commit, so it is resolved once, and its snapshot is read and recorded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

from streamkern.basics.errors import (
    ConfigError,
    StorageError,
    StoreNotFoundError,
)
from streamkern.basics.optional import import_optional
from streamkern.basics.text import redact

if TYPE_CHECKING:
    from zarr.abc.store import Store

_URL_PATTERN = re.compile(
    r"icechunk\+(?P<location>[^?#]+?)(?:@(?P<kind>tag|branch|snapshot)=(?P<name>[^@/]+))?/?"
)
# fsspec's names of options -> icechunk's.
_S3_OPTIONS = {
    "key": "access_key_id", "secret": "secret_access_key", "token": "session_token",
    "endpoint_url": "endpoint_url", "region": "region", "anon": "anonymous",
}  # fmt: skip


class _Version(NamedTuple):
    """The repository and the version that a URL names.

    location : URL of the repository
    kind, name : "tag", "branch" or "snapshot", and its name
    """

    location: str
    kind: str
    name: str


def is_icechunk(source: Any) -> bool:
    """Return whether `source` is the URL of an icechunk repository, or an object of icechunk."""
    if isinstance(source, str | os.PathLike):
        return re.match(r"icechunk\+\w+://", os.fspath(source)) is not None
    return type(source).__module__.partition(".")[0] == "icechunk"


def is_branch(url: str) -> bool:
    """Return whether the URL names a branch."""
    return is_icechunk(url) and _parse_url(url).kind == "branch"


def snapshot_url(url: str, options: Mapping[str, Any] | None = None) -> str:
    """Return the URL of the snapshot that a URL stands for now. Raises as `icechunk_store`."""
    version = _parse_url(url)
    if version.kind == "snapshot":
        return url
    snapshot = icechunk_snapshot(icechunk_store(url, options))
    return at_snapshot(url, str(snapshot))


def at_snapshot(url: str, snapshot: str) -> str:
    """Return the URL of a snapshot in the repository of `url`."""
    return f"icechunk+{_parse_url(url).location}@snapshot={snapshot}"


def icechunk_store(url: str, options: Mapping[str, Any] | None = None) -> Store:
    """Return the zarr store of a snapshot, which cannot be written.

    options : for S3, under fsspec's names: key, secret, token, endpoint_url, region and anon. By
        default the environment provides them.

    Raises
    ------
    StoreNotFoundError
        If there is no such repository, tag, branch or snapshot.
    ConfigError
        If the URL has another form, or the storage or an option is not supported.
    MissingDependencyError
        If icechunk is not installed.
    StorageError
        If icechunk raises any other error.
    """
    version = _parse_url(url)
    icechunk = import_optional("icechunk", "reading icechunk repositories", "icechunk")
    try:
        repository = icechunk.Repository.open(_storage(icechunk, version.location, options or {}))
        argument = {"snapshot": "snapshot_id"}.get(version.kind, version.kind)
        session = repository.readonly_session(**{argument: version.name})
    except icechunk.IcechunkError as error:
        # Without the calls within icechunk, which follow "|" or a line "context:".
        message = re.split(r"\||\n\s*context:", str(error))[0]
        text = " ".join(redact(message).split()).removeprefix("x ")
        if re.search(r"not found|doesn't exist|invalid (?!icechunk header)", text):
            raise StoreNotFoundError(
                f"there is no {version.kind} {version.name!r} in an icechunk repository at "
                f"{redact(version.location)} ({text})",
                "correct the URL",
            ) from None
        raise StorageError(
            f"opening {redact(url)} failed ({text})",
            "check that the repository is complete, and can be reached with these storage options",
        ) from error
    return unwrap_icechunk_store(session)


def unwrap_icechunk_store(source: Any) -> Store:
    """Return the zarr store of a repository (of its branch main), a session, or a session's store.

    Raises ConfigError for other objects, and for a writable session: its data may change.
    """
    if hasattr(source, "readonly_session"):
        source = source.readonly_session("main")
    store: Any = getattr(source, "store", source)
    session = getattr(store, "session", None)
    if session is None:
        raise ConfigError(
            f"a {type(source).__name__} is not supported as data",
            "give the path or URL of a store, a zarr group, an icechunk repository, or a session "
            "of repository.readonly_session",
        )
    if not session.read_only:
        raise ConfigError(
            "an icechunk session that can be written may change while it is read",
            "commit its changes, and give a session of repository.readonly_session",
        )
    return store  # type: ignore[no-any-return]


def icechunk_snapshot(store: Any) -> str | None:
    """Return the id of the snapshot of a zarr store, wrapped or not; None for other stores."""
    while (inner := getattr(store, "_store", None)) is not None and not is_icechunk(store):
        store = inner
    return str(unwrap_icechunk_store(store).session.snapshot_id) if is_icechunk(store) else None  # type: ignore[attr-defined]


def _parse_url(url: str) -> _Version:
    """Return the repository and the version of a URL; raise ConfigError for another form."""
    match = _URL_PATTERN.fullmatch(os.fspath(url))
    if match is None:
        raise ConfigError(
            f"{redact(url)} is not a URL of an icechunk repository",
            "write icechunk+, its place, and @tag=, @branch= or @snapshot= with a name",
        )
    return _Version(
        match["location"].rstrip("/"), match["kind"] or "branch", match["name"] or "main"
    )


def _storage(icechunk: Any, repository_url: str, options: Mapping[str, Any]) -> Any:
    """Return icechunk's storage of a repository; raise ConfigError unless it is supported."""
    split = urlsplit(repository_url)
    if split.scheme == "file":
        path = unquote(split.path)
        if not os.path.isdir(path):  # icechunk would create it
            raise StoreNotFoundError(
                f"there is no icechunk repository at {path}",
                "correct the path, or create the repository with icechunk",
            )
        icechunk.set_logs_filter("error")  # hide a warning that concerns commits only
        try:
            return icechunk.local_filesystem_storage(path)
        finally:
            icechunk.set_logs_filter(None)
    if split.scheme != "s3":
        raise ConfigError(
            f"icechunk repositories at {split.scheme}:// are not opened by URL",
            "give icechunk+file:// or icechunk+s3://, or in Python a session of icechunk",
        )
    unknown_options = sorted(options.keys() - _S3_OPTIONS.keys() - {"engine", "deadline_s"})
    if unknown_options:
        raise ConfigError(
            f"storage option {unknown_options[0]!r} is not known for icechunk",
            f"the options are {', '.join(_S3_OPTIONS)}",
        )
    settings = {_S3_OPTIONS[name]: value for name, value in options.items() if name in _S3_OPTIONS}
    endpoint = settings.setdefault("endpoint_url", os.environ.get("AWS_ENDPOINT_URL"))
    settings.setdefault(
        "region", os.environ.get("AWS_REGION", os.environ.get("AWS_DEFAULT_REGION"))
    )
    if not settings.keys() & {"access_key_id", "anonymous"}:
        settings["from_env"] = True
    return icechunk.s3_storage(
        bucket=split.netloc, prefix=split.path.strip("/") or None,
        allow_http=str(endpoint or "").startswith("http://"),
        force_path_style=endpoint is not None, **settings,
    )  # fmt: skip
