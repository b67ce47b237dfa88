"""Test exported models, run by onnxruntime, against sums of kernels in float64."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.gaussian_process.kernels import Matern
from sklearn.metrics.pairwise import laplacian_kernel, polynomial_kernel, rbf_kernel

import streamkern as sk
from benchmarks.exports import COMPILER, ENCODERS, LIMITS, LOSSES, errors, worst, wrong
from streamkern.basics.errors import ConfigError
from streamkern.cli.main import run_command
from streamkern.filesystem import durable
from streamkern.kernels.base import Kernel
from streamkern.kernels.builtin import KERNELS
from streamkern.predict.probabilities import fit_isotonic
from tests.export_models import (
    CHANGES,
    NEW,
    QUICK,
    SPREAD,
    VALUES,
    X,
    in_float64,
    run_exported,
    with_tails,
)

RNG = np.random.default_rng(0)


def scaled(rows: np.ndarray) -> np.ndarray:
    """Return rows as the kernel of a model of `X` gets them, rounded to float32."""
    return ((rows - X.mean(axis=0)) / X.std(axis=0)).astype(np.float32).astype(np.float64)


def distance_kernel(profile: Callable[[np.ndarray], np.ndarray]) -> Callable[..., np.ndarray]:
    """Return the kernel profile(|a - b| / 2)."""
    return lambda a, b: profile(np.sqrt(((a[:, None] - b) ** 2).sum(axis=2)) / 2)


def relu_ntk(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the NTK of a ReLU network with one hidden layer (Jacot et al. 2018)."""
    lengths = np.sqrt((a**2).sum(axis=1))[:, None] * np.sqrt((b**2).sum(axis=1))
    u = np.clip(a @ b.T / lengths, -1, 1)
    kappa_0 = (np.pi - np.arccos(u)) / np.pi
    kappa_1 = u * kappa_0 + np.sqrt(1 - u**2) / np.pi
    return lengths * (u * kappa_0 + kappa_1)


TRUTH: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "laplace": distance_kernel(lambda r: np.exp(-r)),
    "laplace_l1": lambda a, b: laplacian_kernel(a, b, gamma=0.5),
    "gaussian": lambda a, b: rbf_kernel(a, b, gamma=1 / 8),
    "cauchy": distance_kernel(lambda r: 1 / (1 + r**2)),
    "matern32": lambda a, b: Matern(2.0, nu=1.5)(a, b),
    "matern52": lambda a, b: Matern(2.0, nu=2.5)(a, b),
    "dispersal": distance_kernel(lambda r: np.exp(-r)),
    "linear": lambda a, b: a @ b.T,
    "polynomial": lambda a, b: polynomial_kernel(a, b, degree=3, gamma=1.0, coef0=1.0),
    "relu_ntk": relu_ntk,
}


def test_every_kernel_has_a_reference() -> None:
    assert TRUTH.keys() == KERNELS.keys()


@pytest.mark.filterwarnings("ignore:the rounding errors of float32 are visible")
@pytest.mark.parametrize("name", KERNELS)
def test_exported_values_equal_float64_sum(name: str, tmp_path: Path) -> None:
    changes = {} if KERNELS[name].geometry != "inner" else {"bandwidth": "auto"}
    model = sk.KernelRegressor(**QUICK | changes, kernel=name).fit(X, VALUES)
    K = TRUTH[name](scaled(NEW), model.centers_.astype(np.float64))
    truth = model.intercept_[0] + (K @ model.dual_coef_.astype(np.float64))[:, 0]
    actual = run_exported(model, tmp_path / "m.onnx", NEW, "float32")["predictions"]
    assert actual.shape == (150,)
    assert actual.dtype == np.float32
    narrow = sk.KernelRegressor(**QUICK | changes, kernel=name, precision="exact").fit(X, VALUES)
    float32_error = float(np.abs(narrow.predict(NEW) - truth).max())
    np.testing.assert_allclose(actual, truth, atol=3 * float32_error + 1e-4 * SPREAD, rtol=1e-6)
    if name == "relu_ntk":
        with pytest.raises(ConfigError, match="arc cosine"):
            model.to_onnx(tmp_path / "m.onnx", dtype="float64", overwrite=True)
        return
    actual = run_exported(model, tmp_path / "m.onnx", NEW)["predictions"]
    assert actual.dtype == np.float64
    np.testing.assert_allclose(actual, truth, atol=1e-6 * SPREAD, rtol=0)


