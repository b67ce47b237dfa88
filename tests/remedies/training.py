"""Mistakes in what is trained on, and in the settings that only the data shows to be wrong."""

from __future__ import annotations

import contextlib
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zarr

import streamkern as sk
from streamkern.config.run_config import RunConfig
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.start_run import open_recorded_run, run_directory
from tests.remedies import (
    LABELS,
    Case,
    Do,
    N,
    X,
    Y,
    cases_of,
    command,
    fit_classes,
    fit_values,
    long_rows,
    regressor,
)

COVERED = (
    "train/model/calibrating.py", "train/loop/callbacks.py", "train/resolve/early_stopping.py",
    "train/resolve/given_arrays.py", "train/resolve/metric_mode.py",
    "train/model/kernel_model.py", "train/resolve/resolved_run.py",
    "train/model/permutation.py", "train/resolve/problem_shape.py", "train/restart/scaling.py",
    "train/resolve/find_scaling.py", "train/loop/prometheus.py",
    "train/resolve/calibration_split.py", "train/setup/assemble.py", "train/loop/sinks.py",
    "train/resolve/training_data.py", "train/resolve/run_inputs.py",
    "train/resolve/check_loss.py", "train/resolve/sampled_features.py",
    "train/online.py", "train/loop/guard.py", "train/saved_model.py", "train/trainer.py",
)  # fmt: skip

NOT_TRIED = {
    "train/model/permutation.py:_random_rows:1": "an empty file is refused before",
    "train/resolve/check_loss.py:_check_levels:1": "by two targets, in remedies/estimators.py",
    "train/resolve/check_loss.py:_check_levels:2": "of expectiles, in remedies/estimators.py",
    "train/resolve/sampled_features.py:with_scores:1": "by images, in remedies/estimators.py",
    "train/resolve/sampled_features.py:with_patches:1": "in remedies/transforms.py",
    "train/setup/assemble.py:operator:1": "settings are compared before",
    "train/loop/prometheus.py:Prometheus.__init__:1": "in tests/train/loop/test_prometheus.py",
    "train/loop/prometheus.py:Prometheus._gauge:1": "in tests/train/loop/test_prometheus.py",
    "train/loop/prometheus.py:Prometheus.begin:1": "in tests/train/loop/test_prometheus.py",
    "train/loop/sinks.py:MLflow._connect:1": "needs mlflow; tests/train/loop/test_sinks.py",
}

USUAL = {
    "data.train": "data.zarr", "data.epochs": 1, "model.kernel": "gaussian",
    "model.bandwidth": 2.0, "model.n_centers": 20, "model.metric": "none", "run.threads": 1,
    "solver.ridge": 1e-3,
}  # fmt: skip


def trained(given: dict[str, Any], **beside: Any) -> Any:
    """Return the result of `train_model`. given : settings. beside : other arguments."""
    return sk.train_model(RunConfig().with_overrides(USUAL | given), **beside)


