"""The scripts of examples/ run, are resumed, and judge by their criteria."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from scipy.spatial.distance import cdist

import streamkern as sk
from tests.rawfiles import write_idx

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "digits.py"


def run_demo(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """One call of the demo in its small mode."""
    return subprocess.run(
        [sys.executable, str(DEMO), "--quick", "--folder", str(folder), *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_demo_is_interrupted_resumed_and_done_once(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "digits"
    first = run_demo(folder)
    assert first.returncode == 0, first.stderr
    assert "saved, exit code 75" in first.stdout
    assert (folder / "curves.png").stat().st_size > 10_000
    results = json.loads((folder / "table.json").read_text())
    block, eigenpro = results["runs"]
    assert block["resumed"] == "yes"
    assert block["samples"] >= 20_000
    # Not a judgement of the solvers: only that both learned, and the default close to the exact.
    assert float(block["test MSE"]) < 1.2 * results["exact"]
    assert float(eigenpro["test MSE"]) < 2 * results["exact"]

    again = run_demo(folder)
    assert again.returncode == 0, again.stderr
    assert "exit code 75" not in again.stdout
    assert json.loads((folder / "table.json").read_text()) == results

    other = run_demo(folder, "--samples", "30000")
    assert other.returncode == 2
    assert "another length" in other.stderr


@pytest.mark.parametrize("options", [(), ("--fresh",)])
def test_the_demo_leaves_a_foreign_folder_alone(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "train.zarr").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    refused = run_demo(tmp_path, *options)
    assert refused.returncode == 2
    assert "not this demo's" in refused.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "train.zarr"]


# -------------------------------------------------------------------------- augmented_120m.py


@pytest.fixture
def augmented() -> Any:
    """The example as a module."""
    path = ROOT / "examples" / "augmented_120m.py"
    spec = importlib.util.spec_from_file_location("augmented_120m", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


N_IMAGES, N_HELD_OUT = 300, 100


def write_images(folder: Path, ending: str = "") -> np.ndarray:
    """Four IDX files of 6 x 5 images in three classes, told apart by their bright third."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    images = {}
    for prefix, n in (("train", N_IMAGES), ("t10k", N_HELD_OUT)):
        y = rng.integers(0, 3, n, dtype=np.uint8)
        X = rng.integers(0, 120, (n, 6, 5), dtype=np.uint8)
        X.reshape(n, 3, 10)[np.arange(n), y] += 100
        write_idx(folder / f"{prefix}-images-idx3-ubyte{ending}", X)
        write_idx(folder / f"{prefix}-labels-idx1-ubyte{ending}", y)
        images[prefix] = X
    return images["train"]


def arguments(data: Path, folder: Path, *more: str) -> list[str]:
    return ["--data", str(data), "--folder", str(folder), "--replicas", "12",
            "--bandwidth", "5", "--device", "cpu", *more]  # fmt: skip


def last_table(text: str) -> list[list[str]]:
    """The rows of the table that a run ends with."""
    lines = text.rsplit("-----\n", 1)[1].split("\n\n")[0].splitlines()
    return [line.split() for line in lines]


@pytest.mark.full(all_but_every=2)
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_the_long_run_takes_idx_files_and_is_resumed(
    augmented: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    ending: str,
) -> None:
    images = write_images(tmp_path / "data", ending)
    whole = arguments(tmp_path / "data", tmp_path / "whole")
    assert augmented.main(whole) == 0
    printed = capsys.readouterr().out
    assert re.search(r"3,600 samples through 300 centers take about \d:\d\d:\d\d ", printed)
    rows = last_table(printed)
    # A step is 256 samples: 1 and 10 replicas are reached in steps 2 and 12.
    assert [int(row[1]) for row in rows] == [2 * 256, 12 * 256, 12 * N_IMAGES]
    assert float(rows[-1][2]) > 0.95

    (store,) = (tmp_path / "whole").glob("data-*/train.zarr")
    X, _ = sk.open_store(store).read_chunk(0)
    assert X.dtype == np.uint8
    stored, written = (a.reshape(N_IMAGES, 30).tolist() for a in (X, images))
    assert sorted(stored) == sorted(written)

    def fail(record: dict[str, Any]) -> None:
        if record["step"] == 2:
            raise RuntimeError("pulled plug")

    parts = arguments(tmp_path / "data", tmp_path / "parts")
    with monkeypatch.context() as patch:
        patch.setattr(augmented, "show_evaluation", fail)
        with pytest.raises(RuntimeError, match="pulled plug"):
            augmented.main(parts)
    capsys.readouterr()
    assert augmented.main(parts) == 0
    printed = capsys.readouterr().out
    assert "take about" not in printed
    assert [row[:4] for row in last_table(printed)] == [row[:4] for row in rows]


