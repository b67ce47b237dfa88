"""Function `train`: check everything, acquire the run directory, and run the `Trainer`."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.errors import ConfigError
from streamkern.basics.log_scale import loss_note
from streamkern.basics.message import mention
from streamkern.basics.progress import ProgressLine
from streamkern.basics.stop import StopRequest, handle_stop
from streamkern.basics.text import time_text
from streamkern.centers.given_centers import as_centers
from streamkern.config.run_config import RunConfig, as_config
from streamkern.filesystem.icechunk_repository import at_snapshot, is_branch, snapshot_url
from streamkern.kernels.builtin import Kernel, is_built_in
from streamkern.predict.evaluation import format_metrics
from streamkern.rundir.run_directory import RunDirectory
from streamkern.store.row_block import without_mask
from streamkern.stream.sources.base import Source
from streamkern.stream.sources.patch_features import PatchFeatures
from streamkern.stream.sources.transforms import Scale, is_deterministic, transform_name
from streamkern.train.loop.callbacks import Callback, check_callbacks
from streamkern.train.loop.sinks import make_sinks
from streamkern.train.loop.step_loop import Result
from streamkern.train.over_ranks import (
    RankEventHandler,
    as_one_rank,
    is_complete,
    train_over,
    with_rank_count,
)
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.resolve.training_data import storage_options_for
from streamkern.train.restart.parent_run import ParentRun
from streamkern.train.restart.run_snapshot import recorded_run
from streamkern.train.run_identity import check_same_run, run_record
from streamkern.train.saved_model import load_result
from streamkern.train.start_run import open_recorded_run, run_directory, start_trainer

__all__ = ["Result", "train"]


def train(
    config: RunConfig | str | os.PathLike[str] | Mapping[str, Any],
    *,
    source: Source | None = None,
    test: Source | None = None,
    centers: npt.ArrayLike | None = None,
    metric: npt.ArrayLike | None = None,
    client: Any = None,
    progress: bool | str = False,
    on_evaluation: Callable[[dict[str, Any]], None] | None = None,
    stop: StopRequest | None = None,
    warm: ParentRun | None = None,
    facts: Mapping[str, Any] | None = None,
    continues: str | os.PathLike[str] | None = None,
    callbacks: Sequence[Callback] = (),
    last_line: bool | None = True,
) -> Result:
    """Train, or resume, the run that `config` describes.

    Parameters
    ----------
    config : settings, the path of a run file, or the tables of a run file.
    source, test : sources of rows, in place of data.train and data.test.
    centers : (p, d) or (p, *row_shape) rows before all transforms, in place of model.centers.
    metric : (d,) scales of the features after scaling, or a (d, r) matrix, in place of
        model.metric; see `Kernel`.
    client : a `distributed.Client` to read on, in place of data.dask; it stays open.
    progress : whether to show the progress of the run, including its setup, on stderr. On a
        terminal and in a notebook, this is one line that is redrawn; in a pipe, a new line every
        30 s, and less often later. "auto" shows it once the run has taken more than 3 s.
    on_evaluation : called with every evaluation record.
    stop : stop request of the caller, for a run that is part of a larger computation.
    warm : weights to start from, in place of solver.warm_start.
    facts : JSON values of the caller that are saved with the setup, as `Result.meta["facts"]`.
    continues : run directory, finished or not, that this run continues in its own run.run_dir. This
        run takes over its centers, kernel, metric and scaling, starts from its weights, and trains
        data.epochs more epochs on the same or other rows. The settings [model] must have their
        defaults or the values of that run; only the loss may differ, if that run minimised squares.
    callbacks : receive the events of the run and may end it, see `Callback`; exceptions that they
        raise are passed on unchanged.
    last_line : whether to print a last line with the choices made, the time taken, and the quality
        of the model. None prints it only if `progress` was shown.

    Raises
    ------
    ConfigError, DataError
        The settings or the data are invalid; nothing was written.
    MemoryBudgetError
        The run does not fit in the memory.
    BackendError, MissingDependencyError
        The device cannot be used, or a package that the settings need is not installed.
    ResumeMismatchError, RunLockedError, RunError
        run.run_dir holds a run with other data or settings, is in use by another process, or cannot
        be used.
    TrainingInterrupted
        SIGTERM, SIGINT, SIGHUP or `stop` ended the run; the same call resumes it from run.run_dir.
    Stopped
        `stop` ended a run without run.run_dir; nothing was saved.
    DivergenceError, CorruptChunkError, CheckpointError, StorageError, ClusterError, RankLostError
        The run failed; its last checkpoint, if it has one, is good.
    """
    config = as_config(config)
    rows = None if centers is None else as_centers(centers)
    metric_array = None if metric is None else np.asarray(without_mask(metric, "metric"))
    all_callbacks = (*check_callbacks(callbacks), *make_sinks(config.run))
    parent = None if continues is None else os.fspath(continues)
    inputs = RunInputs(source, test, rows, metric_array, client, warm, facts or {}, parent)
    directory = None
    config = with_rank_count(config, on_cluster=client is not None)
    _check_ranks(config)
    if config.run.run_dir is not None:
        directory = run_directory(config)
    config = config if source is not None else pin_branches(config, directory)
    if config.run.n_ranks > 1:
        name = "callbacks" if warm is None else "warm_start"
        if callbacks or warm is not None:
            raise ConfigError(
                f"{mention('run.ranks', config.run.ranks)} trains in other processes, where {name} "
                "cannot be used",
                "leave it out, or train with one rank",
            )
        if not is_complete(config, replace(inputs, client=None)):
            return _over_ranks(config, inputs, stop, progress, on_evaluation, last_line=last_line)
        config, inputs = as_one_rank(config), replace(inputs, client=None)
    has_run_dir = directory is not None
    with handle_stop(
        stop, saves_work=has_run_dir, position=lambda: "before the next step"
    ) as request:
        trainer_context = start_trainer(
            config, inputs, directory, request, progress, on_evaluation, all_callbacks
        )
        with trainer_context as trainer:
            was_complete = trainer.position.done
            result = trainer.run_to_end()
            if last_line is not False and not was_complete:
                seconds = time.perf_counter() - trainer.start_time
                text = closing_line(result, seconds)
                trainer.progress.line.finish(text, always=last_line is True)
            return result


def _check_ranks(config: RunConfig) -> None:
    """Raise ConfigError if settings of several ranks are given for a run of one rank."""
    settings = config.run
    setting = "run.cluster" if settings.cluster is not None else "run.min_ranks"
    if settings.ranks == 1 and (settings.cluster is not None or settings.min_ranks > 1):
        raise ConfigError(
            f"{setting} is for several ranks, but {mention('run.ranks')} is 1",
            f"set {mention('run.ranks')} above 1, or leave {setting} out",
        )


def _over_ranks(
    config: RunConfig, inputs: RunInputs, stop: StopRequest | None, progress: bool | str,
    on_evaluation: Callable[[dict[str, Any]], None] | None,
    *, last_line: bool | None,
) -> Result:  # fmt: skip
    """Train over several ranks, see `over_ranks`. The result is loaded from the run directory."""
    _check_read_back(config, inputs)
    start = time.perf_counter()
    with (
        handle_stop(stop, saves_work=True, position=lambda: "before the next step") as request,
        ProgressLine(setting=progress) as line,
    ):
        summary = train_over(
            config, inputs, request, progress=bool(progress),
            on_event=RankEventHandler(line, on_evaluation),
        )  # fmt: skip
        result = load_result(str(config.run.run_dir), config.data.storage_options)[1]
        result.timing = summary["timing"]
        if not config.run.log:  # otherwise they are read from the log
            result.history = summary["history"]
        if last_line is not False:
            text = closing_line(result, time.perf_counter() - start)
            line.finish(text, always=last_line is True)
    return result


def _check_read_back(config: RunConfig, inputs: RunInputs) -> None:
    """Raise ConfigError if the model has a part that a run directory cannot store."""
    kernel, unsaved_part = config.model.kernel, None
    if isinstance(kernel, Kernel) and not is_built_in(kernel):
        unsaved_part = f"kernel={kernel!r}"
    transforms = () if inputs.source is None else getattr(inputs.source, "feed_transforms", ())
    for transform in transforms:
        if is_deterministic(transform) and not isinstance(transform, Scale | PatchFeatures):
            unsaved_part = f"transform {transform_name(transform)!r}"
    if unsaved_part is not None:
        raise ConfigError(
            f"{unsaved_part} cannot be used with {mention('run.ranks', config.run.ranks)}: it is a "
            "function, which cannot be saved in the run directory that ranks share",
            "train with one rank",
        )


def open_continuation(config: RunConfig, continues: str | os.PathLike[str]) -> ResolvedRun:
    """Return the run with which `train` would continue another run, without writing anything.

    The caller closes `ResolvedRun.backend`. Raises the same errors as `train` before it writes.
    """
    directory = None
    if config.run.run_dir is not None:
        directory = RunDirectory(
            config.run.run_dir, writable=False, storage_options=config.data.storage_options
        )
    run = open_recorded_run(config, RunInputs(continues=os.fspath(continues)), directory)
    try:
        check_same_run(directory, run_record(run))
    except BaseException:
        run.backend.close()
        raise
    return run


def pin_branches(config: RunConfig, directory: RunDirectory | None) -> RunConfig:
    """Return the settings with the icechunk branches of data.train replaced by snapshots.

    The snapshots are those with which the run in `directory` was started or, for a new run, the
    newest ones. Raises the errors of `icechunk_store`.
    """
    urls = config.data.train_urls
    if not any(map(is_branch, urls)):
        return config
    recorded = recorded_run(directory)
    fingerprints = [] if recorded is None else list(_fingerprints(recorded["identity"]["data"]))
    if len(fingerprints) != len(urls):  # the data differ, which is reported later
        fingerprints = [""] * len(urls)
    pinned_urls = []
    for url, fingerprint in zip(urls, fingerprints, strict=True):
        # The fingerprint of an icechunk store is "icechunk:<snapshot>:<arrays>".
        kind, _, snapshot_and_arrays = fingerprint.partition(":")
        if not is_branch(url):
            pinned_urls.append(url)
        elif kind == "icechunk":
            pinned_urls.append(at_snapshot(url, snapshot_and_arrays.partition(":")[0]))
        else:
            pinned_urls.append(snapshot_url(url, storage_options_for(config, url)))
    is_single = isinstance(config.data.train, str)
    return config.with_overrides({"data.train": pinned_urls[0] if is_single else pinned_urls})


def _fingerprints(description: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fingerprints of the stores in the description of a source, in their order."""
    base = [description["base"]] if "base" in description else []
    parts = description.get("sources", base)
    if not parts:
        yield str(description.get("fingerprint"))
    for part in parts:
        yield from _fingerprints(part)


def closing_line(result: Result, seconds: float) -> str:
    """Return the closing line of a run.

    seconds : seconds that this process has worked on the run
    """
    model, solver = result.model, result.meta["sizes"]["solver"]
    units = "features" if model.op.kernel.explicit else "centers"
    note = loss_note(result.meta)
    ridge = f", ridge {result.ridge:.3g}" if result.ridge else ""
    duration = f"{seconds:.1f} s" if seconds < 10 else time_text(seconds)
    texts = [
        f"trained {model.op.kernel!r} with {len(model.weights):,} {units}, solver {solver}{ridge}",
        f"{result.epochs} epoch{'s'[: result.epochs != 1]} in {duration}",
        *(f"train mse {loss:.4g}{note}" for loss in result.losses[-1:] if math.isfinite(loss)),
    ]
    return "  ".join([*texts, format_metrics(result.metrics)] if result.metrics else texts)
