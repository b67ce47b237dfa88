"""The `streamkern` command: plan | train, and those of `model`, `data` and `tune`.

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
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any

import typer

from streamkern.basics.errors import EXIT_DONE, EXIT_FAILED
from streamkern.basics.stop import Stopped, StopRequest, watched
from streamkern.basics.text import table
from streamkern.basics.version import __version__
from streamkern.cli import data, model, tune
from streamkern.cli.console import (
    EXIT_INTERRUPTED,
    as_text,
    explain,
    say,
    show_evaluation,
    show_warning,
)
from streamkern.cli.options import (
    AsJson,
    CacheFolder,
    CacheSize,
    Epochs,
    Memory,
    RunDir,
    RunFile,
    Scaling,
    Scheduler,
    Set,
    Solver,
    StorageOption,
    Test,
    Train,
    run_config,
)
from streamkern.cli.outlet import guarded
from streamkern.cli.overview import plan_overview, plan_text
from streamkern.stream.cluster import connect, dashboard_link
from streamkern.train.opened import open_run
from streamkern.train.train import train as run_training
from streamkern.train.training_data import open_test

DEBUG = "--debug"
ANSWERS = ("plan", "info", "evaluate")  # what they print is all that they make
app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Train large kernel models out of core, streaming from Zarr.",
)
app.command()(data.ingest)
app.command()(data.augment)
app.command()(tune.tune)


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
        typer.echo(as_text(summary | model.skipped(result.skipped)))
        return
    typer.echo(table([summary], list(summary)))
    if config.run.run_dir is not None:
        typer.echo(f"the model is in {config.run.run_dir}")


app.command()(model.evaluate)
app.command()(model.predict)
app.command()(data.info)
app.command("bench-read")(data.bench_read)


def _version(wanted: bool) -> None:
    if wanted:
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
    with connect(address) as client:
        say(f"note: reading on the cluster at {address}, dashboard {dashboard_link(client)}")
        yield client


# ----------------------------------------------------------------------------------- the entry


def _options_of(words: Sequence[str]) -> dict[str, str]:
    """The options of the command that was given, by the names of their parameters."""
    commands: Any = getattr(typer.main.get_command(app), "commands", {})
    command = next((commands[word] for word in words if word in commands), None)
    params = [] if command is None else command.params
    options = {str(param.name): param.opts[0] for param in params}
    return {name: word for name, word in options.items() if word.startswith("--")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = DEBUG in words
    words = [word for word in words if word != DEBUG]
    stop = StopRequest(install=True)
    options = _options_of(words)
    explained = partial(explain, options=options)
    with (
        guarded(words) as out,
        warnings.catch_warnings(),
        watched(stop, explained),
        stop,
    ):
        warnings.simplefilter("default", UserWarning)  # a search trains, and would warn, many times
        # Of a request that a signal came before.
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        warnings.showwarning = partial(show_warning, options=options)
        try:
            code = app(words, prog_name="streamkern", standalone_mode=False, obj=stop)
        except (Exception, KeyboardInterrupt, Stopped) as error:
            if debug:
                traceback.print_exc()
            return explained(error)
        if code == EXIT_INTERRUPTED:  # newer versions of typer catch Ctrl-C themselves
            say("interrupted")
        out.flush()
        if out.lost is not None and words[:1] and words[0] in ANSWERS:
            say(f"what {words[0]} has to say could not be written: {out.lost.strerror}")
            return EXIT_FAILED
    return code if isinstance(code, int) else EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
