"""The plot of a metric: shares of the features, its spectrum, its first directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamkern.basics.plots import new_figure, png


def spectrum_png(metric: Mapping[str, Any]) -> bytes:
    """Return the output of `describe_metric` as PNG; MissingDependencyError without Matplotlib."""
    bars = [("share of the metric\n(of its gradients)", metric["importances"])]
    for k, terms in enumerate(metric["first"], 1):
        share = metric["spectrum"][k - 1]
        bars.append((f"direction {k}, {share:.1%}", terms))
    figure = new_figure(3.2 * (len(bars) + 1), 4.2)
    panels = figure.subplots(1, len(bars) + 1)
    for axes, (title, entries) in zip(panels, bars, strict=False):
        axes.barh(range(len(entries)), [x for _, x in entries], color="C0")
        axes.set_yticks(range(len(entries)), [name for name, _ in entries], fontsize=8)
        axes.invert_yaxis()
        axes.axvline(0, color="0.3", lw=0.8)
        axes.set_title(title, fontsize=10)
    axes = panels[-1]
    axes.plot(range(1, len(metric["spectrum"]) + 1), metric["spectrum"], "o-", ms=4)
    axes.set_yscale("log")
    axes.set_title("eigenvalues,\nover their sum", fontsize=10)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    return png(figure)
