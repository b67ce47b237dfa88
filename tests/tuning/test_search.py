"""Check the search of kernel, bandwidth and ridge: results, reads and resumes."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.linalg import cho_factor, cho_solve
from scipy.spatial.distance import cdist

import streamkern
from streamkern.basics.errors import ConfigError, StreamkernError
from streamkern.config.run_config import RunConfig
from streamkern.kernels import notation
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.train.resolve.training_data import open_data
from streamkern.train.train import train
from streamkern.tuning.candidates import AUTO_RIDGES, Candidates
from streamkern.tuning.holdout import draw_sample, part_of_rows
from streamkern.tuning.search import search_settings
from tests.runs import array_source, settings
from tests.searches import OPEN_SETTINGS, Array, config, record_trials, smooth_problem


@pytest.mark.slow
def test_bandwidth_of_gaussian_process_is_found() -> None:
    """Compare with exact ridge regression, with all rows to fit as centers."""
    widths, ridge = [0.075, 0.15, 0.3, 0.6, 1.2], 0.5**2 / 480
    run, source = smooth_problem(widths[0], ridge)
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


def test_unreadable_run_file_gives_one_sentence() -> None:
    with pytest.raises(StreamkernError, match=r"run file 'no.toml' cannot be read"):
        search_settings("no.toml")
