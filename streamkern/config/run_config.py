"""The settings of a run: a frozen table of checked settings for each section, and `RunConfig`.

A run file is TOML with one table per section; only `data.train` is required::

    [data]
    train = "s3://bucket/train.zarr"
    test = "s3://bucket/test.zarr"
    transforms = [{kind = "scale", mode = "global"}, {kind = "noise", sigma = 0.5}]

    [model]
    kernel = "laplace"
    n_centers = 100_000

    [solver]
    name = "block"

    [run]
    run_dir = "runs/first"
    memory = "8 GiB"
    checkpoint_every = "5 min"

A wrong setting raises a `ConfigError` that names the key, its value, the rule and the remedy;
several mistakes are reported together, one sentence a line. Relative paths are relative to the
current directory. Credentials belong in the environment or in `data.storage_options`, which no
repr, dump, log or message shows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from pydantic import model_validator

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.values import parse_seconds
from streamkern.config.data import DataConfig
from streamkern.config.model import ModelConfig
from streamkern.config.rules import (
    AutoCount,
    AutoFlag,
    AutoStep,
    Cadence,
    Count,
    CountsSetting,
    Device,
    Flag,
    FolderSetting,
    MemorySetting,
    OptionalUrl,
    RanksSetting,
    SchedulerSetting,
    SeedSetting,
    ShareSetting,
    Table,
    unknown_key_text,
)
from streamkern.config.solver import SolverConfig, check_solver_features
from streamkern.config.toml import TOML_BYTES, parse_toml, suggest_correction
from streamkern.losses.losses import SQUARES, loss_class

# Settings that a resumed run may change. They have no effect on samples, random numbers and
# weights, except that memory and device determine the batch size and the backend, which are
# recorded instead.
FREE_AT_RESUME: Final = frozenset((
    "data.test", "data.prefetch_threads", "data.dask", "data.cache", "data.cache_size",
    "data.storage_options", "run.run_dir", "run.device", "run.accelerator", "run.memory",
    "run.device_memory", "run.threads", "run.ranks", "run.min_ranks", "run.center_ranks",
    "run.cluster", "run.checkpoint_every", "run.keep_checkpoints", "run.evaluate_every",
    "run.evaluate_at", "run.log", "run.tensorboard", "run.mlflow",
))  # fmt: skip

VALIDATION_SETTINGS: Final = frozenset(
    {"run.early_stopping", "run.validation_fraction", "run.n_iter_no_change"}
)
"""Settings without effect if `run.early_stopping` is false."""


NEUTRAL_VALUES: Final[Mapping[str, Any]] = MappingProxyType({
    "run.calibrate": False, "solver.posterior": False, "model.loss": SQUARES,
    "model.effort": "default", "model.target_transform": "auto", "model.patch_features": 0,
    "model.patch_size": "auto", "model.patch_grid": 2, "solver.projection_epochs": 1,
    "solver.projection_nystrom": "auto", "solver.projection_level": "auto",
    "solver.projection_batch": "auto", "solver.factor_dtype": "auto",
})  # fmt: skip
"""Settings added after 0.1.0 -> the value with which a run equals one of a version without them.

