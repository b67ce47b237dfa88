"""The sections on single runs: choices of the setup, data, timeline, machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streamkern.basics.text import first_names_text, size_text
from streamkern.cli.page.charts import Curve, Span, bar_chart, legend, line_chart, timeline
from streamkern.cli.page.facts import RunFacts
from streamkern.cli.page.html import NO_HTML, Cell, Html, html_table, joined_html, tag
from streamkern.cli.page.sections import (
    clock_text,
    count_cell,
    duration_cell,
    elapsed_text,
    run_label,
    section,
    setting_text,
    time_tag,
    working_s,
)
from streamkern.ingest.tables.encoder import column_notes
from streamkern.kernels.notation import kernel_text
from streamkern.stream.target_scale import transform_text
from streamkern.train.event_texts import duration, facts_text, finite_number
from streamkern.train.log_reader import ProcessLog, seconds_between

_MAX_BARS = 14
"""Largest number of features or columns in a bar chart."""
_ERROR_LABEL = "squared error of rows left out, of scaled targets"

# ----------------------------------------------------------------------------------- choices


def choices_section(runs: Sequence[RunFacts]) -> Html:
    """Return the section of choices: kernels tried, noise of the targets, metric, and others."""
    return section("What the setup chose", *(_choice_charts(run, k) for k, run in enumerate(runs)))


def _choice_charts(run: RunFacts, k: int) -> Html:
    """Return the charts of the setup of run k."""
    records = run.history.setup
    charts = [
        _kernel_chart(records, bool(run.setup.get("setup", {}).get("metric"))),
        _metric_rounds_chart(records),
        _noise_chart(records, k),
        _importance_chart(run, k),
        *_metric_charts(run, k),
    ]
    nonempty = [chart for chart in charts if chart]
    facts = _setup_numbers(run)
    if not nonempty and not facts:
        return NO_HTML
    grid = tag("div", *nonempty, class_="charts") if nonempty else NO_HTML
    return joined_html([tag("h3", run_label(run, k)), grid, facts])


def _candidate_points(record: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Return the finite pairs (candidate value, error) of a record, in ascending order."""
    points = [(finite_number(x), finite_number(y)) for x, y in record.get("tried", ())]
    return sorted((x, y) for x, y in points if x is not None and y is not None)


def _kernel_chart(records: Sequence[Mapping[str, Any]], has_metric: bool) -> Html:
    """Return a chart of the error of each kernel over its bandwidth, with a ring at the best.

    has_metric : True shows the kernels with a learned metric; False the kernels without, to which
        the metric was compared
    """
    kernels: list[tuple[str, list[tuple[float, float]]]] = []  # name, (bandwidth, error)
    for record in records:
        points = _candidate_points(record)
        is_search = record.get("event") == "bandwidth" and bool(points)
        if is_search and ("metric" in record["kernel"]) == has_metric:
            table = {k: v for k, v in record["kernel"].items() if k != "metric"}
            kernels.append((str(kernel_text(table)), points))
    if not kernels:
        return NO_HTML
    if all(len(points) == 1 for _, points in kernels):
        bars = sorted(((name, points[0][1]) for name, points in kernels), key=lambda bar: bar[1])
        return bar_chart("Kernel", bars, note=_ERROR_LABEL)
    best_error, best_bandwidth, best_name = min(
        (error, bandwidth, name) for name, points in kernels for bandwidth, error in points
    )
    lines = [
        Curve(name, points, k, (best_bandwidth, best_error) if name == best_name else None)
        for k, (name, points) in enumerate(kernels)
    ]
    chart = line_chart(
        "Kernel and bandwidth", lines, "bandwidth, in median distances of rows", _ERROR_LABEL,
        log_x=True, note="the ring is around the best",
    )  # fmt: skip
    return tag("div", chart, legend((line.name, line.colour) for line in lines))


def _metric_rounds_chart(records: Sequence[Mapping[str, Any]]) -> Html:
    """Return a chart of the error over the rounds of each learned metric."""
    lines: list[Curve] = []
    for record in records:
        errors = [finite_number(error) for error in record.get("errors", ())]
        points = [(float(k), error) for k, error in enumerate(errors) if error is not None]
        if record.get("event") == "metric" and points:
            rows = f", {record['rows']:,} rows" if "rows" in record else ""
            name = f"{record.get('kind')}, exponent {record.get('exponent')}{rows}"
            lines.append(Curve(name, points, len(lines)))
    if not lines:
        return NO_HTML
    chart = line_chart("Metric", lines, "rounds of gradients", _ERROR_LABEL)
    return tag("div", chart, legend((line.name, line.colour) for line in lines))


