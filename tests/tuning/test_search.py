"""Check the search of kernel, bandwidth and ridge: results, reads and resumes."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import cho_factor, cho_solve
from scipy.spatial.distance import cdist, pdist

import streamkern
from streamkern.basics.errors import (
    ConfigError,
    ResumeMismatchError,
    RunError,
    RunLockedError,
    StreamkernError,
    TrainingInterrupted,
)
from streamkern.basics.optional import install_command
from streamkern.basics.plots import png_bytes
from streamkern.basics.stop import Stopped, StopRequest
from streamkern.config.run_config import RunConfig, load_run_file
from streamkern.config.toml import run_file_text, toml
from streamkern.ingest.ingest import ingest
from streamkern.kernels import notation
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.train.resolve.training_data import open_data
from streamkern.train.train import train
from streamkern.tuning import plot, points, trainings
from streamkern.tuning.candidates import AUTO_RIDGES, Candidates, copies_and_epochs
from streamkern.tuning.holdout import draw_sample, part_of_rows
from streamkern.tuning.journal import JOURNAL_NAME
from streamkern.tuning.search import search_settings
from tests.runs import D, Run, array_source, hide_package, settings, without_times

Array = npt.NDArray[Any]
DONE, USAGE, TRY_AGAIN = 0, 2, 75
# Settings for a search that takes a second: 108 rows to fit, 27 held out, 3 trainings.
QUICK: dict[str, Any] = {"bandwidths": [1.0, 3.0, 9.0], "ridges": [0.0], "refine": 0, "epochs": 2}


def config(**overrides: Any) -> RunConfig:
    """Return the settings of a small run, whose bandwidth `QUICK` contains."""
    return settings(**{"solver.ridge": 0.0, "data.batch_size": "auto", **overrides})


OPEN_SETTINGS: dict[str, Any] = {"model.bandwidth": "auto", "solver.ridge": "auto"}


def record_trials(report: list[dict[str, Any]]) -> Callable[[str, dict[str, Any]], None]:
    """Return a `report` function that appends the fields of each trial to a list."""
    return lambda event, fields: report.append(fields) if event == "trial" else None


# -- results ---------------------------------------------------------------------------------------


def gaussian_process(n: int, width: float, noise: float) -> tuple[Array, Array]:
    """Return X (n, 2) and a sample of the process with a Gaussian kernel of this bandwidth, with
    noise."""
    rng = np.random.default_rng(4)
    X = rng.uniform(-1, 1, (n, 2))
    K = np.exp(-cdist(X, X, "sqeuclidean") / (2 * width**2))
    lam, E = np.linalg.eigh(K)
    f = E @ (np.sqrt(np.maximum(lam, 0)) * rng.standard_normal(n))
    return X.astype(np.float32), (f + noise * rng.standard_normal(n)).astype(np.float32)


def smooth(bandwidth: float, ridge: float) -> tuple[RunConfig, ArraySource]:
    """Return a problem whose best bandwidth is 0.3; float32 allows half of the usual step."""
    run = config(
        **{
            "model.kernel": "gaussian", "model.n_centers": "auto", "solver.step_scale": 0.5,
            "model.bandwidth": bandwidth, "solver.ridge": ridge,
        }
    )  # fmt: skip
    return run, ArraySource(*gaussian_process(600, 0.3, 0.5))


@pytest.mark.slow
def test_bandwidth_of_gaussian_process_is_found() -> None:
    """Compare with exact ridge regression, with all rows to fit as centers."""
    widths, ridge = [0.075, 0.15, 0.3, 0.6, 1.2], 0.5**2 / 480
    run, source = smooth(widths[0], ridge)
    options: dict[str, Any] = {"centers": 480, "epochs": 40}
    tuned = search_settings(
        run, source=source, bandwidths=widths, ridges=[ridge], refine=0, **options
    )
    candidates = Candidates(run, open_data(run, source), folds=1, **options)
    fit, held_out = (part.read_unit(0, 0, 0) for part in candidates.split(0))
    exact = {}
    for width in widths:
        K, K_new = (
            np.exp(-cdist(A, fit.X, "sqeuclidean") / (2 * width**2)) for A in (fit.X, held_out.X)
        )
        factor = cho_factor(K + len(fit.X) * ridge * np.eye(len(fit.X)))
        F = K_new @ cho_solve(factor, np.float64(fit.y))
        exact[width] = float(np.mean((F - held_out.y) ** 2))
    assert tuned.best["bandwidth"] == min(exact, key=exact.__getitem__) == 0.3
    assert not tuned.edge
    assert tuned.best["held_out_mse"] == pytest.approx(exact[0.3], rel=0.05)  # of 40 passes


@pytest.mark.slow
def test_refinement_moves_beyond_the_grid() -> None:
    run, source = smooth(0.05, 5e-4)
    more: list[dict[str, Any]] = []
    tuned = search_settings(
        run, source=source, bandwidths=[0.05, 0.1], ridges=[5e-4], refine=3, centers=200,
        report=record_trials(more),
    )  # fmt: skip
    assert [r["bandwidth"] for r in more[:6]] == [0.05, 0.1, 0.07071, 0.2, 0.1414, 0.4]
    assert len(more) == 8
    assert 0.2 <= tuned.best["bandwidth"] <= 0.4
    assert tuned.config.model.bandwidth == tuned.best["bandwidth"]
    assert tuned.config.solver.ridge == 5e-4


@pytest.mark.parametrize(
    ("best", "bandwidths", "expected"),
    [
        (2.0, [1.0, 2.0, 4.0], [1.414, 2.828]),
        (1.0, [1.0, 2.0, 4.0], [0.5, 1.414]),
        (4.0, [1.0, 2.0, 4.0], [2.828, 8.0]),
        (3.0, [3.0], []),
        (None, [], []),
        (1.0, [0.9999, 1.0, 1.0001], []),
    ],
)
def test_neighbours_are_midpoints_or_extensions(
    best: float | None, bandwidths: list[float], expected: list[float]
) -> None:
    assert points.neighbour_bandwidths(best, bandwidths) == expected


@pytest.mark.parametrize(
    ("best", "ridges", "expected"),
    [
        (1e-4, [0.0, 1e-6, 1e-4], [1e-2]),
        (1e-6, [0.0, 1e-6, 1e-4], []),
        (0.0, [0.0, 1e-6, 1e-4], []),
        (1e-6, [1e-6, 1e-5, 1e-4], [1e-7]),
        (1e-4, [0.0, 1e-4], []),
    ],
)
def test_ridge_beyond_extends_the_grid(
    best: float, ridges: list[float], expected: list[float]
) -> None:
    assert points.next_ridges(best, ridges) == expected


@pytest.mark.parametrize("kernel", ["laplace", "linear"])
def test_refinement_increases_the_ridge(kernel: str) -> None:
    """Check targets of noise, whose best model is 0 up to the noise of the held-out rows."""
    rng = np.random.default_rng(4)
    source = ArraySource(rng.standard_normal((1500, 4)), rng.standard_normal((1500, 1)))
    more: list[dict[str, Any]] = []
    widths: Any = "auto" if kernel == "linear" else [1.0, 4.0]
    width = "auto" if kernel == "linear" else 1.0
    run = config(
        **{
            "model.kernel": kernel, "model.bandwidth": width, "solver.name": "direct",
            "model.n_centers": "auto",
        }
    )  # fmt: skip
    tuned = search_settings(
        run, source=source, bandwidths=widths, ridges=[0, 1e-3, 1e-2], refine=2,
        report=record_trials(more),
    )  # fmt: skip
    ridges = sorted({row["ridge"] for row in tuned.table})
    assert ridges == pytest.approx([0, 1e-3, 1e-2, 0.1, 1])
    assert tuned.best["ridge"] == tuned.config.solver.ridge == ridges[-1]
    assert tuned.ridge_edge
    assert len(more) == len(tuned.table) == tuned.search["trainings"]


@pytest.mark.slow
@pytest.mark.parametrize("classes", [True, False])
def test_table_equals_single_trainings(classes: bool) -> None:
    """Check equal bits for every split, with augmentation and scaling."""
    rng = np.random.default_rng(1)
    X = rng.integers(0, 255, (120, 6), dtype=np.uint8)
    y: Array = X[:, 0] // 90 if classes else X[:, :2] / 255
    transforms = [streamkern.Scale("feature"), streamkern.GaussianNoise(0.2)]
    source = AugmentedSource(ArraySource(X, y), 3, transforms)
    options: dict[str, Any] = {
        "kernels": ["laplace", "gaussian"], "bandwidths": [2, 4], "ridges": [1e-3],
    }  # fmt: skip
    run = config(
        **{
            "model.n_centers": "auto", "data.scale": "auto", "model.bandwidth": 2.0,
            "solver.ridge": 1e-3,
        }
    )  # fmt: skip
    tuned = search_settings(
        run, source=source, metric="mse", epochs=6, refine=1, folds=2, **options
    )
    assert len(tuned.table) == 2 * 2 + 2

    data = open_data(run, source)
    sample = draw_sample(data, 120, 0)
    assert sorted(map(bytes, sample.X)) == sorted(map(bytes, X))
    part = part_of_rows(sample.stratum, 5, 0)
    errors, accuracies = [], []
    for row in (tuned.best, tuned.table[3], tuned.table[-1]):
        for fold in range(2):
            fit, held_out = sample.X[part != fold], sample.X[part == fold]
            targets = sample.y[part != fold], sample.y[part == fold]
            # As in the run, the scaling has the statistics of all of its data.
            bound = [t.bind(source.base) if isinstance(t, streamkern.Scale) else t
                     for t in transforms]  # fmt: skip
            one = run.with_overrides(
                {
                    "model.kernel": row["kernel"], "model.bandwidth": row["bandwidth"],
                    "model.n_centers": 50, "solver.ridge": row["ridge"], "data.epochs": 2,
                }
            )  # fmt: skip
            result = train(
                one,
                source=AugmentedSource(
                    ArraySource(fit, targets[0], classes=source.classes), 3, bound
                ),
                test=ArraySource(held_out, targets[1], classes=source.classes),
            )
            result.model.backend.close()
            errors.append(result.metrics["test_mse"])
            accuracies.append(result.metrics.get("test_accuracy"))
        a, b = errors[-2:]
        assert row["held_out_mse"] == (a + b) / 2
        if classes:
            assert row["held_out_accuracy"] == pytest.approx(sum(accuracies[-2:]) / 2, rel=1e-12)
        else:
            assert "held_out_accuracy" not in row


def test_automatic_grid_surrounds_the_median_distance() -> None:
    X = np.random.default_rng(2).standard_normal((60, 4)).astype(np.float32)
    tuned = search_settings(
        config(**{"model.n_centers": "auto", **OPEN_SETTINGS}), source=ArraySource(X, X[:, :1]),
        ridges=[0.0], refine=0, centers=48, epochs=1,
    )  # fmt: skip
    widths = sorted(row["bandwidth"] for row in tuned.table if not row["as_given"])
    sample = draw_sample(open_data(config(), ArraySource(X, X[:, :1])), 60, 0)
    fit = np.float64(sample.X[part_of_rows(sample.stratum, 5, 0) != 0])  # all of them are centers
    median = float(np.median(pdist(fit)))
    assert widths[2] == pytest.approx(median, rel=1e-12)
    assert widths == pytest.approx(
        [median / 4, median / 2, median, 2 * median, 4 * median], rel=1e-3
    )


# -- the sample and its splits -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((7, 1, 1), (1, 7)),
        ((7, 50, 1), (7, 1)),
        ((7, 3, 1), (3, 3)),
        ((7, 50, 20), (1, 7)),
        ((7, 50, 2), (4, 2)),
        ((1, 5, 5), (1, 1)),
    ],
)
def test_trials_use_copies_or_epochs_of_the_run(
    arguments: tuple[int, int, int], expected: tuple[int, int]
) -> None:
    assert copies_and_epochs(*arguments) == expected


def test_large_sample_stays_within_memory(tmp_path: Path) -> None:
    X = np.zeros((2000, 20_000), np.uint8)  # 40 MB
    source = ArraySource(X, np.arange(2000) % 2)
    run = config(**{"run.memory": 100 * 2**20})
    candidates = Candidates(run, open_data(run, source), folds=1)
    assert len(candidates.sample.X) == 25 * 2**20 // 20_008
    assert candidates.trial.run.memory == 100 * 2**20 - 2 * candidates.sample.X.nbytes
    with pytest.raises(ConfigError, match=r"rows=1500 of 19.5 KiB need .* give at most 1310 rows"):
        search_settings(run, source=source, rows=1500)


# -- degenerate data -----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [5, 20])
@pytest.mark.parametrize("kind", ["classes", "values"])
def test_tiny_data_are_searched(n: int, kind: str) -> None:
    X = np.random.default_rng(0).standard_normal((n, 3)).astype(np.float32)
    y: Array = {"classes": np.arange(n) % 2, "values": X @ X[:3].T}[kind]
    run = config(**{"model.n_centers": "auto", "model.bandwidth": 1.0})
    tuned = search_settings(run, source=ArraySource(X, y), bandwidths=[1.0, 4.0], refine=1)
    beyond = [row for row in tuned.table if row["ridge"] > max(AUTO_RIDGES)]
    assert (len(tuned.table), len(beyond)) in ((8, 0), (9, 1), (9, 3))
    assert tuned.search["fit"] + tuned.search["held_out"] == n
    assert all(math.isfinite(row["held_out_mse"]) for row in tuned.table)


def test_sample_weights_are_used_in_fit_and_validation() -> None:
    """Check that the content of rows with weight 0 does not matter."""
    X = np.random.default_rng(0).standard_normal((60, 3)).astype(np.float32)
    y, w = X[:, :1].copy(), np.tile([1.0, 2.0, 0.0], 20)
    wild = np.where(w[:, None] > 0, y, 1e3)
    run = config(**{"model.n_centers": "auto"})
    tables = [
        search_settings(
            run, source=ArraySource(X, t, sample_weight=w), bandwidths=[1.0, 4.0], refine=0
        ).table
        for t in (y, wild)
    ]
    errors = [[row["held_out_mse"] for row in table] for table in tables]
    np.testing.assert_allclose(*errors, rtol=1e-4)


@pytest.mark.parametrize(
    ("solver", "n_centers"),
    [
        *((name, "auto") for name in ("sgd", "eigenpro1", "eigenpro2")),
        *((name, 20) for name in ("auto", "block", "eigenpro3", "eigenpro4", "direct", "falkon")),
    ],
)
def test_every_solver_is_searched(
    solver: str, n_centers: int | str, recwarn: pytest.WarningsRecorder
) -> None:
    run = config(**{"model.n_centers": n_centers, "solver.name": solver, **OPEN_SETTINGS})
    tuned = search_settings(run, source=array_source(), bandwidths=[2.0, 4.0], refine=0, epochs=2)
    assert [row["as_given"] for row in tuned.table].count(True) == 1
    ridges = {row["ridge"] for row in tuned.table if not row["as_given"]}
    assert ridges == ({0.0} if solver.startswith("eigenpro") else {0.0, 1e-6, 1e-4})
    assert tuned.search["centers"] == n_centers


# -- composed kernels and chosen centers ----------------------------------------------------------

SUM = {
    "kind": "sum",
    "weights": [0.7, 0.3],
    "parts": [
        {"kind": "laplace", "bandwidth": 4.0},
        {"kind": "product", "parts": [{"kind": "gaussian", "bandwidth": 2}, "linear"]},
    ],
}


def widths_of(run: RunConfig) -> list[float]:
    """Return the two bandwidths of `SUM` in settings."""
    first_part, second_part = run.model.kernel["parts"]  # type: ignore[index]
    return [first_part["bandwidth"], second_part["parts"][0]["bandwidth"]]


def test_kernel_parts_are_scaled_equally() -> None:
    """Check bandwidths around the given ones, with the errors of single trainings."""
    run = config(**{"model.kernel": SUM, "model.bandwidth": "auto", "solver.ridge": 1e-4})
    source = array_source()
    tuned = search_settings(run, source=source, ridges=[1e-4], refine=1, epochs=2, centers=40)
    widths = sorted(row["bandwidth"] for row in tuned.table)
    assert set(widths) > {1.0, 2.0, 4.0, 8.0, 16.0}
    assert len(widths) == 7
    assert all(row["kernel"] == SUM for row in tuned.table)
    assert len({row["held_out_mse"] for row in tuned.table}) == 7
    large, small = widths_of(tuned.config)
    assert (large, small) == (tuned.best["bandwidth"], pytest.approx(large / 2, rel=1e-12))
    assert tuned.config.model.bandwidth == "auto"
    assert tomllib.loads(tuned.toml)["model"] == {"kernel": tuned.config.model.kernel}

    candidates = Candidates(run, open_data(run, source), folds=1, centers=40, epochs=2)
    fit, held_out = candidates.split(0)
    settings = {"data.epochs": 2, "model.n_centers": 40, "run.evaluate_every": 0}
    result = train(tuned.config.with_overrides(settings), source=fit, test=held_out)
    result.model.backend.close()
    assert result.metrics["test_mse"] == tuned.best["held_out_mse"]


def test_open_part_bandwidths_keep_their_ratio(tmp_path: Path) -> None:
    mixed = {**SUM, "parts": ["laplace", SUM["parts"][1]]}
    report: list[dict[str, Any]] = []
    options: dict[str, Any] = {
        "source": array_source(), "ridges": [1e-4], "refine": 0, "epochs": 1, "centers": 40,
        "out": tmp_path, "report": record_trials(report),
    }  # fmt: skip
    run = config(**{"model.kernel": mixed, **OPEN_SETTINGS})
    tuned = search_settings(run, **options)
    assert (len(report), report[1]["given"], tuned.search["trainings"]) == (6, mixed, 6)
    median, second = widths_of(settings(**{"model.kernel": report[1]["kernel"],
                                           "model.bandwidth": "auto"}))  # fmt: skip
    assert (second, median) != (2, "auto")
    assert second == 2
    assert [r["bandwidth"] for r in report[2:]] == pytest.approx(
        [max(median, 2) * k for k in (0.25, 0.5, 2, 4)], rel=1e-3
    )
    for row in tuned.table:
        kernel = notation.in_settings(row["kernel"], row["bandwidth"])["kernel"]
        large, small = notation.bandwidths(kernel)
        assert row["as_given"] or large / small == pytest.approx(median / 2, rel=1e-9)
    assert search_settings(run, **options) == tuned
    assert len(report) == 6


class UserKernel(streamkern.Kernel):
    """The squared rational kernel (1 + |x - z|^2 / 2)^-2."""

    def profile(self, sq: Any, xp: Any) -> Any:
        return (1 + sq / 2) ** -2.0


@pytest.mark.parametrize(
    "kernel",
    [UserKernel(2.0), UserKernel(2.0) + streamkern.Laplace(3.0)],
    ids=["alone", "in a sum"],
)
def test_user_kernel_points_are_not_shown(kernel: streamkern.Kernel) -> None:
    """Check also that the shown description makes the same kernel."""
    estimator = streamkern.KernelRegressor(kernel, n_centers=10, threads=1)
    X = np.random.default_rng(0).standard_normal((60, 2))
    tuned = streamkern.tune(
        X, X[:, 0], estimator=estimator, bandwidths=[2.0], ridges=[0.0], refine=0, epochs=1
    )
    assert "values" not in f"{tuned.best} {tuned.table} {tuned.toml}"
    shown = streamkern.KernelRegressor(tuned.best["kernel"], n_centers=10, threads=1)
    assert "UserKernel" in str(shown.fit(X, X[:, 0]).kernel_)


def test_kernels_with_and_without_bandwidths_are_compared() -> None:
    kernels = ["laplace", "linear", {"kind": "sum", "parts": ["gaussian", "linear"]}, SUM]
    run = config(**{"model.bandwidth": 2.0, "solver.ridge": 1e-4})
    tuned = search_settings(
        run, source=array_source(), kernels=kernels, bandwidths=[2, 4], ridges=[1e-4],
        refine=0, epochs=1,
    )  # fmt: skip
    tried_pairs = [(kernels.index(row["kernel"]), row["bandwidth"]) for row in tuned.table]
    assert sorted(tried_pairs, key=str) == [
        (0, 2), (0, 4), (1, None), (2, 2), (2, 4), (3, 2), (3, 4)
    ]  # fmt: skip
    assert tuned.search["trainings"] == 7


def test_kernel_without_bandwidth_is_trained_once() -> None:
    run = config(**{"model.kernel": "linear", "model.bandwidth": "auto"})
    linear = search_settings(run, source=array_source(), epochs=1, ridges=[0.0])
    assert (len(linear.table), linear.search["trainings"]) == (1, 1)
    assert linear.config.model.kernel == "linear"


@pytest.mark.parametrize("method", ["balanced", "kmeans", "rpcholesky"])
def test_centers_are_chosen_like_in_the_run(method: str) -> None:
    source = array_source()
    run = config(
        **{
            "model.centers": method, "model.n_centers": 30, "model.bandwidth": 2.0,
            "solver.ridge": 1e-4,
        }
    )  # fmt: skip
    tuned = search_settings(run, source=source, bandwidths=[2.0], ridges=[1e-4], epochs=1)
    candidates = Candidates(run, open_data(run, source), folds=1, epochs=1)
    assert (candidates.trial.model.centers, candidates.trial.model.n_centers) == (method, 30)
    errors = []
    for choice in (method, "random"):
        one = candidates.config("laplace", 2.0, 1e-4).with_overrides({"model.centers": choice})
        result = train(one, source=candidates.split(0)[0], test=candidates.split(0)[1])
        result.model.backend.close()
        errors.append(result.metrics["test_mse"])
    assert tuned.best["held_out_mse"] == errors[0] != errors[1]


@pytest.mark.parametrize(
    ("settings", "rows", "n_centers"),
    [
        ({"model.n_centers": 100}, None, 100),  # the sample is the whole data: 108 rows to fit
        ({"model.n_centers": 135}, None, 108),
        ({"model.n_centers": 100}, 100, 50),
        ({"model.n_centers": "auto"}, None, 50),
        ({"model.features": "fourier", "model.n_features": 90, "model.kernel": "gaussian",
          "model.n_centers": "auto"}, None, 90),
    ],
)  # fmt: skip
def test_trial_sizes_equal_those_of_the_run_if_possible(
    settings: dict[str, Any], rows: int | None, n_centers: int
) -> None:
    source, run = array_source(), config(**OPEN_SETTINGS, **settings)
    candidates = Candidates(run, open_data(run, source), folds=1, rows=rows, epochs=1)
    sizes = candidates.sizes()
    requested = settings.get("model.n_features", settings["model.n_centers"])
    assert sizes["centers"] == n_centers
    assert (sizes["run_centers"], sizes["run_rows"]) == (requested, 135)


FOURIER: dict[str, Any] = {
    "model.features": "fourier", "model.n_centers": "auto", "model.kernel": "gaussian",
    **OPEN_SETTINGS,
}  # fmt: skip


@pytest.mark.parametrize(
    ("n_features", "requested", "expected"), [("auto", None, 50), (20, None, 20), ("auto", 64, 64)]
)
def test_fourier_features_are_reduced_like_centers(
    n_features: int | str, requested: int | None, expected: int
) -> None:
    run = config(**FOURIER, **{"model.n_features": n_features})
    tuned = search_settings(
        run, source=array_source(), centers=requested, ridges=[1e-4], refine=0, epochs=1
    )
    assert tuned.search["centers"] == expected
    assert len(tuned.table) == 6
    assert tuned.config.model.n_features == n_features


def test_odd_number_of_fourier_features_is_refused() -> None:
    with pytest.raises(ConfigError, match="n_features=7 must be even"):
        search_settings(config(**FOURIER), source=array_source(), centers=7)


def test_search_ignores_warm_start(tmp_path: Path) -> None:
    run = config(**{"solver.name": "falkon", "solver.warm_start": str(tmp_path / "none")})
    tuned = search_settings(run, source=array_source(), bandwidths=[2.0], ridges=[1e-4])
    assert tuned.search["epochs"] == 20
    assert tuned.config.solver.warm_start == str(tmp_path / "none")


# -- resumed searches ------------------------------------------------------------------------------


def test_search_resumes_and_extends(tmp_path: Path) -> None:
    report: list[dict[str, Any]] = []
    options: dict[str, Any] = {
        **QUICK, "source": array_source(), "out": tmp_path / "t", "report": record_trials(report),
    }  # fmt: skip
    tuned = search_settings(config(), **options)
    assert len(report) == 3
    assert [r["left"] for r in report] == [2, 1, 0]
    files = {path.name: path.read_bytes() for path in (tmp_path / "t").iterdir()}
    assert json.loads(files["result.json"])["table"] == tuned.table
    report.clear()
    repeated = search_settings(config(), **options)
    assert (report, repeated) == ([], tuned)
    # More of everything that is searched: nothing is trained twice.
    more: dict[str, Any] = {
        "bandwidths": [3.0, 27.0], "ridges": [0, 1e-4], "folds": 2,
        "kernels": ["laplace", "cauchy"],
    }  # fmt: skip
    wide = search_settings(config(), **options | more)
    assert len(report) == 2 * 2 * 2 * 2 - 1
    row = next(r for r in tuned.table if r["bandwidth"] == 3)
    recorded_row = next(
        r for r in wide.table if (r["kernel"], r["bandwidth"], r["ridge"]) == ("laplace", 3, 0)
    )
    assert min(recorded_row["held_out_mse"], row["held_out_mse"]) > 0
    for name, content in files.items():
        if name != "result.json":
            assert (tmp_path / "t" / name).read_bytes().startswith(content)


def test_moved_data_resumes_search(tmp_path: Path) -> None:
    X = np.random.default_rng(0).standard_normal((60, 3)).astype(np.float32)
    ingest(X, tmp_path / "a.zarr", y=X[:, :1].astype(np.float64))
    run = config(**{"data.train": str(tmp_path / "a.zarr"), "model.n_centers": "auto"})
    report: list[dict[str, Any]] = []
    search_settings(run, **QUICK, out=tmp_path / "t", report=record_trials(report))
    (tmp_path / "a.zarr").rename(tmp_path / "b.zarr")
    run = run.with_overrides({"data.train": str(tmp_path / "b.zarr"), "data.prefetch_threads": 1})
    search_settings(run, **QUICK, out=tmp_path / "t", report=record_trials(report))
    assert len(report) == 3


@pytest.mark.parametrize(
    ("changes", "options", "named"),
    [
        ({"run.random_state": 1}, {}, "run.random_state: was 0, now 1"),
        ({"solver.damping": 0.1}, {}, "solver.damping: was 'auto', now 0.1"),
        ({}, {"epochs": 3}, "data.epochs: was 2, now 3"),
        ({}, {"centers": 10}, "model.n_centers: was 60, now 10"),
        ({}, {"rows": 100}, "sample.rows: was 135, now 100"),
        ({}, {"folds": 6}, "sample.parts: was 5, now 6"),
        ({}, {"source": array_source(seed=1)}, "data: other rows or targets"),
        ({}, {"source": AugmentedSource(array_source(), 2)}, "data.n_rows: was 135, now 270"),
    ],
)
def test_changed_search_is_refused(
    changes: dict[str, Any], options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    plain: dict[str, Any] = {**QUICK, "source": array_source(), "out": tmp_path}
    search_settings(config(), **plain)
    files_before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ResumeMismatchError) as caught:
        search_settings(config(**changes), **plain | options)
    assert named in str(caught.value)
    assert str(caught.value).endswith("restore the settings and data, or give another folder")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files_before


def test_metric_file_is_identified_by_content(tmp_path: Path) -> None:
    """Check that another file of the same name makes another search."""
    np.save(tmp_path / "a.npy", np.ones(D))
    named = {"model.metric": str(tmp_path / "a.npy")}
    plain: dict[str, Any] = {**QUICK, "source": array_source(), "out": tmp_path / "t"}
    search_settings(config(**named), **plain)
    search_settings(config(**named), **plain)
    np.save(tmp_path / "a.npy", np.full(D, 2.0))
    with pytest.raises(ResumeMismatchError, match=r"metric: other contents"):
        search_settings(config(**named), **plain)


def test_foreign_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(RunError, match=r"holds 'thesis.tex' but no search of streamkern"):
        search_settings(config(), **QUICK, source=array_source(), out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_foreign_study_is_unchanged(tmp_path: Path) -> None:
    """Check a journal of Optuna with an incomplete last line, and a search of version 0.1.0."""
    optuna = pytest.importorskip("optuna")
    journal, old_journal = tmp_path / "theirs" / JOURNAL_NAME, tmp_path / "old" / "search.json"
    for path in (journal, old_journal):
        path.parent.mkdir()
    backend = optuna.storages.journal.JournalFileBackend(str(journal))
    optuna.create_study(study_name="mine", storage=optuna.storages.JournalStorage(backend))
    with open(journal, "a") as file:
        file.write('{"op_code": 4, "wor')
    old_journal.write_text("{}")
    for path, message in (
        (journal, "is a study of Optuna"),
        (old_journal, "a search of streamkern 0.1.0"),
    ):
        content_before = path.read_bytes()
        with pytest.raises(RunError, match=message):
            search_settings(config(), **QUICK, source=array_source(), out=path.parent)
        assert path.read_bytes() == content_before


def test_concurrent_search_is_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {**QUICK, "source": array_source(), "out": tmp_path}

    def second(event: str, fields: dict[str, Any]) -> None:
        with pytest.raises(RunLockedError, match="another process runs the search in"):
            search_settings(config(), **options)

    search_settings(config(), **options, report=second)
    search_settings(config(), **options)


def test_damaged_record_is_trained_again(tmp_path: Path) -> None:
    report: list[dict[str, Any]] = []
    options: dict[str, Any] = {"source": array_source(), "out": tmp_path}
    options["report"] = record_trials(report)
    tuned = search_settings(config(), **QUICK, **options)
    journal = tmp_path / JOURNAL_NAME
    *_, damaged_line, last_line = intact = journal.read_bytes().splitlines(keepends=True)
    for damaged, redone in (
        (
            [
                *intact[:-1],
                last_line.replace(b'"fold": 0', b'"fold": 1').replace(b'"fold":0', b'"fold":1'),
            ],
            "trial 2",
        ),
        ([*intact[:-2], damaged_line[:-20] + b"\n", last_line], "from line 4 on"),
    ):
        journal.write_bytes(b"".join(damaged))
        with pytest.warns(UserWarning, match=rf"is damaged .*{redone}.* repeated"):
            repeated = search_settings(config(), **QUICK, **options)
        assert without_times(repeated) == without_times(tuned)
    assert len(report) == 3 + 1 + 2
    # An incomplete last line is left by a kill, and is not damage.
    journal.write_bytes(b"".join(intact[:-1]) + last_line[:50])
    assert without_times(search_settings(config(), **QUICK, **options)) == without_times(tuned)
    assert len(report) == 7
    journal.write_bytes(b"".join(intact).replace(b'"op_code":4', b'"op_code":9'))
    with pytest.raises(RunError, match=r"journal.log is damaged .*; restore it from a copy"):
        search_settings(config(), **QUICK, **options)


def test_search_runs_on_object_storage(bucket: str, s3: Any, tmp_path: Path) -> None:
    report: list[dict[str, Any]] = []
    run = config(**{"data.storage_options": s3.options()})
    location: dict[str, Any] = {
        "source": array_source(), "out": f"s3://{bucket}/search", "report": record_trials(report),
    }  # fmt: skip
    tuned = search_settings(run, **QUICK, **location)
    assert search_settings(run, **QUICK, **location) == tuned
    assert len(report) == 3
    with pytest.raises(ResumeMismatchError, match="random_state"):
        search_settings(run.with_overrides({"run.random_state": 1}), **QUICK, **location)


def test_signal_during_a_trial_ends_the_search(tmp_path: Path) -> None:
    report: list[dict[str, Any]] = []

    def stop_at_the_second(event: str, fields: dict[str, Any]) -> None:
        record_trials(report)(event, fields)
        if len(report) == 2:
            signal.raise_signal(signal.SIGTERM)

    options: dict[str, Any] = {**QUICK, "source": array_source(), "out": tmp_path}
    with pytest.raises(
        TrainingInterrupted, match=r"by SIGTERM with 2 of 3 .* run the same"
    ) as caught:
        search_settings(config(), **options, report=stop_at_the_second)
    assert caught.value.exit_code == TRY_AGAIN
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    search_settings(config(), **options, report=record_trials(report))
    assert len(report) == 3


def test_signal_during_a_trial_is_handled_at_next_step(tmp_path: Path) -> None:
    """Check the path from the caller's request to the loop of a run that saves nothing."""
    stop, steps = StopRequest(install=False), list[int]()

    def request_stop(record: dict[str, Any]) -> None:
        steps.append(record["step"])
        stop.requested_by = "SIGTERM" if record["step"] == 3 else None

    run = settings(**{"run.evaluate_every": 1})
    with pytest.raises(Stopped, match="stopped by SIGTERM"):
        train(
            run, source=array_source(), test=array_source(9), on_evaluation=request_stop, stop=stop
        )
    assert steps == [1, 2, 3]


