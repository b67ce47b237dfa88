"""Small runs: a problem of a few steps, its settings, and the contents of its run directory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from streamkern.basics.errors import StreamkernError, TrainingInterrupted
from streamkern.config.run_config import RunConfig
from streamkern.rundir.checkpoint_format import SavedGroup, load_checkpoint
from streamkern.rundir.run_directory import RunDirectory
from streamkern.rundir.run_storage import open_folder
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.base import Source
from streamkern.stream.sources.transforms import GaussianNoise
from streamkern.train.loop import guard
from streamkern.train.resolve.resolved_run import ResolvedRun, open_run
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.train import Result, train
from streamkern.tuning.search import Tuned
from tests import reference as ref

Array = npt.NDArray[Any]
Run = Callable[..., tuple[int, str, str]]  # of the fixture `run`
Printed = Callable[..., str]  # of the fixture `printed`

# 7 batches of 20 rows an epoch, the last one short; units of 16 rows, so that batches straddle.
N, D, C, P, M = 135, 5, 3, 60, 20
STEPS = 14
N_TEST = 103  # rows of `arrays(N_TEST, 5)`, which no run has seen
CLASSES = ("ant", "bee", "cat")


def _solver(name: str, **own: Any) -> dict[str, Any]:
    """Return settings of a solver, dotted."""
    return {"solver.name": name} | {f"solver.{key}": value for key, value in own.items()}


LOG_LOSS = {"model.loss": "log_loss"}
ALL_CENTERS = {"model.n_centers": "auto"}
NYSTROM = {"model.features": "nystrom"}
FOURIER = ALL_CENTERS | {
    "model.features": "fourier", "model.kernel": "gaussian", "model.n_features": 80,
}  # fmt: skip
BLOCKS = _solver("block", block_size=25, ridge="auto")
EIGENPRO4 = _solver("eigenpro4", n_nystrom=80, period=3)
EIGENPRO1 = _solver("eigenpro1", n_nystrom=60, level=10)
METHODS: dict[str, dict[str, Any]] = {
    "block": _solver("block", block_size=P),
    "blocks": BLOCKS,
    "block, ridge": _solver("block", block_size=P, ridge=1e-3),
    "blocks, ridge": _solver("block", block_size=25, ridge=1e-3),
    "blocks, log loss": BLOCKS | LOG_LOSS,
    "sgd, log loss": _solver("sgd") | ALL_CENTERS | LOG_LOSS,
    "eigenpro4, log loss": EIGENPRO4 | LOG_LOSS,
    "eigenpro3": _solver("eigenpro3", n_nystrom=80),
    "eigenpro4, resident": _solver("eigenpro4", n_nystrom=80, period=4, projection="resident"),
    "eigenpro4": EIGENPRO4,
    "eigenpro4, inexact": _solver("eigenpro4", n_nystrom=80, period=4, projection="inexact"),
    "eigenpro3, inexact": _solver(
        "eigenpro3", n_nystrom=80, projection="inexact", projection_epochs=2, projection_batch=7
    ),
    "direct": _solver("direct", ridge=0.0),
    "direct, log loss": _solver("direct", ridge=1e-3) | LOG_LOSS,
    "falkon": _solver("falkon", ridge=1e-3),
    "falkon, log loss": _solver("falkon", ridge=1e-3) | LOG_LOSS,
    **{name: _solver(name) | ALL_CENTERS for name in ("sgd", "eigenpro1", "eigenpro2")},
    "nystrom": _solver("sgd") | NYSTROM,
    "block, nystrom": _solver("block") | NYSTROM,
    "direct, nystrom": _solver("direct") | NYSTROM,
    "eigenpro1, nystrom": EIGENPRO1 | NYSTROM,
    "fourier": FOURIER | EIGENPRO1,
    **{f"{k}, fourier": FOURIER | _solver(k, ridge=1e-3) for k in ("block", "direct", "sgd")},
}


def arrays(n: int = N, seed: int = 0) -> tuple[Array, Array]:
    """Return X (n, D) float32 and class ids y (n,)."""
    X = np.random.default_rng([seed, 9]).standard_normal((n, D)).astype(np.float32)
    return X, np.abs(X[:, :C]).argmax(axis=1)


def array_source(n: int = N, seed: int = 0, unit_rows: int = 16, **options: Any) -> ArraySource:
    """Return the source of the rows of `arrays`."""
    return ArraySource(*arrays(n, seed), classes=CLASSES, unit_rows=unit_rows, **options)


def stream(method: str = "block") -> Source:
    """Return the training rows, with noise if the method allows it."""
    if method in ("sgd", "sgd, log loss", "eigenpro1", "eigenpro2"):
        return array_source()
    return AugmentedSource(array_source(), 1, [GaussianNoise(0.1)])


def settings(run_dir: Path | None = None, **overrides: Any) -> RunConfig:
    """Return the settings of a run; overrides are dotted: ``**{"solver.name": "block"}``."""
    tables: dict[str, dict[str, Any]] = {
        "data": {"batch_size": M, "epochs": 2, "scale": "none"},
        "model": {"kernel": "laplace", "bandwidth": 3.0, "n_centers": P},
        # "auto" is the one that is there sooner, which for so few rows is one without steps. To
        # find a ridge takes as long as all the rest of such a run.
        "solver": {"name": "block", "ridge": 0.0},
        "run": {
            "device": "cpu",
            "threads": 1,
            "memory": "1 GiB",
            "checkpoint_every": 1000,
            "evaluate_every": 0,
        },
    }
    if run_dir is not None:
        tables["run"]["run_dir"] = str(run_dir)
    config = RunConfig.from_tables(tables)
    return config.with_overrides(overrides) if overrides else config


def open_settings(run_dir: Path | None = None, **overrides: Any) -> RunConfig:
    """Return the settings of a run with kernel, bandwidth, metric and scale of the targets
    "auto"."""
    options: dict[str, Any] = {
        "data.batch_size": 50, "data.epochs": 2, "run.device": "cpu", "run.threads": 1,
        "run.checkpoint_every": 1000, "solver.name": "block",
    }  # fmt: skip
    where = {} if run_dir is None else {"run.run_dir": str(run_dir)}
    return RunConfig().with_overrides(options | where | overrides)


def finished(config: RunConfig, **options: Any) -> Result:
    """Train and close the backend, which on one thread can still be used."""
    result = train(config, **options)
    result.model.backend.close()
    return result


def stopped(config: RunConfig, step: int, **options: Any) -> None:
    """Train until SIGTERM arrives after `step` steps."""

    def on_evaluation(record: dict[str, Any]) -> None:
        if record["step"] == step:
            signal.raise_signal(signal.SIGTERM)

    config = config.with_overrides({"run.evaluate_every": 1})
    options = {"test": array_source(10, 5)} | options
    with pytest.raises(TrainingInterrupted, match="run the same command again") as caught:
        finished(config, on_evaluation=on_evaluation, **options)
    assert caught.value.exit_code == 75


def newest(run: RunDirectory | Path | str) -> SavedGroup:
    """Return the newest checkpoint of a run."""
    directory = run if isinstance(run, RunDirectory) else RunDirectory(run, writable=False)
    saved = directory.load_latest()
    assert saved is not None
    return saved


def final(run_dir: Path) -> dict[str, Array]:
    """Return every array of the last checkpoint of a finished run."""
    saved = newest(run_dir)
    assert saved.skipped == ()
    assert saved.meta["position"]["done"]
    return saved.arrays


Checkpoint = tuple[dict[str, Array], dict[str, Any]]


def checkpoint(run_dir: Path, step: int) -> Checkpoint:
    """Return arrays and scalars of the state at `step`, without metrics."""
    saved = load_checkpoint(open_folder(run_dir), f"checkpoints/{step:012d}.json")
    return saved.arrays, {k: v for k, v in saved.meta.items() if k != "metrics"}


def assert_same_bits(actual: dict[str, Array], expected: dict[str, Array]) -> None:
    """Raise unless both hold the same arrays bit for bit."""
    found, desired = (
        {name: (a.dtype, a.shape, a.tobytes()) for name, a in arrays.items()}
        for arrays in (actual, expected)
    )
    assert found.keys() == desired.keys()
    assert not [name for name in desired if found[name] != desired[name]]


def assert_resume_gives_same_bits(
    folder: Path, steps: Sequence[int], overrides: dict[str, Any], source: Source, **options: Any
) -> Result:
    """Stop a run after these steps, and compare its end with an undisturbed run."""
    uninterrupted, parts = (settings(folder / name, **overrides) for name in ("whole", "parts"))
    finished(uninterrupted, source=source, **options)
    for step in steps:
        stopped(parts, step, source=source, test=source, **options)
    result = finished(parts, source=source, **options)
    assert_same_bits(final(folder / "parts"), final(folder / "whole"))
    return result


def latest_step(run_dir: Path) -> int:
    """Return the step of the last checkpoint; 0 if there is none."""
    with RunDirectory(run_dir, writable=False) as run:
        return max(run.steps(), default=0)


def brute_force(result: Result, X: Array, bandwidth: float = 3.0) -> Array:
    """Return f(X) in float64 from weights, mean, and centers (Laplace kernel) or frequencies."""
    weights, d = np.asarray(result.model.weights, np.float64), X.shape[1]
    mean, weights = result.model.targets.mean, weights * result.model.targets.scale
    if result.Z.shape[1] > d:  # random Fourier features: the last column are the phases
        omega, phase = np.float64(result.Z[:, :d]), np.float64(result.Z[:, d])
        features = np.sqrt(2 / len(omega)) * np.cos(np.float64(X) @ omega.T + phase)
        return np.asarray(mean + features @ weights)
    K = ref.laplace(np.float64(X), np.float64(result.Z), bandwidth)
    return np.asarray(mean + K @ weights)


# -- real processes ------------------------------------------------------------------------------


def _run_child(target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    try:
        target(*arguments)
    except StreamkernError as error:
        sys.exit(error.exit_code)


def process(target: Callable[..., None], *arguments: Any) -> Any:
    """Start `target` in a process of its own; it exits with the code the command line would.

    A server that has imported everything forks them: a fresh interpreter takes seconds to.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.runs"])
    child = context.Process(target=_run_child, args=(target, arguments))
    child.start()
    return child


def shorten_windows(setattr_: Callable[..., None] = setattr) -> None:
    """Use windows of the guard that end inside short runs, and skip syncs to the disk."""
    setattr_(guard, "WINDOW", 4)
    setattr_(os, "fsync", lambda fd: None)


def train_to_end(config: RunConfig, method: str = "block") -> None:
    """Train a run to its end, in a process of its own."""
    shorten_windows()
    train(config, source=stream(method), test=array_source(10, 5))


def opened(
    source: Source | None = None, centers: Array | None = None, **overrides: Any
) -> ResolvedRun:
    """Return a run that is resolved and has not started."""
    given = RunInputs(stream() if source is None else source, centers=centers)
    if centers is not None:
        overrides["model.n_centers"] = len(centers)
    run = open_run(settings(**overrides), given)
    run.backend.close()
    return run


def lost(*args: Any) -> None:
    """Raise an error in place of `StepLoop.take`."""
    raise ValueError("the process is gone")


def without_times(found: Tuned) -> list[dict[str, Any]]:
    """Return the table of a search without the seconds, which no two searches share."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in found.table]


def hide_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an import of this package fail, as where it is not installed."""
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
