"""Later data are read by the names of arrays that a run or a store has recorded, at every door."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import xarray
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
    assert main.run_command(["train", *stores, "--run-dir", f"{folder / name}", *settings]) == 0
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
    assert main.run_command(["evaluate", *map(str, words), "--device", "cpu", "--json"]) == 0
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
    assert main.run_command(["predict", str(run), str(test), str(tmp_path / "p.npy")]) == 0
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
    wanted = r2_score(T[100:], estimator.predict(X[100:]), sample_weight=W[100:])
    for name in ("test.npz", "test.h5"):
        assert evaluated(capsys, folder / "run", tmp_path / name) == pytest.approx(wanted)
        assert streamkern.evaluate(estimator, tmp_path / name)["r2"] == pytest.approx(wanted)


def test_a_group_without_the_arrays_of_the_settings_has_the_usual_ones_or_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    estimator, usual = streamkern.load(folder / "run"), group(tmp_path / "u.zarr", X=X, y=T)
    wanted = r2_score(T, estimator.predict(X))
    assert estimator.score(usual) == pytest.approx(wanted)
    np.testing.assert_allclose(estimator.predict(usual), estimator.predict(X))
    np.testing.assert_allclose(
        estimator.predict(zarr.open_group(usual, mode="r")), estimator.predict(X)
    )
    assert evaluated(capsys, folder / "run", usual) == pytest.approx(wanted)
    other = group(tmp_path / "o.zarr", z=X, t=T)
    for call in (estimator.score, estimator.predict):
        with pytest.raises(StoreNotFoundError, match="no array 'feat'"):
            call(other)
    assert main.run_command(["evaluate", str(folder / "run"), str(other)]) != 0
    assert "no array 'feat'" in capsys.readouterr().err
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


def npz(place: Path, **arrays: NDArray[Any]) -> Path:
    np.savez(place.with_suffix(".npz"), **arrays)
    return place.with_suffix(".npz")


def hdf5(place: Path, **arrays: NDArray[Any]) -> Path:
    with h5py.File(place.with_suffix(".h5"), "w") as file:
        for name, array in arrays.items():
            file[name] = array
    return place.with_suffix(".h5")


def netcdf(place: Path, **arrays: NDArray[Any]) -> Path:
    dims = {name: ("n", "d")[: array.ndim] for name, array in arrays.items()}
    data = xarray.Dataset({name: (dims[name], array) for name, array in arrays.items()})
    data.to_netcdf(place.with_suffix(".nc"), engine="scipy")
    return place.with_suffix(".nc")


def dataset(place: Path, **arrays: NDArray[Any]) -> xarray.Dataset:
    return xarray.load_dataset(netcdf(place, **arrays))


def stored(array: Any) -> NDArray[Any]:
    return np.sort(array[:], axis=None)


WRITERS = {"npz": npz, "hdf5": hdf5, "netcdf": netcdf, "zarr": group, "Dataset": dataset}


@pytest.mark.parametrize("first", WRITERS)
def test_the_names_given_of_the_first_data_are_those_of_later_data_in_any_form(
    first: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = WRITERS[first](tmp_path / "first", X=X, t=T, u=W, y=ARRAYS["y"])
    options: dict[str, Any] = {"n_centers": 40, "epochs": 3, "threads": 1, "device": "cpu"}
    estimator = streamkern.KernelRegressor(**options).fit(given, "t", sample_weight="u")
    estimator.save(tmp_path / "saved")
    streamkern.ingest_store(given, tmp_path / "s.zarr", y="t", sample_weight="u")
    of_store = streamkern.KernelRegressor(**options, run_dir=tmp_path / "of_store")
    of_store.fit(tmp_path / "s.zarr")
    wanted = r2_score(T, estimator.predict(X), sample_weight=W)
    assert wanted > 0.5
    for name, write in WRITERS.items():
        later = write(tmp_path / "later", X=X, t=T, u=W, y=ARRAYS["y"])
        assert estimator.score(later) == pytest.approx(wanted), name
        assert of_store.score(later) == pytest.approx(wanted, abs=0.02), name
        if name != "Dataset":
            for run in ("saved", "of_store"):
                assert evaluated(capsys, tmp_path / run, later) == pytest.approx(wanted, abs=0.02)
        streamkern.append_store(later, tmp_path / "s.zarr", seed=len(name))
        streamkern.ingest_store(later, tmp_path / f"{name}.zarr", like=tmp_path / "s.zarr")
        alike = zarr.open_group(tmp_path / f"{name}.zarr", mode="r")
        np.testing.assert_allclose(stored(alike["y"]), np.sort(T), rtol=1e-6)
        np.testing.assert_allclose(stored(alike["w"]), np.sort(W), rtol=1e-6)
    appended = zarr.open_group(tmp_path / "s.zarr", mode="r")
    np.testing.assert_allclose(stored(appended["y"]), np.sort(np.tile(T, 6)), rtol=1e-6)


@pytest.mark.parametrize("form", ["npz", "hdf5", "netcdf", "zarr"])
def test_weights_may_lack_and_targets_may_have_the_usual_name(form: str, tmp_path: Path) -> None:
    given = npz(tmp_path / "first", X=X, t=T, u=W)
    estimator = streamkern.KernelRegressor(n_centers=40, epochs=3, threads=1, device="cpu")
    estimator.fit(given, "t", sample_weight="u")
    wanted = r2_score(T, estimator.predict(X))
    assert estimator.score(WRITERS[form](tmp_path / "a", X=X, t=T)) == pytest.approx(wanted)
    assert estimator.score(WRITERS[form](tmp_path / "b", X=X, y=T)) == pytest.approx(wanted)
    with pytest.raises(StoreNotFoundError, match="no array 't'"):
        estimator.score(WRITERS[form](tmp_path / "c", X=X, z=T))