def test_diverging_candidate_is_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a training diverge, because none does here by itself."""
    real_train = trainings.train

    def train_or_diverge(one: RunConfig, **options: Any) -> Any:
        """Train, but raise DivergenceError for the bandwidth 3."""
        if one.model.bandwidth == 3.0:
            raise streamkern.DivergenceError("made to")
        return real_train(one, **options)

    monkeypatch.setattr(trainings, "train", train_or_diverge)
    tuned = search_settings(config(), **QUICK, source=array_source())
    assert (tuned.table[-1]["bandwidth"], tuned.table[-1]["held_out_mse"]) == (3.0, None)
    with pytest.raises(streamkern.DivergenceError, match="every candidate diverged"):
        search_settings(config(), **QUICK | {"bandwidths": [3.0]}, source=array_source())


def test_non_finite_error_is_divergence_with_bandwidth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that the bandwidth is the middle one of the grid."""
    real = trainings.train

    def overflowing(one: RunConfig, **options: Any) -> Any:
        result = real(one, **options)
        if one.model.bandwidth == "median":
            result.metrics["test_mse"] = math.inf
        return result

    monkeypatch.setattr(trainings, "train", overflowing)
    options: dict[str, Any] = {"ridges": [0.0], "refine": 0, "epochs": 1}
    tuned = search_settings(config(**OPEN_SETTINGS), source=array_source(), **options)
    assert len(tuned.table) == 6
    diverged_row = tuned.table[-1]
    assert (diverged_row["held_out_mse"], diverged_row["as_given"]) == (None, False)
    widths = sorted(row["bandwidth"] for row in tuned.table if not row["as_given"])
    assert widths[2] == diverged_row["bandwidth"]


