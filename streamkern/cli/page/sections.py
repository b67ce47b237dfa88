"""The sections that compare runs: summary, plan and measurements, settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from streamkern.basics.text import size_text
from streamkern.cli.page.charts import COLOURS, short_number
from streamkern.cli.page.facts import RunFacts
from streamkern.cli.page.html import NO_HTML, Cell, Html, html_table, joined_html, tag
from streamkern.config.names import PARAMETER_SETTINGS
from streamkern.kernels.notation import kernel_text
from streamkern.losses.losses import SQUARES, fitted_loss_table, loss_text
from streamkern.train.event_texts import duration
from streamkern.train.log_reader import RATES, seconds_between


def run_label(run: RunFacts, k: int) -> Html:
    """Return the name of run k with its colour before it."""
    return tag("span", tag("i", class_=f"c{k % COLOURS}"), run.name, class_="run")


def section(title: str, *parts: str, caption: str = "") -> Html:
    """Return parts below a title and a caption; empty if there are no parts."""
    if not any(parts):
        return NO_HTML
    paragraph = tag("p", caption) if caption else NO_HTML
    return tag("section", tag("h2", title), paragraph, *parts)


def figure_name(key: str) -> str:
    """Return "test accuracy" for test_accuracy."""
    return key.replace("_", " ").replace(" r2", " R²")


def count_cell(value: int | float | None) -> Cell:
    """Return a whole number with separated thousands."""
    return None if value is None else f"{value:,.0f}"


def figure_cell(value: float | None) -> Cell:
    """Return a measured number with four digits."""
    return None if value is None else f"{value:.4g}"


def duration_cell(value: float | None) -> Cell:
    """Return a duration as text."""
    return None if value is None else duration(value)


def setting_text(value: Any) -> Cell:
    """Return a setting as in a run file; tables with a kind as "kind (name value, ...)"."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping) and ("kind" in value or "kernel" in value):
        return kernel_text(value) if "parts" in value else _kind_text(value)
    if isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
        return "; ".join(str(setting_text(entry)) for entry in value)
    return json.dumps(value, ensure_ascii=False)


def _kind_text(value: Mapping[str, Any]) -> str:
    """Return a table with a kind as text: "kind (name value, ...)"."""
    kind = value.get("kind", value.get("kernel"))
    parameters = ", ".join(
        f"{k} {setting_text(v)}" for k, v in value.items() if k not in ("kind", "kernel")
    )
    return f"{kind} ({parameters})" if parameters else str(kind)


# ----------------------------------------------------------------------------------- in short

_MAX_SUMMARY_METRICS = 4
"""Number of metrics that fit beside other columns in a window of 1280 pixels."""


def summary_section(runs: Sequence[RunFacts]) -> Html:
    """Return a table with a line for each run; many metrics get a separate table."""
    figures = list(dict.fromkeys(name for run in runs for name in run.figures))
    names = figures if len(figures) <= _MAX_SUMMARY_METRICS else []  # in this table
    shows_loss = any(fitted_loss_table(run.setup) for run in runs)
    head = ["run", "state", "solver", "kernel", *(["loss"] if shows_loss else []), "centers",
            "samples", "% of plan", "epochs", "training loss",
            *map(figure_name, names), "time", "last seen, UTC"]  # fmt: skip
    rows = [
        [
            run_label(run, k), run.state, run.solver, _kernel_cell(run),
            *([_loss_cell(run)] if shows_loss else []), count_cell(run.n_centers),
            count_cell(run.progress["samples"]), _progress_cell(run),
            count_cell(run.progress["epoch"]), figure_cell(run.loss),
            *(figure_cell(run.figures.get(name)) for name in names), duration_cell(working_s(run)),
            _last_seen_cell(run),
        ]
        for k, run in enumerate(runs)
    ]  # fmt: skip
    metrics_table = html_table(
        ["run", *map(figure_name, figures)],
        [
            [run_label(run, k), *(figure_cell(run.figures.get(name)) for name in figures)]
            for k, run in enumerate(runs)
        ],
    )
    notes = [tag("p", f"{run.name}: {note}", class_="note") for run in runs for note in run.notes]
    writers = [
        tag("p", f"{run.name} is being written by {run.writer}") for run in runs if run.writer
    ]
    table = html_table(head, rows, left=(1, 2, 3, 3 + shows_loss, len(head) - 1))
    return joined_html([table, *([] if names == figures else [metrics_table]), *writers, *notes])


def _last_seen_cell(run: RunFacts) -> Cell:
    """Return the time of the newest record, to the minute."""
    if run.last_seen is None:
        return None
    return tag("time", clock_text(run.last_seen)[:16], datetime=run.last_seen)


