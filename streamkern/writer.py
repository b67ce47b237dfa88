"""Writes a training set in Zarr chunk by chunk, resumable, published in one step at the end.

The state of an unfinished store is in the store: the group attribute says "writing" and holds
the plan the content is made from and who writes it, and `digests` is the journal, its row written
after the chunk. Who was taken for dead and goes on finds another writer there, or none, and does
not publish.
"""

from __future__ import annotations

import errno
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import zarr
from zarr.errors import ContainsArrayError, NodeTypeValidationError

from streamkern import layout
from streamkern.errors import ConfigError, DataError, NonFiniteError, ResumeMismatchError
from streamkern.layout import ATTRIBUTE, DIGEST_CHUNK, StoreSpec
from streamkern.machine import available_cpus
from streamkern.storage import local_path, redact, zarr_store
from streamkern.weights import DTYPE, as_weights

if TYPE_CHECKING:
    import os

    from numpy.typing import NDArray

    from streamkern.statistics import Statistics


_REMOTE_WRITERS = 16
# Of a chunk being made and written: the rows as they came, the cast, what two transforms make of
# them, and five for digesting, compressing and writing it, less what is gone by then.
COPIES_OF_A_CHUNK = 8


def n_writers(url: str | os.PathLike[str], memory: int, chunk_bytes: int) -> int:
    """Chunks to make and write at a time; writes to a network wait, and go on side by side."""
    wanted = max(2, available_cpus()) if local_path(url) is not None else _REMOTE_WRITERS
    return max(1, min(wanted, memory // (COPIES_OF_A_CHUNK * chunk_bytes)))


class StoreWriter:
    """Writes a store chunk by chunk; nothing opens it before `finish`.

    A context manager; leaving it without `finish` leaves an unfinished store, which
    `open_store` refuses and the same writer (same layout, same `plan`) resumes: `done` says
    which chunks the journal has, `stored` reads one back and verifies it.

    Parameters
    ----------
    url : str or path
    row_shape, x_dtype, n_outputs, classes
        As in `StoreSpec`.
    chunk_rows : int, optional
        Default: 8 MiB of X.
    overwrite : bool
        Replace a store that streamkern wrote. Anything else at the URL is never deleted.
    compress : {"auto", "zstd", "none"}
        "auto": zstd for integers, nothing for floats. A checksum always.
    n_rows : int, optional
        When known, the arrays are created in their final shape; else they grow.
    y_dtype : dtype, optional
        Default: the smallest unsigned integer for class ids; for values float64 beside a
        float64 X, else float32.
    storage_options : mapping, optional
    plan : mapping of JSON values, optional
        What the content is made from. A resume under another plan is refused.
    weighted : bool
        Whether rows bring sample weights.
    """

    _journal: NDArray[np.uint8]  # `digests`, in memory

    def __init__(
        self,
        url: str | os.PathLike[str],
        row_shape: Sequence[int],
        x_dtype: Any,
        n_outputs: int,
        classes: Sequence[str] | None,
        chunk_rows: int | None = None,
        overwrite: bool = False,
        compress: str = "auto",
        *,
        n_rows: int | None = None,
        y_dtype: Any = None,
        storage_options: Mapping[str, Any] | None = None,
        plan: Mapping[str, Any] | None = None,
        weighted: bool = False,
    ) -> None:
        self.url = str(url)
        dtype = np.dtype(x_dtype).newbyteorder("=")
        layout.check_row_layout(row_shape, dtype)
        if classes is not None and len(classes) != n_outputs:
            raise ConfigError(f"{len(classes)} class names for n_outputs={n_outputs}")
        if n_outputs < 1 or (n_rows is not None and n_rows < 1):
            raise DataError(f"a store needs rows and outputs, got n_rows={n_rows} and {n_outputs}")
        row_bytes = int(np.prod(row_shape)) * dtype.itemsize
        rows = layout.default_chunk_rows(row_bytes) if chunk_rows is None else int(chunk_rows)
        if rows < 1:
            raise ConfigError(f"chunk_rows={rows} must be at least 1")
        self._spec = StoreSpec(
            n_rows=0 if n_rows is None else n_rows,
            row_shape=tuple(int(k) for k in row_shape),
            x_dtype=dtype,
            chunk_rows=rows if n_rows is None else min(rows, n_rows),
            n_outputs=n_outputs,
            classes=None if classes is None else tuple(classes),
            mean=None,
            scale=None,
            global_mean=None,
            global_scale=None,
            class_counts=None,
            fingerprint="",
            y_dtype=_target_dtype(dtype, classes, y_dtype),
            weight_totals=(0.0,) if weighted else None,  # as `finish` is told
        )
        self._n_rows = n_rows
        self._journal_lock = threading.Lock()  # an older slab must not be written over a newer
        self._compress = compress
        layout.codecs(dtype, compress)
        self._id = uuid.uuid4().hex
        self._store = zarr_store(url, storage_options=storage_options, read_only=False)
        with disk_full_hint(self.url):
            self._group, self.resumed = self._claim(self._full_plan(plan), overwrite)
            if self.resumed:
                self._sweep()
            self._create_arrays()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Leave the store as it is: complete after `finish`, else unfinished and resumable."""

    @property
    def chunk_rows(self) -> int:
        """Rows in every chunk but the last."""
        return self._spec.chunk_rows

    @property
    def n_chunks(self) -> int:
        """Chunks of the finished store; those written so far while `n_rows` is unknown."""
        if self._n_rows is not None:
            return -(-self._n_rows // self.chunk_rows)
        done = np.flatnonzero(self.done)
        return int(done[-1]) + 1 if len(done) else 0

    @property
    def done(self) -> NDArray[np.bool_]:
        """(capacity,) bool: chunks the journal says are written."""
        return np.asarray(self._journal.any(axis=1))

    def write_chunk(
        self, i: int, X: NDArray[Any], y: NDArray[Any], w: NDArray[Any] | None = None
    ) -> None:
        """Write chunk `i`: X (rows, *row_shape), y (rows,) ids or (rows, c) values, w (rows,).

        Every chunk has `chunk_rows` rows, the last one what is left. Chunks may come in any
        order, and on several threads where `n_rows` is known. Non-finite values and ids outside
        the classes are refused.
        """
        X = np.asarray(X)
        start = self._place(i, X)
        y = self._stored_targets(np.asarray(y), i, len(X))
        if (w is not None) != (self._w is not None):
            raise DataError(
                f"chunk {i} comes {'with' if w is not None else 'without'} sample weights; give "
                "them with every chunk of a weighted store, and with none of another"
            )
        parts = [X, y] if w is None else [X, y, as_weights(w, len(X), f"chunk {i}", start)]
        where = layout.first_nonfinite(X)
        if where is not None:
            raise NonFiniteError(
                f"{where[2]} in X of chunk {i}, row {start + where[0]}, column {where[1]}"
            )
        with disk_full_hint(self.url):
            for array, part in zip(self._arrays, parts, strict=True):
                array[start : start + len(X)] = part
            digest = layout.chunk_digest(*parts)
            # Last: a chunk is in the journal only when all of it is in the store.
            with self._journal_lock:
                self._journal[i] = digest
                self._write_journal(i // DIGEST_CHUNK)

    def stored(self, i: int) -> tuple[NDArray[Any], ...] | None:
        """X, y (and w) of chunk `i`, if the journal has it and its digest agrees; else None."""
        if i >= len(self._journal) or not self._journal[i].any():
            return None
        start = i * self.chunk_rows
        stop = start + self.chunk_rows
        if self._n_rows is not None:
            stop = min(stop, self._n_rows)
        try:
            parts = tuple(np.asarray(array[start:stop]) for array in self._arrays)
        except (ValueError, RuntimeError, TypeError):  # bytes that do not decode
            return None
        return parts if np.array_equal(layout.chunk_digest(*parts), self._journal[i]) else None

    def finish(self, stats: Statistics | None = None) -> StoreSpec:
        """Publish the store: attributes are written last, in one step. Returns its spec."""
        n_chunks = self.n_chunks
        unwritten = np.flatnonzero(~self.done[:n_chunks])
        if n_chunks == 0 or len(unwritten):
            first = int(unwritten[0]) if len(unwritten) else 0
            raise DataError(
                f"{redact(self.url)} can not be finished: chunk {first} of {n_chunks} was not "
                "written"
            )
        if self._w is not None and (stats is None or stats.weight_totals is None):
            raise DataError(
                f"{redact(self.url)} can not be finished: give statistics that were taken with the "
                "sample weights"
            )
        n_rows = n_chunks * self.chunk_rows if self._n_rows is None else self._n_rows
        digests = self._journal[:n_chunks]
        self._check_writer()
        with disk_full_hint(self.url):
            if self._x.shape[0] != n_rows:
                self._resize(n_rows)
                self._journal = digests
                self._write_journal((n_chunks - 1) // DIGEST_CHUNK)
            self._group.attrs[ATTRIBUTE] = self._attributes(n_rows, digests, stats)
        state: Any = self._group.attrs[ATTRIBUTE]
        return layout.spec_from_attributes(self._x, self._y, self._w, state, self.url)

    # -- laying claim to the place

    def _full_plan(self, plan: Mapping[str, Any] | None) -> dict[str, Any]:
        spec = self._spec
        return {
            **(plan or {}),
            "n_rows": self._n_rows,
            "row_shape": list(spec.row_shape),
            "x_dtype": spec.x_dtype.name,
            "y_dtype": str(spec.y_dtype),
            "chunk_rows": spec.chunk_rows,
            "n_outputs": spec.n_outputs,
            "classes": None if spec.classes is None else list(spec.classes),
            "compress": self._compress,
            **({} if spec.weight_totals is None else {"weighted": True}),
        }

    def _claim(self, plan: dict[str, Any], overwrite: bool) -> tuple[zarr.Group, bool]:
        """The group to write to, and whether an interrupted write goes on in it."""
        state, where = claimable(self._store, self.url), redact(self.url)
        writing: Any = {
            "schema": layout.SCHEMA, "status": "writing", "plan": plan, "writer": self._id
        }  # fmt: skip
        if state is None:
            return zarr.create_group(self._store, attributes={ATTRIBUTE: writing}), False
        group = zarr.open_group(self._store, mode="r+")
        if state.get("status") == "writing" and state.get("plan") == plan:
            group.attrs[ATTRIBUTE] = writing
            return group, True
        if not overwrite and state.get("status") == "complete":
            raise DataError(f"{where} already holds a store; overwrite=True replaces it")
        if not overwrite:
            names = _differences(state.get("plan") or {}, plan)
            raise ResumeMismatchError(
                f"{where} holds an unfinished store made with other settings or data "
                f"({names}); repeat those, or overwrite it"
            )
        # Between here and "writing" the old chunks must not be taken for finished work.
        group.attrs[ATTRIBUTE] = {**writing, "status": "clearing"}
        for name in ("X", "y", "w", "digests"):
            if name in group:
                del group[name]
        group.attrs[ATTRIBUTE] = writing
        return group, False

    def _check_writer(self) -> None:
        """DataError unless the place is still claimed by this writer."""
        state = claimable(self._store, self.url) or {}
        if (state.get("status"), state.get("writer")) != ("writing", self._id):
            raise DataError(
                f"{redact(self.url)} can not be finished: another writer has begun there since "
                "this one did, and what is there belongs to it; let only one write at a time"
            )

    def _sweep(self) -> None:
        """Delete what a killed write left beside the chunks: zarr writes aside, then renames."""
        path = local_path(self.url)
        if path is not None:
            for left in path.rglob("*.partial"):
                left.unlink(missing_ok=True)

    def _create_arrays(self) -> None:
        spec = self._spec
        names = layout.dimension_names(spec.row_shape)
        n = spec.chunk_rows if self._n_rows is None else self._n_rows
        ids = spec.classes is not None
        self._x = self._array(
            "X", (n, *spec.row_shape), (spec.chunk_rows, *spec.row_shape), spec.x_dtype, names
        )
        y_tail = () if ids else (spec.n_outputs,)
        y_names = ("row",) if ids else ("row", "output")
        self._y = self._array(
            "y", (n, *y_tail), (spec.chunk_rows, *y_tail), np.dtype(spec.y_dtype), y_names
        )
        self._w = None
        if spec.weight_totals is not None:
            self._w = self._array("w", (n,), (spec.chunk_rows,), DTYPE, ("row",))
        self._arrays = [a for a in (self._x, self._y, self._w) if a is not None]
        chunks = -(-n // spec.chunk_rows)
        width = len(self._arrays) * layout.DIGEST_BYTES
        self._digests = self._array(
            "digests", (chunks, width), (DIGEST_CHUNK, width), np.dtype(np.uint8), ("chunk", "byte")
        )
        self._journal = self._read_journal()

    def _array(
        self,
        name: str,
        shape: tuple[int, ...],
        chunks: tuple[int, ...],
        dtype: np.dtype[Any],
        names: tuple[str, ...],
    ) -> Any:
        if name in self._group:
            return self._group[name]
        return self._group.create_array(
            name,
            shape=shape,
            chunks=chunks,
            dtype=dtype,
            filters=None,
            compressors=layout.codecs(dtype, self._compress),
            fill_value=0,
            dimension_names=names,
            config={"write_empty_chunks": True},
        )

    # -- growing and journaling

    def _place(self, i: int, X: NDArray[Any]) -> int:
        spec = self._spec
        if X.shape[1:] != spec.row_shape or X.dtype.newbyteorder("=") != spec.x_dtype:
            raise DataError(
                f"chunk {i} has X {X.shape} {X.dtype}; this store holds rows of "
                f"{spec.row_shape} {spec.x_dtype}"
            )
        start = i * spec.chunk_rows
        if self._n_rows is None and len(X) == spec.chunk_rows:
            if start + len(X) > self._x.shape[0]:
                self._resize(max(2 * self._x.shape[0], start + len(X)))
            return start
        if self._n_rows is None and 0 < len(X) < spec.chunk_rows and i >= self.n_chunks:
            if start + len(X) > self._x.shape[0]:
                self._resize(start + spec.chunk_rows)
            self._n_rows = start + len(X)  # a short chunk is the last one
            return start
        if self._n_rows is None or not 0 <= start < self._n_rows:
            raise DataError(f"chunk {i} with {len(X)} rows does not fit the chunks written so far")
        if len(X) != min(spec.chunk_rows, self._n_rows - start):
            raise DataError(
                f"chunk {i} has {len(X)} rows; it needs "
                f"{min(spec.chunk_rows, self._n_rows - start)} of {self._n_rows} in all"
            )
        return start

    def _stored_targets(self, y: NDArray[Any], i: int, rows: int) -> NDArray[Any]:
        spec = self._spec
        if len(y) != rows:
            raise DataError(f"chunk {i} has {rows} rows of X and {len(y)} of y; they must agree")
        if spec.classes is not None:
            if y.ndim != 1 or y.dtype.kind not in "iu":
                raise DataError(f"chunk {i} has y {y.shape} {y.dtype}; class ids are (n,) integers")
            if y.min() < 0 or y.max() >= spec.n_outputs:
                raise DataError(f"chunk {i} has a class id outside its {spec.n_outputs} classes")
            return y.astype(spec.y_dtype)
        y = y.reshape(rows, -1).astype(spec.y_dtype, copy=False)
        if y.shape[1] != spec.n_outputs:
            raise DataError(f"chunk {i} has {y.shape[1]} targets; this store has {spec.n_outputs}")
        where = layout.first_nonfinite(y)
        if where is not None:
            row = i * spec.chunk_rows + where[0]
            raise NonFiniteError(f"{where[2]} in y of chunk {i}, row {row}, column {where[1]}")
        return y

    def _resize(self, n_rows: int) -> None:
        chunks = -(-n_rows // self.chunk_rows)
        for array in self._arrays:
            array.resize((n_rows, *array.shape[1:]))
        self._digests.resize((chunks, self._digests.shape[1]))
        grown = np.zeros((chunks, self._digests.shape[1]), np.uint8)
        keep = min(chunks, len(self._journal))
        grown[:keep] = self._journal[:keep]
        self._journal = grown

    def _read_journal(self) -> NDArray[np.uint8]:
        try:
            return np.array(self._digests[:], dtype=np.uint8)
        except (ValueError, RuntimeError):  # a damaged journal means nothing is known to be done
            return np.zeros(self._digests.shape, np.uint8)

    def _write_journal(self, slab: int) -> None:
        rows = slice(slab * DIGEST_CHUNK, min((slab + 1) * DIGEST_CHUNK, len(self._journal)))
        self._digests[rows] = self._journal[rows]

    def _attributes(
        self, n_rows: int, digests: NDArray[np.uint8], stats: Statistics | None
    ) -> dict[str, Any]:
        spec, weighted = self._spec, self._w is not None
        state = {
            "schema": layout.WEIGHTED_SCHEMA if weighted else layout.SCHEMA,
            "status": "complete",
            "n_outputs": spec.n_outputs,
            "classes": None if spec.classes is None else list(spec.classes),
            "class_counts": None
            if stats is None or stats.class_counts is None
            else list(stats.class_counts),
            "mean": None if stats is None else stats.mean.tolist(),
            "scale": None if stats is None else stats.scale.tolist(),
            "global_mean": None if stats is None else stats.global_mean,
            "global_scale": None if stats is None else stats.global_scale,
            "digest": "sha256",
            "fingerprint": layout.content_fingerprint(spec, n_rows, digests),
        }
        if stats is not None and weighted:
            state["weight_totals"] = list(stats.weight_totals or ())
        return {**state, "metadata_digest": layout.metadata_digest(state, self._arrays)}


def claimable(store: Any, url: str) -> dict[str, Any] | None:
    """What streamkern left at the place (its attribute), or None when the place is free.

    Raises
    ------
    DataError
        Something else is there; it is never deleted, not even with overwrite=True.
    """
    where = redact(url)
    refusal = f"{where} holds something streamkern did not write; choose another place"
    try:
        group = zarr.open_group(store, mode="r")
    except FileNotFoundError:
        path = local_path(url)
        if path is not None and path.exists() and (path.is_file() or any(path.iterdir())):
            raise DataError(refusal) from None
        return None
    except (ContainsArrayError, NodeTypeValidationError) as error:
        raise DataError(refusal) from error
    state = group.attrs.get(ATTRIBUTE)
    if not isinstance(state, Mapping):
        raise DataError(refusal)
    return dict(state)


@contextmanager
def disk_full_hint(where: str) -> Iterator[None]:
    """Turns a bare "no space left" into one sentence with the place and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            error.errno,
            f"no space left while writing {redact(where)}; free some space and run the same "
            "command again, it goes on where it stopped",
            error.filename,
        ) from error


def _target_dtype(
    x_dtype: np.dtype[Any], classes: Sequence[str] | None, y_dtype: Any
) -> np.dtype[Any]:
    if classes is not None:
        return layout.id_dtype(len(classes)) if y_dtype is None else np.dtype(y_dtype)
    if y_dtype is None:
        return np.dtype(np.float64 if x_dtype == np.float64 else np.float32)
    dtype: np.dtype[Any] = np.dtype(y_dtype).newbyteorder("=")
    return dtype


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    names = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    return ", ".join(names) + " differ" if names else "it was being replaced"
