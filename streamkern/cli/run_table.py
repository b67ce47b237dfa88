"""The command `streamkern runs`: list the run directories in a folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from streamkern.basics.errors import ConfigError, StreamkernError
from streamkern.basics.log_scale import loss_note
from streamkern.basics.text import redact, text_table
from streamkern.cli.console import json_text, write_stderr
from streamkern.cli.options import JsonOption, StorageOption, options_for, parse_options
from streamkern.cli.page.facts import RunFacts, distinct_names, read_facts
from streamkern.cli.run_info import is_run_directory
from streamkern.filesystem.urls import local_path, open_objects
from streamkern.predict.evaluation import format_metrics


def runs_command(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="List the runs in this folder.")
    ] = ".",
    as_json: JsonOption = False,
    storage_option: StorageOption = None,
) -> None:
    """List the runs in a folder: their state, progress and figures."""
    options = options_for(parse_options(storage_option), folder)
    runs, problems = [], []
    for location in [folder, *_entries_of(folder, options)]:
        try:
            if is_run_directory(location, options):
                runs.append(read_facts(location, options))
        except (StreamkernError, OSError) as error:
            problems.append(str(error))
    rows = [_row(run) for run in distinct_names(runs)]
    if as_json:
        typer.echo(json_text({"folder": redact(folder), "runs": rows, "notes": problems}))
    elif rows:
        typer.echo(text_table([_text_row(row) for row in rows], list(_text_row(rows[0]))))
    else:
        write_stderr(f"there is no run in {redact(folder)} or in the folders directly below it")
    if not as_json:
        for text in (*problems, *(note for run in runs for note in run.notes)):
            write_stderr(f"note: {text}")


def _entries_of(folder: str, options: Mapping[str, Any] | None) -> list[str]:
    """Return the paths or URLs of the subfolders, in order."""
    path = local_path(folder)
    if path is None:
        names = open_objects(folder, storage_options=options).children()
        return [f"{folder.rstrip('/')}/{name}" for name in names]
    try:
        with os.scandir(path) as entries:
            return sorted(entry.path for entry in entries if entry.is_dir())
    except OSError as error:
        raise ConfigError(
            f"{redact(folder)} cannot be listed ({error.strerror})", "give a folder of runs"
        ) from None


def _row(run: RunFacts) -> dict[str, Any]:
    """Return a run as JSON values."""
    return {
        "name": run.name, "run_dir": run.location, "state": run.state, "writer": run.writer,
        "solver": run.solver, "centers": run.n_centers, **run.progress,
        "planned_samples": run.planned_samples, "train_mse": run.loss,
        "log_scale": bool(loss_note(run.setup)), "held_out": run.figures,
        "started": run.start_time, "last_seen": run.last_seen, "notes": list(run.notes),
    }  # fmt: skip


def _text_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the table, from the JSON values of a run."""
    total = row["planned_samples"]
    share = f"{row['samples'] / total:.0%}" if total else ""
    if row["state"] == "finished" and total and row["samples"] < total:
        share += ", ended early"
    loss = row["train_mse"]
    if loss is not None and row["log_scale"]:
        loss = f"{loss:.4g} (log scale)"
    figures = {name: value for name, value in row["held_out"].items() if value is not None}
    return {
        "name": row["name"], "state": row["state"], "solver": row["solver"],
        "p": row["centers"], "samples": row["samples"], "of all": share, "epochs": row["epoch"],
        "train mse": loss, "held out": format_metrics(figures),
        "started, UTC": _clock(row["started"]), "last seen": _clock(row["last_seen"]),
    }  # fmt: skip


def _clock(time: str | None) -> str:
    """Return a time to the minute."""
    return "" if time is None else time[:16].replace("T", " ")
