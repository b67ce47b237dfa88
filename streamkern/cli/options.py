"""What the commands share: their options, and how the words of a command line become values."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from streamkern.basics.errors import ConfigError
from streamkern.config.rules import parse_bytes, parse_toml
from streamkern.config.run_config import RunConfig, load_run_file
from streamkern.config.solver import SOLVERS
from streamkern.filesystem.urls import local_path

RunFile = Annotated[str | None, typer.Argument(metavar="[RUN.toml]", help="Run file.")]
Train = Annotated[str | None, typer.Option("--train", help="Store to train on.")]
Test = Annotated[str | None, typer.Option("--test", help="Store to evaluate on.")]
RunDir = Annotated[str | None, typer.Option("--run-dir", help="Where the run is saved.")]
Solver = Annotated[
    str | None,
    typer.Option("--solver", help=f"One of {', '.join(SOLVERS)}."),
]
Memory = Annotated[str | None, typer.Option("--memory", help='Such as "8 GiB".')]
Epochs = Annotated[
    int | None, typer.Option("--epochs", help="Passes over the data.  [default: auto]")
]
Scaling = Annotated[
    str | None, typer.Option("--scale", help="Of features: auto, feature, global or none.")
]
Scheduler = Annotated[
    str | None, typer.Option("--dask", metavar="tcp://HOST:PORT", help="Cluster to read on.")
]
CacheFolder = Annotated[
    str | None, typer.Option("--cache", metavar="FOLDER", help="Keeps what remote stores gave.")
]
CacheSize = Annotated[
    str | None, typer.Option("--cache-size", help='Such as "20 GiB"; default: half the free disk.')
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any setting of a run file."),
]
StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        metavar="KEY=VALUE",
        help="For remote URLs, such as endpoint_url=http://host:9000; repeatable. Credentials "
        "belong in the environment.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Missing = Annotated[str, typer.Option(help="Absent parts of Zarr and HDF5: error or fill.")]
External = Annotated[bool, typer.Option("--external", help="Follow links of HDF5 to other files.")]
Foreign = Annotated[
    bool, typer.Option("--foreign", help="Take a store of streamkern's for somebody else's.")
]
XName = Annotated[str, typer.Option("--x", help="Name of the array of rows.")]
YName = Annotated[str, typer.Option("--y", help="Name of the array of targets.")]
DeviceName = Annotated[str, typer.Option("--device", help='"auto", "cpu", "gpu" or "gpu:N".')]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]

_TEXTS = ("key", "secret", "token", "password", "username")  # also where they look like numbers


def run_config(
    run_file: str | None,
    given: Mapping[str, Any],
    *,
    memory: str | None,
    cache_size: str | None,
    settings: Sequence[str] | None,
    storage_options: Sequence[str] | None,
) -> RunConfig:
    """The run file with what the command line puts over it; None in `given` is not given."""
    changes = {key: value for key, value in given.items() if value is not None}
    if memory is not None:  # the budget of wherever the run executes
        size = memory if memory == "auto" else parse_bytes(memory, "memory")
        changes |= {"run.memory": size, "run.device_memory": size}
    if cache_size is not None:
        changes["data.cache_size"] = cache_size
    changes |= dict(setting(text) for text in settings or ())
    if run_file is not None:
        config = load_run_file(run_file)
    elif "data.train" in changes:
        config = RunConfig.from_tables({"data": {"train": changes["data.train"]}})
    else:
        raise ConfigError("there is nothing to train on; give a run file, or --train URL")
    if storage_options:
        changes["data.storage_options"] = {
            **config.data.storage_options,
            **parse_options(storage_options),
        }
    return config.with_overrides(changes)


def setting(text: str) -> tuple[str, Any]:
    """("solver.level", 100) from "solver.level=100"; a value that is no TOML is text."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text!r} must be SECTION.KEY=VALUE, such as solver.level=100")
    return key.strip(), _toml_or_text(value)


def parse_options(texts: Sequence[str] | None) -> dict[str, Any]:
    """{"anon": True} from ["anon=true"]; no message shows what was given."""
    options = {}
    for number, text in enumerate(texts or (), start=1):
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"--storage-option number {number} must be KEY=VALUE")
        options[key] = value if key in _TEXTS else _toml_or_text(value)
    return options


def options_for(
    options: Mapping[str, Any], *places: str | os.PathLike[str]
) -> Mapping[str, Any] | None:
    """The storage options, if one of `places` is remote; a local path takes none."""
    return options if any(local_path(place) is None for place in places) else None


def parse_transform(text: str) -> dict[str, Any]:
    """{"kind": "noise", "sigma": 0.5} from '{kind = "noise", sigma = 0.5}'."""
    table = _toml_or_text(text)
    if not isinstance(table, dict):
        raise ConfigError(
            f"--transform {text!r} must be a table as in a run file, such as "
            "'{kind = \"noise\", sigma = 0.5}'"
        )
    return table


def parse_numbers(text: str, option: str) -> list[float]:
    """[3.0, 1.0] from "3,1"."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} {text!r} must be numbers with commas, such as 3,1") from None


def column_list(text: str) -> str | list[int | str]:
    """Columns as in the first line of a CSV, or one name."""
    columns = [number_or_text(name) for name in next(csv.reader([text]), [])]
    return columns if len(columns) > 1 or not isinstance(columns[0], str) else columns[0]


def number_or_text(text: str) -> int | str:
    """A column by its position, or by its name."""
    try:
        return int(text)
    except ValueError:
        return text


def _toml_or_text(value: str) -> Any:
    try:
        return parse_toml(f"value = {value}")["value"]
    except (ValueError, KeyError):
        return value.strip()