# -- refused options -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"folds": 2.5}, "folds=2.5 must be a whole number"),
        ({"sampler": "optuna", "refine": 2}, "refine=2 is not defined for sampler='optuna'"),
        ({"sampler": "optuna", "n_trials": 0}, "n_trials=0 must be a whole number, at least 1"),
        ({"refine": -1}, "refine=-1 must be a whole number, at least 0"),
        ({"centers": 0}, "centers=0 must be a whole number, at least 1"),
        ({"centers": 109}, "centers=109 cannot be drawn from the 108 rows to fit"),
        ({"epochs": True}, "epochs=True must be a whole number"),
        ({"bandwidths": []}, r'bandwidths=\[\] must be "auto" or a list of numbers above 0'),
        ({"bandwidths": [0.0, 1]}, "must be .* above 0"),
        ({"bandwidths": "wide"}, "bandwidths='wide' must be"),
        ({"ridges": [math.nan]}, "must be .* 0 or above"),
        (
            {"kernels": ["linear"], "bandwidths": [1]},
            r"bandwidths=\[1\] cannot be used: no kernel has",
        ),
        (
            {
                "kernels": [
                    {"kind": "product", "parts": ["laplace", {"kind": "cauchy", "bandwidth": 2}]}
                ],
                "bandwidths": [1],
            },
            r"kernel laplace \* cauchy\(bandwidth 2\) cannot be given a bandwidth, because some",
        ),
        ({"kernels": ["triangle"]}, "model.kernel='triangle' must be \"auto\", one of"),
        ({"config": "eigenpro3", "ridges": [1e-3]}, "ridge=0.001 is not defined for solver"),
        (
            {"config": "eigenpro2", "centers": 20},
            "centers=20 cannot be used with solver 'eigenpro2'",
        ),
    ],
)
def test_invalid_options_are_refused_before_writing(
    options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    solver = options.pop("config", "auto")
    run = config(**{"solver.name": solver, "model.n_centers": "auto"})
    with pytest.raises(ConfigError, match=sentence) as caught:
        search_settings(run, source=array_source(), out=tmp_path / "t", **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "t").exists()


# -- the text of a run file ----------------------------------------------------------------------

TEXT = st.text(st.characters(codec="utf-8"))
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(["a", "b-1"]), st.dictionaries(TEXT, VALUES, max_size=3)))
def test_toml_roundtrips(tables: dict[str, Any]) -> None:
    assert tomllib.loads(toml(tables)) == tables


