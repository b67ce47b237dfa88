"""Runs on sparse rows, from each form of them to predictions, beside runs on dense rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt
import pytest
import scipy.sparse as sp
import zarr
from sklearn.datasets import dump_svmlight_file

import streamkern
from streamkern import KernelClassifier, KernelRegressor
from streamkern.basics.errors import ConfigError, DataError
from streamkern.config.run_config import RunConfig
from streamkern.store.sparse_rows import PackedRows, as_csr, pack_rows
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.transforms import GaussianNoise
from tests import reference as ref
from tests.runs import assert_same_bits, final, finished, settings, stopped

D, KEPT = 60_000, 40
"""Number of features, and of features with entries, which dense rows for a comparison have."""
SOLVERS = {
    "block": {"solver.name": "block", "solver.block_size": 30},
    "direct": {"solver.name": "direct", "solver.ridge": 1e-3},
    "falkon": {"solver.name": "falkon", "solver.ridge": 1e-3},
    "eigenpro3": {"solver.name": "eigenpro3", "solver.n_nystrom": 80},
    "eigenpro4": {"solver.name": "eigenpro4", "solver.n_nystrom": 80, "solver.period": 3},
    "eigenpro2": {"solver.name": "eigenpro2", "model.n_centers": "auto"},
    "sgd": {"solver.name": "sgd", "model.n_centers": "auto"},
    "nystrom": {"solver.name": "block", "model.features": "nystrom"},
    "log_loss": {"solver.name": "block", "model.loss": "log_loss"},
}  # fmt: skip


@cache
def rows(n: int = 135, seed: int = 0) -> tuple[Any, npt.NDArray[np.int64]]:
    """Return CSR rows (n, D) float32 with entries of `KEPT` features, and class ids (n,)."""
    rng = np.random.default_rng([seed, 3])
    few = sp.random_array((n, KEPT), density=0.2, rng=rng, format="csr").astype(np.float32)
    places = np.sort(np.random.default_rng(1).choice(D, KEPT, replace=False))
    X = sp.csr_array((few.data, places[few.indices], few.indptr), shape=(n, D))
    return X, few.toarray()[:, :3].argmax(axis=1)


def dense(X: Any) -> npt.NDArray[np.float32]:
    """Return the columns of X that have entries."""
    places = np.sort(np.random.default_rng(1).choice(D, KEPT, replace=False))
    return np.asarray(X[:, places].toarray())


def source(n: int = 135, seed: int = 0) -> ArraySource:
    X, y = rows(n, seed)
    return ArraySource(PackedRows.of_matrix(X), y, classes=("ant", "bee", "cat"), unit_rows=16)


@pytest.mark.parametrize("solver", SOLVERS)
def test_sparse_run_equals_dense_run(solver: str) -> None:
    X, y = rows()
    config = settings(**SOLVERS[solver], **{"run.precision": "float64"})
    dense_source = ArraySource(dense(X), y, classes=("ant", "bee", "cat"), unit_rows=16)
    dense_run, sparse_run = finished(config, source=dense_source), finished(config, source=source())
    T, _ = rows(50, 7)
    expected = dense_run.model.values(dense(T))
    assert sparse_run.model.values(PackedRows.of_matrix(T)) == pytest.approx(expected, abs=1e-7)
    assert np.array_equal(sparse_run.order, dense_run.order)
    assert np.array_equal(as_csr(sparse_run.Z, D).toarray(), _spread(dense_run.Z))


@pytest.mark.parametrize("unit", [1e-10, 1.0, 1e4, 1e10])
def test_sparse_rows_in_any_unit_give_exact_kernel_ridge(unit: float) -> None:
    """Compare with the equations in float64; the jitter may not grow with the unit of the rows."""
    (X, _), (T, _) = rows(), rows(50, 7)
    A, B = (dense(part).astype(np.float64) for part in (X, T))
    y = np.sin(3 * A[:, 0]) + A[:, 1]
    model = KernelRegressor(
        kernel="gaussian", bandwidth=unit, scale="none", metric="none", solver="direct",
        ridge=1e-3, precision="float64",
    ).fit(X.astype(np.float64) * unit, y)  # fmt: skip
    K = ref.make_kernel("gaussian", 1.0)
    alpha = np.linalg.solve(K(A, A) + 1e-3 * len(A) * np.eye(len(A)), y - y.mean())
    expected = y.mean() + K(B, A) @ alpha
    assert model.predict(T.astype(np.float64) * unit) == pytest.approx(expected, abs=1e-10)


def _spread(Z: npt.NDArray[Any]) -> npt.NDArray[Any]:
    out = np.zeros((len(Z), D), Z.dtype)
    out[:, np.sort(np.random.default_rng(1).choice(D, KEPT, replace=False))] = Z
    return out


@pytest.mark.parametrize("solver", ["blocks", "eigenpro4"])
def test_stopped_run_resumes_to_same_bits(tmp_path: Path, solver: str) -> None:
    overrides = SOLVERS["block" if solver == "blocks" else solver]
    uninterrupted = settings(tmp_path / "whole", **overrides)
    finished(uninterrupted, source=source())
    part = settings(tmp_path / "part", **overrides)
    stopped(part, 5, source=source(), test=source(10, 5))
    finished(part.with_overrides({"run.evaluate_every": 1}), source=source(), test=source(10, 5))
    assert_same_bits(final(tmp_path / "part"), final(tmp_path / "whole"))


def _forms(folder: Path) -> dict[str, dict[str, Any]]:
    """Return arguments of `ingest_store` for the same rows in several forms."""
    X, y = rows()
    narrow = sp.csr_matrix(X)
    narrow.indices, narrow.indptr = (a.astype(np.int32) for a in (X.indices, X.indptr))
    sp.save_npz(folder / "X.npz", narrow)
    sp.save_npz(folder / "columns.npz", sp.csc_matrix(X))
    np.save(folder / "y.npy", y)
    dump_svmlight_file(narrow, y, str(folder / "rows.svm"), zero_based=False)
    group = zarr.open_group(folder / "cells.zarr", mode="w")
    group.attrs["encoding-type"] = "anndata"
    csr = group.create_group("X")
    csr.attrs.update({"encoding-type": "csr_matrix", "shape": list(X.shape)})
    for name in ("data", "indices", "indptr"):
        csr.create_array(name, data=np.asarray(getattr(X, name)))
    group.create_array("y", data=y)
    return {
        "csr": {"inputs": X, "y": y},
        "coo": {"inputs": X.tocoo(), "y": y},
        "npz": {"inputs": folder / "X.npz", "y": folder / "y.npy"},
        "csc": {"inputs": folder / "columns.npz", "y": folder / "y.npy"},
        "svmlight": {"inputs": folder / "rows.svm", "x": D},
        "anndata": {"inputs": folder / "cells.zarr"},
    }


def test_all_sparse_formats_give_the_same_store(tmp_path: Path) -> None:
    X, _ = rows()
    for name, form in _forms(tmp_path).items():
        inputs = form.pop("inputs")
        spec = streamkern.ingest_store(inputs, tmp_path / f"{name}.store", **form)
        assert (spec.row_shape[0], len(spec.row_shape)) == (2, 2), name
        assert (spec.file_form or {})["sparse"] == D, name
        store = streamkern.open_store(tmp_path / f"{name}.store")
        stored_rows, labels = store.read_rows(np.argsort(store.source_rows(0)))
        assert (as_csr(stored_rows.astype(np.float32), D) != X).nnz == 0, name
        assert np.array_equal(labels, rows()[1]), name
        assert "zstd" in store.codec_names(), name


def test_all_sparse_formats_are_predicted_equally(tmp_path: Path) -> None:
    X, y = rows()
    forms = _forms(tmp_path)
    model = KernelClassifier(random_state=0, n_centers=60).fit(X, y)
    expected = model.decision_function(X)
    assert model.n_features_in_ == D
    assert sp.issparse(model.centers_)
    assert model.centers_.shape == (60, D)
    assert "stay sparse" in model.report_["sparse"]
    for sparse_rows in (X.tocoo(), X.tocsc(), X.toarray(), forms["npz"]["inputs"]):
        assert np.array_equal(model.decision_function(sparse_rows), expected)
    model.save(tmp_path / "model")
    loaded_model = streamkern.load(tmp_path / "model")
    assert np.array_equal(loaded_model.decision_function(X), expected)
    assert loaded_model.n_features_in_ == D
    longer = sp.csr_array(np.ones((1, D), np.float32))  # more entries than any row of training
    assert np.isfinite(loaded_model.decision_function(longer)).all()


def test_store_is_appended_and_mixed_with_longer_rows(tmp_path: Path) -> None:
    X, y = rows()
    longest = np.argsort(np.diff(X.indptr))
    short, long = longest[:100], longest[100:]
    streamkern.ingest_store(X[short], tmp_path / "short", y=y[short].astype(float))
    streamkern.ingest_store(X[long], tmp_path / "long", y=y[long].astype(float))
    with pytest.raises(DataError, match="entries that are not 0"):
        streamkern.append_store(X[long], tmp_path / "short", y=y[long].astype(float))
    with pytest.raises(
        DataError, match=r"the rows have 100 features, but the rows before have 60,000"
    ):
        streamkern.append_store(X[long, :100], tmp_path / "short", y=y[long].astype(float))
    mixture = streamkern.MixtureSource(
        [streamkern.ZarrSource(tmp_path / k) for k in ("short", "long")]
    )
    fit = KernelRegressor(random_state=0, n_centers=40, solver="block").fit(mixture)
    streamkern.append_store(X[short], tmp_path / "long", y=y[short].astype(float))
    assert streamkern.open_store(tmp_path / "long").spec.n_rows == len(y)
    assert np.isfinite(fit.predict(tmp_path / "long")).all()


def test_rows_of_other_width_are_refused(tmp_path: Path) -> None:
    X, y = rows()
    longest = np.argsort(np.diff(X.indptr))[::-1]
    X, y = X[longest], y[longest].astype(float)  # the first block has the longest rows
    narrow = X[:, : D - 1]
    for name, some in (("own", X), ("other", narrow)):
        streamkern.ingest_store(some, tmp_path / name, y=y)
    own_store, other_store = str(tmp_path / "own"), str(tmp_path / "other")
    run = str(tmp_path / "run")
    model = KernelRegressor(random_state=0, n_centers=40, solver="block", run_dir=run).fit(
        own_store
    )
    learned = KernelRegressor(random_state=0, n_centers=40, epochs=1).partial_fit(own_store)
    other_settings = {"data.train": other_store, "solver.name": "block", "model.n_centers": 40}
    entry_points: list[Callable[[], Any]] = [
        lambda: model.predict(other_store),
        lambda: model.score(other_store),
        lambda: streamkern.evaluate(model, other_store),
        lambda: streamkern.load(run).predict(other_store),
        lambda: model.predict(streamkern.ZarrSource(other_store)),
        lambda: learned.partial_fit(other_store),
        lambda: KernelRegressor(n_centers=40).fit(own_store, test=other_store),
        lambda: streamkern.train_model(RunConfig().with_overrides(other_settings), continues=run),
        lambda: finished(
            settings(None, **{"solver.warm_start": run}), source=streamkern.ZarrSource(other_store)
        ),
    ]
    for entry_point in entry_points:
        with pytest.raises(ConfigError, match=r"has 59,999 features, .* 60,000"):
            entry_point()
    with pytest.raises(ConfigError, match="sparse features 59999 and source 1 has 60000"):
        streamkern.MixtureSource(
            [streamkern.ZarrSource(own_store), streamkern.ZarrSource(other_store)]
        )


def test_dense_rows_with_two_axes_are_not_sparse(tmp_path: Path) -> None:
    images = np.random.default_rng(0).random((60, 2, 7)).astype(np.float32)
    values = images[:, 0].sum(axis=1)
    group = zarr.open_group(tmp_path / "foreign", mode="w")
    for name, array in (("X", images), ("y", values)):
        group.create_array(name, data=array)
    with pytest.raises(DataError, match=r"rows of shape \(2, 7\)"):
        streamkern.open_store(tmp_path / "foreign")
    assert streamkern.ingest_store(tmp_path / "foreign", tmp_path / "own").row_shape == (2, 7, 1)
    generated = streamkern.GeneratorSource(
        lambda seed, epoch, i, j: (images[i:j], values[i:j, None]),
        n_rows=60, row_shape=(2, 7), dtype=np.float32, n_outputs=1, name="images",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="give images a channel"):
        KernelRegressor(random_state=0).fit(generated)
    model = KernelRegressor(random_state=0).fit(images.reshape(60, -1), values)
    assert np.array_equal(model.predict(generated), model.predict(images.reshape(60, -1)))
    X, y = rows()
    with pytest.raises(ConfigError, match="which are sparse"):
        KernelRegressor(random_state=0).fit(X, y.astype(float)).predict(generated)


def test_model_of_rows_with_two_axes_predicts_as_before(tmp_path: Path) -> None:
    """Check a model that version 0.1 trained from sources: it is not one of sparse rows."""
    images = np.random.default_rng(0).random((60, 2, 7)).astype(np.float32)
    model = KernelRegressor(random_state=0).fit(images[..., None], images[:, 0].sum(axis=1))
    expected = model.predict(images[..., None])
    fitted = model._fitted_
    assert fitted is not None
    schema = replace(fitted.schema, row_shape=(2, 7))
    model._fitted_ = replace(fitted, schema=schema, meta={**fitted.meta, "row_shape": [2, 7]})
    model.save(tmp_path / "old")
    generated = streamkern.GeneratorSource(
        lambda seed, epoch, i, j: (images[i:j], images[i:j, 0, :1]),
        n_rows=60, row_shape=(2, 7), dtype=np.float32, n_outputs=1, name="images",
    )  # fmt: skip
    for old_model in (model, streamkern.load(tmp_path / "old")):
        for X in (images.reshape(60, -1), images[..., None], generated):
            np.testing.assert_allclose(old_model.predict(X), expected, rtol=1e-5)
        assert old_model.centers_.shape == (60, 14)
        old_model.to_onnx(tmp_path / "m.onnx", overwrite=True)


@pytest.mark.parametrize("n_features", [(1 << 31) + 1, 1 << 40])
def test_too_many_features_are_refused(tmp_path: Path, n_features: int) -> None:
    X = sp.csr_array((np.ones(9, "f4"), np.arange(9) + (1 << 31) - 9, np.arange(10)))
    X = sp.csr_array((X.data, X.indices, X.indptr), shape=(9, n_features))
    sp.save_npz(tmp_path / "X.npz", X)
    entry_points: list[Callable[[], Any]] = [
        lambda: KernelRegressor().fit(X, np.arange(9.0)),
        lambda: streamkern.ingest_store(X, tmp_path / "store", y=np.arange(9.0)),
        lambda: KernelRegressor().partial_fit(X, np.arange(9.0)),
        lambda: KernelRegressor(centers=X).fit(np.ones((9, 2)), np.arange(9.0)),
    ]
    for entry_point in entry_points:
        with pytest.raises(
            DataError, match=r"features, more than the 2,147,483,648 allowed; leave"
        ):
            entry_point()


def test_sparse_store_is_ingested_and_appended(tmp_path: Path) -> None:
    X, y = rows()
    streamkern.ingest_store(X, tmp_path / "first", y=y)
    spec = streamkern.ingest_store(tmp_path / "first", tmp_path / "second")
    assert (spec.file_form or {})["sparse"] == D
    assert spec.n_outputs == 3
    streamkern.append_store(tmp_path / "first", tmp_path / "second")
    store = streamkern.open_store(tmp_path / "second")
    numbers = np.concatenate([store.source_rows(u) for u in range(store.n_chunks)])
    stored_rows, _ = store.read_rows(np.argsort(numbers))
    first_rows, _ = streamkern.open_store(tmp_path / "first").read_rows(np.arange(len(y)))
    assert np.array_equal(stored_rows, np.concatenate([first_rows, first_rows]))


def test_transforms_refuse_sparse_rows(tmp_path: Path) -> None:
    X, y = rows()
    streamkern.ingest_store(X, tmp_path / "rows", y=y)
    noise = [{"kind": "noise", "sigma": 0.1}]
    with pytest.raises(ConfigError, match="'GaussianNoise' needs dense rows"):
        streamkern.augment_store(tmp_path / "rows", tmp_path / "noisy", transforms=noise)
    for make_source in (
        lambda t: streamkern.ZarrSource(tmp_path / "rows", transforms=t),
        lambda t: ArraySource(PackedRows.of_matrix(X), y, t),
        lambda t: streamkern.MixtureSource([source()], transforms=t),
    ):
        with pytest.raises(ConfigError, match="'GaussianNoise' needs dense rows"):
            make_source([GaussianNoise(0.1)])


@pytest.mark.parametrize("zero_based", [True, False])
def test_several_svmlight_files_have_the_features_of_all(zero_based: bool, tmp_path: Path) -> None:
    X, y = rows()
    wide = np.diff(X[:, 50_000:].indptr) > 0
    paths = [tmp_path / f"{k}.svm" for k in "ab"]
    for path, part in zip(paths, (wide, ~wide), strict=True):
        narrow = sp.csr_matrix(X[part])
        narrow.indices, narrow.indptr = (a.astype("i4") for a in (narrow.indices, narrow.indptr))
        dump_svmlight_file(narrow, y[part], str(path), zero_based=False)
    if zero_based:  # one file has a feature 0, so that both count from there
        text = paths[1].read_text()
        paths[1].write_text(f"0 0:1\n{text}")
    out = tmp_path / f"{zero_based}"
    spec = streamkern.ingest_store(paths, out)
    features = int(X.indices.max()) + 1 + zero_based
    assert (spec.file_form or {})["sparse"] == features
    store = streamkern.open_store(out)
    stored_rows, _ = store.read_rows(np.argsort(store.source_rows(0)))
    stored_rows = as_csr(stored_rows.astype(np.float32), features)[:, zero_based:]
    total = wide.sum()
    assert (stored_rows[:total] != X[wide, : stored_rows.shape[1]]).nnz == 0
    assert (stored_rows[total + zero_based :] != X[~wide, : stored_rows.shape[1]]).nnz == 0


def test_blocks_of_different_lengths_are_learned() -> None:
    X, y = rows()
    order = np.argsort(np.diff(X.indptr))[::-1]
    model = KernelRegressor(random_state=0, n_centers=40, epochs=1)
    for part in (order[:60], order[60:]):
        model.partial_fit(X[part], y[part].astype(float))
    one = KernelRegressor(random_state=0, n_centers=40, epochs=1)
    one.partial_fit(X[order[60:]], y[order[60:]].astype(float))
    with pytest.raises(DataError, match="more than the 9 of the first rows"):
        one.partial_fit(X[order[:60]], y[order[:60]].astype(float))


@pytest.mark.parametrize(
    ("invalid", "message"),
    [
        ({"scale": "feature"}, "change the zeros"),
        ({"transforms": [GaussianNoise(0.1)]}, "'GaussianNoise' needs"),
        ({"centers": "kmeans"}, "k-means needs dense rows"),
        ({"features": "fourier"}, "random frequencies, .* need"),
        ({"metric": "learn"}, "metric .*needs dense rows"),
        ({"kernel": "laplace_l1"}, "not a function of inner products"),
        ({"precision": "high"}, "contain column numbers"),
        ({"patch_features": 16}, "patch_features"),
        ({"centers": np.ones((3, 7))}, "the data has .*which are sparse"),
    ],
)
def test_settings_that_need_dense_features_are_refused(
    invalid: dict[str, Any], message: str
) -> None:
    X, y = rows()
    with pytest.raises((ConfigError, DataError), match=message):
        KernelRegressor(random_state=0, **invalid).fit(X, y.astype(float))


def test_lazy_sparse_and_dense_blocks_are_predicted() -> None:
    X, y = rows()
    model = KernelRegressor(random_state=0, n_centers=40).fit(X, y.astype(float))
    lazy = da.from_array(X.toarray(), chunks=(50, -1))
    for blocks in (lazy, lazy.map_blocks(sp.csr_array)):
        predictions = model.predict(blocks)
        assert np.asarray(predictions) == pytest.approx(model.predict(X), rel=1e-6)
    with pytest.raises(DataError, match="X has 100 features"):
        model.predict(lazy[:, :100])


def test_sparse_rows_may_be_centers() -> None:
    X, y = rows()
    model = KernelRegressor(random_state=0, centers=X[:30], kernel="laplace").fit(
        X, y.astype(float)
    )
    assert (model.centers_ != X[:30]).nnz == 0
    flat = np.ones((40, 2 * pack_rows(X[:30]).shape[2]), np.float32)
    with pytest.raises(DataError, match="60,000 features"):
        KernelRegressor(centers=X[:30]).fit(flat, np.arange(40.0))


def test_dense_models_refuse_sparse_store(tmp_path: Path) -> None:
    X, y = rows()
    width = streamkern.ingest_store(X, tmp_path / "sparse", y=y.astype(float)).row_shape[1]
    model = KernelRegressor(random_state=0, kernel="laplace")
    model.fit(np.random.default_rng(0).standard_normal((50, 2 * width)), np.arange(50.0))
    with pytest.raises(ConfigError, match="has sparse rows"):
        model.predict(tmp_path / "sparse")
    with pytest.raises(ConfigError, match="ONNX has no operator"):
        KernelRegressor(random_state=0).fit(tmp_path / "sparse").to_c(tmp_path / "m.c")


@pytest.mark.parametrize("kind", ["array", "npz", "svm"])
def test_sparse_rows_are_converted_for_dense_store(kind: str, tmp_path: Path) -> None:
    """Check sparse rows in a store like a dense one, and appended to it."""
    ones = np.ones((30, 1), np.float32)  # so that the svmlight file has all features
    X = sp.csr_array(sp.hstack([rows(30)[0][:, :-1], ones]))
    y = np.arange(30.0)
    more: Any = X
    if kind == "npz":
        sp.save_npz(tmp_path / "more.npz", X)
        more = tmp_path / "more.npz"
    elif kind == "svm":
        more = tmp_path / "more.svm"
        dump_svmlight_file(sp.csr_matrix(X.toarray()), y, str(more), zero_based=False)
    targets: Any = {"targets": "values"} if kind == "svm" else {"y": y}
    held, like = tmp_path / "held", tmp_path / "like"
    streamkern.ingest_store(X.toarray(), held, y=y, shuffle=False)
    spec = streamkern.ingest_store(more, like, like=held, shuffle=False, **targets)
    assert spec.row_shape == (D,)
    np.testing.assert_array_equal(zarr.open_array(like / "X")[:], X.toarray())
    if kind == "svm":  # which does not say whether its features count from 0
        return
    assert streamkern.append_store(more, held, shuffle=False, **targets).row_shape == (D,)
    np.testing.assert_array_equal(zarr.open_array(held / "X")[30:], X.toarray())


def test_sparse_stores_refuse_dense_rows(tmp_path: Path) -> None:
    X, _ = rows(30)
    y, store_path = np.arange(30.0), tmp_path / "s"
    streamkern.ingest_store(X, store_path, y=y)
    for d in (D, 7):
        A = np.ones((30, d), np.float32)
        message = "has dense rows, but the rows of the store are sparse; give sparse rows"
        with pytest.raises(DataError, match=message):
            streamkern.append_store(A, store_path, y=y)
        with pytest.raises(DataError, match=message):
            streamkern.ingest_store(A, tmp_path / "t", y=y, like=store_path)


def test_rows_with_few_features_become_dense(tmp_path: Path) -> None:
    X = sp.random_array((50, 4000), density=0.3, rng=np.random.default_rng(0), format="csr")
    assert streamkern.ingest_store(X, tmp_path / "s", y=np.arange(50.0)).row_shape == (4000,)
    model = KernelRegressor(random_state=0, kernel="laplace").fit(X, np.arange(50.0))
    assert isinstance(model.centers_, np.ndarray)
    text = "".join(f"1 {k}:1\n" for k in (1, 100_000))
    (tmp_path / "wide.svm").write_text(text)
    with pytest.raises(ConfigError, match="100000"):
        model.predict(tmp_path / "wide.svm")
