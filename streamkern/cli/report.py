"""The command `streamkern report`: write a page about runs."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from streamkern.basics.errors import ConfigError, StreamkernError
from streamkern.basics.message import mention
from streamkern.cli.console import write_stderr
from streamkern.cli.model import measured_importances, rows_and_model
from streamkern.cli.options import ImportancesOption, StorageOption, options_for, parse_options
from streamkern.cli.page.facts import RunFacts, TestPredictions, distinct_names, read_facts
from streamkern.cli.page.page import REPORT_MARK, report_page
from streamkern.cli.page.predictions import predict_test_rows
from streamkern.cli.redaction import remove_secrets
from streamkern.config.run_config import RunConfig
from streamkern.filesystem.durable import check_writable, disk_full_hint, write_atomically
from streamkern.filesystem.path_kinds import local_file
from streamkern.filesystem.urls import local_path
from streamkern.rundir.checkpoint_format import checkpoint_errors
from streamkern.stream.sources.base import BaseSource

ReportOutOption = Annotated[
    str,
    typer.Option(metavar="FILE", help="Write the page to this file, and replace an older one."),
]


def report_command(
    locations: Annotated[
        list[str],
        typer.Argument(metavar="RUN_DIR", show_default=False, help="Describe these runs."),
    ],
    out: ReportOutOption = "report.html",
    importances: ImportancesOption = None,
    storage_option: StorageOption = None,
) -> None:
    """Write an HTML page about runs: curves, planned and measured figures, settings, timeline.

    The runs may still be training. The page is a single file and needs no network.
    """
    write_report(
        locations, out, importances=importances, storage_options=parse_options(storage_option)
    )
    write_stderr(f"wrote {out}")


def write_report(
    run_dirs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str] = "report.html",
    *,
    importances: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Path:
    """Write an HTML page about runs, also unfinished ones, and return its path.

    Parameters
    ----------
    run_dirs : path or URL of a run directory, or several of them.
    out : the page; an older one is replaced.
    importances : store or file of rows on which the model was not trained; permutation importances
        of the columns are measured on them.
    storage_options : options for remote run directories, as fsspec takes them; never shown.

    Raises
    ------
    ConfigError
        `out` is a URL, a folder or a file of another program, or cannot be written, or its folder
        does not exist.
    RunError, CheckpointError, StorageError
        A directory holds no run, or its files cannot be read.
    DataError
        The rows of `importances` cannot be used.
    MissingDependencyError
        Matplotlib is not installed.
    """
    options, out = dict(storage_options or {}), local_file(out, "the report")
    run_dirs = [run_dirs] if isinstance(run_dirs, str | os.PathLike) else run_dirs
    locations = list(dict.fromkeys(os.fspath(location) for location in run_dirs))  # each once
    check_free(out)
    # All directories are read first, so that an error comes before the long measurements.
    runs = [
        read_facts(location, options_for(options, location), remove_secrets)
        for location in locations
    ]
    if importances is not None:
        runs = [
            replace(run, columns=measured_importances(location, importances, options))
            for run, location in zip(runs, locations, strict=True)
        ]
    runs = [
        replace(run, predictions=_test_predictions(run, location, options))
        for run, location in zip(runs, locations, strict=True)
    ]
    with checkpoint_errors(", ".join(run.location for run in runs)):
        text = report_page(distinct_names(runs), _defaults())
    check_free(out)  # a file may have appeared meanwhile
    with disk_full_hint(str(out), resumes=False):
        write_atomically(out, text.encode())
    return out


def _test_predictions(
    run: RunFacts, location: str, options: Mapping[str, Any]
) -> TestPredictions | None:
    """Return predictions on the test rows of the run.

    None before the first step, without test rows, and if these are remote or cannot be read.
    """
    if run.test is None or local_path(run.test) is None or not run.steps:
        return None
    with contextlib.suppress(StreamkernError, OSError, MemoryError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The data is opened as in the run, but on the CPU, since the run may use the GPU.
        names = ("x", "y", "foreign")
        reading = {k: run.settings[f"data.{k}"] for k in names if f"data.{k}" in run.settings}
        with rows_and_model(location, [run.test], "cpu", options, reading) as (rows, model):
            return predict_test_rows(model, rows) if isinstance(rows, BaseSource) else None
    return None


def check_free(out: Path) -> None:
    """Raise ConfigError unless `out` is a new file, or a page that may be replaced."""
    if not out.absolute().parent.is_dir():
        raise ConfigError(
            f"{mention('out', str(out))}: there is no folder {out.parent}", "create it first"
        )
    check_writable(out, mention("out", str(out)))
    if not out.exists():
        return
    try:
        with out.open(encoding="utf-8", errors="replace") as file:
            is_report = file.read(len(REPORT_MARK)) == REPORT_MARK
    except OSError as error:  # a folder, for example
        raise ConfigError(
            f"{mention('out', str(out))} cannot be replaced ({error.strerror})", "name another file"
        ) from None
    if not is_report:
        raise ConfigError(
            f"{mention('out', str(out))} exists and was not made by streamkern report",
            "name another file",
        )


def _defaults() -> dict[str, object]:
    """Return the default of each setting, by "section.name"."""
    return {
        f"{section}.{name}": value
        for section, table in RunConfig().identity().items()
        for name, value in table.items()
    }
