"""Check that predictions for Dask arrays and data frames are lazy, and equal those for arrays in
memory."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from typing import Any

import cloudpickle
import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest

from streamkern import DataError, KernelClassifier, KernelRegressor
from streamkern.planning.memory import EVALUATED_ROWS

pytestmark = pytest.mark.usefixtures("one_blas_thread")

rng = np.random.default_rng(0)
X = rng.normal(size=(300, 4))
Y = np.stack([np.sin(X[:, 0]), X[:, 1] * X[:, 2]], axis=1)
LABELS = np.array(["low", "mid", "high"])[np.digitize(X[:, 0] + X[:, 1], [-0.7, 0.7])]
# The ridge keeps the weights small. Without it, a BLAS that rounds products of few rows differently
# from products of many rows changes the fourth digit of predictions.
SMALL: dict[str, Any] = {
    "threads": 1, "epochs": 2,
    "kernel": "laplace", "bandwidth": 2.0, "ridge": 1e-3,
}  # fmt: skip


class CountedRows:
    """A Dask array of the rows X that counts how many of its blocks are read."""

    def __init__(self, chunks: Any = (70, 2)) -> None:
        self.count = 0
        self._lock = threading.Lock()
        self.rows = da.from_array(X, chunks=chunks).map_blocks(
            self._read, dtype=X.dtype, meta=np.empty((0, 0))
        )

    def _read(self, block: np.ndarray) -> np.ndarray:
        with self._lock:
            self.count += 1
        return block


@pytest.fixture(scope="module")
def regressor() -> KernelRegressor:
    return KernelRegressor(**SMALL).fit(X, Y)


@pytest.fixture(scope="module")
def classifier() -> KernelClassifier:
    return KernelClassifier(**SMALL).fit(X, LABELS)


def assert_lazy(lazy: Any, expected: np.ndarray, counted: CountedRows) -> None:
    """Check that predictions are lazy, are computed block by block, and equal `expected`."""
    assert isinstance(lazy, da.Array)
    assert counted.count == 0
    assert (lazy.shape, lazy.dtype) == (expected.shape, expected.dtype)
    assert lazy.chunks[0] == (70, 70, 70, 70, 20)
    assert_nearly_equal(lazy[70:140].compute(), expected[70:140])
    assert counted.count <= 2  # one block of rows, which has two chunks of columns
    assert_nearly_equal(lazy.compute(), expected)


def assert_nearly_equal(answer: np.ndarray, expected: np.ndarray) -> None:
    """Check that labels are equal, and values up to the rounding of float32: a product of few rows
    may sum in another order."""
    if expected.dtype.kind == "f":
        np.testing.assert_allclose(answer, expected, atol=1e-4)
    else:
        np.testing.assert_array_equal(answer, expected)


def test_lazy_predictions_of_tile_sized_blocks_are_bit_identical(
    regressor: KernelRegressor,
) -> None:
    rows = rng.normal(size=(2500, 4))
    lazy = regressor.predict(da.from_array(rows, chunks=(EVALUATED_ROWS, 4)))
    np.testing.assert_array_equal(lazy.compute(), regressor.predict(rows))


def test_predictions_of_dask_arrays_are_lazy(
    regressor: KernelRegressor, classifier: KernelClassifier
) -> None:
    flat = KernelRegressor(**SMALL).fit(X, Y[:, 0])
    two = KernelClassifier(**SMALL).fit(X, LABELS == "mid")
    methods = ("predict", "decision_function", "predict_values")
    for answer in (
        regressor.predict, flat.predict,
        *(getattr(model, method) for model in (classifier, two) for method in methods),
    ):  # fmt: skip
        counted = CountedRows()
        assert_lazy(answer(counted.rows), answer(X), counted)


@pytest.mark.parametrize("method", ["fit", "partial_fit"])
def test_lazy_predictions_use_model_at_call(method: str) -> None:
    model = getattr(KernelRegressor(**SMALL), method)(X, Y)
    expected, lazy = model.predict(X), model.predict(da.from_array(X, chunks=(100, 4)))
    getattr(model, method)(X, -Y)
    assert_nearly_equal(lazy.compute(), expected)


def test_predictions_of_lazy_images_are_lazy() -> None:
    images = rng.integers(0, 256, (120, 3, 4, 2)).astype(np.uint8)
    labels = images[:, 0, 0, 0] > 127
    model = KernelClassifier(precision="float64", **SMALL).fit(images, labels)
    lazy = model.predict_values(da.from_array(images, chunks=(50, 3, 2, 2)))
    assert lazy.chunks == ((50, 50, 20), (2,))
    assert_nearly_equal(lazy.compute(), model.predict_values(images))
    flat = model.predict(da.from_array(images.reshape(120, -1), chunks=(50, -1)))
    assert_nearly_equal(flat.compute(), model.predict(images))


def test_lazy_blocks_are_computed_one_at_a_time(
    regressor: KernelRegressor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that Dask's threads do not compute several blocks at once, each of which takes memory
    and all processors."""
    n_running, max_running = 0, 0
    values = KernelRegressor._values

    def count_calls(self: Any, rows: Any) -> Any:
        nonlocal n_running, max_running
        n_running += 1
        max_running = max(max_running, n_running)
        result = values(self, rows)
        n_running -= 1
        return result

    monkeypatch.setattr(KernelRegressor, "_values", count_calls)
    lazy = regressor.predict(da.from_array(X, chunks=(10, 4)))
    with dask.config.set(scheduler="threads", num_workers=8):
        lazy.compute()
    assert max_running == 1