def setting_cases() -> list[Case]:
    """Return mistakes in settings: (words, wrong settings, right ones)."""
    np.save("metric.npy", np.ones(3))
    np.save("zeros.npy", np.zeros(3))
    np.save("wide.npy", np.ones(4))
    Path("text.npy").write_text("1, 1, 1")
    zarr.open_group("group.zarr", mode="w").create_array("A", data=np.ones(3))
    zarr.create_array("hollow.zarr", shape=(3,), chunks=(1,), dtype="f8")
    auto: dict[str, Any] = {"model.n_centers": "auto"}
    block: dict[str, Any] = {"solver.name": "block"}
    sgd: dict[str, Any] = {"solver.name": "sgd", "solver.ridge": "auto"}
    scale = {"kind": "scale", "mode": "global"}
    noise = {"kind": "noise", "sigma": 1.0}
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("early_stopping has nothing to stop.*leave it out", {"run.early_stopping": True}, {}),
        ("calibrate cannot be used with initial weights.*leave it out",
         block | {"run.calibrate": True, "solver.warm_start": "run"}, {}),
        ("n_centers=9 differs from the 60 rows in model.centers; leave n_centers out",
         {"model.centers": "data.zarr", "model.n_centers": 9},
         auto | {"model.centers": "data.zarr"}),
        ("is a group of arrays; give the path of the array", {"model.metric": "group.zarr"},
         {"model.metric": "group.zarr/A"}),
        ("lacks some chunks.*write the array again as a .npy file", {"model.metric": "hollow.zarr"},
         {"model.metric": "metric.npy"}),
        (r"give scales \(3,\), or a matrix \(3, r\)", {"model.metric": "wide.npy"},
         {"model.metric": "metric.npy"}),
        ("is 0 for all features; give at least one feature a scale", {"model.metric": "zeros.npy"},
         {"model.metric": "metric.npy"}),
        ("no array of a metric at nothing.npy; correct model.metric, or set one of",
         {"model.metric": "nothing.npy"}, {"model.metric": "learn"}),
        ("no array of centers at nothing.npy; correct model.centers, or set one of",
         auto | {"model.centers": "nothing.npy"}, {"model.centers": "kmeans"}),
        ("is no .npy file, zarr array.*write it with numpy.save", {"model.metric": "text.npy"},
         {"model.metric": "metric.npy"}),
        ("model.metric transforms the features.*leave one of them out",
         {"model.metric": "metric.npy", "run.precision": "integer"},
         {"model.metric": "metric.npy"}),
        ("needs rows of uint8.*give precision='auto'", {"run.precision": "integer"},
         {"run.precision": "auto"}),
        ("weights or class_sampling; use another solver, or features='nystrom'",
         auto | sgd | {"data.transforms": [noise]},
         sgd | {"data.transforms": [noise], "model.features": "nystrom"}),
        ("leave centers and n_centers out", sgd, auto | sgd),
        ('contradicts the scale in data.transforms.*leave one of them out',
         {"data.scale": "feature", "data.transforms": [scale]}, {"data.transforms": [scale]}),
        ("data.train is missing.*set it in .data.", {"data.train": None},
         {"data.train": "data.zarr"}),
        ("is for rows of one class each, .*labels for a row; give one of squared_error, .*huber",
         {"model.loss": "log_loss"}, {"model.loss": "squared_error"}),
        ("is for values, but the targets are classes; give one of squared_error, log_loss, .*hinge",
         {"data.train": "labels.zarr", "model.loss": "huber"},
         {"data.train": "labels.zarr", "model.loss": "log_loss"}),
        ("is for values, but the targets are classes; leave model.target_transform out",
         {"data.train": "labels.zarr", "model.target_transform": "log"},
         {"data.train": "labels.zarr"}),
        ("needs targets of at least 0, but row .*leave model.target_transform out",
         {"model.target_transform": "log"}, {"model.target_transform": "none"}),
        ("data.test has 2 classes .*use data with the same targets", {"data.test": "labels.zarr"},
         {"data.test": "data.zarr"}),
    ]  # fmt: skip

    def tested() -> Any:
        command("ingest rows.npz rows.zarr")
        return trained({"data.test": "rows.zarr"})

    files = ("make a store from it with streamkern ingest rows.npz rows.zarr",
                   lambda: trained({"data.test": "rows.npz"}), tested)  # fmt: skip
    return [files, *cases_of(lambda given: partial(trained, given), cases)]


def fit_cases() -> list[Case]:
    """Return mistakes in rows, and in calls of the estimators that train on them."""
    w, apart = np.zeros(N), (LABELS == "up").astype(float)
    w[:12], held_out = 1, {"run.calibrate": True, "run.random_state": 2, "model.n_centers": 5}
    huge = X.copy()
    huge[7] = 3e38
    out = X.copy()
    out[7] *= 1e4
    is_other_row = np.arange(N) != 7
    steep: dict[str, Any] = {
        "solver": "sgd", "ridge": "auto", "kernel": sk.Polynomial(3), "bandwidth": "auto",
        "scale": "none", "batch_size": 5, "n_centers": "auto",
    }  # fmt: skip
    block: dict[str, Any] = {"solver": "block"}

    def counted() -> Any:
        return sk.ArraySource(X, Y)

    return [
        ("set aside by calibrate have sample weight 0; give more of the rows a weight above",
         lambda: trained(held_out, source=sk.ArraySource(X, Y, sample_weight=w)),
         lambda: trained(held_out, source=sk.ArraySource(X, Y, sample_weight=w + 1))),
        ("or leave calibrate out",
         lambda: trained(held_out, source=sk.ArraySource(X, Y, sample_weight=w)),
         lambda: trained({}, source=sk.ArraySource(X, Y, sample_weight=w))),
        ("add rows of another class", fit_classes(X, LABELS, apart),
         fit_classes(X, LABELS, apart + 1)),
        ("did not help.*check the data for outliers", fit_values(out, Y, **steep | {"epochs": 60}),
         fit_values(out[is_other_row], Y[is_other_row], **steep | {"epochs": 60})),
        ("diverged within its .*check the data for outliers",
         fit_values(out, Y, **steep | {"epochs": 1}),
         fit_values(out[is_other_row], Y[is_other_row], **steep | {"epochs": 1})),
        ("diverged on this block of rows; check the rows for outliers",
         lambda: regressor(**block).partial_fit(X, Y).partial_fit(X, np.full(N, 3e38)),
         lambda: regressor(**block).partial_fit(X, Y).partial_fit(X, Y)),
        ("row 7 is too large for float32.*; correct its values.*or train with precision='float64'",
         lambda: regressor().fit(X, Y).predict(huge),
         lambda: regressor().fit(X, Y).predict(huge[is_other_row]),
         lambda: regressor(precision="float64").fit(X, Y).predict(huge)),
        ("leave run_dir out, or use fit", lambda: regressor(**block, run_dir="p").partial_fit(X, Y),
         lambda: (regressor(**block).partial_fit(X, Y), regressor(**block, run_dir="p").fit(X, Y))),
        ("leave ranks out, or use fit", lambda: regressor(**block, ranks=2).partial_fit(X, Y),
         lambda: regressor(**block).partial_fit(X, Y)),
        ("use fit, or random centers and another solver",
               lambda: regressor(solver="sgd", ridge="auto", n_centers="auto").partial_fit(X, Y),
               lambda: (regressor(solver="sgd", ridge="auto", n_centers="auto").fit(X, Y),
                        regressor(centers="random", solver="block").partial_fit(X, Y))),
        ("use fit, or another solver", lambda: regressor(solver="falkon").partial_fit(X, Y),
         lambda: (regressor(solver="falkon").fit(X, Y), regressor(**block).partial_fit(X, Y))),
        ("give a first block with at least this many rows, lower n_centers, or give centers",
               lambda: regressor(**block).partial_fit(X[:9], Y[:9]),
               lambda: (regressor(**block).partial_fit(X[:20], Y[:20]),
                        regressor(**block, n_centers=9).partial_fit(X[:9], Y[:9]),
                        regressor(**block, n_centers="auto", centers=X).partial_fit(X[:9], Y[:9]))),
        ("the training data has no targets y", lambda: regressor().fit(sk.ArraySource(X)),
         lambda: regressor().fit(counted())),
    ]  # fmt: skip


