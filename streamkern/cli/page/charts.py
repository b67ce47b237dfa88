"""Charts by Matplotlib as SVG within a page: lines, points, bars, and processes in time.

Matplotlib draws with a placeholder for each colour, which is then replaced by a CSS variable. The
style of the page defines these for light and dark mode. Text stays text, in the font of the page,
and a tooltip shows the values of a point.
"""

from __future__ import annotations

import io
import math
import re
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamkern.basics.optional import import_optional
from streamkern.basics.plots import log_axis, new_figure
from streamkern.cli.page.html import NO_HTML, Html, tag

Point = tuple[float, float]
COLOURS = 8
"""Number of colours; the colour of a larger index is the one of the remainder."""
_STYLE_VARIABLES = ("quiet", "line", "base", "setup", "bad", *(f"c{k}" for k in range(COLOURS)))
_PLACEHOLDERS = {name: f"#0102{k:02d}" for k, name in enumerate(_STYLE_VARIABLES)}
_WIDTH, _HEIGHT = 5.6, 2.5  # inches
_MAX_LINE_POINTS, _MAX_LINE_TOOLTIPS = 400, 60
_MAX_DOTTED_POINTS = 30  # a line with more points has no dots
_MIN_LOG_RATIO = 8.0  # y is logarithmic if its largest value is more than 8 times the smallest
_MAX_BAR_NAME = 26  # characters
_STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "streamkern", "text.parse_math": False,
    "font.size": 8.0, "axes.labelsize": 8.0, "axes.edgecolor": _PLACEHOLDERS["base"],
    "axes.spines.left": False, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True,
    "grid.color": _PLACEHOLDERS["line"], "text.color": _PLACEHOLDERS["quiet"],
    "axes.labelcolor": _PLACEHOLDERS["quiet"], "ytick.major.size": 0.0,
    "xtick.color": _PLACEHOLDERS["base"], "xtick.labelcolor": _PLACEHOLDERS["quiet"],
    "ytick.labelcolor": _PLACEHOLDERS["quiet"],
}  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """A line of a chart.

    name : text of its tooltips and of the legend
    points : (x, y), in the order of x
    colour : index of its colour
    best : point that is marked by a ring, if any
    """

    name: str
    points: Sequence[Point]
    colour: int = 0
    best: Point | None = None


@dataclass
class _Chart:
    """A figure, and the tooltips of its shapes by the id of the SVG element that holds them."""

    figure: Any
    axes: Any
    tooltips: dict[str, Sequence[str]] = field(default_factory=dict)

    def add_tooltips(self, artist: Any, texts: Sequence[str]) -> None:
        """Give each shape of an artist a tooltip."""
        artist.set_gid(f"tip{len(self.tooltips)}")
        self.tooltips[artist.get_gid()] = texts

    def draw_dots(self, points: Sequence[Point], texts: Sequence[str], **style: Any) -> None:
        """Draw points, each with a tooltip. style : as for `Axes.scatter`"""
        xs, ys = zip(*points, strict=True)
        self.add_tooltips(self.axes.scatter(xs, ys, clip_on=False, zorder=3, **style), texts)


def line_chart(
    title: str, lines: Sequence[Curve], x: str, y: str, *, note: str = "", zero: bool = False,
    percent: bool = False, log_x: bool = False, x_end: float = 0.0,
) -> Html:  # fmt: skip
    """Return a chart of lines, with dots if their points are few; empty without points.

    title : caption of the chart
    lines : the lines; a line without points is left out
    x, y : labels of the axes
    note : text behind the title
    zero : whether y begins at 0
    percent : whether y is a share, shown in percent
    log_x : whether x is logarithmic
    x_end : the axis of x ends here, or at the largest x if that is larger
    """
    lines = [line for line in lines if line.points]
    if not lines:
        return NO_HTML
    with _style():
        chart = _new_chart(_WIDTH, _HEIGHT)
        for line in lines:
            _draw_line(chart, line, percent=percent)
        _scale_y(chart.axes, [y for line in lines for _, y in line.points], zero=zero or percent)
        if log_x:
            log_axis(chart.axes, "x")
        else:
            chart.axes.set_xlim(0, max(x_end, chart.axes.dataLim.x1) or 1.0)
            _shorten_numbers(chart.axes.xaxis)
        if percent:
            ticker = import_optional("matplotlib.ticker", "a report", "report")
            chart.axes.yaxis.set_major_formatter(ticker.PercentFormatter(1))
        _label_axes(chart.axes, x, y)
        return _to_html(chart, title, note)