This value is not recorded, so that runs of those versions can be resumed.
"""


class CheckpointInterval(NamedTuple):
    """Interval between two checkpoints, in steps or in seconds; both are None for "auto"."""

    steps: int | None
    seconds: float | None


class ExecutionConfig(Table):
    """[run]: execution, checkpoints and monitoring of the run.

    run_dir : folder or URL of the checkpoints and the log, from which the same call resumes.
        Without it nothing is saved.
    precision : precision of the arithmetic; "auto": the fastest that is as accurate as float32, or
        float64 for some regressions with all rows as centers. These have fewer than 4096 rows, or
        up to 16 384 rows with so little noise that the rounding of float32 would increase the
        error. "exact" is float32, "float64" is float64; "high", "integer" and "fast" are modes of a
        GPU.
    device : device of the computation; "auto": a GPU that CuPy can use, else the CPU.
    accelerator : accelerator of the CPU; "auto": Numba if it is installed and the work outweighs
        its compilation.
    memory : bytes that the run may add to the process; "auto": four fifths of the free memory.
    device_memory : bytes that the run may add to the memory of the GPU; "auto": four fifths of its
        free memory.
    threads : threads of the computation; "auto": one for each processor.
    ranks : processes that share every step, each with a part of its rows. They run on this machine
        or on `cluster`; "gpus" means one for each GPU of this machine. For "block", "direct",
        "falkon", "eigenpro3" and "eigenpro4"; for a loss other than the squared error, only for
        "block". The result equals the result of one process, up to rounding.
    min_ranks : smallest number of ranks; if there are fewer workers than `ranks`, the run uses all
        of them.
    center_ranks : number of ranks over which the steps partition the centers and weights, if one
        rank cannot hold all of them, for "block", "eigenpro3", "eigenpro4" and "falkon". It must
        divide `ranks`. The setup then partitions centers and weights over all ranks. A step takes
        longer than with 1.
    cluster : address of a Dask scheduler whose workers run the ranks, one on each.
    random_state : seed of all random numbers.
    checkpoint_every : steps or time between two checkpoints; "auto": a minute, or 20 times the time
        for which the last checkpoint interrupted the training if that is longer.
    keep_checkpoints : number of newest checkpoints that are kept.
    evaluate_every : steps between two evaluations on `data.test`; "auto": one after each epoch.
    evaluate_at : numbers of samples after each of which the model is evaluated.
    log : whether the run log is written.
    tensorboard : folder for TensorBoard, to which losses and figures are written as they are
        logged.
    mlflow : tracking URI of MLflow, to which the settings, losses and figures are sent.
    early_stopping : whether the run stops once the score on validation rows no longer improves. A
        share of the rows is set aside as validation rows, and the model is scored on them after
        every epoch: by accuracy or R2, or by the loss if it is not the squared error. The run stops
        after `n_iter_no_change` epochs in a row without a better score. The model has the weights
        of the best epoch, even if `data.epochs` ends the run. Neither validation rows nor copies of
        them are trained on. Not for "direct" with the squared error, for warm starts, or for rows
        that a function makes.
    validation_fraction : share of the stored rows that is set aside for early stopping. From arrays
        in memory, the same share of each class is taken.
    n_iter_no_change : number of epochs in a row without a better score after which the run ends.
    calibrate : whether rows are set aside for probabilities and intervals; "auto": for classes with
        many rows. After training, these rows determine the probabilities of classes, or the widths
        of intervals with the requested coverage. true sets aside a tenth of the rows, at most 2000,
        which are never trained on; not for warm starts, and not for rows that a function makes.
        "auto" sets aside a fiftieth, at most 2000, if there are at least 5000 rows with one class
        each, and 500 for each class; it sets none aside for values and for weighted rows. With
        fewer rows of classes, weighted or not, each row is predicted by a model of the others
        instead, for the solvers "direct", "block" and "falkon"; not with copies, random transforms,
        class_sampling, several ranks, or more Fourier features than rows.
    """

    table = "run"
    run_dir: OptionalUrl = None
    precision: Literal["auto", "exact", "high", "fast", "integer", "float64"] = "auto"
    device: Device = "auto"
    accelerator: Literal["auto", "numba", "none"] = "auto"
    memory: MemorySetting = "auto"
    device_memory: MemorySetting = "auto"
    threads: AutoCount = "auto"
    ranks: RanksSetting = 1
    min_ranks: Count = 1
    center_ranks: Count = 1
    cluster: SchedulerSetting = None
    random_state: SeedSetting = 0
    checkpoint_every: Cadence = "auto"
    keep_checkpoints: Count = 3
    evaluate_every: AutoStep = "auto"
    evaluate_at: CountsSetting = ()
    log: Flag = True
    tensorboard: FolderSetting = None
    mlflow: OptionalUrl = None
    early_stopping: Flag = False
    validation_fraction: ShareSetting = 0.1
    n_iter_no_change: Count = 5
    calibrate: AutoFlag = "auto"

    @property
    def n_ranks(self) -> int:
        """`ranks` as a number, after `over_ranks.with_rank_count` has replaced "gpus"."""
        assert isinstance(self.ranks, int), "ranks have not been counted"
        return self.ranks

    @property
    def checkpoint_cadence(self) -> CheckpointInterval:
        """`checkpoint_every` as steps or seconds."""
        every = self.checkpoint_every
        if isinstance(every, int):
            return CheckpointInterval(every, None)
        return CheckpointInterval(None, None if every == "auto" else parse_seconds(every))


WITHOUT_INTERCEPT: Final = ("auto", "block", "sgd")
"""Values of solver.name with which a loss with a log link needs no intercept.

