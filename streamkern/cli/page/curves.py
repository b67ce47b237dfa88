"""Sections of curves over the samples trained on: losses and rates, of the run and each rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from streamkern.basics.log_scale import loss_note
from streamkern.cli.page.charts import Curve, legend, line_chart
from streamkern.cli.page.facts import RunFacts
from streamkern.cli.page.html import NO_HTML, Cell, Html, html_table, joined_html, tag
from streamkern.cli.page.sections import (
    count_cell,
    figure_cell,
    figure_name,
    run_label,
    section,
    time_tag,
)
from streamkern.train.log_reader import LOSS, RANK_FIGURES, RATES, SLOWEST, rank_curve

_SAMPLES, _SQUARES = "samples trained on", "mean squared error"
_RATE, _SHARE = "samples / s", "share of the time"


def curves_section(runs: Sequence[RunFacts]) -> Html:
    """Return the section with charts of losses, figures, rates and stalls."""
    evaluations = (evaluation for run in runs for evaluation in run.history.evaluations)
    names = list(dict.fromkeys(name for entry in evaluations for name in entry["figures"]))
    charts = [chart for chart in _loss_and_rate_charts(runs, names) if chart]
    if not charts:
        return section("Curves", tag("p", "The log holds no steps yet, and no evaluation."))
    run_legend = legend((run.name, k) for k, run in enumerate(runs)) if len(runs) > 1 else ""
    grid = tag("div", *charts, class_="charts")
    return section("Curves", run_legend, grid, _evaluation_table(runs, names))


def _loss_and_rate_charts(runs: Sequence[RunFacts], names: Sequence[str]) -> list[Html]:
    """Return the charts, all with the same scale of samples. names : names of the figures"""
    x_end = float(max(run.progress["samples"] for run in runs))
    chart = partial(line_chart, x=_SAMPLES, x_end=x_end)

    def curves_of(name: str) -> list[Curve]:
        """Return the curve of each run from its log."""
        return [Curve(run.name, run.history.curves.get(name, ()), k) for k, run in enumerate(runs)]

    evaluated_after_epochs = all(run.solver in ("direct", "falkon") for run in runs)
    note = (
        "of the model after an epoch" if evaluated_after_epochs else "of rows not learned from yet"
    )
    if any(loss_note(run.setup) for run in runs):
        note += "; on a log scale of the targets, squared errors of the logarithms"
    charts = [chart("Training loss", curves_of(LOSS), y=_SQUARES, note=note)]
    for name in names:
        label = figure_name(name)
        y = _SQUARES if name.endswith("mse") else label
        charts.append(chart(label[:1].upper() + label[1:], _evaluation_curves(runs, name), y=y))
    rate, stall = map(curves_of, RATES)
    charts.append(chart("Rate", rate, y=_RATE, zero=True))
    charts.append(chart("Waiting for data", stall, y=_SHARE, percent=True))
    return charts


def _evaluation_curves(runs: Sequence[RunFacts], name: str) -> list[Curve]:
    """Return the curve of a figure for each run, from its evaluations."""

    def points(run: RunFacts) -> list[tuple[float, float]]:
        values = ((e["samples"], e["figures"].get(name)) for e in run.history.evaluations)
        return [(samples, value) for samples, value in values if value is not None]

    return [Curve(run.name, points(run), k) for k, run in enumerate(runs)]


def _evaluation_table(runs: Sequence[RunFacts], names: Sequence[str]) -> Html:
    """Return a collapsed table of the evaluations."""
    rows = [
        [run.name, time_tag(e["time"]), count_cell(e["step"]), count_cell(e["samples"]),
         *(figure_cell(e["figures"].get(name)) for name in names)]
        for run in runs for e in run.history.evaluations
    ]  # fmt: skip
    if not rows:
        return NO_HTML
    head = ["run", "time, UTC", "step", "samples", *map(figure_name, names)]
    summary = tag("summary", f"All {len(rows)} evaluations")
    return tag("details", summary, html_table(head, rows, left=(1,)))


# -- ranks ---------------------------------------------------------------------------------------


def ranks_section(runs: Sequence[RunFacts]) -> Html:
    """Return the section on runs with several ranks: rates and waiting times of each rank."""
    return section(
        "Ranks", *(_rank_charts(run, k) for k, run in enumerate(runs)),
        caption="The rank that waits least for the others is the slowest: they wait for it.",
    )  # fmt: skip


def _rank_charts(run: RunFacts, k: int) -> Html:
    """Return the charts of a run with several ranks; empty for one rank."""
    rates, stalls, waits = RANK_FIGURES
    n = sum(name.startswith(f"{waits}/") for name in run.history.curves)
    if not n:
        return NO_HTML
    dashboard_text = f"dashboard {run.history.dashboard}" if run.history.dashboard else ""
    title = tag("h3", run_label(run, k), tag("small", dashboard_text))

    def chart(title: str, name: str, y: str, *, percent: bool = True) -> Html:
        curves = run.history.curves
        lines = [Curve(f"rank {k}", curves.get(rank_curve(name, k), ()), k) for k in range(n)]
        x_end = float(run.progress["samples"])
        return line_chart(title, lines, _SAMPLES, y, x_end=x_end, zero=True, percent=percent)

    charts = [
        chart("Rate of each rank, without waiting for others", rates, _RATE, percent=False),
        chart("Waiting for data", stalls, _SHARE),
        chart("Waiting for other ranks", waits, _SHARE),
    ]
    names = legend((f"rank {k}", k) for k in range(n))
    return joined_html([title, _rank_table(run, n), tag("div", *charts, class_="charts"), names])


def _rank_table(run: RunFacts, n: int) -> Html:
    """Return a table of the mean rates and waiting times of each rank over the log."""
    rates, stalls, waits = RANK_FIGURES
    workers = dict(enumerate(run.history.workers))
    slowest = [rank for _, rank in run.history.curves.get(SLOWEST, ())]
    rows: list[list[Cell]] = [
        [f"rank {k}", workers.get(k), count_cell(_mean_of_curve(run, rates, k)),
         _percent_cell(_mean_of_curve(run, stalls, k)),
         _percent_cell(_mean_of_curve(run, waits, k)),
         _percent_cell(slowest.count(k) / max(1, len(slowest)))]
        for k in range(n)
    ]  # fmt: skip
    head = ["", "worker", "samples / s", "waits for data", "waits for others", "is the slowest"]
    return html_table(head, rows, left=(1,))


def _mean_of_curve(run: RunFacts, name: str, rank: int) -> float | None:
    """Return the mean of a curve of a rank; None if it has no points."""
    values = [value for _, value in run.history.curves.get(rank_curve(name, rank), ())]
    return sum(values) / len(values) if values else None


def _percent_cell(share: float | None) -> Cell:
    """Return a share in percent."""
    return None if share is None else f"{share:.1%}"
