"""The command `streamkern info`: describe a store or a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from streamkern.basics.errors import CheckpointError, ConfigError, DataError, StoreNotFoundError
from streamkern.basics.plots import new_figure, png_bytes
from streamkern.basics.text import redact, text_table
from streamkern.cli.console import json_text
from streamkern.cli.described_store import store_text
from streamkern.cli.glossary import FACT_MEANINGS, STORE_MEANINGS
from streamkern.cli.model import measured_importances
from streamkern.cli.options import (
    ForeignOption,
    ImportancesOption,
    JsonOption,
    StorageOption,
    XArrayOption,
    YArrayOption,
    options_for,
    parse_options,
)
from streamkern.cli.run_info import is_run_directory, run_overview, run_text
from streamkern.filesystem.durable import check_writable, disk_full_hint, write_atomically
from streamkern.filesystem.icechunk_repository import is_icechunk
from streamkern.filesystem.path_kinds import content_kind, local_file, runs_below
from streamkern.rundir.checkpoint_format import checkpoint_errors
from streamkern.rundir.run_summary import INTACT, verify_run
from streamkern.store.describe import describe_store, describe_unfinished
from streamkern.store.store import open_store


def info_command(
    location: Annotated[
        str, typer.Argument(metavar="STORE_OR_RUN_DIR", help="Describe this store or run.")
    ],
    x: XArrayOption = "X",
    y: YArrayOption = "y",
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every byte and compare it with its digest.")
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Explain every line.")] = False,
    foreign: ForeignOption = False,
    as_json: JsonOption = False,
    plot: Annotated[
        str | None,
        typer.Option(metavar="PNG", help="Draw the learned metric of a run to this new PNG file."),
    ] = None,
    importances: ImportancesOption = None,
    storage_option: StorageOption = None,
) -> None:
    """Describe a store, finished or not, or the state of a run."""
    all_options = parse_options(storage_option)
    options = options_for(all_options, location)
    # A run
    if not is_icechunk(location) and is_run_directory(location, options):
        if plot is not None:
            _draw_metric(location, options, local_file(plot, "--plot"))
        columns = None
        if importances is not None:
            columns = measured_importances(location, importances, all_options)
        _show_run(
            location, options, verify=verify, explain=explain, as_json=as_json, columns=columns
        )
        return
    # A store, which has none of the properties of a run
    if importances is not None:
        raise ConfigError(
            f"--importances {redact(importances)} needs the model of a run, but {redact(location)} "
            "has none",
            "leave it out",
        )
    if plot is not None:
        raise ConfigError(
            f"--plot={plot} needs the metric of a run, but {redact(location)} has none",
            "leave it out",
        )
    try:
        store = open_store(location, x=x, y=y, storage_options=options, foreign=foreign)
    except DataError as error:
        description = describe_unfinished(location, storage_options=options)
        if description is None:
            raise _not_found_error(location, error) from None
    else:
        description = describe_store(store, exact=verify)
        if verify:
            store.verify()
            description["verified"] = True
    if as_json:
        typer.echo(json_text(description | ({"meanings": STORE_MEANINGS} if explain else {})))
    else:
        typer.echo(store_text(description, explain=explain))


def _not_found_error(location: str, error: DataError) -> DataError:
    """Return the error for a place that has neither a store nor a run."""
    kind = content_kind(location)
    if kind == "nothing":
        return StoreNotFoundError(
            f"there is nothing at {redact(location)}",
            "give the path of a store or of a run directory",
        )
    if kind == "runs":
        first_run = runs_below(Path(location))[0]
        return StoreNotFoundError(
            f"{redact(location)} is a folder of runs",
            f"list them with streamkern runs {location}, or describe one with streamkern info "
            f"{first_run}",
        )
    return error


def _draw_metric(location: str, options: Mapping[str, Any] | None, path: Path) -> None:
    """Draw the metric of a run into a new file.

    Raises ConfigError if the run has none, or if the file exists or cannot be written.
    """
    if not path.parent.is_dir():
        raise ConfigError(
            f"--plot={path}: there is no folder {path.parent}", "create this folder first"
        )
    if path.exists():
        raise ConfigError(f"--plot={path} already exists", "give the name of a new file")
    check_writable(path, f"--plot={path}")
    metric = (run_overview(location, options)["solver"] or {}).get("metric")
    if metric is None:
        raise ConfigError(
            f"--plot={path} needs a metric, but the run in {redact(location)} has none",
            "leave it out",
        )
    with checkpoint_errors(redact(location)):
        picture = spectrum_png(metric)
    with disk_full_hint(str(path), resumes=False):
        write_atomically(path, picture, exclusive=True)


def spectrum_png(metric: Mapping[str, Any]) -> bytes:
    """Return a PNG with bars of the importances and top eigenvectors of a metric, and its spectrum.

    metric : the result of `describe_metric`

    Raises MissingDependencyError without Matplotlib.
    """
    bars = [("share of the metric\n(of its gradients)", metric["importances"])]
    for k, terms in enumerate(metric["first"], 1):
        share = metric["spectrum"][k - 1]
        bars.append((f"direction {k}, {share:.1%}", terms))
    figure = new_figure(3.2 * (len(bars) + 1), 4.2)
    panels = figure.subplots(1, len(bars) + 1)
    for axes, (title, entries) in zip(panels, bars, strict=False):
        axes.barh(range(len(entries)), [x for _, x in entries], color="C0")
        axes.set_yticks(range(len(entries)), [name for name, _ in entries], fontsize=8)
        axes.invert_yaxis()
        axes.axvline(0, color="0.3", lw=0.8)
        axes.set_title(title, fontsize=10)
    axes = panels[-1]
    axes.plot(range(1, len(metric["spectrum"]) + 1), metric["spectrum"], "o-", ms=4)
    axes.set_yscale("log")
    axes.set_title("eigenvalues,\nover their sum", fontsize=10)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    return png_bytes(figure)


def _show_run(
    location: str, options: Mapping[str, Any] | None, *, verify: bool, explain: bool,
    as_json: bool, columns: Mapping[str, Any] | None,
) -> None:  # fmt: skip
    """Print the overview of a run; if it is damaged, only the verification, and raise an error.

    verify : whether to read every byte and compare it with its digest
    explain : whether to add the meaning of each entry
    columns : the result of `measured_importances`, if requested
    """
    results: Mapping[str, str] = verify_run(location, options) if verify else {}
    damaged = [name for name, result in results.items() if result != INTACT]
    run = {} if damaged else run_overview(location, options)
    if verify:
        run["verified"] = results
    if explain and as_json:
        run["meanings"] = FACT_MEANINGS
    if columns is not None:
        run["permutation_importances"] = columns
    with checkpoint_errors(redact(location)):
        text = json_text(run) if as_json else run_text(run, explain=explain)
    typer.echo(text if as_json or columns is None else f"{text}\n\n{_columns_text(columns)}")
    if damaged:
        raise CheckpointError(
            f"{len(damaged)} of the {len(results)} groups in {redact(location)} are damaged "
            f"({', '.join(damaged)})",
            _repair_text(redact(location), results, damaged),
        )


def _repair_text(location: str, verified: Mapping[str, str], damaged: Sequence[str]) -> str:
    """Return the remedy for a damaged run.

    verified : result of the check of each group of files
    damaged : names of the damaged groups
    """
    checkpoints = {name for name in verified if name.startswith("checkpoints/")}
    if checkpoints and checkpoints <= set(damaged):
        return "restore a checkpoint from a copy, or train in a new run directory"
    files = [f"{location}/{name}.json" for name in damaged if name not in checkpoints]
    deletion = f"delete {' and '.join(files)}, and " if files else ""
    return (
        f"{deletion}run the training command of this run again: it continues from the undamaged "
        "files"
    )


def _columns_text(importances: Mapping[str, Any]) -> str:
    """Return permutation importances as a table."""
    rows = [
        {"column": name, "importance": mean, "+-": std}
        for name, mean, std in importances["columns"]
    ]
    return (
        f"by how much {importances['figure']} falls where a column is shuffled, on "
        f"{importances['rows']:,} rows of {importances['data']} ({importances['figure']} "
        f"{importances['score']:.4g}):\n"
        f"{text_table(rows, ['column', 'importance', '+-'])}"
    )
