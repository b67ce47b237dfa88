"""Check the description of a store, its warnings, and the progress of an unfinished one."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from streamkern.cli.described_store import store_text
from streamkern.ingest.ingest import ingest
from streamkern.store.describe import describe_store, describe_unfinished
from streamkern.store.store import open_store
from streamkern.store.writer import StoreWriter
from tests.fault_proxy import FaultProxy
from tests.s3_server import S3Server

rng = np.random.default_rng(0)
X = rng.integers(0, 256, size=(600, 40)).astype(np.uint8)
Y = rng.integers(0, 3, 600)


def warnings_of_foreign_store(
    path: Path, y: np.ndarray = Y, y_rows: int = 50, **layout: Any
) -> list[str]:
    """Return the warnings about a store that zarr wrote, without the one about its origin."""
    group = zarr.create_group(path)
    group.create_array("X", shape=X.shape, dtype=X.dtype, **{"chunks": (50, 40), **layout})[:] = X
    group.create_array("y", data=y, chunks=(y_rows,))
    message: list[str] = describe_store(open_store(path))["warnings"]
    other_warnings = [
        text for text in message if not text.startswith("streamkern did not write this store")
    ]
    assert len(other_warnings) == len(message) - 1
    return other_warnings


def test_slow_layouts_give_warnings(tmp_path: Path) -> None:
    small = warnings_of_foreign_store(tmp_path / "plain")
    assert small == []
    (message,) = warnings_of_foreign_store(tmp_path / "shards", chunks=(10, 40), shards=(50, 40))
    assert message.startswith("X is sharded: rows are read a shard at a time, 1.95 KiB in 5 pieces")
    (message,) = warnings_of_foreign_store(tmp_path / "columns", chunks=(50, 16))
    assert message.startswith("X is cut into 3 pieces along its features")
    (message,) = warnings_of_foreign_store(tmp_path / "mixture", y_rows=200)
    assert message.startswith("X has chunks of 50 rows and y of 200: parts of y are read more than")


def test_compressible_rows_give_warning(tmp_path: Path) -> None:
    sparse = X * (X > 230)
    ingest(sparse, tmp_path / "none", y=Y, compress="none")
    (message,) = describe_store(open_store(tmp_path / "none"))["warnings"]
    assert message.startswith("uint8 rows are stored as they are; zstd would make them ")
    assert message.endswith(" times smaller: ingest with compress zstd")
    for name, rows, compress in (("zstd", sparse, "zstd"), ("random", X, "none")):
        ingest(rows, tmp_path / name, y=Y, compress=compress)
        assert describe_store(open_store(tmp_path / name))["warnings"] == []


def test_small_chunks_sorted_rows_and_rare_classes_give_warnings(tmp_path: Path) -> None:
    wide = np.zeros((2000, 900), np.float32)
    y = np.repeat([0, 1], [1990, 10])
    ingest(wide, tmp_path / "s", y=y, chunk_mb=90 / 1024, shuffle=False)
    description = describe_store(open_store(tmp_path / "s"))
    chunks, ordered, rare = description["warnings"]
    assert chunks.startswith("chunks of 87.9 KiB are small: every read costs a request")
    assert ordered.startswith("rows are sorted or grouped by label")
    assert rare == (
        "classes are unbalanced: class '1' has 0.5% of the rows and class '0' 99.5%; set "
        'class_weight = "balanced" if both matter alike'
    )
    text = store_text(description)
    assert "rows per class: 1 10 (0.5%) to 0 1,990 (99.5%)" in text
    assert text.count("  note: ") == 3
    ingest(wide[:40], tmp_path / "balanced", y=np.tile(np.arange(4), 10))
    text = store_text(describe_store(open_store(tmp_path / "balanced")))
    assert "rows per class: 10 (25.0%)\n" in text


@pytest.mark.slow
def test_describing_a_large_s3_store_needs_few_requests(
    s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{bucket}/s.zarr"
    ingest(X, url, y=Y, chunk_mb=10 * 40 / 2**20, storage_options=s3.options())
    with FaultProxy(upstream=s3.endpoint) as proxy:
        store = open_store(url, storage_options=s3.options(proxy.endpoint))

        def described(**how: bool) -> tuple[dict[str, Any], Counter[str]]:
            proxy.log()
            description = describe_store(store, **how)
            return description, Counter(
                "list" if "list-type" in path else method for method, path, _ in proxy.log()
            )

        description, requested = described()
        assert requested == {"list": 2, "GET": 9}  # also the checksums, once
        assert (description["n_chunks"], description["stored_bytes_estimated"]) == (60, False)
        exact = description["stored_bytes"]
        monkeypatch.setattr("streamkern.store.describe._MAX_LISTED_CHUNKS", 10)
        description, requested = described()
        assert requested == {"HEAD": 8, "GET": 8}
        assert description["stored_bytes_estimated"]
        # The estimate omits the 4 bytes of each checksum of y, and the effect of zstd on y.
        assert description["stored_bytes"] == pytest.approx(exact, rel=0.1)
        assert "about " in store_text(description)
        description, requested = described(exact=True)
        assert requested["list"] == 2
        assert (description["stored_bytes"], description["stored_bytes_estimated"]) == (
            exact,
            False,
        )


def test_unfinished_store_reports_progress(tmp_path: Path) -> None:
    path = tmp_path / "s"
    assert describe_unfinished(path) is None
    writer = StoreWriter(
        path, row_shape=(40,), x_dtype=np.uint8, n_outputs=3, classes="abc", chunk_rows=100,
        n_rows=550,
    )  # fmt: skip
    for i in (0, 3):
        writer.write_chunk(i, X[:100], Y[:100])
    description = describe_unfinished(path)
    assert description is not None
    assert json.loads(json.dumps(description)) == description
    assert (description["chunks_written"], description["n_chunks"], description["n_rows"]) == (
        2,
        6,
        550,
    )
    assert "unfinished: 2 of 6 chunks are written, 33%; 550 rows in all" in store_text(description)
    ingest(X, tmp_path / "done", y=Y)
    assert describe_unfinished(tmp_path / "done") is None
    group = zarr.create_group(tmp_path / "foreign")
    group.create_array("X", data=X)
    assert describe_unfinished(tmp_path / "foreign") is None