def test_invalid_lazy_input_is_refused_at_once(regressor: KernelRegressor) -> None:
    with pytest.raises(DataError, match="X has 3 features, but KernelRegressor is expecting 4"):
        regressor.predict(da.zeros((10, 3)))
    with pytest.raises(ValueError, match=r"rows of shape \(2, 2, 1\), the model was trained on"):
        KernelRegressor(**SMALL).fit(X.reshape(300, 1, 4, 1), Y).predict(da.zeros((10, 2, 2, 1)))
    with pytest.raises(DataError, match="X contains NaN"):
        regressor.predict(da.full((10, 4), np.nan)).compute()


def test_partitions_of_unknown_length_are_predicted(classifier: KernelClassifier) -> None:
    frame = pd.DataFrame(X, columns=list("abcd"))
    table = dd.from_pandas(frame, npartitions=3).query("a < 9")
    lazy = classifier.predict(table)
    assert isinstance(lazy, da.Array)
    assert np.isnan(lazy.shape[0])
    np.testing.assert_array_equal(lazy.compute(), classifier.predict(X))
    named = KernelClassifier(**SMALL).fit(frame, LABELS)
    np.testing.assert_array_equal(named.predict(table).compute(), named.predict(frame))
    unknown = da.from_array(X, chunks=(100, 4))[da.from_array(X[:, 0] < 9, chunks=100)]
    np.testing.assert_array_equal(classifier.predict(unknown).compute(), classifier.predict(X))
    with pytest.raises(DataError, match="call compute_chunk_sizes first"):
        classifier.fit(unknown, LABELS)


def test_lazy_graph_holds_model_without_training_objects(regressor: KernelRegressor) -> None:
    model = copy.copy(regressor)
    locks = [threading.Lock()]  # locks cannot be pickled
    model.callbacks, model.transforms, fitted = locks, locks, model._state
    model._fitted_ = replace(fitted, attributes={**fitted.attributes, "history_": locks})
    lazy = model.predict(da.from_array(X, chunks=(70, 4)))
    message = cloudpickle.dumps(lazy)
    assert len(message) < 2 * (regressor.centers_.nbytes + regressor.dual_coef_.nbytes + X.nbytes)
    assert_nearly_equal(cloudpickle.loads(message).compute(), regressor.predict(X))


def test_empty_partitions_give_empty_predictions() -> None:
    table = pd.DataFrame(np.sort(X, axis=0), columns=list("abcd"))
    lazy = dd.from_pandas(table, npartitions=4)
    selected, expected = lazy[lazy["a"] > 1], table[table["a"] > 1]
    model = KernelClassifier(**SMALL).fit(table, pd.Series(LABELS, name="level"))
    np.testing.assert_array_equal(model.predict(selected).compute(), model.predict(expected))
    rows = selected.to_dask_array()
    np.testing.assert_array_equal(model.predict(rows).compute(), model.predict(expected))
    assert model.decision_function(lazy[lazy["a"] > 99]).compute().shape == (0, 3)
    model.set_output(predict="pandas")
    pd.testing.assert_series_equal(model.predict(selected).compute(), model.predict(expected))
    pd.testing.assert_frame_equal(
        model.decision_function(selected).compute(), model.decision_function(expected)
    )
