"""A Dask cluster of real processes that tests may kill, and sources that misbehave on it.

Worker processes import this file, so it imports little.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from streamkern.basics.randomness import RowRandom
from streamkern.stream.sources.transforms import host_transform
from streamkern.stream.sources.user import GeneratorSource
from tests.interruptions import eventually

ROOT = Path(__file__).parent.parent


class Cluster:
    """A scheduler process and worker processes, each started and killed at will."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "scheduler.json"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.scheduler = self._start(
            "scheduler", "--host=127.0.0.1", "--port=0", "--dashboard-address=127.0.0.1:0",
            f"--scheduler-file={self.file}",
        )  # fmt: skip
        try:  # the file is there before it is written
            eventually(lambda: self.file.exists() and self.file.read_text().rstrip().endswith("}"))
            self.address: str = json.loads(self.file.read_text())["address"]
        except BaseException:
            self.__exit__()
            raise

    def worker(self, path: Path = ROOT) -> subprocess.Popen[bytes]:
        """Start a worker process of one thread that imports from `path` and is not restarted."""
        return self._start(
            "worker", self.address, "--nthreads=1", "--no-nanny", "--no-dashboard", path=path
        )

    def nanny(self) -> subprocess.Popen[bytes]:
        """Start a nanny with a worker process, which may hold ranks of a run."""
        return self._start(
            "worker", self.address, "--nthreads=1", "--memory-limit=0", "--no-dashboard"
        )

    def log(self) -> str:
        """Return the output of all processes."""
        return "".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def _start(self, name: str, *options: str, path: Path = ROOT) -> subprocess.Popen[bytes]:
        with (self.folder / f"{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", f"distributed.cli.dask_{name}", *options],
                stdout=log, stderr=log, cwd=self.folder,
                env={**os.environ, "PYTHONPATH": str(path)},
            )  # fmt: skip
        self.processes.append(process)
        return process

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in reversed(self.processes):
            process.kill()
            process.wait()


def rows(seed: int, epoch: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows that contain their own numbers."""
    ids = np.arange(start, stop)
    return (ids[:, None] * (epoch + 1) + np.arange(4)).astype(np.float32), ids % 3


class Misbehaving:
    """A function like `rows` that calls `act` before units from row `at` on; files log events."""

    def __init__(
        self, folder: Path, act: Callable[[Misbehaving], None], at: int, **more: object
    ) -> None:
        self.folder, self.act, self.at, self.more = folder, act, at, more

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.note("opened")

    def __call__(self, seed: int, epoch: int, start: int, stop: int) -> Any:
        if start == self.at:
            self.act(self)
        return rows(seed, epoch, start, stop)

    def note(self, event: str) -> int:
        """Record an event with the id of this process; return how often it was recorded."""
        with (self.folder / event).open("a") as file:
            file.write(f"{os.getpid()}\n")
        return len(self.notes(event))

    def notes(self, event: str) -> list[int]:
        path = self.folder / event
        return [int(line) for line in path.read_text().split()] if path.exists() else []


def source(fn: Any = rows, n_rows: int = 240, **options: Any) -> GeneratorSource:
    """Return the source of `fn` in units of 10 rows."""
    classes = ("a", "b", "c")
    return GeneratorSource(fn, n_rows, (4,), np.float32, 3, classes, 10, name="rows", **options)


@host_transform
def noisy(X: np.ndarray, y: np.ndarray, rng: RowRandom) -> tuple[np.ndarray, np.ndarray]:
    """Add noise that depends on the row, and replace the target; a host transform."""
    return X + rng.integers(0, 100, X.shape[1:]).astype(X.dtype), (y + 1) % 3


class Dies:
    """Kills the process it is called in, the first `times`."""

    def __init__(self, times: int) -> None:
        self.times = times

    def __call__(self, fn: Misbehaving) -> None:
        if fn.note("deaths") <= self.times:
            os.kill(os.getpid(), signal.SIGKILL)


class Waits:
    """Waits until the file "go" is there."""

    def __call__(self, fn: Misbehaving) -> None:
        fn.note("waiting")
        eventually((fn.folder / "go").exists)


class Fails:
    """Raises, the first `times`."""

    def __init__(self, error: Exception, times: int = 10**9) -> None:
        self.error, self.times = error, times

    def __call__(self, fn: Misbehaving) -> None:
        if fn.note("failures") <= self.times:
            raise self.error
