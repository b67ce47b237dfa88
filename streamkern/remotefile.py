"""A remote object as a seekable binary file, read in large ranges that are tried again."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import fsspec.compression
from fsspec.utils import infer_compression

from streamkern.objects import Objects
from streamkern.storage import local_path, open_objects

_RANGE = 8 << 20
_READS = 3  # of a range that came back short: its length was cut on its way


def is_object(url: Any) -> bool:
    """Whether `open_object` is for this URL: remote, not plain HTTP, and not a chain of URLs."""
    text = str(url)
    return (
        local_path(url) is None
        and "::" not in text
        and urlsplit(text).scheme not in ("http", "https")
    )


def split_object(url: str, storage_options: Mapping[str, Any]) -> tuple[Objects, str]:
    """The folder of an object, and its name in it."""
    folder, _, name = url.rpartition("/")
    return open_objects(folder, storage_options=storage_options), name


def open_object(url: str, storage_options: Mapping[str, Any]) -> Any:
    """An open binary file over the object at `url`, decompressed by its ending.

    Raises FileNotFoundError, StorageError, ConfigError and MissingDependencyError.
    """
    objects, name = split_object(url, storage_options)
    size, version = objects.stat(name)
    file = io.BufferedReader(_ObjectFile(objects, name, size, version), _RANGE)
    compression = infer_compression(name)
    return file if compression is None else fsspec.compression.compr[compression](file, mode="rb")


class _ObjectFile(io.RawIOBase):
    """Ranges of one object; OSError if it is replaced while it is read."""

    def __init__(self, objects: Objects, name: str, size: int, version: str) -> None:
        self._objects, self._name = objects, name
        self._size, self._version = size, version
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self._size - self._position)
        if wanted <= 0:
            return 0
        stop = self._position + wanted
        for _ in range(_READS):
            data = self._objects.get(self._name, self._position, stop)
            if len(data) == wanted:
                buffer[:wanted] = data
                self._position = stop
                if stop == self._size:
                    self._check_version()
                return wanted
        raise OSError(f"{self._name} of {self._objects!r} ended at another length than it had")

    def _check_version(self) -> None:
        if self._objects.stat(self._name) != (self._size, self._version):
            raise OSError(f"{self._name} of {self._objects!r} was replaced while it was read")
