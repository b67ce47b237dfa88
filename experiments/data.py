"""The rows of an experiment, split into training and test rows, and one run of streamkern on them.

Without `--data` the rows are scikit-learn's digits. `experiments.readers` says which files a folder
given as `--data` may hold.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from zlib import crc32

import numpy as np
from scipy.spatial.distance import pdist

import streamkern as sk
from experiments.results import Array

DIGITS, MIN_ROWS, TEST_ROWS = "digits", 200, 10_000
MEASURED = ("test error, %", "test mean squared error")
"""Names of the figures by which a run is judged, for classes and for values."""


@dataclass(frozen=True)
class Split:
    """Rows to train on and rows to test on, as stored and in random order.

    X : (n, ...) rows. y : (n,) class ids, or values where `classes` is None.
    bandwidth : the median distance of training rows times `--bandwidth`, after scaling; the same
        for all that is compared.
    seed : of everything that is drawn.
    """

    X: Array
    y: Array
    X_test: Array
    y_test: Array
    classes: tuple[str, ...] | None
    scale: sk.Scale
    bandwidth: float
    seed: int
    device: str

    def source(
        self, rows: int | None = None, copies: int = 1, transforms: Sequence[Any] = ()
    ) -> sk.AugmentedSource:
        """Return `copies` of the first `rows` rows, scaled and transformed.

        Transforms that keep the storage dtype, such as crops, act before the scaling.
        """
        base = sk.ArraySource(self.X[:rows], self.y[:rows], classes=self.classes)
        early = [t for t in transforms if getattr(t, "keeps_dtype", False)]
        late = [t for t in transforms if t not in early]
        return sk.AugmentedSource(base, copies, [*early, self.scale, *late])

    @cached_property
    def scaled(self) -> tuple[Array, Array]:
        """Return training and test rows, float64, flat, scaled and divided by the bandwidth."""

        def prepared(A: Array) -> Array:
            flat = A.reshape(len(A), -1).astype(np.float64)
            return np.asarray((flat - self.scale.mean) / (self.scale.scale * self.bandwidth))

        return prepared(self.X), prepared(self.X_test)

    @cached_property
    def targets(self) -> Array:
        """Return (n, c) targets, float64: 0 and 1 for classes, or the values minus their mean."""
        if self.classes is None:
            return centred(self.y)
        return np.asarray(np.eye(len(self.classes))[self.y])

    @cached_property
    def test_targets(self) -> Array:
        """Return (m, c) targets of the test rows, minus the mean of the training rows."""
        if self.classes is None:
            values = np.asarray(self.y_test, np.float64).reshape(len(self.y_test), -1)
            return np.asarray(values - np.asarray(self.y, np.float64).mean())
        return np.asarray(np.eye(len(self.classes))[self.y_test])

    def error(self, outputs: Array) -> float:
        """Return the test error of (m, c) outputs: wrong classes in %, or mean squared error."""
        if self.classes is None:
            outputs = outputs.reshape(len(outputs), -1) + self.y.mean()
            return float(((outputs - self.y_test.reshape(len(outputs), -1)) ** 2).mean())
        return percent_wrong(float((outputs.argmax(axis=1) == self.y_test).mean()))


def centred(y: Array) -> Array:
    """Return values (n,) or (n, c) minus their mean, (n, c) float64."""
    values = np.asarray(y, np.float64).reshape(len(y), -1)
    return np.asarray(values - values.mean())


@dataclass(frozen=True)
class Data:
    """All rows in memory. held_out : the rows of a test set, if there is one.

    own : whether the user gave the rows; otherwise built-in rows replace the paper's data.
    """

    name: str
    X: Array
    y: Array
    classes: tuple[str, ...] | None
    held_out: tuple[Array, Array] | None
    own: bool

    @property
    def measured(self) -> str:
        """Return the name of the figure by which a run is judged."""
        return MEASURED[self.classes is None]

    def checksum(self) -> int:
        """Return a checksum of all rows and targets."""
        found = 0
        for array in (self.X, self.y, *(self.held_out or ())):
            found = crc32(np.ascontiguousarray(array).data, found)
        return found

    def splits(self, options: argparse.Namespace) -> Iterator[Split]:
        """Yield one split for each repetition, with its own order, centers and test rows."""
        for seed in range(options.repetitions):
            order = np.random.default_rng([seed, 0]).permutation(len(self.X))
            X, y = self.X[order], self.y[order]
            X_test, y_test = self.held_out or (X[: len(X) // 4], y[: len(X) // 4])
            if self.held_out is None:
                X, y = X[len(X) // 4 :], y[len(X) // 4 :]
            X, y = X[: options.rows], y[: options.rows]
            scale = scale_of(X)
            few = X[:400].reshape(len(X[:400]), -1).astype(np.float64) / scale.scale
            width = options.bandwidth * float(np.median(pdist(few)))
            yield Split(
                X, y, X_test[:TEST_ROWS], y_test[:TEST_ROWS], self.classes, scale, width, seed,
                options.device,
            )  # fmt: skip


def scale_of(X: Array) -> sk.Scale:
    """Return one mean and deviation for images, and one of each feature for other rows."""
    if X.ndim > 2:
        return sk.Scale(mean=float(X.mean()), scale=float(X.std()) or 1.0)
    deviation = X.std(axis=0, dtype=np.float64)
    deviation[deviation == 0] = 1.0
    return sk.Scale("feature", mean=X.mean(axis=0, dtype=np.float64), scale=deviation)


def digits() -> Data:
    """Return scikit-learn's digits: 1797 images of 8 x 8 in ten classes."""
    from sklearn.datasets import load_digits

    X, y = load_digits(return_X_y=True)
    images = X.astype(np.uint8).reshape(-1, 8, 8, 1)
    return Data(DIGITS, images, y, tuple("0123456789"), None, own=False)


