"""The `streamkern` command: plan | train | evaluate | predict, those of `cli_data`, and tune.

Exit codes: 0 done; 2 wrong usage or input, found before anything was written; 3 failed, and a run
can be resumed; 75 stopped by SIGTERM, SIGINT or SIGHUP and saved; 130 stopped, with nothing to
save. One sentence goes to stderr, and a traceback only with --debug. After 3 and 75 the same
command again goes on where it was.
"""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamkern import cli_data, cli_tune
from streamkern.console import (
    EXIT_INTERRUPTED,
    Line,
    as_text,
    explain,
    going_on,
    say,
    show_evaluation,
    show_warning,
)
from streamkern.errors import EXIT_DONE
from streamkern.options import (
    AsJson,
    CacheFolder,
    CacheSize,
    DeviceName,
    Epochs,
    Memory,
    Overwrite,
    RunDir,
    RunFile,
    Scaling,
    Scheduler,
    Set,
    Solver,
    StorageOption,
    Test,
    Train,
    column_list,
    number_or_text,
    options_for,
    parse_options,
    run_config,
)
from streamkern.stop import Stopped, StopRequest, second_signal_ends

if TYPE_CHECKING:
    from streamkern.model import KernelModel

DEBUG = "--debug"
ModelOf = Annotated[str, typer.Argument(metavar="RUN_DIR")]
RowInputs = Annotated[list[str], typer.Argument(metavar="INPUT...", help="Stores, or files.")]
RowsX = Annotated[
    str | None, typer.Option("--x", help="Feature columns (a,b,c), or array of rows.")
]
RowsY = Annotated[
    list[str] | None,
    typer.Option("--y", help="Target column or array, or labels file; repeatable."),
]
RowsWeight = Annotated[
    str | None, typer.Option("--sample-weight", help="Weights: a column, an array, or a file.")
]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Train large kernel models out of core, streaming from Zarr.",
)
app.command()(going_on(cli_data.ingest))
app.command()(going_on(cli_data.augment))
app.command()(going_on(cli_tune.tune))


# ------------------------------------------------------------------------------------ commands


@app.command()
def plan(
    run_file: RunFile = None,
    train: Train = None,
    test: Test = None,
    run_dir: RunDir = None,
    solver: Solver = None,
    memory: Memory = None,
    epochs: Epochs = None,
    scale: Scaling = None,
    dask: Scheduler = None,
    cache: CacheFolder = None,
    cache_size: CacheSize = None,
    settings: Set = None,
    storage_option: StorageOption = None,
    as_json: AsJson = False,
) -> None:
    """Show the sizes, the memory and the work of a run without starting it."""
    from streamkern.overview import plan_overview, plan_text
    from streamkern.problem import open_test
    from streamkern.run import open_run

    config = run_config(
        run_file,
        _given(train, test, run_dir, solver, epochs, scale, dask, cache),
        memory=memory,
        cache_size=cache_size,
        settings=settings,
        storage_options=storage_option,
    )
    run = open_run(config)
    try:
        open_test(config, run.data)
        overview = plan_overview(run)
    finally:
        run.backend.close()
    typer.echo(as_text(overview) if as_json else plan_text(overview))


@app.command()
def train(
    context: typer.Context,
    run_file: RunFile = None,
    train: Train = None,
    test: Test = None,
    run_dir: RunDir = None,
    solver: Solver = None,
    memory: Memory = None,
    epochs: Epochs = None,
    scale: Scaling = None,
    dask: Scheduler = None,
    cache: CacheFolder = None,
    cache_size: CacheSize = None,
    settings: Set = None,
    storage_option: StorageOption = None,
    as_json: AsJson = False,
) -> None:
    """Train, or go on with, the run of a run file."""
    from streamkern.report import table
    from streamkern.train import train as run_training

    config = run_config(
        run_file,
        _given(train, test, run_dir, solver, epochs, scale, dask, cache),
        memory=memory,
        cache_size=cache_size,
        settings=settings,
        storage_options=storage_option,
    )
    if config.run.run_dir is None:
        say("note: without run.run_dir the model is not kept and the run can not be resumed")
    began = time.perf_counter()
    with _cluster(config.data.dask) as client:
        result = run_training(
            config, client=client, progress=True, on_evaluation=show_evaluation, stop=context.obj
        )
    result.model.backend.close()
    seconds = time.perf_counter() - began
    summary: dict[str, Any] = {"samples": result.samples, "seconds": seconds, **result.metrics}
    if as_json:
        summary |= {"history": result.history, "run_dir": config.run.run_dir}
        typer.echo(as_text(summary | _skipped(result.skipped)))
        return
    typer.echo(table([summary], list(summary)))
    if config.run.run_dir is not None:
        typer.echo(f"the model is in {config.run.run_dir}")


