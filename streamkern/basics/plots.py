"""Create Matplotlib figures, and convert them to PNG. The extra `report` installs Matplotlib."""

from __future__ import annotations

import io
from typing import Any

from streamkern.basics.optional import import_optional


def new_figure(width: float, height: float, plot_name: str = "the plot") -> Any:
    """Return a new figure. Raises MissingDependencyError without Matplotlib.

    width, height : size in inches
    plot_name : name of the plot, for the message
    """
    figure_class = import_optional("matplotlib.figure", plot_name, "report").Figure
    return figure_class(figsize=(width, height), layout="constrained")


def png_bytes(figure: Any) -> bytes:
    """Return a figure as the bytes of a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=160)
    return file.getvalue()


def log_axis(axes: Any, name: str) -> None:
    """Make the axis "x" or "y" logarithmic, with plain numbers at its decades or between."""
    ticker = import_optional("matplotlib.ticker", "the plot", "report")
    axes.set(**{f"{name}scale": "log"})
    axis = getattr(axes, f"{name}axis")
    low, high = sorted(axis.get_view_interval())
    ratio = high / low
    # Fewer ticks a decade the more decades the axis has, so that the labels do not overlap.
    subs = (1, 1.5, 2, 3, 4, 6, 8) if ratio < 12 else (1, 2, 5) if ratio < 300 else (1,)
    axis.set_major_locator(ticker.LogLocator(subs=subs))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:.4g}"))
    axis.set_minor_formatter(ticker.NullFormatter())
