"""The on-disk layout of a training set: its arrays, their chunks, codecs and digests.

A store is a Zarr v3 group:

    X        (n, d) or (n, h, w, ch)   uint8, uint16, float16, float32 or float64
             (n, 2, k) sparse rows     float32 or float64, see `sparse_rows`
    y        (n,) class ids 0..c-1, or (n, c) float targets; the same row chunks as X
    w        (n,) float32              sample weights, if the rows have some; chunks as y
    row      (n,) uint64               number of the row in the source, over all files; chunks as y
    digests  (chunks, 96) uint8        sha256 of the chunk of X, of y, (of w: 128) and of row
    crc      (chunks, 3) uint32        checksums of the same chunks as stored, in 3 or 4 columns

and one group attribute, ``streamkern``: schema version, status, class names and counts, names of
columns, files and their rows, statistics of features and targets, and the fingerprint. A digest is
over the decoded rows in little-endian C order (the padding of the last chunk is left out), so it
does not depend on the codec. The digests are an array because 10^8 rows have 75 000 chunks; they
double as the journal of an ingest: a row of zeros is a chunk not yet written. A checksum is the
CRC-32C at the end of the chunk: every reader of a chunk has it, and comparing it with the recorded
one detects a chunk of another place or store.

A store with appended rows (see `appender`) has its tables under the names ``digests-<k>`` and
``crc-<k>`` after the k-th time, and the metadata of all arrays in the group's zarr.json too.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from zarr.codecs import Crc32cCodec, ZstdCodec

from streamkern.basics.errors import ConfigError, DataError
from streamkern.basics.message import mention
from streamkern.basics.values import json_digest
from streamkern.store.sparse_rows import is_packed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from zarr.abc.codec import BytesBytesCodec

STORE_SCHEMA = 3
ROW_NUMBER_DTYPE = np.dtype(np.uint64)
DIGEST_BYTES = 32
DIGEST_CHUNK_ROWS = 1024  # rows of `digests` written at once: 64 KiB
CRC_CHUNK_ROWS = 1 << 16  # rows of `crc` in a chunk
ZSTD_LEVEL = 3
X_DTYPES = tuple(np.dtype(t) for t in ("uint8", "uint16", "float16", "float32", "float64"))
X_DTYPE_NAMES = ", ".join(dtype.name for dtype in X_DTYPES)
"""The dtypes that rows may have, as text."""


@dataclass(frozen=True, eq=False)
class StoreSpec:
    """The description of a store, known without reading a chunk.

    Attributes
    ----------
    n_rows : int
    row_shape : (d,), (h, w, ch) or (2, k)
        Shape of a row; (2, k) for packed sparse rows.
    x_dtype : dtype
        Dtype of X.
    chunk_rows : int
        Rows in a chunk; the last chunk may have fewer.
    n_outputs : int
        c: classes, or columns of float targets; 0 for a store opened without targets.
    classes : tuple of str or None
        Sorted class names if y holds class ids; None for float targets.
    mean, scale : (d,) float64 or None
        Mean and standard deviation (over n) of each feature, flattened in C order.
    global_mean, global_scale : float or None
        The same over all entries of X.
    class_counts : tuple of int or None
        Number of rows of each class; None for float targets, or if it is not known.
    fingerprint : str
        SHA-256 of digests and layout. For a foreign store, ``meta:`` and the SHA-256 of its
        metadata, or ``icechunk:``, its snapshot and the paths of its arrays.
    y_dtype : dtype or None
        Dtype of y as stored; `Store.read_chunk` returns class ids as int64.
    weight_totals : tuple of float or None
        Sum of the sample weights of each class (c,), or of all rows (1,); None without weights.
    columns, target_columns : tuple of str or None
        Names of the d features, and of the columns of y, if the source had names.
    files : tuple of (str, int)
        Sources of the rows, in order, and the number of rows of each; `Store.source_rows` counts
        over all of them. For augmented rows, the files of the stores they were made from, replica
        after replica. Empty if rows were generated, or the store is foreign.
    n_origins : int
        Rows whose numbers (`Store.source_rows`) are equal modulo `n_origins` were made from one
        row; 0 if no two rows are known to have one origin.
    hides_copies : bool
        Whether some rows have the same origin, and it is not known which.
    encoder : JSON or None
        The encoder that made the features from the columns of a table, as in `Encoder.json`.
    n_left_out : int
        Rows of the source without a target that `ingest` left out.
    file_form : JSON or None
        How the files of the rows are read (`FileForm.record`), for later files of the same format;
        their columns that no feature was made of (`unused_columns`); and the number of features of
        sparse rows (`sparse_features`).
    n_counted : int or None
        Number of rows whose sample weight is not negligible, see `Statistics`; None if all rows
        count.
    target_mean, target_scale : (c,) float64 or None
        Mean and standard deviation of each output, one-hot for classes; weighted by sample weights
        if there are some. None if they are not known without reading the data.
    label_dtype : str or None
        Dtype of the labels from which `classes` were made, "O" for text; None if it is not known.
    weight_column : str or None
        Name of the column of a table that the sample weights came from.
    """

    n_rows: int
    row_shape: tuple[int, ...]
    x_dtype: np.dtype[Any]
    chunk_rows: int
    n_outputs: int
    classes: tuple[str, ...] | None
    mean: NDArray[np.float64] | None = field(default=None, repr=False)
    scale: NDArray[np.float64] | None = field(default=None, repr=False)
    global_mean: float | None = None
    global_scale: float | None = None
    class_counts: tuple[int, ...] | None = None
    fingerprint: str = ""
    y_dtype: np.dtype[Any] | None = None
    weight_totals: tuple[float, ...] | None = None
    columns: tuple[str, ...] | None = None
    target_columns: tuple[str, ...] | None = None
    files: tuple[tuple[str, int], ...] = ()
    n_origins: int = 0
    hides_copies: bool = False
    encoder: Mapping[str, Any] | None = field(default=None, repr=False)
    n_left_out: int = 0
    file_form: Mapping[str, Any] | None = field(default=None, repr=False)
    n_counted: int | None = None
    target_mean: NDArray[np.float64] | None = field(default=None, repr=False)
    target_scale: NDArray[np.float64] | None = field(default=None, repr=False)
    label_dtype: str | None = None
    weight_column: str | None = None

    @property
    def n_features(self) -> int:
        """Number of entries of a row: d, h * w * ch, or 2 k."""
        return int(np.prod(self.row_shape))

    @property
    def n_chunks(self) -> int:
        """Number of chunks of each array of rows."""
        return -(-self.n_rows // self.chunk_rows)

    @property
    def row_bytes(self) -> int:
        """Decoded bytes of one row of X."""
        return self.n_features * self.x_dtype.itemsize

    @property
    def target_dtype(self) -> np.dtype[Any]:
        """Dtype of the targets that `Store.read_chunk` returns: int64 for class ids, else floating.

        It is float32 for a store opened without targets.
        """
        if self.classes is not None:
            return np.dtype(np.int64)
        dtype = np.dtype(np.float32) if self.y_dtype is None else self.y_dtype
        return dtype if dtype.kind == "f" else np.dtype(np.float64)  # integers are converted

    @property
    def foreign(self) -> bool:
        """True when streamkern did not write the store, so it has no digests."""
        return self.fingerprint.startswith(("meta:", "icechunk:"))


def check_row_layout(
    row_shape: Sequence[int], dtype: np.dtype[Any], name: str = "X", *, sparse: bool = False
) -> None:
    """Raise DataError for a row shape or dtype that a store cannot hold.

    sparse : whether rows of shape (2, k) are packed sparse rows, which the shape alone does not say
    """
    if not (len(row_shape) in (1, 3) or (sparse and is_packed(row_shape))) or min(row_shape) < 1:
        raise DataError(
            f"{name} has rows of shape {tuple(row_shape)}",
            "give the shape (n, d) or (n, height, width, channels), with each dimension at least 1",
        )
    if dtype.kind not in "biuf":
        raise DataError(f"{name} has dtype {dtype}", "give real numbers")
    if dtype.newbyteorder("=") not in X_DTYPES:
        raise DataError(
            f"{name} has dtype {dtype}",
            f"convert it to one of {X_DTYPE_NAMES} with {mention('dtype=')}",
        )


def requested_x_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the requested dtype of X; ConfigError if a store cannot hold it."""
    try:
        requested: np.dtype[Any] = np.dtype(dtype).newbyteorder("=")
    except TypeError as error:
        raise ConfigError(
            f"{mention('dtype', dtype)} is not a dtype ({error})", f"use one of {X_DTYPE_NAMES}"
        ) from error
    if requested not in X_DTYPES:
        raise ConfigError(
            f"{mention('dtype', requested.name)} cannot be stored", f"use one of {X_DTYPE_NAMES}"
        )
    return requested


