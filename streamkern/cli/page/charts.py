"""Charts as SVG within a page: lines over an axis, bars, and the processes of a run in time.

Colours are CSS classes; the style of the page defines them for light and for dark. A chart holds
text and shapes only; the values of a point show as a tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from streamkern.cli.page.html import NO_HTML, Html, tag
from streamkern.cli.page.scales import (
    Axis,
    fitting_scale,
    linear,
    logarithmic,
    short_number,
    tick_texts,
)

COLOURS = 8
_WIDTH, _HEIGHT = 560.0, 250.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 54.0, 14.0, 30.0, 40.0
_MOST, _SPOTS = 400, 60
"""Largest numbers of points in a line, and of tooltips."""


@dataclass(frozen=True)
class Curve:
    """A line of a chart.

    points : (x, y), by x
    colour : its number
    marked : the point that stands out, if any
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    marked: tuple[float, float] | None = None


@dataclass(frozen=True)
class Axes:
    """The axes of a chart.

    x, y : labels
    zero : whether y begins at 0
    percent : whether y is in percent
    log_x : whether x is logarithmic
    far : smallest upper end of x
    """

    x: str
    y: str
    zero: bool = False
    percent: bool = False
    log_x: bool = False
    far: float = 0.0


def line_chart(title: str, lines: Sequence[Curve], axes: Axes, note: str = "") -> Html:
    """Return a chart of lines, with dots if their points are few; empty without points."""
    shown = [(line, _thinned(line.points)) for line in lines if line.points]
    if not shown:
        return NO_HTML
    xs = [x for _, points in shown for x, _ in points]
    ys = [y for _, points in shown for _, y in points]
    xs += [line.marked[0] for line, _ in shown if line.marked]
    across = logarithmic(xs) if axes.log_x else linear([axes.far, *xs], zero=True)
    least = 0.05 if axes.percent else 1e-12
    up = linear(ys, zero=True, least=least) if axes.zero else fitting_scale(ys)

    def at(point: tuple[float, float]) -> tuple[float, float]:
        x = _LEFT + across.share(point[0]) * (_WIDTH - _LEFT - _RIGHT)
        return x, _HEIGHT - _BOTTOM - up.share(point[1]) * (_HEIGHT - _TOP - _BOTTOM)

    def told(line: Curve, point: tuple[float, float]) -> str:
        y = f"{point[1]:.1%}" if axes.percent else short_number(point[1], 4)
        return f"{line.name}: {y} at {short_number(point[0], 4)}"

    drawn = [*_frame(across, up, axes), tag("text", axes.y, x=0, y=14, class_="axis")]
    for line, points in shown:
        places = [at(point) for point in points]
        colour = f"c{line.colour % COLOURS}" + (" again" if line.colour >= COLOURS else "")
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        drawn.append(tag("polyline", points=path, class_=f"line {colour}"))
        every, few = -(-len(points) // _SPOTS), len(points) <= 30
        for point, (x, y) in list(zip(points, places, strict=True))[::every]:
            spot = "dot" if few else "spot"
            drawn.append(_spot(x, y, f"{spot} {colour}", told(line, point), 2.5 if few else 6.0))
        if line.marked is not None:
            x, y = at(line.marked)
            drawn.append(_spot(x, y, f"ring {colour}", told(line, line.marked), 6.5))
    return _figure(title, note, _svg(title, _HEIGHT, drawn))


def scatter_chart(
    title: str, xs: Sequence[float], ys: Sequence[float], axes: Axes, colour: int = 0, *,
    diagonal: bool = False,
) -> Html:  # fmt: skip
    """Return a chart of points. diagonal : both axes are equal, with a line where x is y"""
    points = [(float(x), float(y)) for x, y in zip(xs, ys, strict=True)]
    points = [point for point in points if all(map(math.isfinite, point))]
    if not points:
        return NO_HTML
    both = [value for point in points for value in point]
    across = linear(both if diagonal else [x for x, _ in points])
    up = across if diagonal else linear([y for _, y in points])
    drawn = [*_frame(across, up, axes), tag("text", axes.y, x=0, y=14, class_="axis")]
    if diagonal:
        drawn.append(
            tag("line", x1=_LEFT, y1=_HEIGHT - _BOTTOM, x2=_WIDTH - _RIGHT, y2=_TOP, class_="base")
        )
    for x, y in points:
        left = _LEFT + across.share(x) * (_WIDTH - _LEFT - _RIGHT)
        top = _HEIGHT - _BOTTOM - up.share(y) * (_HEIGHT - _TOP - _BOTTOM)
        told = f"{short_number(y, 4)} at {short_number(x, 4)}"
        drawn.append(_spot(left, top, f"dot c{colour % COLOURS}", told, 1.8))
    return _figure(title, "", _svg(title, _HEIGHT, drawn))


def _spot(x: float, y: float, kind: str, text: str, r: float) -> Html:
    return tag("circle", tag("title", text), cx=x, cy=y, r=r, class_=kind)


def _frame(across: Axis, up: Axis, axes: Axes) -> list[Html]:
    """Return grid lines, the numbers on both axes, and the label of x."""
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    drawn = []
    for value, text in zip(up.ticks, tick_texts(up, percent=axes.percent), strict=True):
        y = bottom - up.share(value) * (bottom - _TOP)
        drawn.append(tag("line", x1=_LEFT, x2=right, y1=y, y2=y, class_="grid"))
        drawn.append(tag("text", text, x=_LEFT - 8, y=y + 4, text_anchor="end"))
    for value, text in zip(across.ticks, tick_texts(across), strict=True):
        x = _LEFT + across.share(value) * (right - _LEFT)
        drawn.append(tag("line", x1=x, x2=x, y1=bottom, y2=bottom + 4, class_="base"))
        drawn.append(tag("text", text, x=x, y=bottom + 17, text_anchor="middle"))
    drawn.append(tag("line", x1=_LEFT, x2=right, y1=bottom, y2=bottom, class_="base"))
    middle = (_LEFT + right) / 2
    words = tag("text", axes.x, x=middle, y=_HEIGHT - 4, text_anchor="middle", class_="axis")
    return [*drawn, words]


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Return means of neighbouring points, so few that a screen can show the line."""
    size = -(-len(points) // _MOST)
    if size == 1:
        return points
    groups = [points[k : k + size] for k in range(0, len(points), size)]
    return [
        (sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group))
        for group in groups
    ]


def bar_chart(
    title: str,
    bars: Sequence[tuple[str, float]],
    colour: int = 0,
    *,
    share: bool = False,
    note: str = "",
) -> Html:
    """Return horizontal bars with names and numbers, from the top; negative ones go to the left.

    share : the numbers are shares
    """
    if not bars:
        return NO_HTML
    step, top, names = 21.0, 6.0, 170.0
    most = max(max(abs(value) for _, value in bars), 1e-12)
    signed = any(value < 0 for _, value in bars)
    room = _WIDTH - names - 64
    zero, size = (names + room / 2, room / 2) if signed else (names, room)
    drawn, shade = [], f"bar c{colour % COLOURS}"
    for k, (name, value) in enumerate(bars):
        y, length = top + k * step, abs(value) / most * size
        text = f"{value:.1%}" if share else f"{value:+.2f}" if signed else short_number(value)
        label = name if len(name) <= 26 else f"{name[:25]}…"
        drawn += [
            tag("text", tag("title", name), label, x=names - 8, y=y + 13, text_anchor="end"),
            tag("rect", tag("title", f"{name}: {text}"), x=zero - (length if value < 0 else 0.0),
                y=y + 2, width=max(length, 0.5), height=step - 6, class_=shade),
            tag("text", text, x=_WIDTH - 4, y=y + 13, text_anchor="end"),
        ]  # fmt: skip
    height = top + step * len(bars) + 4
    drawn.append(tag("line", x1=zero, x2=zero, y1=top, y2=height - 4, class_="base"))
    return _figure(title, note, _svg(title, height, drawn))


@dataclass(frozen=True)
class Span:
    """A process in time.

    setup_s, seconds : of its setup, and in total
    marks : (seconds, text, bad) of its events
    pause : time since the previous process, as text
    """

    setup_s: float
    seconds: float
    text: str
    marks: Sequence[tuple[float, str, bool]] = ()
    pause: str = ""


def time_line(title: str, spans: Sequence[Span], colour: int = 0) -> Html:
    """Return the processes one after the other, to scale; pauses all have one width."""
    width, gap, height = 1160.0, min(70.0, 500.0 / max(len(spans), 1)), 46.0
    total = sum(span.seconds for span in spans) or 1.0
    room = width - 4 - gap * (len(spans) - 1)
    drawn: list[Html] = []
    left = 2.0
    for k, span in enumerate(spans):
        if k:
            drawn.append(tag("line", x1=left, x2=left + gap, y1=22.0, y2=22.0, class_="pause"))
            drawn.append(
                tag("text", span.pause, x=left + gap / 2, y=14, text_anchor="middle")
            )  # fmt: skip
            left += gap
        length = max(span.seconds / total * room, 3.0)
        setup = min(span.setup_s / (span.seconds or 1.0), 1.0) * length
        box = {"y": 16.0, "height": 12.0}
        told = tag("title", span.text)
        drawn.append(tag("rect", told, x=left, width=length, class_=f"bar c{colour}", **box))
        if setup > 0:
            drawn.append(tag("rect", tag("title", f"setup, {span.text}"), x=left, width=setup,
                class_="setup", **box))  # fmt: skip
        for seconds, text, bad in span.marks:
            x = left + min(seconds / (span.seconds or 1.0), 1.0) * length
            mark = tag("title", text)
            if bad:
                shape = f"{x - 5:.1f},40 {x + 5:.1f},40 {x:.1f},30"
                drawn.append(tag("polygon", mark, points=shape, class_="bad"))
            else:
                drawn.append(tag("line", mark, x1=x, x2=x, y1=30.0, y2=37.0, class_="tick"))
        left += length
    return _svg(title, height, drawn, width)


def _svg(title: str, height: float, drawn: Sequence[Html], width: float = _WIDTH) -> Html:
    return tag(
        "svg", *drawn, viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=title,
    )  # fmt: skip


def _figure(title: str, note: str, drawing: Html) -> Html:
    more = tag("small", note) if note else NO_HTML
    return tag("figure", tag("figcaption", title, more), drawing)
