"""The section of curves of runs over the samples trained on."""

from __future__ import annotations

from collections.abc import Sequence

from streamkern.cli.page.charts import Axes, Curve, line_chart
from streamkern.cli.page.facts import Facts
from streamkern.cli.page.history import LOSS, RATES
from streamkern.cli.page.html import NO_HTML, Html, html_table, tag
from streamkern.cli.page.sections import count, figure, figure_name, moment, run_label, section

_SAMPLES, _SQUARES = "samples trained on", "mean squared error"


def curves(runs: Sequence[Facts]) -> Html:
    """Return the section with charts of losses, figures, rates and stalls."""
    names = list(
        dict.fromkeys(n for run in runs for e in run.history.evaluations for n in e["figures"])
    )
    shown = [chart for chart in _charts(runs, names) if chart]
    if not shown:
        return section("Curves", tag("p", "The log holds no steps yet, and no evaluation."))
    legend = NO_HTML
    if len(runs) > 1:
        legend = tag("p", *(run_label(run, k) for k, run in enumerate(runs)), class_="legend")
    return section("Curves", legend, tag("div", *shown, class_="charts"), _evaluations(runs, names))


def _charts(runs: Sequence[Facts], names: Sequence[str]) -> list[Html]:
    """Return the charts, all with the same scale of samples."""
    far = float(max(run.done["samples"] for run in runs))

    def chart(title: str, lines: list[Curve], y: str, note: str = "", **how: bool) -> Html:
        return line_chart(title, lines, Axes(_SAMPLES, y, far=far, **how), note)

    def logged(name: str) -> list[Curve]:
        return [Curve(run.name, run.history.curves.get(name, ()), k) for k, run in enumerate(runs)]

    at_ends = all(run.solver in ("direct", "falkon") for run in runs)
    note = "of the model after an epoch" if at_ends else "of rows not learned from yet"
    found = [chart("Training loss", logged(LOSS), _SQUARES, note)]
    for name in names:
        words = figure_name(name)
        y = _SQUARES if name.endswith("mse") else words
        found.append(chart(words[:1].upper() + words[1:], _evaluated(runs, name), y))
    rate, stall = map(logged, RATES)
    found.append(chart("Rate", rate, "samples / s", zero=True))
    found.append(chart("Waiting for data", stall, "share of the time", zero=True, percent=True))
    return found


def _evaluated(runs: Sequence[Facts], name: str) -> list[Curve]:
    """Return the curve of a figure for each run."""

    def points(run: Facts) -> list[tuple[float, float]]:
        known = ((e["samples"], e["figures"].get(name)) for e in run.history.evaluations)
        return [(samples, value) for samples, value in known if value is not None]

    return [Curve(run.name, points(run), k) for k, run in enumerate(runs)]


def _evaluations(runs: Sequence[Facts], names: Sequence[str]) -> Html:
    """Return the table of figures behind the curves, folded."""
    rows = [
        [run.name, moment(e["time"]), count(e["step"]), count(e["samples"]),
         *(figure(e["figures"].get(name)) for name in names)]
        for run in runs for e in run.history.evaluations
    ]  # fmt: skip
    if not rows:
        return NO_HTML
    head = ["run", "time, UTC", "step", "samples", *map(figure_name, names)]
    title = tag("summary", f"All {len(rows)} evaluations")
    return tag("details", title, html_table(head, rows, left=(1,)))
