"""Check `predict_to`: order of rows, formats, files that are kept, and interrupted calls."""

from __future__ import annotations

import csv
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import tensorstore
import zarr

from streamkern.basics.errors import ConfigError, DataError, MissingDependencyError
from streamkern.filesystem.scratch import Scratch, scratch_folder
from streamkern.predict import prediction_buffer, prediction_files, prediction_table
from streamkern.predict.prediction_table import PredictionTable, output_labels
from streamkern.stream.sources.arrays import ArraySource
from streamkern.train.model import kernel_model as model_module
from streamkern.train.model.kernel_model import KernelModel
from streamkern.train.saved_model import load_model
from streamkern.train.train import Result
from tests.runs import (
    CLASSES,
    N_TEST,
    Array,
    C,
    array_source,
    arrays,
    finished,
    process,
    settings,  # fmt: skip
)
from tests.store_damage import tree

FORMATS = (".zarr", ".npy", ".csv", ".parquet")


class Shuffled(ArraySource):
    """Rows whose numbers are not in the order of reading, as in a shuffled store."""

    def __init__(self, X: Array, numbers: Array, unit_rows: int = 16) -> None:
        super().__init__(X, unit_rows=unit_rows)
        self.numbers = numbers.astype(np.uint64)

    def source_rows(self, u: int) -> Array:
        return self.numbers[slice(*self.unit_bounds(u))]


@pytest.fixture(scope="module")
def model(result: Result) -> KernelModel:
    return result.model


@pytest.fixture(scope="module")
def regression_result() -> Result:
    """Return a run with two targets that are values."""
    X, _ = arrays()
    return finished(settings(), source=ArraySource(X, X[:, :2], unit_rows=16))


@pytest.fixture
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    set_small_slabs(monkeypatch.setattr)


def set_small_slabs(set_attribute: Any) -> None:
    """Set small tiles, slabs and chunks, whose borders fall on different test rows."""
    set_attribute(model_module, "EVALUATED_ROWS", 10)
    set_attribute(prediction_table, "CHUNK_BYTES", 17 * C * 4)
    set_attribute(prediction_buffer, "BUFFER_SLAB_BYTES", 40 * (8 + C * 4))
    set_attribute(prediction_buffer, "PENDING_BYTES", 23 * (8 + C * 4))
    set_attribute(prediction_buffer, "SAVE_EVERY_S", 0.0)


def shuffled_test_rows(seed: int = 3) -> tuple[Shuffled, Array]:
    """Return the test rows in another order, and their numbers."""
    X, _ = arrays(N_TEST, 5)
    numbers = np.random.default_rng(seed).permutation(N_TEST)
    return Shuffled(X[numbers], numbers), numbers


def read_table(path: Path) -> dict[str, Any]:
    """Return the row numbers, the labels and the values (n, c) of a CSV or Parquet file."""
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            header, *rows = csv.reader(file)
        columns: dict[str, Any] = dict(zip(header, zip(*rows, strict=True), strict=True))
    else:
        columns = pyarrow.parquet.read_table(path).to_pydict()
    scores = [np.array(v, np.float64) for k, v in columns.items() if k not in ("row", "label")]
    return {
        "row": np.array(columns["row"], np.int64),
        "label": list(columns.get("label", ())),
        "values": np.stack(scores, axis=1),
    }


# -- order ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize("suffix", FORMATS)
def test_predictions_of_shuffled_rows_have_source_order_or_numbers(
    model: KernelModel, truth: Array, suffix: str, tmp_path: Path
) -> None:
    source, numbers = shuffled_test_rows()
    for order in ("source", "store") if suffix != ".npy" else ("source",):
        expected, rows = (
            (truth, np.arange(N_TEST)) if order == "source" else (truth[numbers], numbers)
        )
        path = tmp_path / f"{order}{suffix}"
        assert model.predict_to(source, path, order=order, values=True) == N_TEST
        labels = np.array(CLASSES)[expected.argmax(axis=1)].tolist()
        if suffix == ".npy":
            values = np.load(path)
        elif suffix == ".zarr":
            group = zarr.open_group(str(path), mode="r")
            assert set(group.keys()) == {"values", "labels"} | (
                {"row"} if order == "store" else set()
            )
            values = group["values"][...]
            assert group["labels"][...].tolist() == labels
            if order == "store":
                np.testing.assert_array_equal(group["row"][...], rows)
        else:
            table = read_table(path)
            values = table["values"]
            assert table["label"] == labels
            np.testing.assert_array_equal(table["row"], rows)
        np.testing.assert_allclose(values, expected, atol=1e-4)
    np.testing.assert_allclose(model.predict(source), truth, atol=1e-4)
    assert {name.partition(".")[2] for name in os.listdir(tmp_path)} == {suffix[1:]}


