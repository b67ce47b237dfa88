"""The picture of a search: the metric against bandwidth, a line for each kernel and ridge."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from streamkern.basics.optional import need
from streamkern.kernels.notation import kernel_text

_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 1.5, 1, 1.5)))
_MARKERS = "osD^v<>P"
_APART = 0.006
"""Of the width, between the lines, where error bars of one bandwidth would hide each other."""


def scores_png(
    table: Sequence[Mapping[str, Any]], best: Mapping[str, Any], metric: str = "mse"
) -> bytes:
    """The rows of `Tuned.table` as a PNG; MissingDependencyError without Matplotlib.

    Bars are standard errors of the difference to the best. Kernels without a bandwidth are level
    lines. What diverged is left out.
    """
    figure = need("matplotlib.figure", "the plot", "report").Figure(
        figsize=(8.4, 4.8), layout="constrained"
    )
    axes, figure_of = figure.add_subplot(), f"held_out_{metric}"
    for kernel, ridge in dict.fromkeys((kernel_text(row["kernel"]), row["ridge"]) for row in table):
        rows = [r for r in table if (kernel_text(r["kernel"]), r["ridge"]) == (kernel, ridge)]
        good = [r for r in rows if r["held_out_mse"] is not None]
        _draw(axes, good, figure_of, f"{kernel}, ridge {ridge:g}")
    if best["bandwidth"] is not None:
        axes.plot(
            best["bandwidth"], best[figure_of], "o", ms=12, mfc="none", mec="0.15", mew=1.4,
            zorder=5, label=f"best: {best['bandwidth']:.4g}",
        )  # fmt: skip
        axes.set_xscale("log")
    words = "mean squared error" if metric == "mse" else metric.replace("_", " ")
    axes.set(xlabel="bandwidth", ylabel=f"{words}, rows held out")
    if metric in ("mse", "mae", "log_loss"):
        axes.set_yscale("log")
        _label(axes.yaxis)
    if best["bandwidth"] is not None:
        _label(axes.xaxis)
    else:
        axes.set_xticks([])
    axes.set_xlabel("bandwidth" if widths else "no kernel that was tried has a bandwidth")
    axes.set_ylabel("mean squared error of rows held out")
    axes.grid(which="major", color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8.5, handlelength=3)
    return figure


def _draw(axes: Any, rows: Sequence[Mapping[str, Any]], figure_of: str, label: str) -> None:
    if not rows:
        return
    if rows[0]["bandwidth"] is None:
        axes.axhline(rows[0][figure_of], lw=1, ls="--", color="0.5", label=label)
        return
    rows = sorted(rows, key=lambda row: float(row["bandwidth"]))
    widths, errors = ([row[key] for row in rows] for key in ("bandwidth", figure_of))
    bars = [row.get("se") or 0.0 for row in rows]
    axes.errorbar(widths, errors, bars, marker="o", ms=4, lw=1.4, capsize=2, label=label)


def _label(axis: Any) -> None:
    """Plain numbers at the decades of a logarithmic axis, and between them where those are few."""
    ticker = need("matplotlib.ticker", "the plot", "report")
    low, high = axis.get_view_interval()
    ratio = high / low
    subs = (1, 1.5, 2, 3, 4, 6, 8) if ratio < 12 else (1, 2, 5) if ratio < 300 else (1,)
    axis.set_major_locator(ticker.LogLocator(subs=subs))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:.4g}"))
    axis.set_minor_formatter(ticker.NullFormatter())
