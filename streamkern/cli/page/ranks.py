"""The section on runs of several ranks: the rate of each rank, and its waiting times."""

from __future__ import annotations

from collections.abc import Sequence

from streamkern.cli.page.charts import COLOURS, Axes, Curve, line_chart
from streamkern.cli.page.facts import Facts
from streamkern.cli.page.history import RANK_FIGURES, SLOWEST, of_rank
from streamkern.cli.page.html import NO_HTML, Cell, Html, html_table, joined_html, tag
from streamkern.cli.page.sections import count, run_label, section

_RATE, _STALL, _WAIT = RANK_FIGURES
_SAMPLES, _SHARE = "samples trained on", "share of the time"


def ranks_section(runs: Sequence[Facts]) -> Html:
    """Return the section of all runs with several ranks."""
    return section(
        "Ranks", *(_ranks(run, k) for k, run in enumerate(runs)),
        words="The rank that waits least for the others is the slowest: they wait for it.",
    )  # fmt: skip


def _ranks(run: Facts, k: int) -> Html:
    n = sum(name.startswith(f"{_WAIT}/") for name in run.history.curves)
    if not n:
        return NO_HTML
    watched = f"dashboard {run.history.dashboard}" if run.history.dashboard else ""
    title = tag("h3", run_label(run, k), tag("small", watched))
    charts = [
        _chart(run, n, "Rate of each rank, without waiting for others", _RATE, "samples / s"),
        _chart(run, n, "Waiting for data", _STALL, _SHARE, percent=True),
        _chart(run, n, "Waiting for other ranks", _WAIT, _SHARE, percent=True),
    ]
    return joined_html([title, _table(run, n), tag("div", *charts, class_="charts"), _legend(n)])


def _table(run: Facts, n: int) -> Html:
    """Return a table of means over the log."""
    workers = dict(enumerate(run.history.workers))
    slowest = [rank for _, rank in run.history.curves.get(SLOWEST, ())]
    rows: list[list[Cell]] = [
        [f"rank {k}", workers.get(k), count(_mean(run, _RATE, k)), _percent(_mean(run, _STALL, k)),
         _percent(_mean(run, _WAIT, k)), _percent(slowest.count(k) / max(1, len(slowest)))]
        for k in range(n)
    ]  # fmt: skip
    head = ["", "worker", "samples / s", "waits for data", "waits for others", "is the slowest"]
    return html_table(head, rows, left=(1,))


def _mean(run: Facts, name: str, rank: int) -> float | None:
    values = [value for _, value in run.history.curves.get(of_rank(name, rank), ())]
    return sum(values) / len(values) if values else None


def _percent(share: float | None) -> Cell:
    return None if share is None else f"{share:.1%}"


def _chart(run: Facts, n: int, title: str, name: str, y: str, *, percent: bool = False) -> Html:
    lines = [Curve(f"rank {k}", run.history.curves.get(of_rank(name, k), ()), k) for k in range(n)]
    far = float(run.done["samples"])
    return line_chart(title, lines, Axes(_SAMPLES, y, far=far, zero=True, percent=percent))


def _legend(n: int) -> Html:
    names = (
        tag("span", tag("i", class_=f"c{k % COLOURS}"), f"rank {k}", class_="run") for k in range(n)
    )
    return tag("p", *names, class_="legend")
