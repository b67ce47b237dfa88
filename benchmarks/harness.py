"""Shared parts of the benchmarks: timing in turns, figures and floors, the machine, synthetic data.

A subject is a module with `REPEATS`, `SMALL` (sizes for a run of a second or two) and
`measure(repeats, **sizes)`, which returns figures. A figure is a dictionary:

    case, variant           the measured work, and the implementation
    unit                    of `median`, `low`, `high` (quartiles), `min`, `max`, `floor`
    repeats                 measurements behind the median
    floor                   the shortest possible time of the work on this machine, in `unit`
    fraction                reached share of the floor; 1 is the floor itself
    ratio                   speed divided by the best of the other libraries; above 1 is faster

`floor`, `fraction` and `ratio` are None if there is nothing to compare with. Machines are shared
and their speed drifts. Therefore all compared variants, and the ceiling (SGEMM), take turns in one
process.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info

import streamkern as sk
from streamkern.backend.base import Backend
from streamkern.backend.devices import get_backend
from streamkern.basics.machine import available_cpus, available_memory

_LINE = 240  # characters of a line of results
SCHEMA = 1
C, SGEMM_SIZE = 10, 4096
# The workers of OpenMP spin for some ms after a call; those of OpenBLAS see `benchmarks/__init__`.
QUIET_S = 0.01
LIBRARIES = ("numpy", "scipy", "zarr", "dask", "numba", "llvmlite", "torch", "threadpoolctl")
REPOSITORY = Path(__file__).parent.parent

Figure = dict[str, Any]


class WrongResult(Exception):
    """A timed function returned a wrong result."""


def check(is_right: bool, description: str) -> None:
    """Stop the subject if a result is wrong."""
    if not is_right:
        raise WrongResult(f"{description} is wrong")


# ------------------------------------------------------------------------------------ timing


def in_turns(
    calls: Mapping[str, Callable[[], object]], repeats: int, *, warm_up: bool = True
) -> dict[str, list[float]]:
    """Return the seconds of each of `repeats` calls, by name.

    Every round begins with another call, and every other one runs backwards, so that none always
    follows the same one. warm_up : call each once before, uncounted.
    """
    names = list(calls)
    if warm_up:
        for call in calls.values():
            call()
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(repeats):
        first = i % len(names)
        order = names[first:] + names[:first]
        for name in order if i % 2 == 0 else reversed(order):
            time.sleep(QUIET_S)
            began = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - began)
    return times


def figure(
    case: str, variant: str, unit: str, values: Iterable[float], *, floor: float | None = None,
    **more: Any,
) -> Figure:  # fmt: skip
    """Median and spread of `values`. A unit that ends in "/s" is better when higher."""
    sample = np.array(list(values), float)
    low, median, high = np.percentile(sample, (25, 50, 75)).tolist()
    share_of_floor = None
    if floor is not None:
        share_of_floor = median / floor if unit.endswith("/s") else floor / median
    return {
        "case": case, "variant": variant, "unit": unit, "median": median, "low": low,
        "high": high, "min": float(sample.min()), "max": float(sample.max()),
        "repeats": len(sample), "floor": floor, "fraction": share_of_floor, "ratio": None, **more,
    }  # fmt: skip


def rates(work: float, seconds: Iterable[float]) -> list[float]:
    """Return `work` divided by each time."""
    return [work / s for s in seconds]


def compare(figures: Sequence[Figure], ours: Iterable[str]) -> None:
    """Set `ratio` of our variants of one case to their advantage over the best of the others."""
    ours = set(ours)
    others = [f["median"] for f in figures if f["variant"] not in ours]
    for f in figures:
        if f["variant"] in ours and others:
            higher = f["unit"].endswith("/s")
            f["ratio"] = f["median"] / max(others) if higher else min(others) / f["median"]


class Sgemm:
    """One square float32 product on all threads of NumPy's BLAS: the ceiling of most of the rest.

    Call it between the things that it is the ceiling of.
    """

    def __init__(self, n: int = SGEMM_SIZE) -> None:
        rng = np.random.default_rng(0)
        self.A, self.B = (rng.standard_normal((n, n), dtype=np.float32) for _ in range(2))
        self.out = np.empty((n, n), np.float32)
        self.flops = 2 * n**3

    def __call__(self) -> None:
        np.matmul(self.A, self.B, out=self.out)

    def speed(self, seconds: Sequence[float]) -> float:
        """Return the FLOP/s, as the median over the calls."""
        return self.flops / float(np.median(seconds))


# ---------------------------------------------------------------------------- what is compared


def our_backends() -> dict[str, Backend]:
    """Ours by name: the default one, and NumPy alone where the default is accelerated."""
    backends = {"streamkern": get_backend("cpu")}
    if backends["streamkern"].describe().get("accelerator", "none") != "none":
        backends["streamkern, NumPy"] = get_backend("cpu", accelerator="none")
    return backends


def installed(name: str) -> ModuleType | None:
    """Import a module; return None if it is missing. PyTorch gets as many threads as there are
    processors."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        return None
    if name == "torch":
        module.set_num_threads(available_cpus())
    return module


