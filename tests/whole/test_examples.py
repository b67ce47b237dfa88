"""The scripts of examples/ run, are resumed, and judge by their criteria."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamkern as sk
from tests.raw_files import write_idx

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def example(name: str) -> Any:
    """Return a script of examples/ as a module, to call its `main` without another process."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where its dataclasses look for their names
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def digits() -> Iterator[Any]:
    yield example("digits")
    del sys.modules["digits"]


def run_example(name: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a script of examples/ with a folder."""
    command = [sys.executable, str(EXAMPLES / name), "--folder", str(folder), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_demo_is_interrupted_resumed_and_completed_once(
    digits: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check the script in a process of its own once; the later calls train nothing."""
    pytest.importorskip("matplotlib")
    folder = tmp_path / "digits"
    interrupted = run_example("digits.py", folder, "--quick")
    assert interrupted.returncode == 0, interrupted.stderr
    assert "saved, exit code 75" in interrupted.stdout
    assert (folder / "curves.png").stat().st_size > 10_000
    results = json.loads((folder / "table.json").read_text())
    block, eigenpro = results["runs"]
    assert block["resumed"] == "yes"
    assert block["samples"] >= 20_000
    # Not a judgement of the solvers: only that both learned, and the default close to the exact.
    assert float(block["test MSE"]) < 1.2 * results["exact"]
    assert float(eigenpro["test MSE"]) < 2 * results["exact"]

    options = ["--folder", str(folder), "--quick"]
    assert digits.main(options) == 0
    assert "exit code 75" not in capsys.readouterr().out
    assert json.loads((folder / "table.json").read_text()) == results

    assert digits.main([*options, "--samples", "30000"]) == 2
    assert "another length" in capsys.readouterr().err


@pytest.mark.parametrize("options", [(), ("--fresh",)])
def test_demo_does_not_change_a_foreign_folder(
    digits: Any, tmp_path: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.zarr").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert digits.main(["--folder", str(tmp_path), "--quick", *options]) == 2
    assert "not this demo's" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "train.zarr"]


# -------------------------------------------------------------------------- augmented_120m.py


@pytest.fixture
def augmented() -> Any:
    """Return the example as a module."""
    return example("augmented_120m")


N_IMAGES, N_HELD_OUT = 300, 100


def write_images(folder: Path, suffix: str = "") -> np.ndarray:
    """Write four IDX files of 6 x 5 images in three classes, which differ by their bright third."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    images = {}
    for prefix, n in (("train", N_IMAGES), ("t10k", N_HELD_OUT)):
        y = rng.integers(0, 3, n, dtype=np.uint8)
        X = rng.integers(0, 120, (n, 6, 5), dtype=np.uint8)
        X.reshape(n, 3, 10)[np.arange(n), y] += 100
        write_idx(folder / f"{prefix}-images-idx3-ubyte{suffix}", X)
        write_idx(folder / f"{prefix}-labels-idx1-ubyte{suffix}", y)
        images[prefix] = X
    return images["train"]


def arguments(data: Path, folder: Path, *more: str) -> list[str]:
    return ["--data", str(data), "--folder", str(folder), "--replicas", "12",
            "--bandwidth", "5", "--device", "cpu", *more]  # fmt: skip


def last_table(text: str) -> list[list[str]]:
    """Return the rows of the table at the end of the output."""
    lines = text.rsplit("-----\n", 1)[1].split("\n\n")[0].splitlines()
    return [line.split() for line in lines]


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_long_run_accepts_idx_files_and_resumes(
    augmented: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    suffix: str,
) -> None:
    images = write_images(tmp_path / "data", suffix)
    uninterrupted = arguments(tmp_path / "data", tmp_path / "whole")
    assert augmented.main(uninterrupted) == 0
    printed = capsys.readouterr().out
    assert re.search(r"3,600 samples through 300 centers take about \d:\d\d:\d\d ", printed)
    rows = last_table(printed)
    # A step is 256 samples: 1 and 10 replicas are reached in steps 2 and 12.
    assert [int(row[1]) for row in rows] == [2 * 256, 12 * 256, 12 * N_IMAGES]
    assert float(rows[-1][2]) > 0.95

    (store,) = (tmp_path / "whole").glob("data-*/train.zarr")
    X, _ = sk.open_store(store).read_chunk(0)
    assert X.dtype == np.uint8
    stored_rows, written = (a.reshape(N_IMAGES, 30).tolist() for a in (X, images))
    assert sorted(stored_rows) == sorted(written)

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


def test_long_run_estimates_what_fits_the_time(
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


def test_long_run_refuses_invalid_files(
    augmented: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(number: int) -> str:
        code = augmented.main(arguments(tmp_path / "data", tmp_path / f"run{number}"))
        assert code == 2
        (sentence,) = capsys.readouterr().err.splitlines()
        return sentence

    write_images(tmp_path / "data")
    labels = tmp_path / "data" / "train-labels-idx1-ubyte"
    intact_labels = labels.read_bytes()
    labels.unlink()
    assert "no train-labels-idx1-ubyte or train-labels-idx1-ubyte.gz" in refusal(1)
    write_idx(labels, np.zeros(N_IMAGES - 1, np.uint8))
    assert "300 rows, but y has the shape (299,)" in refusal(2)
    labels.write_bytes(intact_labels[:100])
    assert "truncated" in refusal(3)
    labels.write_bytes(intact_labels)
    held_out = tmp_path / "data" / "t10k-images-idx3-ubyte"
    write_idx(held_out, np.zeros((N_HELD_OUT, 7, 5), np.uint8))
    assert "data.test has rows of shape (7, 5, 1)" in refusal(4)


def test_generated_images_are_reproducible_and_learnable(augmented: Any) -> None:
    X, y = augmented.stand_in(6000, 0)
    assert (X.shape, X.dtype, y.shape, y.dtype) == ((6000, 28, 28), np.uint8, (6000,), np.uint8)
    repeated, labels = augmented.stand_in(6000, 0)
    assert np.array_equal(X, repeated)
    assert np.array_equal(y, labels)
    X_test, y_test = augmented.stand_in(1000, 1)
    # Nearest class mean: far above the 10 % of guessing, far below perfect.
    means = np.array([X[y == k].reshape(-1, 784).mean(axis=0) for k in range(10)])
    F = X_test.reshape(-1, 784) @ means.T - (means**2).sum(axis=1) / 2
    assert 0.4 < (F.argmax(axis=1) == y_test).mean() < 0.9


# ------------------------------------------------------------------------- million_centers.py


@pytest.mark.full
@pytest.mark.slow
def test_many_center_example_compares_with_eigenpro(tmp_path: Path) -> None:
    sizes = ("--centers", "1000", "--rows", "20000", "--memory", "500 MiB")
    output = run_example("million_centers.py", tmp_path, *sizes)
    assert output.returncode == 0, output.stderr
    (block, *seen), (eigenpro, *other) = last_table(output.stdout)
    assert (block, eigenpro) == ("block", "eigenpro4")
    assert seen[2] == "20000"
    with_mean = 1.0  # the variance of the targets
    assert float(seen[-1]) < with_mean / 2
    if other[2] == "0":  # a machine that is busy may leave it no time for a first step
        assert other[-1] == "-"
    else:
        assert float(other[-1]) < with_mean
    assert float(other[0]) <= float(seen[0]) + 2
    repeated = run_example("million_centers.py", tmp_path, *sizes)
    assert repeated.returncode == 0, repeated.stderr
    assert last_table(repeated.stdout)[0][-1] == seen[-1]
