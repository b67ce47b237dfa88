"""Draw cost and error: a point for each method, and the methods that no other one beats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

Points = Mapping[str, tuple[float, float]]
PLACES = (
    (7, 0, "left", "center"), (-7, 0, "right", "center"), (0, 7, "center", "bottom"),
    (0, -7, "center", "top"), (6, 6, "left", "bottom"), (6, -6, "left", "top"),
    (-6, 6, "right", "bottom"), (-6, -6, "right", "top"),
)  # fmt: skip
"""Where a name may stand beside its point, best first: points to the right and up, alignment."""


def frontier(points: Points) -> list[str]:
    """Return the methods that no other one beats in both cost and error, cheapest first."""
    names, min_error = list[str](), float("inf")
    for name, (_, error) in sorted(points.items(), key=lambda each: each[1]):
        if error < min_error:
            names.append(name)
            min_error = error
    return names


def plot(path: Path, points: Points, cost: str, error: str) -> None:
    """Draw (cost, error) of each method on logarithmic axes. cost, error : names of the axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure = Figure(figsize=(8, 5.2), layout="constrained")
    canvas, axes, best = FigureCanvasAgg(figure), figure.add_subplot(), frontier(points)
    axes.set_xscale("log")
    axes.set_yscale("log")
    along = [points[name] for name in best]
    axes.plot(*zip(*along, strict=True), "-", color="tab:red", lw=1.2, zorder=1)
    for name, at in points.items():
        axes.plot(*at, "o", ms=7, color="tab:red" if name in best else "tab:gray", zorder=2)
    axes.margins(0.12, 0.1)
    axes.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))
    axes.yaxis.set_minor_locator(MaxNLocator(1))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.12g}"))
    axes.grid(alpha=0.3)
    axes.set_xlabel(cost)
    axes.set_ylabel(error)
    canvas.draw()
    _name_points(axes, points, best, canvas.get_renderer())
    figure.savefig(path, dpi=150)


def _name_points(axes: Any, points: Points, best: list[str], renderer: Any) -> None:
    """Write each name next to its point, where it covers no point and no other name."""
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    at = {name: axes.transData.transform(point) for name, point in points.items()}
    radius = 5 * axes.figure.dpi / 72
    boxes = {name: Bbox([xy - radius, xy + radius]) for name, xy in at.items()}
    for name in sorted(points, key=lambda name: name not in best):
        for right, up, horizontal, vertical in PLACES:
            text = axes.annotate(
                name, points[name], (right, up), textcoords="offset points", ha=horizontal,
                va=vertical, fontsize=10, weight="bold" if name in best else "normal",
                path_effects=[withStroke(linewidth=3, foreground="white")],
            )  # fmt: skip
            box = text.get_window_extent(renderer)
            other_boxes = [other for key, other in boxes.items() if key != name]
            is_inside = axes.bbox.x0 < box.x0 and box.x1 < axes.bbox.x1
            if is_inside and not any(box.overlaps(other) for other in other_boxes):
                break
            text.remove()
        else:
            text = axes.annotate(name, points[name], (7, 0), textcoords="offset points")
            box = text.get_window_extent(renderer)
        boxes[f"name of {name}"] = box