def scatter_chart(
    title: str, xs: Sequence[float], ys: Sequence[float], x: str, y: str, colour: int = 0, *,
    diagonal: bool = False,
) -> Html:  # fmt: skip
    """Return a chart of the points (xs, ys); empty without finite points.

    x, y : labels of the axes
    colour : index of the colour
    diagonal : whether to draw the line where x is y
    """
    points = [(float(x), float(y)) for x, y in zip(xs, ys, strict=True)]
    points = [point for point in points if all(map(math.isfinite, point))]
    if not points:
        return NO_HTML
    with _style():
        chart = _new_chart(_WIDTH, _HEIGHT)
        texts = [f"{short_number(y)} at {short_number(x)}" for x, y in points]
        chart.draw_dots(points, texts, s=5, color=_placeholder(colour))
        if diagonal:
            ends = min(map(min, points)), max(map(max, points))
            chart.axes.plot(ends, ends, color=_PLACEHOLDERS["base"], lw=0.8, clip_on=False)
        for axis in (chart.axes.xaxis, chart.axes.yaxis):
            _shorten_numbers(axis)
        _label_axes(chart.axes, x, y)
        return _to_html(chart, title)


def bar_chart(
    title: str, bars: Sequence[tuple[str, float]], colour: int = 0, *, share: bool = False,
    note: str = "",
) -> Html:  # fmt: skip
    """Return horizontal bars with names and numbers, from top to bottom; empty without bars.

    bars : (name, number) of each bar
    colour : index of the colour
    share : whether the numbers are shares, shown in percent
    note : text behind the title
    """
    if not bars:
        return NO_HTML
    are_signed = any(value < 0 for _, value in bars)
    texts = [
        f"{value:.1%}" if share else f"{value:+.2f}" if are_signed else short_number(value)
        for _, value in bars
    ]
    with _style():
        chart = _new_chart(_WIDTH, 0.2 * len(bars) + 0.1)
        shapes = chart.axes.barh(
            range(len(bars)), [value for _, value in bars], 0.7, color=_placeholder(colour)
        )
        for bar, (name, _), text in zip(shapes, bars, texts, strict=True):
            chart.add_tooltips(bar, [f"{name}: {text}"])
        chart.axes.bar_label(shapes, texts, padding=3)
        names = [
            name if len(name) <= _MAX_BAR_NAME else f"{name[: _MAX_BAR_NAME - 1]}…"
            for name, _ in bars
        ]
        chart.axes.set_yticks(range(len(bars)), map(_clean_text, names))
        chart.axes.set_ylim(len(bars) - 0.5, -0.5)
        chart.axes.axvline(0, color=_PLACEHOLDERS["base"], lw=0.8)
        chart.axes.xaxis.set_visible(False)
        chart.axes.spines["bottom"].set_visible(False)
        chart.axes.grid(visible=False)
        return _to_html(chart, title, note)


@dataclass(frozen=True)
class Span:
    """A process on the timeline of a run.

    setup_s : seconds of its setup
    seconds : seconds in total
    text : description, for the tooltip
    marks : its events as (seconds since its start, text, whether it is a problem)
    pause : time since the previous process, as text
    """

    setup_s: float
    seconds: float
    text: str
    marks: Sequence[tuple[float, str, bool]] = ()
    pause: str = ""


