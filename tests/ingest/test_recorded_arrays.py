"""Later groups of other programs are read by the names that a run has recorded, at every door."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from numpy.typing import NDArray
from sklearn.metrics import r2_score

import streamkern
from streamkern.basics.errors import StoreNotFoundError
from streamkern.cli import main

pytestmark = pytest.mark.usefixtures("one_blas_thread")

SETTINGS = ("model.n_centers=40", "data.epochs=3", "run.threads=1", "run.device=cpu")
NAMES = ("data.x=feat", "data.y=t", "data.sample_weight=u")

rng = np.random.default_rng(0)
X = rng.normal(size=(160, 3))
T = X[:, 0] + 0.3 * rng.normal(size=160)
W = rng.uniform(0.1, 5.0, 160)
ARRAYS = {"feat": X, "t": T, "u": W, "X": X[::-1] + 3, "y": 1000 + T[::-1]}
"""The usual names hold other arrays."""


def group(place: Path, **arrays: NDArray[Any]) -> Path:
    made = zarr.open_group(place, mode="w")
    for name, array in arrays.items():
        made.create_array(name, data=array)
    return place


def train(folder: Path, name: str, *more: str) -> Path:
    settings = [word for each in (*SETTINGS, *more) for word in ("--set", each)]
    stores = ["--train", f"{folder}/train.zarr", "--test", f"{folder}/test.zarr"]
    assert main.main(["train", *stores, "--run-dir", f"{folder / name}", *settings]) == 0
    return folder / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two groups and a run on the arrays `NAMES` of the first."""
    folder = tmp_path_factory.mktemp("arrays")
    for name, rows in (("train", slice(0, 100)), ("test", slice(100, 160))):
        group(folder / f"{name}.zarr", **{k: a[rows] for k, a in ARRAYS.items()})
    train(folder, "run", *NAMES)
    return folder


def evaluated(capsys: pytest.CaptureFixture[str], *words: object) -> float:
    capsys.readouterr()
    assert main.main(["evaluate", *map(str, words), "--device", "cpu", "--json"]) == 0
    return float(json.loads(capsys.readouterr().out)["r2"])


def test_a_run_reads_groups_by_the_names_of_its_settings(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run, test = folder / "run", folder / "test.zarr"
    estimator = streamkern.load(run)
    answers = estimator.predict(X[100:])
    wanted = r2_score(T[100:], answers, sample_weight=W[100:])
    assert wanted > 0.5
    opened = zarr.open_group(test, mode="r")
    for found in (
        evaluated(capsys, run, test),
        evaluated(capsys, run, test, "--x", "feat", "--y", "t", "--sample-weight", "u"),
        estimator.score(test),
        estimator.score(opened, "t"),
        streamkern.evaluate(estimator, test)["r2"],
        pickle.loads(pickle.dumps(estimator)).score(test),
    ):
        assert found == pytest.approx(wanted)
    for given in (test, opened):
        np.testing.assert_allclose(estimator.predict(given), answers)
    assert main.main(["predict", str(run), str(test), str(tmp_path / "p.npy")]) == 0
    np.testing.assert_allclose(np.load(tmp_path / "p.npy").ravel(), answers, rtol=1e-6)
    estimator.predict(test, out=tmp_path / "q.npy")
    np.testing.assert_allclose(np.load(tmp_path / "q.npy").ravel(), answers, rtol=1e-6)
    # Names that the user gives come first.
    other = r2_score(ARRAYS["y"][100:], answers, sample_weight=W[100:])
    assert evaluated(capsys, run, test, "--y", "y") == pytest.approx(other)
    assert estimator.score(test, "y") == pytest.approx(other)


def test_files_of_arrays_are_read_by_the_names_of_the_settings(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    held_out = {name: array[100:] for name, array in ARRAYS.items()}
    np.savez(tmp_path / "test.npz", **held_out)
    with h5py.File(tmp_path / "test.h5", "w") as file:
        for name, array in held_out.items():
            file[name] = array
    estimator = streamkern.load(folder / "run")
    wanted = r2_score(T[100:], estimator.predict(X[100:]))
    for name in ("test.npz", "test.h5"):
        assert evaluated(capsys, folder / "run", tmp_path / name) == pytest.approx(wanted)
        assert streamkern.evaluate(estimator, tmp_path / name)["r2"] == pytest.approx(wanted)


def test_a_group_without_the_arrays_of_the_settings_is_refused_and_weights_may_lack(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    estimator, usual = streamkern.load(folder / "run"), group(tmp_path / "u.zarr", X=X, y=T)
    for call in (estimator.score, estimator.predict):
        with pytest.raises(StoreNotFoundError, match="no array 'feat'"):
            call(usual)
    assert main.main(["evaluate", str(folder / "run"), str(usual)]) != 0
    assert "no array 'feat'" in capsys.readouterr().err
    wanted = r2_score(T, estimator.predict(X))
    assert evaluated(capsys, folder / "run", usual, "--x", "X", "--y", "y") == pytest.approx(wanted)
    light = group(tmp_path / "light.zarr", feat=X, t=T)
    assert estimator.score(light) == pytest.approx(wanted)
    assert evaluated(capsys, folder / "run", light) == pytest.approx(wanted)


def test_the_target_that_an_estimator_was_given_by_name_is_that_of_the_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    place = group(tmp_path / "g.zarr", X=X, t=T, u=W, y=ARRAYS["y"])
    estimator = streamkern.KernelRegressor(n_centers=40, epochs=3, threads=1, device="cpu")
    estimator.fit(place, "t", sample_weight="u").save(tmp_path / "saved")
    wanted = r2_score(T, estimator.predict(X), sample_weight=W)
    assert wanted > 0.5
    for found in (
        estimator.score(place),
        streamkern.load(tmp_path / "saved").score(place),
        evaluated(capsys, tmp_path / "saved", place),
    ):
        assert found == pytest.approx(wanted)
    # A group without an array of this name has its targets in y.
    usual = group(tmp_path / "usual.zarr", X=X, y=T)
    wanted = r2_score(T, estimator.predict(X))
    assert evaluated(capsys, tmp_path / "saved", usual) == pytest.approx(wanted)
    assert estimator.score(usual) == pytest.approx(wanted)


def test_a_run_with_the_usual_names_reads_these(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(folder, "usual")
    wanted = r2_score(ARRAYS["y"][100:], streamkern.load(run).predict(ARRAYS["X"][100:]))
    assert evaluated(capsys, run, folder / "test.zarr") == pytest.approx(wanted)
