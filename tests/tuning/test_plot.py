"""Check the plot of a search: its axes, its lines, and the mark of the best trial."""

from __future__ import annotations

from typing import Any

import pytest

from streamkern.basics.plots import png_bytes
from streamkern.tuning import plot
from streamkern.tuning.plot import scores_figure


def table_row(
    kernel: str, width: float, ridge: float, error: float, se: float | None = None
) -> dict[str, Any]:
    """Return a row of the table of trials."""
    return {
        "kernel": kernel, "bandwidth": width, "ridge": ridge, "held_out_mse": error, "se": se,
    }  # fmt: skip


def tick_texts(axis: Any) -> list[str]:
    """Return the labels of the ticks within the view of an axis."""
    low, high = sorted(axis.get_view_interval())
    return [t.get_text() for t in axis.get_ticklabels() if low <= value_of(t) <= high]


def value_of(label: Any) -> float:
    """Return the number in a label; NaN if it is empty."""
    return float(label.get_text() or "nan")


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.3, 3.0, 30.0, 1e4])
def test_axes_are_labelled_at_decades(factor: float) -> None:
    table = [table_row("laplace", 2.0 * factor**k, 0.0, 0.5 * factor**-k) for k in range(3)]
    figure = scores_figure(table, table[2])
    figure.canvas.draw()
    (axes,) = figure.axes
    for axis in (axes.xaxis, axes.yaxis):
        labels = tick_texts(axis)
        assert 2 <= len(labels) <= 12
        assert all(float(text) > 0 for text in labels)
    if factor >= 30:
        assert {"10", "100", "1000"} <= set(tick_texts(axes.xaxis))


def test_best_trial_is_titled_and_marked() -> None:
    table = [table_row("laplace", 2.0, 0.0, 0.5), table_row("gaussian", 8.0, 1e-6, 0.25)]
    figure = scores_figure(table, table[1])
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "Best: gaussian, bandwidth 8, ridge 1e-06; error 0.25"
    lines = {line.get_label(): line for line in axes.lines}
    ring, marked = lines["the best"], lines["gaussian, ridge 1e-06"]
    assert (ring.get_xdata()[0], ring.get_ydata()[0]) == (marked.get_xdata()[0], 0.25)
    assert ring.get_xdata()[0] == pytest.approx(
        8.0, rel=0.01
    )  # lines are shifted by less than 1 %, so that none hides another
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert shown == ["laplace, ridge 0", "gaussian, ridge 1e-06", "the best"]


def test_colour_is_kernel_and_dash_is_ridge() -> None:
    table = [table_row(k, 2.0, r, 0.5, se=0.1) for k in ("laplace", "cauchy") for r in (0.0, 1e-6)]
    (axes,) = scores_figure(table, table[0]).axes
    styles = {line.get_label(): (line.get_color(), line.get_linestyle()) for line in axes.lines}
    assert styles["laplace, ridge 0"][0] == styles["laplace, ridge 1e-06"][0]
    assert styles["laplace, ridge 0"][0] != styles["cauchy, ridge 0"][0]
    assert styles["laplace, ridge 0"][1] == styles["cauchy, ridge 0"][1]
    assert styles["laplace, ridge 0"][1] != styles["laplace, ridge 1e-06"][1]
    assert len(axes.collections) == 4  # error bars


def test_chosen_metric_is_drawn_and_named() -> None:
    more = {"held_out_balanced_accuracy": 0.75}
    table = [table_row("laplace", width, 0.0, 0.5) | more for width in (2.0, 4.0)]
    (axes,) = scores_figure(table, table[0], "balanced_accuracy").axes
    title = "Best: laplace, bandwidth 2, ridge 0; balanced accuracy 0.75"
    assert axes.get_title(loc="left") == title
    assert (axes.get_ylabel(), axes.get_yscale()) == (
        "balanced accuracy of rows held out",
        "linear",
    )
    assert list(axes.lines[0].get_ydata()) == [0.75, 0.75]


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
