"""Test given centers and metrics: their results, their files, and invalid arrays."""

from __future__ import annotations

import errno
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import streamkern as sk
from streamkern.cli.main import run_command
from streamkern.kernels.importances import describe_metric
from streamkern.train.resolve.resolved_run import open_run
from streamkern.train.resolve.run_inputs import RunInputs
from tests.runs import (
    Array,
    array_source,
    assert_same_bits,
    final,
    finished,
    settings,
    stopped,
)

D = 6
RNG = np.random.default_rng(17)
SCALES = np.array([2.0, 0.0, 1.0, 0.5, 3.0, 1.0])
MATRIX = RNG.normal(size=(D, 3))


def rows(n: int, seed: int) -> tuple[Array, Array]:
    """Return rows and targets of a few directions."""
    X = np.random.default_rng(seed).normal(size=(n, D)).astype(np.float32)
    return X, np.asarray(np.sin(X @ MATRIX[:, 0]) + X[:, 4], np.float32)


def transformed(X: Array, metric: Array) -> Array:
    """Return the features of which the metric takes Euclidean distances."""
    return np.asarray(X * metric if metric.ndim == 1 else X @ metric, np.float32)


@pytest.mark.full(all_but_every=5)
@pytest.mark.parametrize("metric", [SCALES, MATRIX, 3 * np.eye(D)])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"kernel": "gaussian"}, {"bandwidth": "median"}, {"kernel": sk.Laplace(2.0)},
     {"solver": "eigenpro4"}, {"centers": "rpcholesky"}],
)  # fmt: skip
def test_given_metric_equals_transformed_features(metric: Array, arguments: dict[str, Any]) -> None:
    X, y = rows(600, 0)
    T = rows(200, 1)[0]
    options = {"n_centers": 100, "scale": "none", "random_state": 3} | arguments
    options |= {} if "solver" in options else {"ridge": 1e-4}
    model_in_metric = sk.KernelRegressor(metric=metric, **options).fit(X, y)
    plain_model = sk.KernelRegressor(metric="none", **options).fit(transformed(X, metric), y)
    assert model_in_metric.bandwidth_ == pytest.approx(plain_model.bandwidth_, rel=1e-5)
    expected = plain_model.predict(transformed(T, metric))
    np.testing.assert_allclose(
        model_in_metric.predict(T), expected, atol=2e-3 * np.abs(expected).max()
    )
    np.testing.assert_array_equal(model_in_metric.kernel_.metric, metric)


@pytest.mark.parametrize(("metric", "numbers"), [(None, 0), (SCALES, D), (MATRIX, 3 * D)])
def test_memory_plan_includes_metric(metric: Array | None, numbers: int) -> None:
    run = open_run(settings(), RunInputs(sk.ArraySource(*rows(300, 0)), metric=metric))
    run.backend.close()
    metric_sizes = [size for _, buffer_name, size in run.buffers.lines if "metric" in buffer_name]
    assert sum(metric_sizes) == 6 * 8 * numbers


def test_weights_of_another_metric_are_refused() -> None:
    X, y = rows(300, 0)
    model = sk.KernelRegressor(n_centers=50, metric=SCALES, warm_start=True, random_state=0)
    model.fit(X, y).fit(X, y)
    np.testing.assert_array_equal(model.kernel_.metric, SCALES)
    with pytest.raises(sk.ConfigError, match="warm_start=True was trained in another metric than"):
        model.set_params(metric=2 * SCALES).fit(X, y)
    model.set_params(metric="none").fit(X, y)
    np.testing.assert_array_equal(model.kernel_.metric, SCALES)


def test_search_uses_one_metric(tmp_path: Path) -> None:
    path = tmp_path / "metric.npy"
    run = settings(tmp_path / "run", **{"model.metric": str(path), "model.bandwidth": "auto"})
    arguments = {"source": array_source(), "out": tmp_path / "search", "rows": 60}
    np.save(path, SCALES[:5])
    first = sk.tune(run, **arguments)
    assert sk.tune(run, **arguments).table == first.table
    np.save(path, SCALES[:5] + 1)
    with pytest.raises(sk.StreamkernError, match="metric"):
        sk.tune(run, **arguments)


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        (None, 'metric=None must be "auto"'),
        ([[1, 2], [3]], "metric is not an array"),
        (np.zeros(D), "metric is 0 for all features"),
    ],
)
def test_invalid_metric_is_refused_in_one_sentence(metric: Any, text: str) -> None:
    with pytest.raises(sk.ConfigError, match=text):
        sk.KernelRegressor(metric=metric).fit(*rows(50, 0))


