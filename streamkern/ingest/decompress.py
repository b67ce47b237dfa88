"""Read compressed files to the end; truncated, altered or trailing data is an error."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from streamkern.basics.errors import DataError
from streamkern.basics.optional import import_optional
from streamkern.basics.text import redact, some

COMPRESSIONS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "Zstandard", ".zip": "zip"}
"""Endings of compressed files, and the names of their compressions."""
_PIECE_BYTES = 1 << 18
_MAX_XZ_MEMORY_BYTES = 1 << 30  # a file that needs more is refused; `xz -9` needs 65 MiB

# Errors that damage raises, besides an OSError without errno.
DAMAGE = (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, UnicodeDecodeError)

Pieces = Callable[[Any], Iterator[bytes]]
"""Function that yields pieces of the decompressed content of an open file."""


def open_decompressed(file: Any, name: str) -> Any:
    """Return a binary file of the decompressed content of `file`; closing it closes `file`.

    The ending of `name` determines the compression; with another ending, `file` is returned.
    Reading a damaged file raises an error of `DAMAGE`, or an OSError without errno.

    Raises DataError for a zip archive that is damaged, encrypted or does not hold one file, and
    MissingDependencyError for Zstandard without pyarrow.
    """
    ending = os.path.splitext(name)[1].lower()
    if ending == ".gz":
        return _Gzip(file)
    if ending == ".zip":
        return _only_member(file, name)
    pieces = _PIECES_BY_ENDING.get(ending)
    if pieces is None:
        return file
    return io.BufferedReader(_DecompressedFile(file, pieces), _PIECE_BYTES)


def _only_member(file: Any, name: str) -> Any:
    """Return the only file of a zip archive, open; raise DataError if there are several."""
    try:
        archive = zipfile.ZipFile(file)
    except zipfile.BadZipFile as error:
        raise DataError(
            f"{redact(name)} ends in .zip, but is not a valid archive ({error})",
            "copy the whole archive again from its source",
        ) from error
    members = [
        name
        for name in archive.namelist()
        if not name.endswith("/") and not name.startswith("__MACOSX/")
    ]
    if len(members) != 1:
        raise DataError(
            f"{redact(name)} holds {len(members)} files ({some(members)}), but only archives of "
            "one file are read",
            "unpack it, and give the files or their folder",
        )
    try:
        return archive.open(members[0])
    except (RuntimeError, NotImplementedError) as error:  # encrypted, or an unknown compression
        raise DataError(f"{redact(name)} cannot be unpacked ({error})", "unpack it") from error


class _Gzip(gzip.GzipFile):
    """A gzip file that closes its source; the checksum of each member is verified at its end."""

    def __init__(self, file: Any) -> None:
        super().__init__(fileobj=file, mode="rb")
        self._source = file

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._source.close()


class _DecompressedFile(io.RawIOBase):
    """A file of the pieces that a function yields for a compressed file; it can be rewound."""

    def __init__(self, file: Any, pieces: Pieces) -> None:
        self._file, self._make_pieces = file, pieces
        self._start()

    def _start(self) -> None:
        self._pieces, self._unread_piece = self._make_pieces(self._file), memoryview(b"")
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._unread_piece:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._unread_piece = memoryview(piece)
        n = min(len(buffer), len(self._unread_piece))
        buffer[:n], self._unread_piece = self._unread_piece[:n], self._unread_piece[n:]
        self._position += n
        return n

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        scratch = bytearray(_PIECE_BYTES)
        while whence == io.SEEK_END and self.readinto(scratch):
            pass  # the length is known at the end only
        if whence != io.SEEK_SET:
            offset += self._position
        if offset < self._position:
            self._file.seek(0)
            self._start()
        while self._position < offset:
            n_bytes = min(_PIECE_BYTES, offset - self._position)
            if not self.readinto(memoryview(scratch)[:n_bytes]):
                break
        return self._position

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._file.close()


def _streams(file: Any, decompressor: Callable[[], Any], padding: bytes) -> Iterator[bytes]:
    """Yield the decompressed data of consecutive streams.

    decompressor : returns a new decompressor of the bz2 or lzma module
    padding : bytes that may stand between streams

    Python's own bz2 and lzma files treat any data after a stream as the end of the file, and
    ignore a second stream whose first byte is damaged.
    """
    data = file.read(_PIECE_BYTES)
    while data:
        stream = decompressor()
        while not stream.eof:
            if stream.needs_input and not data and not (data := file.read(_PIECE_BYTES)):
                raise EOFError("it ends inside a stream")
            if piece := stream.decompress(data, _PIECE_BYTES):
                yield piece
            data = b""
        data = (stream.unused_data or file.read(_PIECE_BYTES)).lstrip(padding)
        while padding and not data and (more := file.read(_PIECE_BYTES)):
            data = more.lstrip(padding)


class _UnclosableFile:
    """A file that stays open when its reader closes it."""

    closed = False

    def __init__(self, file: Any) -> None:
        self.read = file.read

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        pass


def _zstd(file: Any) -> Iterator[bytes]:
    """Yield the decompressed data of a file of Zstandard."""
    stream = import_optional("pyarrow").CompressedInputStream(_UnclosableFile(file), "zstd")
    while piece := stream.read(_PIECE_BYTES):
        yield piece


_XZ_DECOMPRESSOR = partial(lzma.LZMADecompressor, memlimit=_MAX_XZ_MEMORY_BYTES)
_PIECES_BY_ENDING: dict[str, Pieces] = {
    ".bz2": partial(_streams, decompressor=bz2.BZ2Decompressor, padding=b""),
    ".xz": partial(_streams, decompressor=_XZ_DECOMPRESSOR, padding=b"\0"),
    ".zst": _zstd,
}
