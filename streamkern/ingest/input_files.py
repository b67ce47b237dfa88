"""Open input files: any URL, decompressed, with errors that name the file."""

from __future__ import annotations

import errno
import io
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import fsspec

from streamkern.basics.errors import (
    ConfigError,
    DataError,
    MissingDependencyError,
    StorageError,
    StoreNotFoundError,
    StreamkernError,
)
from streamkern.basics.message import mention
from streamkern.basics.text import redact
from streamkern.filesystem.durable import disk_full_hint
from streamkern.filesystem.path_kinds import ARCHIVES
from streamkern.filesystem.remote_file import is_object, open_object, split_object
from streamkern.filesystem.urls import local_path
from streamkern.filesystem.waiting import is_connection_refused
from streamkern.ingest.decompress import COMPRESSIONS, DAMAGE, open_decompressed
from streamkern.ingest.formats import (
    ENDINGS,
    HEAD_BYTES,
    FileForm,
    detect_compression,
    detect_content,
)

Url = str | os.PathLike[str]
_COPY_BYTES = 8 << 20
"""Bytes that are copied at once."""
_MAX_BYTES_IN_MEMORY = 64 << 20
"""Largest size of a temporary copy that stays in memory."""

_PANDAS_READERS: Final = {
    ".xlsx": "read_excel", ".xls": "read_excel", ".pkl": "read_pickle", ".pickle": "read_pickle",
    ".dta": "read_stata", ".sas7bdat": "read_sas", ".sav": "read_spss", ".orc": "read_orc",
}  # fmt: skip
"""Functions of pandas for formats that are not read here."""
_VECTOR_FILE_CODE: Final = {
    ".fvecs": "a.reshape(-1, a[:4].view('i4')[0] * 4 + 4)[:, 4:].copy().view('f4')",
    ".ivecs": "a.reshape(-1, a[:4].view('i4')[0] * 4 + 4)[:, 4:].copy().view('i4')",
    ".bvecs": "a.reshape(-1, a[:4].view('i4')[0] + 4)[:, 4:]",
}
"""Files of vectors, each preceded by its length, and the code that makes (n, d) of the bytes."""


@contextmanager
def explained_damage(url: Url) -> Iterator[None]:
    """Raise DataError for a file that is damaged or truncated."""
    try:
        yield
    except StreamkernError:
        raise
    except (OSError, *DAMAGE) as error:
        # An OSError of the system has an errno; gzip, bz2, pyarrow and h5py report damage by one
        # without, and a damaged archive makes its reader seek to negative offsets.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        is_packed = str(url).lower().endswith((*COMPRESSIONS, ".npz"))
        raise DataError(
            f"{redact(url)} {'does not decompress' if is_packed else 'cannot be read'} ({error})",
            "it is damaged or truncated: try again, or copy it again from its source",
        ) from error
    except ValueError as error:
        if "range requests" not in str(error):  # fsspec's, for a server without range requests
            raise
        raise StorageError(
            f"the server of {redact(url)} cannot send parts of files, but this format needs them",
            "download the file, and give its path",
        ) from error


@contextmanager
def _errors_with_url(url: Url) -> Iterator[None]:
    """Convert errors of fsspec to errors of streamkern, with the URL but without its secrets."""
    try:
        yield
    except StreamkernError:
        raise
    except FileNotFoundError as error:
        if is_connection_refused(error):
            raise StorageError(
                f"reading {redact(url)} failed: nothing listens at this address (connection "
                "refused)",
                "check host and port, and that the server is running",
            ) from error
        raise StoreNotFoundError(f"there is no file {redact(url)}", "check its path") from error
    except ImportError as error:
        raise MissingDependencyError(
            f"reading {redact(url)} needs a package that is not installed: {error}",
            "install it, or copy the file to a disk",
        ) from error
    except ValueError as error:  # an unknown protocol or compression
        raise ConfigError(
            f"cannot open {redact(url)}: {error}", "give a path, or a URL such as s3://bucket/name"
        ) from error