def test_damaged_row_numbers_are_refused(model: KernelModel, tmp_path: Path) -> None:
    source, numbers = shuffled_test_rows()
    for damage in (numbers[6], 1 << 40):
        source.numbers[5] = damage
        for predict in (model.predict, lambda rows: model.predict_to(rows, tmp_path / "out.csv")):
            with pytest.raises(DataError, match=r"numbers.* are damaged"):
                predict(source)
    assert os.listdir(tmp_path) == []


# -- formats --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_slabs")
def test_predictions_are_a_zarr_group(model: KernelModel, truth: Array, tmp_path: Path) -> None:
    url = tmp_path / "out.zarr"
    model.predict_to(array_source(N_TEST, 5), str(url))
    group = zarr.open_group(str(url), mode="r")
    assert group["labels"][...].tolist() == [CLASSES[k] for k in truth.argmax(axis=1)]
    assert group.attrs["classes"] == list(CLASSES)
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(url / "values")}}
    other_reader = tensorstore.open(spec, read=True).result().read().result()
    np.testing.assert_array_equal(other_reader, group["values"][...])


def test_predictions_record_their_origin(run_dir: Path, result: Result, tmp_path: Path) -> None:
    loaded = load_model(run_dir, threads=1)
    source = array_source(N_TEST, 5)
    loaded.predict_to(source, tmp_path / "p.zarr")
    loaded.predict_to(source, tmp_path / "p.parquet")
    loaded.backend.close()
    mark: Any = zarr.open_group(str(tmp_path / "p.zarr"), mode="r").attrs["streamkern"]
    assert (mark["kind"], mark["status"], mark["order"]) == ("predictions", "complete", "source")
    assert (mark["model"]["run"], mark["model"]["step"]) == (str(run_dir), 14)
    assert mark["data"]["fingerprint"] == source.fingerprint
    assert mark["classes"] == list(CLASSES)
    schema = pyarrow.parquet.read_schema(tmp_path / "p.parquet")
    record = json.loads(schema.metadata[b"streamkern"])
    assert record["model"] == mark["model"]


def test_npy_holds_labels_of_classes_or_values(
    model: KernelModel, regression_result: Result, tmp_path: Path
) -> None:
    source = array_source(N_TEST, 5)
    model.predict_to(source, tmp_path / "labels.npy")
    labels = np.load(tmp_path / "labels.npy", allow_pickle=False)
    values = model.predict(source)
    np.testing.assert_array_equal(labels, np.array(CLASSES)[values.argmax(axis=1)])
    model.predict_to(source, tmp_path / "scores.npy", values=True)
    np.testing.assert_array_equal(np.load(tmp_path / "scores.npy"), values)
    regression_result.model.predict_to(source, tmp_path / "values.npy")
    np.testing.assert_array_equal(
        np.load(tmp_path / "values.npy"), regression_result.model.predict(source)
    )


