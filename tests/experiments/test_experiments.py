"""Every experiment runs, is resumed, refuses what it cannot use; and the readers of its data."""

from __future__ import annotations

import argparse
import gzip
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamkern as sk
from experiments import run
from experiments.__main__ import main
from experiments.catalogue import NAMES, experiment_named
from experiments.data import Data, digits, fit
from experiments.experiment import Experiment, Point
from experiments.readers import read_data
from experiments.results import Measurement, Results, clearly, doubled, exponent, shown
from tests.raw_files import write_idx

pytest.importorskip("matplotlib")

WORDS = {True: "CONFIRMED", False: "NOT CONFIRMED", None: "MEASURED"}


def quick(name: str, folder: Path, *more: str) -> int:
    """Run an experiment in its small mode."""
    return main([name, "--quick", "--device", "cpu", "--folder", str(folder), *more])


def outcome(name: str, folder: Path, text: str) -> dict[str, Any]:
    """Return what a run left, checked against what it printed."""
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    verdict = found["verdict"]
    word = WORDS[verdict["confirmed"]]
    assert [s for s in text.splitlines() if s.startswith(f"{word}: ")] == [verdict["line"]]
    assert found["values"].keys() == found["tables"].keys() != set()
    for figure, curves in found["values"].items():
        for label, by_place in curves.items():
            column = [row[label] for row in found["tables"][figure] if label in row]
            places = sorted(by_place, key=float)
            means = [float(np.mean(by_place[x])) for x in places]
            assert [float(cell.split(" ± ")[0]) for cell in column] == pytest.approx(
                means, rel=6e-3
            )
            assert all(math.isfinite(v) for values in by_place.values() for v in values)
            if "test error, %" in figure:
                assert all(0 <= v <= 100 for values in by_place.values() for v in values)
    return found


# ------------------------------------------------------------------------------------ all of them


LONG = (
    "ep3_table1", "falkon_yelp", "ep3_projection", "ep3_fig5", "ep1_gradient_descent",
    "lecture_fourier_nystrom", "ep3_fig6", "ep3_table2",
)  # fmt: skip
"""Those that take longest in their small mode. What they call is tested by its own tests, and how
an experiment is run by the others."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] if n in LONG else []) for n in NAMES]
)
def test_experiment_writes_table_figure_and_verdict(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quick(name, tmp_path) == 0
    found = outcome(name, tmp_path, capsys.readouterr().out)
    experiment = experiment_named(name)
    assert found["published"] == experiment.published.splitlines()
    assert found["source"] == experiment.source
    if experiment.needs != "nothing" and experiment.stand_in_is == "scikit-learn's digits":
        shape = {"name": "digits", "rows": 1797, "row shape": [8, 8, 1]}
        assert found["data"] == shape | {"checksum": digits().checksum()}


def test_command_lists_experiments_and_names_unknown_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out.splitlines()[-len(NAMES) :]
    assert [line.split()[0] for line in listed] == list(NAMES)
    assert main(["ep9_fig9"]) == 2
    assert "there is no experiment ep9_fig9" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_axes_and_every_source_is_a_paper(name: str) -> None:
    experiment = experiment_named(name)
    assert experiment.source.startswith(("EP1", "EP3", "FALKON", "Lecture", "readme"))
    assert not experiment.claim.endswith(".")
    assert experiment.needs in ("rows", "images", "nothing")


# ------------------------------------------------------------------------------------- a kill


def counted(kill_at: int | None, measured: list[str]) -> Experiment:
    """Return an experiment of six points, of which one kills the process that measures it."""

    def points(data: Data, options: Any) -> Any:
        for k in range(6):

            def measure(k: int = k) -> list[Measurement]:
                if k == kill_at:
                    raise KeyboardInterrupt
                measured.append(f"point {k}")
                return [Measurement("figure", "label", k % 3, math.pi**k)]

            yield Point(f"point {k}", 1.0, measure)

    def judge(results: Results) -> Any:
        raise AssertionError("not asked here")

    return Experiment("EP3", "a claim", "x", points, judge, needs="nothing")


def a_run(folder: Path, experiment: Experiment, rows: int = 300) -> Results:
    """Measure the points of an experiment."""
    import argparse

    data = Data("made", np.empty((0, 1)), np.empty(0), None, None, own=False)
    options = argparse.Namespace(folder=folder, rows=rows, device="cpu")
    return run.run("ep3_fig2", experiment, data, options)


def test_killed_experiment_measures_only_missing_points(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    uninterrupted = a_run(tmp_path / "whole", counted(None, [])).values
    first, second = list[str](), list[str]()
    with pytest.raises(KeyboardInterrupt):
        a_run(tmp_path, counted(4, first))
    (journal,) = tmp_path.glob("ep3_fig2-*.jsonl")
    journal.write_text(journal.read_text() + '{"key": "point 4", "seco')  # a line cut by the kill
    assert a_run(tmp_path, counted(None, second)).values == uninterrupted
    assert first == [f"point {k}" for k in range(4)]
    assert second == ["point 4", "point 5"]
    third = list[str]()
    assert a_run(tmp_path, counted(None, third)).values == uninterrupted
    assert third == []


def test_changed_settings_are_measured_again_and_keep_old_results(tmp_path: Path) -> None:
    measured = list[str]()
    a_run(tmp_path, counted(None, measured))
    a_run(tmp_path, counted(None, measured), rows=400)
    assert len(measured) == 12
    a_run(tmp_path, counted(None, measured))
    assert len(measured) == 12


def test_changed_code_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that an experiment is measured again if another experiment, whose parts it uses, has
    changed."""
    path = tmp_path / "experiments"
    shutil.copytree(Path(run.__file__).parent, path)
    monkeypatch.setattr(run, "__file__", str(path / "run.py"))
    before = {name: run.code_of(name) for name in NAMES}
    with (path / "lecture_nystrom_error.py").open("a") as file:
        file.write("# changed\n")
    changed = [name for name in NAMES if run.code_of(name) != before[name]]
    assert changed == ["falkon_leverage", "lecture_nystrom_error"]