def timeline(title: str, spans: Sequence[Span], colour: int = 0) -> Html:
    """Return the processes one after the other, to scale, with pauses of equal width."""
    total = sum(span.seconds for span in spans) or 1.0
    pause_s = min(0.06, 0.4 / len(spans)) * total  # at most 40 % of the timeline in all
    start = 0.0
    marks: dict[bool, list[tuple[float, str]]] = {False: [], True: []}  # by whether a problem
    with _style():
        chart = _new_chart(2 * _WIDTH, 0.5)
        axes = chart.axes
        for k, span in enumerate(spans):
            if k:
                style = {"color": _PLACEHOLDERS["base"], "ls": ":", "lw": 1.0, "clip_on": False}
                axes.plot([start, start + pause_s], [0, 0], **style)
                axes.text(start + pause_s / 2, 0.35, _clean_text(span.pause), ha="center")
                start += pause_s
            # Short processes are drawn wider, so that they can be seen; their parts grow alike.
            seconds = max(span.seconds, 0.003 * total)
            setup_s = min(span.setup_s / (span.seconds or 1.0), 1.0) * seconds
            bars = [(seconds, _placeholder(colour), span.text)]
            if setup_s > 0:
                bars.append((setup_s, _PLACEHOLDERS["setup"], f"setup, {span.text}"))
            for width, shade, text in bars:
                chart.add_tooltips(axes.barh(0, width, 0.5, left=start, color=shade)[0], [text])
            for event_s, text, is_problem in span.marks:
                marks[is_problem].append(
                    (start + min(event_s / (span.seconds or 1.0), 1.0) * seconds, text)
                )
            start += seconds
        # Marks lie below the bars: ticks for evaluations, triangles for problems.
        for is_problem, (marker, shade) in {False: ("|", "quiet"), True: ("^", "bad")}.items():
            if marks[is_problem]:
                points = [(x, -0.6) for x, _ in marks[is_problem]]
                texts = [text for _, text in marks[is_problem]]
                chart.draw_dots(points, texts, s=28, marker=marker, color=_PLACEHOLDERS[shade])
        axes.set(xlim=(0, start), ylim=(-0.9, 0.9))
        axes.set_axis_off()
        return _to_html(chart, title)


def legend(names: Iterable[tuple[str, int]]) -> Html:
    """Return a line with the colour of each name. names : (name, index of its colour)"""
    entries = (
        tag("span", tag("i", class_=f"c{colour % COLOURS}"), name, class_="run")
        for name, colour in names
    )
    return tag("p", *entries, class_="legend")


def short_number(value: float) -> str:
    """Return a number to four digits, with a unit if it is large: 0.023, 48.2k, 1.23M, 3e-07."""
    if abs(value) < 1e4:
        return f"{value:.4g}"
    ticker = import_optional("matplotlib.ticker", "a report", "report")
    return str(ticker.EngFormatter(sep="")(float(f"{value:.4g}")))


# -- parts of a chart ----------------------------------------------------------------------------


def _style() -> Any:
    """Return a context with the style of the charts."""
    return import_optional("matplotlib", "a report", "report").rc_context(_STYLE)


def _new_chart(width: float, height: float) -> _Chart:
    """Return an empty chart; width, height : in inches"""
    figure = new_figure(width, height, "a report")
    return _Chart(figure, figure.subplots())


def _placeholder(number: int) -> str:
    """Return the placeholder of a colour by its index."""
    return _PLACEHOLDERS[f"c{number % COLOURS}"]


def _clean_text(text: str) -> str:
    """Return the text without the control characters that SVG cannot hold."""
    return "".join(c if c.isprintable() else " " for c in text)


