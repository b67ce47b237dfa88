"""Check the counts and the conclusions of the measured speed of a store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from streamkern.basics.errors import ConfigError, CorruptChunkError, StoreNotFoundError
from streamkern.ingest.ingest import ingest
from streamkern.stream.read_speed import ReadRow, conclusion, read_speed, speed_text
from tests.fault_proxy import FaultProxy
from tests.s3_server import S3Server
from tests.store_damage import flip_bit

X = np.random.default_rng(0).normal(size=(400, 6)).astype(np.float32)
Y = np.arange(400) % 3


@pytest.fixture(autouse=True)
def few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamkern.stream.read_speed.CONNECTION_COUNTS", (1, 2, 4))


def check(
    report: dict[str, Any], object_bytes: float, chunk_bytes: float, counts: list[int]
) -> None:
    """Check that every row has the counts of the same objects, which are chunks of 50 rows."""
    assert json.loads(json.dumps(report)) == report
    *measurement_rows, batches = report["rows"]
    assert [(r["what"], r["connections"]) for r in measurement_rows] == [
        (reader, n) for reader in ("objects", "chunks") for n in counts
    ]
    for row in measurement_rows:
        size = object_bytes if row["what"] == "objects" else chunk_bytes
        assert row["bytes_per_s"] / row["requests_per_s"] == pytest.approx(size)
        assert row["samples_per_s"] / row["requests_per_s"] == pytest.approx(50)
        assert 0 < row["median_ms"] <= row["p95_ms"]
    assert batches["what"] == "batches"
    assert batches["samples_per_s"] > 0
    assert len(speed_text(report["rows"]).splitlines()) == 2 + len(report["rows"])


def test_s3_store_is_read_by_whole_objects(s3: S3Server, bucket: str) -> None:
    url = f"s3://{bucket}/train.zarr"
    ingest(X, url, y=Y, chunk_mb=50 * 24 / 2**20, storage_options=s3.options())
    progress_rows: list[ReadRow] = []
    with FaultProxy(upstream=s3.endpoint) as proxy:
        report = read_speed(
            url, seconds=0.1, progress=progress_rows.append,
            storage_options=s3.options(proxy.endpoint),
        )  # fmt: skip
        requested = [path for method, path, _ in proxy.log() if "/c/" in path]
    check(report, 50 * 24 + 4, 50 * (24 + 8), [1, 2, 4])
    assert report["url"] == url
    assert progress_rows == report["rows"]
    assert set(requested) >= {f"/{bucket}/train.zarr/X/c/{i}/0" for i in range(8)}
    assert report["chunk_bytes"] == 1200


def test_foreign_layouts_are_read_by_chunks(tmp_path: Path) -> None:
    group = zarr.create_group(tmp_path / "f.zarr")
    group.create_array("rows", shape=X.shape, dtype="f4", chunks=(50, 4), compressors=None)[:] = X
    group.create_array("labels", data=Y + 0.5, chunks=(50,))
    report = read_speed(tmp_path / "f.zarr", x="rows", y="labels", seconds=0.05)
    check(report, 2 * 50 * 16, 50 * (24 + 8), [1, 2, 4])
    group = zarr.create_group(tmp_path / "s.zarr")
    group.create_array(
        "X", shape=X.shape, dtype="f4", chunks=(10, 6), shards=(50, 6), compressors=None
    )[:] = X
    report = read_speed(tmp_path / "s.zarr", y=None, seconds=0.05)
    shard = (tmp_path / "s.zarr/X/c/0/0").stat().st_size
    check(report, shard, 50 * 24, [1, 2, 4])


def test_weighted_samples_are_counted_with_weights(tmp_path: Path) -> None:
    ingest(X, tmp_path / "s.zarr", y=Y, sample_weight=np.ones(400))
    batches = read_speed(tmp_path / "s.zarr", seconds=0.02)["rows"][-1]
    # 6 features, an id of the class, a weight and a row number.
    assert batches["bytes_per_s"] / batches["samples_per_s"] == pytest.approx(6 * 4 + 8 + 4 + 8)


def test_bytes_in_flight_respect_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ingest(X, tmp_path / "s.zarr", y=Y, chunk_mb=50 * 24 / 2**20)
    monkeypatch.setattr("streamkern.stream.read_speed._MAX_IN_FLIGHT_BYTES", 3000)
    report = read_speed(tmp_path / "s.zarr", seconds=0.02)
    check(report, 1204, 50 * (24 + 8), [1, 2])
    monkeypatch.setattr("streamkern.stream.read_speed._MAX_IN_FLIGHT_BYTES", 3)
    report = read_speed(tmp_path / "s.zarr", seconds=0.02)
    check(report, 1204, 50 * (24 + 8), [1])


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    store = tmp_path / "s.zarr"
    ingest(X, store, y=Y, chunk_mb=50 * 24 / 2**20)
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"seconds=.* must be finite and above 0"):
            read_speed(store, seconds=seconds)
    with pytest.raises(StoreNotFoundError, match="there is no zarr store"):
        read_speed(tmp_path / "none.zarr")
    flip_bit(store, "X/c/3/0")
    with pytest.raises(CorruptChunkError, match="X/c/3/0"):
        read_speed(store, seconds=0.1)


def measurement_rows(objects: list[float], chunks: list[float], batches: float) -> list[ReadRow]:
    """Return rows with these samples/s of objects, chunks and batches."""

    def row(reader: str, n: int, speed: float) -> ReadRow:
        return {
            "what": reader, "connections": n, "samples_per_s": speed, "bytes_per_s": 100 * speed,
        }  # fmt: skip

    measurements = [
        row(reader, n, speed)
        for reader, speeds in (("objects", objects), ("chunks", chunks))
        for n, speed in zip((1, 4, 8, 16), speeds, strict=False)
    ]
    return [*measurements, row("batches", 5, batches)]


@pytest.mark.parametrize(
    ("objects", "chunks", "message"),
    [
        (
            [1e6, 4e6, 4.1e6, 4e6], [1e6, 3.9e6, 4e6, 4e6],
            "Bandwidth is the slow side: 410 MB/s, reached with 4 connections, 32 MiB in flight.",
        ),
        ([4e6], [3.9e6], "Bandwidth is the slow side: 400 MB/s, reached with 1 connection,"),
        (
            [1e6, 4e6, 8e6, 16e6], [1e6, 4e6, 8e6, 15e6],
            "Latency is the slow side: reads still get faster at 16 connections, 128 MiB",
        ),
        (
            [1e6, 4e6, 8e6, 16e6], [1e6, 2e6, 2e6, 2e6],
            "Decoding is the slow side: 2,000,000 samples/s, where the storage gives 16,000,000;",
        ),
    ],
)  # fmt: skip
def test_conclusion_names_the_bottleneck(
    objects: list[float], chunks: list[float], message: str
) -> None:
    text = conclusion(measurement_rows(objects, chunks, max(objects) / 2), 8 << 20)
    assert text.startswith(message)
    assert f"with 5 readers, {max(objects) / 2:,.0f} samples/s arrive (50% of the best)" in text
