"""Counters of requests and bytes, shared by threads."""

from __future__ import annotations

import threading
from dataclasses import dataclass


class Counters:
    """Counts by name, to which many threads may add."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def add(self, **counts: int) -> None:
        """Add to the counts with these names."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

    def counts(self) -> dict[str, int]:
        """Return all counts, as of one moment."""
        with self._lock:
            return {name: count for name, count in vars(self).items() if name != "_lock"}


@dataclass
class Traffic(Counters):
    """Counters of the traffic with remote storage.

    requests : number of requests
    bytes_in : bytes that arrived
    retries : number of reads and requests that were repeated after a fault
    """

    requests: int = 0
    bytes_in: int = 0
    retries: int = 0
