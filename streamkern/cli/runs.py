"""The commands that work on a run as its run file describes it: plan | train."""

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
from streamkern.cli.model import skipped
from streamkern.cli.options import AsJson, StorageOption, number_or_text, sharing
from streamkern.cli.overview import plan_overview, plan_text
from streamkern.cli.run_options import (
    CacheFolder,
    CacheSize,
    CenterRanks,
    Cluster,
    EpochsOption,
    MemoryOption,
    MinRanks,
    PatchOption,
    RanksOption,
    RunDir,
    RunFile,
    Scaling,
    SchedulerOption,
    Set,
    SolverOption,
    TestOption,
    Train,
    run_config,
)
from streamkern.config.run_config import RunConfig
from streamkern.predict.evaluation import format_metrics
from streamkern.rundir.run_summary import glance
from streamkern.stream.cluster import connect, dashboard_link
from streamkern.stream.sources.base import BaseSource
from streamkern.train.log_reader import processes_in
from streamkern.train.over_ranks import with_rank_count
from streamkern.train.resolve.resolved_run import ResolvedRun, open_run
from streamkern.train.resolve.training_data import open_test
from streamkern.train.setup.planned import Times, expected_times, planned_flops
from streamkern.train.train import open_continued
from streamkern.train.train import train as run_training


def _configured(
    run_file: RunFile = None,
    train: Train = None,
    test: TestOption = None,
    run_dir: RunDir = None,
    solver: SolverOption = None,
    memory: MemoryOption = None,
    epochs: EpochsOption = None,
    scale: Scaling = None,
    patch_features: PatchOption = None,
    dask: SchedulerOption = None,
    ranks: RanksOption = None,
    min_ranks: MinRanks = None,
    center_ranks: CenterRanks = None,
    cluster: Cluster = None,
    cache: CacheFolder = None,
    cache_size: CacheSize = None,
    settings: Set = None,
    storage_option: StorageOption = None,
) -> RunConfig:
    """Return the run file with the settings that the given options stand for."""
    given = {
        "data.train": train,
        "data.test": test,
        "data.epochs": None if epochs is None else number_or_text(epochs),
        "data.scale": scale,
        "model.patch_features": patch_features,
        "data.dask": dask,
        "data.cache": cache,
        "solver.name": solver,
        "run.run_dir": run_dir,
        "run.ranks": None if ranks is None else number_or_text(ranks),
        "run.min_ranks": min_ranks,
        "run.center_ranks": center_ranks,
        "run.cluster": cluster,
    }
    return run_config(
        run_file, given, memory=memory, cache_size=cache_size, settings=settings,
        storage_options=storage_option,
    )  # fmt: skip


LONG_S = 60.0
"""Expected seconds of a run above which it gets a run directory even without --run-dir."""
SLOWEST_FLOPS, SURELY_FAST_ROWS = 2e9, 1_000_000
"""FLOPs per second that any machine reaches, and number of rows that are read in seconds.

The time of a run that is short according to these is not measured.
"""

Continues = Annotated[
    str | None,
    typer.Option(
        "--continue",
        metavar="RUN_DIR",
        help="Continue from the model of this run in a new run directory, on more epochs or rows.",
    ),
]


