"""A remote object as a seekable binary file, read in large ranges with retries."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from streamkern.basics.errors import DataError, StorageError
from streamkern.basics.text import redact
from streamkern.filesystem.objects import Objects
from streamkern.filesystem.urls import local_path, open_objects

_RANGE_BYTES = 8 << 20
_MAX_RANGE_READS = 3  # attempts to read a range that arrives short


def is_object(url: Any) -> bool:
    """Return whether `open_object` can open this URL: remote, not plain HTTP, and not chained."""
    text = str(url)
    return (
        local_path(url) is None
        and "::" not in text
        and urlsplit(text).scheme not in ("http", "https")
    )


def split_object(url: str, storage_options: Mapping[str, Any]) -> tuple[Objects, str]:
    """Return the objects in the folder of an object, and its name there."""
    folder, _, name = url.rpartition("/")
    root = "/" * folder.endswith(":/")  # for memory://name
    return open_objects(folder + root, storage_options=storage_options), name


def open_object(url: str, storage_options: Mapping[str, Any]) -> Any:
    """Return an open binary file over the object at `url`.

    The caller must close the file: only then is a replacement of the object during the reads
    detected with certainty. Raises FileNotFoundError, StorageError, ConfigError and
    MissingDependencyError; reading and closing raise DataError if the object was replaced.
    """
    objects, name = split_object(url, storage_options)
    size, version = objects.stat(name)
    return _VersionCheckedReader(_ObjectFile(objects, name, size, version), _RANGE_BYTES)


class _VersionCheckedReader(io.BufferedReader):
    """A buffered reader that verifies, when closed, that all data read is of one version."""

    def close(self) -> None:
        raw: Any = self.raw
        try:
            if not self.closed:
                raw.check_version()
        finally:
            super().close()

    def __del__(self) -> None:
        """Close nothing: a finaliser may run on the thread that the check would wait for."""


class _ObjectFile(io.RawIOBase):
    """Ranges of one object.

    The version of the object is compared with the first one when the last byte is read, and when
    the file is closed, because readers that seek may not read the last byte last.
    """

    def __init__(self, objects: Objects, name: str, size: int, version: str) -> None:
        self._objects, self._name = objects, name
        self._location = f"{redact(objects.url).removesuffix('/')}/{name}"
        self._size, self._version = size, version
        self._position = 0
        self._has_unchecked_data = False  # data was read since the version was compared

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        n_bytes = min(len(buffer), self._size - self._position)
        if n_bytes <= 0:
            return 0
        stop = self._position + n_bytes
        self._has_unchecked_data = False  # if reading fails, `close` must not raise a second error
        for _ in range(_MAX_RANGE_READS):
            data = self._objects.get(self._name, self._position, stop)
            if len(data) == n_bytes:
                buffer[:n_bytes] = data
                self._position = stop
                self._has_unchecked_data = True
                if stop == self._size:
                    self.check_version()
                return n_bytes
        raise StorageError(
            f"{self._location} became shorter while it was read",
            "run the same command again when no program writes to the file",
        )

    def check_version(self) -> None:
        """Raise DataError if the data read since the last check may be of two versions."""
        if not self._has_unchecked_data:
            return
        self._has_unchecked_data = False
        current = self._objects.stat(self._name)
        if current != (self._size, self._version):
            raise DataError(
                f"{self._location} was replaced while it was read",
                "run the same command again when no program writes to the file",
            )