def _noise_chart(records: Sequence[Mapping[str, Any]], k: int) -> Html:
    """Return a chart of the error over the assumed noise of the targets, from the last record."""
    events = ("noise", "fresh noise")
    noise = [r for r in records if r.get("event") in events and _candidate_points(r)]
    if not noise:
        return NO_HTML
    points = _candidate_points(noise[-1])
    best = min(points, key=lambda point: point[1])
    ridge = finite_number(noise[-1].get("ridge"))
    return line_chart(
        "Noise of the targets", [Curve("error", points, k, best)], "variance of the noise",
        _ERROR_LABEL, log_x=True, note="" if ridge is None else f"ridge {ridge:.3g}",
    )  # fmt: skip


def _importance_chart(run: RunFacts, k: int) -> Html:
    """Return a chart of the permutation importances of columns, if measured."""
    if run.columns is None:
        return NO_HTML
    bars = [(str(name), float(mean)) for name, mean, _ in run.columns["columns"][:_MAX_BARS]]
    note = (
        f"fall of {run.columns['figure']} where a column is shuffled, {run.columns['rows']:,} rows"
    )
    return bar_chart("Permutation importance", bars, k, note=note)


def _metric_charts(run: RunFacts, k: int) -> list[Html]:
    """Return charts of the shares of the features, the spectrum, and the top eigenvectors."""
    metric = run.setup.get("setup", {}).get("metric")
    if not metric:
        return []
    bars = [(str(name), float(share)) for name, share in metric["importances"][:_MAX_BARS]]
    n_features = metric["features"]
    count_text = "" if len(bars) == n_features else f", the largest of {n_features:,}"
    charts = [
        bar_chart("Share of the metric", bars, k, share=True, note=f"of its gradients{count_text}")
    ]
    if metric["kind"] == "matrix":
        points = [(float(j), float(v)) for j, v in enumerate(metric["spectrum"], 1) if v > 0]
        charts.append(
            line_chart("Spectrum of the metric", [Curve("eigenvalue", points, k)], "number",
                "share of the trace", note=f"{metric['directions']:,} directions")
        )  # fmt: skip
        charts += [
            bar_chart(f"Direction {j}", [(str(n), float(x)) for n, x in terms], k,
                note=f"{metric['spectrum'][j - 1]:.1%} of the metric")
            for j, terms in enumerate(metric["first"], 1)
        ]  # fmt: skip
    return charts


def _setup_numbers(run: RunFacts) -> Html:
    """Return a collapsed table of numbers of the setup, and of the records of its log."""
    setup: Mapping[str, Any] = run.setup.get("setup", {})
    numbers: dict[str, Any] = {k: v for k, v in setup.items() if isinstance(v, int | float)}
    learned = setup.get("learned_metric")
    if learned:
        numbers["learned metric"] = facts_text(learned)
    for name, size in run.sizes.items():
        if name != "solver":
            numbers[f"size: {name}"] = size_text(size) if name.endswith("_bytes") else size
    if not numbers:
        return NO_HTML
    rows = [[tag("code", name), setting_text(value)] for name, value in numbers.items()]
    log = [[time_tag(r["time"]), str(r.get("event")), facts_text(r)] for r in run.history.setup]
    lines = html_table(["time, UTC", "event", "details"], log, left=(1, 2)) if log else NO_HTML
    return tag("details", tag("summary", "Numbers of the setup"), html_table(["", ""], rows), lines)


# ----------------------------------------------------------------------------------- the data


def data_section(runs: Sequence[RunFacts]) -> Html:
    """Return the section on the training data of each run."""
    return _comparison_section("Data", runs, _data_cells)