def rows_per_chunk(
    row_shape: Sequence[int], dtype: np.dtype[Any], chunk_bytes: int, target_bytes: int = 0
) -> int:
    """Return the rows of a chunk with about `chunk_bytes` of X, at least 1.

    If the targets of a row, of `target_bytes`, are larger than the row, they decide.
    """
    return max(1, chunk_bytes // max(int(np.prod(row_shape)) * dtype.itemsize, target_bytes))


def id_dtype(n_classes: int) -> np.dtype[Any]:
    """Return the smallest unsigned integer dtype that holds the ids 0..n_classes-1."""
    return np.min_scalar_type(max(n_classes - 1, 0))


def codecs(
    dtype: np.dtype[Any], compress: str, row_shape: Sequence[int] = ()
) -> list[BytesBytesCodec]:
    """Return the codecs after the bytes codec: zstd, if `compress` says so, and a checksum.

    compress : "zstd", "none", or "auto", which compresses integers and packed sparse rows only,
        because the noise in floats does not compress, and decoding would slow reading down
    """
    if compress not in ("auto", "zstd", "none"):
        raise ConfigError(
            f"{mention('compress', compress)} is unknown", 'use "auto", "zstd" or "none"'
        )
    is_compressible = dtype.kind == "u" or is_packed(row_shape)
    uses_zstd = compress == "zstd" or (compress == "auto" and is_compressible)
    return [*([ZstdCodec(level=ZSTD_LEVEL)] if uses_zstd else []), Crc32cCodec()]


def row_arrays(weighted: bool) -> tuple[str, ...]:
    """Return the names of the arrays of rows, in the order of their digests."""
    return ("X", "y", "w", "row") if weighted else ("X", "y", "row")


def table_names(appends: int) -> tuple[str, str]:
    """Return the names of the digests and checksums of a store after `appends` appends."""
    ending = f"-{appends}" if appends else ""  # stores without appends have the plain names
    return f"digests{ending}", f"crc{ending}"


def array_names(mark: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of all arrays of a store. mark : its attribute `streamkern`"""
    weighted = mark.get("weight_totals") is not None
    return (*row_arrays(weighted), *table_names(mark.get("appends", 0)))


def dimension_names(row_shape: Sequence[int]) -> tuple[str, ...]:
    """Return the dimension names for xarray: X and y share "row"."""
    if is_packed(row_shape):
        return ("row", "part", "entry")
    return ("row", "feature") if len(row_shape) == 1 else ("row", "height", "width", "channel")


def canonical_array(array: NDArray[Any]) -> NDArray[Any]:
    """Return a C-contiguous, little-endian array; the array itself if it already is."""
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))


def chunk_digest(*arrays: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the SHA-256 of the decoded rows of each of k arrays, as stored: (32 k,) uint8."""
    return np.concatenate([array_digest(array) for array in arrays])


def array_digest(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the SHA-256 of an array in little-endian C order: (32,) uint8."""
    return np.frombuffer(hashlib.sha256(canonical_array(array).data).digest(), np.uint8)


def content_fingerprint(spec: StoreSpec, digests: NDArray[np.uint8]) -> str:
    """Return the SHA-256 over the layout and every chunk digest, without codec and location."""
    header = {
        "schema": STORE_SCHEMA,
        "n_rows": spec.n_rows,
        "row_shape": list(spec.row_shape),
        "x_dtype": spec.x_dtype.name,
        "y_dtype": None if spec.y_dtype is None else spec.y_dtype.name,
        "chunk_rows": spec.chunk_rows,
        "n_outputs": spec.n_outputs,
        "classes": None if spec.classes is None else list(spec.classes),
        **({} if spec.encoder is None else {"encoder": spec.encoder}),
    }
    return json_digest(header, np.ascontiguousarray(digests).tobytes())


def spec_from_attributes(X: Any, y: Any, w: Any, state: Mapping[str, Any]) -> StoreSpec:
    """Return the spec of a finished store of streamkern, from its open arrays and its attribute.

    y : None for a store opened without targets
    w : None for a store without sample weights
    state : the attribute `streamkern`
    """
    # Without targets, all facts about them are left out. Newer facts may be missing: use `get`.
    classes = None if state["classes"] is None or y is None else tuple(state["classes"])
    counts = state["class_counts"]
    return StoreSpec(
        n_rows=X.shape[0],
        row_shape=tuple(X.shape[1:]),
        x_dtype=np.dtype(X.dtype),
        chunk_rows=X.chunks[0],
        n_outputs=0 if y is None else int(state["n_outputs"]),
        classes=classes,
        mean=_vector(state["mean"]),
        scale=_vector(state["scale"]),
        global_mean=state["global_mean"],
        global_scale=state["global_scale"],
        class_counts=None if counts is None or classes is None else tuple(counts),
        fingerprint=state["fingerprint"],
        y_dtype=None if y is None else np.dtype(y.dtype),
        weight_totals=None if w is None else tuple(state["weight_totals"]),
        columns=_names(state["columns"]),
        target_columns=None if y is None else _names(state["target_columns"]),
        files=tuple((name, n_rows) for name, n_rows in state["files"]),
        n_origins=int(state.get("n_origins", 0)),
        hides_copies=bool(state.get("hides_copies", False)),
        encoder=state.get("encoder"),
        n_left_out=int(state.get("n_left_out", 0)),
        file_form=state.get("file_form"),
        n_counted=state.get("n_counted"),
        target_mean=None if y is None else _vector(state["target_mean"]),
        target_scale=None if y is None else _vector(state["target_scale"]),
        label_dtype=None if classes is None else state.get("label_dtype"),
        weight_column=state.get("weight_column"),
    )


def _names(names: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(names)


def _vector(values: Sequence[float] | None) -> NDArray[np.float64] | None:
    return None if values is None else np.asarray(values, np.float64)


def first_nonfinite(block: NDArray[Any]) -> tuple[int, int, float] | None:
    """Return row, column and value of the first NaN or infinity in a block (k, ...), or None.

    The column counts the entries of a row in C order.
    """
    if block.dtype.kind != "f" or block.size == 0:
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        # NaN and infinity survive a sum, so a finite sum clears the block in one fast pass.
        total = block.sum(dtype=np.float32 if block.dtype.itemsize == 2 else None)
    if np.isfinite(total):
        return None
    flat = block.reshape(len(block), -1)
    is_finite_row = np.isfinite(flat).all(axis=1)
    if is_finite_row.all():  # the sum overflowed
        return None
    row = int(np.argmin(is_finite_row))
    column = int(np.argmin(np.isfinite(flat[row])))
    return row, column, float(flat[row, column])