def test_run_file_describes_the_settings(tmp_path: Path) -> None:
    run = config(
        **{
            "data.train": ["a.zarr", 's3://b/"c"'], "data.weights": [1, 2.5], "data.copies": 3,
            "data.transforms": [{"kind": "scale"}, {"kind": "noise", "sigma": 0.1}],
            "data.storage_options": {"secret": "hush"}, "run.checkpoint_every": "5 min",
            "run.evaluate_at": [10, 100], "solver.average": False, "solver.ridge": 1e-6,
        }
    )  # fmt: skip
    text = run_file_text(run)
    assert "hush" not in text
    assert "storage_options" not in text
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    assert load_run_file(tmp_path / "run.toml") == run.with_overrides({"data.storage_options": {}})


@pytest.mark.parametrize(
    ("size", "text"),
    [("1 GiB", "1 GiB"), ("1.5 GiB", "1536 MiB"), ("2 TiB", "2 TiB"), (2**20 + 1, 2**20 + 1)],
)
def test_run_file_memory_is_readable(size: str | int, text: str | int) -> None:
    run = config(**{"run.memory": size})
    assert f"memory = {json.dumps(text)}\n" in run_file_text(run)


# -- the command -----------------------------------------------------------------------------------

WORDS = (
    "--bandwidths", "0.7,1.4", "--ridges", "0", "--epochs", 2, "--refine", 1, "--metric", "mse",
)  # fmt: skip


