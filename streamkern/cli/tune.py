"""The command `streamkern tune`: choose kernel, bandwidth and ridge by short trainings."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from streamkern.basics.errors import ConfigError, MissingDependencyError
from streamkern.basics.plots import png_bytes
from streamkern.basics.stop import handle_stop
from streamkern.basics.text import redact, text_table, time_text
from streamkern.cli.console import json_text, write_stderr
from streamkern.cli.options import JsonOption, StorageOption, parse_numbers
from streamkern.cli.run_options import (
    MemoryOption,
    RunFileArgument,
    SetOption,
    SolverOption,
    TrainOption,
    config_from_options,
)
from streamkern.config.run_config import RunConfig
from streamkern.config.toml import run_file_text
from streamkern.filesystem.durable import check_writable, disk_full_hint, write_durably
from streamkern.filesystem.path_kinds import local_file
from streamkern.kernels.notation import kernel_text
from streamkern.losses.losses import SQUARES, loss_class
from streamkern.predict.evaluation import format_metrics
from streamkern.rundir.run_storage import RunStorage, open_folder
from streamkern.tuning.plot import scores_figure
from streamkern.tuning.search import Tuned
from streamkern.tuning.search import search_settings as run_tuning

PLOT_NAME, WRITTEN_FILES_NAME = "tune.png", "written.json"
"""Files in the folder of results: the plot, and the digests of the run files written."""

BandwidthsOption = Annotated[
    str,
    typer.Option(
        metavar="auto|B,B,...",
        help="Try these bandwidths. auto tries 1/4, 1/2, 1, 2 and 4 times the median distance "
        "between centers, or only the bandwidth of the kernel if it has one. For a sum or "
        "product it is the bandwidth of the widest part.",
    ),
]
RidgesOption = Annotated[
    str,
    typer.Option(
        metavar="auto|R,R,...",
        help="Try these ridges. auto tries 0, 1e-6 and 1e-4; 0 if the solver has no ridge.",
    ),
]
KernelsOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,NAME,...", help="Try these kernels.  [default: the kernel of the run file]"
    ),
]
MetricOption = Annotated[
    str,
    typer.Option(
        "--metric",
        metavar="NAME",
        help="Choose by this metric: accuracy, balanced_accuracy, log_loss or mse for classes; "
        "mse, mae or r2 for values; or the figure of the loss, such as pinball_loss. auto "
        "means this figure, and for the squared error accuracy (classes) or mse (values).",
    ),
]
RowsOption = Annotated[
    int | None, typer.Option(help="Train on at most this many rows.  [default: 20000]")
]
CentersOption = Annotated[
    int | None,
    typer.Option(
        help="Use this many centers, or Fourier features.  [default: a fifth of the rows, at "
        "most 2000]"
    ),
]
TuneEpochsOption = Annotated[
    int | None,
    typer.Option(help="Train for this many epochs.  [default: enough for 100000 rows, at most 20]"),
]
FoldsOption = Annotated[
    int, typer.Option(help="Average over this many splits, each with other held-out rows.")
]
RefineOption = Annotated[
    int | None,
    typer.Option(
        help="Refine this many times: try two more bandwidths around the best one, and one more "
        "ridge if the best ridge is the last one.  [default: 2]"
    ),
]
SamplerOption = Annotated[
    str,
    typer.Option(
        metavar="grid|optuna",
        help="Try all combinations (grid), or combinations that Optuna proposes (optuna).",
    ),
]
TrialsOption = Annotated[
    int | None, typer.Option(help="Try this many combinations that Optuna proposes.  [default: 40]")
]
TuneOutOption = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Write results, table and plot to this folder or URL.  [default: RUN-tune next to "
        "RUN.toml]",
    ),
]
WriteOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Write the best settings to this run file; a file that you edited is kept.",
    ),
]


def tune_command(
    context: typer.Context,
    run_file: RunFileArgument = None,
    train: TrainOption = None,
    metric: MetricOption = "auto",
    bandwidths: BandwidthsOption = "auto",
    ridges: RidgesOption = "auto",
    kernels: KernelsOption = None,
    rows: RowsOption = None,
    centers: CentersOption = None,
    epochs: TuneEpochsOption = None,
    folds: FoldsOption = 1,
    refine: RefineOption = None,
    sampler: SamplerOption = "grid",
    n_trials: TrialsOption = None,
    out: TuneOutOption = None,
    write: WriteOption = None,
    solver: SolverOption = None,
    memory: MemoryOption = None,
    settings: SetOption = None,
    storage_option: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find kernel, bandwidth and ridge by short trainings on a sample of the data.

    A part of the sample is held out to compare the settings; the test store is not used. The
    settings of the run file are tried as well, and kept unless others are better by more than two
    standard errors. Each training is recorded when it ends: after an interruption the same command
    continues, and a call with another metric trains nothing again. Use the bandwidth for the run on
    all of the data; the best ridge for all of the data is at most the one that is found.
    """
    config = config_from_options(
        run_file, train, solver=solver, memory=memory, settings=settings,
        storage_option=storage_option,
    )  # fmt: skip
    options = config.data.storage_options
    folder = out or ("tune" if run_file is None else f"{os.path.splitext(run_file)[0]}-tune")
    target = None if write is None else _check_target(write, open_folder(folder, options))
    with handle_stop(context.obj, saves_work=True), warnings.catch_warnings():
        warnings.simplefilter("once", UserWarning)  # each training repeats the same ones
        tuned = run_tuning(
            config, metric=metric, bandwidths=_parse_numbers(bandwidths, "--bandwidths"),
            ridges=_parse_numbers(ridges, "--ridges"),
            kernels=None if kernels is None else [name.strip() for name in kernels.split(",")],
            rows=rows, centers=centers, epochs=epochs, folds=folds, refine=refine, sampler=sampler,
            n_trials=n_trials, out=folder,
            progress=True, report=partial(_report_event, _resolve_metric(metric, config)),
            stop=context.obj,
        )  # fmt: skip
    _save_plot(tuned, folder)
    if target is not None:
        _write_run_file(tuned, target, open_folder(folder, options))
    _show_result(tuned, folder, as_json)


