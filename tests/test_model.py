"""A trained model: its values, metrics and written predictions against dense float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from scipy.spatial.distance import cdist
from sklearn.metrics import accuracy_score, mean_squared_error

from streamkern import ArraySource, ConfigError, RunConfig, RunError, Scale, ZarrSource
from streamkern.augment import deterministic
from streamkern.backend import Backend
from streamkern.kernels import KernelOperator, Laplace
from streamkern.model import KernelModel, load_model
from streamkern.sources import AugmentedSource
from streamkern.train import Result, train

rng = np.random.default_rng(1)
X = rng.normal(size=(130, 3))
Z = rng.normal(size=(20, 3))
ALPHA = rng.normal(size=(20, 2))
LABELS = rng.integers(0, 2, 130)
EXACT = np.exp(-cdist(X, Z) / 1.5) @ ALPHA


def make(backend: Backend, classes: tuple[str, ...] | None, **settings: Any) -> KernelModel:
    op = KernelOperator(Laplace(1.5), backend, "float64")
    points = op.points(Z, right=True)
    values = {"row_shape": (3,), "fixed": ()} | settings
    return KernelModel(op, points, ALPHA, classes, **values)


@pytest.fixture
def backend() -> Iterator[Backend]:
    with Backend(threads=2) as made:
        yield made


@pytest.fixture
def classifier(backend: Backend) -> KernelModel:
    return make(backend, ("a", "b"))


@pytest.fixture
def regressor(backend: Backend) -> KernelModel:
    return make(backend, None)


def test_values_are_the_kernel_sum(regressor: KernelModel, monkeypatch: Any) -> None:
    np.testing.assert_allclose(regressor.values(X), EXACT, atol=1e-10)
    whole = regressor.values(X)
    monkeypatch.setattr("streamkern.model.SLAB_ROWS", 7)
    np.testing.assert_allclose(regressor.values(X), whole, atol=1e-13)
    assert regressor.values(X[:0]).shape == (0, 2)


def test_scaling_is_applied(backend: Backend) -> None:
    model = make(backend, None, fixed=(Scale("feature", np.arange(3), np.full(3, 2.0)),))
    np.testing.assert_allclose(model.values(2 * X + np.arange(3)), EXACT, atol=1e-10)


def test_metrics_are_scikit_learns(classifier: KernelModel, regressor: KernelModel) -> None:
    onehot = np.eye(2)[LABELS]
    metrics = classifier.evaluate(ArraySource(X, np.array(["a", "b"])[LABELS], unit_rows=17))
    assert metrics["mse"] == pytest.approx(mean_squared_error(onehot, EXACT))
    assert metrics["accuracy"] == accuracy_score(LABELS, EXACT.argmax(axis=1))
    Y = rng.normal(size=(130, 2))
    metrics = regressor.evaluate(ArraySource(X, Y, unit_rows=17))
    assert metrics == {"mse": pytest.approx(mean_squared_error(Y, EXACT))}


def test_rows_stream_in_order(regressor: KernelModel) -> None:
    blocks = list(regressor.stream(ArraySource(X, EXACT, unit_rows=17)))
    np.testing.assert_array_equal(np.concatenate([b.rows for b, _, _ in blocks]), np.arange(130))
    for _, F, Y in blocks:
        np.testing.assert_allclose(F, Y, atol=1e-10)


def test_images_are_flattened(backend: Backend) -> None:
    model = make(backend, None, row_shape=(1, 3, 1))
    images = X.reshape(130, 1, 3, 1)
    np.testing.assert_allclose(model.values(images), EXACT, atol=1e-10)
    assert model.evaluate(ArraySource(images, EXACT))["mse"] < 1e-20
    assert model.evaluate(ArraySource(X, EXACT))["mse"] < 1e-20


def test_predictions_on_disk(classifier: KernelModel, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("streamkern.model.PREDICTION_CHUNK", 25 * 16)  # chunks of 25 rows
    url = tmp_path / "p.zarr"
    classifier.predict_to(ArraySource(X, unit_rows=17), str(url))
    group = zarr.open_group(url, mode="r")
    np.testing.assert_allclose(group["values"][:], EXACT, atol=1e-10)
    np.testing.assert_array_equal(group["labels"][:], EXACT.argmax(axis=1))
    assert dict(group.attrs) == {"classes": ["a", "b"], "complete": True}
    assert group["values"].chunks == (25, 2)
    with pytest.raises(ConfigError, match=r"p\.zarr exists already"):
        classifier.predict_to(ArraySource(X), str(url))
    classifier.predict_to(ArraySource(X[:5]), str(url), overwrite=True)
    assert zarr.open_group(url, mode="r")["values"].shape == (5, 2)


def test_other_files_are_never_overwritten(regressor: KernelModel, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    zarr.create_group(tmp_path / "store").create_array("X", shape=(3,), dtype="f4")
    for place in (tmp_path, tmp_path / "notes.txt", tmp_path / "store"):
        with pytest.raises(ConfigError, match="something other than predictions"):
            regressor.predict_to(ArraySource(X), str(place), overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_other_features_and_targets_are_refused(
    classifier: KernelModel, regressor: KernelModel, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"rows of shape \(2,\), the model was trained on \(3,\)"):
        regressor.evaluate(ArraySource(X[:, :2], EXACT))
    with pytest.raises(ConfigError, match=r"rows of shape \(2,\)"):
        regressor.predict_to(ArraySource(X[:, :2]), str(tmp_path / "p.zarr"))
    assert not (tmp_path / "p.zarr").exists()
    with pytest.raises(ConfigError, match="the data has 1 values, the model was trained on 2"):
        regressor.evaluate(ArraySource(X, EXACT[:, 0]))
    with pytest.raises(ConfigError, match=r"2 classes \(c, d\), .* 2 classes \(a, b\)"):
        classifier.evaluate(ArraySource(X, np.array(["c", "d"])[LABELS]))


# ----------------------------------------------------------------------------------- from a run


def run(folder: Path, source: Any, **tables: dict[str, Any]) -> Result:
    settings: dict[str, dict[str, Any]] = {
        "data": {"train": "memory", "epochs": 2},
        "model": {"n_centers": 40, "bandwidth": 2.0},
        "solver": {},
        "run": {"run_dir": str(folder / "run"), "threads": 1, "device": "cpu"},
    }
    for name, table in tables.items():
        settings[name] |= table
    result = train(RunConfig.from_tables(settings), source=source)
    result.model.backend.close()
    return result


def test_a_saved_model_is_the_trained_one(tmp_path: Path) -> None:
    names = np.array(["no", "yes"])[(X[:, 0] > 0).astype(int)]
    source = AugmentedSource(ArraySource(X, names), 3, [Scale("feature")])
    result = run(tmp_path, source)
    model = load_model(tmp_path / "run", device="cpu", threads=2)
    with model.backend:
        assert model.classes == ("no", "yes")
        np.testing.assert_array_equal(model.values(X), result.model.values(X))
        assert model.evaluate(ArraySource(X, names))["accuracy"] > 0.9


def test_the_average_or_the_last_iterate(tmp_path: Path) -> None:
    source = ArraySource(X, EXACT)
    averaged = run(tmp_path / "a", source)
    last = run(tmp_path / "b", source, solver={"average": False})
    assert not np.array_equal(averaged.model.values(X), last.model.values(X))
    for folder, result in (("a", averaged), ("b", last)):
        model = load_model(tmp_path / folder / "run", device="cpu")
        with model.backend:
            np.testing.assert_array_equal(model.values(X), result.model.values(X))


def test_a_store_without_targets_is_predicted(make_zarr: Any, tmp_path: Path) -> None:
    path = make_zarr({"X": X, "y": EXACT}, chunk_rows=30)
    run(tmp_path, ZarrSource(path))
    model = load_model(tmp_path / "run", device="cpu")
    with model.backend:
        model.predict_to(ZarrSource(path, y=None), str(tmp_path / "p.zarr"))
        written = zarr.open_group(tmp_path / "p.zarr", mode="r")["values"][:]
        np.testing.assert_array_equal(written, model.values(X))


def test_functions_are_not_kept_on_disk(tmp_path: Path) -> None:
    @deterministic
    def halve(X: Any, Y: Any, rng: Any) -> Any:
        return X / 2, Y

    run(tmp_path, AugmentedSource(ArraySource(X, EXACT), 1, [halve]))
    with pytest.raises(ConfigError, match=r"function .*halve.* as a transform"):
        load_model(tmp_path / "run", device="cpu")


def test_no_run_and_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no run directory"):
        load_model(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="no checkpoint yet"):
        load_model(tmp_path / "empty")
