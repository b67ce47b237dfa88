"""The `streamkern` command: its commands, and their ends.

Exit codes: 0 done; 2 wrong usage or input, found before anything was written; 3 failed, and a run
can be resumed; 75 stopped by SIGTERM, SIGINT or SIGHUP and saved; 130 stopped, with nothing to
save. One sentence goes to stderr, and a traceback only with --debug. After 3 and 75 the same
command resumes.
"""

from __future__ import annotations

import functools
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import lazy_loader
import typer
from typer.core import TyperGroup

from streamkern.basics.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE
from streamkern.basics.stop import Stopped, StopRequest, watched
from streamkern.basics.version import __version__
from streamkern.cli.console import EXIT_INTERRUPTED, explain, show_warning, write_stderr
from streamkern.cli.help_text import say_usage
from streamkern.cli.redaction import guarded, refuse_credentials
from streamkern.cli.vocabulary import CommandWords
from streamkern.filesystem.abandoned import remove_abandoned

_load, _, _NAMES = lazy_loader.attach(  # all commands at once would take a second
    "streamkern.cli",
    submod_attrs={
        "compress": ["compress_command"],
        "data": ["append_command", "augment_command", "bench_read_command", "ingest_command"],
        "export": ["export_command"],
        "info": ["info_command"],
        "model": ["evaluate_command", "predict_command"],
        "report": ["report_command"],
        "run_table": ["runs_command"],
        "runs": ["plan_command", "train_command"],
        "tune": ["tune_command"],
    },
)
_option, _, _ = lazy_loader.attach(
    "streamkern.cli", submod_attrs={"options": ["import_modules", "sharing"]}
)
DEBUG = "--debug"
ANSWERS = ("plan", "info", "runs", "evaluate")  # their printed text is their only result
LOADING = ("plan", "train", "evaluate", "predict", "compress", "export", "info", "report")
"""Commands that load models, whose classes may be of the user's own."""
COMMANDS = {  # in the order of `--help`, with their texts there
    "ingest": "Make a store from files of raw data.",
    "append": "Add the rows of files to a store, in one step.",
    "augment": "Write augmented copies of the rows of stores to a new one.",
    "tune": "Find kernel, bandwidth and ridge by short trainings.",
    "plan": "Show the sizes, the memory and the work of a run.",
    "train": "Train, or go on with, the run of a run file.",
    "evaluate": "Evaluate a trained model on stores or files.",
    "predict": "Write what a model predicts for every row.",
    "compress": "Write a model with fewer centers and nearly the same answers.",
    "export": "Write a trained model to an ONNX file or a C file.",
    "info": "Describe a store, finished or not, or the state of a run.",
    "runs": "List the runs in a folder.",
    "report": "Write runs to a page: curves, plan and measured, settings, time line.",
    "bench-read": "Measure what the storage of a store can deliver.",
}
TYPER_SETTINGS: dict[str, Any] = {
    "add_completion": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
}


class Commands(TyperGroup):
    """The commands of `COMMANDS`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        names: dict[str, Any] = dict.fromkeys(COMMANDS)
        self.commands = names  # compared with a mistyped name

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, name: str) -> Any:
        return _command(name) if name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@functools.cache
def _command(name: str) -> Any:
    """Return the command of this name, loaded."""
    one = typer.Typer(**TYPER_SETTINGS)
    command = _load(f"{name.replace('-', '_')}_command")
    if name in LOADING:
        command = _option("sharing")(_option("import_modules"))(command)
    one.command(name)(command)
    return say_usage(typer.main.get_command(one), name)


app = typer.Typer(
    **TYPER_SETTINGS | {"add_completion": True},
    cls=Commands,
    invoke_without_command=True,
    help="Train large kernel models out of core, streaming from Zarr.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"streamkern {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option(DEBUG, help="Show tracebacks.")] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(EXIT_USAGE)


# ----------------------------------------------------------------------------------- the entry


def _options_of(words: Sequence[str]) -> dict[str, str]:
    """Return the options of the given command, by the names of their parameters."""
    name = next((word for word in words if word in COMMANDS), None)
    params = [] if name is None else _command(name).params
    options = {str(param.name): param.opts[0] for param in params}
    return {name: word for name, word in options.items() if word.startswith("--")}


def run_command(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = DEBUG in words
    words = [word for word in words if word != DEBUG]
    stop = StopRequest(install=True)
    vocabulary = CommandWords(_options_of(words), words)
    explained = functools.partial(explain, vocabulary=vocabulary, words=words)
    with (
        guarded() as out,
        warnings.catch_warnings(),
        watched(stop, explained),
        stop,
    ):
        warnings.simplefilter("default", UserWarning)  # a search trains, and would warn, often
        # From a request that a signal preceded.
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        warnings.showwarning = functools.partial(show_warning, vocabulary=vocabulary)
        remove_abandoned()
        try:
            refuse_credentials(words)
            code = app(words, prog_name="streamkern", standalone_mode=False, obj=stop)
        except (Exception, KeyboardInterrupt, Stopped) as error:
            if debug:
                traceback.print_exc()
            return explained(error)
        if code == EXIT_INTERRUPTED:  # newer versions of typer catch Ctrl-C themselves
            write_stderr("interrupted")
        out.flush()
        if out.lost is not None and words[:1] and words[0] in ANSWERS:
            write_stderr(f"what {words[0]} has to say could not be written: {out.lost.strerror}")
            return EXIT_FAILED
    return code if isinstance(code, int) else EXIT_DONE


if __name__ == "__main__":
    sys.exit(run_command())
