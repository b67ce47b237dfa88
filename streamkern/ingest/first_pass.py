"""First pass of an ingest: check, convert and spool blocks of rows.

A killed pass resumes from the last save of the spool and of the notes kept with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from streamkern.basics.errors import (
    DataError,
    NonFiniteError,
    NotNumbersError,
    StorageError,
    StreamkernError,
)
from streamkern.basics.machine import ordered_map
from streamkern.basics.message import mention
from streamkern.basics.progress import Progress
from streamkern.filesystem.scratch import Scratch
from streamkern.ingest.conform import FeatureConverter, RawBlock, RoundingTracker
from streamkern.ingest.encoding_options import EncodingOptions
from streamkern.ingest.reader import Reader
from streamkern.ingest.shuffle import Spool
from streamkern.ingest.tables.key_columns import IndexDetector
from streamkern.ingest.targets import TargetConverter
from streamkern.store.class_labels import KnownClasses
from streamkern.store.layout import StoreSpec
from streamkern.store.sparse_rows import is_packed

_SAVE_INTERVAL_BYTES = 1 << 28  # between two saves, from which an interrupted pass can resume


class Spooled(NamedTuple):
    """Result of the first pass: rows, the converter of their targets, and the files read."""

    spool: Spool
    values: TargetConverter
    files: FilesRead
    rounding: RoundingTracker | None  # of text that is stored with fewer digits without a request

    def notes(self) -> dict[str, Any]:
        """Return the state besides the rows, as JSON, to resume from."""
        rounding = None if self.rounding is None else self.rounding.saved
        return {**self.values.saved, **self.files.saved, "rounding": rounding}


def spool_table(
    reader: Reader, encoded: Callable[[], Reader], encoding: EncodingOptions,
    spool: Callable[..., Spooled], identity: str, scratch: Scratch,
) -> tuple[Spooled, Reader]:  # fmt: skip
    """Spool the rows of `reader` if all features are numbers, otherwise the rows of `encoded`.

    This is known only once the rows are read; after a restart it is known from the scratch files.

    encoded : returns the reader of encoded rows
    spool : `spool_rows` with its other arguments
    Returns the result of `spool`, and the reader whose rows were spooled.
    """
    identity_encoded = f"{identity} encoded"
    if not (encoding.always_encodes or scratch.has_state(identity_encoded)):
        try:
            return spool(reader, identity=identity), reader
        except (NotNumbersError, NonFiniteError) as error:
            if encoding.like is not None:
                raise type(error)(
                    f"{error.rule}, but the store that {mention('like=')} names holds plain "
                    f"numbers",
                    f"correct such cells, or leave {mention('like=')} out",
                ) from None
            if encoding.encode == "none" or not reader.has_cells:
                raise
    encoded_input = encoded()
    return spool(encoded_input, identity=identity_encoded), encoded_input


def block_size(memory: int) -> int:
    """Return the bytes of a block that is read at once. memory : of the ingest, in bytes."""
    return int(np.clip(memory // 32, 1 << 20, 64 << 20))


def spool_rows(
    reader: Reader, files: ExitStack, seed: int | None, identity: str, scratch: Scratch,
    targets: str, dtype: Any, memory: int, progress: Progress | None,
    like: StoreSpec | None = None, row_shape: tuple[int, ...] | None = None, chosen: bool = True,
) -> Spooled:  # fmt: skip
    """Spool all rows of the reader, checked and converted; return the sealed spool.

    files : stack that closes the input files
    identity : identifies the rows, see `Spool`
    memory : bytes; half of them are for the spool
    like : spec of the store that they are appended to, which they must fit
    row_shape : shape that rows must have; None for any
    chosen : whether the feature columns were chosen explicitly
    """
    block_bytes = block_size(memory)
    first = next(reader.blocks(0, block_bytes), None)
    if first is None or len(first.X) == 0:
        raise DataError("the input has no rows", "give at least one")
    features = _features(reader, first, dtype, like)
    known_classes = None
    if like is not None and like.classes is not None:
        known_classes = KnownClasses(like.classes, like.label_dtype)
    values = TargetConverter(first, targets, as_text=reader.targets_as_text, known=known_classes)
    if row_shape is not None:
        those = f"and those of the store that {mention('like=')} names have"
        _check_shape(first, features, row_shape, those, "give")
    if like is not None:
        _check_shape(first, features, like.row_shape, "but those of the store have", "append")
        _check_fits(first, values, like)
    spool = Spool(
        features.row_shape, features.dtype, values.shape, values.dtype,
        # The other half is for blocks being read and chunks being written.
        limit_bytes=memory // 2,
        scratch=scratch, seed=seed, identity=identity, expected_rows=reader.n_rows,
        weighted=first.w is not None,
    )  # fmt: skip
    notes = spool.notes or {}
    if notes:
        values.restore(notes)
    rounding = None
    if dtype is None and reader.as_text:
        n_columns = math.prod(features.row_shape)
        rounding = RoundingTracker(n_columns, features.dtype, notes.get("rounding"))
    rows = Spooled(spool, values, FilesRead(notes), rounding)
    if spool.sealed:
        spool.seal(spool.notes)  # the split of a bucket may have been interrupted
    else:
        counter = None if chosen else _index_counter(reader, features, spool)
        _read_all(reader, files, features, rows, block_bytes, progress, counter)
    if like is None and first.w is not None and not rows.files.counted:
        spool.discard()
        raise DataError(
            f"all sample weights of {first.location} are 0, so that no row would count",
            f"give some rows a weight above 0, or leave {mention('sample_weight=')} out",
        )
    return rows


def _features(
    reader: Reader, first: RawBlock, dtype: Any, like: StoreSpec | None
) -> FeatureConverter:
    """Return the converter of the features. like : as of `spool_rows`"""
    natural, text = reader.natural_dtype, np.dtype(np.float32)
    if like is not None:
        natural = text = like.x_dtype
    features = FeatureConverter(
        first, text if dtype is None and reader.as_text else dtype, natural,
        can_widen=like is None, packed=reader.width is not None,
    )  # fmt: skip
    if like is not None:
        features.fit_to(like.row_shape)
    return features


def _index_counter(
    reader: Reader, features: FeatureConverter, spool: Spool
) -> IndexDetector | None:
    """Return a counter that checks the first of several columns of a table for an index.

    None for other input, and if an earlier call has read some of the rows.
    """
    table = reader.columns is not None or reader.as_text
    several = len(features.row_shape) == 1 < features.row_shape[0]
    return IndexDetector() if table and several and not spool.n_rows else None


def _check_shape(
    first: RawBlock, features: FeatureConverter, store_shape: tuple[int, ...], those: str, verb: str
) -> None:
    """Raise DataError unless rows with this first block have the row shape of a store.

    For a store of dense rows, sparse rows become dense, see `readers`.

    those, verb : words of the message
    """
    if is_packed(store_shape):
        if not features.packed:
            raise DataError(
                f"{first.location} has dense rows, but the rows of the store are sparse",
                "give sparse rows with the same features (scipy.sparse.csr_array)",
            )
    elif features.row_shape != store_shape:
        raise DataError(
            f"{first.location} has rows of shape {features.row_shape}, {those} {store_shape}",
            f"{verb} rows with the same features",
        )


def _check_fits(first: RawBlock, values: TargetConverter, like: StoreSpec) -> None:
    """Raise DataError unless the targets and weights of rows fit those of a store."""
    weighted = like.weight_totals is not None
    if (first.w is not None) != weighted:
        argument = mention("sample_weight=")
        raise DataError(
            f"the rows of the store have {'' if weighted else 'no '}sample weights, but the rows "
            f"of {first.location} have {'none' if weighted else 'some'}",
            f"give the sample weights with {argument}" if weighted else f"leave {argument} out",
        )
    if like.classes is not None or like.y_dtype is None:
        return
    if values.shape != (like.n_outputs,):
        raise DataError(
            f"{first.location} has {values.shape[0]} targets, but the store has {like.n_outputs}",
            "append rows with the same targets",
        )
    if not np.can_cast(values.dtype, like.y_dtype, "safe"):
        raise DataError(
            f"the targets of {first.location} are {values.dtype.name}, but the store holds "
            f"{like.y_dtype.name}, which would round them",
            "convert the targets first",
        )


def _read_all(
    reader: Reader, files: ExitStack, features: FeatureConverter, rows: Spooled, block_bytes: int,
    progress: Progress | None, counter: IndexDetector | None,
) -> None:  # fmt: skip
    """Spool the rows of the reader from the last saved one on, and seal the spool.

    counter : receives the first column of all rows
    """
    spool = rows.spool
    try:
        blocks = reader.blocks(spool.n_rows, block_bytes)
        calls = _append_calls(blocks, features, rows, counter)
        # One thread reads and checks blocks while another one spools the rows of the last block.
        with (
            ThreadPoolExecutor(1, thread_name_prefix="streamkern-spool") as pool,
            closing(ordered_map(pool, calls, 1)) as appended,
        ):
            for n_rows in appended:
                if progress is not None:
                    progress("read", n_rows, reader.n_rows)
        if reader.n_rows is not None and spool.n_rows != reader.n_rows:
            raise DataError(
                f"the input yielded {spool.n_rows} rows, but announced {reader.n_rows}",
                "check that it is complete and does not change while it is read",
            )
        files.close()  # raises an error if a remote input was replaced while it was read
        rows.files.dropped = reader.n_dropped
        first = rows.files.counts[0][0]
        rows.values.check_classes(first)
        if rows.rounding is not None:
            rows.rounding.check(reader.columns, [name for name, _ in rows.files.counts])
        if counter is not None:
            counter.warn_if_index("0" if reader.columns is None else reader.columns[0], first)
        spool.seal(rows.notes())
    except StorageError:
        raise  # the spooled rows are good, and the same call resumes from them
    except StreamkernError:
        spool.discard()  # the data is wrong: nothing to resume from
        raise


class FilesRead:
    """Names of the files read, in order, with the number of rows of each.

    notes : the state `saved` of an interrupted pass, to resume from; empty at the start
    dropped : number of rows left out because they lack a target
    counted : whether a row has a sample weight above 0
    """

    def __init__(self, notes: Mapping[str, Any]) -> None:
        self.counts = [(name, n_rows) for name, n_rows in notes.get("files", ())]
        self.dropped = notes.get("dropped", 0)
        self.counted = bool(notes.get("counted", self.counts))

    @property
    def saved(self) -> dict[str, Any]:
        """State so far, as JSON."""
        return {"files": list(self.counts), "dropped": self.dropped, "counted": self.counted}

    def count(self, block: RawBlock) -> None:
        if block.start == 0 or not self.counts:
            self.counts.append((block.location, 0))
        name, n_rows = self.counts[-1]
        self.counts[-1] = (name, n_rows + len(block.X))


def _append_calls(
    blocks: Iterable[RawBlock], features: FeatureConverter, rows: Spooled,
    counter: IndexDetector | None,
) -> Iterator[Callable[[], int]]:  # fmt: skip
    """Yield, for each block, a call that spools its rows, after converting and checking them."""
    for block in blocks:
        assert len(block.X) == len(block.y), "readers check that"
        X = features.convert(block)
        y, w = rows.values.convert(block), block.weights()
        if rows.rounding is not None:
            rows.rounding.add(block.X, X)
        if counter is not None:
            counter.add(block.X[:, 0], block.row_numbers)
        rows.files.count(block)
        rows.files.counted |= w is not None and bool(w.any())
        # The notes are those as of this block: further blocks are read before its call is made.
        yield partial(_append, rows.spool, rows.notes(), X, y, w)


def _append(spool: Spool, notes: Mapping[str, Any], *rows: Any) -> int:
    """Append the rows of a block; return the number of rows so far."""
    spool.append(*rows)
    if spool.spilled and spool.unsaved_bytes >= _SAVE_INTERVAL_BYTES:
        spool.save(notes)
    return spool.n_rows