def test_the_long_run_names_what_fits_the_time(
    augmented: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_images(tmp_path / "data")
    p, d, c, n = N_IMAGES, 30, 3, 12 * N_IMAGES
    # One block of 300, 15 steps of at most 256 samples, 3 evaluations: FLOPs by hand.
    training = 2 * p * (d + 2 * c) * n + 2 * p * p * c * 15
    flops = training + 3 * N_HELD_OUT * 2 * p * (d + c)
    monkeypatch.setattr(augmented, "measure", lambda config: (0.01, flops / 60))
    plan = augmented.make_plan

    def without_setup(config: sk.RunConfig) -> dict[str, Any]:
        planned = plan(config)
        return planned | {"flops": planned["flops"] | {"setup": 0}}

    monkeypatch.setattr(augmented, "make_plan", without_setup)
    folder = tmp_path / "run"
    assert augmented.main(arguments(tmp_path / "data", folder, "--max-minutes", "1.5")) == 2
    stopped = capsys.readouterr()
    assert f"take about {timedelta(seconds=60 + round(0.01 * n))}" in stopped.out
    (sentence,) = stopped.err.splitlines()
    assert "more than --max-minutes 1.5; give --replicas 10 (" in sentence
    assert "--centers 200 (" in sentence
    assert "--yes" in sentence
    assert not list(folder.glob("run-*"))
    assert augmented.main(arguments(tmp_path / "data", folder, "--yes")) == 0


def test_the_long_run_refuses_bad_files(
    augmented: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(number: int) -> str:
        code = augmented.main(arguments(tmp_path / "data", tmp_path / f"run{number}"))
        assert code == 2
        (sentence,) = capsys.readouterr().err.splitlines()
        return sentence

    write_images(tmp_path / "data")
    labels = tmp_path / "data" / "train-labels-idx1-ubyte"
    kept = labels.read_bytes()
    labels.unlink()
    assert "no train-labels-idx1-ubyte or train-labels-idx1-ubyte.gz" in refusal(1)
    write_idx(labels, np.zeros(N_IMAGES - 1, np.uint8))
    assert "300 rows and y has the shape (299,)" in refusal(2)
    labels.write_bytes(kept[:100])
    assert "truncated" in refusal(3)
    labels.write_bytes(kept)
    held_out = tmp_path / "data" / "t10k-images-idx3-ubyte"
    write_idx(held_out, np.zeros((N_HELD_OUT, 7, 5), np.uint8))
    assert "data.test has rows of shape (7, 5, 1)" in refusal(4)


def test_the_stand_in_is_the_same_every_time_and_can_be_learned(augmented: Any) -> None:
    X, y = augmented.stand_in(6000, 0)
    assert (X.shape, X.dtype, y.shape, y.dtype) == ((6000, 28, 28), np.uint8, (6000,), np.uint8)
    again, labels = augmented.stand_in(6000, 0)
    assert np.array_equal(X, again)
    assert np.array_equal(y, labels)
    X_test, y_test = augmented.stand_in(1000, 1)
    # Nearest class mean: far above the 10 % of guessing, far below perfect.
    means = np.array([X[y == k].reshape(-1, 784).mean(axis=0) for k in range(10)])
    F = X_test.reshape(-1, 784) @ means.T - (means**2).sum(axis=1) / 2
    assert 0.4 < (F.argmax(axis=1) == y_test).mean() < 0.9


# ------------------------------------------------------------------------- million_centers.py


@pytest.mark.full
@pytest.mark.slow
def test_a_model_of_many_centers_and_eigenpro_in_its_time(tmp_path: Path) -> None:
    def run() -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable, str(ROOT / "examples" / "million_centers.py"), "--folder",
            str(tmp_path), "--centers", "1000", "--rows", "20000", "--memory", "500 MiB",
        ]  # fmt: skip
        return subprocess.run(
            command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
            check=False,
        )  # fmt: skip

    found = run()
    assert found.returncode == 0, found.stderr
    (block, *seen), (eigenpro, *other) = last_table(found.stdout)
    assert (block, eigenpro) == ("block", "eigenpro4")
    assert seen[2] == "20000"
    with_mean = 1.0  # the variance of the targets
    assert float(seen[-1]) < with_mean / 2
    if other[2] == "0":  # a machine that is busy may leave it no time for a first step
        assert other[-1] == "-"
    else:
        assert float(other[-1]) < with_mean
    assert float(other[0]) <= float(seen[0]) + 2
    again = run()
    assert again.returncode == 0, again.stderr
    assert last_table(again.stdout)[0][-1] == seen[-1]


# -------------------------------------------------------------------- experiments of the papers


EXPERIMENTS = (
    *("more_samples", "more_centers", "augmentation", "against_falkon", "kmeans_centers"),
    *("against_pegasos", "fourier_against_nystrom"),
)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """The modules of examples/, which find each other as when one of them is run."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module


def outcome(module: Any, folder: Path, text: str) -> dict[str, Any]:
    """What a run of an experiment left, checked against what it printed."""
    name = module.__name__
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    verdict = found["verdict"]
    word = "SEEN" if verdict["seen"] else "NOT SEEN"
    assert [s for s in text.splitlines() if s.startswith(f"{word}: ")] == [verdict["line"]]
    for label, by_place in found["values"].items():
        column = [row[label] for row in found["table"] if label in row]
        means = [np.mean(by_place[x]) for x in sorted(by_place, key=float)]
        assert [float(cell.split(" ± ")[0]) for cell in column] == pytest.approx(means, abs=0.006)
        assert all(0 <= v <= 100 for values in by_place.values() for v in values)
        assert {len(values) for values in by_place.values()} == {2}
    return found


@pytest.mark.full(all_but_every=3)
@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_leaves_table_plot_and_verdict(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    module = script(name)
    assert module.main(["--quick", "--device", "cpu", "--folder", str(tmp_path)]) == 0
    found = outcome(module, tmp_path, capsys.readouterr().out)
    assert found["data"] == {"name": "digits", "rows": 1797, "row shape": [8, 8, 1]}


def test_an_experiment_takes_idx_files(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = script("augmentation")
    write_images(tmp_path / "data", ".gz")
    assert module.main(["--data", str(tmp_path / "data"), "--quick", "--flip", "--device", "cpu",
                        "--folder", str(tmp_path)]) == 0  # fmt: skip
    found = outcome(module, tmp_path, capsys.readouterr().out)
    assert found["data"] == {"name": "data", "rows": N_IMAGES, "row shape": [6, 5, 1]}
    assert list(found["values"]) == ["none", "noise", "mix-up", "crop + flip"]
    assert np.mean(found["values"]["none"]["2"]) < 10  # the classes are told apart easily


@pytest.mark.parametrize("held_out", [True, False])
def test_an_experiment_takes_stores(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], held_out: bool
) -> None:
    module = script("kmeans_centers")
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 240)
    X = (rng.standard_normal((240, 5)) + 3 * y[:, None]).astype(np.float32)
    train, test = tmp_path / "train.zarr", tmp_path / "test.zarr"
    sk.ingest_store(X, train, y=y)
    sk.ingest_store(X[:50], test, y=y[:50])
    options = ["--data", str(train), "--quick", "--device", "cpu", "--folder", str(tmp_path)]
    assert module.main([*options, *(["--test", str(test)] if held_out else [])]) == 0
    found = outcome(module, tmp_path, capsys.readouterr().out)
    assert found["data"] == {"name": "train.zarr", "rows": 240, "row shape": [5]}
    assert list(found["values"]["k-means"]) == (["10", "40"] if held_out else ["15", "30"])
    assert all(np.mean(errors) < 10 for errors in found["values"]["k-means"].values())


def test_an_experiment_refuses_what_it_can_not_use(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = script("more_centers").main
    values, classes = tmp_path / "values.zarr", tmp_path / "classes.zarr"
    sk.ingest_store(np.eye(4, dtype=np.float32), values, y=np.linspace(0, 1, 4))
    sk.ingest_store(np.eye(4, dtype=np.float32), classes, y=np.arange(4))
    for data, message in (
        ([values], "has no classes"),
        ([tmp_path / "none.zarr"], "none.zarr"),
        ([classes], "4 rows are too few"),
    ):
        assert main(["--data", *map(str, data), "--folder", str(tmp_path)]) == 2
        (sentence,) = capsys.readouterr().err.splitlines()
        assert sentence.startswith("more_centers: ")
        assert message in sentence


def test_a_verdict_goes_by_its_criterion(script: Any) -> None:
    base = script("experiment")

    def results(**values: dict[float, list[float]]) -> Any:
        return base.Results("x", values={k.replace("_", "-"): v for k, v in values.items()})

    judge = script("kmeans_centers").judge
    better = results(k_means={10: [4.0, 5.0], 20: [2.0, 3.0]}, random={10: [8, 9.5], 20: [5, 6]})
    assert judge(better).seen
    # One size without a difference, one with a difference that its own spread explains.
    assert not judge(results(k_means={10: [4.0, 5.0]}, random={10: [4.0, 5.0]})).seen
    assert not judge(results(k_means={10: [4.0, 5.0]}, random={10: [4.5, 9.0]})).seen

    judge = script("augmentation").judge
    both = results(none={4: [5.0, 6.0]}, noise={4: [3.0, 4.1]}, crop={4: [4.0, 5.1]})
    assert judge(both, 4, True).seen
    one = results(none={4: [5.0, 6.0]}, noise={4: [3.0, 4.1]}, crop={4: [9.0, 9.1]})
    assert judge(one, 4, False).seen
    assert not judge(one, 4, True).seen
    assert judge(one, 4, True).line().startswith("NOT SEEN: Fig. 4 of EP3")
    assert judge(one, 4, True).numbers.endswith("clearly better: noise")

    judge = script("more_centers").judge
    assert judge(results(n={1: [9.0, 9.1], 2: [5.0, 5.2], 4: [3.0, 3.1]})).seen
    assert not judge(results(n={1: [9.0, 9.1], 2: [2.0, 2.2], 4: [3.0, 3.1]})).seen

    judge = script("against_pegasos").judge
    assert judge({"laplace": {"EigenPro": [2, 3, 4], "Pegasos": [18, 20, math.inf]}}, 64).seen
    assert not judge({"laplace": {"EigenPro": [2, 3, 4], "Pegasos": [6, 9, 99]}}, 64).seen
    none = {"laplace": {"EigenPro": [math.inf] * 3, "Pegasos": [math.inf] * 3}}
    assert not judge(none, 64).seen
    late = {"laplace": {"EigenPro": [20] * 3, "Pegasos": [math.inf] * 3}}
    assert not judge(late, 64).seen  # more than 64 may be 65

    judge = script("fourier_against_nystrom").judge
    one = {10: [4.0, 5.0], 20: [3.0, 3.1]}
    other = {10: [9.0, 9.9], 20: [5.0, 5.2]}
    pair = {"Nystrom, gaussian": one, "Fourier, gaussian": other}
    assert (
        judge(results(**pair, **{"Nystrom, laplace": one, "Fourier, laplace": one})).seen is False
    )
    assert judge(results(**pair, **{"Nystrom, laplace": one, "Fourier, laplace": other})).seen
    assert not judge(results(**pair, **{"Nystrom, laplace": other, "Fourier, laplace": one})).seen

    judge = script("against_falkon").judge
    ep3, ours = "EigenPro 3", "default, blocks of p/4"
    errors = {"FALKON": {5: [9.0, 9.1], 10: [3.0, 3.1]}, "EigenPro 2": {10: [8.0, 8.1]}}
    lower, higher = {10: [4.0, 4.1]}, {10: [8.5, 8.6]}
    assert judge(results(**errors, **{ep3: lower, ours: lower}), {ours: 1.0}).seen
    assert not judge(results(**errors, **{ep3: lower, ours: higher}), {ours: 1.0}).seen

    judge = script("more_samples").judge
    errors = {"(kernel machine on 5 rows)": {5: [9.0, 9.1], 20: [9.0, 9.1]}}
    assert judge(results(**{"p = 5": {5: [9.0, 9.2], 20: [4.0, 4.1]}}, **errors)).seen
    assert not judge(results(**{"p = 5": {5: [9.9, 9.9], 20: [9.5, 9.4]}}, **errors)).seen


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("laplace", lambda D, b: np.exp(-D / b)),
        ("gaussian", lambda D, b: np.exp(-(D**2) / (2 * b**2))),
        ("cauchy", lambda D, b: 1 / (1 + D**2 / b**2)),
    ],
    ids=["laplace", "gaussian", "cauchy"],
)
def test_the_exact_model_is_the_interpolant(script: Any, name: str, kernel: Any) -> None:
    options = argparse.Namespace(
        data=None, samples=200, seeds=1, bandwidth=0.7, device="cpu", quick=True
    )
    (split,) = script("experiment").read_data(options).splits(options)
    X, X_test = (a.reshape(-1, 64).astype(float) for a in (split.X, split.X_test))
    b = split.bandwidth * split.X.std()
    alpha = scipy.linalg.solve(kernel(cdist(X, X), b), np.eye(10)[split.y], assume_a="pos")
    wrong = (kernel(cdist(X_test, X), b) @ alpha).argmax(axis=1) != split.y_test
    exact = script("against_pegasos").exact_error(split, name)
    assert exact == pytest.approx(100 * wrong.mean(), abs=1e-8)  # rounded there
