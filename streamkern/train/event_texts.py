"""Describe the events of a run's log as text, for its timeline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from streamkern.predict.evaluation import format_metrics

POSITION_FIELDS = ("time", "step", "epoch", "samples", "event")
"""Fields that every record has."""


def _resume_text(record: Mapping[str, Any], process_number: int, pause_s: float | None) -> str:
    """Return the text for a process that resumes a run; see `event_text`."""
    if pause_s is None:
        return f"went on{_with_ranks(record)}"
    text = f"{duration(pause_s)} after the last word of process {process_number - 1}"
    return f"went on, in process {process_number}, {text}{_with_ranks(record)}"


def _with_ranks(record: Mapping[str, Any]) -> str:
    ranks = len(record.get("workers", ()))
    return f", with {ranks} ranks" if ranks else ""


def event_text(record: Mapping[str, Any], process_number: int, pause_s: float | None) -> str | None:
    """Return the text of an event; None if it is not shown.

    process_number : number of the process that wrote the record, from 1
    pause_s : seconds since the last record of the process before it; None if there is none
    """
    match record.get("event"):
        case "resume":
            return _resume_text(record, process_number, pause_s)
        case "start":
            setup_s = record.get("setup_s")
            text = f"set up{f' in {duration(setup_s)}' if setup_s else ''}"
            return f"{text}; the steps begin{_with_ranks(record)}"
        case "evaluation":
            figures = {
                name: float(value) for name, value in record.items() if name not in POSITION_FIELDS
            }
            return f"evaluated: {format_metrics(figures)}"
        case "back-off":
            scale = finite_number(record.get("scale"))
            factor = "?" if scale is None else f"{scale:.3g}"
            return f"the loss grew; back to the last good weights, steps x {factor}"
        case "skipped":
            return "; ".join(map(str, record.get("what", ())))
        case "changed":
            return f"changed: {'; '.join(map(str, record.get('what', ())))}"
        # After the last step, and choices of the setup.
        case "finished":
            return f"ended before its last epoch: {record.get('why', '')}"
        case "calibrated":
            return f"calibrated by rows set aside: {facts_text(record)}"
        case "posterior":
            noise = ", ".join(f"{x:.4g}" for x in record.get("noise", ())[:3])
            return f"standard deviation of the noise: {noise}"
        case "pass":
            return f"pass: {facts_text(record)}"
        case "outliers":
            share = finite_number(record.get("share")) or 0.0
            return f"replaced outliers in the setup, {share:.2%} of the targets"
        case "centers":
            return f"chose {record.get('centers', 0):,} centers: {record.get('method', '')}"
    return None


def facts_text(record: Mapping[str, Any]) -> str:
    """Return the names and values of a record's fields as text.

    The position, lists and tables are left out.
    """
    texts = []
    for name, value in record.items():
        if name not in POSITION_FIELDS and not isinstance(value, list | dict):
            value_text = f"{value:.4g}" if isinstance(value, float) else str(value)
            texts.append(f"{name.replace('_', ' ')} {value_text}")
    return ", ".join(texts)


def finite_number(value: object) -> float | None:
    """Return a value of the log as a float; None if it is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def duration(seconds: float) -> str:
    """Return seconds as "0.4 s", "2 min 5 s" or "3 h 20 min"."""
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, remainder = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {remainder} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"
