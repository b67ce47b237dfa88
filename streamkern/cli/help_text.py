"""Additions to the `--help` of a command: the values that options take, and examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

EXAMPLES: Final[Mapping[str, tuple[str, ...]]] = {
    "ingest": (
        "streamkern ingest train.npz train.zarr",
        "streamkern ingest houses.csv houses.zarr --y price",
    ),
    "append": ("streamkern append train.zarr more.npz",),
    "augment": (
        "streamkern augment train.zarr more.zarr --copies 5 --transform "
        "'{kind = \"noise\", sigma = 0.1}'",
    ),
    "tune": (
        "streamkern tune --train train.zarr --write run.toml",
        "streamkern tune run.toml --metric accuracy --bandwidths 1,2,4",
    ),
    "plan": (
        "streamkern plan run.toml",
        'streamkern plan --train train.zarr --memory "2 GiB" --all --no-measure',
    ),
    "train": (
        "streamkern train --train train.zarr --test test.zarr --run-dir runs/first",
        "streamkern train run.toml --set model.n_centers=4000",
    ),
    "evaluate": ("streamkern evaluate runs/first test.npz",),
    "predict": (
        "streamkern predict runs/first test.npz predictions.csv",
        "streamkern predict runs/first houses.csv predictions.parquet --y price",
    ),
    "compress": (
        "streamkern compress runs/first new.csv runs/small",
        "streamkern compress runs/first test.zarr runs/small --n-centers 200",
    ),
    "export": ("streamkern export runs/first model.onnx", "streamkern export runs/first model.c"),
    "info": ("streamkern info train.zarr", "streamkern info runs/first --explain"),
    "runs": ("streamkern runs runs",),
    "report": ("streamkern report runs/first runs/second --out report.html",),
    "warmup": ("streamkern warmup --device gpu:1 --jobs 8",),
    "bench-read": ("streamkern bench-read s3://bucket/train.zarr --seconds 5",),
}

_METAVARS: Final = {
    "x": "COLUMNS", "y": "COLUMN", "sample_weight": "COLUMN", "targets": "auto|classes|values",
    "dtype": "DTYPE", "memory": "SIZE", "compress": "auto|zstd|none", "encode": "auto|none",
    "missing": "error|fill",
    "scratch": "FOLDER", "order": "source|store", "device": "auto|cpu|gpu|gpu:N",
    "train": "STORE", "test": "STORE", "run_dir": "FOLDER", "solver": "NAME",
    "scale": "auto|feature|quantiles|global|none", "cache_size": "SIZE", "weights": "W,W,...",
    "chunk_mb": "MIB", "seconds": "SECONDS",
}  # fmt: skip
_TYPE_METAVARS: Final = {"integer": "N", "int": "N", "float": "X", "text": "TEXT", "str": "TEXT"}


def with_usage(command: Any, name: str) -> Any:
    """Return the command, with value names for its options and examples at the end of its help."""
    lines = "\n".join(f"  {example}" for example in EXAMPLES[name])
    command.epilog = f"\b\nExamples:\n{lines}"
    for param in command.params:
        if param.param_type_name == "argument":  # its name is enough
            param.display_type_rich = lambda ctx: ""
        elif param.metavar is None and not param.is_flag:
            type_name = getattr(getattr(param, "type", None), "name", "")
            param.metavar = _METAVARS.get(param.name) or _TYPE_METAVARS.get(type_name, "N")
    return command