def _kernel_cell(run: RunFacts) -> Cell:
    """Return the kernel of the setup as text; None without a setup."""
    kernel = run.setup.get("kernel")
    if not kernel:
        return None
    text = kernel_text({k: v for k, v in kernel.items() if k != "metric"})
    return f"{text}, with a metric" if "metric" in kernel else text


def _loss_cell(run: RunFacts) -> Cell:
    """Return the loss with its parameters; None without a setup."""
    return loss_text(fitted_loss_table(run.setup) or SQUARES) if run.setup else None


def _progress_cell(run: RunFacts) -> Cell:
    """Return the share of the planned samples that are done."""
    total = run.planned_samples
    return f"{run.progress['samples'] / total:.0%}" if total else None


def working_s(run: RunFacts) -> float | None:
    """Return the total seconds that processes spent on the run, according to the log."""
    return sum(process.seconds for process in run.history.processes) or None


def clock_text(time: str) -> str:
    """Return a time of the log to the second."""
    return time[:19].replace("T", " ")


def time_tag(time: str) -> Html:
    """Return the time as an element of a table cell."""
    return tag("time", clock_text(time), datetime=time)


# ----------------------------------------------------------------------------------- the plan


def plan_section(runs: Sequence[RunFacts]) -> Html:
    """Return the section on the planned and measured resources of each run.

    Rows that have only measured values are in a second table, with one column for each run.
    """
    planned_rows: list[list[Cell]] = []
    measured_rows: list[list[Cell]] = []
    cells_of_runs = list(map(_plan_cells, runs))
    for name in cells_of_runs[0]:
        pairs = [cells[name] for cells in cells_of_runs]
        if any(planned for planned, _ in pairs):
            planned_rows.append([name, *(cell for pair in pairs for cell in pair)])
        elif any(measured for _, measured in pairs):
            measured_rows.append([name, *(measured for _, measured in pairs)])
    run_names, measured_head = NO_HTML, ["", "measured"]
    if len(runs) > 1:
        labels = [run_label(run, k) for k, run in enumerate(runs)]
        heads = (tag("th", label, colspan=2, class_="group") for label in labels)
        run_names = tag("tr", tag("td", class_="group"), *heads)
        measured_head = ["", *labels]
    head = ["", *("planned", "measured") * len(runs)]
    return section(
        "Planned and measured",
        tag("div", html_table(head, planned_rows, first_row=run_names), class_="pairs"),
        html_table(measured_head, measured_rows) if measured_rows else NO_HTML,
    )


def _memory_cells(run: RunFacts) -> tuple[Cell, Cell]:
    """Return planned and measured peak memory."""
    planned, peak = run.history.plan.get("peak_bytes"), run.history.peak_bytes
    share = f" ({peak / planned:.0%})" if peak and planned else ""
    return _size_cell(planned), None if peak is None else f"{size_text(peak)}{share}"


def _size_cell(size: int | None) -> Cell:
    """Return a size as text."""
    return None if size is None else size_text(size)


def _work_cells(flops: float, seconds: float | None, share: float) -> tuple[Cell, Cell]:
    """Return the planned FLOPs, and the measured speed.

    flops : planned FLOPs of the whole work
    seconds : time that the finished part of the work took
    share : finished part of the work, from 0 to 1
    """
    if not flops:
        return None, None
    speed = None if not seconds else f"{_flop_text(share * flops / seconds)}/s"
    return _flop_text(flops), speed


def _flop_text(number: float) -> str:
    """Return a number of FLOPs as text."""
    text = short_number(number)
    return f"{text[:-1]} {text[-1]}FLOP" if text[-1].isalpha() else f"{text} FLOP"


def _setup_cells(run: RunFacts) -> tuple[Cell, Cell]:
    """Return planned FLOPs and measured speed of the setup."""
    flops = run.history.plan.get("flops", {})
    setup_flops = sum(work for phase, work in flops.items() if phase != "training")
    return _work_cells(setup_flops, run.history.setup_s, 1.0)


def _training_cells(run: RunFacts) -> tuple[Cell, Cell]:
    """Return planned FLOPs and measured speed of the steps."""
    total = run.planned_samples
    share = (run.progress["samples"] + run.history.n_repeated) / total if total else 0.0
    return _work_cells(
        run.history.plan.get("flops", {}).get("training", 0), run.history.steps_s, share
    )