class FileOpener:
    """Opener of files, with the options for reading them.

    options : storage options of the URLs; None for none
    files : stack that closes the files that are opened here
    missing : "error" or "fill", for absent parts of a Zarr store or HDF5 file
    external : whether links of HDF5 to other files are followed
    foreign : whether a Zarr group of streamkern is read as if another program had written it
    form : the format of the files, and how CSV files are written
    memory : bytes of memory that reading and converting an array may take if it cannot be read by
        rows
    archives : identities and contents of the .npz files that are open, by URL
    """

    def __init__(
        self, options: Mapping[str, Any] | None, files: ExitStack, *, missing: str = "error",
        external: bool = False, foreign: bool = False, form: FileForm | None = None,
        memory: int = 1 << 30,
    ) -> None:  # fmt: skip
        self.options, self.missing = dict(options or {}), missing
        self.external, self.foreign, self.memory = external, foreign, memory
        self.form = FileForm() if form is None else form
        self.archives: dict[Url, tuple[dict[str, str], Any]] = {}
        self._files = files

    def open(self, url: Url) -> Any:
        """Return an open binary file, decompressed by its ending and closed with the others."""
        return self._files.enter_context(self.open_once(url))

    def local_copy(self, url: Url) -> Any:
        """Return the path of a local file, or else a temporary copy, closed with the others.

        h5py needs it: it holds a lock while it reads, and its finalisers need this lock. If h5py
        read from a URL, a finaliser could run on the thread that fetches the data, and wait for
        the reader, which waits for the data.
        """
        path = plain_path(url)
        if path is not None:
            return path
        copy = self.keep(tempfile.TemporaryFile(prefix="streamkern-"))  # noqa: SIM115  kept open
        with self.open_once(url) as file, disk_full_hint(tempfile.gettempdir()):
            shutil.copyfileobj(file, copy, _COPY_BYTES)
        return copy

    def seekable(self, file: Any) -> Any:
        """Return a file, or a temporary copy of the rest of it if seeking is slow.

        Seeking is slow in decompressed and remote files; a small copy stays in memory.
        """
        if isinstance(file, io.BufferedReader) and isinstance(file.raw, io.FileIO):
            return file
        if isinstance(getattr(file, "f", None), io.BufferedReader):  # fsspec's, of a local file
            return file.f
        copy = self.keep(tempfile.SpooledTemporaryFile(_MAX_BYTES_IN_MEMORY, prefix="streamkern-"))  # noqa: SIM115
        with disk_full_hint(tempfile.gettempdir()):
            shutil.copyfileobj(file, copy, _COPY_BYTES)
        copy.seek(0)
        return copy

    def keep(self, file: Any) -> Any:
        """Return `file`, a context manager, entered; it is closed with the others."""
        return self._files.enter_context(file)

    def open_once(self, url: Url) -> Any:
        """Return an open binary file, decompressed by its ending; the caller closes it."""
        return open_decompressed(self._raw(url), str(url))

    def _raw(self, url: Url) -> Any:
        """Return the open file without decompressing it."""
        with _errors_with_url(url):
            if is_object(url):
                return open_object(str(url), self.options)
            return fsspec.open(os.fspath(url), "rb", **self.options).open()

    def identity(self, url: Url) -> dict[str, str]:
        """Return data that identify a file and how it is read, without reading it."""
        with _errors_with_url(url):
            if is_object(url):
                objects, name = split_object(str(url), self.options)
                size, version = objects.stat(name)
                state = {"size": str(size), "version": version}
            else:
                filesystem, path = fsspec.core.url_to_fs(os.fspath(url), **self.options)
                info, keys = filesystem.info(path), ("size", "mtime", "ETag", "LastModified")
                state = {key: str(info[key]) for key in keys if key in info}
        return {"url": redact(url), **state, **self.reading_options}

    @property
    def reading_options(self) -> dict[str, str]:
        """Settings other than defaults that affect the rows of a file."""
        return {} if self.missing == "error" else {"missing": self.missing}

    def format_name(self, url: Url) -> str:
        """Return the format: the given one, or by the ending, or by the first bytes.

        A folder is a store. Raises DataError that explains what to do with an unknown format.
        """
        text, ending = redact(url), data_ending(url)
        format_name = self.form.format or self.form.earlier_format(ending) or ENDINGS.get(ending)
        if format_name is not None:
            return format_name
        # Only the first bytes of local files are read, and the ending of the file in a zip archive.
        path = local_path(url)
        if path is not None and not path.exists():
            raise StoreNotFoundError(f"there is no file or store at {path}", "check the path")
        if path is None or path.is_dir():
            return "idx" if "-ubyte" in text else "zarr"
        content = self._content(url)
        if content is not None and content[0] is not None:
            return content[0]
        if (format_in_zip := self._format_in_zip(url)) is not None:
            return format_in_zip
        # The remedy depends on what the unknown ending, or else the content, tells.
        if text.lower().endswith(ARCHIVES):
            raise DataError(f"{text} is an archive", "unpack it, and give the unpacked files")
        if ending in _VECTOR_FILE_CODE:
            raise DataError(
                f"{text} holds vectors that each begin with their length, a format that is not "
                "supported",
                f"write them as an array: a = numpy.fromfile({text!r}, 'u1'), "
                f"numpy.save({os.path.splitext(text)[0] + '.npy'!r}, {_VECTOR_FILE_CODE[ending]})",
            )
        reader = _PANDAS_READERS.get(os.path.splitext(text)[1].lower())
        if reader is not None:
            raise DataError(
                f"{text} has a format that is not supported",
                "convert it to Parquet, for example with "
                f"pandas.{reader}({text!r}).to_parquet({os.path.splitext(text)[0] + '.parquet'!r})",
            )
        if content is not None:
            raise DataError(f"{text} is {content[1]}")
        raise DataError(
            f"the format of {redact(url)} is not clear",
            f"known endings are {', '.join(ENDINGS)}, also compressed: if it is one of these "
            f"formats, name it, as in {mention('format', 'csv')}",
        )

    def _format_in_zip(self, url: Url) -> str | None:
        """Return the format by the ending of the only file in a zip archive."""
        if not str(url).lower().endswith(".zip"):
            return None
        with explained_damage(url), self.open_once(url) as file:
            return ENDINGS.get(os.path.splitext(file.name)[1].lower())

    def _content(self, url: Url, format_name: str | None = None) -> tuple[str | None, str] | None:
        """Return `detect_content` of a file, decompressed by its ending."""
        with explained_damage(url), self.open_once(url) as file:
            return detect_content(file.read(HEAD_BYTES), redact(url), format_name)

    def wrong_format_text(self, url: Url, format_name: str) -> str | None:
        """Return an error message for a file whose content has another format; otherwise None.

        url : the file, which could not be read as `format_name`
        """
        path, location = local_path(url), redact(url)
        if path is not None and not path.is_file():
            return None
        ending = os.path.splitext(location)[1].lower()
        try:
            with self._raw(url) as file:
                head = file.read(HEAD_BYTES)
            if not head:
                return f"{location} is empty; give a file with rows"
            compression = detect_compression(head)
            if ending in COMPRESSIONS and compression != ending:
                problem = "is not compressed"
                if compression is not None:
                    problem = f"is compressed by {COMPRESSIONS[compression]}"
                name = location.rpartition("/")[2][: -len(ending)] + (compression or "")
                return (
                    f"{location} {problem}, and its name says {COMPRESSIONS[ending]}; rename it to "
                    f"{name}"
                )
            content = self._content(url, format_name)
        except (OSError, StreamkernError):
            return None
        if content is None:
            return None
        is_same = content[0] == format_name or {content[0], format_name} == {"hdf5", "netcdf"}
        return None if is_same else f"{location} is {content[1]}"


def plain_path(url: Url) -> str | os.PathLike[str] | None:
    """Return the path of a local file, which a library can open; None if it is compressed."""
    is_compressed = redact(url).lower().endswith(tuple(COMPRESSIONS))
    return None if is_compressed else local_path(url)


def format_by_ending(url: Url) -> str | None:
    """Return the format of the ending, without a suffix of compression; None if it is unknown."""
    return ENDINGS.get(data_ending(url))


def data_ending(url: Url) -> str:
    """Return the ending of a name, such as ".csv" for "a.csv.gz"; "" if it has none."""
    text = redact(url).rstrip("/").lower()
    for suffix in COMPRESSIONS:
        text = text.removesuffix(suffix)
    return os.path.splitext(text)[1]


def is_path(value: Any) -> bool:
    """Return whether a value is a path or a URL."""
    return isinstance(value, str | os.PathLike)


def are_paths(X: Any) -> bool:
    """Return whether X is a path or a URL, or several."""
    values = X if isinstance(X, list | tuple) else [X]
    return len(values) > 0 and all(map(is_path, values))
