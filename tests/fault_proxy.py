"""An HTTP proxy that makes a storage server behave badly: late, slow, cut off, wrong or gone.

    with FaultProxy(upstream=s3.endpoint, seed=1, faults={"error503": 0.1}) as proxy:
        ...  # talk to proxy.endpoint
        proxy.stats()["faults"]

It runs in a process of its own, so that it does not share an interpreter with what it tests. What
needs no fault is streamed through as it comes, and the Host header stays as the client sent it.
A client's connection stays open between requests even if the server closes its own.

The faults, one at most per request. An answer without a body is cut within its first line:

    refuse     no answer; for `refuse_s` new connections are refused too, whoever makes them
    reset      half of the body, then the connection is reset
    truncate   half of the body, then the connection is closed in order
    shorten    half of an object, and a Content-Length that says so: only a checksum can tell
    badbytes   an object with some bits flipped
    stall      half of the body, then silence for `stall_s`, then a reset
    slowdns    the request waits `slow_s` before it goes on
    error500, error503, slowdown, expired
               an answer from the proxy alone; the last two with S3's XML (SlowDown, ExpiredToken)
    badupload  a PUT is answered as if its body had arrived altered (XAmzContentSHA256Mismatch)
    lostreply  the server does what was asked, but its answer is lost and the connection reset
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.serverprocess import ServerProcess

XML = '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{}</Code><Message>{}</Message></Error>'

# Faults that are an answer of the proxy alone: status line, content type, body.
ANSWERS = {
    "error500": ("500 Internal Server Error", "text/plain", "Internal Server Error"),
    "error503": ("503 Service Unavailable", "text/plain", "Service Unavailable"),
    "slowdown": (
        "503 Slow Down",
        "application/xml",
        XML.format("SlowDown", "Please reduce your request rate."),
    ),
    "expired": (
        "400 Bad Request",
        "application/xml",
        XML.format("ExpiredToken", "The provided token has expired."),
    ),
    "badupload": (
        "400 Bad Request",
        "application/xml",
        XML.format(
            "XAmzContentSHA256Mismatch",
            "The provided 'x-amz-content-sha256' header does not match what was computed.",
        ),
    ),
}
ON_OBJECTS = ("shorten", "badbytes")
ON_ANSWERS = ("reset", "truncate", "stall", "lostreply", *ON_OBJECTS)
FAULTS = ("refuse", "slowdns", *ANSWERS, *ON_ANSWERS)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the proxy; `faults` maps a fault to its probability for a request."""

    seed: int = 0
    faults: Mapping[str, float] = dataclasses.field(default_factory=dict)
    methods: Sequence[str] | None = None  # faults only for these
    keys: str | None = None  # faults only where this pattern is found in "/bucket/key?query"
    limit: int | None = None  # this many faults at most, counted from the last change
    max_consecutive: int = 2  # in a row for one method, path and range
    latency_s: float = 0.0  # each request waits this long
    bandwidth: float = 0.0  # bytes/s of all bodies together; 0 is no limit
    stall_s: float = 5.0
    refuse_s: float = 0.02
    slow_s: float = 0.5

    def __post_init__(self) -> None:
        unknown = sorted(set(self.faults) - set(FAULTS))
        if unknown:
            raise ValueError(f"unknown faults {unknown}; the faults are {', '.join(FAULTS)}")
        if sum(self.faults.values()) > 1 + 1e-9 or min(self.faults.values(), default=0) < 0:
            raise ValueError(f"probabilities of faults add up to at most 1, not {self.faults}")
        re.compile(self.keys or "")


# ------------------------------------------------------------------------------- proxy process


class FaultProxy:
    """The proxy in front of `upstream`, such as "http://127.0.0.1:5000"; see `Settings`."""

    def __init__(self, upstream: str, **settings: Any) -> None:
        self._settings = Settings(**settings)
        parts = urlsplit(upstream)
        script = Path(__file__).with_name("fault_server.py")
        self._process = ServerProcess(
            script, str(parts.hostname), str(parts.port or 80), json.dumps(settings)
        )
        self.endpoint = self._process.endpoint
        self.port = self._process.port
        self.pid = self._process.pid

    def set(self, **settings: Any) -> None:
        """Change settings from the next request on; other settings stay as they are.

        Each change starts the plan anew: occurrences, faults in a row and `limit` count from 0.
        """
        self._settings = dataclasses.replace(self._settings, **settings)
        self._process.ask("set", **settings)

    def stats(self) -> dict[str, Any]:
        """Return counts since the start.

        `requests` by method and `faults` by kind, `connections` accepted, bytes of bodies
        `bytes_in` from clients and `bytes_out` to them, and `upstream_errors`: requests that
        failed because the server behind did, which is not a fault of the proxy's making.
        """
        return dict(self._process.ask("stats"))

    def log(self) -> list[tuple[str, str, str | None]]:
        """Return (method, path with query, fault or None) of each request since the last call."""
        return [(method, path, fault) for method, path, fault in self._process.ask("log")]

    def stop(self) -> None:
        self._process.stop()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


# -------------------------------------------------------------------------- choice of faults


class Plan:
    """Chooses the fault of each request: a pure function of seed, method, key and occurrence.

    The bucket and the query are not part of it, so a run repeats in another bucket, and requests
    for other keys in between, from other threads, change nothing.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._left = settings.limit
        self._occurrences: Counter[tuple[str, str]] = Counter()
        self._in_a_row: Counter[tuple[str, str, str]] = Counter()
        self._lock = threading.Lock()

    def choose(self, method: str, path: str, byte_range: str) -> str | None:
        key = object_key(path)
        with self._lock:
            n = self._occurrences[method, key]
            self._occurrences[method, key] += 1
            fault = self._draw(method, key, n) if self._wanted(method, path) else None
            if fault in ON_OBJECTS and not (method == "GET" and key):
                fault = None
            if fault == "badupload" and method != "PUT":
                fault = None
            same = (method, path, byte_range)
            if fault and self._left != 0 and self._in_a_row[same] < self.settings.max_consecutive:
                self._in_a_row[same] += 1
                self._left = None if self._left is None else self._left - 1
                return fault
            del self._in_a_row[same]
            return None

    def give_back(self) -> None:
        """Take note that a chosen fault did not happen, so `limit` has one more left."""
        with self._lock:
            self._left = None if self._left is None else self._left + 1

    def _wanted(self, method: str, path: str) -> bool:
        methods, keys = self.settings.methods, self.settings.keys
        return (methods is None or method in methods) and (not keys or bool(re.search(keys, path)))

    def _draw(self, method: str, key: str, n: int) -> str | None:
        at = random.Random(f"{self.settings.seed} {method} {key} {n}").random()
        for fault, probability in self.settings.faults.items():
            at -= probability
            if at < 0:
                return fault
        return None


def object_key(path: str) -> str:
    """Return the key of a path-style request, "" for a request about a bucket."""
    return path.partition("?")[0].lstrip("/").partition("/")[2]