The others take many epochs from f = 0 to the logarithm of the mean, or lose the way to it.
"""


class RunConfig(Table):
    """All settings of a run, in four sections.

    It is made from the sections, from nested tables (`from_tables`), or from a run file
    (`load_run_file`).
    """

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    solver: SolverConfig = SolverConfig()
    run: ExecutionConfig = ExecutionConfig()

    @model_validator(mode="after")
    def _check_features(self) -> RunConfig:
        """Require a solver that trains the features."""
        check_solver_features(self.solver.name, self.model.features)
        return self

    @model_validator(mode="after")
    def _check_loss(self) -> RunConfig:
        """Require settings with which the loss can be minimised."""
        loss, obstacles = self.model.loss, []
        log_link = loss != SQUARES and loss_class(loss).log_link
        obstacles += [mention("solver.posterior", True)] if self.solver.posterior else []
        if log_link and self.solver.name not in WITHOUT_INTERCEPT and not self.model.fit_intercept:
            obstacles.append(f"{mention('solver.name', self.solver.name)} and no intercept")
        if log_link and self.solver.name == "falkon" and self.data.epochs in (1, 2):
            # FALKON first measures the gradient, then a direction, and then steps.
            obstacles.append(
                f"{mention('solver.name', 'falkon')}, whose first two epochs take no step, and "
                f"{mention('data.epochs', self.data.epochs)}"
            )
        if loss != SQUARES and obstacles:
            raise ConfigError(
                f"{mention('model.loss', loss)} cannot be minimised with {obstacles[0]}",
                f"leave one of them out, or give {mention('model.loss', SQUARES)}",
            )
        return self

    @classmethod
    def from_tables(cls, tables: Mapping[str, Any]) -> RunConfig:
        """Return the configuration from nested tables: section -> setting -> value.

        Raises ConfigError for an unknown or wrong setting.
        """
        return cls(**{str(key): value for key, value in tables.items()})

    def with_overrides(self, overrides: Mapping[str, Any]) -> RunConfig:
        """Return a checked copy with some settings replaced, such as `{"solver.name": "block"}`.

        Raises ConfigError for an unknown or wrong setting.
        """
        tables: dict[str, Any] = {name: dict(table) for name, table in self}
        for key, value in overrides.items():
            section, _, field = key.partition(".")
            if section not in tables or not field:
                raise ConfigError(unknown_key_text(RunConfig, key if not field else section))
            tables[section][field] = value
        return RunConfig(**tables)

    def identity(self) -> dict[str, dict[str, Any]]:
        """Return, as JSON values, the settings that must not change when a run is resumed."""
        left_out = FREE_AT_RESUME | (
            frozenset() if self.run.early_stopping else VALIDATION_SETTINGS
        )

        def is_recorded(path: str, value: Any) -> bool:
            is_neutral = path in NEUTRAL_VALUES and value == NEUTRAL_VALUES[path]
            return value is not None and path not in left_out and not is_neutral

        return {
            name: {k: v for k, v in table.items() if is_recorded(f"{name}.{k}", v)}
            for name, table in self.model_dump(mode="json").items()
        }


def as_config(config: Any) -> RunConfig:
    """Return the configuration of any form that users pass.

    config : a `RunConfig`, nested tables, or the path of a run file

    Raises ConfigError for anything else, and for an unknown or wrong setting.
    """
    if isinstance(config, RunConfig):
        return config
    if isinstance(config, str | os.PathLike):
        return load_run_file(config)
    if isinstance(config, Mapping):
        return RunConfig.from_tables(config)
    raise ConfigError(
        f"{mention('config', config)} must be a RunConfig, the path of a run file, or the tables "
        f"of one",
        f"to give data, set {mention('data.train')}, or pass source=",
    )


def load_run_file(path: str | os.PathLike[str]) -> RunConfig:
    """Return the configuration in a TOML run file.

    Raises ConfigError, which names the file and the key, if it cannot be read or has a mistake.
    """
    path, text = Path(path), ""
    try:
        with path.open("rb") as file:  # limited, in case it is a large file of data
            text = file.read(TOML_BYTES + 1).decode(errors="strict")
        tables = parse_toml(text)
    except OSError as error:
        raise ConfigError(
            f"run file {str(path)!r} cannot be read ({error.strerror})",
            "give the path of a TOML file",
        ) from None
    except ValueError as error:  # TOML syntax or text that is not UTF-8
        remedy = f"correct it there{suggest_correction(text, str(error))}"
        if path.suffix.lower() != ".toml":
            remedy += ", or give a run file, in which train under [data] names the store"
        raise ConfigError(f"run file {str(path)!r} is not valid TOML ({error})", remedy) from None
    try:
        return RunConfig.from_tables(tables)
    except ConfigError as error:
        raise ConfigError(f"run file {str(path)!r}: {error.message}") from None
