"""Check the reported data flow against counts by hand, and in a run on a faulty store."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from streamkern.filesystem.cache import Cache
from streamkern.ingest.ingest import ingest
from streamkern.rundir.run_log import read_log
from streamkern.stream.batch_reader import BatchReader
from streamkern.stream.meter import Flow, Meter
from streamkern.stream.sources.stores import ZarrSource
from tests.fault_proxy import FaultProxy
from tests.runs import finished, settings
from tests.s3_server import S3Server


class Clock:
    """A clock that tests set, in seconds."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class MeteredRun(NamedTuple):
    """A reader whose statistics a test sets, the meter of its flow, and their clock."""

    source: ZarrSource
    loader: BatchReader
    cache: Cache
    meter: Meter
    clock: Clock

    def train(self, seconds: int, samples: int = 0, start: int = 0) -> Flow:
        """Return the flow after seconds with this number of samples in each, and 3 MB read and a
        quarter spent waiting if there are samples."""
        for k in range(1, seconds + 1):
            self.clock.now += 1.0
            if samples:
                self.loader.stats.stall_s += 0.25
                self.loader.stats.bytes_read += 3_000_000
            flow = self.meter.flow(start + samples * k)
        return flow


@pytest.fixture
def metered(tmp_path: Path) -> Iterator[MeteredRun]:
    url = f"memory://{uuid.uuid4().hex}/a.zarr"
    ingest(np.zeros((4, 2), np.float32), url, y=np.zeros(4))
    cache = Cache(tmp_path, 1 << 30)
    clock = Clock()
    source = ZarrSource(url, cache=cache)
    with BatchReader(source, batch_size=2, seed=0) as loader:
        loader.stats.retries = 5  # before the meter, so they do not count
        yield MeteredRun(source, loader, cache, Meter(loader, 1000, clock), clock)


def test_flow_begins_without_rates(metered: MeteredRun) -> None:
    flow = metered.meter.flow(1000)
    assert (flow.samples_per_s, flow.retries) == (0, 0)
    assert set(flow.fields()) == {
        "samples_per_s", "stall_share", "read_bytes_per_s", "bytes_in_flight", "retries",
    }  # fmt: skip


def test_rates_are_means_over_last_ten_seconds(metered: MeteredRun) -> None:
    flow = metered.train(seconds=20, samples=50, start=1000)
    assert (flow.samples_per_s, flow.stall_share, flow.read_bytes_per_s) == (50, 0.25, 3e6)
    flow = metered.train(seconds=10, start=2000)
    assert (flow.samples_per_s, flow.stall_share, flow.read_bytes_per_s) == (0, 0, 0)


def test_rate_of_long_step_is_over_its_duration(metered: MeteredRun) -> None:
    metered.train(seconds=10, start=2000)
    metered.clock.now += 100.0
    # The 9 seconds before the step are still within the window.
    assert metered.meter.flow(3000).samples_per_s == pytest.approx(1000 / 109, rel=0.1)


def test_storage_requests_are_counted(metered: MeteredRun) -> None:
    metered.meter.flow(1000)
    metered.loader.stats.retries += 2
    metered.loader.stats.bytes_in_flight = 123
    metered.source.store.stored_chunks.traffic.add(retries=3, requests=7, bytes_in=10_000)
    metered.cache.counts.add(misses=1)
    metered.clock.now += 10.0
    flow = metered.meter.flow(1000)
    assert (flow.retries, flow.requests, flow.bytes_in_flight) == (2 + 3, 7, 123)
    assert (flow.cache_share, flow.stored_bytes_per_s) == (0, 1000)


def test_flow_text_fits_the_line() -> None:
    flow = Flow(48_234.0, 0.021, 151_400_000.0, 64_000_000, 0)
    assert flow.text() == "48.2k samples/s  waits for data 2%  reads 151 MB/s"
    flow = Flow(1_234_567.0, 1.0, 1_510_000.0, 999_999, 12_345, 10, 1e6, 0.987)
    assert flow.text() == (
        "1.23M samples/s  waits for data 100%  reads 1.51 MB/s  cache 99%  retries 12.3k"
    )
    assert Flow(7.0, 0.0, 0.0, 0, 0).text() == "7 samples/s"  # zero shares and counts are omitted


@pytest.mark.slow
def test_run_reports_storage_requests(s3: S3Server, bucket: str, tmp_path: Path) -> None:
    X = np.random.default_rng(0).normal(size=(400, 5)).astype(np.float32)
    url = f"s3://{bucket}/train.zarr"
    ingest(X, url, y=X[:, :2], chunk_mb=20 * 20 / 2**20, storage_options=s3.options())
    with FaultProxy(upstream=s3.endpoint, seed=0) as proxy:
        options = s3.options(proxy.endpoint)

        def last_record(name: str, source: ZarrSource) -> dict[str, float]:
            config = settings(
                tmp_path / name, **{"data.batch_size": 20, "data.epochs": 3, "solver.name": "block"}
            )
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("streamkern.train.loop.progress.MIN_LOG_INTERVAL_S", 0.0)
                finished(config, source=source)
            records = read_log(tmp_path / name / "log.jsonl")
            return [r for r in records if r["event"] == "train"][-1]

        source = ZarrSource(url, storage_options=options)
        proxy.set(faults={"error503": 0.3}, keys="X/c/", limit=60, max_consecutive=2)
        record = last_record("faults", source)
        assert 0 < record["retries"] <= proxy.stats()["faults"]["error503"]
        assert record["requests"] > record["retries"]
        assert record["samples_per_s"] > 0
        assert record["read_bytes_per_s"] > 0
        assert record["stored_bytes_per_s"] > 0
        assert 0 <= record["stall_share"] <= 1
        assert "cache_share" not in record
        proxy.set(faults={})
        cache = Cache(tmp_path / "cache", 1 << 30)
        record = last_record("cached", ZarrSource(url, storage_options=options, cache=cache))
        # The sample for the setup has read every chunk before the loop.
        assert (record["cache_share"], record["retries"]) == (1, 0)
        assert "requests" not in record