POOR_OPTIONS = ("--set", "model.bandwidth=0.05", "--set", "solver.ridge=0.0")
"""Settings that a search improves."""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """Return run.toml next to train.zarr."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((600, 5)).astype(np.float32)
    ingest(X, tmp_path / "train.zarr", y=(X[:, 0] > 0).astype(int))
    path = tmp_path / "run.toml"
    path.write_text(
        f"[data]\ntrain = {json.dumps(str(tmp_path / 'train.zarr'))}\n"
        '[model]\nkernel = "laplace"\nn_centers = 60\n[run]\nthreads = 1\ndevice = "cpu"\n'
    )
    return path


def test_tune_command_writes_best_run_file(run: Run, run_file: Path) -> None:
    pytest.importorskip("matplotlib")
    best_file = run_file.with_name("best.toml")
    code, out, err = run("tune", run_file, *WORDS, *POOR_OPTIONS, "--write", best_file)
    assert code == DONE, err
    lines = err.splitlines()
    assert lines[0] == (
        "streamkern: 5 trainings at most: 480 rows to fit, 120 held out, 60 centers, 2 passes; "
        "the run has 600 rows and 60 centers"
    )
    assert sum("laplace, bandwidth" in line for line in lines) == 5
    assert "4 left, about" in lines[1]
    header, _, first_row, *_ = out.splitlines()
    assert re.split(r"  +", header.strip()) == [
        "kernel", "bandwidth", "ridge", "as given", "held_out_mse", "se", "within 2 se",
        "held_out_accuracy", "seconds",
    ]  # fmt: skip
    folder = run_file.with_name("run-tune")
    result = json.loads((folder / "result.json").read_text())
    assert first_row.split()[:2] == ["laplace", f"{result['best']['bandwidth']:.4g}"]
    assert result["toml"] in out
    assert (folder / "tune.png").read_bytes().startswith(b"\x89PNG")
    written = load_run_file(best_file)
    assert written.model.bandwidth == result["best"]["bandwidth"]
    best_settings = {
        "model.bandwidth": written.model.bandwidth, "solver.ridge": result["best"]["ridge"],
        "model.metric": "none",
    }  # fmt: skip
    assert written == load_run_file(run_file).with_overrides(best_settings)


@pytest.fixture
def best_file(run: Run, run_file: Path) -> Path:
    """Return the run file that `tune` has written, in the folder of `run_file`."""
    path = run_file.with_name("best.toml")
    assert run("tune", run_file, *WORDS, *POOR_OPTIONS, "--write", path)[0] == DONE
    return path


def test_repeated_tune_command_trains_nothing(run: Run, run_file: Path, best_file: Path) -> None:
    code, out, err = run("tune", run_file, *WORDS, *POOR_OPTIONS, "--json")
    result = json.loads(run_file.with_name("run-tune").joinpath("result.json").read_text())
    printed = json.loads(out)
    assert (code, printed.pop("out")) == (DONE, str(run_file.with_name("run-tune")))
    assert printed == {name: result[name] for name in printed}
    assert printed.keys() == {"best", "table", "metric", "search", "toml"}
    assert "5 recorded already" in err
    assert "bandwidth" not in err.replace("best bandwidth", "")


def test_edited_run_file_is_not_replaced(run: Run, run_file: Path, best_file: Path) -> None:
    text = best_file.read_text()
    code, _, err = run("tune", run_file, *WORDS, *POOR_OPTIONS, "--write", best_file)
    assert (code, best_file.read_text()) == (DONE, text), err
    best_file.write_text(text + "# mine\n")
    code, _, err = run("tune", run_file, *WORDS, *POOR_OPTIONS, "--write", best_file)
    assert best_file.read_text() == text + "# mine\n"
    assert (code, err) == (
        USAGE,
        f"streamkern: --write '{best_file}' exists and was not written by this search, or "
        "was edited; name another file\n",
    )


def test_changed_tune_command_is_refused(run: Run, run_file: Path, best_file: Path) -> None:
    code, _, err = run("tune", run_file, *WORDS, *POOR_OPTIONS, "--set", "solver.damping=0.1")
    assert code == USAGE
    assert "solver.damping: was 'auto', now 0.1" in err


def test_written_file_has_a_separate_run_directory(run: Run, run_file: Path) -> None:
    """Check that both run files can be trained."""
    old_run, best_file = run_file.with_name("run"), run_file.with_name("best.toml")
    with run_file.open("a") as file:
        file.write(f"run_dir = {json.dumps(str(old_run))}\n")
    assert run("train", run_file)[0] == DONE
    code, _, err = run("tune", run_file, *WORDS, "--write", best_file)
    assert code == DONE
    assert f"wrote {best_file}, for a run in {old_run}-best" in err
    assert load_run_file(best_file).run.run_dir == f"{old_run}-best"
    code, _, err = run("train", best_file)
    assert code == DONE, err
    assert (old_run / "run.json").exists()


def test_bandwidth_is_written_with_six_digits(run: Run, run_file: Path) -> None:
    """Check median distances and given bandwidths, for which more digits do not matter."""
    best_file = run_file.with_name("best.toml")
    arguments = ("--bandwidths", "1.23456789", "--ridges", "0", "--epochs", 1, "--write", best_file)
    code, out, _ = run("tune", run_file, *arguments, *POOR_OPTIONS, "--refine", 0)
    assert code == DONE
    assert load_run_file(best_file).model.bandwidth == 1.23457
    assert "bandwidth = 1.23457\n" in out


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ([], "laplace kernel, bandwidth auto: of 0.015625 to 16 times the median distance"),
        (["model.bandwidth=median"],
         "laplace kernel, bandwidth median: the median distance between 1,000 centers"),
        (["model.bandwidth=2.5"], "laplace kernel, bandwidth 2.5\n"),
        (["model.kernel=linear"], "linear kernel\n"),
        (["model.kernel={kind='polynomial', degree=2, c0=0.5}"],
         "polynomial(degree 2, c0 0.5) kernel\n"),
        (["model.kernel={kind='sum', parts=[{kind='laplace', bandwidth=8.0}, {kind='gaussian', "
          "bandwidth=4.0}], weights=[0.7, 0.3]}"],
         "0.7 laplace(bandwidth 8) + 0.3 gaussian(bandwidth 4) kernel\n"),
        (["model.kernel={kind='sum', parts=['laplace', {kind='gaussian', bandwidth=4}]}",
          "model.bandwidth=2"],
         "laplace + gaussian(bandwidth 4) kernel, other bandwidths 2\n"),
        (["model.kernel={kind='product', parts=['linear', {kind='sum', parts=['laplace', "
          "'gaussian'], weights=[1, 0.5]}]}"],
         "linear * (laplace + 0.5 gaussian) kernel, bandwidth auto: of 0.015625 to 16 times"),
    ],
)  # fmt: skip
def test_plan_describes_the_kernel(
    settings: list[str], line: str, run: Run, run_file: Path
) -> None:
    code, out, _ = run("plan", run_file, *(w for text in settings for w in ("--set", text)))
    assert code == DONE
    assert f"\n{line}" in out


def test_info_describes_the_kernel(run: Run, run_file: Path, tmp_path: Path) -> None:
    kernel = "model.kernel={kind='sum', parts=['laplace', 'gaussian'], weights=[0.7, 0.3]}"
    arguments = ("--set", kernel, "--set", "model.bandwidth=2", "--run-dir", tmp_path / "run")
    assert run("train", run_file, *arguments)[0] == DONE
    out = " ".join(run("info", tmp_path / "run")[1].split())
    assert " kernel 0.7 laplace(bandwidth 2) + 0.3 gaussian(bandwidth 2) " in out
    assert " model.kernel 0.7 laplace + 0.3 gaussian " in out
    assert "parts" not in out


def test_several_folds_give_standard_errors(run: Run, run_file: Path) -> None:
    code, out, _ = run("tune", run_file, *WORDS, "--folds", 2, "--kernels", "laplace, gaussian")
    assert code == DONE
    assert "within 2 se" in out
    assert " yes " in out


def test_missing_matplotlib_omits_the_plot(
    run: Run, run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_package("matplotlib", monkeypatch)
    code, out, err = run("tune", run_file, *WORDS)
    assert code == DONE
    assert f"note: the plot needs matplotlib: {install_command('report')}" in err
    assert "[model]" in out
    names = {path.name for path in run_file.with_name("run-tune").iterdir()}
    assert "result.json" in names
    assert "tune.png" not in names


def test_plot_accepts_diverged_and_single_trials() -> None:
    """Check trials that diverged, kernels without a bandwidth, and a single row."""
    pytest.importorskip("matplotlib")
    rows: list[dict[str, Any]] = [
        {"kernel": {"kind": "linear"}, "bandwidth": None, "ridge": 0.0, "held_out_mse": 0.3},
        {"kernel": "laplace", "bandwidth": 2.0, "ridge": 0.0, "held_out_mse": 0.5},
        {"kernel": "laplace", "bandwidth": 4.0, "ridge": 0.0, "held_out_mse": None},
        {"kernel": "cauchy", "bandwidth": 4.0, "ridge": 0.0, "held_out_mse": None},
    ]
    for row in rows:
        row |= {"held_out_r2": row["held_out_mse"], "se": None}
    assert png_bytes(plot.scores_figure(rows, rows[0], "r2")).startswith(b"\x89PNG")
    for table in (rows, rows[:1], rows[1:2], rows[1:]):
        assert png_bytes(plot.scores_figure(table, table[0])).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--bandwidths", "wide", "--bandwidths 'wide' must be numbers with commas"),
        ("--kernels", "triangle", 'model.kernel="triangle" must be "auto", one of'),
        ("--folds", "0", "--folds 0 must be a whole number"),
        ("--metric", "r2", "--metric r2 is not defined for classes; take"),
        ("--write", "no/x.toml", "is in a folder that does not exist"),
    ],
)
def test_invalid_options_of_tune_command_give_one_sentence(
    option: str, value: str, sentence: str, run: Run, run_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(run_file.parent)
    code, out, err = run("tune", run_file, option, value)
    assert (code, out, len(err.splitlines())) == (USAGE, "", 1)
    assert sentence in err
    assert not run_file.with_name("run-tune").exists()


def test_tune_command_needs_data(run: Run) -> None:
    assert run("tune")[0] == USAGE


LONG_RUN = ("--ridges", "0", "--epochs", "40")


SIGNALLED = """
import os, sys
from pathlib import Path
from streamkern.cli import main
from streamkern.train.loop.step_loop import StepLoop
left, number, take = int(sys.argv.pop(1)), int(sys.argv.pop(1)), StepLoop.take
def take_and_stop(*arguments):
    global left
    found = take(*arguments)
    journal = Path(sys.argv[-1]) / "journal.log"
    if journal.exists() and journal.read_text().count('"record"') == left:
        left = None
        os.kill(os.getpid(), number)
    return found
