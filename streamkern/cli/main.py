"""The entry point of the `streamkern` command: the list of its commands, and the exit code.

Exit codes: 0 success; 2 wrong usage or input, detected before anything was written; 3 failure
during the work, or of printing the result; 75 stopped by SIGTERM, SIGINT or SIGHUP, with the work
saved; 130 stopped, with nothing to save. After 3 and 75, the same command resumes unfinished work.
An error is one sentence on stderr; --debug adds the traceback.
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
from streamkern.basics.stop import Stopped, StopRequest, end_on_signal
from streamkern.basics.version import __version__
from streamkern.cli.console import EXIT_INTERRUPTED, explain, show_warning, write_stderr
from streamkern.cli.help_text import with_usage
from streamkern.cli.redaction import protect_output, refuse_credentials
from streamkern.cli.vocabulary import CommandVocabulary
from streamkern.filesystem.abandoned import remove_abandoned

_load_command, _, _LOADED_NAMES = lazy_loader.attach(  # importing all commands would be slow
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
        "warmup": ["warmup_command"],
    },
)
_load_option, _, _ = lazy_loader.attach(
    "streamkern.cli", submod_attrs={"options": ["import_modules", "add_options"]}
)
DEBUG = "--debug"
PRINTING_COMMANDS = ("plan", "info", "runs", "evaluate")
"""Commands whose only result is the text that they print."""
MODEL_COMMANDS = ("plan", "train", "evaluate", "predict", "compress", "export", "info", "report")
"""Commands that may load a model with user-defined classes, and therefore have --import."""
COMMANDS = {  # in the order of `--help`, with the descriptions that it prints
    "ingest": "Make a store from files of raw data.",
    "append": "Add the rows of files to a store, in one step.",
    "augment": "Write augmented copies of the rows of stores to a new store.",
    "tune": "Find kernel, bandwidth and ridge by short trainings.",
    "plan": "Show the sizes, memory and expected time of a run.",
    "train": "Train a model from a run file or options, or resume its run.",
    "evaluate": "Evaluate a trained model on stores or files.",
    "predict": "Write the predictions of a model for every row.",
    "compress": "Write a model with fewer centers and nearly the same predictions.",
    "export": "Write a trained model to an ONNX file or a C file.",
    "info": "Describe a store, finished or not, or the state of a run.",
    "runs": "List the runs in a folder.",
    "report": "Write an HTML page about runs: curves, planned and measured figures, settings.",
    "bench-read": "Measure how fast a store can be read.",
    "warmup": "Compile the kernels of a GPU before the first run.",
}
TYPER_SETTINGS: dict[str, Any] = {
    "add_completion": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
}


class Commands(TyperGroup):
    """Group of the commands in `COMMANDS`; a command is imported when it is needed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        names: dict[str, Any] = dict.fromkeys(COMMANDS)
        self.commands = names  # typer suggests one of these for a mistyped name

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, name: str) -> Any:
        return _load_named_command(name) if name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@functools.cache
def _load_named_command(name: str) -> Any:
    """Import the command of this name and return it."""
    single = typer.Typer(**TYPER_SETTINGS)
    command = _load_command(f"{name.replace('-', '_')}_command")
    if name in MODEL_COMMANDS:
        command = _load_option("add_options")(_load_option("import_modules"))(command)
    single.command(name)(command)
    return with_usage(typer.main.get_command(single), name)


app = typer.Typer(
    **TYPER_SETTINGS | {"add_completion": True},
    cls=Commands,
    invoke_without_command=True,
    help="Train large kernel models out of core, streaming from Zarr.",
)


def _print_version(is_requested: bool) -> None:
    """Print the version and exit, if requested."""
    if is_requested:
        typer.echo(f"streamkern {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    debug: Annotated[bool, typer.Option(DEBUG, help="Show tracebacks.")] = False,
) -> None:
    """Print the help, and exit with a usage error, if there is no command."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(EXIT_USAGE)


# ---------------------------------------------------------------------------------- entry point


def _options_of(arguments: Sequence[str]) -> dict[str, str]:
    """Return the options ("--run-dir") of the command in `arguments`, by parameter ("run_dir")."""
    name = next((word for word in arguments if word in COMMANDS), None)
    params = [] if name is None else _load_named_command(name).params
    options = {str(param.name): param.opts[0] for param in params}
    return {name: word for name, word in options.items() if word.startswith("--")}


def run_command(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    arguments : words after `streamkern`; None takes them from `sys.argv`
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = DEBUG in arguments
    arguments = [word for word in arguments if word != DEBUG]
    stop = StopRequest(install=True)
    vocabulary = CommandVocabulary(_options_of(arguments), arguments)
    explain_error = functools.partial(explain, vocabulary=vocabulary, words=arguments)
    with (
        protect_output() as out,
        warnings.catch_warnings(),
        end_on_signal(stop, explain_error),
        stop,
    ):
        # Show equal warnings once: a search trains many models.
        warnings.simplefilter("default", UserWarning)
        # A signal may arrive between the creation of a storage request and its start.
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        warnings.showwarning = functools.partial(show_warning, vocabulary=vocabulary)
        remove_abandoned()
        try:
            refuse_credentials(arguments)
            code = app(arguments, prog_name="streamkern", standalone_mode=False, obj=stop)
        except (Exception, KeyboardInterrupt, Stopped) as error:
            if debug:
                traceback.print_exc()
            return explain_error(error)
        if code == EXIT_INTERRUPTED:  # newer versions of typer catch Ctrl-C themselves
            write_stderr("interrupted")
        out.flush()
        command = "".join(arguments[:1])
        write_error = out.write_error
        if write_error is not None and command in PRINTING_COMMANDS:
            write_stderr(f"the output of {command} could not be written: {write_error.strerror}")
            return EXIT_FAILED
    return code if isinstance(code, int) else EXIT_DONE


if __name__ == "__main__":
    sys.exit(run_command())