class Ending(sk.Callback):
    """Ends the process's work after a pass, as a scheduler does."""

    def pass_ended(self, passed: sk.EpochEnd) -> None:
        signal.raise_signal(signal.SIGTERM)


class Misnumbered(sk.ArraySource):
    """Rows of which two have the same number, as in a store whose numbers are damaged."""

    def source_rows(self, u: int) -> Any:
        return np.maximum(super().source_rows(u), 1)


def run_cases() -> list[Case]:
    """Return mistakes about runs that are there already."""
    shift = sk.deterministic(lambda X, Y, rng: (X + 1, Y))
    block: dict[str, Any] = {"solver.name": "block", "data.epochs": 2}
    half: dict[str, Any] = block | {"run.run_dir": "half"}
    every = {"solver.name": "direct", "model.n_centers": "auto", "run.run_dir": "every"}
    function = sk.ArraySource(X, Y, [shift])
    shutil.copytree("run", "begun")
    shutil.rmtree("begun/checkpoints")
    model = regressor().fit(X, Y)
    model.save("model_only")

    def stopped() -> None:
        with contextlib.suppress(sk.TrainingInterrupted):
            trained(half, callbacks=[Ending()])

    def continued_run() -> None:
        stopped()
        early = sk.load("half")
        trained(half)
        early.partial_fit(X, Y)

    def emptied() -> None:
        trained(block | {"run.run_dir": "emptied"})
        loaded = sk.load("emptied")
        shutil.rmtree("emptied/checkpoints")
        loaded.partial_fit(X, Y)

    def started_run() -> None:
        regressor(run_dir="begun").fit("data.zarr")
        command("info begun --importances rows.npz")

    def opened(**given: Any) -> None:
        config = RunConfig().with_overrides(
            USUAL | every | {f"run.{k}": v for k, v in given.items()}
        )
        open_recorded_run(
            config, RunInputs(), run_directory(config, writable=False)
        ).backend.close()

    trained(every)

    def subclass(method: str) -> Any:
        """Train with a callback that has one method of this name."""
        made = type("Made", (sk.Callback,), {method: lambda self, *given: None})
        return lambda: trained({}, callbacks=[made()])

    return [
        ("cannot share the steps of a run whose centers are all of its rows; leave ranks",
         lambda: opened(ranks=2), lambda: (opened(), opened(ranks=2, run_dir="anew"))),
        ("callbacks=.* must be a list of callbacks; put a single callback in a list",
         lambda: trained({}, callbacks=sk.Callback()),
         lambda: trained({}, callbacks=[sk.Callback()])),
        ("override one of begin, record, pass_ended, end", subclass("on_epoch_end"),
         subclass("end")),
        ("give objects of subclasses of streamkern.Callback",
         lambda: trained({}, callbacks=[print]), lambda: trained({}, callbacks=[sk.Callback()])),
        ("stopped by SIGTERM after .* and saved; run the same command again to continue",
         lambda: trained(block | {"run.run_dir": "ended"}, callbacks=[Ending()]),
         lambda: trained(block | {"run.run_dir": "ended"})),
        ("which is not saved with the model; predict in Python from the fitted estimator",
         lambda: (trained({"run.run_dir": "function"}, source=function), sk.load("function")),
         lambda: regressor().fit(function).predict(X)),
        ("has no checkpoint yet; train the run to its first checkpoint, with the same",
         lambda: sk.load("begun"), started_run),
        ("or raise n_rows=", lambda: sk.load("run").permutation_importances(X, Y, n_rows=1),
         lambda: sk.load("run").permutation_importances(X, Y, n_rows=2)),
        ("has no checkpoint yet; train the run to its first checkpoint",
         lambda: (shutil.rmtree("begun/checkpoints", ignore_errors=True),
                  command("info begun --importances rows.npz")),
         started_run),
        ("has no checkpoint yet; train the run to its first checkpoint", emptied,
               lambda: (trained(block | {"run.run_dir": "emptied"}),
                        sk.load("emptied").partial_fit(X, Y))),
        ("was loaded at step .*, but is now at step .*; load the run again", continued_run,
         lambda: sk.load("half").partial_fit(X, Y)),
        ("save an estimator after partial_fit, load a run directory, or use fit",
               lambda: sk.load("model_only").partial_fit(X, Y),
               lambda: (regressor(solver="block").partial_fit(X, Y).save("whole"),
                        sk.load("whole").partial_fit(X, Y), sk.load("half").partial_fit(X, Y),
                        sk.load("model_only").fit(X, Y))),
        ("use fit, or train the run with a number as ridge",
               lambda: (regressor(solver="direct", ridge="auto", run_dir="found").fit(X, Y),
                        sk.load("found").partial_fit(X, Y)),
               lambda: (sk.load("found").set_params(run_dir=None).fit(X, Y),
                        regressor(solver="direct", run_dir="told").fit(X, Y),
                        sk.load("told").partial_fit(X, Y))),
        ("holds another model or run already; give a new or empty directory",
         lambda: model.save("run"), lambda: model.save("new")),
        ("the model was trained on 1 values; use data with the same targets",
         lambda: command("evaluate run labels.zarr"), lambda: command("evaluate run data.zarr")),
        ("its row numbers are damaged; ingest the data again",
               lambda: trained({}).model.predict(Misnumbered(X, Y)),
               lambda: (sk.ingest_store(X, "again.zarr", y=Y),
                        trained({}).model.predict(sk.ZarrSource("again.zarr")))),
    ]  # fmt: skip


