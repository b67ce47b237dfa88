"""Check that targets become labels or values, and that doubtful ones are refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamkern.basics.errors import DataError, NonFiniteError
from streamkern.cli import main
from streamkern.ingest.conform import RawBlock
from streamkern.ingest.ingest import ingest
from streamkern.ingest.targets import TargetConverter
from tests.ingest.ingested import ingest_and_read
from tests.ingest.reader_table import TEXTS
from tests.raw_files import memory_url, write_hdf5

LABELS = ["0", "1", "-3", "2.0", "0.5", "1e3", "NA", "NULL", "None", "nan", "cat", "", "1_0"]


def write_targets(path: Path, targets: Any) -> Path:
    """Write a CSV with these targets; return its path."""
    path.write_text("a,t\n" + "".join(f"{k}.5,{target}\n" for k, target in enumerate(targets)))
    return path


def inferred_targets(targets: list[str], cuts: list[int]) -> Any:
    """Return the kind that "auto" finds for targets in these blocks: labels or values; None if they
    are refused."""
    full = RawBlock(np.zeros((len(targets), 1)), np.array(targets), "t.csv", 0)
    edges = sorted({0, *(cut for cut in cuts if cut < len(targets)), len(targets)})
    blocks = [full.part(a, b) for a, b in pairwise(edges)]
    try:
        actual = TargetConverter(blocks[0])
        converted = np.concatenate([actual.convert(block) for block in blocks])
    except DataError:
        return None
    return [actual.labels[k] for k in converted] if actual.are_classes else converted.tolist()


@settings(max_examples=300, deadline=None)
@given(
    targets=st.lists(st.sampled_from(LABELS), min_size=1, max_size=8),
    cuts=st.lists(st.integers(1, 7), max_size=4),
)
def test_target_kind_does_not_depend_on_block_size(targets: list[str], cuts: list[int]) -> None:
    assert inferred_targets(targets, cuts) == inferred_targets(targets, [])


@settings(max_examples=100, deadline=None)
@given(targets=st.lists(st.sampled_from(LABELS), min_size=1, max_size=8))
def test_mixed_targets_do_not_become_classes(targets: list[str]) -> None:
    actual = inferred_targets(targets, [1])
    if isinstance(actual, list) and isinstance(actual[0], str):
        integers = [label.lstrip("-").isdigit() for label in actual]
        assert actual == targets
        assert all(integers) or not any(integers)


@pytest.mark.parametrize("late", ["NA", "NULL", "None", "nan", "0.5", "x", "1e3"])
@pytest.mark.parametrize("memory", ["1 MiB", "1 GiB"])
def test_fraction_or_word_among_integer_labels_is_refused_by_row(
    tmp_path: Path, late: str, memory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_targets(tmp_path / "t.csv", [*(k % 3 for k in range(40_000)), late, 1])
    arguments = [
        "ingest",
        path,
        tmp_path / "o",
        "--y",
        "t",
        "--memory",
        memory,
        "--chunk-mb",
        2**-5,
    ]
    assert main.run_command([str(word) for word in arguments]) == 2
    message = capsys.readouterr().err
    if late in ("0.5", "x", "1e3"):
        assert f"row 40000 is {late!r}" in message
        assert "--targets values" in message
    else:
        assert f"row 40000 is missing ({late!r})" in message
        assert "--drop-missing-targets" in message
    assert ("--targets classes" in message) == (late != "0.5")  # a fraction is no label
    assert list(tmp_path.iterdir()) == [path]


def test_infinite_target_is_refused_among_integers_and_values(tmp_path: Path) -> None:
    """Check that the remedy is not to treat all as values, which would be refused again."""
    for target in ("inf", "-Infinity", "1e400"):
        path = write_targets(tmp_path / "t.csv", [0, 1, target, 1])
        for targets in ("auto", "values"):
            with pytest.raises(NonFiniteError, match=r"row 2 is .*, but targets must be finite"):
                ingest(path, memory_url(), y="t", targets=targets)


def test_target_kind_can_be_requested(
    tmp_path: Path,
) -> None:
    path = write_targets(tmp_path / "a.csv", [0, "NA", 1])
    assert ingest(path, memory_url(), y="t", targets="classes").classes == ("0", "1", "NA")
    path = write_targets(tmp_path / "b.csv", [3, "0.5", 1])
    assert ingest(path, memory_url(), y="t", targets="values").classes is None
    path = write_targets(tmp_path / "c.csv", ["0.5", 3, 1])
    assert ingest(path, memory_url(), y="t").classes is None


@pytest.mark.parametrize("target", ["1_0", "\u0661"])
def test_formatted_numbers_in_targets_and_weights_are_refused(tmp_path: Path, target: str) -> None:
    path = write_targets(tmp_path / "a.csv", ["0.5", target])
    with pytest.raises(DataError, match=f"row 1 is '{target}', a number with"):
        ingest(path, memory_url(), y="t")
    path.write_text(f"a,t,w\n1,0.5,1\n2,0.5,{target}\n")
    with pytest.raises(
        DataError, match=f"sample weight of .* is '{target}', which is not a number"
    ):
        ingest(path, memory_url(), y="t", sample_weight="w")


@pytest.mark.parametrize("kind", ["npz", "h5", "memory"])
def test_integer_column_vector_of_labels_is_classes(tmp_path: Path, kind: str) -> None:
    X, y = np.arange(8, dtype=np.float32).reshape(4, 2), np.array([[3], [0], [3], [7]])
    path = tmp_path / f"d.{kind}"
    if kind == "npz":
        np.savez(path, X=X, y=y)
    elif kind == "h5":
        write_hdf5(path, X=X, y=y)
    spec, _, ids = ingest_and_read(X, y=y) if kind == "memory" else ingest_and_read(path)
    assert spec.classes == ("0", "3", "7")
    np.testing.assert_array_equal(ids, [1, 0, 1, 2])
    values = ingest(X, memory_url(), y=y + 0.5)
    assert (values.classes, values.n_outputs) == (None, 1)


@pytest.mark.slow
def test_targets_are_validated_like_features(tmp_path: Path) -> None:
    for name, cells in TEXTS.items():
        if name in ("integers", "fractions", "missing", "codes"):
            continue
        for column in ("x", "y"):
            rows = [f'"{cell}";{k}.5\n' if column == "x" else f'{k}.5;"{cell}"\n'
                    for k, cell in enumerate(cells)]  # fmt: skip
            (tmp_path / "t.csv").write_text("x;y\n" + "".join(rows))
            with pytest.raises(DataError):
                ingest(tmp_path / "t.csv", memory_url(), y="y")
        spec = ingest(tmp_path / "t.csv", memory_url(), y="y", targets="classes")
        assert len(spec.classes or ()) == 6, name


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.arange(300), "targets='values'"),
        (np.arange(300) // 5, "targets='values'"),
        (np.array([f"name {k}" for k in range(300)]), "y="),
        (np.array([f"{k % 40} kg" for k in range(1000)]), "without the unit"),
        (np.array([f"w{k // 5}" for k in range(300)], object), "y="),
    ],
)
def test_many_classes_of_few_rows_need_confirmation(labels: Any, message: str) -> None:
    X = np.random.default_rng(0).normal(size=(len(labels), 2))
    with pytest.raises(DataError, match=f"would be .* classes.*{message}.*targets='classes'"):
        ingest(X, memory_url(), y=labels)
    spec = ingest(X, memory_url(), y=labels, targets="classes")
    assert len(spec.classes or ()) == len(set(labels.tolist()))


@pytest.mark.parametrize("n_classes", [2, 10, 26, 30])
def test_many_classes_with_many_rows_need_no_confirmation(n_classes: int) -> None:
    labels = np.arange(20 * n_classes) % n_classes
    X = np.ones((len(labels), 1))
    assert len(ingest(X, memory_url(), y=labels).classes or ()) == n_classes
    words = np.array([f"class {k}" for k in labels])
    assert len(ingest(X, memory_url(), y=words).classes or ()) == n_classes
    ordinals = np.array(["1st", "2nd", "3rd", "4th"])[labels % 4]
    assert len(ingest(X, memory_url(), y=ordinals).classes or ()) <= 4


def test_many_integers_that_become_classes_give_warning() -> None:
    with pytest.warns(UserWarning, match=r"become 40 classes.*targets='values'"):
        ingest(np.ones((800, 1)), memory_url(), y=np.arange(800) % 40)


@pytest.mark.parametrize("kind", ["npy", "parquet", "array"])
def test_labels_above_2_63_are_exact(tmp_path: Path, kind: str) -> None:
    y = np.array([2**64 - 1, 0, 2**63, 2**64 - 1], np.uint64)
    X = np.eye(4, dtype=np.float32)
    inputs: Any = X
    if kind == "npy":
        np.save(tmp_path / "X.npy", X)
        inputs = tmp_path / "X.npy"
    elif kind == "parquet":
        inputs = tmp_path / "t.parquet"
        pq.write_table(pa.table({"X": X.tolist(), "y": y}), inputs)
    spec = ingest(inputs, tmp_path / "s", y="y" if kind == "parquet" else y, shuffle=False)
    assert spec.classes == ("0", str(2**63), str(2**64 - 1))
    assert spec.class_counts == (1, 1, 2)


@pytest.mark.parametrize("first", ["true", "False", "TRUE"])
def test_true_and_false_in_a_file_are_one_and_zero(tmp_path: Path, first: str) -> None:
    """Check that a CSV gives the values that the same booleans of an array give."""
    texts = [first, "true", "false", "True", "FALSE"] * 40
    truths = np.array([text.lower() == "true" for text in texts])
    path = write_targets(tmp_path / "t.csv", texts)
    y = ingest_and_read(path, y="t", targets="values").y
    np.testing.assert_array_equal(y[:, 0], truths)
    features = np.arange(len(truths))[:, None] + 0.5
    expected = ingest_and_read(features, y=truths, targets="values").y
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(("cut", "other"), [(1, "1"), (3, "0.5"), (7, "yes")])
def test_another_target_among_true_and_false_is_refused(cut: int, other: str) -> None:
    """Check that the rule does not depend on the block in which the other target is."""
    y = np.array([["0.5", "true"]] * 7 + [["true", "false"]] + [["0.5", other]])
    y[7, 0] = "2"
    full = RawBlock(np.zeros((len(y), 1)), y, "t.csv", 0)
    first, rest = full.part(0, cut), full.part(cut, len(y))
    converter = TargetConverter(first, "values", as_text=True)
    np.testing.assert_array_equal(converter.convert(first), [[0.5, 1.0]] * cut)
    with pytest.raises(DataError, match=f"row 8 is '{other}', but .* first row is true or false"):
        converter.convert(rest)
    numbers_first = RawBlock(np.zeros((2, 1)), np.array(["1", "true"]), "t.csv", 0)
    with pytest.raises(DataError, match="row 1 is 'true', not a number"):
        TargetConverter(numbers_first, "values", as_text=True).convert(numbers_first)


@pytest.mark.parametrize("labels", [["1.5", "2"], ["2", "3", "-0.5"]])
def test_fractions_are_no_classes_in_any_file(tmp_path: Path, labels: list[str]) -> None:
    """Check that a CSV follows the rule of floats."""
    with pytest.raises(
        DataError, match=r"labels of .*t.csv are numbers with fractions, .*'values'"
    ):
        ingest(
            write_targets(tmp_path / "t.csv", labels * 30), tmp_path / "a", y="t", targets="classes"
        )
    floats = np.array(labels * 30, float)
    with pytest.raises(DataError, match="class labels are integers or text"):
        ingest(np.ones((len(floats), 1)), tmp_path / "b", y=floats, targets="classes")
    words = [*labels, "other"] * 30
    spec = ingest(
        write_targets(tmp_path / "w.csv", words), tmp_path / "c", y="t", targets="classes"
    )
    assert spec.classes == tuple(sorted({*labels, "other"}))


def test_large_unsigned_labels_of_a_csv_are_integers(tmp_path: Path) -> None:
    """Check that a file without types gives the classes of a file with types."""
    labels = np.array([2**63 + 1, 2**64 - 1, 7], np.uint64)[np.arange(60) % 3]
    x = np.arange(60.0)
    lines = [f"{value},{label}" for value, label in zip(x, labels, strict=True)]
    (tmp_path / "a.csv").write_text("x,label\n" + "\n".join(lines) + "\n")
    pq.write_table(pa.table({"x": x, "label": labels}), tmp_path / "a.parquet")
    specs = [
        ingest(tmp_path / name, tmp_path / f"{name}.zarr", y="label", targets="classes")
        for name in ("a.csv", "a.parquet")
    ]
    assert specs[0].classes == specs[1].classes == ("7", str(2**63 + 1), str(2**64 - 1))
    assert specs[0].label_dtype == specs[1].label_dtype == np.dtype(np.uint64).str
