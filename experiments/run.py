"""Measure the points of an experiment, keep each, and report.

The numbers are appended to a journal as they are measured: NAME-CHECKSUM.jsonl, with a checksum of
the settings, the data and the code, which are in its first line. A later call with the same
settings, data and code measures only the missing points. Any other call has another journal.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

import streamkern as sk
from experiments.catalogue import NAMES
from experiments.data import Data
from experiments.experiment import Experiment, Point
from experiments.plot import picture
from experiments.results import Measurement, Results
from streamkern.basics.text import text_table

DECIDING = ("data", "exact", "readers")
"""Modules, besides its own, that determine the numbers of an experiment."""
NOT_COMPARED = ("folder", "name", "device")


class Journal:
    """The measured points of an experiment with some settings, in a file of the folder.

    settings : JSON values that determine the numbers.
    """

    def __init__(self, folder: Path, name: str, settings: dict[str, Any]) -> None:
        """Read the points that an earlier call with the same settings measured."""
        head = json.dumps(settings).encode()
        self.path = folder / f"{name}-{crc32(head):08x}.jsonl"
        self.points: dict[str, tuple[float, list[Measurement]]] = {}
        kept = self.path.read_bytes() if self.path.exists() else b""
        whole = kept[: kept.rfind(b"\n") + 1]  # behind it is a line that a kill cut
        if not whole:
            self.path.write_bytes(head + b"\n")
        elif len(whole) < len(kept):
            os.truncate(self.path, len(whole))
        for line in whole.splitlines()[1:]:
            entry = json.loads(line)
            numbers = [Measurement(*m) for m in entry["numbers"]]
            self.points[entry["key"]] = (entry["seconds"], numbers)

    def measure(self, point: Point) -> float:
        """Measure a point, keep its numbers, and return the seconds it took."""
        began = time.perf_counter()
        numbers = [Measurement(m[0], m[1], float(m[2]), float(m[3])) for m in point.measure()]
        seconds = time.perf_counter() - began
        entry = {"key": point.key, "seconds": round(seconds, 3), "numbers": numbers}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        self.points[point.key] = (seconds, numbers)
        return seconds


def run(name: str, experiment: Experiment, data: Data, options: argparse.Namespace) -> Results:
    """Measure the missing points, and return the results in the order of the points."""
    points = list(experiment.points(data, options))
    keys = [point.key for point in points]
    if len(set(keys)) < len(keys):
        raise ValueError(f"two points of {name} have one key; make the keys of points unique")
    journal = Journal(options.folder, name, settings_of(name, data, options))
    missing = [point for point in points if point.key not in journal.points]
    rate = operations_per_second()
    print(
        f"{name}: {len(points)} points, {len(points) - len(missing)} of them measured before; "
        f"the rest takes about {duration(sum(p.work for p in missing) / rate)}",
        flush=True,
    )
    done, took, last = 0.0, 0.0, time.perf_counter()
    for k, point in enumerate(missing):
        took += journal.measure(point)
        done += point.work
        if time.perf_counter() - last > 15:
            last = time.perf_counter()
            left = sum(p.work for p in missing[k + 1 :]) * took / done
            print(f"{k + 1} of {len(missing)}; about {duration(left)} left", flush=True)
    results = Results()
    for key in keys:
        seconds, measurements = journal.points[key]
        results.seconds += seconds
        for measurement in measurements:
            results.add(measurement)
    return results


def operations_per_second() -> float:
    """Return the multiplications and additions a second of a matrix product here, float32."""
    A = np.ones((1024, 1024), np.float32)
    A @ A
    began = time.perf_counter()
    for _ in range(3):
        A @ A
    return 3 * 2 * 1024**3 / (time.perf_counter() - began)


def duration(seconds: float) -> str:
    """Return "40 s", "12 min" or "3.5 h"."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def settings_of(name: str, data: Data, options: argparse.Namespace) -> dict[str, Any]:
    """Return all values that determine the numbers of an experiment, as JSON values."""
    chosen = {
        k: v if v is None or isinstance(v, int | float | str) else str(v)
        for k, v in vars(options).items()
        if k not in NOT_COMPARED
    }
    return {
        "experiment": name,
        "streamkern": sk.__version__,
        "code": code_of(name),
        "data": {
            "name": data.name,
            "rows": len(data.X),
            "row shape": list(data.X.shape[1:]),
            "checksum": data.checksum(),
        },
        "settings": chosen,
    }


def code_of(name: str) -> int:
    """Return a checksum of the files that determine the numbers of an experiment.

    They are its module, the modules of other experiments that it imports, and all of streamkern.
    """
    place, names = Path(__file__).parent, [name, *DECIDING]
    for each in names:  # grows
        text = (place / f"{each}.py").read_text(encoding="utf-8")
        found = re.findall(r"^from experiments\.(\w+) import", text, re.MULTILINE)
        names += [part for part in found if part in NAMES and part not in names]
    files = [place / f"{part}.py" for part in names]
    files += sorted(Path(sk.__file__).parent.rglob("*.py"))
    return crc32(b"".join(file.read_bytes() for file in files))


def report(
    name: str, experiment: Experiment, data: Data, options: argparse.Namespace, results: Results
) -> None:
    """Print and write the tables, the picture and the verdict."""
    path, verdict = options.folder / f"{name}.json", experiment.judge(results)
    full_run = "" if experiment.full_run is None else experiment.full_run(options)
    line = verdict.line(experiment.claim)
    if options.repetitions == 1 and "clear" in verdict.criterion:
        line += " With one repetition every difference counts as clear."
    tables = {figure: results.rows(figure, experiment.axis(figure)) for figure in results.values}
    whole = settings_of(name, data, options) | {
        "source": experiment.source,
        "tables": tables,
        "values": results.values,
        "seconds": round(results.seconds, 1),
        "verdict": {**vars(verdict), "line": line},
        "published": experiment.published.splitlines(),
        "full run": full_run.splitlines(),
    }
    path.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    where = described(experiment, data)
    picture(experiment, results, f"{experiment.source}: {where}", path.with_suffix(".png"))
    for figure, rows in tables.items():
        print(f"\n{figure} ({where}; {options.repetitions} repetitions, mean ± deviation)\n")
        print(text_table(rows, columns(rows)))
    if experiment.published:
        print(f"\npublished:\n{experiment.published}")
    if full_run:
        print(f"\n{full_run}")
    took = duration(results.seconds)
    print(f"\n{line}\n{path}, {path.with_suffix('.png')}; measured in {took}")


def described(experiment: Experiment, data: Data) -> str:
    """Return the name of the data, and whether it replaces the paper's data."""
    if experiment.needs == "nothing":
        return "a made problem"
    return data.name if data.own else f"{experiment.stand_in_is}, in place of the paper's data"


def columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the columns of a table in the order in which they first appear."""
    return list(dict.fromkeys(key for row in rows for key in row))
