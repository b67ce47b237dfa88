"""Find where the time of a step goes on one GPU, in ten minutes.

    python tools/gpu_step.py --out step.json [--seconds 540] [--device gpu] [--size card]

Writes JSON after every part, so that a run that is cut short leaves what it had. A figure has its
unit in its name; beside it are its floor, the time at the rates of a copy and of large products on
this device, and the share of it that the floor is. A part that fails, or runs out of its time, says
so in its entry. Ends with a table, and with 0, or 2 if the device cannot be used.

`--size toy` with `--device cpu` runs the parts on small sizes, to see that they work, in half a
minute. It leaves out the example, which first makes 70 000 images; `--parts example` runs it.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from streamkern.backend.devices import get_backend  # noqa: E402
from streamkern.basics.errors import StreamkernError  # noqa: E402
from streamkern.basics.text import text_table  # noqa: E402
from tools import gpu_clock  # noqa: E402
from tools.gpu_clock import Clock, Figures, guarded, limited, replaced, write_report  # noqa: E402
from tools.gpu_step_children import example, resume, start  # noqa: E402
from tools.gpu_step_methods import eigenpro4  # noqa: E402
from tools.gpu_step_parts import Bench, ceilings, host, steps  # noqa: E402
from tools.gpu_step_products import epilogue, points, setup, thin  # noqa: E402
from tools.gpu_step_training import damping, halves, million  # noqa: E402

Sizes = dict[str, Any]
TOTAL_S, LEAST_S = 540, 1.0
GRACE = 1.25
"""Factor on the time of a part after which it is interrupted; it looks at the time itself."""
SHOWN = 6
"""Times of a part in the table."""
WIDTH = 90
"""Characters of an error in the table."""
REPEAT_S = {"card": 0.3, "toy": 0.0}
"""Seconds for which a piece of work is repeated, at least five times."""


class Part(NamedTuple):
    """A part of the run.

    seconds : its share of the `TOTAL_S` of the whole run.
    card, toy : its sizes.
    """

    run: Callable[..., None]
    seconds: float
    card: Sizes
    toy: Sizes


RUN: Sizes = {"rows": 100_000, "p": 8000, "d": 256, "c": 10, "m": 2048, "steps": 200}
TOY_RUN: Sizes = {"rows": 1000, "p": 60, "d": 12, "c": 3, "m": 100, "steps": 40}
FIT: Sizes = {"rows": 400_000, "p": 16_000, "b": 8000, "d": 128, "c": 10, "m": 4096,
              "sample": 48_000, "probe": 4096}  # fmt: skip
TOY_FIT: Sizes = {"rows": 2000, "p": 120, "b": 60, "d": 12, "c": 3, "m": 100, "sample": 400,
                  "probe": 200}  # fmt: skip
BLOCKS = (None, 512, 1024, 2048, 4096)

PARTS: dict[str, Part] = {
    "ceilings": Part(ceilings, 10, {"copy_bytes": 1 << 30, "size": 8192},
                     {"copy_bytes": 1 << 20, "size": 128}),
    "start": Part(start, 48, {"pch": ("1", "0"), "again": True} | RUN,
                  {"pch": ("1",), "again": False} | TOY_RUN),
    "host": Part(host, 15, {"nbytes": 3_211_264, "loaders": 15, "seconds": 0.5},
                 {"nbytes": 1000, "loaders": 1, "seconds": 0.0}),
    "steps": Part(steps, 65, {"models": ((4, 15_000), (12, 5000), (1, 60_000)),
                              "batches": (2048, 4096, 8192, 16_384), "d": 784, "c": 10},
                  {"models": ((4, 15), (1, 60)), "batches": (32,), "d": 12, "c": 3,
                   "host_batch": 16}),
    "thin": Part(thin, 45, {"sizes": (5000, 15_000, 60_000), "columns": (10, 20, 26),
                            "triangle_blocks": BLOCKS},
                 {"sizes": (50,), "columns": (3,), "triangle_blocks": (8, 16)}),
    "epilogue": Part(epilogue, 15, {"m": 4096, "p": 60_000, "d": 784,
                                    "modes": ("exact", "high", "fast", "integer"), "c": 26},
                     {"m": 32, "p": 60, "d": 12, "modes": ("exact", "high"), "c": 3}),
    "points": Part(points, 10, {"m": 4096, "d": 784, "modes": ("exact", "high", "fast", "integer")},
                   {"m": 32, "d": 12, "modes": ("exact", "high")}),
    "setup": Part(setup, 30, {"b": 15_000, "n": 2, "d": 784, "c": 10, "sample": 60_000,
                              "probe": 4096, "sweeps": 8, "panels": (512, 1024, 2048)},
                  {"b": 60, "n": 2, "d": 12, "c": 3, "sample": 240, "probe": 100, "sweeps": 2,
                   "panels": (16,)}),
    "damping": Part(damping, 40, FIT | {"seconds": 6.0, "values": (1e-5, 1e-4, 1e-3)},
                    TOY_FIT | {"seconds": 0.02, "values": (1e-5, 1e-3)}),
    "halves": Part(halves, 25, FIT | {"b": 16_000, "steps": 1000}, TOY_FIT | {"steps": 20}),
    "million": Part(million, 50, {"p": 1_024_000, "b": 8000, "d": 1280, "c": 10, "m": 8192,
                                  "made_blocks": 4, "sample": 32_000, "probe": 4096,
                                  "seconds": 4.0},
                    {"p": 256, "b": 32, "d": 20, "c": 3, "m": 32, "made_blocks": 2, "sample": 200,
                     "probe": 100, "seconds": 0.0}),
    "resume": Part(resume, 40, {"workspaces": (None, ":4096:8", ":16:8")} | RUN,
                   {"workspaces": (None,)} | TOY_RUN),
    "eigenpro4": Part(eigenpro4, 45, {"p": 16_000, "n": 100_000, "d": 784, "c": 10, "epochs": 2,
                                      "level": 150, "sample": 3000},
                      {"p": 60, "n": 600, "d": 12, "c": 3, "epochs": 1, "level": 20,
                       "sample": 100}),
    "example": Part(example, 540, {"options": ("--block-size", "15000")},
                    {"options": ("--centers", "100", "--replicas", "1")}),
}  # fmt: skip


def main(given: list[str] | None = None) -> int:
    """Run all parts, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, help="JSON, written after every part")
    add("--seconds", type=float, default=TOTAL_S, help="for all of it (default 540)")
    add("--device", default="gpu", help="gpu, gpu:N or cpu (default gpu)")
    add("--size", choices=("card", "toy"), default="card", help="sizes (default card)")
    add("--parts", nargs="+", choices=PARTS, help="these only")
    add("--eigenpro4", nargs=3, type=int, metavar=("P", "N", "D"),
        help="centers, rows and features beside EigenPro 4")  # fmt: skip
    options = parser.parse_args(given)
    if options.parts is None:
        options.parts = [name for name in PARTS if (options.size, name) != ("toy", "example")]
    try:
        backend = get_backend(options.device)
    except StreamkernError as error:
        print(f"gpu_step: {error}", file=sys.stderr)
        return 2
    with backend, backend.active(), replaced(gpu_clock, "SECONDS", REPEAT_S[options.size]):
        report = run(backend, options)
    print(text_table(list(rows(report)), ["part", "figure", "ms", "floor ms", "share of floor"]))
    return 0


