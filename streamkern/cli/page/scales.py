"""Axes of a chart: the position of their marks, and the text of these."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_LOG_FROM = 8.0
"""Ratio of the largest value to the smallest from which an axis is logarithmic."""


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high` with marks at `ticks`."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def share(self, value: float) -> float:
        """Return the position of a value, 0 at the low end and 1 at the high one."""
        a, b, x = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return (x - a) / (b - a)


def linear(
    values: Sequence[float], *, zero: bool = False, least: float = 1e-12, marks: int = 5
) -> Axis:
    """Return an axis with round ends that contains the values.

    zero : it begins at 0, and ends at `least` or above
    """
    low, high = min(values), max(values)
    if zero:
        low, high = min(0.0, low), max(high, least)
    # Values that vary by less than a hundredth are shown as a level line.
    span, middle = 0.01 * max(abs(low), abs(high)) or 1.0, (low + high) / 2
    if high - low < span:
        low, high = middle - span / 2, middle + span / 2
    step = _round_step((high - low) / marks)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis(first * step, last * step, tuple(k * step for k in range(first, last + 1)))


def _round_step(least: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= least * (1 - 1e-9))


def logarithmic(values: Sequence[float], marks: int = 6) -> Axis:
    """Return an axis around positive values: marks at decades, and between few of those."""
    low, high = min(values), max(values)
    pad = (high / low) ** 0.04 if high > low else 1.1
    low, high = low / pad, high * pad
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, math.ceil((last - first) / marks))
    best: tuple[float, ...] = ()
    for parts in ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 5, 7)) if stride == 1 else ((1,),):
        found = tuple(
            m * 10.0**k for k in range(first, last + 1, stride) for m in parts
            if low <= m * 10.0**k <= high
        )  # fmt: skip
        if len(found) <= marks or not best:
            best = found
        if len(best) >= 3:
            return Axis(low, high, best, log=True)
    if len(best) >= 2:
        return Axis(low, high, best, log=True)
    even = linear([low, high])  # within part of a decade round numbers are more even
    return Axis(low, high, tuple(t for t in even.ticks if low <= t <= high), log=True)


def fitting_scale(values: Iterable[float]) -> Axis:
    """Return a logarithmic axis if the values require and allow it, else a linear one."""
    known = list(values)
    wide = min(known) > 0 and max(known) > _LOG_FROM * min(known)
    return logarithmic(known) if wide else linear(known)


def tick_texts(scale: Axis, *, percent: bool = False) -> list[str]:
    """Return the marks in few characters, 0, 50k, 100k; on a logarithmic axis each by itself."""
    ticks = scale.ticks
    if percent:
        return [f"{100 * t:.3g}%" for t in ticks]
    if scale.log:
        return [short_number(t) for t in ticks]
    size, unit = _unit(max(abs(t) for t in ticks))
    step = abs(ticks[1] - ticks[0]) / size if len(ticks) > 1 else 1.0
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    if digits > 4:
        return [f"{t:.4g}" for t in ticks]
    return ["0" if abs(t) < 1e-12 * size else f"{t / size:.{digits}f}{unit}" for t in ticks]


def short_number(value: float, digits: int = 3) -> str:
    """Return a number in few characters: 0.023, 48.2k, 1.23M, 3e-7."""
    if value == 0:
        return "0"
    size, unit = _unit(abs(value))
    if unit or abs(value) >= 1e-3:
        return f"{value / size:.{digits}g}{unit}"
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa}e{int(exponent)}"


def _unit(largest: float) -> tuple[float, str]:
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if largest >= size:
            return (1e3, "k") if unit == "k" else (size, unit)
    return 1.0, ""