@app.command()
def evaluate(
    run_dir: ModelOf,
    inputs: RowInputs,
    x: RowsX = None,
    y: RowsY = None,
    sample_weight: RowsWeight = None,
    device: DeviceName = "auto",
    as_json: AsJson = False,
    storage_option: StorageOption = None,
) -> None:
    """Evaluate a trained model on stores, or on files as ingest takes them."""
    from streamkern.report import table

    options = parse_options(storage_option)
    with _rows_and_model(
        run_dir, inputs, device, options, x=x, y=y, sample_weight=sample_weight, targets=True
    ) as (source, model):
        metrics = model.evaluate(source)
    row: dict[str, Any] = {"rows": source.n_rows, **metrics}
    if as_json:
        typer.echo(as_text(row | _skipped(model.skipped)))
    else:
        typer.echo(table([row], list(row)))


@app.command()
@going_on
def predict(
    run_dir: ModelOf,
    inputs: RowInputs,
    out: Annotated[str, typer.Argument(metavar="OUT", help=".zarr, .npy, .csv or .parquet.")],
    x: RowsX = None,
    y: RowsY = None,
    sample_weight: RowsWeight = None,
    order: Annotated[
        str, typer.Option(help="source: of the files a store was made from. store: as it is read.")
    ] = "source",
    values: Annotated[
        bool, typer.Option("--values", help="In .npy the scores of classes, not labels.")
    ] = False,
    device: DeviceName = "auto",
    overwrite: Overwrite = False,
    storage_option: StorageOption = None,
) -> None:
    """Write what a model predicts for every row of stores, or of files as ingest takes them.

    Columns of targets are not needed, and are left out by the names they had in training, or by
    --y. After an interruption the same command goes on.
    """
    from streamkern.report import redact

    options = parse_options(storage_option)
    with (
        _rows_and_model(
            run_dir, inputs, device, options, x=x, y=y, sample_weight=sample_weight, targets=False
        ) as (source, model),
        Line(sys.stderr) as line,
    ):
        n_rows = model.predict_to(
            source,
            out,
            order=order,
            values=values,
            overwrite=overwrite,
            storage_options=options_for(options, out),
            progress=line.show,
        )
    typer.echo(f"{n_rows:,} rows predicted into {redact(out)}")


app.command()(cli_data.info)
app.command("bench-read")(cli_data.bench_read)


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


def _given(
    train: str | None,
    test: str | None,
    run_dir: str | None,
    solver: str | None,
    epochs: int | None,
    scale: str | None,
    dask: str | None,
    cache: str | None,
) -> dict[str, Any]:
    """The options of `plan` and `train` by the setting that each of them is."""
    return {
        "data.train": train,
        "data.test": test,
        "data.epochs": epochs,
        "data.scale": scale,
        "data.dask": dask,
        "data.cache": cache,
        "solver.name": solver,
        "run.run_dir": run_dir,
    }


@contextlib.contextmanager
def _cluster(address: str | None) -> Iterator[Any]:
    """A client of the scheduler, and a sentence that says where to watch it."""
    if address is None:
        yield None
        return
    from streamkern.cluster import connect, dashboard_link

    with connect(address) as client:
        say(f"note: reading on the cluster at {address}, dashboard {dashboard_link(client)}")
        yield client


def _skipped(texts: tuple[str, ...]) -> dict[str, Any]:
    """What a script learns of damaged checkpoints; a person reads the warnings."""
    return {"skipped": list(texts)} if texts else {}


@contextlib.contextmanager
def _rows_and_model(
    run_dir: str,
    inputs: Sequence[str],
    device: str,
    options: Mapping[str, Any],
    *,
    x: str | None,
    y: Sequence[str] | None,
    sample_weight: str | None,
    targets: bool,
) -> Iterator[tuple[Any, KernelModel]]:
    """The rows, and the model that was trained on rows like them, until the end of the block."""
    from streamkern.filerows import open_rows
    from streamkern.model import load_model

    wanted = [number_or_text(name) for name in y or ()]
    run_options = options_for(options, run_dir)
    model = load_model(run_dir, device=device, storage_options=run_options)
    with model.backend, contextlib.ExitStack() as files:
        rows = open_rows(
            inputs,
            files,
            columns=model.columns,
            target_columns=model.target_columns,
            classes=model.classes,
            targets=targets,
            x=None if x is None else column_list(x),
            y=None if not wanted else wanted[0] if len(wanted) == 1 else wanted,
            sample_weight=None if sample_weight is None else number_or_text(sample_weight),
            input_options=options_for(options, *inputs),
        )
        yield rows, model


# ----------------------------------------------------------------------------------- the entry


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = DEBUG in words
    words = [word for word in words if word != DEBUG]
    with warnings.catch_warnings(), second_signal_ends(), StopRequest(install=True) as stop:
        warnings.simplefilter("default", UserWarning)  # a search trains, and would warn, many times
        # Of a request that a signal came before.
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        warnings.showwarning = show_warning
        try:
            code = app(words, prog_name="streamkern", standalone_mode=False, obj=stop)
        except (Exception, KeyboardInterrupt, Stopped) as error:
            if debug:
                traceback.print_exc()
            return explain(error)
    if code == EXIT_INTERRUPTED:  # newer versions of typer catch Ctrl-C themselves
        say("interrupted")
    return code if isinstance(code, int) else EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
