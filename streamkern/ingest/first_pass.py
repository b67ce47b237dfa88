"""First pass of `ingest` and `append`: check, convert and spool blocks of rows.

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
    RowShapeError,
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


MakeConverters = Callable[[Reader, RawBlock, Any], tuple[FeatureConverter, TargetConverter]]
"""Returns the converters of features and targets for a reader, its first block, and a dtype."""


class SpooledRows(NamedTuple):
    """Result of the first pass.

    spool : the rows
    targets : converter of the targets
    files : the files read
    rounding : rounding errors of numbers from text; None if their dtype was requested
    """

    spool: Spool
    targets: TargetConverter
    files: FilesRead
    rounding: RoundingTracker | None

    def notes(self) -> dict[str, Any]:
        """Return the state apart from the rows, as JSON, to resume from."""
        rounding = None if self.rounding is None else self.rounding.state
        return {**self.targets.state, **self.files.state, "rounding": rounding}


def spool_table(
    reader: Reader, open_encoded: Callable[[], Reader], encoding: EncodingOptions,
    spool: Callable[..., SpooledRows], identity: str, scratch: Scratch,
) -> tuple[SpooledRows, Reader]:  # fmt: skip
    """Spool the rows of `reader` if its features are finite numbers, else those of `open_encoded`.

    Whether they are is known once the rows are read, and after a restart from the scratch files.

    reader : reader of rows of numbers
    open_encoded : returns the reader of the same rows, encoded
    encoding : the options for the columns of a table
    spool : called with a reader and an `identity`; `spool_rows`, whose other arguments are bound
    identity : identifies the rows, see `Spool`
    scratch : folder that may hold rows of an interrupted call

    Returns the spooled rows, and the reader of the rows that were spooled.
    """
    encoded_identity = f"{identity} encoded"
    if not (encoding.always_encodes or scratch.has_state(encoded_identity)):
        try:
            return spool(reader, identity=identity), reader
        except (NotNumbersError, NonFiniteError) as error:
            if encoding.like is not None:
                raise type(error)(
                    f"{error.rule}, but the store that {mention('like=')} names holds plain "
                    f"numbers",
                    f"correct such cells, or leave {mention('like=')} out",
                ) from None
            if encoding.encode == "none" or not reader.can_be_table:
                raise
    encoded_input = open_encoded()
    return spool(encoded_input, identity=encoded_identity), encoded_input


def block_size(memory: int) -> int:
    """Return the bytes of a block that is read at once. memory : of the whole call, in bytes"""
    # Readers and converters hold several copies of a block, beside the half that the spool takes.
    return int(np.clip(memory // 32, 1 << 20, 64 << 20))


def spool_limit(memory: int) -> int:
    """Return the bytes that the spool may take. memory : of the whole call, in bytes"""
    return memory // 2  # the other half is for blocks being read and chunks being written


def spool_rows(
    reader: Reader, files: ExitStack, make_converters: MakeConverters,
    make_spool: Callable[..., Spool], identity: str, dtype: Any, block_bytes: int,
    progress: Progress | None, chooses_columns: bool = True,
) -> SpooledRows:  # fmt: skip
    """Spool all rows of the reader, checked and converted; return the sealed spool.

    files : stack that closes the input files
    make_converters : called with the reader, its first block and `dtype`; `new_converters` or
        `converters_of_store`, whose other arguments are bound
    make_spool : called with the shapes and dtypes of X and y, and by keyword with `identity`,
        `expected_rows` and `weighted`; `Spool`, whose other arguments are bound
    identity : identifies the rows, see `Spool`
    dtype, progress : as in `ingest`
    block_bytes : bytes of a block that is read at once
    chooses_columns : whether the user chooses the feature columns
    """
    first_block = next(reader.blocks(0, block_bytes), None)
    if first_block is None or len(first_block.X) == 0:
        raise DataError("the input has no rows", "give at least one")
    features, targets = make_converters(reader, first_block, dtype)
    spool = make_spool(
        features.row_shape, features.dtype, targets.shape, targets.dtype, identity=identity,
        expected_rows=reader.n_rows, weighted=first_block.w is not None,
    )  # fmt: skip
    notes = spool.notes or {}
    if notes:
        targets.restore(notes)
    rounding = None
    if dtype is None and reader.as_text:
        n_columns = math.prod(features.row_shape)
        rounding = RoundingTracker(n_columns, features.dtype, notes.get("rounding"))
    rows = SpooledRows(spool, targets, FilesRead(notes), rounding)
    if spool.is_sealed:
        spool.seal(spool.notes)  # the split of a bucket may have been interrupted
    else:
        # The first of several columns of a table may be an index.
        is_table = reader.columns is not None or reader.as_text
        has_columns = len(features.row_shape) == 1 < features.row_shape[0]
        may_be_index = is_table and has_columns and not chooses_columns and not spool.n_rows
        index_detector = IndexDetector() if may_be_index else None
        _read_all(reader, files, features, rows, block_bytes, progress, index_detector)
    return rows


def new_converters(
    reader: Reader, first_block: RawBlock, dtype: Any, targets: str,
    row_shape: tuple[int, ...] | None,
) -> tuple[FeatureConverter, TargetConverter]:  # fmt: skip
    """Return the converters of the rows of a new store.

    dtype, targets : as in `ingest`
    row_shape : shape that rows must have; None for any
    """
    if dtype is None and reader.as_text:
        dtype = np.float32
    features = FeatureConverter(
        first_block, dtype, reader.natural_dtype, packed=reader.width is not None
    )
    target_converter = TargetConverter(first_block, targets, as_text=reader.targets_as_text)
    if row_shape is not None:
        expectation = f"and those of the store that {mention('like=')} names have"
        _check_shape(first_block, features, row_shape, expectation, "give")
    return features, target_converter


def converters_of_store(
    reader: Reader, first_block: RawBlock, dtype: Any, spec: StoreSpec
) -> tuple[FeatureConverter, TargetConverter]:
    """Return the converters of rows that are appended to a store.

    Raises DataError if the rows do not fit the store. dtype : as in `append`
    """
    if dtype is None and reader.as_text:
        dtype = spec.x_dtype
    features = FeatureConverter(
        first_block, dtype, spec.x_dtype, can_widen=False, packed=reader.width is not None
    )
    features.fit_to(spec.row_shape)
    targets, known_classes = "values", None
    if spec.classes is not None:
        targets, known_classes = "classes", KnownClasses(spec.classes, spec.label_dtype)
    target_converter = TargetConverter(
        first_block, targets, as_text=reader.targets_as_text, known_classes=known_classes
    )
    expectation = "but those of the store have"
    _check_shape(first_block, features, spec.row_shape, expectation, "append")
    _check_fits(first_block, target_converter, spec)
    return features, target_converter


def _check_shape(
    first_block: RawBlock,
    features: FeatureConverter,
    store_shape: tuple[int, ...],
    expectation: str,
    verb: str,
) -> None:
    """Raise RowShapeError unless rows with this first block have the row shape of a store.

    For a store of dense rows, sparse rows become dense, see `readers`.

    expectation : words of the message before the shape of the store
    verb : what to do with other rows, such as "append"
    """
    if is_packed(store_shape):
        if not features.packed:
            raise RowShapeError(
                f"{first_block.location} has dense rows, but the rows of the store are sparse",
                "give sparse rows with the same features (scipy.sparse.csr_array)",
            )
    elif features.row_shape != store_shape:
        raise RowShapeError(
            f"{first_block.location} has rows of shape {features.row_shape}, {expectation} "
            f"{store_shape}",
            f"{verb} rows with the same features",
        )


def _check_fits(first_block: RawBlock, targets: TargetConverter, spec: StoreSpec) -> None:
    """Raise DataError unless the targets and weights of rows fit those of a store."""
    weighted = spec.weight_totals is not None
    if (first_block.w is not None) != weighted:
        argument = mention("sample_weight=")
        raise DataError(
            f"the rows of the store have {'' if weighted else 'no '}sample weights, but the rows "
            f"of {first_block.location} have {'none' if weighted else 'some'}",
            f"give the sample weights with {argument}" if weighted else f"leave {argument} out",
        )
    if spec.classes is not None or spec.y_dtype is None:
        return
    if targets.shape != (spec.n_outputs,):
        raise DataError(
            f"{first_block.location} has {targets.shape[0]} targets, but the store has "
            f"{spec.n_outputs}",
            "append rows with the same targets",
        )
    if not np.can_cast(targets.dtype, spec.y_dtype, "safe"):
        raise DataError(
            f"the targets of {first_block.location} are {targets.dtype.name}, but the store holds "
            f"{spec.y_dtype.name}, which would round them",
            "convert the targets first",
        )


def _read_all(
    reader: Reader, files: ExitStack, features: FeatureConverter, rows: SpooledRows,
    block_bytes: int, progress: Progress | None, index_detector: IndexDetector | None,
) -> None:  # fmt: skip
    """Spool the rows of the reader from the last saved one on, and seal the spool.

    index_detector : receives the first column of all rows
    """
    spool = rows.spool
    try:
        blocks = reader.blocks(spool.n_rows, block_bytes)
        calls = _append_calls(blocks, features, rows, index_detector)
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
        rows.files.n_dropped = reader.n_dropped
        first_file = rows.files.row_counts[0][0]
        rows.targets.check_classes(first_file)
        if rows.rounding is not None:
            rows.rounding.check(reader.columns, [name for name, _ in rows.files.row_counts])
        if index_detector is not None:
            first_column = "0" if reader.columns is None else reader.columns[0]
            index_detector.warn_if_index(first_column, first_file)
        spool.seal(rows.notes())
    except StorageError:
        raise  # the spooled rows are good, and the same call resumes from them
    except StreamkernError:
        spool.discard()  # the data is wrong: nothing to resume from
        raise


class FilesRead:
    """Names of the files read, in order, with the number of rows of each.

    notes : the `state` of an interrupted pass, to resume from; empty at the start

    Attributes
    ----------
    row_counts : list of (name of a file, number of its rows)
    n_dropped : number of rows left out because they lack a target
    has_positive_weight : whether a row has a sample weight above 0; False without sample weights
    """

    def __init__(self, notes: Mapping[str, Any]) -> None:
        self.row_counts = [(name, n_rows) for name, n_rows in notes.get("files", ())]
        self.n_dropped = notes.get("dropped", 0)
        # Notes that lack the key were written before weights were checked; all weights being 0 is
        # then not reported if rows were read.
        self.has_positive_weight = bool(notes.get("counted", self.row_counts))

    @property
    def state(self) -> dict[str, Any]:
        """State so far, as JSON."""
        return {
            "files": list(self.row_counts),
            "dropped": self.n_dropped,
            "counted": self.has_positive_weight,
        }

    def count(self, block: RawBlock) -> None:
        """Count the rows of a block; a block that starts at row 0 is of the next file."""
        if block.start == 0 or not self.row_counts:
            self.row_counts.append((block.location, 0))
        name, n_rows = self.row_counts[-1]
        self.row_counts[-1] = (name, n_rows + len(block.X))


def _append_calls(
    blocks: Iterable[RawBlock], features: FeatureConverter, rows: SpooledRows,
    index_detector: IndexDetector | None,
) -> Iterator[Callable[[], int]]:  # fmt: skip
    """Yield, for each block, a call that spools its rows, after converting and checking them."""
    for block in blocks:
        assert len(block.X) == len(block.y), "readers check that"
        X = features.convert(block)
        y, w = rows.targets.convert(block), block.weights()
        if rows.rounding is not None:
            rows.rounding.add(block.X, X)
        if index_detector is not None:
            index_detector.add(block.X[:, 0], block.row_numbers)
        rows.files.count(block)
        rows.files.has_positive_weight |= w is not None and bool(w.any())
        # The notes are taken now, because further blocks are read before the call is made.
        yield partial(_append, rows.spool, rows.notes(), X, y, w)


def _append(spool: Spool, notes: Mapping[str, Any], *rows: Any) -> int:
    """Append the rows of a block; return the number of rows so far."""
    spool.append(*rows)
    if spool.is_spilled and spool.unsaved_bytes >= _SAVE_INTERVAL_BYTES:
        spool.save(notes)
    return spool.n_rows
