"""The commands that take a run file or the options of a run: plan | train."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any

import typer

from streamkern.basics.errors import DataError, StreamkernError
from streamkern.basics.text import redact, text_table, time_text, utc_now
from streamkern.cli.console import json_text, write_stderr
from streamkern.cli.model import skipped_entry
from streamkern.cli.options import JsonOption, add_options
from streamkern.cli.overview import plan_overview, resolve_run
from streamkern.cli.plan_text import plan_text
from streamkern.cli.run_info import metrics_in
from streamkern.cli.run_options import config_from_options
from streamkern.config.run_config import RunConfig
from streamkern.predict.evaluation import format_metrics
from streamkern.rundir.run_summary import summarise_run
from streamkern.stream.cluster import connect, dashboard_link
from streamkern.stream.sources.base import BaseSource
from streamkern.train.log_reader import processes_in
from streamkern.train.over_ranks import with_rank_count
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.resolve.training_data import open_test
from streamkern.train.setup.planned import Times, expected_times, planned_flops
from streamkern.train.train import train as run_training

LONG_RUN_S = 60.0
"""Expected seconds of a run above which it gets a run directory even without --run-dir."""
MIN_FLOPS_PER_S = 2e9
"""FLOPs per second that any machine reaches; a run that is short at this speed is not measured."""
MAX_FAST_ROWS = 1_000_000
"""Number of rows that are read in a few seconds; a run on more rows is measured."""

ContinueOption = Annotated[
    str | None,
    typer.Option(
        "--continue",
        metavar="RUN_DIR",
        help="Continue from the model of this run in a new run directory, on more epochs or rows.",
    ),
]


@add_options(config_from_options, "config")
def plan_command(
    config: RunConfig,
    continues: ContinueOption = None,
    everything: Annotated[bool, typer.Option("--all", help="List every buffer.")] = False,
    measure: Annotated[
        bool,
        typer.Option(
            help="Measure this machine for two seconds, to estimate how long the run takes."
        ),
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Show the sizes, the memory, the work and the time of a run without starting it."""
    config = with_rank_count(config)
    run = resolve_run(config, continues)
    with run.backend:
        test = open_test(config, run.data)
        times = _estimate_times(run, test) if measure else None
        overview = plan_overview(run, times)
    typer.echo(json_text(overview) if as_json else plan_text(overview, everything=everything))


def _estimate_times(run: ResolvedRun, test: BaseSource | None) -> Times | None:
    """Return the expected times of the run; None, with a message, if rows cannot be read."""
    try:
        return expected_times(run, test)
    except (DataError, OSError) as error:
        write_stderr(f"note: the time is unknown, because rows could not be read: {error}")
        return None


@add_options(config_from_options, "config")
def train_command(
    config: RunConfig,
    context: typer.Context,
    continues: ContinueOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a model from a run file or options, or resume its run."""
    config = _add_run_dir(config, continues)
    start_s, start_time = time.perf_counter(), utc_now()
    with _connect_cluster(config) as client:
        result = run_training(
            config, client=client, progress=True, on_evaluation=show_evaluation, stop=context.obj,
            continues=continues, last_line=None,
        )  # fmt: skip
    result.model.backend.close()
    seconds = time.perf_counter() - start_s + _sum_earlier_seconds(config, start_time)
    if config.run.run_dir is not None and not result.timing["loop_s"]:
        write_stderr(
            f"note: the run in {redact(config.run.run_dir)} was already finished; --continue "
            "starts a new run directory from it, with more epochs or other rows"
        )
    summary: dict[str, Any] = {"samples": result.samples, "seconds": seconds, **result.metrics}
    if as_json:
        summary |= {"history": result.history, "run_dir": config.run.run_dir}
        typer.echo(json_text(summary | skipped_entry(result.skipped)))
        return
    typer.echo(text_table([summary], list(summary)))
    if config.run.run_dir is not None:
        typer.echo(f"the model is in {config.run.run_dir}")


def _add_run_dir(config: RunConfig, continues: str | None) -> RunConfig:
    """Return the settings, with a run directory if the run has none and is expected to be long."""
    if config.run.run_dir is not None:
        return config
    seconds = _estimate_seconds(config, continues)
    if seconds <= LONG_RUN_S:
        write_stderr("note: without --run-dir the model is not saved and the run cannot be resumed")
        return config
    folder = _new_run_dir(redact(config.data.train_urls[0]))
    write_stderr(
        f"note: the run is expected to take {time_text(seconds)} and has no --run-dir: it is saved "
        f"in {folder}; after an interruption, add --run-dir {folder} to the command to resume it"
    )
    return config.with_overrides({"run.run_dir": folder})


def _estimate_seconds(config: RunConfig, continues: str | None) -> float:
    """Return the expected seconds of the run; 0 if it is certainly short, or cannot be measured."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself warns again
        run = resolve_run(config, continues)
    with run.backend:
        flops = sum(planned_flops(run).values())
        if flops <= MIN_FLOPS_PER_S * LONG_RUN_S and run.problem.n_rows <= MAX_FAST_ROWS:
            return 0.0
        try:
            return expected_times(run, None).whole
        except (DataError, OSError):
            return 0.0


def _new_run_dir(store: str) -> str:
    """Return a new folder below `runs`, named after the store."""
    name = PurePosixPath(store.rstrip("/")).name.partition(".")[0] or "run"
    folders = (f"runs/{name}{f'-{k}' if k > 1 else ''}" for k in itertools.count(1))
    return next(folder for folder in folders if not os.path.lexists(folder))


def _sum_earlier_seconds(config: RunConfig, start_time: str) -> float:
    """Return the seconds that earlier calls worked on the run, according to its log.

    start_time : time in UTC at which this call began
    """
    if config.run.run_dir is None or not config.run.log:
        return 0.0
    try:
        summary = summarise_run(config.run.run_dir, config.data.storage_options or None)
    except (StreamkernError, OSError):  # the command must not fail for lack of this time
        return 0.0
    processes = processes_in(summary.records)
    return sum(process.seconds for process in processes if process.records[0]["time"] < start_time)


def show_evaluation(record: Mapping[str, Any]) -> None:
    """Print an evaluation during a run."""
    write_stderr(f"{record['samples']:,} samples: {format_metrics(metrics_in(record))}")


@contextlib.contextmanager
def _connect_cluster(config: RunConfig) -> Iterator[Any]:
    """Yield a client of the given scheduler, and print its dashboard."""
    if config.data.dask is not None:
        address, setting, activity = config.data.dask, "data.dask", "reading"
    elif config.run.cluster is not None:
        address, setting, activity = config.run.cluster, "run.cluster", "training"
    else:
        yield None
        return
    with connect(address, setting=setting) as client:
        write_stderr(
            f"note: {activity} on the cluster at {address}, dashboard {dashboard_link(client)}"
        )
        yield client
