"""A trained model by itself: values, metrics, predictions; of a result or a run directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import zarr

from streamkern import model as model_module
from streamkern.errors import ConfigError, RunError
from streamkern.model import KernelModel, load_model
from streamkern.sources import ArraySource, AugmentedSource
from streamkern.train import Result
from tests.faults import tree
from tests.runs import (
    CLASSES,
    METHODS,
    Array,
    C,
    D,
    array_source,
    arrays,
    brute_force,
    finished,
    latest_step,
    process,
    settings,
    stopped,
    stream,
)

N_TEST = 103


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model") / "run"


@pytest.fixture(scope="module")
def result(run_dir: Path) -> Result:
    return finished(settings(run_dir), source=stream())


@pytest.fixture
def truth(result: Result) -> Array:
    """f(X) of the test rows in float64, from centers and weights."""
    return brute_force(result, arrays(N_TEST, 5)[0])


@pytest.fixture
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles, slabs and chunks whose borders fall inside the test rows, and not together."""
    monkeypatch.setattr(model_module, "EVALUATED_ROWS", 10)
    monkeypatch.setattr(model_module, "PREDICTION_CHUNK", 17 * C * 4)


# -- values and metrics ---------------------------------------------------------------------------


@pytest.mark.usefixtures("small_slabs")
def test_values_and_metrics_are_those_of_the_formula(result: Result, truth: Array) -> None:
    X, y = arrays(N_TEST, 5)
    np.testing.assert_allclose(result.model.values(X), truth, atol=1e-4)
    metrics = result.model.evaluate(array_source(N_TEST, 5))
    np.testing.assert_allclose(metrics["mse"], ((truth - np.eye(C)[y]) ** 2).mean(), rtol=1e-4)
    assert metrics["accuracy"] == (truth.argmax(axis=1) == y).mean()


def test_units_do_not_matter(result: Result) -> None:
    per_unit = [
        result.model.evaluate(array_source(N_TEST, 5, unit_rows=rows)) for rows in (1, 16, 200)
    ]
    for metrics in per_unit[1:]:
        assert metrics["mse"] == pytest.approx(per_unit[0]["mse"], rel=1e-6)
        assert metrics["accuracy"] == per_unit[0]["accuracy"]


def test_random_transforms_of_the_data_are_refused(result: Result) -> None:
    """Noise is for the stream; a test set that brings some would be evaluated without."""
    noisy = AugmentedSource(array_source(N_TEST, 5), 1, stream().feed_transforms)
    with pytest.raises(ConfigError, match=r"augmented by .*not applied to evaluated rows"):
        result.model.evaluate(noisy)


def test_a_model_read_back_is_the_model(run_dir: Path, result: Result) -> None:
    before = tree(run_dir)
    loaded = load_model(run_dir, threads=1)
    X, _ = arrays(N_TEST, 5)
    assert loaded.values(X).tobytes() == result.model.values(X).tobytes()
    assert (loaded.classes, loaded.row_shape, loaded.n_outputs) == (CLASSES, (D,), C)
    loaded.backend.close()
    assert tree(run_dir) == before


def test_a_run_on_its_way_can_be_read(tmp_path: Path) -> None:
    stopped(settings(tmp_path), 5, source=stream())
    loaded = load_model(tmp_path, threads=1)
    assert np.isfinite(loaded.values(arrays(9, 5)[0])).all()
    loaded.backend.close()


def test_there_must_be_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no run directory"):
        load_model(tmp_path / "none")
    with pytest.raises(RunError, match="no checkpoint yet"):
        load_model(tmp_path)


def shifted(X: Array, Y: Array, rng: Any) -> tuple[Array, Array]:
    return X + X.dtype.type(1), Y


shifted.deterministic = True  # type: ignore[attr-defined]


def test_a_function_of_the_user_is_not_on_the_disk(tmp_path: Path) -> None:
    finished(settings(tmp_path), source=array_source(transforms=[shifted]))
    with pytest.raises(ConfigError, match="'shifted' as a transform"):
        load_model(tmp_path)


# -- refused --------------------------------------------------------------------------------------


def test_other_features_are_refused(result: Result, tmp_path: Path) -> None:
    X, y = arrays(20, 5)
    wide = ArraySource(np.c_[X, X], y, classes=CLASSES)
    for use in (
        result.model.evaluate,
        lambda source: result.model.predict_to(source, str(tmp_path / "out")),
    ):
        with pytest.raises(ConfigError, match=r"rows of shape \(10,\).*trained on \(5,\)"):
            use(wide)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("y", "options", "named"),
    [
        (np.arange(20) % 3, {"classes": ("ant", "bee", "dog")}, r"3 classes \(ant, bee, dog\)"),
        (np.arange(20) % 2, {"classes": ("ant", "bee")}, "2 classes"),
        (np.arange(20) % 3, {}, r"3 classes \(0, 1, 2\)"),
        (np.zeros((20, 3)), {}, "3 values"),
        (None, {}, "0 values"),
    ],
)
def test_other_targets_are_not_evaluated(
    result: Result, y: Any, options: dict[str, Any], named: str
) -> None:
    """The same number of classes under other names would give a wrong accuracy in silence."""
    with pytest.raises(ConfigError, match=named):
        result.model.evaluate(ArraySource(arrays(20, 5)[0], y, **options))


