"""Servers that benchmarks and tests start, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


class ServerProcess:
    """A server script in a process of its own, which ends when this process does, in any way.

    The script prints its port as its first line. It may then take calls: lines of JSON, [name,
    arguments], each answered by one line of JSON. It ends when its standard input closes, as it
    does when this process is killed.

    Raises RuntimeError when the script ends without printing a port.
    """

    def __init__(self, script: str | Path, *arguments: str) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.strip().isdigit():
            self.stop()
            raise RuntimeError(f"{Path(script).name} did not start: it printed {line!r}")
        self.port = int(line)
        self.endpoint = f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, name: str, **arguments: Any) -> Any:
        """Return the script's answer to one call; arguments and answer are JSON values."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps([name, arguments]) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server process {self.pid} has ended")
        return json.loads(line)

    def stop(self) -> None:
        """End the process and wait for it. Stopping twice is fine."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):  # of a call that the process did not take
                stream.close()


def end_with_parent() -> None:
    """Block until standard input closes, then end this process at once, threads and all."""
    for _ in sys.stdin:
        pass
    os._exit(0)


class Throttle:
    """A rate in bytes/s that all threads share; 0 means no limit."""

    def __init__(self, bytes_per_s: float = 0.0) -> None:
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, n_bytes: int) -> None:
        """Wait until `n_bytes` more may pass."""
        if not self.bytes_per_s:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + n_bytes / self.bytes_per_s
            wait_s = self._free_at - now
        time.sleep(wait_s)
