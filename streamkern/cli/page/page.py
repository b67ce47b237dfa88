"""The page: one file without dependencies, network access or scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streamkern.basics.text import utc_now
from streamkern.basics.version import __version__
from streamkern.cli.page.answers import answers_section
from streamkern.cli.page.curves import curves
from streamkern.cli.page.facts import Facts
from streamkern.cli.page.html import Html, joined_html, tag
from streamkern.cli.page.ranks import ranks_section
from streamkern.cli.page.sections import clock, in_short, plan_section, section, settings
from streamkern.cli.page.setup_sections import choices, data, in_time, machine
from streamkern.cli.page.style import CSS

MARK = "<!DOCTYPE html>\n<!-- made by streamkern report -->\n"
"""Beginning of such a file, and of no other."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def report_page(runs: Sequence[Facts], defaults: Mapping[str, Any]) -> str:
    """Return HTML of the runs side by side. defaults : of settings, by section and name"""
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
    what = "Run" if len(runs) == 1 else f"{len(runs)} runs"
    places = [tag("br")] * (2 * len(runs) - 1)
    places[::2] = [tag("code", run.place) for run in runs]
    body = tag(
        "body",
        tag("h1", names if len(runs) == 1 else what),
        tag("p", *places),
        in_short(runs),
        curves(runs),
        answers_section(runs),
        ranks_section(runs),
        plan_section(runs),
        settings(runs, defaults),
        choices(runs),
        data(runs),
        in_time(runs),
        machine(runs),
        section("About", tag("p", f"Made by streamkern {__version__}, {clock(utc_now())} UTC.")),
    )
    return MARK + joined_html([tag("html", head, body, lang="en"), "\n"])