def _comparison_section(
    title: str, runs: Sequence[RunFacts], describe: Callable[[RunFacts], Mapping[str, Cell]]
) -> Html:
    """Return a section with a column for each run; cells that differ from the first are marked.

    describe : returns the cells of a run, by the labels of the rows
    """
    columns = [describe(run) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    if not names:
        return NO_HTML
    differing = [  # (row, column); column 0 holds the labels
        (i, j)
        for i, name in enumerate(names)
        for j, column in enumerate(columns, 1)
        if column.get(name) != columns[0].get(name)
    ]
    head = ["", *(run_label(run, k) for k, run in enumerate(runs))]
    rows: list[list[Cell]] = [[name, *(c.get(name) for c in columns)] for name in names]
    run_columns = range(1, len(runs) + 1)
    return section(title, html_table(head, rows, left=run_columns, marked=differing))


def _data_cells(run: RunFacts) -> dict[str, Cell]:
    """Return the description of the training data of a run, by label."""
    data, base = run.data, run.data
    while "base" in base:  # of augmented copies; the innermost is the store
        base = base["base"]
    shape = data.get("row_shape") or run.setup.get("row_shape")
    classes = data.get("classes") or run.setup.get("classes")
    n_outputs = data.get("n_outputs", run.setup.get("n_outputs"))
    columns = run.setup.get("columns")
    notes = column_notes(run.setup.get("encoder"), "the run")
    log_scale = run.setup.get("setup", {}).get("target_transform")
    cells: dict[str, Cell] = {
        "rows of an epoch": count_cell(data.get("n_rows")),
        "rows stored": count_cell(base.get("n_rows")) if base is not data else None,
        "features": None if shape is None else " x ".join(map(str, shape)),
        "columns": first_names_text(columns) if columns else None,
        "encoded": "; ".join(f"{name} ({note})" for name, note in notes.items()) or None,
        "type": data.get("dtype"),
        "classes": f"{len(classes)}: {first_names_text(classes)}" if classes else None,
        "outputs": None if classes or n_outputs is None else count_cell(n_outputs),
        "targets": None if log_scale is None else transform_text(log_scale),
        "scaling": run.setup.get("scale"),
        "transforms": "; ".join(
            str(setting_text(t))
            for t in data.get("transforms", ())
            if t.get("kind") != "scale"
        ) or None,
        "copies": count_cell(data["copies"]) if data.get("copies", 1) != 1 else None,
        "fingerprint": _digest_cell(data.get("fingerprint")),
    }  # fmt: skip
    return {name: cell for name, cell in cells.items() if cell is not None}


def _digest_cell(text: str | None) -> Cell:
    """Return the first characters of a digest, with the whole digest as a tooltip."""
    return None if not text else tag("code", text[:16], title=text)


# ----------------------------------------------------------------------------------- in time


def timeline_section(runs: Sequence[RunFacts]) -> Html:
    """Return the section on the processes that worked on each run, and their events."""
    return section(
        "In time", *(_run_timeline(run, k) for k, run in enumerate(runs)),
        caption="Grey is setup, colour is steps; ticks are evaluations, triangles what went wrong.",
    )  # fmt: skip


def _run_timeline(run: RunFacts, k: int) -> Html:
    """Return the timeline and the events of run k."""
    processes = run.history.processes
    if not processes:
        return NO_HTML
    pairs = zip([None, *processes], processes, strict=False)  # each with the one before it
    spans = [
        _process_span(run, number, previous, process)
        for number, (previous, process) in enumerate(pairs, 1)
    ]
    rows = [
        [time_tag(event.time), elapsed_text(run, event.time), count_cell(event.samples),
         tag("span", event.text, class_="bad" if event.is_problem else None)]
        for event in run.history.events if not event.text.startswith("evaluated")
    ]  # fmt: skip
    head = ["time, UTC", "after", "samples", "event"]
    events = html_table(head, rows, left=(3,)) if rows else NO_HTML
    count_text = "1 process" if len(processes) == 1 else f"{len(processes)} processes"
    time_text = duration_cell(working_s(run)) or "no time"
    step_text = ", ".join(f"{step:,}" for step in run.steps) or "none"
    summary = f"{count_text}, {time_text}; checkpoints kept: step {step_text}"
    title = tag("h3", run_label(run, k), tag("small", summary))
    line = tag("div", timeline(f"{run.name} in time", spans, k), class_="wide time")
    return joined_html([title, line, events])


def _process_span(
    run: RunFacts, number: int, previous: ProcessLog | None, process: ProcessLog
) -> Span:
    """Return a process of a run as a span, with marks at its evaluations and problems.

    number : number of the process, counted from 1
    previous : the previous process of the run, None for the first
    """
    start_time, end_time = process.records[0]["time"], process.records[-1]["time"]
    marks: list[tuple[float, str, bool]] = []  # as in `Span`
    for event in run.history.events:
        since_start_s = seconds_between(start_time, event.time)
        is_within = start_time <= event.time <= end_time
        if is_within and (event.is_problem or event.text.startswith("evaluated")):
            marks.append(
                (since_start_s, f"{event.samples:,} samples: {event.text}", event.is_problem)
            )
    pause = ""
    if previous is not None:  # clocks of two machines may differ, so the time may be negative
        pause = duration(max(seconds_between(previous.records[-1]["time"], start_time), 0.0))
    text = f"process {number}, from {clock_text(start_time)} for {duration(process.seconds)}"
    return Span(process.seconds - (process.steps_s or 0.0), process.seconds, text, marks, pause)


# ----------------------------------------------------------------------------------- the machine


def machine_section(runs: Sequence[RunFacts]) -> Html:
    """Return the section on hardware and versions of the runs."""
    return _comparison_section("Machine and versions", runs, _machine_cells)


def _machine_cells(run: RunFacts) -> dict[str, Cell]:
    """Return backend, threads, precision and versions of a run, by label."""
    backend = run.setup.get("backend", {})
    facts: dict[str, Cell] = {
        name: ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in backend.items()
        if value and name != "numpy"
    }
    if "threads" in run.history.plan:
        facts["threads"] = count_cell(run.history.plan["threads"])
    if "precision" in run.setup:
        facts["precision"] = str(run.setup["precision"])
    return facts | {name: str(version) for name, version in run.versions.items()}