def points(rows: int, d: int, seed: int) -> np.ndarray:
    """Return rows of shape (rows, d), float32: a signal of rank 40 plus noise, with distances
    spread as in real data."""
    basis = np.random.default_rng(7).standard_normal((40, d)).astype(np.float32) / 6
    rng = np.random.default_rng(seed)
    latent = rng.standard_normal((rows, 40), dtype=np.float32)
    return latent @ basis + 0.3 * rng.standard_normal((rows, d), dtype=np.float32)


def bandwidth(d: int) -> float:
    """Return a bandwidth for `points`, with kernel values neither near 0 nor near 1."""
    return float(np.sqrt(d) / 2)


def one_hot(X: np.ndarray) -> np.ndarray:
    """Return one-hot targets (rows, C) that depend on X."""
    return np.eye(C, dtype=np.float32)[np.abs(X[:, :C]).argmax(axis=1)]


# ------------------------------------------------------------------------------- circumstances


def environment() -> dict[str, Any]:
    """Return the conditions of a measurement: machine, libraries, revision, time."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _cpu_model(),
            "architecture": platform.machine(),
            "cores": os.cpu_count(),
            "cores_usable": available_cpus(),
            "load": [round(x, 2) for x in os.getloadavg()],
            "memory_gib": round(
                os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1
            ),
            "memory_available_gib": round(available_memory() / 2**30, 1),
        },
        "versions": {
            "python": platform.python_version(),
            "streamkern": sk.__version__,
            **{name: _version(name) for name in LIBRARIES},
            "openblas_thread_timeout": os.environ.get("OPENBLAS_THREAD_TIMEOUT"),
            "blas": sorted({f"{i['internal_api']} {i['version']}" for i in threadpool_info()}),
        },
        "revision": _revision(),
    }


def json_parser(doc: str | None, prog: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with `--json`, whose help is the docstring of a module as it is written."""
    parser = argparse.ArgumentParser(
        prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results there")
    return parser


def tables_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with `--json` and folders of tables, for `tables_in`."""
    parser = json_parser(doc)
    parser.add_argument("folders", nargs="+", type=Path)
    return parser


def tables_in(folders: Iterable[Path], task: str | None = None) -> list[Path]:
    """Return the files NAME.npz of all folders in order, of one task or of both.

    task : "classification" for all that have another word than "regression", or "regression"
    """
    paths = sorted(path for folder in folders for path in folder.glob("*.npz"))
    if task is None:
        return paths
    values = task == "regression"
    return [p for p in paths if (str(np.load(p)["task"]) == "regression") == values]


def told_and_kept(records: Iterable[Figure], path: Path | None) -> list[Figure]:
    """Print each record when it is measured, and write all of them with their environment to
    `path`."""
    found, here = [], environment()
    for record in records:
        found.append(record)
        print(json.dumps(record), flush=True)
        write_results(path, {"environment": here, "records": found})
    return found


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _revision() -> dict[str, Any]:
    """Return the commit, and whether the files differ from it; both are None outside a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(REPOSITORY), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}


def write_results(path: Path | None, record: Any) -> None:
    """Write a record as JSON, with each entry that fits on a line on one; None is no file."""
    if path is not None:
        path.write_text("\n".join(_json_lines(record, 0)) + "\n")


def _json_lines(value: Any, depth: int) -> list[str]:
    line = json.dumps(value)
    small = len(line) <= _LINE - depth or not isinstance(value, dict | list)
    if small or (isinstance(value, list) and all(not isinstance(k, dict | list) for k in value)):
        return [line]
    named = isinstance(value, dict)
    entries = [(f"{json.dumps(k)}: ", v) for k, v in value.items()] if named else (
        [("", v) for v in value])  # fmt: skip
    lines = []
    for head, entry in entries:
        first, *others = [json.dumps(entry)] if not (named or _is_long(entry)) else (
            _json_lines(entry, depth + 1))  # fmt: skip
        lines += [f"{' ' * (depth + 1)}{head}{first}", *others]
        lines[-1] += ","
    lines[-1] = lines[-1][:-1]
    ends = "{}" if named else "[]"
    return [ends[0], *lines, " " * depth + ends[1]]


def _is_long(entry: Any) -> bool:
    """Return whether an entry of a list holds a table or a list that needs lines of its own."""
    values = entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ()
    return any(isinstance(v, dict | list) and len(json.dumps(v)) > _LINE for v in values)
