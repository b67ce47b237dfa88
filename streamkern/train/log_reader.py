"""Read the log of a run: its present state, curves over samples, and the processes that wrote it.

The commands `info`, `runs` and `report` show the result. A run that was killed resumes from its
last checkpoint, and repeats the steps after it. The first records of repeated steps are left out of
the curves, and the number of repeated samples becomes an event.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from streamkern.train.event_texts import POSITION_FIELDS, event_text, finite_number
from streamkern.train.loop.guard import WINDOW

CurvePoint = tuple[float, float]
"""Number of samples, and value of a figure."""
LogRecord = Mapping[str, Any]
RATES = ("samples_per_s", "stall_share")
"""Figures of the speed of a run."""
RANK_FIGURES = ("rank_samples_per_s", "rank_stall_shares", "rank_wait_shares")
"""Figures that each of several ranks has; see `rank_curve` for the names of their curves."""
SLOWEST = "slowest_rank"
LOSS, PEAK = "train_mse", "peak_bytes"
_STEPS_BEGIN = ("start", "resume")
"""Events with which a process ends its setup and begins its steps."""
_STAGES = ("metric", "kernel", "trees", "centers", "noise", "sample", "preconditioner")
_STAGE_ORDER = {stage: position for position, stage in enumerate(_STAGES)}
"""Order of the stages of a setup."""
_EVENT_STAGES = {"outliers": "trees", "loss": "noise"}
"""Events of the setup that another stage includes."""
_LAST_STAGE = len(_STAGES)
"""Position in this order of all events that are no stage of the setup."""
_EVENTS_ONCE = ("setup", "centers", "noise", "start")
"""Events that a process reports at most once for each stage."""
_PROBLEMS = ("back-off", "skipped", "changed")
"""Events that report a problem."""
_NOT_SETUP_CHOICES = (
    *_STEPS_BEGIN, *_PROBLEMS, "setup", "finished", "pass", "calibrated", "posterior",
)  # fmt: skip
"""Events that report no choice of the setup."""
_PLAN_FIELDS = (
    "epochs", "of_samples", "train", "test", "ranks", "center_ranks", "workers", "dashboard",
)  # fmt: skip
"""Fields of the events with which steps begin that describe the plan and the data."""
_NEWEST_FIGURES = (LOSS, "samples_per_s", "left_s", *RANK_FIGURES, SLOWEST)
"""Fields of the event "train" that the state of a run shows."""


@dataclass(frozen=True)
class TimelineEvent:
    """An event of the timeline.

    time : as in the log
    samples : number of samples at that time
    text : description
    is_problem : whether it reports a problem
    """

    time: str
    samples: int
    text: str
    is_problem: bool = False


@dataclass(frozen=True)
class ProcessLog:
    """The log records of one process that worked on the run."""

    records: Sequence[LogRecord]

    @property
    def seconds(self) -> float:
        """Seconds from the first to the last record."""
        return seconds_between(self.records[0]["time"], self.records[-1]["time"])

    @property
    def steps_began(self) -> str | None:
        """Time at which the setup ended; None if it did not."""
        return next((r["time"] for r in self.records if r.get("event") in _STEPS_BEGIN), None)

    @property
    def steps_s(self) -> float | None:
        """Seconds from the end of the setup to the last record; None if the setup did not end."""
        began = self.steps_began
        return None if began is None else seconds_between(began, self.records[-1]["time"])


@dataclass
class RunHistory:
    """The history of a run.

    progress : present state, see `_update_progress`
    curves : points of each figure, by its name, in ascending order of samples
    evaluations : for each evaluation, time, step, samples and "figures" by name
    processes : log records of each process
    events : events of the timeline
    setup : records of the last setup
    plan : plan that the last process has recorded
    workers, dashboard : addresses of the ranks of the last process, and of their Dask dashboard
    setup_s : seconds that the setup took; the longest time if several processes report one
    expected_s : seconds of all steps, as first estimated
    peak_bytes : largest memory in use, in bytes
    n_repeated : number of samples that were repeated
    last_record : newest record, or None
    """

    progress: dict[str, Any] = field(default_factory=dict)
    curves: dict[str, list[CurvePoint]] = field(default_factory=dict)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    processes: list[ProcessLog] = field(default_factory=list)
    events: list[TimelineEvent] = field(default_factory=list)
    setup: list[LogRecord] = field(default_factory=list)
    plan: Mapping[str, Any] = field(default_factory=dict)
    workers: Sequence[str] = ()
    dashboard: str | None = None
    setup_s: float | None = None
    expected_s: float | None = None
    peak_bytes: int | None = None
    n_repeated: int = 0
    last_record: LogRecord | None = None

    @property
    def steps_s(self) -> float | None:
        """Seconds of steps and evaluations, in all processes, as far as the log goes."""
        return sum(process.steps_s or 0.0 for process in self.processes) or None


def read_history(records: Sequence[LogRecord]) -> RunHistory:
    """Return the history from the records of a log, oldest first."""
    last_record = records[-1] if records else None
    history = RunHistory(processes=processes_in(records), last_record=last_record)
    for process_number, process in enumerate(history.processes, 1):
        if _stage(process.records[0])[1] in _STAGE_ORDER:
            history.setup = []
        for record in process.records:
            _update_progress(history.progress, record)
            if record.get("event") == "train":
                _add_figures(history, record, process)
            else:
                _add_event(history, record, process_number)
    return history


def _update_progress(progress: dict[str, Any], record: LogRecord) -> None:
    """Update the state of a run with a record.

    The entries of `progress` are the following; those that the log lacks are left out:

    `time`, `step`, `epoch`, `samples` : position of the newest record
    `epochs`, `of_samples`, `train`, `test` : plan and data of the last process
    `ranks`, `center_ranks` : rank grid of the last process; `workers` and `dashboard` for several
    `why` : reason why the run ended before its last epoch
    `doing`, `blocks_done`, `blocks` : state of the setup
    `train_mse`, `samples_per_s`, `left_s` : newest figures, and `RankCoordinator.facts`
    """
    progress |= {name: record[name] for name in ("time", "step", "epoch", "samples")}
    match record.get("event"):
        case "start" | "resume":
            progress |= {name: record[name] for name in _PLAN_FIELDS if name in record}
            for name in ("doing", "blocks_done", "blocks", "left_s", *RANK_FIGURES, SLOWEST):
                progress.pop(name, None)
        case "setup":
            progress["doing"] = record["doing"]
        case "block" if "block" in record:
            progress |= {"blocks_done": record["block"] + 1, "blocks": record["blocks"]}
        case "finished":
            progress["why"] = record["why"]
        case "train":
            progress |= {name: record[name] for name in _NEWEST_FIGURES if name in record}


def processes_in(records: Iterable[LogRecord]) -> list[ProcessLog]:
    """Return the records grouped by the process that wrote them.

    A record does not name its process; a new one is recognised by its first events.
    """
    processes: list[list[LogRecord]] = []
    earlier_entries: list[tuple[str, str]] = []
    for record in records:
        entry = _stage(record)
        if entry[0] == "metric" and "chosen" in record and earlier_entries:
            # The choice of the metric is reported after the kernels, or trees, that were compared.
            entry = "metric", earlier_entries[-1][1]
        if record.get("again") and processes:  # the same process chooses kernel and metric anew
            earlier_entries = []
        elif _starts_process(entry, earlier_entries):
            processes.append([])
            earlier_entries = []
        processes[-1].append(record)
        earlier_entries.append(entry)
    return [ProcessLog(process) for process in processes]


def _stage(record: LogRecord) -> tuple[str, str]:
    """Return the event of a record, and the stage of the setup to which it belongs."""
    event = str(record.get("event", ""))
    stage = record.get("doing", event) if event == "setup" else event
    if event in _EVENT_STAGES:
        return event, _EVENT_STAGES[event]
    return event, "kernel" if stage in ("bandwidth", "categorical") else str(stage)


def _starts_process(entry: tuple[str, str], earlier_entries: Sequence[tuple[str, str]]) -> bool:
    """Return whether a record is the first of a new process.

    entry, earlier_entries : results of `_stage` for this record, and for the process so far
    """
    event, stage = entry
    if not earlier_entries or event == "changed":
        return True
    if event == "resume":
        return earlier_entries[-1][0] != "changed"
    if event in _EVENTS_ONCE and entry in earlier_entries:
        return True
    if event == "start":
        return any(earlier_event == "resume" for earlier_event, _ in earlier_entries)
    # A stage of the setup that comes before one already reported belongs to a new process.
    return _STAGE_ORDER.get(stage, _LAST_STAGE) < max(
        _STAGE_ORDER.get(earlier_stage, _LAST_STAGE) for _, earlier_stage in earlier_entries
    )


def _add_figures(history: RunHistory, record: LogRecord, process: ProcessLog) -> None:
    """Add the losses and figures of a record "train", which `process` wrote."""
    curves, samples = history.curves, record["samples"]
    _add_losses(curves, record)
    for name in (*RATES, SLOWEST):
        _add_point(curves, name, samples, record.get(name))
    for name in RANK_FIGURES:
        for rank, value in enumerate(record.get(name, ())):
            _add_point(curves, rank_curve(name, rank), samples, value)
    seconds_left, began = finite_number(record.get("left_s")), process.steps_began
    if history.expected_s is None and seconds_left and began is not None:
        history.expected_s = seconds_between(began, record["time"]) + seconds_left
    history.peak_bytes = max(history.peak_bytes or 0, int(record.get(PEAK, 0))) or None


def _add_event(history: RunHistory, record: LogRecord, process_number: int) -> None:
    """Add a record other than "train", of process `process_number`, counted from 1."""
    event = str(record.get("event", ""))
    if event == "evaluation":
        while history.evaluations and history.evaluations[-1]["step"] >= record["step"]:
            history.evaluations.pop()  # the newest one of a step counts
        position = {name: record[name] for name in ("time", "step", "samples")}
        figures = {k: finite_number(v) for k, v in record.items() if k not in POSITION_FIELDS}
        history.evaluations.append({**position, "figures": figures})
    elif event in _STEPS_BEGIN:
        history.plan = record.get("plan", history.plan)
        history.workers, history.dashboard = record.get("workers", ()), record.get("dashboard")
        if event == "start":  # take the longest time: a setup may have been loaded only
            setup_s = finite_number(record.get("setup_s")) or 0.0
            history.setup_s = max(history.setup_s or 0.0, setup_s) or None
        _drop_repeated(history, record)
    elif event not in _NOT_SETUP_CHOICES:
        history.setup.append(record)
    pause_s = None
    if event == "resume" and process_number > 1:
        last_time = history.processes[process_number - 2].records[-1]["time"]
        pause_s = max(seconds_between(last_time, record["time"]), 0.0)
    text = event_text(record, process_number, pause_s)
    if text is not None:
        is_problem = event in _PROBLEMS or (event == "pass" and "note" in record)
        history.events.append(TimelineEvent(record["time"], record["samples"], text, is_problem))


def rank_curve(name: str, rank: int) -> str:
    """Return the name of a curve that exists for each rank."""
    return f"{name}/{rank}"


def _add_losses(curves: dict[str, list[CurvePoint]], record: LogRecord) -> None:
    """Add the loss of each window that has ended since the previous record, at its last step.

    The number of samples at a step is computed as if all batches were equally large. A record
    without windows, of a finished or a saved model, has one loss.
    """
    if "losses" not in record:
        _add_point(curves, LOSS, record["samples"], record.get(LOSS))
        return
    samples_per_step = record["samples"] / max(record["step"], 1)
    for number, loss in enumerate(record["losses"], record["window"] + 1):
        last_step = min(number * WINDOW, record["step"])  # the end of a run cuts a window short
        _add_point(curves, LOSS, last_step * samples_per_step, loss)


def _add_point(
    curves: dict[str, list[CurvePoint]], name: str, samples: float, value: object
) -> None:
    number = finite_number(value)
    if number is not None:
        curves.setdefault(name, []).append((float(samples), number))


def _drop_repeated(history: RunHistory, record: LogRecord) -> None:
    """Drop curves and evaluations after the position at which a process resumes."""
    resumed_at = record["samples"]
    positions = [points[-1][0] for points in history.curves.values() if points]
    positions += [float(e["samples"]) for e in history.evaluations]
    n_repeated = int(max([resumed_at, *positions])) - resumed_at
    if n_repeated:
        history.n_repeated += n_repeated
        text = f"{n_repeated:,} samples or more are done again"
        history.events.append(TimelineEvent(record["time"], resumed_at, text, is_problem=True))
    for name, points in history.curves.items():
        history.curves[name] = [point for point in points if point[0] <= resumed_at]
    history.evaluations = [e for e in history.evaluations if e["samples"] <= resumed_at]


def seconds_between(began: str, ended: str) -> float:
    """Return the seconds between two times of the log."""
    return (datetime.fromisoformat(ended) - datetime.fromisoformat(began)).total_seconds()
