"""Charts: well-formed SVG whose points are where a line through the axis would put them."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from streamkern.cli.page.charts import Axes, Curve, Span, bar_chart, line_chart, time_line
from streamkern.cli.page.html import NO_HTML

HOSTILE = '<b onload="x">&'


def texts(root: ET.Element) -> list[str]:
    return [element.text or "" for element in root.iter("text")]


def coordinates(root: ET.Element) -> np.ndarray:
    """(n, 2) of the only line."""
    (line,) = root.iter("polyline")
    return np.array([pair.split(",") for pair in line.attrib["points"].split()], float)


def ticks(root: ET.Element) -> dict[str, tuple[float, float]]:
    """Where the numbers of the axes are, by what they say."""
    placed = (t for t in root.iter("text") if "y" in t.attrib and "text-anchor" in t.attrib)
    return {t.text or "": (float(t.attrib["x"]), float(t.attrib["y"])) for t in placed}


def test_points_are_between_the_numbers_that_they_are_between() -> None:
    points = [(0.0, 0.0), (50.0, 5.0), (100.0, 10.0)]
    root = ET.fromstring(line_chart("t", [Curve("a", points)], Axes("steps", "loss", zero=True)))
    x, y = coordinates(root).T
    at = ticks(root)
    assert x[2] == pytest.approx(at["100"][0], abs=0.1)
    assert y[1] - y[0] == pytest.approx(y[2] - y[1], abs=0.11)  # written to a tenth
    assert y[2] == pytest.approx(at["10"][1] - 4, abs=0.1)  # the middle of the digits
    assert y[0] > y[1] > y[2]
    told = [title.text for title in root.iter("title")]
    assert "a: 5 at 50" in told


def test_decades_are_as_far_apart() -> None:
    points = [(float(k), 10.0**-k) for k in range(4)]
    y = coordinates(ET.fromstring(line_chart("t", [Curve("a", points)], Axes("x", "y"))))[:, 1]
    np.testing.assert_allclose(np.diff(y), np.diff(y).mean(), atol=0.11)


def test_a_long_line_is_thinned_to_the_means_of_neighbours() -> None:
    x = np.arange(100_000.0)
    chart = line_chart("t", [Curve("a", list(zip(x, 5 + 0 * x, strict=True)))], Axes("x", "y"))
    assert len(chart) < 40_000
    y = coordinates(ET.fromstring(chart))[:, 1]
    assert 200 <= len(y) <= 400
    assert len(set(y)) == 1


def test_names_are_text_and_nothing_is_drawn_of_nothing() -> None:
    lines = [Curve(HOSTILE, [(0.0, 1.0), (1.0, 2.0)], colour=9, marked=(1.0, 2.0)), Curve("b", [])]
    for drawn in (
        line_chart(HOSTILE, lines, Axes(HOSTILE, HOSTILE), HOSTILE),
        bar_chart(HOSTILE, [(HOSTILE, 1.0), ("b", -2.0)]),
        time_line(HOSTILE, [Span(1.0, 2.0, HOSTILE, [(1.0, HOSTILE, True)]), Span(0, 0, "b")]),
    ):
        root = ET.fromstring(drawn)
        assert not list(root.iter("b"))
        assert HOSTILE in "".join(root.itertext()) or HOSTILE in str(root.attrib)
    assert line_chart("t", [Curve("a", [])], Axes("x", "y")) == NO_HTML
    assert bar_chart("t", []) == NO_HTML


def test_bars_are_as_long_as_their_numbers() -> None:
    root = ET.fromstring(bar_chart("t", [("a", 0.5), ("b", 0.25)], share=True))
    long, short = (float(bar.attrib["width"]) for bar in root.iter("rect"))
    assert long == pytest.approx(2 * short, abs=0.01)
    assert {"50.0%", "25.0%"} <= set(texts(root))


def test_processes_are_as_long_as_they_took() -> None:
    spans = [Span(1.0, 4.0, "first"), Span(0.0, 8.0, "second", [(4.0, "half", False)], "2 h")]
    root = ET.fromstring(time_line("t", spans))
    bars = [bar for bar in root.iter("rect") if re.match(r"bar\b", bar.attrib["class"])]
    one, two = (float(bar.attrib["width"]) for bar in bars)
    (setup,) = (bar for bar in root.iter("rect") if bar.attrib["class"] == "setup")
    assert two == pytest.approx(2 * one, rel=1e-3)
    assert float(setup.attrib["width"]) == pytest.approx(one / 4, rel=1e-3)
    (tick,) = (line for line in root.iter("line") if line.attrib["class"] == "tick")
    middle = float(bars[1].attrib["x"]) + two / 2
    assert float(tick.attrib["x1"]) == pytest.approx(middle, abs=0.02)
    assert "2 h" in texts(root)