@pytest.mark.parametrize(
    "changes",
    [
        *CHANGES,
        {"metric": "learn"},
        {"kernel": {"kind": "sum", "parts": ["laplace", "gaussian"]}, "bandwidth": "auto"},
        {"features": "nystrom", "kernel": "gaussian"},
        {"loss": "huber"},
    ],
    ids=str,
)
def test_float64_export_equals_model(changes: dict[str, Any], tmp_path: Path) -> None:
    model, new = in_float64(changes), with_tails(NEW)
    actual = run_exported(model, tmp_path / "m.onnx", new)["predictions"]
    expected = model.predict(new)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, atol=1e-9 * SPREAD, rtol=1e-9)


def test_model_predicting_in_float64_is_exported_in_float64(tmp_path: Path) -> None:
    """Check a model that was trained in float32; an export in float32 of its two outputs had errors
    of 1 %."""
    rows = np.random.default_rng(0).normal(size=(300, 3))
    values = np.c_[rows[:, 0] ** 2, np.sin(rows).sum(axis=1)]
    model = sk.KernelRegressor(
        "gaussian", bandwidth=20.0, ridge=1e-9, n_centers=100, solver="direct", threads=1
    )
    model.fit(rows, values)
    actual = run_exported(model, tmp_path / "m.onnx", rows, "auto")["predictions"]
    np.testing.assert_allclose(actual, model.predict(rows), rtol=0, atol=1e-8)
    with pytest.warns(UserWarning, match="computes its sums in float64.* or leave out dtype"):
        model.to_c(tmp_path / "m.c", dtype="float32")


CASES = [
    # All pairs of kernel and encoder, and of encoder and loss; with --full, the whole grid.
    pytest.param((kernel, encoder, loss), marks=() if o == (k + 2 * e) % 5 else pytest.mark.full)
    for k, kernel in enumerate(KERNELS)
    for e, encoder in enumerate(ENCODERS)
    for o, loss in enumerate(LOSSES)
]


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_export_errors_are_within_rounding(case: tuple[str, str, str], tmp_path: Path) -> None:
    actual = errors(*case, tmp_path)
    assert wrong(actual) == {}
    assert (actual.keys() == LIMITS.keys()) == (case[0] != "relu_ntk")


def test_largest_errors_of_each_kind_are_reported() -> None:
    kinds = ("kernel", "encoder", "loss")
    cases = [
        dict(zip(kinds, "abc", strict=True)) | dict.fromkeys(LIMITS, 1e-7),
        dict(zip(kinds, "adc", strict=True)) | {"C float64": 2e-3},
    ]
    actual = {row["of"]: (row["ONNX float64"], row["C float64"]) for row in worst(cases)}
    assert actual == {
        "kernel a": ("1e-07", "2e-03"), "encoder b": ("1e-07", "1e-07"),
        "encoder d": ("refused", "2e-03"), "loss c": ("1e-07", "2e-03"), "all": ("1e-07", "2e-03"),
    }  # fmt: skip
    assert wrong({"C float64": 2e-3, "ONNX float64": 1e-7}) == {"C float64": 2e-3}
    assert wrong({"C float64": float("nan")})


@pytest.mark.parametrize("labels", [["b", "a", "c"], [3, 1, 2], [False, True]], ids=str)
def test_classifier_exports_labels_scores_and_probabilities(
    labels: list[Any], tmp_path: Path
) -> None:
    y = np.array(labels)[(np.digitize(X[:, 0], [-0.5, 0.5]) % len(labels))]
    options = QUICK | {"precision": "float64", "loss": "log_loss", "epochs": 3}
    model = sk.KernelClassifier(**options).fit(X, y)
    actual = run_exported(model, tmp_path / "m.onnx", NEW)
    np.testing.assert_array_equal(actual["labels"], model.predict(NEW))
    np.testing.assert_allclose(actual["probabilities"], model.predict_proba(NEW), atol=1e-12)
    np.testing.assert_allclose(actual["scores"], model.predict_values(NEW), atol=1e-9)


