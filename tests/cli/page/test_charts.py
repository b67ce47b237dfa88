"""Check that charts are valid SVG whose points match the axes."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from streamkern.cli.page.charts import (
    Curve,
    Span,
    bar_chart,
    line_chart,
    scatter_chart,
    short_number,
    timeline,
)
from streamkern.cli.page.html import NO_HTML

UNSAFE_TEXT = "<b onload='x'>&\x01$\\x$"


def shapes_by_tooltip(root: ET.Element) -> dict[str, ET.Element]:
    """Return the shapes that have a tooltip, by its text, in order."""
    return {title.text or "": shape for shape in root.iter() for title in shape.findall("title")}


def center_of(shape: ET.Element) -> tuple[float, float]:
    """Return the center of a dot."""
    if shape.tag == "use":
        return float(shape.attrib["x"]), float(shape.attrib["y"])
    x, y = points_of(shape)
    return float(x.min() + x.max()) / 2, float(y.min() + y.max()) / 2


def points_of(shape: ET.Element) -> np.ndarray:
    """Return the coordinates in the path of a shape, (2, n)."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", shape.attrib["d"])
    return np.array(numbers, float).reshape(-1, 2).T


def label_positions(root: ET.Element, axis: str) -> dict[str, float]:
    """Return the positions of the labels of an axis, "x" or "y", by their values."""
    anchor = {"x": "middle", "y": "end"}[axis]
    texts = (t for t in root.iter("text") if f"text-anchor: {anchor}" in t.attrib["style"])
    return {t.text or "": float(t.attrib[axis]) for t in texts}


@pytest.mark.parametrize("log", [False, True])
def test_chart_points_match_axes(log: bool) -> None:
    ys = (1.0, 10.0, 100.0) if log else (0.0, 5.0, 10.0)
    lines = [Curve("a", [(50.0 * k, y) for k, y in enumerate(ys)])]
    root = ET.fromstring(line_chart("t", lines, "steps", "loss", zero=not log))
    x, y = np.array([center_of(shape) for shape in shapes_by_tooltip(root).values()]).T
    across, up = label_positions(root, "x"), label_positions(root, "y")
    assert (x[0], x[2]) == pytest.approx((across["0"], across["100"]), abs=0.1)
    np.testing.assert_allclose(np.diff(y), np.diff(y).mean(), atol=0.01)
    assert y[2] < y[0]
    lowest, highest = (f"{y:g}" for y in (ys[0], ys[2]))
    assert up[lowest] - up[highest] == pytest.approx(y[0] - y[2], abs=0.1)
    assert list(shapes_by_tooltip(root)) == [f"a: {y:g} at {50 * k}" for k, y in enumerate(ys)]


def test_long_line_shows_local_means() -> None:
    x = np.arange(100_000.0)
    chart = line_chart("t", [Curve("a", list(zip(x, 5 + 0 * x, strict=True)))], "x", "y")
    assert len(chart) < 40_000
    root = ET.fromstring(chart)
    assert 50 <= len(shapes_by_tooltip(root)) <= 60
    assert len({center_of(shape)[1] for shape in shapes_by_tooltip(root).values()}) == 1
    assert "80k" in label_positions(root, "x")


def test_chart_escapes_names_and_omits_empty_curves() -> None:
    lines = [
        Curve(UNSAFE_TEXT, [(0.0, 1.0), (1.0, 2.0)], colour=9, best=(1.0, 2.0)),
        Curve("b", []),
    ]
    shown = UNSAFE_TEXT.replace("\x01", " ")
    for chart in (
        line_chart(shown, lines, UNSAFE_TEXT, UNSAFE_TEXT, note=shown),
        scatter_chart(shown, [1.0, np.nan], [2.0, 3.0], UNSAFE_TEXT, UNSAFE_TEXT, diagonal=True),
        bar_chart(shown, [(UNSAFE_TEXT, 1.0), ("b", -2.0)]),
        timeline(shown, [Span(1.0, 2.0, UNSAFE_TEXT, [(1.0, UNSAFE_TEXT, True)]), Span(0, 0, "b")]),
    ):
        root = ET.fromstring(chart)
        assert not list(root.iter("b"))
        assert shown in "".join(root.itertext())
        assert any(shown in tip or tip == "2 at 1" for tip in shapes_by_tooltip(root))
        # The style sheet sets the colours, for light and for dark.
        assert set(re.findall(r"#[0-9a-f]{6}\b", chart)) <= {"#000000"}
        assert "var(--c" in chart
    assert line_chart("t", [Curve("a", [])], "x", "y") == NO_HTML
    assert bar_chart("t", []) == scatter_chart("t", [], [], "x", "y") == NO_HTML


def test_bar_lengths_are_proportional_to_values() -> None:
    root = ET.fromstring(bar_chart("t", [("a", 0.5), ("b", 0.25)], share=True))
    long_bar, short_bar = (np.ptp(points_of(bar)[0]) for bar in shapes_by_tooltip(root).values())
    assert long_bar == pytest.approx(2 * short_bar, rel=1e-4)
    assert list(shapes_by_tooltip(root)) == ["a: 50.0%", "b: 25.0%"]
    assert {"50.0%", "25.0%", "a", "b"} <= {text.text for text in root.iter("text")}


def test_timeline_spans_are_proportional_to_durations() -> None:
    spans = [Span(1.0, 4.0, "first"), Span(0.0, 8.0, "second", [(4.0, "half", False)], "2 h")]
    root = ET.fromstring(timeline("t", spans))
    shapes = shapes_by_tooltip(root)
    first, setup, second = (
        points_of(shapes[name])[0] for name in ("first", "setup, first", "second")
    )
    assert np.ptp(second) == pytest.approx(2 * np.ptp(first), rel=1e-3)
    assert np.ptp(setup) == pytest.approx(np.ptp(first) / 4, rel=1e-3)
    assert center_of(shapes["half"])[0] == pytest.approx(
        (second.min() + second.max()) / 2, abs=0.02
    )
    assert "2 h" in {text.text for text in root.iter("text")}


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0234, "0.0234"), (3e-7, "3e-07"), (4820, "4820"), (48_200, "48.2k"),
     (1.23e9, "1.23G")],
)  # fmt: skip
def test_short_number_is_short(value: float, text: str) -> None:
    assert short_number(value) == text