def test_regression_predictions_have_no_labels(regression_result: Result, tmp_path: Path) -> None:
    regression_result.model.predict_to(array_source(N_TEST, 5), tmp_path / "out")
    group = zarr.open_group(str(tmp_path / "out"), mode="r")
    assert set(group.keys()) == {"values"}
    regression_result.model.predict_to(array_source(N_TEST, 5), tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text().startswith("row,value_0,value_1\n0,")
    written = np.float64(read_table(tmp_path / "out.csv")["values"])
    np.testing.assert_array_equal(written, group["values"][:])


# -- foreign files --------------------------------------------------------------------------------


def needs_attributes(folder: Path) -> None:
    """Skip a test where files have no extended attributes."""
    try:
        (folder / "a").touch()
        os.setxattr(folder / "a", "user.a", b"a")
    except (AttributeError, OSError):
        pytest.skip("needs a file system with extended attributes")
    finally:
        (folder / "a").unlink()


@pytest.mark.parametrize("suffix", FORMATS)
def test_predictions_are_overwritten_only_on_request(
    model: KernelModel, suffix: str, tmp_path: Path
) -> None:
    if suffix in (".csv", ".npy"):
        needs_attributes(tmp_path)
    url = tmp_path / f"out{suffix}"
    model.predict_to(array_source(20, 5), url)
    files_before = tree(tmp_path)
    with pytest.raises(ConfigError, match="already exists"):
        model.predict_to(array_source(30, 6), url)
    assert tree(tmp_path) == files_before
    assert model.predict_to(array_source(30, 6), url, overwrite=True) == 30
    assert os.listdir(tmp_path) == [url.name]
    model.predict_to(array_source(30, 6), new := tmp_path / f"new{suffix}")
    contents = [path.read_bytes() if path.is_file() else tree(path) for path in (url, new)]
    assert contents[0] == contents[1]


@pytest.mark.parametrize("suffix", [".csv", ".npy"])
def test_changed_or_copied_file_is_not_overwritten(
    model: KernelModel, suffix: str, tmp_path: Path
) -> None:
    changed, copied = tmp_path / f"changed{suffix}", tmp_path / f"copied{suffix}"
    model.predict_to(array_source(20, 5), changed)
    copied.write_bytes(changed.read_bytes())
    with changed.open("ab") as file:
        file.write(b"mine")
    files_before = tree(tmp_path)
    for path in (changed, copied):
        with pytest.raises(ConfigError, match="or was changed since"):
            model.predict_to(array_source(30, 6), path, overwrite=True)
        with pytest.raises(ConfigError, match="or delete it"):
            model.predict_to(array_source(30, 6), path)
    assert tree(tmp_path) == files_before


def test_only_own_predictions_are_overwritten(model: KernelModel, tmp_path: Path) -> None:
    """Check that a file that is no output of `predict` is not overwritten."""
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "cat.jpg").write_bytes(b"meow")
    zarr.create_group(str(tmp_path / "mine.zarr")).create_array("values", shape=(3,), dtype="f4")
    zarr.create_group(str(tmp_path / "noted.zarr"), attributes={"note": "hand made"})
    zarr.create_group(str(tmp_path / "train.zarr")).create_array("X", shape=(3,), dtype="f4")
    zarr.create_array(str(tmp_path / "array.zarr"), shape=(3,), dtype="f4")
    np.save(tmp_path / "mine.npy", np.arange(3))
    (tmp_path / "mine.csv").write_text("row,label\n")
    pyarrow.parquet.write_table(pyarrow.table({"row": [1]}), tmp_path / "mine.parquet")
    (tmp_path / "text.parquet").write_text("not a table")
    (tmp_path / "folder.csv").mkdir()
    files_before = tree(tmp_path)
    for location in [tmp_path, *tmp_path.iterdir(), photos / "cat"]:
        if location.name in ("cat", "photos"):
            continue
        with pytest.raises(
            (ConfigError, DataError), match=r"(streamkern did not write|not written by streamkern)"
        ):
            model.predict_to(array_source(20, 5), location, overwrite=True)
        with pytest.raises(
            (ConfigError, DataError), match=r"exists|overwrite|folder|did not write"
        ):
            model.predict_to(array_source(20, 5), location)
    assert tree(tmp_path) == files_before


