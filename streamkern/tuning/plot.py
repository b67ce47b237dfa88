"""Plot the result of a search: the metric against the bandwidth.

Each kernel has a colour, and each ridge a dash style.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from streamkern.basics.plots import log_axis, new_figure
from streamkern.kernels.notation import kernel_text

_LINE_STYLES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 1.5, 1, 1.5)))
_MARKERS = "osD^v<>P"
_LINE_SHIFT = 0.006
"""Shift between lines as a share of the width, so that error bars do not hide each other."""


def scores_figure(
    table: Sequence[Mapping[str, Any]], best: Mapping[str, Any], metric: str = "mse"
) -> Any:
    """Return the plot of a search as a figure. Raises MissingDependencyError without Matplotlib.

    Error bars are standard errors of the difference to the best value. Kernels without a bandwidth
    are horizontal lines. Trainings that diverged are left out.

    table, best, metric : as in `Tuned`
    """
    figure = new_figure(8.4, 4.8)
    axes = figure.add_subplot()
    bandwidths = [row["bandwidth"] for row in table if row["bandwidth"] is not None]
    # A line for each kernel and ridge.
    lines = list(dict.fromkeys((kernel_text(row["kernel"]), row["ridge"]) for row in table))
    kernels = sorted({kernel for kernel, _ in lines})
    ridges = sorted({ridge for _, ridge in lines})
    log_range = math.log(max(bandwidths) / min(bandwidths)) if bandwidths else 0.0
    best_shift, metric_key = 1.0, f"held_out_{metric}"
    for k, (kernel, ridge) in enumerate(lines):
        rows = [r for r in table if (kernel_text(r["kernel"]), r["ridge"]) == (kernel, ridge)]
        style = {
            "color": f"C{kernels.index(kernel) % 10}",
            "ls": _LINE_STYLES[ridges.index(ridge) % len(_LINE_STYLES)],
            "marker": _MARKERS[ridges.index(ridge) % len(_MARKERS)],
            "label": f"{kernel}, ridge {ridge:.3g}",
        }
        # The shifts are symmetric about the true bandwidths, on a log scale.
        shift = math.exp(_LINE_SHIFT * log_range * (k - (len(lines) - 1) / 2))
        converged = [row for row in rows if row["held_out_mse"] is not None]
        _draw_kernel_line(axes, converged, metric_key, style, shift)
        if (kernel, ridge) == (kernel_text(best["kernel"]), best["ridge"]):
            best_shift = shift
    _mark_best(axes, best, metric, best_shift)
    # Errors and losses are compared by their ratios, shares such as the accuracy are not.
    shares = ("accuracy", "balanced_accuracy", "r2")
    figures = [row[metric_key] for row in table if row["held_out_mse"] is not None]
    if metric not in shares and min(figures) > 0:
        log_axis(axes, "y")
    if bandwidths:
        log_axis(axes, "x")
    else:
        axes.set_xticks([])
    axes.set_xlabel("bandwidth" if bandwidths else "no kernel that was tried has a bandwidth")
    label = "mean squared error" if metric == "mse" else metric.replace("_", " ")
    axes.set_ylabel(f"{label} of rows held out")
    axes.grid(which="major", color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8.5, handlelength=3)
    return figure


def _draw_kernel_line(
    axes: Any,
    rows: Sequence[Mapping[str, Any]],
    metric_key: str,
    style: Mapping[str, Any],
    shift: float,
) -> None:
    """Draw the line of a kernel and a ridge.

    metric_key : name of the entry of `rows` with the metric
    shift : factor of the bandwidths, so that error bars do not hide each other
    """
    if not rows:
        return
    if rows[0]["bandwidth"] is None:
        line_style = {name: value for name, value in style.items() if name != "marker"}
        axes.axhline(rows[0][metric_key], lw=1.3, **line_style)
        return
    rows = sorted(rows, key=lambda row: float(row["bandwidth"]))
    bandwidths = [shift * row["bandwidth"] for row in rows]
    errors = [row[metric_key] for row in rows]
    axes.plot(bandwidths, errors, ms=4, lw=1.4, **style)
    bars = [row["se"] or 0.0 for row in rows]
    axes.errorbar(bandwidths, errors, bars, fmt="none", ecolor=style["color"], elinewidth=0.8,
        capsize=0, alpha=0.55)  # fmt: skip


def _mark_best(axes: Any, best: Mapping[str, Any], metric: str, shift: float) -> None:
    """Draw a ring around the best point, and use its settings as the title."""
    width, error = best["bandwidth"], best[f"held_out_{metric}"]
    name = "error" if metric == "mse" else metric.replace("_", " ")
    bandwidth = "" if width is None else f", bandwidth {width:.4g}"
    settings = f"{kernel_text(best['kernel'])}{bandwidth}, ridge {best['ridge']:.3g}"
    title = f"Best: {settings}; {name} {error:.4g}"
    axes.set_title(title, loc="left", fontsize=11)
    if width is not None:
        axes.plot(shift * width, error, "o", ms=13, mfc="none", mec="0.1", mew=1.6, zorder=5,
            label="the best")  # fmt: skip
