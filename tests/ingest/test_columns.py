"""Columns have names: they are chosen, put in order, and refused, by name."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamkern.basics.errors import ConfigError, DataError, StreamkernError
from streamkern.cli.main import main
from streamkern.ingest.columns import Asked, split_columns
from streamkern.ingest.ingest import ingest
from streamkern.ingest.readers import open_reader
from streamkern.store.store import open_store

VALUES = {"a": [1.0, 2.0], "b": [3.0, 4.0], "c": [5.0, 6.0], "label": ["x", "y"]}


def write(path: Path, order: str) -> Path:
    """A table with the columns of `order`, "l" for the label; the format by the ending."""
    names = ["label" if k == "l" else k for k in order]
    columns = [VALUES.get(name, [7.0, 8.0]) for name in names]
    if path.suffix == ".parquet":
        pq.write_table(pa.table(dict(zip(names, columns, strict=True))), path)
    else:
        rows = zip(*columns, strict=True)
        path.write_text("\n".join(",".join(map(str, row)) for row in (names, *rows)) + "\n")
    return path


def read(inputs: Any, y: Any = "label", **wish: Any) -> tuple[Any, Any, Any]:
    """(X, y, reader) of all rows."""
    with ExitStack() as files:
        reader = open_reader(inputs, y, files, **wish)
        blocks = list(reader.blocks(0, 1 << 20))
    X, targets = (np.concatenate([block[k] for block in blocks]) for k in (0, 1))
    return X, targets, reader


KINDS = pytest.mark.parametrize("kind", ["csv", "parquet"])


@KINDS
@pytest.mark.parametrize("order", ["".join(k) for k in itertools.permutations("abl")])
def test_another_order_of_columns_is_put_right(tmp_path: Path, kind: str, order: str) -> None:
    """U3."""
    X, y, reader = read(write(tmp_path / f"t.{kind}", order), columns=["a", "b"])
    np.testing.assert_array_equal(X, [[1, 3], [2, 4]])
    assert y.tolist() == ["x", "y"]
    assert (reader.columns, reader.target_columns) == (("a", "b"), ("label",))


@KINDS
@pytest.mark.parametrize(
    ("order", "said"),
    [
        ("al", r"lacks 'b': its columns must be 'a', 'b'"),
        ("bacl", r"has 'c' besides"),
        ("cdl", r"lacks 'a', 'b' and has 'c', 'd' besides"),
    ],
)
def test_missing_and_extra_columns_are_refused_by_name(
    tmp_path: Path, kind: str, order: str, said: str
) -> None:
    """U3."""
    path = write(tmp_path / f"t.{kind}", order)
    with pytest.raises(DataError, match=rf"t\.{kind} {said}"):
        read(path, columns=["a", "b"])


@KINDS
def test_columns_are_chosen_by_name_or_position(tmp_path: Path, kind: str) -> None:
    """U3."""
    path = write(tmp_path / f"t.{kind}", "abcl")
    for x in (["c", "a"], [2, 0], [-2, "a"]):
        X, _, reader = read(path, x=x)
        np.testing.assert_array_equal(X, [[5, 1], [6, 2]])
        assert reader.columns == ("c", "a")
    X, _, _ = read(path, x=["c", "a"], columns=["a", "c"])
    np.testing.assert_array_equal(X, [[1, 5], [2, 6]])
    for wrong in (["nope"], [9], ["a", "a"], ["label", "a"], []):
        with pytest.raises(DataError):
            read(path, x=wrong)
    _, y, reader = read(path, y=["b", "c"], x=["a"])
    assert (y.shape, reader.target_columns) == ((2, 2), ("b", "c"))


@KINDS
def test_features_alone_leave_the_target_out_where_it_is_there(tmp_path: Path, kind: str) -> None:
    """U1."""
    for order in ("abl", "ba"):
        X, y, reader = read(write(tmp_path / f"t.{kind}", order), targets=False, columns=("a", "b"))
        np.testing.assert_array_equal(X, [[1, 3], [2, 4]])
        assert y.shape == (2, 0)
        assert reader.columns == ("a", "b")
        assert not reader.target_columns
    with pytest.raises(DataError, match="has 'c' besides"):
        read(write(tmp_path / f"t.{kind}", "abc"), targets=False, columns=("a", "b"))


def test_features_alone_of_arrays(tmp_path: Path) -> None:
    """U1."""
    rows = np.arange(12.0).reshape(4, 3)
    np.save(tmp_path / "X.npy", rows)
    np.savez(tmp_path / "d.npz", X=rows)
    ingest(rows, tmp_path / "s", y=[0, 1, 0, 1], shuffle=False)
    for inputs in (rows, *(tmp_path / name for name in ("X.npy", "d.npz", "s"))):
        X, y, reader = read(inputs, y=None, targets=False)
        np.testing.assert_array_equal(X, rows)
        assert (y.shape, reader.columns) == ((4, 0), None)


@KINDS
def test_several_files_go_by_the_names_of_the_first(tmp_path: Path, kind: str) -> None:
    """U3."""
    files = [
        write(tmp_path / f"{i}.{kind}", order) for i, order in enumerate(("abcl", "lcba", "bacl"))
    ]
    for x, y in ((None, -1), (None, "label"), ([0, 1, 2], -1)):
        X, targets, reader = read(files, y=y, x=x)
        np.testing.assert_array_equal(X, [[1, 3, 5], [2, 4, 6]] * 3)
        assert targets.tolist() == ["x", "y"] * 3
        assert reader.files == tuple((str(path), 2) for path in files)
        assert reader.n_rows == 6
    with pytest.raises(DataError, match=rf"3\.{kind} lacks 'c'"):
        read([*files, write(tmp_path / f"3.{kind}", "abl")])
    with pytest.raises(ConfigError, match="sample_weight=0 is a position"):
        read(files, sample_weight=0)
    X, _, _ = read(files, y="label", sample_weight="c")
    assert X.shape == (6, 2)


def test_a_file_without_header_does_not_go_with_one_that_has(tmp_path: Path) -> None:
    """U3."""
    (tmp_path / "bare.csv").write_text("1,3,0\n2,4,1\n")
    X, y, reader = read(tmp_path / "bare.csv", y=-1, columns=["a", "b"])
    np.testing.assert_array_equal(X, [[1, 3], [2, 4]])
    assert (reader.columns, y.tolist()) == (None, ["0", "1"])
    for pair in (("bare.csv", "t.csv"), ("t.csv", "bare.csv")):
        write(tmp_path / "t.csv", "abl")
        with pytest.raises(DataError, match=r"csv"):
            read([tmp_path / name for name in pair], y=-1)


def test_the_command_line_chooses_columns(tmp_path: Path) -> None:
    """U3."""
    path = write(tmp_path / "t.csv", "abcl")
    command = ["ingest", str(path), str(tmp_path / "s"), "--x", "c,a", "--y", "label"]
    assert main([*command, "--no-shuffle"]) == 0
    rows = open_store(tmp_path / "s").read_chunk(0)[0]
    np.testing.assert_array_equal(rows, [[5, 1], [6, 2]])


def test_wishes_for_columns_never_end_in_another_error() -> None:
    names = ["a", "b", "1"]
    wishes = [None, "a", "1", "-1", "٣", "9" * 5000, 1, -3, 7, ["a", 0], []]
    for x, y, w, targets in itertools.product(wishes, wishes, wishes, (True, False)):
        try:
            split = split_columns(names, Asked(x, y, w, targets), "t")
        except StreamkernError:
            continue
        chosen = [*split.features, *split.targets, *split.weights]
        assert len(set(chosen)) == len(chosen)
        assert set(chosen) <= set(names)
