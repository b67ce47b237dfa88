"""The options that define a run: a run file, and settings that override it."""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Any

import typer

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.text import redact
from streamkern.basics.values import parse_bytes
from streamkern.cli.options import StorageOption, number_or_text, parse_options, toml_or_text
from streamkern.config.run_config import RunConfig, load_run_file
from streamkern.config.solver import SOLVERS
from streamkern.filesystem.path_kinds import content_kind
from streamkern.ingest.input_files import format_by_ending

RunFileArgument = Annotated[
    str | None, typer.Argument(metavar="RUN.toml", help="Read the settings from this run file.")
]
TrainOption = Annotated[str | None, typer.Option("--train", help="Train on this store.")]
TestOption = Annotated[str | None, typer.Option("--test", help="Evaluate the model on this store.")]
RunDirOption = Annotated[str | None, typer.Option("--run-dir", help="Save the run in this folder.")]
SolverOption = Annotated[
    str | None, typer.Option("--solver", help=f"Train with this solver: {', '.join(SOLVERS)}.")
]
MemoryOption = Annotated[
    str | None, typer.Option("--memory", help='Use at most this much memory, such as "8 GiB".')
]
EpochsOption = Annotated[
    str | None,
    typer.Option(
        "--epochs", metavar="N", help="Pass over the data this many times.  [default: auto]"
    ),
]
ScaleOption = Annotated[
    str | None,
    typer.Option(
        "--scale",
        help="Standardise each feature (feature), also add quantile scores (quantiles), "
        "standardise all features together (global), or change nothing (none).",
    ),
]
PatchOption = Annotated[
    int | None,
    typer.Option(
        "--patch-features",
        metavar="N",
        help="Replace the pixels of images by features of this many patches, such as 512.",
    ),
]
SchedulerOption = Annotated[
    str | None,
    typer.Option("--dask", metavar="tcp://HOST:PORT", help="Read data on this Dask cluster."),
]
RanksOption = Annotated[
    str | None,
    typer.Option(
        "--ranks",
        metavar="N",
        help='Train in this many processes; "gpus" means one process for each GPU.  [default: 1]',
    ),
]
MinRanksOption = Annotated[
    int | None,
    typer.Option(
        "--min-ranks",
        help="Also run with fewer processes than --ranks, but with at least this many.",
    ),
]
CenterRanksOption = Annotated[
    int | None,
    typer.Option(
        "--center-ranks",
        help="Partition the centers over this many of the processes.  [default: 1]",
    ),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster", metavar="tcp://HOST:PORT", help="Run the processes on this Dask cluster."
    ),
]
CacheFolderOption = Annotated[
    str | None,
    typer.Option("--cache", metavar="FOLDER", help="Cache remote stores in this folder."),
]
CacheSizeOption = Annotated[
    str | None,
    typer.Option(
        "--cache-size", help="Limit the cache to this size.  [default: half of the free disk]"
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.KEY=VALUE", help="Give any setting of a run file; repeatable."
    ),
]


def config_from_options(
    run_file: RunFileArgument = None,
    train: TrainOption = None,
    test: TestOption = None,
    run_dir: RunDirOption = None,
    solver: SolverOption = None,
    memory: MemoryOption = None,
    epochs: EpochsOption = None,
    scale: ScaleOption = None,
    patch_features: PatchOption = None,
    dask: SchedulerOption = None,
    ranks: RanksOption = None,
    min_ranks: MinRanksOption = None,
    center_ranks: CenterRanksOption = None,
    cluster: ClusterOption = None,
    cache: CacheFolderOption = None,
    cache_size: CacheSizeOption = None,
    settings: SetOption = None,
    storage_option: StorageOption = None,
) -> RunConfig:
    """Return the settings of the run file with the values of the options.

    Raises ConfigError if there is no training data, or if the run file is a store, a run or data.
    """
    size = memory if memory in (None, "auto") else parse_bytes(memory, "memory")
    options: dict[str, Any] = {
        "data.train": train, "data.test": test,
        "data.epochs": None if epochs is None else number_or_text(epochs),
        "data.scale": scale, "model.patch_features": patch_features, "data.dask": dask,
        "data.cache": cache, "solver.name": solver, "run.run_dir": run_dir,
        "run.ranks": None if ranks is None else number_or_text(ranks), "run.min_ranks": min_ranks,
        "run.center_ranks": center_ranks, "run.cluster": cluster,
        "run.memory": size, "run.device_memory": size,  # one budget, for the host or the device
        "data.cache_size": cache_size,
    }  # fmt: skip
    changes = {path: value for path, value in options.items() if value is not None}
    changes |= dict(parse_setting(text) for text in settings or ())
    if run_file is not None:
        _refuse_data(run_file)
        config = load_run_file(run_file)
    elif "data.train" in changes:
        config = RunConfig.from_tables({"data": {"train": changes["data.train"]}})
    else:
        raise ConfigError("there is no training data", "give a run file, or --train URL")
    if storage_option:
        changes["data.storage_options"] = {
            **config.data.storage_options,
            **parse_options(storage_option),
        }
    config = config.with_overrides(changes)
    if config.data.train is None:
        raise ConfigError(
            f"run file {str(run_file)!r}: {mention('data.train')} is missing: it must be a path or "
            "URL, or a list of them",
            "set it in [data], or give --train URL",
        )
    return config


def _refuse_data(run_file: str) -> None:
    """Raise ConfigError if the run file is a store, a run or a file of data."""
    kind = content_kind(run_file)
    if kind in ("store", "remote"):
        problem, remedy = "is a store, not a run file", f"give it as --train {redact(run_file)}"
    elif kind == "run":
        problem = "is a run directory, not a run file"
        remedy = f"give the run file or the --train store of the run, and --run-dir {run_file}"
    elif (
        kind in ("file", "archive")
        and not run_file.lower().endswith(".toml")
        and (kind == "archive" or format_by_ending(run_file) is not None)
    ):
        store = f"{PurePath(run_file).name.partition('.')[0]}.zarr"
        problem = "is a file of data, not a run file"
        remedy = (
            f"make a store of it with streamkern ingest {run_file} {store} --y NAME (the column or "
            f"array of the targets), and give --train {store}"
        )
    else:
        return
    raise ConfigError(f"{redact(run_file)!r} {problem}", remedy)


def parse_setting(text: str) -> tuple[str, Any]:
    """Return ("solver.level", 100) for "solver.level=100"; a value that is not TOML is text.

    Raises ConfigError without an equals sign.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(
            f"--set {text!r} must be SECTION.KEY=VALUE, such as {mention('solver.level', 100)}"
        )
    return key.strip(), toml_or_text(value)