def _plan_cells(run: RunFacts) -> dict[str, tuple[Cell, Cell]]:
    """Return the planned and the measured cell of each row, by the name of the row."""
    history, plan, progress = run.history, run.history.plan, run.progress
    samples, step = progress["samples"], progress["step"]
    n_trained = samples + history.n_repeated
    stalls = [share for _, share in history.curves.get(RATES[1], ())]
    rate = n_trained / history.steps_s if n_trained and history.steps_s else None
    return {
        "samples": (count_cell(run.planned_samples), count_cell(samples)),
        "steps": (count_cell(plan.get("batches")), count_cell(step)),
        "rows in a batch": (
            count_cell(run.sizes.get("batch_size")), f"{samples / step:.4g}" if step else None
        ),
        "peak memory": _memory_cells(run),
        "memory budget": (_size_cell(plan.get("budget_bytes")), None),
        "setup": (None, duration_cell(history.setup_s)),
        "setup FLOPs": _setup_cells(run),
        "steps and evaluations": (
            duration_cell(history.expected_s), duration_cell(history.steps_s)
        ),
        "training FLOPs": _training_cells(run),
        "samples / s": (None, count_cell(rate)),
        "waiting for data": (None, f"{sum(stalls) / len(stalls):.1%}" if stalls else None),
        "samples repeated after a resume": (None, count_cell(history.n_repeated or None)),
    }  # fmt: skip


# ----------------------------------------------------------------------------------- settings


def settings_section(runs: Sequence[RunFacts], defaults: Mapping[str, Any]) -> Html:
    """Return the section on settings that differ between runs, or from the defaults.

    All settings follow in a collapsed table.
    """
    settings = [_requested_settings(run, defaults) for run in runs]
    if not any(settings):
        return NO_HTML
    heads = [run_label(run, k) for k, run in enumerate(runs)]
    is_single = len(runs) == 1
    if is_single:  # its column is compared with one of the defaults
        columns = [dict(defaults), settings[0]]
        heads = [Html("default"), *heads]
    else:
        sizes = [{f"size: {k}": v for k, v in run.sizes.items()} for run in runs]
        columns = [setting | size for setting, size in zip(settings, sizes, strict=True)]
    names = list(dict.fromkeys(name for column in columns for name in column))
    differing = [n for n in names if any(c.get(n) != columns[0].get(n) for c in columns)]
    if is_single:  # a setting that is not recorded has its default
        differing = [n for n in differing if n in settings[0]]
    reference = "the defaults" if is_single else "each other"
    shown = tag("p", f"None differs from {reference}.")
    if differing:
        shown = _settings_table(differing, columns, heads, set())
    all_settings = _settings_table(names, columns, heads, set(differing))
    collapsed = tag("details", tag("summary", f"All {len(names)} settings and sizes"), all_settings)
    return section(
        "Settings that differ", shown, collapsed if len(names) > len(differing) else NO_HTML,
        caption=f"Compared with {reference}. Values chosen for “auto” are listed as sizes."
        if not is_single else "Compared with the defaults.",
    )  # fmt: skip


def _requested_settings(run: RunFacts, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings as the user gave them: "auto" in place of values chosen for it."""
    settings = run.settings
    if not settings:
        return {}
    plan = run.history.plan
    if "auto_epochs" in plan and settings.get("data.epochs") == plan["auto_epochs"]:
        settings["data.epochs"] = "auto"
    if "run.calibrate" not in settings and run.setup.get("uncalibrated") is not None:
        was_auto = 'calibrate="auto"' in run.setup["uncalibrated"]
        settings["run.calibrate"] = "auto" if was_auto else False
    names = run.setup.get("facts", {}).get("defaults", ())
    paths = [PARAMETER_SETTINGS[name] for name in names if name in PARAMETER_SETTINGS]
    return settings | {path: defaults[path] for path in paths if path in defaults}


def _settings_table(
    names: Sequence[str], columns: Sequence[Mapping[str, Any]], heads: Sequence[Html],
    differing: set[str],
) -> Html:  # fmt: skip
    """Return a table of settings.

    names : names of the settings, one for each row
    columns : settings by name, of the defaults or of a run
    heads : heads of the columns
    differing : names of settings whose values are marked where they differ from the first column
    """
    rows = [
        [tag("code", name), *(setting_text(column.get(name)) for column in columns)]
        for name in names
    ]
    marked = [
        (i, j)
        for i, name in enumerate(names)
        for j in range(1, len(columns) + 1)
        if name in differing and columns[j - 1].get(name) != columns[0].get(name)
    ]
    return html_table(["", *heads], rows, left=range(1, len(columns) + 1), marked=marked)


def elapsed_text(run: RunFacts, time: str) -> str:
    """Return the time since the run started, as text."""
    return duration(max(seconds_between(run.start_time or time, time), 0.0))