# -- predictions ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_slabs")
def test_predictions_are_plain_zarr_in_row_order(
    result: Result, truth: Array, tmp_path: Path
) -> None:
    url = tmp_path / "out.zarr"
    result.model.predict_to(array_source(N_TEST, 5), str(url))
    group = zarr.open_group(str(url), mode="r")
    np.testing.assert_allclose(group["values"][...], truth, atol=1e-4)
    np.testing.assert_array_equal(group["labels"][...], truth.argmax(axis=1))
    assert dict(group.attrs) == {"classes": list(CLASSES), "complete": True}
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(url / "values")}}
    other_reader = tensorstore.open(spec, read=True).result().read().result()
    np.testing.assert_array_equal(other_reader, group["values"][...])


def test_rows_without_targets_can_be_predicted(result: Result, tmp_path: Path) -> None:
    X, _ = arrays(N_TEST, 5)
    result.model.predict_to(ArraySource(X), str(tmp_path / "out"))
    values = zarr.open_group(str(tmp_path / "out"), mode="r")["values"][...]
    np.testing.assert_array_equal(values, result.model.values(X))


def test_values_have_no_labels(tmp_path: Path) -> None:
    X, _ = arrays()
    model = finished(settings(), source=ArraySource(X, X[:, :2], unit_rows=16)).model
    model.predict_to(ArraySource(X), str(tmp_path / "out"))
    group = zarr.open_group(str(tmp_path / "out"), mode="r")
    assert set(group.keys()) == {"values"}
    assert dict(group.attrs) == {"complete": True}


def test_predictions_are_not_overwritten_unasked(result: Result, tmp_path: Path) -> None:
    url = str(tmp_path / "out")
    result.model.predict_to(array_source(20, 5), url)
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match="exists already"):
        result.model.predict_to(array_source(30, 6), url)
    assert tree(tmp_path) == before
    result.model.predict_to(array_source(30, 6), url, overwrite=True)
    assert zarr.open_group(url, mode="r")["values"].shape == (30, C)


@pytest.mark.parametrize("overwrite", [False, True])
def test_nothing_else_is_ever_overwritten(
    result: Result, overwrite: bool, tmp_path: Path, run_dir: Path
) -> None:
    """zarr would delete the whole folder, whatever is in it."""
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "cat.jpg").write_bytes(b"meow")
    zarr.create_group(str(tmp_path / "train.zarr")).create_array("X", shape=(3,), dtype="f4")
    zarr.create_array(str(tmp_path / "array.zarr"), shape=(3,), dtype="f4")
    before = tree(tmp_path)
    for place in (tmp_path, photos, photos / "cat.jpg", tmp_path / "train.zarr",
                  tmp_path / "array.zarr"):  # fmt: skip
        with pytest.raises(ConfigError, match="something other than predictions"):
            result.model.predict_to(array_source(20, 5), str(place), overwrite=overwrite)
    assert tree(tmp_path) == before


def test_an_empty_folder_is_a_free_place(result: Result, tmp_path: Path) -> None:
    result.model.predict_to(array_source(20, 5), str(tmp_path))
    assert zarr.open_group(str(tmp_path), mode="r").attrs["complete"]


def _predict_and_die(run_dir: Path, url: Path) -> None:
    import signal

    model_module.EVALUATED_ROWS, model_module.PREDICTION_CHUNK = 10, 17 * C * 4
    model = load_model(run_dir, threads=1)
    slabs = model._slabs

    def die_in_the_middle(source: Any, rows: int) -> Any:
        for i, slab in enumerate(slabs(source, rows)):
            if i == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            yield slab

    KernelModel._slabs = lambda self, source, rows: die_in_the_middle(source, rows)  # type: ignore[method-assign]
    model.predict_to(array_source(N_TEST, 5), str(url))


def test_predictions_of_a_killed_process_are_not_complete(
    result: Result, run_dir: Path, tmp_path: Path
) -> None:
    life = process(_predict_and_die, run_dir, tmp_path / "out")
    life.join(60)
    assert life.exitcode == -9
    group = zarr.open_group(str(tmp_path / "out"), mode="r")
    assert "complete" not in group.attrs
    assert group["values"].shape == (N_TEST, C)
    with pytest.raises(ConfigError, match="exists already"):
        result.model.predict_to(array_source(N_TEST, 5), str(tmp_path / "out"))
    result.model.predict_to(array_source(N_TEST, 5), str(tmp_path / "out"), overwrite=True)
    assert zarr.open_group(str(tmp_path / "out"), mode="r").attrs["complete"]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_can_be_read_back(method: str, tmp_path: Path) -> None:
    result = finished(settings(tmp_path, **METHODS[method]), source=stream(method))
    loaded = load_model(tmp_path, threads=1)
    X, _ = arrays(N_TEST, 5)
    assert loaded.values(X).tobytes() == result.model.values(X).tobytes()
    loaded.backend.close()
    assert latest_step(tmp_path) == 14
