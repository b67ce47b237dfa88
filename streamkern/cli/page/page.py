"""The page: one file without dependencies, network access or scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streamkern.basics.text import utc_now
from streamkern.basics.version import __version__
from streamkern.cli.page.curves import curves_section, ranks_section
from streamkern.cli.page.facts import RunFacts
from streamkern.cli.page.html import Html, joined_html, tag
from streamkern.cli.page.predictions import predictions_section
from streamkern.cli.page.sections import (
    clock_text,
    plan_section,
    section,
    settings_section,
    summary_section,
)
from streamkern.cli.page.setup_sections import (
    choices_section,
    data_section,
    machine_section,
    timeline_section,
)

REPORT_MARK = "<!DOCTYPE html>\n<!-- made by streamkern report -->\n"
"""First bytes of a report, by which streamkern recognises a file that it may replace."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Content security policy: browsers run no script and load nothing, even if a name held markup."""


def report_page(runs: Sequence[RunFacts], defaults: Mapping[str, Any]) -> str:
    """Return the HTML page of the runs.

    defaults : default values of the settings, by "section.name"
    """
    names = ", ".join(run.name for run in runs)
    title = f"{names if len(names) < 60 else f'{len(runs)} runs'} · streamkern"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("link", rel="icon", href="data:,"),
        tag("style", Html(CSS)),
    )
    heading = "Run" if len(runs) == 1 else f"{len(runs)} runs"
    # A line for each location: line breaks, and every second one replaced by a location.
    locations = [tag("br")] * (2 * len(runs) - 1)
    locations[::2] = [tag("code", run.location) for run in runs]
    body = tag(
        "body",
        tag("h1", names if len(runs) == 1 else heading),
        tag("p", *locations),
        summary_section(runs),
        curves_section(runs),
        predictions_section(runs),
        ranks_section(runs),
        plan_section(runs),
        settings_section(runs, defaults),
        choices_section(runs),
        data_section(runs),
        timeline_section(runs),
        machine_section(runs),
        section(
            "About", tag("p", f"Made by streamkern {__version__}, {clock_text(utc_now())} UTC.")
        ),
    )
    return REPORT_MARK + joined_html([tag("html", head, body, lang="en"), "\n"])


CSS = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --text: #1c2024; --quiet: #60666d; --line: #e3e5e8; --base: #aab0b6;
  --soft: #f5f6f8; --mark: #fff2c9; --bad: #b3261e; --good: #1a7f4b; --setup: #c9ced4;
  --c0: #2563b0; --c1: #d9661f; --c2: #2a8c5a; --c3: #a2428f; --c4: #8a6d1b; --c5: #c43b4e;
  --c6: #1d8a99; --c7: #6a5acd;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171a; --text: #e4e7ea; --quiet: #979fa8; --line: #2b3036; --base: #59616a;
    --soft: #1c2024; --mark: #3d3517; --bad: #ff8a80; --good: #6fcf97; --setup: #4a525b;
    --c0: #6ea8fe; --c1: #ff9d5c; --c2: #5fcf95; --c3: #e08fd0; --c4: #d4b455; --c5: #ff8593;
    --c6: #5ccad9; --c7: #a99bff;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 28px 24px 64px; max-width: 1220px; background: var(--page);
  color: var(--text); font: 14px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
h1 { margin: 0; font-size: 22px; font-weight: 600; letter-spacing: -0.01em; }
h1, h3, p, figcaption { overflow-wrap: anywhere; }
h2 {
  margin: 40px 0 12px; padding-top: 14px; border-top: 1px solid var(--line);
  font-size: 15px; font-weight: 600;
}
h3 { margin: 22px 0 6px; font-size: 14px; font-weight: 600; }
h3 small { margin-left: 8px; color: var(--quiet); font-size: 12px; font-weight: 400; }
p { margin: 4px 0 10px; color: var(--quiet); max-width: 76ch; }
p.note { color: var(--bad); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td {
  padding: 4px 20px 4px 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); font-weight: 400;
}
td { max-width: 52ch; overflow-wrap: break-word; }
th:last-child, td:last-child { padding-right: 4px; }
thead th { color: var(--quiet); font-size: 12px; white-space: nowrap; vertical-align: bottom; }
tbody th { color: var(--quiet); white-space: nowrap; }
th.n, td.n { text-align: right; white-space: nowrap; }
thead th.n { white-space: normal; }
.wide + .wide { margin-top: 14px; }
td.group, th.group { text-align: right; border-bottom: 0; }
.pairs td:nth-child(even), .pairs thead th:nth-child(even) { padding-left: 22px; }
.legend { margin: 0 0 14px; max-width: none; font-size: 13px; }
.legend .run { margin-right: 22px; font-weight: 400; display: inline-block; }
mark {
  background: var(--mark); color: inherit; padding: 1px 4px; margin: 0 -4px; border-radius: 3px;
}
time { white-space: nowrap; }
.no { color: var(--base); }
.bad { color: var(--bad); }
.run { color: var(--text); font-weight: 600; }
td .run, th .run { white-space: nowrap; }
.run i {
  display: inline-block; width: 10px; height: 10px; margin-right: 7px; border-radius: 2px;
}
i.c0 { background: var(--c0); } i.c1 { background: var(--c1); } i.c2 { background: var(--c2); }
i.c3 { background: var(--c3); } i.c4 { background: var(--c4); } i.c5 { background: var(--c5); }
i.c6 { background: var(--c6); } i.c7 { background: var(--c7); }
code { font: 12px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
details { margin: 10px 0; }
summary { cursor: pointer; color: var(--quiet); }
details[open] > summary { margin-bottom: 8px; }
.charts {
  display: grid; gap: 20px 28px;
  grid-template-columns: repeat(auto-fill, minmax(min(440px, 100%), 1fr));
}
figure { margin: 0; min-width: 0; }
figcaption { font-weight: 600; font-size: 13px; margin-bottom: 4px; }
figcaption small { margin-left: 8px; color: var(--quiet); font-weight: 400; font-size: 12px; }
svg { display: block; width: 100%; height: auto; max-width: 640px; overflow: visible; }
.time svg { max-width: none; }
.time svg:has(text) { min-width: 1000px; }
@media (max-width: 30rem) { figure svg text { font-size: 10px !important; } }
svg text { font-variant-numeric: tabular-nums; }
svg path, svg use { stroke-linejoin: round; }
svg use:hover { opacity: 1 !important; }
@media print { body { max-width: none; padding: 0; } }
"""