@pytest.mark.slow
def test_calibrated_probabilities_are_exported(tmp_path: Path) -> None:
    """Check also isotonic calibrations, which are exported as sums of ramps."""
    rows = np.random.default_rng(2).normal(size=(6000, 3))
    y = (rows[:, 0] + 0.3 * rows[:, 1] > 0).astype(int) + (np.abs(rows[:, 2]) > 2)
    model = sk.KernelClassifier(**QUICK | {"precision": "float64"}).fit(rows, y)
    calibration = model._state.calibration
    assert calibration is not None
    F = model._values(rows[:2000])
    for fitted in (calibration.probabilities, fit_isotonic(F, y[:2000], np.ones(2000))):
        object.__setattr__(calibration, "probabilities", fitted)
        actual = run_exported(model, tmp_path / "m.onnx", NEW)["probabilities"]
        np.testing.assert_allclose(actual, model.predict_proba(NEW), atol=1e-10)


def test_multilabel_and_multioutput_models_are_exported(tmp_path: Path) -> None:
    indicators = np.column_stack((X[:, 0] > 0, X[:, 1] > 0)).astype(int)
    model: Any = sk.KernelClassifier(**QUICK).fit(X, indicators)
    actual = run_exported(model, tmp_path / "m.onnx", NEW)
    np.testing.assert_array_equal(actual["labels"], model.predict(NEW))
    model = sk.KernelRegressor(**QUICK | {"precision": "float64"}).fit(X, X[:, :2])
    actual = run_exported(model, tmp_path / "m.onnx", NEW)
    np.testing.assert_allclose(actual["predictions"], model.predict(NEW), atol=1e-9)


def test_images_keep_their_shape(tmp_path: Path) -> None:
    images = RNG.integers(0, 255, (200, 4, 5, 1), np.uint8)
    model = sk.KernelRegressor(**QUICK | {"bandwidth": "auto", "precision": "float64"})
    model.fit(images, images[:, 1, 1, 0].astype(float))
    actual = run_exported(model, tmp_path / "m.onnx", images)["predictions"]
    np.testing.assert_allclose(actual, model.predict(images), atol=1e-8)


def table(n: int, seed: int) -> tuple[pd.DataFrame, np.ndarray]:
    """Return columns of text with few and with many values, dates, and numbers with gaps."""
    rng = np.random.default_rng(seed)
    a, gap = rng.normal(size=(2, n))
    day = pd.Timestamp("2019-01-01") + pd.to_timedelta(rng.integers(0, 1500, n), "D")
    frame = pd.DataFrame({
        "a": a, "gap": np.where(rng.random(n) < 0.2, np.nan, gap), "day": day,
        "shop": rng.choice(["here", "zwölf", "in town", ""], n),
        "street": [f"street {k}" for k in rng.integers(0, 60, n)],
    })  # fmt: skip
    return frame, a + (frame["shop"] == "here") + np.sin(day.day_of_year / 58)


def test_table_has_an_input_for_each_column(tmp_path: Path) -> None:
    model = sk.KernelRegressor(**QUICK | {"bandwidth": "auto", "precision": "float64"})
    model.fit(*table(600, 0))
    new, _ = table(100, 1)
    new.loc[3, "shop"], new.loc[4, "street"], new.loc[5, "a"] = "never seen", "street 99", np.nan
    feed = {name: new[[name]].to_numpy(float) for name in ("a", "gap")}
    feed |= {name: new[[name]].to_numpy(object) for name in ("shop", "street")}
    days = (new["day"] - pd.Timestamp("1970-01-01")) / pd.Timedelta("1D")
    feed["day"] = days.to_numpy(float)[:, None]
    actual = run_exported(model, tmp_path / "m.onnx", feed)["predictions"]
    np.testing.assert_allclose(actual, model.predict(new), atol=1e-4)