@dataclass(frozen=True)
class Fitted:
    """The outcome of a run.

    error : on the test rows; see `Data.measured`.
    outputs : (m, c) of the test rows.
    seconds : of setup and training.
    history : (samples seen, error) of every evaluation.
    """

    error: float
    seconds: float
    history: list[tuple[int, float]]
    outputs: Array

    def after(self, samples: float) -> float:
        """Return the error of the first evaluation at or after a number of samples."""
        return next(error for seen, error in self.history if seen >= samples)


def fit(
    split: Split,
    source: sk.AugmentedSource,
    settings: Mapping[str, Any],
    centers: Array | None = None,
) -> Fitted:
    """Train one model.

    settings : as `RunConfig.with_overrides` takes them; by default a Laplace kernel for one epoch,
        without an intercept for classes, as in the papers; values, such as years, have a mean.
    centers : (p, ...) rows as stored; None: `model.centers` chooses them.
    """
    config = sk.RunConfig.from_tables(
        {
            "data": {"train": "in memory", "epochs": 1},
            "model": {
                "kernel": "laplace",
                "bandwidth": split.bandwidth,
                "fit_intercept": split.classes is None,
            },
            "run": {"random_state": split.seed, "device": split.device, "evaluate_every": 0},
        }
    ).with_overrides(settings)
    test = sk.ArraySource(split.X_test, split.y_test, classes=split.classes)
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "class .* no rows")  # a few rows may lack a class
        result = sk.train_model(config, source=source, test=test, centers=centers)
    seconds = time.perf_counter() - began
    outputs = np.asarray(result.model.predict(test))
    result.model.backend.close()
    history = [(int(e["samples"]), error_of(split, e)) for e in result.history]
    return Fitted(error_of(split, result.metrics), seconds, history, outputs)


def add_solver(parser: argparse.ArgumentParser) -> None:
    """Add the solver of the models, which is EP3's own if it is not given."""
    parser.add_argument(
        "--solver", default="eigenpro3", help="that trains the models (default eigenpro3)"
    )


def error_of(split: Split, metrics: Mapping[str, Any]) -> float:
    """Return the error of an evaluation's metrics."""
    if split.classes is None:
        return float(metrics["test_mse"])
    return percent_wrong(metrics["test_accuracy"])


def work_of_fit(split: Split, rows: int, p: int, epochs: float) -> float:
    """Return the approximate multiplications and additions of `epochs` epochs over `rows`."""
    d, c = int(np.prod(split.X.shape[1:])), len(split.classes or " ")
    passes = epochs * rows * p * (2 * d + 4 * c + 60)
    # A run of few rows is bound by its beginning, and kernel values are slower than products.
    return 6 * passes + 1e10 + 10 * min(p, 2000) ** 2 * p


def percent_wrong(accuracy: float) -> float:
    """Return the error in percent, rounded so that equal numbers of wrong rows are equal errors."""
    return round(100 * (1 - accuracy), 9)
