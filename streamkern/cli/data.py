"""The commands about data: ingest | append | augment | bench-read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import Mention, render_message
from streamkern.basics.progress import ProgressLine
from streamkern.basics.stop import handle_stop
from streamkern.basics.text import redact
from streamkern.basics.values import parse_bytes
from streamkern.cli.console import json_text, write_stderr
from streamkern.cli.described_store import store_text
from streamkern.cli.options import (
    CategoricalOption,
    DateOption,
    DropMissingTargetsOption,
    DropOption,
    EncodeOption,
    ExternalOption,
    ForeignOption,
    JsonOption,
    LikeOption,
    MissingOption,
    NaValueOption,
    NumericOption,
    OverwriteOption,
    StorageOption,
    XArrayOption,
    YArrayOption,
    add_options,
    column_list,
    file_form_options,
    name_list,
    number_or_text,
    options_for,
    parse_numbers,
    parse_options,
    parse_transform,
    target_columns,
)
from streamkern.config.data import DataConfig
from streamkern.filesystem.urls import local_path
from streamkern.ingest.append import append as append_rows
from streamkern.ingest.ingest import ingest as run_ingest
from streamkern.store.describe import describe_store
from streamkern.store.store import open_store
from streamkern.stream.materialise import augment_store
from streamkern.stream.read_speed import read_speed, speed_text

InputsArgument = Annotated[
    list[str],
    typer.Argument(metavar="INPUT", help="Read these files, URLs, folders, or patterns of files."),
]
OutArgument = Annotated[
    str, typer.Argument(metavar="OUT", help="Write the store here; missing folders are made.")
]
FeaturesOption = Annotated[
    str | None,
    typer.Option(
        "--x",
        help="Use these columns as features (a,b,c), or this array of rows; by default all "
        "columns that are not targets. A number means a position, counted from 0, unless a "
        "column has this name.",
    ),
]
TargetsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--y",
        help="Use this column (a name or a position), array or file as the target; repeatable.",
    ),
]
WeightsOption = Annotated[
    str | None, typer.Option(help="Weight rows by this column, array or file.")
]
SeedOption = Annotated[
    int, typer.Option(help="Seed the random order of the rows and random transforms.")
]
ShuffleOption = Annotated[bool, typer.Option(help="Write the rows in random order.")]
ChunkMbOption = Annotated[float, typer.Option(help="Put this many MiB of rows in a chunk.")]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        help="Store features as this type, such as float32.  [default: what the input has; float32 "
        "for text]"
    ),
]
IngestMemoryOption = Annotated[str, typer.Option("--memory", help="Use at most this much memory.")]
CompressOption = Annotated[
    str,
    typer.Option(
        help="Compress chunks: all (zstd), none, or only integers and sparse rows (auto)."
    ),
]


@add_options(file_form_options, "form")
def _reading_options(
    x: FeaturesOption = None,
    y: TargetsOption = None,
    sample_weight: WeightsOption = None,
    seed: SeedOption = 0,
    shuffle: ShuffleOption = True,
    dtype: DtypeOption = None,
    memory: IngestMemoryOption = "1 GiB",
    missing: MissingOption = "error",
    external: ExternalOption = False,
    foreign: ForeignOption = False,
    drop_missing_targets: DropMissingTargetsOption = False,
    *,
    form: dict[str, Any],
) -> dict[str, Any]:
    """Return the options that ingest and append share, by the parameters of both functions."""
    return form | {
        "x": None if x is None else column_list(x), "y": target_columns(y),
        "sample_weight": None if sample_weight is None else number_or_text(sample_weight),
        "seed": seed, "shuffle": shuffle, "dtype": dtype, "memory": parse_bytes(memory, "memory"),
        "missing": missing, "external": external, "foreign": foreign,
        "drop_missing_targets": drop_missing_targets,
    }  # fmt: skip


@add_options(_reading_options, "reading")
def ingest_command(
    context: typer.Context,
    reading: dict[str, Any],
    inputs: InputsArgument,
    out: OutArgument,
    targets: Annotated[
        str,
        typer.Option(
            help="Use targets as class labels or as values; auto decides from the targets."
        ),
    ] = "auto",
    chunk_mb: ChunkMbOption = 8,
    compress: CompressOption = "auto",
    encode: EncodeOption = "auto",
    categorical: CategoricalOption = None,
    numeric: NumericOption = None,
    drop: DropOption = None,
    dates: DateOption = None,
    na_values: NaValueOption = None,
    like: LikeOption = None,
    scratch: Annotated[str | None, typer.Option(help="Put temporary files in this folder.")] = None,
    overwrite: OverwriteOption = False,
    storage_option: StorageOption = None,
) -> None:
    """Make a store from CSV, Parquet, Arrow, JSON lines, .npz, HDF5, NetCDF, svmlight or Zarr."""
    pattern = "--y" if reading["y"] is not None else "--sample-weight"
    options = _storage_options(out, storage_option, pattern)
    with handle_stop(context.obj, saves_work=True), ProgressLine() as line:
        run_ingest(
            inputs[0] if len(inputs) == 1 else inputs, out, **reading,
            targets=targets, chunk_mb=chunk_mb, overwrite=overwrite, progress=line.show,
            compress=compress, encode=encode,
            categorical=name_list(categorical, "--categorical"),
            numeric=name_list(numeric, "--numeric"), drop=name_list(drop, "--drop"),
            dates=_parse_dates(dates), na_values=na_values, like=like, scratch=scratch,
            storage_options=options_for(options, out), input_options=options_for(options, *inputs),
        )  # fmt: skip
    _show_store(out, options, written=line.has_shown)


@add_options(_reading_options, "reading")
def append_command(
    context: typer.Context,
    reading: dict[str, Any],
    store: Annotated[
        str, typer.Argument(metavar="STORE", help="Append to this store, which is on a disk.")
    ],
    inputs: InputsArgument,
    storage_option: StorageOption = None,
) -> None:
    """Add the rows of files to a finished store, in one step.

    Columns are matched by name. The new rows come after the old ones, in random order. After an
    interruption the store has either all of the new rows or none of them.
    """
    options = parse_options(storage_option)
    path = local_path(store)
    if path is not None and path.is_file() and not store.endswith(".zip"):
        raise ConfigError(
            f"STORE {redact(store)} is a file",
            "give the store before the files: streamkern append "
            f"{redact(inputs[-1])} {redact(store)}",
        )
    with handle_stop(context.obj, saves_work=True), ProgressLine() as line:
        append_rows(
            inputs[0] if len(inputs) == 1 else inputs, store, **reading, progress=line.show,
            input_options=options_for(options, *inputs),
        )  # fmt: skip
    if not line.has_shown:
        write_stderr(f"note: {redact(store)} already ends with these rows; nothing was appended")
    typer.echo(store_text(describe_store(open_store(store))))


def _storage_options(out: str, texts: list[str] | None, pattern_option: str) -> dict[str, Any]:
    """Return the storage options; raise ConfigError if OUT is a file, as after an unquoted pattern.

    pattern_option : an option whose value may be a pattern of files, for the message
    """
    path = local_path(out)
    if path is None or not path.is_file():
        return parse_options(texts)
    raise ConfigError(
        f"OUT {redact(out)} is a file",
        "give the path of a new store as the last word, and put a pattern after "
        f"{pattern_option} in quotes, as in {pattern_option} 'part-*.npy', because the shell "
        "otherwise replaces it by its files",
    )


def _parse_dates(texts: list[str] | None) -> dict[str, str | None] | None:
    """Return {column of dates: format of its text, or None}; None without columns."""
    pairs = (text.partition("=") for text in texts or ())
    return {name: date_format or None for name, _, date_format in pairs} or None


def augment_command(
    context: typer.Context,
    inputs: InputsArgument,
    out: OutArgument,
    copies: Annotated[int, typer.Option(help="Write this many augmented copies of every row.")] = 1,
    transform: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TABLE",
            help="Apply this transform, written as in a run file: '{kind = \"flip\"}'; repeatable, "
            "in order.",
        ),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Take rows of several inputs in these shares, such as 3,1.")
    ] = None,
    x: XArrayOption = "X",
    y: YArrayOption = "y",
    sample_weight: Annotated[
        str | None,
        typer.Option(help="Read weights from this array of a store that streamkern did not write."),
    ] = None,
    foreign: ForeignOption = False,
    seed: SeedOption = 0,
    shuffle: ShuffleOption = True,
    chunk_mb: ChunkMbOption = 8,
    dtype: DtypeOption = None,
    memory: IngestMemoryOption = "1 GiB",
    compress: CompressOption = "auto",
    threads: Annotated[
        int | None,
        typer.Option(help="Read on this many threads.  [default: as many as make it faster]"),
    ] = None,
    overwrite: OverwriteOption = False,
    storage_option: StorageOption = None,
) -> None:
    """Write augmented copies of the rows of one store, or of several, to a new store."""
    options = parse_options(storage_option)
    data = _checked_config(
        train=inputs, copies=copies, x=x, y=y, sample_weight=sample_weight, foreign=foreign,
        transforms=[parse_transform(text) for text in transform or ()],
        weights=None if weights is None else parse_numbers(weights, "--weights"),
        prefetch_threads="auto" if threads is None else threads,
    )  # fmt: skip
    with handle_stop(context.obj, saves_work=True), ProgressLine() as line:
        augment_store(
            inputs, out, copies=data.copies, transforms=data.transform_tables, weights=data.weights,
            x=data.x, y=data.y, sample_weight=data.sample_weight, foreign=data.foreign,
            input_options=options_for(options, *inputs), seed=seed, shuffle=shuffle,
            chunk_mb=chunk_mb, dtype=dtype, memory=parse_bytes(memory, "memory"), compress=compress,
            threads=data.prefetch_threads, overwrite=overwrite, progress=line.show,
            storage_options=options_for(options, out),
        )  # fmt: skip
    _show_store(out, options, written=line.has_shown)


_AUGMENT_OPTIONS = {
    "data.copies": "--copies", "data.weights": "--weights", "data.prefetch_threads": "--threads",
    "data.train": "the list of inputs",
}  # fmt: skip
"""Arguments of `augment_command` by the settings of a run."""


def _checked_config(**settings: Any) -> DataConfig:
    """Return the settings of a run with these values; it raises the errors of a run."""
    try:
        return DataConfig(**settings)
    except ConfigError as error:
        raise ConfigError(render_message(error.message, _augment_vocabulary)) from None


def _augment_vocabulary(mention: Mention) -> str:
    """Return a setting of a run as an argument of `augment_command`; a `Vocabulary`."""
    if transform := re.match(r"data\.transforms\[(\d+)\](.*)", mention.name):  # counted from 0
        name = f"--transform number {int(transform[1]) + 1}{transform[2]}"
    else:
        name = _AUGMENT_OPTIONS.get(mention.name, mention.name)
    if mention.value is None:
        return name
    return f"{name} {mention.value}" if name.startswith("--") else f"{name}={mention.value}"


def bench_read_command(
    store: Annotated[str, typer.Argument(metavar="STORE", help="Measure this store.")],
    seconds: Annotated[
        float, typer.Option(help="Measure each row of the table for this many seconds.")
    ] = 3.0,
    x: XArrayOption = "X",
    y: YArrayOption = "y",
    as_json: JsonOption = False,
    storage_option: StorageOption = None,
) -> None:
    """Measure how fast a store can be read: raw reads, decoding, and batches.

    On a local disk, chunks that were read before may come from the memory of the system.
    """
    options = options_for(parse_options(storage_option), store)
    with ProgressLine() as line:
        report = read_speed(
            store,
            x=x,
            y=y,
            seconds=seconds,
            storage_options=options,
            progress=lambda row: line.draw(
                f"{row['what']}, {row['connections']} at once: {row['bytes_per_s'] / 1e6:,.0f} MB/s"
            ),
        )
    text = f"{report['url']}\n\n{speed_text(report['rows'])}\n\n{report['conclusion']}"
    typer.echo(json_text(report) if as_json else text)


def _show_store(out: str, options: Mapping[str, Any], *, written: bool) -> None:
    """Print the description of the store at `out`. written : False if it existed before"""
    if not written:
        write_stderr(
            f"note: {redact(out)} is already complete, from the same command; nothing was written"
        )
    try:
        store = open_store(out, storage_options=options_for(options, out))
        text = store_text(describe_store(store))
    except (OSError, MemoryError) as error:
        # The store is written; an error would suggest to run the command again.
        text = f"{redact(out)} is complete, but could not be read back: {error}"
    typer.echo(text)