def test_cyclic_time_features_are_exported_up_to_rounding(tmp_path: Path) -> None:
    """Check features that the model compares for equality; quantile scores magnify differences of
    rounding."""
    rng = np.random.default_rng(0)
    times = pd.Timestamp("2013-01-01") + pd.to_timedelta(rng.integers(0, 8000, 800), "h")
    frame = pd.DataFrame({"time": times, "a": rng.normal(size=800)})
    late = np.where(times.hour + frame["a"] > 14, "late", "early")
    model = sk.KernelClassifier(random_state=0, ridge=1e-4).fit(frame[:500], late[:500])
    days = (frame["time"] - pd.Timestamp("1970-01-01")) / pd.Timedelta("1D")
    feed = {"time": days[500:].to_numpy()[:, None], "a": frame[["a"]][500:].to_numpy()}
    scores = run_exported(model, tmp_path / "m.onnx", feed)["scores"]
    np.testing.assert_allclose(scores, model.predict_values(frame[500:]), atol=2e-5)


def test_column_names_may_equal_graph_values(tmp_path: Path) -> None:
    frame, targets = table(300, 0)
    frame = frame[["a", "shop"]].set_axis(["c0", "v0"], axis=1)
    model = sk.KernelRegressor(**QUICK | {"bandwidth": "auto", "precision": "float64"})
    feed = {"c0": frame[["c0"]].to_numpy(float), "v0": frame[["v0"]].to_numpy(object)}
    actual = run_exported(model.fit(frame, targets), tmp_path / "m.onnx", feed)["predictions"]
    np.testing.assert_allclose(actual, model.predict(frame), atol=1e-6)


def test_cells_are_encoded_like_in_python(tmp_path: Path) -> None:
    """Check markers of missing cells in any column, and words with several spellings."""
    n, rng = 300, np.random.default_rng(0)
    frame = pd.DataFrame({
        "a": np.where(rng.random(n) < 0.2, -999, rng.normal(size=n)),
        "day": rng.choice(["1900-01-01", "2020-01-03", "2020-02-05"], n),
        "told": rng.choice(["TRUE", "False", "perhaps"], n), "k": rng.choice(["1.0", "2", "x"], n),
    })  # fmt: skip
    frame.assign(y=VALUES[:n]).to_csv(tmp_path / "t.csv", index=False)
    arguments = ["--categorical", "k", "--na-value=-999", "--na-value=1900-01-01", "--date", "day"]
    store, run = str(tmp_path / "t.zarr"), str(tmp_path / "run")
    assert run_command(["ingest", str(tmp_path / "t.csv"), store, "--y", "y", *arguments]) == 0
    assert run_command(["train", "--train", store, "--run-dir", run]) == 0
    model = sk.load(run)
    days = pd.to_datetime(frame["day"]) - pd.Timestamp("1970-01-01")
    feed = {name: frame[[name]].to_numpy(object) for name in ("told", "k")}
    feed |= {"a": frame[["a"]].to_numpy(float)}
    feed |= {"day": (days / pd.Timedelta("1D")).to_numpy(float)[:, None]}
    actual = run_exported(model, tmp_path / "m.onnx", feed)["predictions"]
    np.testing.assert_allclose(actual, model.predict(frame), atol=1e-4)


def test_float64_model_is_exported_in_float64_by_default(tmp_path: Path) -> None:
    """Check large weights, with which rounding to float32 would leave no digit of the
    predictions."""
    rows = np.random.default_rng(0).uniform(size=(900, 4))
    model = sk.KernelRegressor(random_state=0, solver="direct", precision="float64")
    model.set_params(kernel="gaussian", bandwidth=2.0, metric="none", ridge=1e-12)
    model.fit(rows, np.sin(3 * rows[:, 0] * rows[:, 1]) + rows[:, 2])
    new = np.random.default_rng(1).uniform(size=(100, 4))
    actual = run_exported(model, tmp_path / "m.onnx", new, "auto")["predictions"]
    np.testing.assert_allclose(actual, model.predict(new), atol=1e-6)
    with pytest.warns(UserWarning, match="multiply the rounding errors of float32"):
        narrow = run_exported(model, tmp_path / "m.onnx", new, "float32")["predictions"]
    assert float(np.abs(narrow - model.predict(new)).max()) > 1e-4