@pytest.mark.parametrize("suffix", FORMATS)
def test_output_created_during_prediction_is_not_replaced(
    model: KernelModel, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that computed predictions stay too, and that the same call resumes when the path is
    free."""
    url, other = tmp_path / f"p{suffix}", tmp_path / f"other{suffix}"
    model.predict_to(array_source(20, 6), other)
    expected = tree(tmp_path)

    def create_output(*_: object) -> None:
        if other.exists():
            other.rename(url)

    with pytest.raises(ConfigError, match="already exists"):
        model.predict_to(array_source(N_TEST, 5), url, progress=create_output)
    url.rename(other)
    assert scratch_folder(url, ending=".predict").exists()
    monkeypatch.setattr("streamkern.predict.predictions._compute_missing", None)
    assert model.predict_to(array_source(N_TEST, 5), url) == N_TEST
    assert sorted(os.listdir(tmp_path)) == sorted([url.name, other.name])
    assert expected.items() <= tree(tmp_path).items()


@pytest.mark.parametrize("links", [True, False])
def test_file_created_before_rename_is_not_replaced(
    model: KernelModel, links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, link = tmp_path / "p.csv", os.link

    def link_late(old: Path, new: Path) -> None:
        new.write_text("mine")
        link(old, new)

    def no_links(old: Path, new: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(old))

    monkeypatch.setattr(os, "link", link_late if links else no_links)
    if links:
        with pytest.raises(ConfigError, match="already exists"):
            model.predict_to(array_source(20, 5), url)
        assert url.read_text() == "mine"
        url.unlink()
        monkeypatch.undo()
    assert model.predict_to(array_source(20, 5), url) == 20
    assert os.listdir(tmp_path) == ["p.csv"]


def test_call_killed_between_link_and_unlink_is_complete(
    run_dir: Path, result: Result, tmp_path: Path
) -> None:
    url = tmp_path / "p.csv"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streamkern.predict.prediction_files.Path.unlink", interrupt)
        with pytest.raises(KeyboardInterrupt):
            result.model.predict_to(array_source(20, 5), url)
    assert url.stat().st_nlink == 2
    content_before = url.read_bytes()
    assert result.model.predict_to(array_source(20, 5), url) == 20
    assert (os.listdir(tmp_path), url.read_bytes()) == (["p.csv"], content_before)


def interrupt(path: Path, missing_ok: bool = False) -> None:
    """Raise KeyboardInterrupt in place of `Path.unlink`."""
    raise KeyboardInterrupt


def test_predictions_that_cannot_be_written_are_kept(
    model: KernelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a missing package is reported before the computation, and that other errors lose
    no predictions."""
    url = tmp_path / "p.parquet"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow.parquet", None)
        with pytest.raises(MissingDependencyError, match="pip install"):
            model.predict_to(array_source(20, 5), url)
    assert os.listdir(tmp_path) == []

    def raise_missing(*arguments: object) -> None:
        raise MissingDependencyError("gone by now")

    with monkeypatch.context() as patch:
        patch.setitem(prediction_files.FILE_WRITERS, ".parquet", raise_missing)
        with pytest.raises(MissingDependencyError, match="gone by now"):
            model.predict_to(array_source(20, 5), url)
    monkeypatch.setattr("streamkern.predict.predictions._compute_missing", raise_missing)
    assert model.predict_to(array_source(20, 5), url) == 20
    assert os.listdir(tmp_path) == ["p.parquet"]


@pytest.mark.parametrize(
    ("classes", "dtype"), [(["0", "1"], None), (["0", "1"], "O"), (["a", "<missing>"], "O")]
)
def test_lost_predictions_are_read_as_missing(classes: list[str], dtype: Any) -> None:
    labels = output_labels(classes, dtype)
    table = PredictionTable(6, np.dtype(np.float32), 2, labels, None, numbered=True)
    group = zarr.create_group(zarr.storage.MemoryStore())
    prediction_files.write_zarr(group, table, [(0, np.arange(3), np.ones((3, 2), np.float32))])
    assert group["labels"][:3].tolist() == [labels[0]] * 3
    assert not set(group["labels"][3:].tolist()) & set(labels.tolist())
    assert group["row"][...].tolist() == [0, 1, 2, *[2**64 - 1] * 3]
    assert np.isnan(group["values"][3:]).all()


def test_foreign_files_beside_predictions_are_kept(model: KernelModel, tmp_path: Path) -> None:
    """Check that other files in the folder stay."""
    url = tmp_path / "p.zarr"
    model.predict_to(array_source(20, 5), url)
    (url / "notes.txt").write_text("keep")
    (url / "values" / "notes.txt").write_text("keep")
    model.predict_to(array_source(30, 6), url, overwrite=True)
    assert (url / "notes.txt").read_text() == (url / "values" / "notes.txt").read_text() == "keep"


def test_foreign_folder_is_not_used_as_scratch(model: KernelModel, tmp_path: Path) -> None:
    scratch = scratch_folder(tmp_path / "p.csv", ending=".predict")
    scratch.mkdir()
    for name in ("notes.txt", "000000000.rows"):
        (scratch / name).write_text("keep")
        files_before = tree(tmp_path)
        with pytest.raises(DataError, match="streamkern did not write"):
            model.predict_to(array_source(20, 5), tmp_path / "p.csv")
        assert tree(tmp_path) == files_before
        (scratch / name).unlink()
    model.predict_to(array_source(20, 5), tmp_path / "p.csv")
    assert os.listdir(tmp_path) == ["p.csv"]


def test_concurrent_prediction_is_refused(model: KernelModel, tmp_path: Path) -> None:
    with Scratch(scratch_folder(tmp_path / "p.csv", ending=".predict")) as other_scratch:
        other_scratch.append("000000000.rows", np.zeros(1, np.uint8))
        with pytest.raises(DataError, match="in use by another call"):
            model.predict_to(array_source(20, 5), tmp_path / "p.csv")


@pytest.mark.parametrize(
    ("place", "options", "message"),
    [
        ("p.txt", {}, "ends in .zarr, .npy or .csv or .parquet"),
        ("p.npy", {"order": "store"}, "holds a single array"),
        ("p.zarr", {"order": "rows"}, 'use "source" or "store"'),
        ("memory://p/p.csv", {}, "where only .zarr can be written"),
    ],
)
def test_invalid_outputs_are_refused(
    model: KernelModel, place: str, options: dict[str, Any], message: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        model.predict_to(array_source(20, 5), place, **options)
    assert os.listdir(tmp_path) == []


# -- interruptions --------------------------------------------------------------------------------


def _predict_until_killed(run_dir: Path, url: Path, event: int) -> None:
    """Predict, and kill this process before its `event`-th change of files; 0: do not kill it."""
    set_small_slabs(setattr)
    model = load_model(run_dir, threads=1)
    n_calls = 0

    def count(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal n_calls
        changes = name.removeprefix("os.") in (
            "rename", "mkdir", "remove", "rmdir", "truncate", "link",
        )  # fmt: skip
        if name == "open":
            changes = isinstance(arguments[1], str) and not set(arguments[1]).isdisjoint("wax+")
        if changes and str(url.parent) in str(arguments[0]):
            n_calls += 1
            if n_calls == event:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    model.predict_to(shuffled_test_rows()[0], url, overwrite=True)


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
@pytest.mark.parametrize("suffix", FORMATS)
def test_killed_predictions_resume_to_same_bytes(
    run_dir: Path, result: Result, suffix: str, tmp_path: Path
) -> None:
    """Kill the command by SIGKILL again and again, each time a little later."""
    uninterrupted = tmp_path / "once" / f"p{suffix}"
    child = process(_predict_until_killed, run_dir, uninterrupted, 0)
    child.join(60)
    assert child.exitcode == 0
    expected = tree(uninterrupted.parent)
    path = tmp_path / "again" / f"p{suffix}"
    folder = scratch_folder(path, ending=".predict")
    kills, codes = 0, []
    for event in (1, 2, 4, 9, 17, 29, 0):
        child = process(_predict_until_killed, run_dir, path, event)
        child.join(60)
        codes.append(child.exitcode)
        kills += child.exitcode == -9
        if child.exitcode == 0:
            break
        if suffix == ".zarr" and (path / "zarr.json").exists():
            mark: Any = zarr.open_group(str(path), mode="r").attrs["streamkern"]
            assert mark["status"] != "complete" or folder.exists()
        else:
            assert not path.exists() or tree(path.parent)[path.name] == expected[path.name]
    assert codes[-1] == 0, codes
    assert kills >= 4
    assert tree(path.parent) == expected


@pytest.mark.parametrize("suffix", [".zarr", ".csv"])
def test_call_killed_during_cleanup_is_complete(
    run_dir: Path, result: Result, suffix: str, tmp_path: Path
) -> None:
    """Check a kill during the removal of scratch files, by a call that removes nothing."""
    path = tmp_path / f"p{suffix}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scratch, "discard", lambda self: None)
        assert result.model.predict_to(shuffled_test_rows()[0], path) == N_TEST
    files_before = tree(tmp_path)
    assert len(os.listdir(tmp_path)) == 2
    assert result.model.predict_to(shuffled_test_rows()[0], path) == N_TEST
    assert os.listdir(tmp_path) == [path.name]
    remaining_files = {
        k: v for k, v in files_before.items() if k.startswith(path.name + "/") or k == path.name
    }
    assert tree(tmp_path) == remaining_files
    with pytest.raises(ConfigError, match="already exists"):
        result.model.predict_to(shuffled_test_rows()[0], path)


def test_unfinished_predictions_of_other_rows_restart(
    run_dir: Path, result: Result, tmp_path: Path
) -> None:
    child = process(_predict_until_killed, run_dir, tmp_path / "p.csv", 12)
    child.join(60)
    assert child.exitcode == -9
    other_rows = array_source(50, 6)
    assert result.model.predict_to(other_rows, tmp_path / "p.csv") == 50
    np.testing.assert_allclose(
        read_table(tmp_path / "p.csv")["values"], result.model.predict(other_rows)
    )
    assert os.listdir(tmp_path) == ["p.csv"]


@pytest.mark.parametrize("where", ["filesystem.scratch", "predict.prediction_files"])
def test_full_disk_is_reported_and_predictions_resume(
    model: KernelModel, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a full disk during the computation, and while the output is written."""

    def raise_disk_full(path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    model.predict_to(array_source(N_TEST, 5), tmp_path / "whole.csv")
    monkeypatch.setattr(f"streamkern.{where}.sync_file", raise_disk_full)
    with pytest.raises(
        OSError, match=r"no space left while writing .*p\.csv; .*same command again"
    ):
        model.predict_to(array_source(N_TEST, 5), tmp_path / "p.csv")
    assert not (tmp_path / "p.csv").exists()
    monkeypatch.undo()
    assert model.predict_to(array_source(N_TEST, 5), tmp_path / "p.csv") == N_TEST
    assert (tmp_path / "p.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["p.csv", "whole.csv"]