def run(backend: Any, options: argparse.Namespace) -> Figures:
    """Return the report of the parts, each of which gets no more than its time."""
    began = time.perf_counter()
    report: Figures = {
        "date": time.strftime("%Y-%m-%d"), "device": backend.describe(), "size": options.size,
        "seconds": 0.0, "parts": {},
    }  # fmt: skip
    measured: Figures = {}
    # Ceilings first: the floors of others go by them.
    for name in dict.fromkeys(("ceilings", *options.parts)):
        part, entry = PARTS[name], report["parts"].setdefault(name, {})
        sizes = dict(getattr(part, options.size))
        if name == "eigenpro4" and options.eigenpro4:
            sizes |= zip("pnd", options.eigenpro4, strict=True)
        now = time.perf_counter()
        seconds_left = began + options.seconds - now
        seconds = min(part.seconds * options.seconds / TOTAL_S, seconds_left)
        if seconds < LEAST_S * options.seconds / TOTAL_S:
            entry["left_out"] = "the time was over"
        else:
            end = now + seconds
            bench = Bench(backend, Clock(backend), options.device, measured,
                          lambda end=end: end - time.perf_counter())  # type: ignore[misc]  # fmt: skip
            limit = min(GRACE * seconds, seconds_left)
            entry |= guarded(partial(_limited, part, bench, entry, sizes, limit))
            entry |= guarded(lambda: backend.release() or {})
        entry["seconds"] = round(time.perf_counter() - now, 2)
        report["seconds"] = round(time.perf_counter() - began, 1)
        write_report(report, options.out)
    return report


def _limited(part: Part, bench: Bench, entry: Figures, sizes: Sizes, seconds: float) -> Figures:
    """Fill the entry of a part, and return nothing more."""
    with limited(seconds):
        part.run(bench, entry, **sizes)
    return {}


def rows(report: Figures) -> Iterator[dict[str, str]]:
    """Yield the rows of the table: what failed or was left out, and the times above their floors.

    Of a part with many times those are shown that are furthest above.
    """
    for part, entry in report["parts"].items():
        found = list(_rows(part, "", entry))
        times = sorted((row for row in found if row["ms"]), key=_above)[-SHOWN:]
        shown = [row for row in found if not row["ms"] or any(row is each for each in times)]
        text = f"{entry['seconds']} s"
        if len(shown) < len(found):
            text += f", and {len(found) - len(shown)} times that are in the JSON alone"
        yield _row(part, text)
        yield from shown


def _above(row: dict[str, str]) -> float:
    return float(row["ms"]) - float(row["floor ms"])


def _row(part: str, figure: str, ms: str = "", floor: str = "", share: str = "") -> dict[str, str]:
    return {"part": part, "figure": figure, "ms": ms, "floor ms": floor, "share of floor": share}


def _rows(part: str, name: str, figures: Figures) -> Iterator[dict[str, str]]:
    for key in ("error", "left_out"):
        if key in figures:
            text = f"{name} {key.replace('_', ' ')}: {figures[key]}".strip()
            yield _row(part, textwrap.shorten(text, WIDTH, placeholder=" ..."))
    if "share_of_floor" in figures:
        numbers = (figures[key] for key in ("ms", "floor_ms", "share_of_floor"))
        yield _row(part, name, *(f"{number:.3f}" for number in numbers))
    for key, value in figures.items():
        if isinstance(value, dict):
            yield from _rows(part, f"{name}, {key}" if name else key, value)


if __name__ == "__main__":
    sys.exit(main())