def _draw_line(chart: _Chart, line: Curve, *, percent: bool) -> None:
    """Draw a line, with tooltips at some of its points."""
    points = _average_points(line.points)
    xs, ys = zip(*points, strict=True)
    style = "-" if line.colour < COLOURS else "--"
    colour = _placeholder(line.colour)
    chart.axes.plot(xs, ys, style, color=colour, lw=1.3, clip_on=False)

    def text(point: tuple[float, float]) -> str:
        y = f"{point[1]:.1%}" if percent else short_number(point[1])
        return f"{line.name}: {y} at {short_number(point[0])}"

    tooltip_points = points[:: -(-len(points) // _MAX_LINE_TOOLTIPS)]  # every k-th, rounded up
    dot_style = {"s": 9} if len(points) <= _MAX_DOTTED_POINTS else {"s": 60, "alpha": 0.0}
    chart.draw_dots(tooltip_points, list(map(text, tooltip_points)), color=colour, **dot_style)
    if line.best is not None:
        chart.draw_dots([line.best], [text(line.best)], s=70, facecolors="none", edgecolors=colour)


def _average_points(points: Sequence[Point]) -> Sequence[Point]:
    """Return at most `_MAX_LINE_POINTS` points, as means of neighbouring points."""
    group_size = -(-len(points) // _MAX_LINE_POINTS)  # rounded up
    if group_size == 1:
        return points
    groups = [points[k : k + group_size] for k in range(0, len(points), group_size)]
    return [
        (sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group))
        for group in groups
    ]


def _scale_y(axes: Any, values: Sequence[float], *, zero: bool) -> None:
    """Scale y: from 0 with `zero`, else by logarithms if the values require and allow it."""
    lowest, highest = min(values), max(values)
    if zero:
        axes.set_ylim(min(0.0, lowest), 1.05 * max(highest, 1e-12))
    elif lowest > 0 and highest > _MIN_LOG_RATIO * lowest:
        log_axis(axes, "y")
        return
    elif highest - lowest < 0.01 * max(abs(lowest), abs(highest)):  # a nearly constant line
        center = (lowest + highest) / 2
        half_range = 0.005 * max(abs(lowest), abs(highest)) or 1.0  # 1 if all values are 0
        axes.set_ylim(center - half_range, center + half_range)
    _shorten_numbers(axes.yaxis)


def _shorten_numbers(axis: Any) -> None:
    """Label an axis with few short numbers."""
    ticker = import_optional("matplotlib.ticker", "a report", "report")
    axis.set_major_locator(ticker.MaxNLocator(5, steps=(1, 2, 5, 10)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: short_number(value)))


def _label_axes(axes: Any, x: str, y: str) -> None:
    """Label the axes; the label of y is above the chart."""
    axes.set_xlabel(_clean_text(x))
    axes.set_title(_clean_text(y), loc="left", fontsize=8.0)


def _to_html(chart: _Chart, title: str, note: str = "") -> Html:
    """Return the figure with its title, as an element of the page."""
    text = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about glyphs missing in Matplotlib's own font
        chart.figure.savefig(text, format="svg", transparent=True)
    drawing = _parse_svg(text.getvalue())
    # The style and the ids of Matplotlib would affect the page and its other charts.
    for element in list(drawing.iter()):
        for child in list(element):
            if child.tag in ("metadata", "style"):
                element.remove(child)
        element.attrib.pop("clip-path", None)
        tooltips = chart.tooltips.get(element.get("id", ""))
        if element.tag == "g":
            element.attrib.pop("id", None)
        if tooltips is not None:
            for shape, tooltip in zip(_find_shapes(element), tooltips, strict=True):
                ET.SubElement(shape, "title").text = _clean_text(tooltip)
    view_box = drawing.attrib["viewBox"]
    drawing.attrib.clear()
    drawing.attrib.update({"viewBox": view_box, "role": "img", "aria-label": _clean_text(title)})
    svg = ET.tostring(drawing, encoding="unicode", short_empty_elements=False)
    for name, placeholder in _PLACEHOLDERS.items():
        svg = svg.replace(placeholder, f"var(--{name})")
    caption = tag("figcaption", title, tag("small", note) if note else NO_HTML)
    return tag("figure", caption, Html(re.sub(r"font-family: [^;\"]*;? ?", "", svg)))


def _parse_svg(text: str) -> ET.Element:
    """Parse SVG for use within HTML, where its elements need no namespace."""
    root = ET.fromstring(text)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {key.rpartition("}")[2]: v for key, v in element.attrib.items()}
    return root


def _find_shapes(group: ET.Element) -> list[ET.Element]:
    """Return the shapes that a group draws, in order, without those in its <defs>."""
    defined = {shape for defs in group.iter("defs") for shape in defs.iter()}
    return [
        element
        for element in group.iter()
        if element.tag in ("path", "use") and element not in defined
    ]
