"""Check that rows whose axes are in another order are refused by every entry point."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.array
import numpy as np
import pytest

from streamkern import KernelClassifier, KernelRegressor
from streamkern.basics.errors import ConfigError, DataError, RowShapeError
from streamkern.cli import main
from streamkern.ingest.ingest import ingest
from streamkern.stream.sources.alignment import check_row_shape
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.mixture import MixtureSource
from streamkern.train.saved_model import load_model
from tests.runs import finished, settings

SHAPE = (4, 4, 3)
OTHER_SHAPES = [(3, 4, 4), (2, 8, 3), (4, 3, 4)]
REFUSAL = "rows of shape .*; transpose or reshape its axes"
RNG = np.random.default_rng(3)
X = RNG.standard_normal((80, *SHAPE)).astype(np.float32)
Y = X[:, 0, 0, 0] + X[:, 3, 2, 1]
SMALL = {
    "model.n_centers": "auto", "data.batch_size": 40, "data.epochs": 1, "solver.name": "direct",
    "model.kernel": "laplace",
}  # fmt: skip


def source(shape: tuple[int, ...], n: int = 80) -> ArraySource:
    """Return the first n rows in this shape."""
    return ArraySource(X[:n].reshape(n, *shape), Y[:n])


def run(run_dir: Path | None = None, shape: tuple[int, ...] = SHAPE, **options: Any) -> Any:
    """Train on the rows in a shape; return the finished run."""
    more = options.pop("settings", {})
    return finished(settings(run_dir, **(SMALL | more)), source=source(shape), **options)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "run"
    run(path)
    return path


@pytest.mark.parametrize("axes", [(6,), (2, 3), (2, 3, 1), (1, 2, 3), (3, 2, 1), (6, 1, 1)])
@pytest.mark.parametrize("desired", [(6,), (2, 3, 1), (1, 2, 3)])
def test_row_shapes_accept_same_axes_and_flat_rows(axes: Any, desired: Any) -> None:
    full = (*axes, 1) if len(axes) == 2 else axes
    if full == desired or 1 in (len(axes), len(desired)):
        check_row_shape("X has", axes, "the data has", desired)
    else:
        with pytest.raises(RowShapeError, match=REFUSAL):
            check_row_shape("X has", axes, "the data has", desired)


@pytest.mark.parametrize("other_shape", OTHER_SHAPES)
def test_estimators_refuse_images_of_other_axes(other_shape: tuple[int, ...]) -> None:
    reshaped, labels = X.reshape(80, *other_shape), (Y > 0).astype(int)
    regressor = KernelRegressor(solver="direct", random_state=0).fit(X, Y)
    classifier = KernelClassifier(solver="direct", random_state=0).fit(X, labels)
    warm = KernelRegressor(solver="block", warm_start=True, centers=X[:20].reshape(20, -1)).fit(
        X, Y
    )
    online = KernelRegressor(solver="block", random_state=0).partial_fit(X, Y)
    entry_points: list[Callable[[], Any]] = [
        lambda: regressor.predict(reshaped),
        lambda: regressor.predict(ArraySource(reshaped)),
        lambda: regressor.score(reshaped, Y),
        lambda: regressor.score(ArraySource(reshaped, Y)),
        lambda: classifier.predict(reshaped),
        lambda: classifier.decision_function(reshaped),
        lambda: KernelRegressor(solver="direct").fit(X, Y, test=(reshaped, Y)),
        lambda: KernelRegressor(solver="direct", centers=reshaped[:20]).fit(X, Y),
        lambda: warm.fit(reshaped, Y),
        lambda: online.partial_fit(reshaped, Y),
        lambda: online.partial_fit(ArraySource(reshaped, Y)),
    ]
    for entry_point in entry_points:
        with pytest.raises(RowShapeError, match=REFUSAL):
            entry_point()


def test_shapes_and_numbers_of_features_raise_the_same_error(tmp_path: Path) -> None:
    """Check that an error for one of them can be caught like the other, by its old name too."""
    regressor = KernelRegressor(solver="direct", random_state=0).fit(X, Y)
    lazy = dask.array.from_array(X, chunks=20)
    entry_points: list[Callable[[], Any]] = [
        lambda: regressor.predict(X[:, :3]),
        lambda: regressor.predict(X[:, :3].reshape(80, -1)),
        lambda: regressor.predict(ArraySource(X[:, :3])),
        lambda: regressor.predict(lazy[:, :3]),
        lambda: regressor.predict(lazy.transpose(0, 3, 1, 2)),
        lambda: regressor.score(ArraySource(X[:, :3], Y)),
        lambda: KernelRegressor(solver="direct").fit(X, Y, test=(X[:, :3], Y)),
        lambda: KernelRegressor(solver="direct", centers=X[:20, :3]).fit(X, Y),
        lambda: MixtureSource([ArraySource(X, Y), ArraySource(X[:, :3], Y)]),
        lambda: ingest(iter([(X, Y), (X[:, :3], Y)]), tmp_path / "store"),
    ]
    for entry_point in entry_points:
        with pytest.raises(RowShapeError) as caught:
            entry_point()
        assert isinstance(caught.value, ConfigError)
        assert isinstance(caught.value, DataError)


@pytest.mark.parametrize("other_shape", OTHER_SHAPES)
def test_runs_refuse_images_of_other_axes(
    model: Path, other_shape: tuple[int, ...], tmp_path: Path
) -> None:
    reshaped = X.reshape(80, *other_shape)
    np.save(tmp_path / "Z.npy", reshaped[:20])
    file = {"model.centers": str(tmp_path / "Z.npy")}
    run(tmp_path / "start", settings={"solver.name": "block"})
    start = {"solver.name": "block", "solver.warm_start": str(tmp_path / "start")}
    loaded = load_model(model)
    entry_points: list[Callable[[], Any]] = [
        lambda: loaded.predict(ArraySource(reshaped)),
        lambda: loaded.values(reshaped),
        lambda: loaded.evaluate(ArraySource(reshaped, Y)),
        lambda: loaded.predict_to(ArraySource(reshaped), tmp_path / "out.npy"),
        lambda: run(test=ArraySource(reshaped, Y)),
        lambda: run(centers=reshaped[:20]),
        lambda: run(settings=file),
        lambda: run(shape=other_shape, settings=start),
    ]
    with loaded.backend:
        for entry_point in entry_points:
            with pytest.raises(RowShapeError, match=REFUSAL):
                entry_point()
    assert not (tmp_path / "out.npy").exists()


@pytest.mark.parametrize("other_shape", OTHER_SHAPES)
@pytest.mark.parametrize("kind", ["npz", "zarr"])
def test_commands_refuse_images_of_other_axes(
    model: Path, kind: str, other_shape: tuple[int, ...], tmp_path: Path, capsys: Any
) -> None:
    data = tmp_path / f"turned.{kind}"
    if kind == "npz":
        np.savez(data, X=X.reshape(80, *other_shape), y=Y)
    else:
        ingest(X.reshape(80, *other_shape), data, y=Y)
    for command in (["evaluate", model, data], ["predict", model, data, tmp_path / "out.csv"]):
        assert main.run_command([str(word) for word in command]) == 2
        assert "transpose or reshape its axes" in capsys.readouterr().err
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize("scale", ["feature", "global", "none"])
@pytest.mark.parametrize(("train_shape", "new_shape"), [(SHAPE, (48,)), ((48,), SHAPE)])
def test_flat_rows_and_images_have_equal_predictions(
    scale: str, train_shape: tuple[int, ...], new_shape: tuple[int, ...]
) -> None:
    """Check also 4 and 48 rows, as many as a row has lines and values."""
    model = run(shape=train_shape, settings={"data.scale": scale}).model
    for n in (4, 48, 80):
        expected = model.values(X[:n].reshape(n, *train_shape))
        np.testing.assert_array_equal(model.predict(source(new_shape, n)), expected)
        np.testing.assert_array_equal(model.values(X[:n].reshape(n, *new_shape)), expected)
