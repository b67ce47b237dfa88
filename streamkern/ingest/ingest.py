"""Make a store from raw data: read once, shuffle, write chunks, publish. Resumable.

    reader --blocks--> conform --rows--> spool (shuffles) --chunks--> writer --> store

Pass 1 reads the input in order, converts and checks it, and spools the rows; pass 2 reads them in
their final order and writes chunks. The order is a function of the seed and the row numbers alone,
so the same rows give the same store whatever their format, the memory, or the number of
interruptions. After a crash the same call resumes: spooled rows are reused from the last save on,
and chunks in the store's journal are read back, verified and kept.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from streamkern.basics.errors import DataError, ResumeMismatchError
from streamkern.basics.message import mention
from streamkern.basics.progress import Progress
from streamkern.basics.text import redact
from streamkern.basics.values import checked_int, json_digest, parse_bytes
from streamkern.basics.warning import warn_each_once
from streamkern.filesystem.ownership import STORE, check_kind, mark_at
from streamkern.filesystem.path_kinds import check_output
from streamkern.filesystem.scratch import Scratch, check_parent, scratch_folder
from streamkern.filesystem.urls import check_missing, zarr_store
from streamkern.ingest.columns import add_unused_columns, unused_columns
from streamkern.ingest.convert_data import convert_for_store
from streamkern.ingest.encoding_options import EncodingOptions
from streamkern.ingest.first_pass import (
    SpooledRows,
    block_size,
    new_converters,
    spool_limit,
    spool_rows,
    spool_table,
)
from streamkern.ingest.formats import FileForm
from streamkern.ingest.input_files import FileOpener
from streamkern.ingest.path_patterns import expand_paths, input_paths
from streamkern.ingest.reader import Reader
from streamkern.ingest.readers import check_header, existing_column, is_table, open_reader
from streamkern.ingest.shuffle import Spool, chunks_of_spool
from streamkern.ingest.targets import TargetConverter
from streamkern.store import layout
from streamkern.store.chunk_output import (
    DEFAULT_MEMORY,
    checked_chunk_bytes,
    fill_store,
    n_writers,
    refuse_same_location,
)
from streamkern.store.layout import StoreSpec
from streamkern.store.store import open_store
from streamkern.store.writer import StoreWriter, is_made_from

__all__ = ["ingest"]


def ingest(
    inputs: Any, out_url: str | os.PathLike[str], *,
    x: Any = None, y: Any = None, sample_weight: Any = None, targets: str = "auto",
    chunk_mb: float = 8, shuffle: bool = True, seed: int = 0, overwrite: bool = False,
    dtype: Any = None, memory: int | float | str = DEFAULT_MEMORY, progress: Progress | None = None,
    compress: str = "auto", storage_options: Mapping[str, Any] | None = None,
    input_options: Mapping[str, Any] | None = None, missing: str = "error",
    external: bool = False, foreign: bool = False, encode: str = "auto", categorical: Any = None,
    numeric: Any = None, dates: Any = None, drop: Any = None, na_values: Any = None,
    like: str | os.PathLike[str] | None = None, scratch: str | os.PathLike[str] | None = None,
    drop_missing_targets: bool = False, format: str | None = None, names: Any = None,
    header: bool | None = None, delimiter: str | None = None, decimal: str | None = None,
    encoding: str | None = None, skip_lines: int | None = None, thousands: str | None = None,
) -> StoreSpec:  # fmt: skip
    """Make a store from `inputs` at `out_url`; return its spec.

    Parameters
    ----------
    inputs
        A path or URL: ``.npy`` (with `y`), ``.npz``, IDX (labels found beside the images, as in
        MNIST), CSV or TSV, Parquet, Arrow IPC (Feather), JSON lines, HDF5, NetCDF, AnnData,
        svmlight, Zarr; ``.gz``, ``.bz2``, ``.xz``, and ``.zip`` of one file. Arrays are decoded by
        their attributes (``scale_factor``, ``_FillValue``, ...).
        Several paths of one format are read one after another, columns by their names; so are the
        files of a folder, and those that a pattern such as ``data/*.csv`` matches, in the natural
        order of their paths. Or an array with `y`, or an iterable of (X, y) blocks, which must give
        the same blocks again when resumed.
    out_url : str or path
        Location of the store; any URL that `zarr_store` opens.
    x
        Feature columns of a table, in the order wanted: by name or, where no column has that name,
        by position (negative from the end). By default all columns except targets, weights and an
        index of pandas. The name of the array of rows in .npz, HDF5 and Zarr, or of a Parquet
        column of lists; by default "X".
    y
        Labels file or array for ``.npy`` and IDX; targets beside an array or a data frame, as in
        `fit`; target column(s) of a table by name or position, or the name of an array in .npz,
        HDF5 and Zarr; by default "y".
    sample_weight
        Weights of the rows, finite and 0 or above (see `sample_weights`), stored as float32 in the
        array ``w``: an array or file beside ``.npy`` and IDX, an array beside an array, a column of
        tables, the name of an array in .npz, HDF5 and Zarr. Blocks of an iterable may be
        (X, y, w). Weights in a store that streamkern wrote are kept.
    targets : {"auto", "classes", "values"}
        Class labels (integers or text), or numbers. "auto": text and single columns of integers are
        labels. For text the first target decides; one of another kind (a fraction or a word among
        integers, say) is refused. So are more than 30 classes most of which have fewer than 10
        rows, more than 10 classes with fewer than 2 rows each on average, and numbers in another
        notation (``1,5``, ``5 %``, dates): pass "classes" or "values" to resolve it.
    chunk_mb : float
        MiB of decoded X in a chunk.
    shuffle, seed
        Store the rows in a random order, which depends on the seed and the row numbers alone, or
        else in the order of the input. Keep `shuffle` unless the rows are mixed already: if they
        are sorted by label, the buffers of a training are too small to mix them.
    overwrite : bool
        Replace a store that streamkern made; anything else at that location is never deleted. The
        old store is removed just before the new chunks are written.
    dtype : dtype, optional
        Dtype of the stored X. By default the dtype of the input if a store can hold it; other
        integers of at most 16 bits become float32, and wider ones float64. A CSV becomes float32,
        and a column is refused if this rounds it by more than a thousandth of its standard
        deviation.
    memory : int or str
        Bytes of memory to use at most, or a size such as "1 GiB". If the rows need more, they are
        written to scratch files and read again once.
    progress : callable, optional
        Called with ("read" or "write", rows done, rows in all or None) after each block.
    compress : {"auto", "zstd", "none"}
        Compression of the chunks; "auto" compresses integers and sparse rows, not other floats.
    storage_options, input_options : mapping, optional
        For the output and for the input URLs; never shown or stored.
    missing : {"error", "fill"}
        Handling of an absent chunk of a Zarr input, and of an HDF5 dataset with unwritten parts.
    external : bool
        Follow links of HDF5 files to other files: they may lead to any file that you may read.
    foreign : bool
        Read a Zarr input that streamkern wrote as if another program had: by the names of arrays,
        without classes, weights and checks.
    encode : {"auto", "none"}
        For tables whose features are not all numbers, or have missing values: "auto" fits an
        encoder, which is kept in the store and in every model trained on it; "none" refuses them.
    categorical, numeric : str or sequence of str, optional
        Columns that are words even if they look like numbers, and columns that are numbers.
    dates : str, sequence of str, or mapping of str to str, optional
        Columns that are dates, in ISO 8601 or in a format of `strptime`.
    drop : str or sequence of str, optional
        Columns to leave out.
    na_values : str or sequence of str, optional
        Text that marks a missing value, besides the markers of pandas in a CSV: in features and
        targets, also in columns of numbers and dates. A number matches in any notation. A warning
        reports markers that were not found.
    like : path or URL, optional
        A store that the new one must match, such as the training set of a model that is to be
        tested on these rows. Its encoder is used; if it holds plain numbers, the rows must have
        its columns. The names of its targets, of its column of weights if the table has it, and
        the form of its files are defaults.
    scratch : path, optional
        Folder in which a folder for scratch files is made, named after the output; nothing else in
        it is touched. By default the folder of a local output, or the system's temporary folder
        for a remote one. The scratch files are as large as the decoded data if that exceeds
        `memory`.
    drop_missing_targets : bool
        Leave out rows without a target, and count them (`StoreSpec.n_left_out`); by default such a
        row is refused. Missing are nulls, NaN, empty cells, `na_values`, and the markers of pandas.
        Row numbers count the rows that are kept.
    format : str, optional
        Format of the input files, whatever their endings: "csv", "parquet", "arrow", "jsonl", ...
    names : str or sequence of str, optional
        The columns of CSV files that have no header line.
    header : bool, optional
        Whether the first line of a CSV names its columns. By default that is inferred, and refused
        if it is ambiguous.
    delimiter : str, optional
        Separator of the fields of a CSV, one character; " " stands for one or more blanks or tabs.
        By default a comma, a semicolon, a tab or ``|``, whichever splits the first line into most
        fields.
    decimal : {".", ","}, optional
        Decimal sign of numbers in a CSV; by default a point, unless points are `thousands`.
    encoding : str, optional
        Encoding of a CSV by Python's name, such as "latin-1" or "utf-16"; by default "utf-8".
    skip_lines : int, optional
        Lines of a CSV above its header or its first row.
    thousands : {".", ",", " ", "'"}, optional
        Separator of groups of three digits in a CSV; by default none.

    Raises
    ------
    ConfigError
        If an argument is not possible, or arguments contradict each other.
    StoreNotFoundError
        If an input file or an array in it does not exist.
    DataError
        If the input cannot be a store, or the location is taken. No readable store is left behind.
    NonFiniteError
        If there is NaN or infinity; it names file, row and column.
    ResumeMismatchError
        If an unfinished store is there, made from other data or settings.
    OSError
        If reading or writing fails, also because the disk is full: run the same command again to
        resume.
    """
    _check_arguments(seed, missing, scratch)
    memory = parse_bytes(memory, "memory")
    options = EncodingOptions.from_arguments(
        encode=encode, categorical=categorical, numeric=numeric, dates=dates, drop=drop,
        na_values=na_values, like=like, storage_options=storage_options,
    )  # fmt: skip
    form = FileForm(format, names, header, delimiter, decimal, encoding, skip_lines, thousands)
    form = options.with_recorded_form(form.normalise())
    chunk_bytes = checked_chunk_bytes(chunk_mb, memory, 16)  # five are held while one is written
    inputs = expand_paths(inputs, input_options, out_url)
    inputs, x, y, sample_weight, form = convert_for_store(inputs, x, y, sample_weight, form)
    if options.like is not None and sample_weight is None:
        sample_weight = existing_column(options.like.weight_column, inputs, form, input_options)
    mark = _store_at(out_url, storage_options)
    with warn_each_once(), ExitStack() as files, Scratch(scratch_folder(out_url, scratch)) as spill:
        opener = FileOpener(input_options, files, missing=missing, external=external,
                            foreign=foreign, form=form, memory=memory)  # fmt: skip
        request = options.request(x, y, sample_weight, is_table(inputs, form), drop_missing_targets)
        open_input = partial(open_reader, inputs, opener=opener)
        reader = open_input(request)
        check_header(reader, options.columns, x)
        refuse_same_location(input_paths(inputs), out_url)
        row_seed = int(seed) if shuffle else None
        source = _source(reader, options, targets, row_seed, dtype, drop_missing_targets)
        plan, identity = {"source": source, "chunk_bytes": chunk_bytes}, json_digest(source)
        if mark is not None and not overwrite:
            if is_made_from(mark, plan, compress):
                spill.clear(identity)  # left by a call that was killed after it had published
                return open_store(out_url, storage_options=storage_options).spec
            _check_output_location(mark, source, out_url)
        block_bytes, limit = block_size(memory), spool_limit(memory)
        spool = partial(
            spool_rows, files=files, dtype=dtype, block_bytes=block_bytes, progress=progress,
            make_converters=partial(new_converters, targets=targets, row_shape=options.row_shape),
            make_spool=partial(Spool, limit_bytes=limit, scratch=spill, seed=row_seed),
            chooses_columns=options.chooses_columns(x),
        )  # fmt: skip
        convert = partial(TargetConverter, targets=targets, as_text=reader.targets_as_text)
        reopen = partial(options.reader, open_input, request, convert, seed, block_bytes, progress)
        make_writer = partial(
            StoreWriter, out_url, plan=plan, overwrite=overwrite, compress=compress,
            storage_options=storage_options,
        )  # fmt: skip
        rows, reader = spool_table(reader, reopen, options, spool, identity, spill)
        return _write_chunks(rows, reader, make_writer, chunk_bytes, memory, progress, form)


def _check_arguments(seed: int, missing: str, scratch: str | os.PathLike[str] | None) -> None:
    """Raise ConfigError for a wrong seed, a wrong `missing`, or a folder that is not writable."""
    checked_int("seed", seed, 0)
    check_missing(missing)
    if scratch is not None:
        check_parent(scratch)


def _source(
    reader: Reader, options: EncodingOptions, targets: str, seed: int | None, dtype: Any, drop: bool
) -> dict[str, Any]:
    """Return everything that the stored rows depend on, as JSON. drop : `drop_missing_targets`."""
    return {
        "inputs": reader.identity, "targets": targets, "seed": seed,
        "dtype": None if dtype is None else layout.requested_x_dtype(dtype).name, **options.json(),
        **({"drop_missing_targets": True} if drop else {}),
    }  # fmt: skip


def _store_at(
    url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Return the mark of the store at a URL; None if there is none."""
    check_output(url, "stores")
    store = zarr_store(url, storage_options=storage_options, read_only=False)  # or refused
    mark = mark_at(store, str(url))
    if mark is not None:
        check_kind(mark, STORE, str(url))
    return mark


def _check_output_location(
    mark: Mapping[str, Any], source: Mapping[str, Any], url: str | os.PathLike[str]
) -> None:
    """Raise before pass 1 the errors that the writer would raise after it."""
    if mark.get("status") == "complete":
        raise DataError(
            f"{redact(url)} already holds a store",
            f"pass {mention('overwrite', True)} to replace it, or append "
            "the rows to it (streamkern append, or append_store)",
        )
    old = (mark.get("plan") or {}).get("source")
    new = json.loads(json.dumps(source))  # as it would be in the mark
    if old == new:
        return
    difference = "not by ingest"
    if isinstance(old, Mapping):
        names = ", ".join(k for k in sorted({*old, *new}) if old.get(k) != new.get(k))
        difference = f"{names} differ"
    raise ResumeMismatchError(
        f"{redact(url)} holds an unfinished store made from other data or settings ({difference})",
        f"repeat the call with the same data and settings, or pass {mention('overwrite', True)}",
    )


def _check_weights(rows: SpooledRows) -> None:
    """Raise DataError, and discard the rows, if they have weights and none is above 0."""
    if rows.spool.weighted and not rows.files.has_positive_weight:
        rows.spool.discard()
        raise DataError(
            f"all sample weights of {rows.files.row_counts[0][0]} are 0, so that no row would "
            "count",
            f"give some rows a weight above 0, or leave {mention('sample_weight=')} out",
        )


# ------------------------------------------------------------------------- pass 2: write chunks


def _write_chunks(
    rows: SpooledRows, reader: Reader, make_writer: Callable[..., StoreWriter], chunk_bytes: int,
    memory: int, progress: Progress | None, form: FileForm,
) -> StoreSpec:  # fmt: skip
    """Write the spooled rows to the store and discard the spool; return the spec of the store.

    rows, reader : result of `spool_table`
    make_writer : returns the writer, given the shapes, dtypes and names of the arrays
    chunk_bytes : bytes of decoded X in a chunk
    memory : bytes of the whole call
    form : the form of the files, with the record of the store given as `like`
    """
    _check_weights(rows)
    spool, targets = rows.spool, rows.targets
    classes, ids_of_codes = targets.sorted_class_ids() if targets.are_classes else (None, None)
    writer = make_writer(
        row_shape=spool.row_shape,
        x_dtype=spool.x_dtype,
        n_outputs=targets.shape[0] if classes is None else len(classes),
        classes=classes,
        chunk_rows=layout.rows_per_chunk(
            spool.row_shape,
            spool.x_dtype,
            chunk_bytes,
            math.prod(targets.shape) * targets.dtype.itemsize if classes is None else 0,
        ),
        n_rows=spool.n_rows,
        y_dtype=targets.dtype,
        weighted=spool.weighted,
        columns=reader.columns,
        target_columns=reader.target_columns,
        files=rows.files.row_counts if reader.files else (),
        encoder=reader.encoder,
        n_left_out=rows.files.n_dropped,
        file_form=_recorded_form(reader, unused_columns(form.earlier_record)),
        weight_column=reader.weight_column,
        label_dtype=targets.label_dtype,
    )
    chunks_from = partial(chunks_of_spool, spool, ids_of_codes, writer.spec)
    n_ahead = n_writers(writer.url, memory // 4, chunk_bytes)
    spec = fill_store(writer, chunks_from, n_ahead, progress)
    spool.discard()
    return spec


def _recorded_form(reader: Reader, earlier_unused: Sequence[str]) -> Mapping[str, Any] | None:
    """Return the record by which later files are read, with the names of unused columns.

    earlier_unused : unused columns of the store given as `like`, which the new files may lack
    """
    by_encoder = () if reader.encoder is None else reader.encoder["dropped"]
    roles = (*(reader.columns or ()), *(reader.target_columns or ()), reader.weight_column)
    names = (*reader.unused, *earlier_unused)
    return add_unused_columns(reader.file_form, names, (*by_encoder, *roles))