StepLoop.take = take_and_stop
sys.exit(main.run_command())
"""


def tune_until_signal(
    run_file: Path, folder: Path, records: int, number: signal.Signals
) -> subprocess.CompletedProcess[str]:
    """Run the command in a process that gets a signal in a step, after so many records."""
    arguments = ("tune", str(run_file), *LONG_RUN, "--out", str(folder))
    return subprocess.run(
        [sys.executable, "-c", SIGNALLED, str(records), str(int(number)), *arguments],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(streamkern.__file__).parent.parent)},
    )  # fmt: skip


@pytest.mark.slow
def test_search_survives_kill_and_stop(run: Run, run_file: Path, tmp_path: Path) -> None:
    """Kill the third and stop the fifth of 6 trainings and then 4."""
    folder, uninterrupted = tmp_path / "t", tmp_path / "whole"
    killed = tune_until_signal(run_file, folder, 2, signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL
    journal = folder / JOURNAL_NAME
    bits = journal.read_bytes()
    assert bits.count(b'"record"') == 2
    assert not (folder / "result.json").exists()

    stopped = tune_until_signal(run_file, folder, 4, signal.SIGTERM)
    assert stopped.returncode == TRY_AGAIN
    assert "stopped by SIGTERM with" in stopped.stderr.splitlines()[-1]
    trained = killed.stderr + stopped.stderr

    code, _, err = run("tune", run_file, *LONG_RUN, "--out", folder)
    assert code == DONE, err
    trained += err
    # A training is reported when it is recorded, so nothing was trained twice.
    assert journal.read_bytes().count(b'"record"') == 10
    assert sum(" laplace, bandwidth" in line for line in trained.splitlines()) == 10
    assert journal.read_bytes().startswith(bits)

    assert run("tune", run_file, *LONG_RUN, "--out", uninterrupted)[0] == DONE
    tables = [
        json.loads((location / "result.json").read_text())["table"]
        for location in (folder, uninterrupted)
    ]
    for table in tables:
        for row in table:
            del row["seconds"]
    assert tables[0] == tables[1]


def test_unreadable_run_file_gives_one_sentence() -> None:
    with pytest.raises(StreamkernError, match=r"run file 'no.toml' cannot be read"):
        search_settings("no.toml")