@sharing(_configured, "config")
def plan_command(
    config: RunConfig,
    continues: Continues = None,
    everything: Annotated[bool, typer.Option("--all", help="List every buffer.")] = False,
    measure: Annotated[
        bool,
        typer.Option(
            help="Measure this machine for two seconds, to estimate how long the run takes."
        ),
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Show the sizes, the memory, the work and the time of a run without starting it."""
    config = with_rank_count(config)
    run = open_run(config) if continues is None else open_continued(config, continues)
    try:
        held_out = open_test(config, run.data)
        times = _expected(run, held_out) if measure else None
        overview = plan_overview(run, times)
    finally:
        run.backend.close()
    typer.echo(json_text(overview) if as_json else plan_text(overview, everything=everything))


def _expected(run: ResolvedRun, test: BaseSource | None) -> Times | None:
    """Return the expected times of the run; None, with a message, if rows cannot be read."""
    try:
        return expected_times(run, test)
    except (DataError, OSError) as error:
        write_stderr(f"note: the time is not known, as rows could not be measured: {error}")
        return None


@sharing(_configured, "config")
def train_command(
    config: RunConfig,
    context: typer.Context,
    continues: Continues = None,
    as_json: AsJson = False,
) -> None:
    """Train a model as a run file says, or resume its run."""
    config = _with_run_dir(config, continues)
    began, started = time.perf_counter(), utc_now()
    with _cluster(config) as client:
        result = run_training(
            config, client=client, progress=True, on_evaluation=show_evaluation, stop=context.obj,
            continues=continues, last_line=None,
        )  # fmt: skip
    result.model.backend.close()
    seconds = time.perf_counter() - began + _seconds_before(config, started)
    if config.run.run_dir is not None and not result.timing["loop_s"]:
        write_stderr(
            f"note: the run in {redact(config.run.run_dir)} had come to its end; --continue goes "
            "on from it in another run directory, with more epochs or other rows"
        )
    summary: dict[str, Any] = {"samples": result.samples, "seconds": seconds, **result.metrics}
    if as_json:
        summary |= {"history": result.history, "run_dir": config.run.run_dir}
        typer.echo(json_text(summary | skipped(result.skipped)))
        return
    typer.echo(text_table([summary], list(summary)))
    if config.run.run_dir is not None:
        typer.echo(f"the model is in {config.run.run_dir}")


def _with_run_dir(config: RunConfig, continues: str | None) -> RunConfig:
    """Return the settings; a run of more than a minute without a run directory gets one."""
    if config.run.run_dir is not None:
        return config
    seconds = _expected_seconds(config, continues)
    if seconds <= LONG_S:
        write_stderr("note: without --run-dir the model is not kept and the run cannot be resumed")
        return config
    place = _free_run_dir(redact(config.data.train_urls[0]))
    write_stderr(
        f"note: the run is expected to take {time_text(seconds)}, and no --run-dir was given: it "
        f"is kept in {place}; after an interruption the same command with --run-dir {place} goes on"
    )
    return config.with_overrides({"run.run_dir": place})


def _expected_seconds(config: RunConfig, continues: str | None) -> float:
    """Return the approximate seconds of the run; 0 if it is certainly short, or unknown."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself warns again
        run = open_run(config) if continues is None else open_continued(config, continues)
    try:
        flops = sum(planned_flops(run).values())
        if flops <= SLOWEST_FLOPS * LONG_S and run.problem.n_rows <= SURELY_FAST_ROWS:
            return 0.0
        return expected_times(run, None).whole
    except (DataError, OSError):
        return 0.0
    finally:
        run.backend.close()


def _free_run_dir(store: str) -> str:
    """Return a new folder below `runs`, named after the store."""
    name = PurePosixPath(store.rstrip("/")).name.partition(".")[0] or "run"
    places = (f"runs/{name}{f'-{k}' if k > 1 else ''}" for k in itertools.count(1))
    return next(place for place in places if not os.path.lexists(place))


def _seconds_before(config: RunConfig, started: str) -> float:
    """Return the seconds that earlier calls worked on the run, as far as its log goes."""
    if config.run.run_dir is None or not config.run.log:
        return 0.0
    try:
        seen = glance(config.run.run_dir, config.data.storage_options or None)
    except (StreamkernError, OSError):  # this figure must not fail the command
        return 0.0
    processes = processes_in(seen.records)
    return sum(process.seconds for process in processes if process.records[0]["time"] < started)


def show_evaluation(record: Mapping[str, Any]) -> None:
    """Print an evaluation during a run."""
    figures = {k: v for k, v in record.items() if k not in ("step", "samples")}
    write_stderr(f"{record['samples']:,} samples: {format_metrics(figures)}")


@contextlib.contextmanager
def _cluster(config: RunConfig) -> Iterator[Any]:
    """Yield a client of the given scheduler, and print its dashboard."""
    reads, trains = config.data.dask, config.run.cluster
    address = trains if reads is None else reads
    if address is None:
        yield None
        return
    setting, does = ("run.cluster", "training") if reads is None else ("data.dask", "reading")
    with connect(address, setting=setting) as client:
        write_stderr(
            f"note: {does} on the cluster at {address}, dashboard {dashboard_link(client)}"
        )
        yield client