def test_changed_data_files_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "files"
    path.mkdir()
    seen = []
    for seed in range(2):
        rng = np.random.default_rng(seed)
        for part, n in (("train", 300), ("test", 50)):
            np.save(path / f"X_{part}.npy", rng.standard_normal((n, 3)).astype(np.float32))
            np.save(path / f"y_{part}.npy", rng.integers(0, 2, n))
        data = read_data(str(path), None, 400, tmp_path)
        again = read_data(str(path), None, 400, tmp_path)
        assert data.checksum() == again.checksum()
        seen.append(data.checksum())
    assert seen[0] != seen[1]


def test_points_with_equal_keys_are_refused(tmp_path: Path) -> None:
    experiment = counted(None, [])
    doubles = Experiment(
        "EP3", "a claim", "x",
        lambda data, options: [*experiment.points(data, options)] * 2, experiment.judge,
    )  # fmt: skip
    with pytest.raises(ValueError, match="one key"):
        a_run(tmp_path, doubles)


@pytest.mark.slow
def test_killed_experiment_gives_same_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uninterrupted, parts = tmp_path / "whole", tmp_path / "parts"
    assert quick("ep3_fig2", uninterrupted) == 0
    measure, count = run.Journal.measure, 0

    def killed(journal: run.Journal, point: Point) -> float:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return measure(journal, point)

    with monkeypatch.context() as patch:
        patch.setattr(run.Journal, "measure", killed)
        with pytest.raises(KeyboardInterrupt):
            quick("ep3_fig2", parts)
    capsys.readouterr()
    assert quick("ep3_fig2", parts) == 0
    assert ", 3 of them measured before;" in capsys.readouterr().out
    values = [
        json.loads((p / "ep3_fig2.json").read_text())["values"] for p in (uninterrupted, parts)
    ]
    assert values[0] == values[1]


# ------------------------------------------------------------------------------------ refusals


def test_experiment_refuses_invalid_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = tmp_path / "few.zarr"
    sk.ingest_store(np.eye(4, dtype=np.float32), few, y=np.arange(4))
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "data_batch_1").write_bytes(b"\x80\x02")
    empty = tmp_path / "empty"
    empty.mkdir()
    lonely = tmp_path / "lonely"
    lonely.mkdir()
    (lonely / "train.csv").write_text("x,y\n1,2\n")
    for data, message in (
        (few, "4 rows are too few"),
        (tmp_path / "none.zarr", "none.zarr"),
        (tmp_path / "nowhere", "is neither a folder nor a Zarr store"),
        (pickled, "pickle can run code"),
        (empty, "holds none of the files"),
        (lonely, "has no test.csv beside it"),
    ):
        assert quick("ep3_fig2", tmp_path / "out", "--data", str(data)) == 2
        (sentence,) = capsys.readouterr().err.splitlines()
        assert sentence.startswith("ep3_fig2: ")
        assert message in sentence
    assert not list((tmp_path / "out").glob("*.json"))
    (tmp_path / "file").touch()
    assert quick("ep3_fig2", tmp_path / "file") == 2
    assert "file cannot be written to: " in capsys.readouterr().err


