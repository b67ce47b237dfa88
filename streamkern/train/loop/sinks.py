"""Callbacks that write the numbers of a run's log to TensorBoard and to MLflow."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from streamkern.basics.errors import ConfigError, TrainingInterrupted
from streamkern.basics.message import mention
from streamkern.basics.optional import import_optional
from streamkern.basics.stop import Stopped
from streamkern.basics.text import redact
from streamkern.config.run_config import ExecutionConfig
from streamkern.filesystem.durable import check_writable
from streamkern.filesystem.urls import local_path
from streamkern.train.loop.callbacks import Callback, TrainStart
from streamkern.train.loop.guard import WINDOW

MAX_VALUES_PER_REQUEST = 1000
"""Largest number of values in a request to MLflow; its servers refuse more."""
MAX_PARAMETER_CHARACTERS = 500
"""Largest length of a parameter in MLflow, in characters."""
_OMITTED_FIELDS = ("event", "step", "epoch", "samples", "window", "left_s")
"""Fields of a record that are not passed on."""
RUN_DIR_TAG = "streamkern.run_dir"
"""Tag by which a resumed run finds its run in MLflow."""


def make_sinks(settings: ExecutionConfig) -> list[Callback]:
    """Return the callbacks that the settings name."""
    callbacks: list[Callback] = []
    if settings.tensorboard is not None:
        _check_folder(settings.tensorboard, "run.tensorboard")
        callbacks.append(TensorBoard(settings.tensorboard))
    if settings.mlflow is not None:
        callbacks.append(MLflow(settings.mlflow))
    return callbacks


def numbers_in(record: Mapping[str, Any]) -> Iterator[tuple[str, float, int]]:
    """Yield (name, value, step) for the numbers in a record of the log.

    An event "train" has the loss of every window that has ended, with the last step of the window,
    and other numbers. Events other than "train", "evaluation" and "back-off" yield nothing else.
    """
    losses = record.get("losses", ())
    for number, loss in enumerate(losses, record.get("window", 0) + 1):
        yield "train_mse", float(loss), number * WINDOW
    if record["event"] not in ("train", "evaluation", "back-off"):
        return
    for name, value in record.items():
        if name in _OMITTED_FIELDS or (losses and name == "train_mse"):
            continue
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield name, float(value), int(record["step"])


def _check_folder(folder: str, name: str) -> None:
    """Raise ConfigError unless files can be written to a local folder, which need not exist yet.

    name : name of the setting or argument that gives the folder, for the message
    """
    if local_path(folder) is not None:  # tensorboardX writes to some URLs
        check_writable(Path(folder, "events"), mention(name, folder))


class TensorBoard(Callback):
    """Writes losses and figures to a folder that TensorBoard shows.

    folder : a local folder. A resumed run continues in it.

    Raises `MissingDependencyError` without tensorboardX, and `ConfigError` if the folder cannot be
    written to.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)
        _check_folder(self.folder, "folder")
        import_optional("tensorboardX", "TensorBoard", "tensorboard")
        self._writer: Any = None

    def begin(self, run: TrainStart) -> None:
        """Open a file in the folder."""
        module = import_optional("tensorboardX", "TensorBoard", "tensorboard")
        # A resumed run writes the steps after its checkpoint again.
        purge = {"purge_step": run.step + 1} if run.step else {}
        # Without this suffix, two files of the same second would have the same name.
        suffix = f".{time.time_ns()}"
        self._writer = module.SummaryWriter(self.folder, filename_suffix=suffix, **purge)

    def record(self, record: Mapping[str, Any]) -> None:
        """Write the numbers of a record."""
        for name, value, step in numbers_in(record):
            self._writer.add_scalar(name, value, step)

    def end(self, error: BaseException | None) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class MLflow(Callback):
    """Writes settings, losses and figures to a run in MLflow.

    uri : URI of the tracking server or store; None for the one that MLflow is configured to use
    experiment : experiment of the run; created if it does not exist

    A run with a `run_dir` that is resumed continues its MLflow run.

    Raises `MissingDependencyError` without MLflow, and `ConfigError` if MLflow rejects `uri`.
    """

    def __init__(self, uri: str | None = None, *, experiment: str = "streamkern") -> None:
        self.uri, self.experiment = uri, experiment
        self.run_id: str | None = None
        self._connect()
        self._client: Any = None

    def _connect(self) -> Any:
        """Return a client of the tracking server; raise ConfigError if `uri` is rejected."""
        module = import_optional("mlflow", "logging to MLflow", "mlflow")
        try:
            return module.MlflowClient(self.uri)
        except (module.MlflowException, ImportError) as error:  # SQLite needs more packages
            raise ConfigError(
                f"{mention(f'run.mlflow={redact(str(self.uri))}')} cannot be used by MLflow "
                f"({redact(str(error))})",
                "give the URI of a tracking server or store",
            ) from error

    def begin(self, run: TrainStart) -> None:
        """Find or create the run, and write the settings."""
        self.run_id = None  # the run of an earlier `fit` has ended
        self._client = self._connect()
        experiment = self._client.get_experiment_by_name(self.experiment)
        if experiment is None:
            experiment_id = self._client.create_experiment(self.experiment)
        else:
            experiment_id = experiment.experiment_id
        self.run_id = self._find_run(experiment_id, run) if run.step and run.run_dir else None
        if self.run_id is None:
            tags = {} if run.run_dir is None else {RUN_DIR_TAG: run.run_dir}
            self.run_id = self._client.create_run(experiment_id, tags=tags).info.run_id
            for name, value in _parameters(run.settings):
                self._client.log_param(self.run_id, name, value)
        else:
            self._client.update_run(self.run_id, status="RUNNING")

    def _find_run(self, experiment_id: str, run: TrainStart) -> str | None:
        """Return the id of the newest MLflow run of the run directory, or None."""
        runs = self._client.search_runs([experiment_id], order_by=["attributes.start_time DESC"])
        run_ids = (r.info.run_id for r in runs if r.data.tags.get(RUN_DIR_TAG) == run.run_dir)
        return next(run_ids, None)

    def record(self, record: Mapping[str, Any]) -> None:
        """Write the numbers of a record."""
        metric, now = import_optional("mlflow.entities").Metric, int(time.time() * 1000)
        numbers = [metric(name, value, now, step) for name, value, step in numbers_in(record)]
        for start in range(0, len(numbers), MAX_VALUES_PER_REQUEST):
            request = numbers[start : start + MAX_VALUES_PER_REQUEST]
            self._client.log_batch(self.run_id, metrics=request)

    def end(self, error: BaseException | None) -> None:
        """Record how the run ended."""
        if self.run_id is not None:
            status = "FINISHED" if error is None else "FAILED"
            if isinstance(error, TrainingInterrupted | Stopped):
                status = "KILLED"
            self._client.set_terminated(self.run_id, status)
            self._client = None


def _parameters(settings: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for table, values in settings.items():
        for name, value in values.items():
            yield f"{table}.{name}", redact(str(value))[:MAX_PARAMETER_CHARACTERS]