def test_large_scales_have_finite_importances() -> None:
    X, y = rows(300, 0)
    model = sk.KernelRegressor(n_centers=50, metric=np.full(D, 1e200), bandwidth=1e200)
    np.testing.assert_allclose(model.fit(X, y).feature_importances_, 1 / D)


def config(path: Path, metric: str) -> Any:
    """Return settings of a run with a metric from a file."""
    return settings(path, **{"model.metric": metric, "run.checkpoint_every": 2})


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
@pytest.mark.parametrize("kind", ["npy", "zarr"])
def test_metric_file_is_read_and_run_resumes(kind: str, tmp_path: Path) -> None:
    metric, location = RNG.normal(size=(5, 2)), str(tmp_path / f"metric.{kind}")
    save = np.save if kind == "npy" else partial(zarr.save_array, mode="w")
    save(location, metric)
    uninterrupted = finished(config(tmp_path / "whole", location), source=array_source())
    np.testing.assert_array_equal(uninterrupted.model.op.kernel.metric, metric)
    stopped(config(tmp_path / "run", location), 5, source=array_source())
    finished(config(tmp_path / "run", location), source=array_source())
    assert_same_bits(final(tmp_path / "run"), final(tmp_path / "whole"))
    save(location, 2 * metric)
    with pytest.raises(sk.ResumeMismatchError, match="metric"):
        finished(config(tmp_path / "run", location), source=array_source())