def test_options_out_of_range_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for options, message in (
        (["--rows", "100"], "--rows 100 is too few"),
        (["--repetitions", "0"], "must be at least 1"),
        (["--test", "test.zarr"], "--test needs --data"),
    ):
        with pytest.raises(SystemExit):
            main(["ep3_fig2", *options])
        assert message in capsys.readouterr().err


def test_all_experiments_accept_unused_data_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import experiments.__main__ as command

    monkeypatch.setattr(command, "NAMES", ("ep1_reach", "falkon_steps"))
    write_arrays(tmp_path / "data")
    chosen = ["--quick", "--data", str(tmp_path / "data"), "--folder", str(tmp_path)]
    assert main(["all", *chosen]) == 0
    assert capsys.readouterr().out.count(": ") > 2
    with pytest.raises(SystemExit):
        main(["ep1_reach", *chosen])
    assert "unrecognized arguments: --data" in capsys.readouterr().err


def test_flat_rows_are_refused_where_images_are_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    import experiments.__main__ as command

    asking = replace(experiment_named("ep3_fig2"), needs="images")
    monkeypatch.setattr(command, "experiment_named", lambda name: asking)
    write_arrays(tmp_path / "data")
    assert quick("ep3_fig2", tmp_path, "--data", str(tmp_path / "data")) == 2
    assert "which are not images" in capsys.readouterr().err


def test_damaged_files_are_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = b"\x03" + bytes(3072)
    for name, files, message in (
        ("cut", {"data_batch_1.bin": image + b"\x00", "test_batch.bin": image}, "is cut, or"),
        ("class", {"data_batch_1.bin": b"\x0a" + image[1:], "test_batch.bin": image}, "0 to 9"),
        ("alone", {"data_batch_1.bin": image}, "there is no test_batch.bin"),
        ("words", {"SUSY.csv": b"0.0,1.0\nhello,2.0\n"}, "is not a table of numbers"),
        ("nothing", {"HIGGS.csv": b""}, "is not a table of numbers"),
        ("half", {"SUSY.csv": b"0.0,1.0\n0.5,2.0\n"}, "row 1 has another number"),
        ("arrays", {"X_train.npy": b"no array"}, "X_train.npy is not an array"),
    ):
        path = tmp_path / name
        path.mkdir()
        for file, content in files.items():
            (path / file).write_bytes(content)
        assert quick("ep3_fig2", tmp_path / "out", "--data", str(path)) == 2
        (sentence,) = capsys.readouterr().err.splitlines()
        assert message in sentence
    write_arrays(tmp_path / "missing")
    (tmp_path / "missing" / "y_test.npy").unlink()
    assert quick("ep3_fig2", tmp_path / "out", "--data", str(tmp_path / "missing")) == 2
    assert "there is no y_test.npy in " in capsys.readouterr().err


# ------------------------------------------------------------------------------------- readers


