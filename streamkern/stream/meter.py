"""Measure how the data of a run moves, for the progress line and the run log."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

from streamkern.filesystem.cache import CacheCounts
from streamkern.filesystem.traffic import Traffic
from streamkern.stream.batch_reader import BatchReader
from streamkern.stream.sources.stores import stores_in

WINDOW_S = 10.0
_MIN_INTERVAL_S = 0.25


@dataclass(frozen=True)
class Flow:
    """The data flow, as recorded in the "train" events of the run log.

    Rates are over the last 10 seconds, or longer if the flow was measured less often, or since the
    process began to train if that is later; counts are since then. On a cluster the workers move
    the data, and only the rows that arrive from them are counted here.

    samples_per_s : samples trained on
    stall_share : share of the time spent waiting for data
    read_bytes_per_s : decoded bytes that arrived, from any place
    bytes_in_flight : decoded bytes of the units being read
    retries : number of reads and requests that were repeated after a fault
    requests : number of requests to remote stores; None if there were none
    stored_bytes_per_s : stored bytes that arrived from remote stores; None without requests
    cache_share : share of the requested chunks found in the cache; None if none were requested from
        a cache
    """

    samples_per_s: float
    stall_share: float
    read_bytes_per_s: float
    bytes_in_flight: int
    retries: int
    requests: int | None = None
    stored_bytes_per_s: float | None = None
    cache_share: float | None = None

    def fields(self) -> dict[str, float]:
        """Return the fields that are not None, for the run log."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def text(self) -> str:
        """Return the text of the progress line, important parts first: terminals cut its end."""
        parts = [f"{three_digits(self.samples_per_s)} samples/s"]
        if self.stall_share >= 0.01:
            parts.append(f"waits for data {self.stall_share:.0%}")
        if self.read_bytes_per_s >= 1e5:
            parts.append(f"reads {self.read_bytes_per_s / 1e6:.3g} MB/s")
        if self.cache_share is not None:
            parts.append(f"cache {self.cache_share:.0%}")
        if self.retries:
            parts.append(f"retries {three_digits(self.retries)}")
        return "  ".join(parts)


class _Reading(NamedTuple):
    """The counters at the time `time_s` of the clock."""

    time_s: float
    samples: int
    stall_s: float
    bytes_read: int
    bytes_in: int


class Meter:
    """Measures the data flow from a reader to its consumer, from its construction on.

    samples : number of samples trained on so far
    """

    def __init__(
        self, reader: BatchReader, samples: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._reader, self._clock = reader, clock
        all_chunks = [store.stored_chunks for store in stores_in(reader.source)]
        caches = dict.fromkeys(chunks.cache for chunks in all_chunks if chunks.cache is not None)
        self._counters: list[Traffic | CacheCounts] = [chunks.traffic for chunks in all_chunks]
        self._counters += [cache.counts for cache in caches]
        self._first_counts, self._first_retries = self._counts(), reader.stats.retries
        self._readings = deque([self._reading(samples)])

    def flow(self, samples: int) -> Flow:
        """Return the flow, given that `samples` were trained on so far."""
        now, readings = self._reading(samples), self._readings
        # The oldest reading becomes the last one that is at least `WINDOW_S` old.
        while len(readings) > 1 and now.time_s - readings[1].time_s >= WINDOW_S:
            readings.popleft()
        oldest = readings[0]
        if now.time_s - readings[-1].time_s >= _MIN_INTERVAL_S:
            readings.append(now)
        seconds = max(now.time_s - oldest.time_s, 1e-9)
        counts = self._counts()
        counts.subtract(self._first_counts)
        requests, hits, misses = (counts[name] for name in ("requests", "hits", "misses"))
        stats = self._reader.stats
        return Flow(
            samples_per_s=(now.samples - oldest.samples) / seconds,
            stall_share=min(1.0, (now.stall_s - oldest.stall_s) / seconds),
            read_bytes_per_s=(now.bytes_read - oldest.bytes_read) / seconds,
            bytes_in_flight=stats.bytes_in_flight,
            retries=stats.retries - self._first_retries + counts["retries"],
            requests=requests or None,
            stored_bytes_per_s=(now.bytes_in - oldest.bytes_in) / seconds if requests else None,
            cache_share=hits / (hits + misses) if hits + misses else None,
        )

    def _counts(self) -> Counter[str]:
        """Return the summed counts of the stores and their caches."""
        total = Counter[str]()
        for part in self._counters:
            total.update(part.counts())
        return total

    def _reading(self, samples: int) -> _Reading:
        stats, bytes_in = self._reader.stats, self._counts()["bytes_in"]
        return _Reading(self._clock(), samples, stats.stall_s, stats.bytes_read, bytes_in)


def three_digits(number: float) -> str:
    """Return a number as text with three digits: 950, 48.2k, 1.23M."""
    for unit, size in (("", 1.0), ("k", 1e3)):
        if number < 999.5 * size:
            return f"{number / size:.3g}{unit}"
    return f"{number / 1e6:.3g}M"