@pytest.mark.parametrize("name", ["given", "array", "file"])
def test_unknown_word_is_a_path(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check also words such as "given", which are not the names of a method."""
    monkeypatch.chdir(tmp_path)
    X, _ = rows(60, 1)
    Z, metric = X[:20, :5], SCALES[:5]
    at_centers = settings(**{"model.centers": name, "model.n_centers": "auto"})
    in_metric = settings(**{"model.metric": name})
    for config, kind in ((at_centers, "centers"), (in_metric, "a metric")):
        with pytest.raises(sk.StoreNotFoundError, match=f"there is no array of {kind} at {name}"):
            finished(config, source=array_source())
    zarr.save_array(name, Z)
    from_file = finished(at_centers, source=array_source())
    np.testing.assert_array_equal(np.sort(from_file.Z, axis=0), np.sort(Z, axis=0))
    zarr.save_array(name, metric, mode="w")
    from_file = finished(in_metric, source=array_source())
    np.testing.assert_array_equal(from_file.model.op.kernel.metric, metric)


@pytest.mark.parametrize("name", ["centers", "metric"])
def test_given_array_overrides_setting(name: str, tmp_path: Path) -> None:
    """Check that the setting is not read and not part of the run's identity, and that the array
    is."""
    array = {"centers": rows(20, 1)[0][:, :5], "metric": SCALES[:5]}[name]
    plain = settings(tmp_path / "run", **{"model.n_centers": "auto"})
    named = plain.with_overrides({f"model.{name}": "nowhere"})
    arguments: dict[str, Any] = {"source": array_source(), name: array}
    first = finished(named, **arguments)
    in_memory = finished(plain, **arguments)
    assert np.array_equal(in_memory.model.weights, first.model.weights)
    with pytest.raises(
        sk.ResumeMismatchError, match=rf"model\.{name}: was an array of shape .*, now"
    ):
        finished(plain, source=array_source())
    with pytest.raises(sk.ResumeMismatchError, match=rf"model\.{name}: other (numbers|contents)"):
        finished(plain, **{**arguments, name: array + 1})


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"model.features": "fourier", "model.n_centers": "auto"}, "needs kernels at centers"),
        (
            {"model.kernel": sk.Laplace(1.0, metric=SCALES[:5])},
            "cannot be combined with the metric of",
        ),
        ({"run.precision": "integer"}, "transforms the features"),
    ],
)
def test_unsupported_metric_is_refused(overrides: dict[str, Any], text: str) -> None:
    neutral = {"model.bandwidth": "auto"} if "model.kernel" in overrides else {}
    with pytest.raises(sk.ConfigError, match=text):
        finished(settings(**overrides, **neutral), source=array_source(), metric=SCALES[:5])


def test_user_kernel_keeps_given_metric(tmp_path: Path) -> None:
    """Check that the kernel of the run has the metric, and that the run resumes."""
    arguments = {"source": array_source(), "metric": SCALES[:5]}
    for kernel in (sk.Laplace(3.0), "laplace"):
        width = {"model.bandwidth": 3.0 if isinstance(kernel, str) else "auto"}
        run = settings(tmp_path / str(kernel), **{"model.kernel": kernel, **width})
        first = np.asarray(finished(run, **arguments).model.weights)
        np.testing.assert_array_equal(finished(run, **arguments).model.weights, first)


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.ones(4), r"model.metric of shape \(4,\) does not fit rows"),
        (np.ones((5, 6)), "at most as many columns"),
        (np.ones((5, 2, 2)), "does not fit rows"),
        (np.array([1.0, np.inf, 1, 1, 1]), "holds NaN or infinity"),
        (np.array(["a"] * 5), "give one number for each feature"),
        (None, "there is no array of a metric at"),
        ("text", "is no .npy file, zarr array"),
        ("group", "give the path of the array"),
        ("lost", "lacks some chunks"),
        ("torn", "is no .npy file, zarr array"),
    ],
)
def test_unreadable_metric_is_refused_in_one_sentence(
    array: Any, text: str, tmp_path: Path
) -> None:
    path = tmp_path / "metric.npy"
    if isinstance(array, np.ndarray):
        np.save(path, array)
    elif array == "text":
        path.write_text("1, 2, 3")
    elif array in ("lost", "torn"):
        path = tmp_path / "metric.zarr"
        zarr.save_array(path, np.ones(5))
        (chunk,) = (path / "c").rglob("0")
        chunk.unlink() if array == "lost" else chunk.write_bytes(b"torn")
    elif array == "group":
        path = tmp_path / "group"
        zarr.open_group(path, mode="w")
    with pytest.raises(sk.StreamkernError, match=text):
        finished(config(tmp_path / "run", str(path)), source=array_source())
    assert not (tmp_path / "run").exists()


def fail_as_read_only(**options: Any) -> None:
    """Raise the error of a read-only disk."""
    raise OSError(errno.EROFS, "Read-only file system")


@pytest.mark.slow
def test_info_names_columns_and_draws_metric(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    X, y = rows(300, 0)
    table, store, run, metric, picture = (
        str(tmp_path / name) for name in ("t.csv", "train.zarr", "run", "metric.npy", "m.png")
    )
    names = ("age", "height", "weight", "a", "b", "c", "y")
    np.savetxt(table, np.column_stack([X, y]), delimiter=",", header=",".join(names), comments="")
    np.save(metric, MATRIX)
    assert run_command(["ingest", table, store, "--y", "y"]) == 0
    set_options = ("model.kernel=laplace", "model.bandwidth=2.0", "solver.ridge=1e-3")
    quick = [word for setting in set_options for word in ("--set", setting)]
    arguments = ["--train", store, "--run-dir", run, "--epochs", "1", *quick]
    assert run_command(["train", *arguments, "--set", f"model.metric={metric}"]) == 0
    capsys.readouterr()
    assert run_command(["info", run, "--plot", picture]) == 0
    lines = dict(x.split(maxsplit=1) for x in capsys.readouterr().out.splitlines() if " " in x)
    assert lines["metric"] == "matrix of 6 features, 3 directions"
    share = (MATRIX**2).sum(axis=1) / (MATRIX**2).sum()
    assert f"{names[share.argmax()]} {share.max():.1%}" in lines["metric_shares"]
    with open(picture, "rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"
    assert run_command(["info", run, "--plot", picture]) == 2
    assert "already exists" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", fail_as_read_only)
        assert run_command(["info", run, "--plot", str(tmp_path / "other.png")]) == 2
    assert "cannot be written to" in capsys.readouterr().err
    assert run_command(["info", run, "--json"]) == 0
    actual = json.loads(capsys.readouterr().out)["solver"]["metric"]
    assert actual == describe_metric(MATRIX, names[:6])
    assert run_command(["info", store, "--plot", str(tmp_path / "other.png")]) == 2
    assert "has none" in capsys.readouterr().err
    plain = str(tmp_path / "plain")
    arguments = ["--train", store, "--run-dir", plain, "--epochs", "1", *quick]
    assert run_command(["train", *arguments, "--set", "model.metric=none"]) == 0
    assert run_command(["info", plain, "--plot", str(tmp_path / "other.png")]) == 2
    assert "has none" in capsys.readouterr().err
    assert not (tmp_path / "other.png").exists()
