"""Support vector machines by the squared hinge, streamed, against scikit-learn's SVC. The lecture.

The loss "squared_hinge" trains one model for each class against the others; SVC solves the hinge's
dual, with the same Gaussian kernel and bandwidth, for pairs of classes, and C = 10. The optimum of
the squared hinge is compared with independent solvers in the tests of the losses; here the errors
are compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import streamkern as sk
from experiments.data import Data, Split, percent_wrong
from experiments.experiment import Experiment, Point, Sizes, Verdict
from experiments.results import Measurement, Results, clearly, doubled, shown

OURS, SQUARES, SVC = "squared hinge, streamed", "squares, streamed", "SVC (hinge, dual)"
LOSSES = {OURS: "squared_hinge", SQUARES: "squared_error"}


def points(data: Data, options: argparse.Namespace) -> Iterator[Point]:
    """Yield points of the error against n, for three classifiers."""

    def run(split: Split, label: str, n: int) -> Iterator[Measurement]:
        X, X_test = split.scaled
        model = classifier(label, split)
        model.fit(X[:n], split.y[:n])
        right = float((model.predict(X_test) == split.y_test).mean())
        yield Measurement(data.measured, label, n, percent_wrong(right))

    for split in data.splits(options):
        if split.classes is None:
            raise sk.DataError(f"{options.data} has values, and lecture_svm needs classes")
        for n in doubled(len(split.X) // 8, len(split.X), options.quick):
            for label in (OURS, SQUARES, SVC):
                key = f"{label}, n {n}, repetition {split.seed}"
                yield Point(key, 1e9 + 1e4 * n * split.X[0].size, partial(run, split, label, n))


def classifier(label: str, split: Split) -> Any:
    """Return a classifier with a Gaussian kernel of bandwidth 1, for scaled rows."""
    if label == SVC:
        from sklearn.svm import SVC as Dual

        return Dual(C=10, gamma=0.5)
    return sk.KernelClassifier(
        "gaussian", bandwidth=1.0, loss=LOSSES[label], scale="none", metric="none",
        random_state=split.seed, device=split.device,
    )  # fmt: skip


def judge(results: Results) -> Verdict:
    """Judge the squared hinge against the dual's error at the largest n."""
    (figure,) = results.values
    n = results.places(OURS, figure)[-1]
    errors = {label: results.at(label, n, figure) for label in (OURS, SQUARES, SVC)}
    return Verdict(
        "at the largest n the error of the squared hinge is not clearly above that of SVC",
        not clearly(errors[OURS] - errors[SVC]),
        f"n = {n:g}: " + ", ".join(f"{label} {shown(error)}" for label, error in errors.items()),
    )


EXPERIMENT = Experiment(
    source="Lecture, support vector machines",
    claim="a support vector machine can be trained as a streamed kernel model",
    x="training samples n",
    points=points,
    judge=judge,
    stand_in=Sizes(repetitions=3, epochs=1),
    paper=Sizes(rows=10_000, repetitions=1, epochs=1),
)
