from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamkern.basics.errors import DataError
from streamkern.ingest.ingest import ingest
from streamkern.store.store import open_store
from tests.rawfiles import memory_url

NARROW, WIDE = np.array([[1.5], [2.5]], np.float16), np.array([[637.0851], [0.1]])


def stored(inputs: Any, **arguments: Any) -> Any:
    url = memory_url()
    ingest(inputs, url, shuffle=False, **arguments)
    return open_store(url).read_chunk(0)[0]


def halves(*parts: Any) -> Iterator[tuple[Any, Any]]:
    return iter([(part, np.array([0.5, 1.5])[: len(part)]) for part in parts])


@pytest.mark.parametrize("kind", ["npy", "npz", "parquet"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (NARROW, WIDE),
        (np.array([[1], [2]], np.int16), np.array([[2**31 - 1], [7]], np.int32)),
        (np.array([[1], [2]], np.uint8), np.array([[-1], [300]], np.int16)),
    ],
    ids=["floats", "integers", "signs"],
)
def test_several_files_are_stored_in_what_holds_all_of_them(
    tmp_path: Path, kind: str, first: Any, second: Any
) -> None:
    paths, y = [tmp_path / f"{k}.{kind}" for k in range(2)], np.array([0.5, 1.5])
    for path, X in zip(paths, (first, second), strict=True):
        if kind == "npy":
            np.save(path, X)
            np.save(path.with_suffix(".y.npy"), y)
        elif kind == "npz":
            np.savez(path, X=X, y=y)
        else:
            pq.write_table(pa.table({"a": X[:, 0], "y": y}), path)
    beside = [path.with_suffix(".y.npy") for path in paths] if kind == "npy" else None
    X = stored(paths, y=beside)
    np.testing.assert_array_equal(X, np.concatenate([first.astype(float), second]))


@pytest.mark.parametrize(
    "second", [WIDE, WIDE.astype(np.float32), np.array([[70_000], [1]])], ids=lambda k: k.dtype.name
)
def test_a_block_that_does_not_fit_what_the_first_one_settled_is_refused(second: Any) -> None:
    with pytest.raises(DataError, match=rf'row 2 is {second.dtype}.*float16.*dtype="float\d\d"'):
        stored(halves(NARROW, second))


def test_blocks_that_fit_or_a_dtype_that_was_asked_for_are_taken() -> None:
    small = np.array([[1], [2]], np.uint8)
    np.testing.assert_array_equal(
        stored(halves(WIDE, NARROW, small))[:, 0], [637.0851, 0.1, 1.5, 2.5, 1, 2]
    )
    np.testing.assert_array_equal(
        stored(halves(NARROW, small, np.empty((0, 1))))[:, 0], [1.5, 2.5, 1, 2]
    )
    np.testing.assert_array_equal(stored(halves(NARROW, WIDE), dtype="float64")[2:], WIDE)
