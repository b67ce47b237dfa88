"""The section of predictions on test rows: against the truth, or counted by class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.array_types import Floats
from streamkern.cli.page.charts import scatter_chart
from streamkern.cli.page.facts import RunFacts, TestPredictions
from streamkern.cli.page.html import NO_HTML, Html, html_table, joined_html, tag
from streamkern.cli.page.sections import count_cell, run_label, section
from streamkern.predict.evaluation import reliability_sums
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.sampling import sample_rows
from streamkern.train.model.kernel_model import KernelModel

MAX_REPORT_ROWS = 2000
"""Largest number of rows that are predicted."""
MAX_REPORT_UNITS = 16
"""Largest number of units from which these rows are drawn."""
PREDICTIONS_STAGE = 44
"""Stage of the random draw, see `sample_rows`."""
MAX_CHART_POINTS = 500
"""Largest number of points of a chart."""
MAX_TABLE_CLASSES = 20
"""Largest number of classes with a full table, and of mistakes in the table for more classes."""


def predict_test_rows(model: KernelModel, source: BaseSource) -> TestPredictions | None:
    """Return predictions of a sample of rows; None if their targets are shares of classes."""
    source = model.align_source(source, with_targets=True)
    n = min(MAX_REPORT_ROWS, source.n_rows)
    block = sample_rows(source, n, 0, stage=PREDICTIONS_STAGE, max_units=MAX_REPORT_UNITS)
    F, y = model.values(block.X), np.asarray(block.y)
    if model.classes is not None and y.ndim > 1:
        return None
    predictions = F[:, 0] if model.classes is None else F.argmax(axis=1)
    truth = y.reshape(len(y), -1)[:, 0]
    pairs = np.column_stack([truth, predictions]).astype(np.float64)
    if model.classes is None:
        return TestPredictions(len(y), source.n_rows, None, pairs, F.shape[1])
    calibration = model.calibration
    reliability = None
    if calibration is not None and calibration.probabilities is not None:
        reliability = _reliability_points(calibration.probabilities(F), truth)
    return TestPredictions(
        len(y), source.n_rows, tuple(model.classes), pairs, reliability=reliability
    )


def _reliability_points(p: Floats, labels: npt.NDArray[Any]) -> Floats:
    """Return the mean largest probability and the accuracy of each bin that has rows, (k, 2).

    p : (n, c) probabilities of the classes
    labels : (n,) ids of the true classes
    """
    counts, *sums = reliability_sums(p, labels, np.ones(len(p)))
    has_rows = counts > 0
    points: Floats = np.stack([total[has_rows] for total in sums], axis=1)
    points /= counts[has_rows, None]
    return points


def predictions_section(runs: Sequence[RunFacts]) -> Html:
    """Return the section with predicted against true values, or tables of classes."""
    parts = [
        _prediction_charts(run, k) for k, run in enumerate(runs) if run.predictions is not None
    ]
    return section("Predictions on test rows", *parts)


def _prediction_charts(run: RunFacts, k: int) -> Html:
    """Return charts for values, or tables and a chart for classes, of run k."""
    predictions = run.predictions
    assert predictions is not None
    all_rows = predictions.n_rows == predictions.n_data_rows
    of_text = "" if all_rows else f" of {predictions.n_data_rows:,}, at random"
    heading = tag(
        "p", run_label(run, k), f" {predictions.n_rows:,} rows of the test data{of_text}."
    )
    if predictions.names is not None:
        counts = _confusion_table(predictions.pairs.astype(np.int64), predictions.names)
        return joined_html([heading, counts, _reliability_chart(predictions.reliability, k)])
    if predictions.n_outputs > 1:
        note = f"The charts show the first of {predictions.n_outputs} outputs."
        heading = joined_html([heading, tag("p", note)])
    true, predicted = predictions.pairs[:MAX_CHART_POINTS].T
    charts = [
        scatter_chart(
            "Predicted against true", true, predicted, "true value", "predicted value", k,
            diagonal=True,
        ),
        scatter_chart(
            "Residuals", predicted, predicted - true, "predicted value",
            "predicted minus true value", k,
        ),
    ]  # fmt: skip
    return joined_html([heading, tag("div", *charts, class_="charts")])


def _reliability_chart(points: Floats | None, k: int) -> Html:
    """Return the chart of accuracy against probability; empty without probabilities.

    points : as in `TestPredictions.reliability`
    """
    if points is None:
        return NO_HTML
    probability, accuracy = points.T
    chart = scatter_chart(
        "Reliability of the probabilities", probability, accuracy,
        "mean probability of the predicted class", "share of rows where it is true", k,
        diagonal=True,
    )  # fmt: skip
    return tag("div", chart, class_="charts")


def _confusion_table(pairs: npt.NDArray[np.int64], names: Sequence[str]) -> Html:
    """Return the confusion matrix; with many classes, a table of the most frequent mistakes.

    pairs : (n, 2) ids of the true and the predicted class
    names : names of the classes
    """
    counts = np.zeros((len(names), len(names)), np.int64)
    np.add.at(counts, (pairs[:, 0], pairs[:, 1]), 1)
    if len(names) <= MAX_TABLE_CLASSES:
        rows = [
            [name, *(count_cell(int(n)) for n in line)]
            for name, line in zip(names, counts, strict=True)
        ]
        marked = [(i, i + 1) for i in range(len(names))]
        return html_table(["true class, and predicted as", *names], rows, marked=marked)
    np.fill_diagonal(counts, 0)
    most_frequent = np.argsort(-counts, axis=None, kind="stable")[:MAX_TABLE_CLASSES]
    cells = [
        divmod(int(flat_index), len(names))
        for flat_index in most_frequent
        if counts.flat[flat_index]
    ]
    if not cells:
        return NO_HTML
    mistakes = [[names[i], names[j], count_cell(int(counts[i, j]))] for i, j in cells]
    return html_table(["true class", "predicted as", "rows"], mistakes, left=(1,))
