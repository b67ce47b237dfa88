"""Mistakes in files of tables whose columns have types: Parquet, Arrow and JSON lines."""

from __future__ import annotations

import json
import shutil
from functools import partial as Do
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as parquet

from tests.remedies import FRAME, Case, N, X, Y, ingested

COVERED = ("ingest/arrow_files.py", "ingest/arrow_tables.py")
NOT_TRIED = {
    "ingest/arrow_files.py:ParquetReader._read:1": "needs a file replaced while it is read",
    "ingest/arrow_files.py:_check_footer:1": "tests/ingest/test_fuzz_readers.py damages footers",
    "ingest/arrow_tables.py:ArrowReader._values:1": "needs targets that Arrow itself cannot read",
}
COLUMNS: dict[str, Any] = {"a": X[:, 0], "b": X[:, 1], "fare": Y}


def written(**given: Any) -> Any:
    """Ingest a Parquet file with columns changed or added."""
    parquet.write_table(pa.table(COLUMNS | given), "written.parquet")
    return ingested("written.parquet", y="fare")


def lines(*rows: Any, **given: Any) -> Any:
    """Ingest a file of JSON lines; text is written as it is."""
    texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    Path("lines.jsonl").write_text("\n".join(texts) + "\n")
    return ingested("lines.jsonl", y="fare", **given)


def table_cases() -> list[Case]:
    """Return all remedies of this module."""
    one, two = {"a": 1.5, "fare": 2.5}, {"a": 3.5, "fare": 4.5}
    gaps = np.where(np.arange(N) == 3, np.nan, Y)
    lacking = pa.array(gaps, from_pandas=True)
    parquet.write_table(pa.table(COLUMNS | {"fare": lacking}), "lacking.parquet")
    parquet.write_table(pa.table(COLUMNS), "good.parquet")
    Path("cut.parquet").write_bytes(Path("good.parquet").read_bytes()[:-300])
    shutil.copy("rides.csv", "wrong.parquet")
    long = pa.table({"a": np.ones(700000), "fare": np.ones(700000)})
    feather.write_feather(long, "large.arrow", compression="uncompressed", chunksize=700000)
    feather.write_feather(long, "small.arrow", compression="uncompressed", chunksize=9000)
    even = pa.array([[1.0, 2.0], [3.0, 4.0]] * (N // 2))
    odd = pa.array([[1.0, 2.0], [3.0]] * (N // 2))
    null = pa.array([[1.0, 2.0], [3.0, None]] * (N // 2))
    raw = pa.array([b"\xff"] * N)
    weights = COLUMNS | {"w": pa.array(["1"] * N)}
    parquet.write_table(pa.table(weights), "words.parquet")
    parquet.write_table(pa.table(weights | {"w": np.ones(N)}), "weights.parquet")

    def lists(x: Any) -> Any:
        parquet.write_table(pa.table({"X": x, "fare": Y}), "lists.parquet")
        return ingested("lists.parquet", y="fare")

    def arrow(name: str, memory: str) -> Any:
        return Do(ingested, name, y="fare", memory=memory, chunk_mb=0.25)

    many = [one] * 43690  # a piece of 1 MiB, whose types are found by itself
    return [
        ("columns whose type changes .*write one type for each column",
         Do(lines, *many, two | {"a": [1]}),
         Do(lines, *many, two)),
        ("drop_missing_targets=True leaves such rows out",
         Do(ingested, "lacking.parquet", y="fare"),
         Do(ingested, "lacking.parquet", y="fare", drop_missing_targets=True)),
        ("copy it again from its source", Do(ingested, "cut.parquet", y="fare"),
         Do(ingested, "good.parquet", y="fare")),
        ("give format='csv'", Do(ingested, "wrong.parquet", y="fare"),
         Do(ingested, "wrong.parquet", y="fare", format="csv")),
        ("raise memory=.*or write smaller batches", arrow("large.arrow", "8 MB"),
         arrow("large.arrow", "800 MB"), arrow("small.arrow", "8 MB")),
        ("of one type each: .*correct it", Do(lines, one, '{"a": '), Do(lines, one, two)),
        ("write one object in each line", Do(lines, f"{json.dumps(one)} {json.dumps(two)}", two),
         Do(lines, one, two)),
        ("give lists of equal length", Do(lists, odd), Do(lists, even)),
        ("holds a null; fill in or drop such rows", Do(lists, null), Do(lists, even)),
        ("not text in UTF-8; leave it out", Do(written, c=raw), written),
        ("not text in UTF-8; write it as text", Do(written, fare=raw),
         Do(written, fare=pa.array(["up", "down"] * (N // 2)))),
        ("encode the column, or leave it out",
         Do(ingested, "words.parquet", y="fare", sample_weight="w"),
         Do(ingested, "weights.parquet", y="fare", sample_weight="w")),
        ("encode the column, or leave it out",
         Do(ingested, FRAME.assign(fare=Y), y="fare", encode="none"),
         Do(ingested, FRAME.assign(fare=Y), y="fare", encode="none", drop=["w"])),
    ]  # fmt: skip


TABLES = (table_cases,)