def _parse_numbers(text: str, option: str) -> Any:
    """Return the numbers of an option, or "auto"."""
    return text if text == "auto" else parse_numbers(text, option)


def _check_target(path: str, folder: RunStorage) -> Path:
    """Return the path of the run file; raise ConfigError if it must not be replaced.

    Only run files that a search wrote, and that were not edited since, are replaced.

    folder : folder of the results, which records the digests of the run files written
    """
    target = local_file(path, "--write")
    if target.exists() and _hash_file(target) not in _read_digests(folder):
        raise ConfigError(
            f"--write {path!r} exists and was not written by this search, or was edited",
            "name another file",
        )
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"--write {path!r} is in a folder that does not exist", "create it first")
    check_writable(target, f"--write {path!r}")
    return target


def _hash_file(path: Path) -> str | None:
    """Return the SHA-256 of a file; None if it is not a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _read_digests(folder: RunStorage) -> list[str]:
    """Return the digests of the run files that searches in this folder wrote."""
    try:
        return list(json.loads(folder.read(WRITTEN_FILES_NAME)))
    except (OSError, ValueError, TypeError):
        return []


def _resolve_metric(metric: str, config: RunConfig) -> str:
    """Return the metric; for "auto", the metric of the loss if it is not the squared error."""
    loss = config.model.loss
    if metric != "auto" or loss == SQUARES:
        return metric
    return loss_class(loss).figure


def _report_event(metric: str, event: str, fields: Mapping[str, Any]) -> None:
    """Print the size of the search, and every training. fields : as `tune` passes to `report`"""
    if event == "search":
        run_centers = fields["run_centers"]
        centers_text = "" if run_centers == "auto" else f" and {run_centers} centers"
        recorded_text = f", {fields['recorded']} recorded already" if fields["recorded"] else ""
        write_stderr(
            f"{fields['trainings']} trainings at most{recorded_text}: {fields['fit']:,} rows "
            f"to fit, {fields['held_out']:,} held out, {fields['centers']} centers, "
            f"{fields['epochs'] * fields['copies']} passes; the run has {fields['run_rows']:,} rows"
            f"{centers_text}"
        )
        return
    bandwidth = fields["bandwidth"]
    bandwidth_text = "" if bandwidth is None else f", bandwidth {bandwidth:.4g}"
    names = [name for name in _metric_names(metric) if fields.get(name) is not None]
    metrics = format_metrics({name: fields[name] for name in names})
    fold = f", split {fields['fold'] + 1}" if fields["folds"] > 1 else ""
    left_text = ""
    if fields["left"]:
        left_text = f"; {fields['left']} left, about {time_text(fields['seconds_left'])}"
    write_stderr(
        f"{kernel_text(fields['kernel'])}{bandwidth_text}, "
        f"ridge {fields['ridge']:.4g}{fold}: {metrics or 'diverged'}, {fields['seconds']:.1f} s"
        f"{left_text}"
    )


def _metric_names(metric: str) -> list[str]:
    """Return the metrics to print: the deciding metric first, then the usual ones."""
    return list(dict.fromkeys(f"held_out_{name}" for name in (metric, "mse", "accuracy", "r2")))


def _show_result(tuned: Tuned, folder: str, as_json: bool) -> None:
    """Print the table of trials and the best settings, or JSON, and notes."""
    if as_json:
        typer.echo(json_text(tuned.as_record() | {"out": redact(folder)}))
        return
    typer.echo(text_table(*_table_rows(tuned)))
    typer.echo(f"\n{tuned.toml}")
    if tuned.best["as_given"]:
        write_stderr(
            f"no settings are significantly better in {tuned.metric} than the given ones: these "
            "are kept"
        )
    if tuned.edge:
        write_stderr(
            "note: the best bandwidth is the smallest or largest tried; give --bandwidths beyond it"
        )
    if tuned.ridge_edge:
        write_stderr(
            "note: the best ridge is the smallest or largest tried; give --ridges beyond it"
        )
    bound = ""
    if not tuned.best["as_given"]:
        n_centers = tuned.search["centers"]
        centers_text = "all" if n_centers == "auto" else str(n_centers)
        bound = (
            f"; bandwidth and ridge were compared with {centers_text} centers on "
            f"{tuned.search['fit']:,} rows: for a run on more rows the ridge is an upper bound, "
            "and with other centers the best bandwidth may be another"
        )
    write_stderr(f"results are in {folder}{bound}")


def _table_rows(tuned: Tuned) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows and columns of the table, with the deciding metric first."""
    rows = [{**row, "kernel": kernel_text(row["kernel"])} for row in tuned.table]
    for row in rows:
        row["within 2 se"] = "yes" if row.pop("within") else ""
        row["as given"] = "yes" if row.pop("as_given") else ""
        row["held_out_mse"] = "diverged" if row["held_out_mse"] is None else row["held_out_mse"]
    deciding, *usual = _metric_names(tuned.metric)
    columns = ["kernel", "bandwidth", "ridge", "as given", deciding, "se", "within 2 se", *usual]
    columns.append("seconds")
    return rows, [name for name in columns if any(row.get(name) not in (None, "") for row in rows)]