# -- refusals -------------------------------------------------------------------------------------


class Softplus(Kernel):
    """Kernel of a user that calls a function which cannot be exported."""

    def profile(self, sq: Any, xp: Any) -> Any:
        return xp.exp(-xp.logaddexp(sq, -np.inf))


def test_unsupported_model_is_refused_without_writing(tmp_path: Path) -> None:
    path = tmp_path / "new" / "m.onnx"
    model = sk.KernelRegressor(**QUICK).fit(X, VALUES)
    with pytest.raises(ConfigError, match="dtype='float16' is not known"):
        model.to_onnx(path, dtype="float16")
    custom_model = sk.KernelRegressor(**QUICK | {"kernel": Softplus(2.0), "bandwidth": "auto"})
    with pytest.raises(ConfigError, match=r"Softplus.* calls logaddexp"):
        custom_model.fit(X, VALUES).to_onnx(path)

    @sk.deterministic
    def halve(A: Any, Y: Any, rng: Any) -> Any:
        return A / 2, Y

    transformed = sk.KernelRegressor(**QUICK | {"transforms": [halve]}).fit(X, VALUES)
    with pytest.raises(ConfigError, match=r"halve.* is a function of yours"):
        transformed.to_onnx(path)
    assert not path.parent.exists()
    with pytest.raises(ConfigError, match="is a URL"):
        model.to_onnx("s3://bucket/m.onnx")
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(ConfigError, match="is a folder"):
        model.to_onnx(tmp_path / "folder.onnx", overwrite=True)
    model.to_onnx(path)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="exists already"):
        model.to_onnx(path, dtype="float64")
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["m.onnx"]


@pytest.mark.slow
def test_hashed_words_are_refused(tmp_path: Path) -> None:
    frame = pd.DataFrame({"id": [f"w{k}" for k in range(11_000)]}, dtype="category")
    targets = np.arange(11_000) % 7.0
    model = sk.KernelRegressor(**QUICK | {"bandwidth": "auto"}).fit(frame, targets)
    for write, name in ((model.to_onnx, "m.onnx"), (model.to_c, "m.c")):
        with pytest.raises(
            ConfigError, match="column 'id' has hashed words, but ONNX has no operat"
        ):
            write(tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["m", "m.onnx.gz", Path("m.bin"), 3, None, b"m.onnx"], ids=str)
def test_path_with_another_ending_is_refused(
    path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = sk.KernelRegressor(**QUICK).fit(X, VALUES)
    for write, suffix in ((model.to_onnx, ".onnx"), (model.to_c, ".c")):
        message = f"{str(path)!r} does not end in {suffix}; give {path}{suffix}"
        if not isinstance(path, str | Path):
            message = f'path={path!r} is not the path of a file; give one, "model{suffix}"'
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
            write(path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("location", ["file/m", "/proc/m"])
def test_unwritable_folder_is_refused_before_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, location: str
) -> None:
    if location.startswith("/proc") and not Path("/proc").is_dir():
        pytest.skip("needs /proc, as Linux has it")
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    rows = np.random.default_rng(0).normal(size=(80, 2))
    model = sk.KernelRegressor(**QUICK | {"bandwidth": "auto"}).fit(rows, rows[:, 0])
    for write, path in ((model.to_onnx, f"{location}.onnx"), (model.to_c, f"{location}.c")):
        with pytest.raises(ConfigError, match=f"^{path} cannot be written to .*; give another"):
            write(path)


def test_full_disk_is_named_by_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(0).normal(size=(80, 2))
    model = sk.KernelRegressor(**QUICK | {"bandwidth": "auto"}).fit(rows, rows[:, 0])

    def fail(file: Any, view: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable, "write_all", fail)
    for write, name in ((model.to_onnx, "m.onnx"), (model.to_c, "m.c")):
        with pytest.raises(OSError, match=rf"no space left while writing .*{name}; free some"):
            write(tmp_path / name)
    assert not list(tmp_path.iterdir())
