"""Test the values and metrics of a trained model, also of a loaded one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse

from streamkern.basics.errors import ConfigError, DataError, RunError
from streamkern.estimator.estimators import KernelClassifier
from streamkern.rundir.run_directory import RunDirectory
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.train.model import kernel_model as model_module
from streamkern.train.saved_model import load_model
from streamkern.train.train import Result
from tests.runs import (
    CLASSES,
    METHODS,
    N_TEST,
    Array,
    C,
    D,
    array_source,
    arrays,
    brute_force,
    finished,
    latest_step,
    settings,
    stopped,
    stream,
)
from tests.store_damage import tree


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use tiles whose borders fall inside the test rows, and not on those of units."""
    monkeypatch.setattr(model_module, "EVALUATED_ROWS", 10)


# -- values and metrics ---------------------------------------------------------------------------


@pytest.mark.usefixtures("small_tiles")
def test_values_and_metrics_equal_formula(result: Result, truth: Array) -> None:
    X, y = arrays(N_TEST, 5)
    np.testing.assert_allclose(result.model.values(X), truth, atol=1e-4)
    metrics = result.model.evaluate(array_source(N_TEST, 5))
    np.testing.assert_allclose(metrics["mse"], ((truth - np.eye(C)[y]) ** 2).mean(), rtol=1e-4)
    assert metrics["accuracy"] == (truth.argmax(axis=1) == y).mean()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("form", ["csr", "csc", "coo", "dok"])
def test_sparse_rows_of_any_format_have_same_values(result: Result, form: str) -> None:
    X = arrays(N_TEST, 5)[0]
    X[np.abs(X) < 0.5] = 0
    sparse = scipy.sparse.coo_array(X).asformat(form)
    np.testing.assert_array_equal(result.model.values(sparse), result.model.values(X))


def test_metrics_do_not_depend_on_units(result: Result) -> None:
    per_unit = [
        result.model.evaluate(array_source(N_TEST, 5, unit_rows=rows)) for rows in (1, 16, 200)
    ]
    for metrics in per_unit[1:]:
        assert metrics["mse"] == pytest.approx(per_unit[0]["mse"], rel=1e-6)
        assert metrics["accuracy"] == per_unit[0]["accuracy"]


def test_random_transforms_of_evaluated_data_are_refused(result: Result) -> None:
    """Check a test set with noise, which would be evaluated without it."""
    noisy = AugmentedSource(array_source(N_TEST, 5), 1, stream().feed_transforms)
    with pytest.raises(ConfigError, match=r"augmented by .*not applied to evaluated rows"):
        result.model.evaluate(noisy)


def test_loaded_model_equals_trained_model(run_dir: Path, result: Result) -> None:
    before = tree(run_dir)
    loaded = load_model(run_dir, threads=1)
    X, _ = arrays(N_TEST, 5)
    assert loaded.values(X).tobytes() == result.model.values(X).tobytes()
    assert (loaded.classes, loaded.row_shape, loaded.n_outputs) == (CLASSES, (D,), C)
    loaded.backend.close()
    assert tree(run_dir) == before


def test_running_run_can_be_loaded(tmp_path: Path) -> None:
    """Compare the model of the last checkpoint with the formula."""
    stopped(settings(tmp_path), 5, source=stream())
    assert latest_step(tmp_path) == 5
    loaded = load_model(tmp_path, threads=1)
    X = arrays(N_TEST, 5)[0]
    with RunDirectory(tmp_path, writable=False) as run:
        setup = run.load_setup()
    assert setup is not None
    partly_trained: Any = SimpleNamespace(model=loaded, Z=setup.arrays["Z"])
    np.testing.assert_allclose(loaded.values(X), brute_force(partly_trained, X), atol=1e-4)
    loaded.backend.close()


def test_load_requires_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no run in"):
        load_model(tmp_path / "none")
    with pytest.raises(RunError, match="there is no run in"):
        load_model(tmp_path)


def add_one(X: Array, Y: Array, rng: Any) -> tuple[Array, Array]:
    """Transform rows by adding 1 to each feature."""
    return X + X.dtype.type(1), Y


add_one.deterministic = True  # type: ignore[attr-defined]


def test_user_transform_cannot_be_loaded(tmp_path: Path) -> None:
    finished(settings(tmp_path), source=array_source(transforms=[add_one]))
    with pytest.raises(ConfigError, match="'add_one' as a transform"):
        load_model(tmp_path)


# -- other rows and classes -----------------------------------------------------------------------


def test_other_features_are_refused(result: Result, tmp_path: Path) -> None:
    X, y = arrays(20, 5)
    wider_source = ArraySource(np.c_[X, X], y, classes=CLASSES)
    for use in (
        result.model.evaluate,
        lambda source: result.model.predict_to(source, str(tmp_path / "out")),
    ):
        with pytest.raises(ConfigError, match=r"rows of shape \(10,\).*trained on \(5,\)"):
            use(wider_source)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("y", "options", "named"),
    [
        (
            np.arange(20) % 3,
            {"classes": ("ant", "bee", "dog")},
            r"rows of the unknown class 'dog'",
        ),
        (np.arange(20) % 3, {}, r"rows of the unknown classes '0', '1', '2'"),
        (np.zeros((20, 3)), {}, "3 values"),
        (None, {}, "0 values"),
    ],
)
def test_other_targets_are_refused(
    result: Result, y: Any, options: dict[str, Any], named: str
) -> None:
    """Check that the same number of classes with other names is refused, because the accuracy would
    be wrong."""
    with pytest.raises((ConfigError, DataError), match=named):
        result.model.evaluate(ArraySource(arrays(20, 5)[0], y, **options))


def test_classes_are_matched_by_name(result: Result) -> None:
    X, ids = arrays(20, 5)[0], np.arange(20) % 2
    named_classes = result.model.evaluate(ArraySource(X, ids, classes=("ant", "bee", "cat")))
    for names in (("bee", "ant"), ("bee", "dog", "ant")):
        places = np.array([names.index(name) for name in ("ant", "bee")])
        assert result.model.evaluate(ArraySource(X, places[ids], classes=names)) == named_classes


@pytest.mark.full(all_but_every=4)
@pytest.mark.parametrize("method", METHODS)
def test_model_of_every_method_can_be_loaded(method: str, tmp_path: Path) -> None:
    result = finished(settings(tmp_path, **METHODS[method]), source=stream(method))
    loaded = load_model(tmp_path, threads=1)
    X, _ = arrays(N_TEST, 5)
    assert loaded.values(X).tobytes() == result.model.values(X).tobytes()
    loaded.backend.close()
    assert latest_step(tmp_path) == 14


@pytest.mark.parametrize("value", [1e39, 1e60, 1e300])
def test_rows_beyond_float32_are_refused(value: float) -> None:
    """Check that NaN is refused, and not predicted as the first class."""
    X, y = arrays()
    model = KernelClassifier(bandwidth=2.0, n_centers=20, epochs=1, threads=1).fit(X, y)
    rows = np.array(X[:3], np.float64)
    rows[1, 2] = value
    with pytest.raises(DataError, match="row 1 is too large for float32"):
        model.predict(rows)
    distant_row = np.array(X[:1], np.float64)
    distant_row[0, 2] = 1e12  # far from all centers, but finite in float32
    assert np.isfinite(model.decision_function(distant_row)).all()