def _save_plot(tuned: Tuned, folder: str) -> None:
    """Write the plot of the search to the folder; print a note without Matplotlib."""
    try:
        picture = png_bytes(scores_figure(tuned.table, tuned.best, tuned.metric))
    except MissingDependencyError as error:
        write_stderr(f"note: {error}")
        return
    open_folder(folder, tuned.config.data.storage_options).write(PLOT_NAME, picture)


def _write_run_file(tuned: Tuned, target: Path, folder: RunStorage) -> None:
    """Write the best settings to a run file, and record its digest in the folder."""
    config: RunConfig = tuned.config
    run_dir = config.run.run_dir
    if run_dir is not None:  # this folder may hold the run with the earlier settings
        run_dir = f"{run_dir.rstrip('/')}-{target.stem}"
        config = config.with_overrides({"run.run_dir": run_dir})
    data = run_file_text(config).encode()
    _check_target(str(target), folder)  # the file may have been edited meanwhile
    digests = dict.fromkeys([*_read_digests(folder), hashlib.sha256(data).hexdigest()])
    folder.write(WRITTEN_FILES_NAME, json.dumps(list(digests)).encode())
    with disk_full_hint(str(target)):
        write_durably(target, data, exclusive=not target.exists())
    secrets_note = "" if not config.data.storage_options else "; data.storage_options are not in it"
    run_note = "" if run_dir is None else f", for a run in {redact(run_dir)}"
    write_stderr(f"wrote {target}{run_note}{secrets_note}")