def rows(n: int = 300, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of three features and their classes, 0 or 1."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, 3)).astype(np.float32)
    return X, (X.sum(axis=1) > 0).astype(np.int64)


def write_arrays(folder: Path) -> None:
    """Write the files of features as NumPy arrays."""
    folder.mkdir()
    for part, n, seed in (("train", 300, 0), ("test", 50, 1)):
        X, y = rows(n, seed)
        np.save(folder / f"X_{part}.npy", X)
        np.save(folder / f"y_{part}.npy", y)


def as_set(X: np.ndarray, y: np.ndarray) -> list[tuple[Any, ...]]:
    """Return rows and targets in an order that does not depend on the stored one."""
    flat = X.reshape(len(X), -1).astype(np.float32)
    return sorted(map(tuple, np.column_stack([flat, y.astype(np.float32)]).tolist()))


def test_rows_sorted_by_class_are_refused(tmp_path: Path) -> None:
    X, y = np.eye(400, dtype=np.float32), np.arange(400) // 100
    for shuffle in (True, False):
        sk.ingest_store(X, tmp_path / f"{shuffle}.zarr", y=y, shuffle=shuffle)
    full, ordered = str(tmp_path / "True.zarr"), str(tmp_path / "False.zarr")
    assert len(read_data(full, full, 200, tmp_path).X) == 200
    assert len(read_data(ordered, ordered, 400, tmp_path).X) == 400
    with pytest.raises(sk.DataError, match="first 200 rows of"):
        read_data(ordered, ordered, 200, tmp_path)


def test_test_set_may_lack_classes_but_not_add_any(tmp_path: Path) -> None:
    folder = tmp_path / "speech"
    folder.mkdir()
    X, y = np.arange(600, dtype=np.float32).reshape(300, 2), np.arange(300) % 3
    np.save(folder / "X_train.npy", X)
    np.save(folder / "y_train.npy", y)
    np.save(folder / "X_test.npy", X[y > 0])
    np.save(folder / "y_test.npy", y[y > 0])
    data = read_data(str(folder), None, 300, tmp_path)
    assert data.classes == ("0", "1", "2")
    assert data.held_out is not None
    assert as_set(*data.held_out) == as_set(X[y > 0], y[y > 0])
    np.save(folder / "y_test.npy", y[y > 0] + 1)
    with pytest.raises(sk.DataError, match="other classes"):
        read_data(str(folder), None, 300, tmp_path)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_are_read(tmp_path: Path, suffix: str) -> None:
    folder = tmp_path / "mnist"
    folder.mkdir()
    rng = np.random.default_rng(0)
    written = {}
    for part, n in (("train", 300), ("t10k", 40)):
        X = rng.integers(0, 256, (n, 6, 5), dtype=np.uint8)
        y = np.arange(n, dtype=np.uint8) % 3
        write_idx(folder / f"{part}-images-idx3-ubyte{suffix}", X)
        write_idx(folder / f"{part}-labels-idx1-ubyte{suffix}", y)
        written[part] = as_set(X, y)
    data = read_data(str(folder), None, 1000, tmp_path)
    assert (data.name, data.X.shape, str(data.X.dtype), data.classes) == (
        "mnist", (300, 6, 5, 1), "uint8", ("0", "1", "2"),
    )  # fmt: skip
    assert data.held_out is not None
    assert as_set(data.X, data.y) == written["train"]
    assert as_set(*data.held_out) == written["t10k"]
    # Written once: the second call opens the stores.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "stores").rglob("*")}
    again = read_data(str(folder), None, 1000, tmp_path)
    np.testing.assert_array_equal(again.X, data.X)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "stores").rglob("*")} == before


def test_binary_cifar_is_read_channels_last(tmp_path: Path) -> None:
    folder = tmp_path / "cifar"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name, n in (("data_batch_1", 120), ("data_batch_2", 120), ("test_batch", 30)):
        records = rng.integers(0, 256, (n, 3073), dtype=np.uint8)
        records[:, 0] = np.arange(n) % 10
        records[:, 1 : 1 + 1024] = records[:, :1]  # the red channel says the class
        records.tofile(folder / f"{name}.bin")
    data = read_data(str(folder), None, 1000, tmp_path)
    assert data.X.shape == (240, 32, 32, 3)
    assert (data.X[..., 0] == data.y[:, None, None]).all()
    assert data.held_out is not None
    assert data.held_out[0].shape == (30, 32, 32, 3)


