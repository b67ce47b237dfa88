"""The picture of a search: error against bandwidth, a line for each kernel and ridge."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from streamkern.basics.optional import need
from streamkern.kernels.notation import kernel_text


def scores_png(table: Sequence[Mapping[str, Any]], best: Mapping[str, Any]) -> bytes:
    """The rows of `Tuned.table` as a PNG; MissingDependencyError without Matplotlib.

    Bars are standard errors over the splits. Kernels without a bandwidth are level lines. What
    diverged is left out.
    """
    figure = need("matplotlib.figure", "the plot", "report").Figure(
        figsize=(7.2, 4.6), layout="constrained"
    )
    axes = figure.add_subplot()
    for kernel, ridge in dict.fromkeys((kernel_text(row["kernel"]), row["ridge"]) for row in table):
        rows = [r for r in table if (kernel_text(r["kernel"]), r["ridge"]) == (kernel, ridge)]
        _draw(
            axes, [r for r in rows if r["held_out_mse"] is not None], f"{kernel}, ridge {ridge:g}"
        )
    if best["bandwidth"] is not None:
        axes.plot(
            best["bandwidth"], best["held_out_mse"], "o", ms=12, mfc="none", mec="0.15", mew=1.4,
            zorder=5, label=f"best: {best['bandwidth']:.4g}",
        )  # fmt: skip
        axes.set_xscale("log")
    axes.set(xlabel="bandwidth", ylabel="mean squared error, rows held out", yscale="log")
    _label(axes.yaxis)
    if best["bandwidth"] is not None:
        _label(axes.xaxis)
    axes.grid(which="major", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=160)
    return picture.getvalue()


def _draw(axes: Any, rows: Sequence[Mapping[str, Any]], label: str) -> None:
    if not rows:
        return
    if rows[0]["bandwidth"] is None:
        axes.axhline(rows[0]["held_out_mse"], lw=1, ls="--", color="0.5", label=label)
        return
    rows = sorted(rows, key=lambda row: float(row["bandwidth"]))
    widths, errors = ([row[key] for row in rows] for key in ("bandwidth", "held_out_mse"))
    bars = [row["se"] for row in rows] if "se" in rows[0] else None
    axes.errorbar(widths, errors, bars, marker="o", ms=4, lw=1.4, capsize=2, label=label)


def _label(axis: Any) -> None:
    """Plain numbers on a logarithmic axis; between the powers of ten where those are few."""
    ticker = need("matplotlib.ticker", "the plot", "report")
    plain = ticker.FuncFormatter(lambda value, _: f"{value:.4g}")
    low, high = axis.get_view_interval()
    axis.set_major_formatter(plain)
    axis.set_minor_formatter(plain if high < 40 * low else ticker.NullFormatter())
    axis.set_tick_params(which="minor", labelsize=7)