def source_cases() -> list[Case]:
    """Return mistakes in sources and transforms, which are functions."""
    shift = sk.deterministic(lambda X, Y, rng: (X + 1, Y))
    both = sk.host_transform(sk.deterministic(lambda X, Y, rng: (X + 1, Y)))
    noisy = sk.ArraySource(X, Y, [sk.GaussianNoise(0.1)])
    return [
        ("leave host_transform out", lambda: trained({}, source=sk.ArraySource(X, Y, [both])),
         lambda: trained({}, source=sk.ArraySource(X, Y, [shift]))),
        ("write the augmented rows to a store and evaluate that",
               lambda: trained({}, test=noisy),
               lambda: (sk.augment_store("data.zarr", "noisy.zarr", transforms=[
                   {"kind": "noise", "sigma": 0.1}]), trained({"data.test": "noisy.zarr"}))),
    ]  # fmt: skip


def sparse_cases() -> list[Case]:
    """Return settings that compute with the features of sparse rows."""

    def fit(rows: Any = None, **given: Any) -> Do:
        return fit_values(long_rows() if rows is None else rows, Y, **given)

    def images(*shape: int) -> Do:
        rows = np.repeat(X, 2, axis=1).reshape(N, *shape)
        source = sk.GeneratorSource(
            lambda seed, epoch, i, j: (rows[i:j], Y[i:j, None]),
            n_rows=N, row_shape=shape, dtype=np.float64, n_outputs=1, name="images",
        )  # fmt: skip
        return fit_values(source)

    return [
        ("leave metric out", fit(metric=np.ones(4)), fit()),
        ("leave centers='kmeans' out", fit(centers="kmeans"), fit()),
        ("leave it out, and scale the features before", fit(scale="feature"),
         fit(long_rows() * 0.5)),
        ("leave them out, or train on a few features",
         lambda: regressor().fit(long_rows(), Y).permutation_importances(long_rows(), Y),
         lambda: regressor().fit(X, Y).permutation_importances(X, Y)),
        (r"give images a channel, \(2, 3, 1\)", images(2, 3), images(2, 3, 1)),
    ]  # fmt: skip


TABLES = (setting_cases, fit_cases, source_cases, run_cases, sparse_cases)
