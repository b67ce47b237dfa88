"""The history of a run from the records of its log: curves over samples, and processes in time.

A run that was killed resumes from its last checkpoint. Steps in the log after that checkpoint were
done again: they are left out of the curves, and their number is reported at the resume.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from streamkern.predict.evaluation import format_metrics

CurvePoint = tuple[float, float]
HistoryRecord = Mapping[str, Any]

RATES = ("samples_per_s", "stall_share")
RANK_FIGURES = ("rank_samples_per_s", "rank_stall_shares", "rank_wait_shares")
"""Figures of each rank, if there are several; curves are named with the rank after a slash."""
SLOWEST = "slowest_rank"
LOSS, PEAK = "train_mse", "peak_bytes"
_ORDER = {"metric": 0, "kernel": 1, "centers": 2, "noise": 3, "sample": 4, "preconditioner": 5}
"""Order of the stages of a setup; its other reports come later."""
_LATER = 6
_ONCE = ("setup", "centers", "noise", "start")
"""Events that a process reports once for each stage."""
_NO_CHOICE = (
    *("setup", "start", "resume", "changed", "skipped", "back-off", "finished", "pass"),
    *("calibrated", "posterior"),
)
_PLACE = ("time", "step", "epoch", "samples", "event")


@dataclass(frozen=True)
class Happening:
    """An event for the time line: its time, its samples, a text, and whether it is bad news."""

    time: str
    samples: int
    what: str
    bad: bool = False


@dataclass(frozen=True)
class Life:
    """The log records of one process that worked on the run."""

    records: Sequence[HistoryRecord]

    @property
    def seconds(self) -> float:
        """Seconds from its first to its last record."""
        return seconds_between(self.records[0]["time"], self.records[-1]["time"])

    @property
    def steps_s(self) -> float | None:
        """Seconds of these after its setup; None if it did not finish the setup."""
        begun = [r["time"] for r in self.records if r.get("event") in ("start", "resume")]
        return seconds_between(begun[0], self.records[-1]["time"]) if begun else None


@dataclass
class History:
    """The history of a run.

    curves : (samples, value) by the name of the figure, in order
    evaluations : figures by name, with time, step and samples
    setup : records of the last setup
    plan : of the last process that recorded one
    workers, dashboard : of its ranks
    expected_s : for all steps, as first estimated
    lost : samples that were done again
    """

    curves: dict[str, list[CurvePoint]] = field(default_factory=dict)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    events: list[Happening] = field(default_factory=list)
    setup: list[HistoryRecord] = field(default_factory=list)
    plan: Mapping[str, Any] = field(default_factory=dict)
    workers: Sequence[str] = ()
    dashboard: str | None = None
    setup_s: float | None = None
    expected_s: float | None = None
    peak_bytes: int | None = None
    lost: int = 0
    last: HistoryRecord | None = None

    @property
    def steps_s(self) -> float | None:
        """Seconds of steps and evaluations, in all processes, as far as the log goes."""
        return sum(life.steps_s or 0.0 for life in self.lives) or None


def history_of(records: Sequence[HistoryRecord]) -> History:
    """Return the history from the records of a log, oldest first."""
    found = History(lives=lives_of(records), last=records[-1] if records else None)
    for count, life in enumerate(found.lives, 1):
        if _stage(life.records[0])[1] in _ORDER:
            found.setup = []
        for record in life.records:
            _take(found, record, str(record.get("event", "")), count)
    return found


def lives_of(records: Iterable[HistoryRecord]) -> list[Life]:
    """Return the records grouped by the process that wrote them."""
    lives: list[list[HistoryRecord]] = []
    seen: list[tuple[str, str]] = []
    for record in records:
        here = _stage(record)
        if _begins(here, seen):
            lives.append([])
            seen = []
        lives[-1].append(record)
        seen.append(here)
    return [Life(life) for life in lives]


def _stage(record: HistoryRecord) -> tuple[str, str]:
    """Return the event of a record, and its stage of a setup."""
    event = str(record.get("event", ""))
    stage = record.get("doing", event) if event == "setup" else event
    return event, "kernel" if stage == "bandwidth" else str(stage)


def _begins(here: tuple[str, str], seen: Sequence[tuple[str, str]]) -> bool:
    """Return whether a record is the first of a new process."""
    event, stage = here
    if not seen or event == "changed":
        return True
    if event == "resume":
        return seen[-1][0] != "changed"
    if event in _ONCE and here in seen:
        return True
    if event == "start":
        return any(each == "resume" for each, _ in seen)
    return _ORDER.get(stage, _LATER) < max(_ORDER.get(each, _LATER) for _, each in seen)


def _take(found: History, record: HistoryRecord, event: str, count: int) -> None:
    """Add one record, of the process of this number, to the history."""
    if event == "train":
        _add_losses(found.curves, record)
        for name in (*RATES, SLOWEST):
            _add(found.curves, name, record["samples"], record.get(name))
        for name in RANK_FIGURES:
            for rank, value in enumerate(record.get(name, ())):
                _add(found.curves, of_rank(name, rank), record["samples"], value)
        left = finite_number(record.get("left_s"))
        if found.expected_s is None and left and found.steps_s is not None:
            here = found.lives[count - 1]
            begun = [r["time"] for r in here.records if r.get("event") in ("start", "resume")]
            found.expected_s = seconds_between(begun[0], record["time"]) + left if begun else None
        found.peak_bytes = max(found.peak_bytes or 0, int(record.get(PEAK, 0))) or None
        return
    if event == "evaluation":
        while found.evaluations and found.evaluations[-1]["step"] >= record["step"]:
            found.evaluations.pop()  # the newest one of a step counts
        found.evaluations.append(_evaluation(record))
    elif event in ("start", "resume"):
        found.plan = record.get("plan", found.plan)
        found.workers, found.dashboard = record.get("workers", ()), record.get("dashboard")
        if event == "start":  # for a setup that was only loaded it is less
            found.setup_s = (
                max(found.setup_s or 0.0, finite_number(record.get("setup_s")) or 0.0) or None
            )
        _go_back(found, record)
    elif event not in _NO_CHOICE:
        found.setup.append(record)
    said = _went_on(found.lives, count, record) if event == "resume" else _said(record, event)
    if said is not None:
        found.events.append(Happening(record["time"], record["samples"], *said))


def of_rank(name: str, rank: int) -> str:
    """Return the name of a curve that exists for each rank."""
    return f"{name}/{rank}"


def _evaluation(record: HistoryRecord) -> dict[str, Any]:
    figures = {name: finite_number(value) for name, value in record.items() if name not in _PLACE}
    return {"time": record["time"], "step": record["step"], "samples": record["samples"],
            "figures": figures}  # fmt: skip


def _add_losses(curves: dict[str, list[CurvePoint]], record: HistoryRecord) -> None:
    """Add the losses of the windows that ended since the previous record, or the last of them."""
    losses = record.get("losses") or [record.get(LOSS)]
    before = curves[LOSS][-1][0] if curves.get(LOSS) else 0.0
    each = (record["samples"] - before) / len(losses)
    for k, loss in enumerate(losses, 1):
        if k > record.get("empty", 0):  # earlier ones are of the zero function, during the sums
            _add(curves, LOSS, before + k * each, loss)


def _add(curves: dict[str, list[CurvePoint]], name: str, samples: float, value: object) -> None:
    known = finite_number(value)
    if known is not None:
        curves.setdefault(name, []).append((float(samples), known))


def _go_back(found: History, record: HistoryRecord) -> None:
    """Drop the history after the position at which a process resumes."""
    here = record["samples"]
    done = [points[-1][0] for points in found.curves.values() if points]
    done += [float(e["samples"]) for e in found.evaluations]
    again = int(max([here, *done])) - here
    if again:
        found.lost += again
        found.events.append(
            Happening(record["time"], here, f"{again:,} samples or more are done again", bad=True)
        )
    for name, points in found.curves.items():
        found.curves[name] = [point for point in points if point[0] <= here]
    found.evaluations = [e for e in found.evaluations if e["samples"] <= here]


def _went_on(lives: Sequence[Life], count: int, record: HistoryRecord) -> tuple[str]:
    """Return the text for the start of a process, with its delay after the previous one."""
    if count == 1:
        return (f"went on{_with_ranks(record)}",)
    before = lives[count - 2].records[-1]["time"]
    pause = duration(max(seconds_between(before, record["time"]), 0.0))
    after = f"{pause} after the last word of process {count - 1}"
    return (f"went on, in process {count}, {after}{_with_ranks(record)}",)


def _with_ranks(record: HistoryRecord) -> str:
    ranks = len(record.get("workers", ()))
    return f", with {ranks} ranks" if ranks else ""


def _said(record: HistoryRecord, event: str) -> tuple[str, bool] | tuple[str] | None:
    """Return an event as text, and whether it is bad news; None if it is not shown."""
    match event:
        case "start":
            took = record.get("setup_s")
            done = f"set up{f' in {duration(took)}' if took else ''}"
            return (f"{done}; the steps begin{_with_ranks(record)}",)
        case "evaluation":
            figures = {k: float(v) for k, v in record.items() if k not in _PLACE}
            return (f"evaluated: {format_metrics(figures)}",)
        case "back-off":
            return (f"the loss grew; back to the last good weights, steps x {_scale(record)}", True)
        case "skipped":
            return ("; ".join(map(str, record.get("what", ()))), True)
        case "changed":
            return (f"changed: {'; '.join(map(str, record.get('what', ())))}", True)
        case "finished":
            return (f"ended before its last epoch: {record.get('why', '')}",)
        case "calibrated":
            return (f"calibrated by rows set aside: {facts_text(record)}",)
        case "posterior":
            noise = ", ".join(f"{x:.4g}" for x in record.get("noise", ())[:3])
            return (f"standard deviation of the noise: {noise}",)
        case "pass":
            return (f"pass: {facts_text(record)}", "note" in record)
        case "centers":
            return (f"chose {record.get('centers', 0):,} centers: {record.get('method', '')}",)
    return None


def _scale(record: HistoryRecord) -> str:
    scale = finite_number(record.get("scale"))
    return "?" if scale is None else f"{scale:.3g}"


def facts_text(record: HistoryRecord) -> str:
    """Return the entries of a record beside its position, as names and values."""
    shown = {k: v for k, v in record.items() if k not in _PLACE and not isinstance(v, list | dict)}
    return ", ".join(
        f"{name.replace('_', ' ')} {f'{value:.4g}' if isinstance(value, float) else value}"
        for name, value in shown.items()
    )


def finite_number(value: object) -> float | None:
    """Return a finite number of the log; None for others, which it holds as text."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def seconds_between(began: str, ended: str) -> float:
    """Return the seconds between two times of the log."""
    return (datetime.fromisoformat(ended) - datetime.fromisoformat(began)).total_seconds()


def duration(seconds: float) -> str:
    """Return seconds as "0.4 s", "2 min 5 s" or "3 h 20 min"."""
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"
