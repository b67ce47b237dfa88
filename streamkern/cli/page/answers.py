"""The section of predictions on held-out rows: against the truth, or counted by class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.array_types import Floats
from streamkern.cli.page.charts import scatter_chart
from streamkern.cli.page.facts import Facts, HeldOutAnswers
from streamkern.cli.page.html import NO_HTML, Html, html_table, joined_html, tag
from streamkern.cli.page.sections import count_cell, run_label, section
from streamkern.predict.evaluation import BINS
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.sampling import sample_rows
from streamkern.train.model.kernel_model import KernelModel

SHOWN_ROWS, SHOWN_UNITS, ANSWERS_STAGE = 2000, 16, 44
SHOWN_POINTS, SHOWN_CLASSES = 500, 20


def answers_on(model: KernelModel, source: BaseSource) -> HeldOutAnswers | None:
    """Return the predictions for a sample of rows; None if the targets are shares of classes."""
    source = model.checked(source, targets=True)
    block = sample_rows(
        source, min(SHOWN_ROWS, source.n_rows), 0, stage=ANSWERS_STAGE, max_units=SHOWN_UNITS
    )  # fmt: skip
    F, y = model.values(block.X), np.asarray(block.y)
    if model.classes is not None and y.ndim > 1:
        return None
    answers = F[:, 0] if model.classes is None else F.argmax(axis=1)
    truth = y.reshape(len(y), -1)[:, 0]
    pairs = np.column_stack([truth, answers]).astype(np.float64)
    if model.classes is None:
        return HeldOutAnswers(len(y), source.n_rows, None, pairs, F.shape[1])
    calibration = model.calibration
    known = None if calibration is None else calibration.probabilities
    reliability = None if known is None else _reliability(known(F), truth)
    return HeldOutAnswers(
        len(y), source.n_rows, tuple(model.classes), pairs, reliability=reliability
    )


def _reliability(p: Floats, labels: npt.NDArray[Any]) -> Floats:
    """Return the mean largest probability and the accuracy (k, 2) of each bin that has rows."""
    largest, right = p.max(axis=1), p.argmax(axis=1) == labels
    bins = np.minimum((largest * BINS).astype(np.int64), BINS - 1)
    sums = [np.bincount(bins, w, BINS) for w in (largest, right, np.ones(len(bins)))]
    filled = sums[2] > 0
    return np.stack([sums[0][filled], sums[1][filled]], axis=1) / sums[2][filled, None]


def answers_section(runs: Sequence[Facts]) -> Html:
    """Return the section of predicted against true values, or of counts by true class."""
    parts = [_answers_of_run(run, k) for k, run in enumerate(runs) if run.answers is not None]
    return section("Answers on held-out rows", *parts)


def _answers_of_run(run: Facts, k: int) -> Html:
    found = run.answers
    assert found is not None
    of = "" if found.n_rows == found.whole else f" of {found.whole:,}, at random"
    words = tag("p", run_label(run, k), f" {found.n_rows:,} rows of the test data{of}.")
    if found.names is not None:
        counts = _confusion(found.pairs.astype(np.int64), found.names)
        return joined_html([words, counts, _reliability_chart(found.reliability, k)])
    if found.n_outputs > 1:
        note = f"The charts show the first of {found.n_outputs} outputs."
        words = joined_html([words, tag("p", note)])
    true, predicted = found.pairs[:SHOWN_POINTS].T
    charts = [
        scatter_chart(
            "Predicted against true", true, predicted, "true value", "predicted value", k,
            diagonal=True,
        ),
        scatter_chart(
            "Residuals", predicted, true - predicted, "predicted value",
            "true minus predicted value", k,
        ),
    ]  # fmt: skip
    return joined_html([words, tag("div", *charts, class_="charts")])


def _reliability_chart(points: Floats | None, k: int) -> Html:
    if points is None:
        return NO_HTML
    stated, true = points.T
    chart = scatter_chart(
        "Reliability of the probabilities", stated, true,
        "mean probability of the predicted class", "share of rows where it is true", k,
        diagonal=True,
    )  # fmt: skip
    return tag("div", chart, class_="charts")


def _confusion(pairs: npt.NDArray[np.int64], names: Sequence[str]) -> Html:
    """Return a table of true by predicted classes; of many classes the most frequent mistakes."""
    counts = np.zeros((len(names), len(names)), np.int64)
    np.add.at(counts, (pairs[:, 0], pairs[:, 1]), 1)
    if len(names) <= SHOWN_CLASSES:
        rows = [
            [name, *(count_cell(int(n)) for n in line)]
            for name, line in zip(names, counts, strict=True)
        ]
        marked = [(i, i + 1) for i in range(len(names))]
        return html_table(["true class, and predicted as", *names], rows, marked=marked)
    np.fill_diagonal(counts, 0)
    common = np.argsort(-counts, axis=None, kind="stable")[:SHOWN_CLASSES]
    places = [divmod(int(at), len(names)) for at in common if counts.flat[at]]
    if not places:
        return NO_HTML
    found = [[names[i], names[j], count_cell(int(counts[i, j]))] for i, j in places]
    return html_table(["true class", "predicted as", "rows"], found, left=(1,))
