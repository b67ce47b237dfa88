"""Regression on sparse rows with 65 million features, as the slides' YELP has.

The features of a review are its words and the sequences of two and three words: about a hundred of
65 million. The rows stay sparse from the source to the kernel. `--file` reads a LIBSVM file.
Without it, reviews are generated: words drawn by Zipf's law, and stars that are the mean sentiment
of the words, with noise. `--centers` is FALKON's number of centers; the slides state neither this
number nor the kernel. With the linear kernel, the model of all rows is ridge regression on all
features, which scikit-learn computes for comparison. A dense row would take 260 MB, a sparse row
takes 1 kB.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

import streamkern as sk
from experiments.experiment import Experiment, Point, Sizes, Verdict
from experiments.results import Array, Measurement, Results, doubled, shown

RMSE, SECONDS = "test RMSE, stars", "seconds of a fit"
FALKON, ALL_ROWS, DEFAULT = "FALKON, linear", "all rows, linear", "defaults"
RIDGE, PRIMAL = 1e-4, "(ridge regression, scikit-learn)"
FEATURES, WORDS, LENGTH = 65_000_000, 30_000, 40
TEST_SHARE = 4


def reviews(n: int, rng: np.random.Generator) -> tuple[Any, Array]:
    """Return rows (n, FEATURES) of length one, and stars (n,).

    The sentiment of a word is drawn once; a word after the word 0, "not", has it reversed.
    """
    sentiment = np.random.default_rng(7).standard_normal(WORDS)
    shares = 1 / np.arange(3, WORDS + 3)
    words = rng.choice(WORDS, (n, LENGTH), p=shares / shares.sum())
    after_not = np.pad(words[:, :-1] == 0, ((0, 0), (1, 0)))
    means = np.where(after_not, -sentiment[words], sentiment[words]).mean(axis=1)
    stars = np.clip(3 + 6 * means + 0.5 * rng.standard_normal(n), 1, 5)
    padded = np.concatenate([words, np.zeros((n, 2), int)], axis=1).astype(np.uint64) + 1
    grams, factor = [], np.uint64(11400714819323198485)
    hashed = np.zeros((n, LENGTH), np.uint64)
    for k in range(3):
        hashed = (hashed + padded[:, k : k + LENGTH]) * factor
        grams.append((hashed >> np.uint64(16)) % np.uint64(FEATURES))
    features = np.concatenate(grams, axis=1).astype(np.int64)
    starts = np.arange(n + 1) * features.shape[1]
    counts = sp.csr_array((np.ones(features.size), features.ravel(), starts), (n, FEATURES))
    return of_length_one(counts), stars


def of_length_one(X: Any) -> Any:
    """Return the logarithms of counts, one added, in rows of length one, float32."""
    X = X.tocsr(copy=True)
    X.sum_duplicates()
    X.data = np.log1p(X.data)
    lengths = np.repeat(np.sqrt((X * X).sum(axis=1)), np.diff(X.indptr))
    X.data = (X.data / lengths).astype(np.float32)
    return X


def read(path: str) -> tuple[Any, Array]:
    """Return the rows and targets of a LIBSVM file."""
    from sklearn.datasets import load_svmlight_file

    X, y = load_svmlight_file(path, dtype=np.float32)
    return of_length_one(sp.csr_array(X)), y


def model_of(label: str, p: int, options: argparse.Namespace) -> sk.KernelRegressor:
    """Return the model of a curve. p : the centers of FALKON"""
    plain: dict[str, Any] = {"fit_intercept": False, "ridge": RIDGE, "device": options.device}
    if label == FALKON:
        return sk.KernelRegressor("linear", solver="falkon", n_centers=p, epochs=20, **plain)
    if label == ALL_ROWS:
        return sk.KernelRegressor("linear", solver="direct", centers="all", **plain)
    return sk.KernelRegressor(device=options.device)


def points(data: object, options: argparse.Namespace) -> Iterator[Point]:
    """Measure RMSE and seconds of three models and of ridge regression."""

    def run(n: int, p: int, seed: int) -> Iterator[Measurement]:
        rng = np.random.default_rng(seed)
        if options.file is None:
            X, y = reviews(n + n // TEST_SHARE, rng)
        else:
            X, y = read(options.file)
            order = rng.permutation(len(y))[: n + n // TEST_SHARE]
            X, y = X[order], y[order]
        mean = y[:n].mean()

        def measured(label: str, model: Any, A: Any) -> Iterator[Measurement]:
            began = time.perf_counter()
            model.fit(A[:n], y[:n] - mean)
            yield Measurement(SECONDS, label, n, time.perf_counter() - began)
            missed = np.asarray(model.predict(A[n:])) + mean - y[n:]
            yield Measurement(RMSE, label, n, float(np.sqrt((missed**2).mean())))

        for label in (FALKON, ALL_ROWS, DEFAULT):
            yield from measured(label, model_of(label, p, options), X)
        yield from measured(PRIMAL, ridge_regression(n), X[:, np.unique(X.indices)])

    sizes = doubled(min(500, options.rows), options.rows, options.quick)[-3:]
    for seed in range(options.repetitions):
        for n in sizes:
            p = min(options.centers or n // 4, n)
            yield Point(f"n {n}, repetition {seed}", 2e3 * n * n, partial(run, n, p, seed))


def ridge_regression(n: int) -> Any:
    """Return the primal problem of the linear kernel with all rows as centers."""
    from sklearn.linear_model import Ridge

    return Ridge(alpha=n * RIDGE, fit_intercept=False, solver="sparse_cg", tol=1e-8)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    parser.add_argument("--file", type=_existing, help="a LIBSVM file of counts to read")
    parser.add_argument("--centers", type=int, help="FALKON's centers; default: a quarter of n")


def _existing(path: str) -> str:
    if not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {path!r}")
    return path


def judge(results: Results) -> Verdict:
    """Judge the models with the linear kernel against ridge regression on all features."""
    places = results.places(ALL_ROWS, RMSE)
    gaps = [
        np.abs(results.at(ALL_ROWS, n, RMSE) / results.at(PRIMAL, n, RMSE) - 1).max()
        for n in places
    ]
    n = places[-1]
    falkon, primal = (results.at(label, n, RMSE) for label in (FALKON, PRIMAL))
    ratio = float((falkon / primal).max())
    return Verdict(
        "with all rows as centers the RMSE is that of ridge regression on all features to .1 %, "
        "and FALKON's with a quarter of the rows as centers is at most 10 % above at the largest n",
        bool(max(gaps) < 1e-3 and ratio < 1.1),
        f"largest difference {100 * max(gaps):.2g} %; n = {n:g}: FALKON {shown(falkon)}, ridge "
        f"regression {shown(primal)}",
    )


EXPERIMENT = Experiment(
    source="FALKON, the table of YELP",
    claim="rows with 65 million features, most of them 0, are trained on as they are",
    x="training rows n",
    points=points,
    judge=judge,
    stand_in=Sizes(rows=8000, repetitions=2, epochs=20),
    paper=Sizes(rows=1_500_000, repetitions=1, epochs=20),
    published="FALKON (slides): RMSE .833 on YELP (n about 10^6), 20 minutes",
    needs="nothing",
    options=add_options,
)
