"""Test the sentences about the differences of two runs and of their environments."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern.basics.errors import TrainingInterrupted
from streamkern.basics.stop import StopRequest
from streamkern.cli.run_info import run_overview, run_text
from streamkern.config.run_config import RunConfig
from streamkern.ingest.ingest import ingest
from streamkern.rundir.run_directory import RunDirectory
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.mixture import MixtureSource
from streamkern.stream.sources.transforms import GaussianNoise, Scale
from streamkern.train.differences import backend_changes, record_differences
from streamkern.train.loop import rank_coordinator
from streamkern.train.rank_work import prepare_run, train_rank
from streamkern.train.run_identity import run_record
from tests.rank_runs import stop_rank0_after
from tests.rank_threads import on_threads
from tests.runs import array_source, arrays, opened


def identity(source: Any = None, **changes: Any) -> dict[str, Any]:
    """Return the identity of a run of a source, with given centers or other settings."""
    centers = {} if "centers" not in changes else {"centers": changes.pop("centers")}
    run = opened(array_source() if source is None else source, **centers, **changes)
    actual: dict[str, Any] = run_record(run)["identity"]
    return actual


X = arrays()[0]
NOISE = AugmentedSource(array_source(), 1, [GaussianNoise(0.1)])
CHANGES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "other targets": (array_source(seed=3), {}, "data: other rows or targets"),
    "fewer rows": (array_source(130), {}, "data.n_rows: was 135, now 130"),
    "noise": (NOISE, {}, "data.transforms: was .*now .*noise"),
    "copies": (AugmentedSource(array_source(), 2), {}, "data.n_rows: was 135, now 270"),
    "no scaling": (None, {"data.scale": "feature"}, "data.scale: was 'none', now 'feat"),
    "a scaling": (
        array_source(transforms=[Scale("feature", mean=np.ones(5), scale=np.ones(5))]),
        {"data.scale": "auto"},
        "data.scale: was 'none'",
    ),
    "a mixture": (MixtureSource([array_source(), array_source(seed=3)]), {}, "data: other rows"),
    "centers": (None, {"centers": X[:7]}, "model.centers: was 'random', now an array of shape"),
    "kernel": (
        None,
        {"model.kernel": {"kind": "sum", "parts": [{"kind": "laplace"}, {"kind": "gaussian"}]}},
        r"model.kernel: was 'laplace', now laplace \+ gaussian",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_differences_show_no_tables_digests_or_equal_settings(case: str) -> None:
    source, changes, pattern = CHANGES[case]
    plain, other = identity(), identity(source, **changes)
    assert record_differences(plain, plain) == record_differences(other, other) == []
    for differences in (record_differences(plain, other), record_differences(other, plain)):
        assert differences, case
        assert not re.search(r"[{}]|[0-9a-f]{16}|base", "; ".join(differences)), differences
    differences = record_differences(plain, other)
    assert re.search(pattern, "; ".join(differences)), differences


def test_changed_transforms_are_not_reported_as_other_rows() -> None:
    assert not any("other rows" in text for text in record_differences(identity(), identity(NOISE)))


def test_many_classes_are_abbreviated() -> None:
    old: dict[str, Any] = {
        "data": {"kind": "array", "n_rows": 3, "classes": [f"class {k}" for k in range(1000)]}
    }
    new: dict[str, Any] = {"data": {"kind": "array", "n_rows": 3, "classes": ["a", "b"]}}
    (text,) = record_differences(old, new)
    assert text.startswith("data.classes: was ['class 0', 'class 1'")
    assert len(text) < 150


def test_added_or_removed_setting_is_a_difference() -> None:
    old, new = {"solver": {"a": 1, "b": None}}, {"solver": {"b": None, "c": 2}}
    assert record_differences(old, new) == [
        "solver.a: was 1, now not set",
        "solver.c: was not set, now 2",
    ]


ENVIRONMENT: dict[str, Any] = {
    "device": "cpu", "numpy": "2.1", "blas": ["openblas 0.3 on 2 threads"],
}  # fmt: skip


def test_additional_loaded_libraries_are_ignored() -> None:
    """Check a run that begins without scikit-learn's OpenMP and is resumed with it."""
    with_openmp = ENVIRONMENT | {"blas": [*ENVIRONMENT["blas"], "openmp None  on 2 threads"]}
    assert backend_changes(ENVIRONMENT, with_openmp) == []
    assert backend_changes(with_openmp, ENVIRONMENT) == []


def test_other_blas_and_device_are_reported() -> None:
    (change,) = backend_changes(ENVIRONMENT, ENVIRONMENT | {"blas": ["mkl 2025 on 2 threads"]})
    assert "openblas 0.3 on 2 threads" in change
    assert "mkl 2025" in change
    on_gpu = ENVIRONMENT | {"device": "gpu"}
    assert backend_changes(ENVIRONMENT, on_gpu) == ["device: was 'cpu', now 'gpu'"]


def train_over_ranks(config: RunConfig) -> None:
    """Train by the number of ranks in the settings."""
    prepare_run(config)
    on_threads(
        config.run.n_ranks,
        lambda ranks: train_rank(config, ranks, StopRequest(install=False)),
    )


@pytest.mark.usefixtures("one_blas_thread")
def test_changed_rank_grid_is_reported_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_coordinator, "GATHER_INTERVAL_STEPS", 2)
    stop_rank0_after(2, monkeypatch)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 3)).astype(np.float32)
    store, path = str(tmp_path / "store.zarr"), tmp_path / "run"
    ingest(X, store, y=np.sin(X[:, 0]), chunk_mb=0.001)
    options = {
        "data.train": store, "data.epochs": 9, "run.run_dir": str(path), "run.threads": 1,
        "run.accelerator": "none", "run.precision": "float64", "model.n_centers": 40,
        "model.kernel": "laplace", "model.bandwidth": 2.0, "solver.block_size": 20,
        "solver.name": "block", "data.batch_size": 60, "solver.ridge": 1e-5,
        "run.checkpoint_every": 1, "run.calibrate": False,
    }  # fmt: skip
    # Ranks and center ranks of the first call, and of two calls that resume it.
    grids = [(2, 1), (2, 2), (2, 2)]
    configs = [
        RunConfig().with_overrides(options | {"run.ranks": r, "run.center_ranks": c})
        for r, c in grids
    ]
    with pytest.raises(TrainingInterrupted):
        train_over_ranks(configs[0])
    message = "center_ranks: was 1, now 2"
    pattern = f"^resumed with other ranks: {message}; same to rounding"
    with pytest.warns(UserWarning, match=pattern), pytest.raises(TrainingInterrupted):
        train_over_ranks(configs[1])
    with pytest.raises(TrainingInterrupted):
        train_over_ranks(configs[2])  # the same ranks as before; a warning would be an error
    records, _ = RunDirectory(path, writable=False).read_log()
    starts = [record for record in records if record["event"] in ("start", "resume")]
    assert [(record["ranks"], record["center_ranks"]) for record in starts[-3:]] == grids
    assert [record["what"] for record in records if record["event"] == "changed"] == [[message]]
    actual = run_overview(path)
    assert (actual["ranks"], actual["center_ranks"]) == (2, 2)
    step = next(record["step"] for record in records if record["event"] == "changed")
    assert actual["changed"] == [f"at step {step} {message}"]
    assert f"at step {step} {message}" in run_text(actual)