@pytest.mark.parametrize("name", ["SUSY.csv", "HIGGS.csv.gz"])
def test_tables_with_label_first_are_read(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "table"
    folder.mkdir()
    X, y = rows()
    lines = "".join(
        ",".join([f"{float(label):.18e}", *(f"{v:.18e}" for v in row)]) + "\n"
        for label, row in zip(y, X, strict=True)
    )
    data = lines.encode()
    (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    found = read_data(str(folder), None, 1000, tmp_path)
    assert found.classes == ("0", "1")
    assert as_set(found.X, found.y) == as_set(X[:240], y[:240])
    assert found.held_out is not None
    assert as_set(*found.held_out) == as_set(X[240:], y[240:])


def test_years_are_regression_targets(tmp_path: Path) -> None:
    folder = tmp_path / "year"
    folder.mkdir()
    X, _ = rows()
    years = 1922 + np.arange(len(X)) % 90
    table = np.column_stack([years, X])
    np.savetxt(folder / "YearPredictionMSD.txt", table, delimiter=",", fmt="%.6g")
    found = read_data(str(folder), None, 1000, tmp_path)
    assert found.classes is None
    assert found.measured == "test mean squared error"
    assert sorted(found.y.ravel().tolist()) == sorted(years[:240].astype(float).tolist())


def write_named(folder: Path, kind: str) -> None:
    """Write train and test files of a kind."""
    folder.mkdir()
    for part, n, seed in (("train", 300, 0), ("test", 50, 1)):
        X, y = rows(n, seed)
        if kind == "npz":
            np.savez(folder / f"{part}.npz", X=X, y=y)
        elif kind == "csv":
            lines = [
                ",".join([*(f"{v:.9g}" for v in row), str(label)])
                for row, label in zip(X, y, strict=True)
            ]
            (folder / f"{part}.csv").write_text("a,b,c,y\n" + "\n".join(lines) + "\n")
        else:
            lines = [
                " ".join([str(label), *(f"{k + 1}:{v:.9g}" for k, v in enumerate(row))])
                for row, label in zip(X, y, strict=True)
            ]
            (folder / f"{part}.svm").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("kind", ["npz", "csv", "svm", "npy"])
def test_named_parts_and_arrays_are_read(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "parts"
    if kind == "npy":
        write_arrays(folder)
    else:
        write_named(folder, kind)
    found = read_data(str(folder), None, 1000, tmp_path)
    assert found.classes is not None
    assert len(found.classes) == 2
    assert as_set(found.X, found.y) == as_set(*rows(300, 0))
    assert found.held_out is not None
    assert as_set(*found.held_out) == as_set(*rows(50, 1))


@pytest.mark.slow
def test_experiment_runs_on_rows_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_arrays(tmp_path / "data")
    assert quick("ep3_fig2", tmp_path, "--data", str(tmp_path / "data")) == 0
    text = capsys.readouterr().out
    found = outcome("ep3_fig2", tmp_path, text)
    del found["data"]["checksum"]
    assert found["data"] == {"name": "data", "rows": 300, "row shape": [3]}
    assert "in place of the paper's data" not in text


@pytest.mark.slow
@pytest.mark.parametrize("held_out", [True, False])
def test_experiment_runs_on_stores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], held_out: bool
) -> None:
    X, y = rows()
    train, test = tmp_path / "train.zarr", tmp_path / "test.zarr"
    sk.ingest_store(X, train, y=y)
    sk.ingest_store(X[:50], test, y=y[:50])
    options = ["--data", str(train), *(["--test", str(test)] if held_out else [])]
    assert quick("ep3_fig2", tmp_path, *options) == 0
    found = outcome("ep3_fig2", tmp_path, capsys.readouterr().out)
    sizes = {float(x) for x in found["values"]["test error, %"]["p = 75" if held_out else "p = 56"]}
    assert max(sizes) == (300 if held_out else 225)


# ------------------------------------------------------------------------------------- results


def test_difference_is_clear_beyond_two_standard_errors() -> None:
    assert clearly(np.array([1.0, 1.1, 0.9]))
    assert not clearly(np.array([3.0, -1.0, 0.5]))
    assert not clearly(np.array([-1.0, -1.1]))
    assert clearly(np.array([0.5]))
    assert not clearly(np.array([0.0, 0.0]))


def test_sizes_double_up_to_the_largest() -> None:
    assert doubled(21, 1348, quick=False) == [21, 42, 84, 168, 337, 674, 1348]
    assert doubled(21, 1348, quick=True) == [21, 1348]
    assert doubled(5, 5, quick=True) == [5]


def test_exponent_fits_power_laws() -> None:
    x = np.array([10.0, 20.0, 80.0])
    assert exponent(x, 3 * x**1.5) == pytest.approx(1.5)
    assert shown([2.0, 4.0]) == "3 ± 1"
    assert shown([2.345]) == "2.35"


def test_splits_differ_and_are_reproducible() -> None:
    import argparse

    options = argparse.Namespace(rows=300, repetitions=2, bandwidth=0.7, device="cpu")
    first, again = (list(digits().splits(options)) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a.X, b.X)
        np.testing.assert_array_equal(a.X_test, b.X_test)
    assert not np.array_equal(first[0].X, first[1].X)
    one = first[0]
    assert len(one.X) == 300
    assert len(one.X_test) == 449
    X, _ = one.scaled
    by_hand = (one.X.reshape(300, 64) - one.X.mean()) / one.X.std() / one.bandwidth
    np.testing.assert_allclose(X, by_hand, atol=1e-12)
    assert one.error(np.eye(10)[one.y_test]) == 0
    assert one.error(np.eye(10)[(one.y_test + 1) % 10]) == 100


def test_targets_far_from_zero_are_trained_with_an_intercept() -> None:
    """Check years near 2000, which would otherwise take most of the model."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((400, 3))
    y = X[:, 0] + 2000
    data = Data("years", X, y, None, None, own=True)
    options = argparse.Namespace(repetitions=1, rows=300, bandwidth=1.0, device="cpu")
    (split,) = data.splits(options)
    fitted = fit(split, split.source(), {"data.epochs": 5, "solver.name": "falkon"}, split.X[:50])
    assert fitted.error < 0.2
    assert fitted.outputs.mean() == pytest.approx(2000, abs=0.5)
