"""The `streamkern` command: ingest | plan | train | evaluate | predict | info.

Exit codes: 0 done; 2 wrong usage or input, found before anything was written; 3 failed, and a run
can be resumed; 75 stopped by a signal and saved. One sentence goes to stderr, and a traceback
only with --debug. After 3 and 75 the same command again goes on where it was.
"""

from __future__ import annotations

import sys
import time
import tomllib
import traceback
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamkern.console import (
    EXIT_INTERRUPTED,
    Line,
    as_text,
    explain,
    say,
    show_evaluation,
    show_warning,
)
from streamkern.errors import EXIT_DONE, ConfigError

if TYPE_CHECKING:
    from streamkern.config import RunConfig
    from streamkern.model import KernelModel
    from streamkern.sources import ZarrSource

DEBUG = "--debug"

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Train large kernel models out of core, streaming from Zarr.",
)

RunFile = Annotated[str | None, typer.Argument(metavar="[RUN.toml]", help="Run file.")]
Train = Annotated[str | None, typer.Option("--train", help="Store to train on.")]
Test = Annotated[str | None, typer.Option("--test", help="Store to evaluate on.")]
RunDir = Annotated[str | None, typer.Option("--run-dir", help="Where the run is saved.")]
Solver = Annotated[str | None, typer.Option("--solver", help="auto, block, eigenpro2, 3 or 4.")]
Memory = Annotated[str | None, typer.Option("--memory", help='Such as "8 GiB".')]
Epochs = Annotated[int | None, typer.Option("--epochs", help="Passes over the data.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any setting of a run file."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
XName = Annotated[str, typer.Option("--x", help="Name of the array of rows.")]
YName = Annotated[str, typer.Option("--y", help="Name of the array of targets.")]
DeviceName = Annotated[str, typer.Option("--device", help='"auto", "cpu", "gpu" or "gpu:N".')]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]


# ------------------------------------------------------------------------------------ commands


@app.command()
def ingest(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT...", help="Files or URLs.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="Where the store goes.")],
    y: Annotated[
        list[str] | None, typer.Option("--y", help="Labels file, or target column; repeatable.")
    ] = None,
    targets: Annotated[str, typer.Option(help="auto, classes or values.")] = "auto",
    x_name: Annotated[str, typer.Option(help="Array of rows in .npz, HDF5, Zarr.")] = "X",
    y_name: Annotated[str, typer.Option(help="Array of targets, or column.")] = "y",
    seed: Annotated[int, typer.Option(help="Of the row order.")] = 0,
    shuffle: Annotated[bool, typer.Option(help="Mix the rows.")] = True,
    chunk_mb: Annotated[float, typer.Option(help="MiB of rows in a chunk.")] = 8,
    dtype: Annotated[str | None, typer.Option(help="Of the stored rows.")] = None,
    memory: Annotated[str, typer.Option(help="What to stay within.")] = "1 GiB",
    compress: Annotated[str, typer.Option(help="auto, zstd or none.")] = "auto",
    missing: Annotated[str, typer.Option(help="Absent Zarr chunks: error or fill.")] = "error",
    scratch: Annotated[str | None, typer.Option(help="Folder for scratch files.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Make a store from .npy, .npz, IDX, CSV, Parquet, HDF5 or Zarr files."""
    from streamkern.describe import describe_store
    from streamkern.ingest import ingest as run_ingest
    from streamkern.overview import store_text
    from streamkern.settings import parse_bytes
    from streamkern.store import open_store

    columns = [_number_or_text(name) for name in y or ()]
    line = Line(sys.stderr)
    try:
        run_ingest(
            inputs[0] if len(inputs) == 1 else inputs,
            out,
            y=None if not columns else columns[0] if len(columns) == 1 else columns,
            targets=targets,
            x_name=x_name,
            y_name=y_name,
            chunk_mb=chunk_mb,
            shuffle=shuffle,
            seed=seed,
            overwrite=overwrite,
            dtype=dtype,
            memory=parse_bytes(memory),
            progress=line.show,
            compress=compress,
            missing=missing,
            scratch=scratch,
        )
    finally:
        line.close()
    typer.echo(store_text(describe_store(open_store(out))))


@app.command()
def plan(
    run_file: RunFile = None,
    train: Train = None,
    test: Test = None,
    run_dir: RunDir = None,
    solver: Solver = None,
    memory: Memory = None,
    epochs: Epochs = None,
    settings: Set = None,
    as_json: AsJson = False,
) -> None:
    """Show the sizes, the memory and the work of a run without starting it."""
    from streamkern.overview import plan_overview, plan_text
    from streamkern.problem import open_run, open_test

    config = _config(run_file, train, test, run_dir, solver, memory, epochs, settings)
    run = open_run(config)
    try:
        open_test(config, run.data)
        overview = plan_overview(run)
    finally:
        run.backend.close()
    typer.echo(as_text(overview) if as_json else plan_text(overview))


@app.command()
def train(
    run_file: RunFile = None,
    train: Train = None,
    test: Test = None,
    run_dir: RunDir = None,
    solver: Solver = None,
    memory: Memory = None,
    epochs: Epochs = None,
    settings: Set = None,
    as_json: AsJson = False,
) -> None:
    """Train, or go on with, the run of a run file."""
    from streamkern.report import table
    from streamkern.train import train as run_training

    config = _config(run_file, train, test, run_dir, solver, memory, epochs, settings)
    if config.run.run_dir is None:
        say("note: without run.run_dir the model is not kept and the run can not be resumed")
    began = time.perf_counter()
    result = run_training(config, progress=True, on_evaluation=show_evaluation)
    result.model.backend.close()
    seconds = time.perf_counter() - began
    summary: dict[str, Any] = {"samples": result.samples, "seconds": seconds, **result.metrics}
    if as_json:
        typer.echo(as_text(summary | {"history": result.history, "run_dir": config.run.run_dir}))
        return
    typer.echo(table([summary], list(summary)))
    if config.run.run_dir is not None:
        typer.echo(f"the model is in {config.run.run_dir}")


@app.command()
def evaluate(
    run_dir: Annotated[str, typer.Argument(metavar="RUN_DIR")],
    store: Annotated[str, typer.Argument(metavar="STORE")],
    x: XName = "X",
    y: YName = "y",
    device: DeviceName = "auto",
    as_json: AsJson = False,
) -> None:
    """Evaluate a trained model on a store."""
    from streamkern.report import table

    source, model = _source_and_model(run_dir, store, device, x=x, y=y)
    with model.backend:
        metrics = model.evaluate(source)
    row: dict[str, Any] = {"rows": source.n_rows, **metrics}
    typer.echo(as_text(row) if as_json else table([row], list(row)))


@app.command()
def predict(
    run_dir: Annotated[str, typer.Argument(metavar="RUN_DIR")],
    store: Annotated[str, typer.Argument(metavar="STORE")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="Zarr group for the predictions.")],
    x: XName = "X",
    device: DeviceName = "auto",
    overwrite: Overwrite = False,
) -> None:
    """Write the values (and labels) a trained model predicts for every row of a store."""
    from streamkern.report import redact

    source, model = _source_and_model(run_dir, store, device, x=x, y=None)
    with model.backend:
        model.predict_to(source, out, overwrite=overwrite)
    typer.echo(f"{source.n_rows:,} rows predicted into {redact(out)}")


@app.command()
def info(
    place: Annotated[str, typer.Argument(metavar="STORE_OR_RUN_DIR")],
    x: XName = "X",
    y: YName = "y",
    as_json: AsJson = False,
) -> None:
    """Describe a store, or the state of a run."""
    from streamkern import overview
    from streamkern.describe import describe_store
    from streamkern.store import open_store

    if overview.is_run_directory(place):
        run = overview.run_overview(place)
        typer.echo(as_text(run) if as_json else overview.run_text(run))
    else:
        store = describe_store(open_store(place, x=x, y=y))
        typer.echo(as_text(store) if as_json else overview.store_text(store))


def _version(wanted: bool) -> None:
    if wanted:
        from streamkern import __version__

        typer.echo(f"streamkern {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option(DEBUG, help="Show tracebacks.")] = False,
) -> None:
    pass


# ------------------------------------------------------------------------------- the arguments


def _config(
    run_file: str | None,
    train: str | None,
    test: str | None,
    run_dir: str | None,
    solver: str | None,
    memory: str | None,
    epochs: int | None,
    settings: Sequence[str] | None,
) -> RunConfig:
    """The run file with what the command line puts over it."""
    from streamkern.config import RunConfig, load_run_file
    from streamkern.settings import parse_bytes

    given = {
        "data.train": train,
        "data.test": test,
        "data.epochs": epochs,
        "solver.name": solver,
        "run.run_dir": run_dir,
    }
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if memory is not None:  # the budget of wherever the run executes
        size = memory if memory == "auto" else parse_bytes(memory)
        changes |= {"run.memory": size, "run.device_memory": size}
    changes |= dict(_setting(text) for text in settings or ())
    if run_file is not None:
        return load_run_file(run_file).with_overrides(changes)
    if "data.train" not in changes:
        raise ConfigError("there is nothing to train on; give a run file, or --train URL")
    start = RunConfig.from_tables({"data": {"train": changes["data.train"]}})
    return start.with_overrides(changes)


def _setting(text: str) -> tuple[str, Any]:
    """("solver.level", 100) from "solver.level=100"; a value that is no TOML is text."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text!r} must be SECTION.KEY=VALUE, such as solver.level=100")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return key.strip(), value.strip()


def _number_or_text(text: str) -> int | str:
    """A column by its position, or by its name."""
    try:
        return int(text)
    except ValueError:
        return text


def _source_and_model(
    run_dir: str, url: str, device: str, *, x: str, y: str | None
) -> tuple[ZarrSource, KernelModel]:
    """The rows, and the model that was trained on rows like them."""
    from streamkern.model import load_model
    from streamkern.sources import ZarrSource

    source = ZarrSource(url, x=x, y=y)
    return source, load_model(run_dir, device=device)


# ----------------------------------------------------------------------------------- the entry


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = DEBUG in words
    words = [word for word in words if word != DEBUG]
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show_warning
        try:
            code = app(words, prog_name="streamkern", standalone_mode=False)
        except (Exception, KeyboardInterrupt) as error:
            if debug:
                traceback.print_exc()
            return explain(error)
    if code == EXIT_INTERRUPTED:  # newer versions of typer catch Ctrl-C themselves
        say("interrupted")
    return code if isinstance(code, int) else EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
