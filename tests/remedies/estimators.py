"""Mistakes in the calls of estimators and searches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.array
import dask.dataframe
import numpy as np
import pandas as pd
from sklearn.base import clone
from sklearn.gaussian_process.kernels import RBF, DotProduct, Matern, RationalQuadratic

import streamkern as sk
from tests.remedies import (
    FRAME,
    LABELS,
    SEVERAL,
    Case,
    N,
    X,
    Y,
    classifier,
    fit_classes,
    fit_values,
    regressor,
)

COVERED = ("estimator",)
WITH_GPU = "needs a GPU; tests/estimator/test_compile_kernels.py"
NOT_TRIED = {
    "estimator/compile_kernels.py:compile_kernels:1": WITH_GPU,
    "estimator/compile_kernels.py:compile_kernels:2": WITH_GPU,
    "estimator/compile_kernels.py:compile_kernels:3": "needs a process that is killed; the same",
}
COMMAS = [f"{value:.3f}".replace(".", ",") for value in Y]
SIZES = [f"{k % 15} kg" for k in range(N)]


def started_model() -> sk.KernelRegressor:
    return regressor(solver="block").partial_fit(X, Y)


def fit_cases() -> list[Case]:
    """Return mistakes in what an estimator is given to fit."""
    twice = pd.DataFrame(np.c_[X[:, 0], X[:, 0]], columns=["a", "a"])
    numbers = pd.DataFrame({"n": [f"{k}" for k in range(N)], "b": X[:, 1]})
    unnamed = pd.DataFrame({0: X[:, 0], 1: FRAME.w})
    gaps, filled = "gaps.csv", "filled.csv"
    for name, text in ((gaps, "nan"), (filled, "1")):
        cells = [[*row, text if k == 3 else str(k % 2)] for k, row in enumerate(X.tolist())]
        pd.DataFrame(cells, columns=[*map("x{}".format, range(X.shape[1])), "y"]).to_csv(
            name, index=False
        )
    return [
        ("give targets, or a store", fit_values(X), fit_values(X, Y)),
        ("give one target for each row", fit_values(X, Y[1:]), fit_values(X, Y)),
        ("give weights of 0 or above", fit_values(X, Y, -np.ones(N)),
         fit_values(X, Y, np.zeros(N) + (np.arange(N) > 5))),
        ("leave it out, or use another solver", fit_values(X, Y, warm_start=True, solver="direct"),
         fit_values(X, Y, warm_start=True, solver="block")),
        ("set warm_start to the run_dir of the fit to start from",
         fit_values(X, Y, warm_start=True, solver="block", run_dir="w"),
         lambda: regressor(warm_start="start", solver="block", run_dir="w").fit(*of_run("start"))),
        ("must be True, False or a run directory", fit_values(X, Y, warm_start=3),
         fit_values(X, Y, warm_start=False)),
        ('must be 0, 1 or "auto"', fit_values(X, Y, verbose=3), fit_values(X, Y, verbose=0)),
        ("must be a whole number with run_dir", fit_values(X, Y, random_state=None, run_dir="z"),
         fit_values(X, Y, random_state=1, run_dir="z")),
        *(('metric=None must be "auto", "none", "learn", an array.*leave it out',
                 fit_values(X, Y, metric=None),
                 lambda metric=metric: sk.KernelRegressor(
                     n_centers=20, epochs=1, **metric).fit(X, Y))
          for metric in ({}, {"metric": "none"}, {"metric": "learn"}, {"metric": np.ones(3)})),
        ("give scales .d,., or a matrix", fit_values(X, Y, metric=[[1.0], [1.0, 2.0]]),
         fit_values(X, Y, metric=[1.0, 1.0, 2.0])),
        (r"give scales \(3,\)", fit_values(X, Y, metric=[1.0, 1.0]),
         fit_values(X, Y, metric=np.ones(3))),
        ("give at least one feature a scale above 0", fit_values(X, Y, metric=np.zeros(3)),
         fit_values(X, Y, metric=[0.0, 1.0, 0.0])),
        (r"is a class; give a kernel, such as Laplace\(2.0\)",
               fit_values(X, Y, kernel=sk.Laplace, bandwidth="auto"),
               lambda: (regressor(kernel=sk.Laplace(2.0), bandwidth="auto").fit(X, Y),
                        regressor(kernel="laplace").fit(X, Y))),
        ("has no parameter 'gamma'; did you mean 'bandwidth'", lambda: regressor(gamma=2.0),
         lambda: regressor(bandwidth=2.0)),
        ("search over bandwidth", lambda: regressor().set_params(kernel__bandwidth=2.0),
         lambda: regressor().set_params(bandwidth=2.0)),
        ("it is a parameter of a loss; search over loss with a list of losses",
         lambda: regressor().set_params(loss__quantile=0.9),
         lambda: regressor().set_params(loss="huber")),
        ("give each column another name", fit_values(twice, Y),
         fit_values(twice.set_axis(["a", "b"], axis=1), Y)),
        (r"decide whether the column is numeric or categorical .*X.astype", fit_values(numbers, Y),
         fit_values(numbers.astype({"n": float}), Y)),
        ("convert the names: X.columns = X.columns.map.str", fit_values(unnamed, Y),
         fit_values(unnamed.set_axis(unnamed.columns.map(str), axis=1), Y)),
        ("fill the masked entries, X.filled.value.", fit_values(np.ma.masked_greater(X, 1.0), Y),
         fit_values(np.ma.masked_greater(X, 1.0).filled(0), Y)),
        ("among numbers, which is not a class; correct such rows, or leave", fit_classes(gaps, "y"),
         fit_classes(filled, "y")),
        ("use KernelClassifier, or ingest it with targets='values'", fit_values("labels.zarr"),
         fit_classes("labels.zarr")),
        ("use KernelRegressor", fit_classes("data.zarr"), fit_values("data.zarr")),
        *((f"own targets and weights; leave {name} out",
                 lambda given=given: regressor().fit("data.zarr", *given),
                 fit_values("data.zarr"))
          for name, given in (("y", (Y,)), ("sample_weight", (None, np.ones(N))))),
        ("own targets and weights; leave y out",
         lambda: regressor().fit(sk.ZarrSource("data.zarr"), "y"),
         lambda: regressor().fit(sk.ZarrSource("data.zarr"))),
        ("is not the target of this store.*leave y out", fit_values("data.zarr", "fare"),
         fit_values("data.zarr")),
        ("has no weights; leave sample_weight out",
         lambda: regressor().fit("data.zarr", sample_weight="w"), fit_values("data.zarr")),
        ("give more rows a weight of this size", fit_values(X, Y, np.r_[1e35, np.ones(N - 1)]),
         fit_values(X, Y, np.r_[1e35, np.full(N - 1, 1e34)])),
        ("give some rows a weight above 0", fit_values(X, Y, np.zeros(N)),
         fit_values(X, Y, np.arange(N) % 2)),
        ("write numbers with a decimal point and nothing around them, or use Kernel",
         fit_values(X, COMMAS), fit_values(X, [text.replace(",", ".") for text in COMMAS])),
        ("write numbers with a decimal point and nothing around them, or use Kernel",
         fit_values(X, LABELS), fit_classes(X, LABELS)),
        ("would be as many classes; give numbers to KernelRegressor", fit_classes(X, COMMAS),
         fit_values(X, [text.replace(",", ".") for text in COMMAS])),
        ("continuous: .*use KernelRegressor", fit_classes(X, Y), fit_values(X, Y)),
        (r"if they are classes, give text: np.asarray\(y\).astype\(int\).astype\(str\)",
         fit_classes(X, np.arange(60)), fit_classes(X, np.arange(60).astype(int).astype(str))),
        ("ingest the rows with targets='classes'.*and fit the store",
               fit_classes(X, SIZES),
               lambda: (sk.ingest_store(X, "sizes.zarr", y=SIZES, targets="classes"),
                        classifier().fit("sizes.zarr"))),
        ("set it back", lambda: started_model().set_params(ridge=0.5).partial_fit(X, Y),
         lambda: started_model().set_params(ridge=0.5).set_params(ridge=1e-3).partial_fit(X, Y)),
        ("start a new model with fit, or with partial_fit of a clone",
               lambda: started_model().set_params(ridge=0.5).partial_fit(X, Y),
               lambda: (started_model().set_params(ridge=0.5).fit(X, Y),
                        clone(started_model()).set_params(ridge=0.5).partial_fit(X, Y))),
        ("use partial_fit before compress.*start a new model with partial_fit of a clone",
         lambda: sk.compress(started_model(), X, n_centers=9).partial_fit(X, Y),
         lambda: sk.compress(started_model().partial_fit(X, Y), X, n_centers=9),
         lambda: clone(sk.compress(started_model(), X, n_centers=9)).partial_fit(X, Y)),
        ("leave it out, or give sample_weight", fit_classes(X, SEVERAL, class_weight="balanced"),
         fit_classes(X, SEVERAL, np.ones(N))),
        ("needs rows of one class each.*leave it out", fit_classes(X, SEVERAL, calibrate=True),
         fit_classes(X, SEVERAL)),
        ("give each class once",
         fit_classes(X, (Y > 0).astype(int), class_weight={0: 1, "0": 2}),
         fit_classes(X, (Y > 0).astype(int), class_weight={0: 1, 1: 2})),
        ("use fit", lambda: classifier(class_weight="balanced").partial_fit(X, LABELS),
         fit_classes(X, LABELS, class_weight="balanced")),
        ("partial_fit with classes= in the first",
               lambda: classifier(solver="block").partial_fit(X, LABELS)
               .partial_fit(X, np.full(N, "new")),
               lambda: classifier(solver="block").partial_fit(
                   X, LABELS, classes=["up", "down", "new"]).partial_fit(X, np.full(N, "new"))),
        ("give all classes in the first call",
               lambda: classifier(solver="block").partial_fit(X, LABELS)
               .partial_fit(X, LABELS, classes=["up", "down", "new"]),
               lambda: classifier(solver="block").partial_fit(
                   X, LABELS, classes=["up", "down", "new"]).partial_fit(X, LABELS)),
        ("give a first block with at least this many rows",
         lambda: regressor(solver="block").partial_fit(X[:9], Y[:9]),
         lambda: regressor(solver="block").partial_fit(X[:20], Y[:20])),
        ("give as many outputs as in training",
         lambda: regressor(solver="block").partial_fit(X, Y).partial_fit(X, np.c_[Y, Y]),
         lambda: regressor(solver="block").partial_fit(X, Y).partial_fit(X, Y)),
        ("leave centers and n_centers out", fit_values(X, Y, solver="sgd", ridge="auto"),
         fit_values(X, Y, solver="sgd", ridge="auto", n_centers="auto")),
        ("but centers is an array; leave one of them out",
         fit_values(X, Y, centers=X[:9], n_centers="all"),
         fit_values(X, Y, centers=X[:9], n_centers="auto")),
        ("did you mean 'ridge'", lambda: regressor().set_params(alpha=1.0),
         lambda: regressor().set_params(ridge=1.0)),
        ("leave n_centers out", fit_values(X, Y, centers=X[:9]),
         fit_values(X, Y, centers=X[:9], n_centers="auto")),
    ]  # fmt: skip


def answer_cases() -> list[Case]:
    """Return mistakes in what a fitted model is asked."""
    model, classes = regressor().fit(X, Y), classifier(calibrate=False).fit(X, LABELS)
    table = regressor().fit(FRAME, Y)
    calibrated = regressor(calibrate=True).fit(X, Y)
    lazy = dask.array.from_array(X)
    of_quantiles = {"loss": "quantile", "quantile": [0.25, 0.75], "solver": "block"}
    quantiles = regressor(**of_quantiles).fit(X, Y)
    Path("noted").mkdir()
    Path("noted/README.md").write_text("of mine")
    return [
        ("call predict once for each", lambda: calibrated.predict(X, interval=0.5, return_std=True),
         lambda: calibrated.predict(X, interval=0.5)),
        ("train with calibrate=True", lambda: model.predict(X, interval=0.5),
         lambda: regressor(calibrate=True).fit(X, Y).predict(X, interval=0.5)),
        ("a number between 0 and 1, .*; give for example 0.9",
         lambda: calibrated.predict(X, interval=50),
         lambda: calibrated.predict(X, interval=0.5)),
        ("give a smaller interval", lambda: calibrated.predict(X, interval=0.99),
         lambda: calibrated.predict(X, interval=0.5)),
        ("train with posterior=True and solver='direct'", lambda: model.predict(X, return_std=True),
         lambda: regressor(posterior=True, solver="direct").fit(X, Y).predict(X, return_std=True)),
        ("leave it out, or train with a list as quantile",
         lambda: model.predict(X, quantiles=[0.5]), lambda: quantiles.predict(X, quantiles=[0.25])),
        ("must be a number or a list of numbers; choose from",
         lambda: quantiles.predict(X, quantiles="all"),
         lambda: quantiles.predict(X, quantiles=0.25)),
        ("leave it out, or give a single quantile",
         fit_values(X, Y, **of_quantiles | {"loss": "expectile"}, calibrate=True),
         fit_values(X, Y, **of_quantiles | {"loss": "expectile"})),
        ("correct it, or train a model for", lambda: quantiles.predict(X, quantiles=[0.5]),
         lambda: quantiles.predict(X, quantiles=[0.25])),
        ("leave it out, or leave return_std, interval and out out",
         lambda: quantiles.predict(X, quantiles=[0.25], interval=0.5),
         lambda: quantiles.predict(X, quantiles=[0.25])),
        ("mean_pinball_loss or d2_pinball_score", lambda: quantiles.score(X, Y),
         lambda: model.score(X, Y)),
        ("give one quantile, or train a model for each target",
         fit_values(X, np.column_stack([Y, Y]), **of_quantiles), fit_values(X, Y, **of_quantiles)),
        ("train with calibrate=True", lambda: classes.predict_proba(X),
         lambda: classifier(calibrate=True).fit(X, LABELS).predict_proba(X)),
        ("use permutation_importances", lambda: model.feature_importances_,
         lambda: model.permutation_importances(X, Y)),
        ("give X as an array", lambda: calibrated.predict(lazy, interval=0.5),
         lambda: calibrated.predict(np.asarray(lazy), interval=0.5)),
        ("give predict='pandas'", lambda: model.set_output(transform="pandas"),
         lambda: regressor().set_output(predict="pandas")),
        ("predict='polars' must be one of", lambda: model.set_output(predict="polars"),
         lambda: model.set_output(predict="default")),
        ("give the columns of the training data, in any order: 'a', 'b', 'w'",
         lambda: table.predict(FRAME[["a", "b"]]), lambda: table.predict(FRAME[["w", "a", "b"]])),
        ("give a data frame with the columns", lambda: table.predict(X),
         lambda: table.predict(FRAME)),
        ("is expecting 3 features as input; give the", lambda: model.predict(X[:, :2]),
         lambda: model.predict(X)),
        ("contains NaN in row 1; correct such rows, or leave them out",
         lambda: model.predict(np.where(np.arange(len(X))[:, None] == 1, np.nan, X)),
         lambda: model.predict(np.delete(X, 1, axis=0))),
        ("must be the path or URL of a run directory", lambda: sk.load(3), lambda: sk.load("run")),
        ("give one of them, such as", lambda: sk.load("."), lambda: sk.load("run")),
        ("which is a zarr store; give the run directory", lambda: sk.load("data.zarr"),
         lambda: sk.load("run")),
        ("give a new or empty directory", lambda: model.save("run"), lambda: model.save("saved")),
        ("save to a local folder, and", lambda: model.save("memory://card", card=True),
         lambda: model.save("with_card", card=True)),
        ("leave card=True out to keep it.*or move it away", lambda: model.save("noted", card=True),
         lambda: model.save("noted"),
         lambda: (Path("noted/README.md").rename("mine.md"), model.save("noted", card=True))),
        ("choose another place|give a new or empty directory", lambda: model.save("data.zarr"),
         lambda: model.save("saved_too")),
    ]  # fmt: skip


def of_run(location: str) -> tuple[Any, Any]:
    """Return rows and targets, to which a model was fitted with this run_dir."""
    regressor(solver="block", run_dir=location).fit(X, Y)
    return X, Y


def kernel_cases() -> list[Case]:
    """Return mistakes with kernels of scikit-learn, and ours with the same values."""
    pairs: list[Case] = [
        (r"give Gaussian\(length_scale\)", RBF(3.0), sk.Gaussian(3.0)),
        (r"give Cauchy\(sqrt\(2\) \* length_scale\) for alpha of 1", RationalQuadratic(3.0),
         sk.Cauchy(np.sqrt(2) * 3.0)),
        *((r"Laplace, Matern32 or Matern52\(length_scale\) for nu of 0.5, 1.5 or 2.5",
           Matern(3.0, nu=nu), ours(3.0))
          for nu, ours in ((0.5, sk.Laplace), (1.5, sk.Matern32), (2.5, sk.Matern52))),
        ("a sum of kernels of streamkern", RBF(3.0) + RBF(1.0),
         sk.Gaussian(3.0) + sk.Gaussian(1.0)),
        ("a product of kernels of streamkern", RBF(3.0) * Matern(1.0, nu=0.5),
         sk.Gaussian(3.0) * sk.Laplace(1.0)),
        ("kernel='linear'", DotProduct(0.0), "linear"),
    ]  # fmt: skip

    def alike(theirs: Any, ours: Any) -> None:
        given = {"scale": "none", "fit_intercept": False, "ridge": 1.0 / N, "centers": "all",
                 "n_centers": "auto", "bandwidth": "auto", "solver": "direct",
                 "precision": "float64"}  # fmt: skip
        predictions = regressor(kernel=ours, **given).fit(X, Y).predict(X)
        K = theirs(X)
        np.testing.assert_allclose(predictions, K @ np.linalg.solve(K + np.eye(N), Y), atol=1e-4)

    return [
        (message,
               lambda theirs=theirs: regressor(kernel=theirs, bandwidth="auto").fit(X, Y),
               lambda theirs=theirs, ours=ours: alike(theirs, ours))
        for message, theirs, ours in pairs
    ]  # fmt: skip


def row_cases() -> list[Case]:
    """Return mistakes in the columns and the shape of rows, and in targets that are left out or
    alike."""
    numbers = FRAME[["a", "b"]]
    model, encoding = regressor().fit(numbers, Y), regressor().fit(FRAME, Y)
    classes, several = classifier().fit(X, LABELS), classifier().fit(X, SEVERAL)
    lazy = dask.dataframe.from_pandas(FRAME, npartitions=2)
    images, days = np.ones((N, 3, 3)) * X[:, :1, None], np.arange(N).astype("M8[D]")
    pairs = pd.Series([(1.0, 2.0)] * N)
    of_function = regressor(transforms=[doubled], run_dir="with_function").fit(X, Y)
    numbers.assign(fare=np.abs(Y)).to_csv("fractions.csv", index=False)
    numbers.assign(fare=np.where(LABELS == "up", "1.5", "a")).to_csv("versions.csv", index=False)
    sk.ingest_store("versions.csv", "versions.zarr", y="fare", targets="classes")
    sk.ingest_store(X, "other.zarr", y=np.where(LABELS == "up", "up", "new"))
    sk.ingest_store(X, "same.zarr", y=LABELS[::-1])
    pd.DataFrame(X[:, :2], columns=["a", "fare"]).to_csv("blanks.txt", sep=" ", index=False)
    sk.ingest_store(X, "alike.zarr", y=np.where(X[:, 1] > 0, SEVERAL[:, 0].astype(str), "00"))
    sk.ingest_store(X, "written.zarr", y=SEVERAL[:, 0].astype(str))
    block = {"solver": "block"}
    no_y = "these have none; give targets"
    odd: list[Case] = [
        (r"give y=list\(map\(str, y\)\)", labels, list(map(str, labels)))
        for labels in (["a", 1] * (N // 2), [2**70, 1] * (N // 2),
                       np.array([1j, "a"] * (N // 2), dtype=object))
    ]  # fmt: skip
    return [
        (no_y, lambda: regressor(**block).partial_fit(X, Y).partial_fit(X),
         lambda: regressor(**block).partial_fit(X, Y).partial_fit(X, Y)),
        (no_y, lambda: regressor().fit(X, Y, test=X), lambda: regressor().fit(X, Y, test=(X, Y))),
        (no_y, lambda: classes.score(X), lambda: classes.score(X, LABELS)),
        (no_y, lambda: regressor().fit(X, Y).score(X), lambda: regressor().fit(X, Y).score(X, Y)),
        (no_y, lambda: sk.evaluate(classes, X), lambda: sk.evaluate(classes, X, LABELS)),
        (r"test is a tuple of 3; give test=\(X, y\), or a store",
         lambda: regressor().fit(X, Y, test=(X, Y, Y)),
         lambda: (regressor().fit(X, Y, test=(X, Y)), regressor().fit(X, Y, test="data.zarr"))),
        ("lacks 'b'; give the columns of the training data, in any order: 'a', 'b'",
         lambda: model.predict(lazy[["a"]]), lambda: model.predict(lazy[["b", "a"]])),
        (r"must be numeric; give X.compute\(\) if", lambda: encoding.predict(lazy),
         lambda: (encoding.predict(lazy.compute()),
                  [encoding.predict(part.compute()) for part in lazy.partitions])),
        ("is expecting 3 features as input; give the",
         lambda: classes.predict(dask.array.from_array(X[:, :2])),
         lambda: classes.predict(dask.array.from_array(X))),
        ("not numbers, 'w', .*or leave them out if the model", lambda: model.predict(FRAME),
         lambda: model.predict(FRAME.drop(columns="w"))),
        ("not numbers, 'b', .*convert these columns to numbers",
         lambda: model.predict(numbers.assign(b=numbers.b.map(str))),
         lambda: model.predict(numbers.assign(b=numbers.b.map(str)).astype(float))),
        ("are vectors.*give another scale", fit_values(images[..., None], Y, scale="quantiles"),
         fit_values(images[..., None], Y, scale="global")),
        (r"give them a channel: X\[..., None\]", fit_values(images, Y),
         fit_values(images[..., None], Y)),
        (r"\(y - y.min\(\)\) / np.timedelta64\(1, 'D'\)", fit_values(X, days),
         fit_values(X, (days - days.min()) / np.timedelta64(1, "D"))),
        *((message, lambda y=y: classifier().fit(X, y),
                 lambda mended=mended: classifier().fit(X, mended))
          for message, y, mended in odd),
        (r"decode the labels: \[k.decode\(\) for k in y\]",
         fit_classes(X, [k.encode() for k in LABELS]),
         fit_classes(X, [k.encode().decode() for k in LABELS])),
        ("which is not a number; give a number for each row", fit_values(X, pd.cut(Y, 3)),
         fit_values(X, Y)),
        ("y has no value in some row; leave such rows out",
         lambda: classifier().fit(X, np.full((len(X), 2), pd.NA)), fit_classes(X, SEVERAL)),
        (r"give a column for each number: np.array\(list\(y\)\)", fit_values(X, pairs),
         fit_values(X, np.array(list(pairs)))),
        ("give one weight for each row", fit_values(X, Y, np.ones(3)),
         fit_values(X, Y, np.ones(N))),
        ("labels for each row; give 2 columns of 0 or 1",
         lambda: (sk.ingest_store(X, "three.zarr", y=np.ones((N, 3))), several.score("three.zarr")),
         lambda: (sk.ingest_store(X, "two.zarr", y=SEVERAL), several.score("two.zarr"))),
        ("is empty, .*fill in such labels, or leave", fit_classes(X, ["", "c"] * (N // 2)),
         fit_classes(X, ["a", "c"] * (N // 2))),
        ("has a character that files cannot store; remove the character",
         fit_classes(X, ["a\0b", "c"] * (N // 2)), fit_classes(X, ["ab", "c"] * (N // 2))),
        (r"give labels of shape \(n,\)", lambda: classes.score(X, SEVERAL),
         lambda: classes.score(X, LABELS)),
        (r"give columns of 0 or 1, \(n, 2\)", lambda: several.score(X, LABELS),
         lambda: several.score(X, SEVERAL)),
        ("delimiter is an option of streamkern.ingest_store",
               fit_values("blanks.txt", "fare"),
               lambda: (sk.ingest_store("blanks.txt", "blanks.zarr", y="fare", delimiter=" "),
                        regressor().fit("blanks.zarr"))),
        ("read the file into a data frame and give the", fit_values("blanks.txt", "fare"),
         fit_values(pd.read_csv("blanks.txt", sep=" "), "fare")),
        ("classes '0', '00', which all correspond to .* '0'.* give them the same label",
         lambda: classifier().fit(X, SEVERAL[:, 0]).score("alike.zarr"),
         lambda: classifier().fit(X, SEVERAL[:, 0]).score("written.zarr")),
        ("known classes are .*; leave such rows out", lambda: classes.score("other.zarr"),
         lambda: classes.score("same.zarr")),
        ("leave it out, and give X as a Dask array", lambda: several.predict(X, out="several.csv"),
         lambda: several.predict(dask.array.from_array(X)).to_zarr("several.zarr")),
        ("leave interval out", lambda: classes.predict(X, interval=0.5, out="sets.csv"),
         lambda: classes.predict(X, out="sets.csv")),
        ("for regression, use KernelRegressor, or ingest with targets='values'",
         fit_classes("fractions.csv", "fare"),
         lambda: (regressor().fit("fractions.csv", "fare"),
                  sk.ingest_store("fractions.csv", "f.zarr", y="fare", targets="values"))),
        ("use KernelRegressor, or ingest the rows with targets='classes'",
         fit_classes("versions.csv", "fare"), lambda: classifier().fit("versions.zarr")),
        ("must be a fitted KernelRegressor or KernelClassifier, or a run directory",
         lambda: sk.evaluate(3, X, Y),
         lambda: (sk.evaluate("run", X, Y), sk.evaluate(classes, X, LABELS))),
        (r"give it again with set_params\(transforms=...\)",
         lambda: sk.load("with_function").fit(X, Y),
         lambda: sk.load("with_function").set_params(transforms=of_function.transforms).fit(X, Y)),
    ]  # fmt: skip


def doubled(X: Any, y: Any, rng: Any) -> Any:
    """Return rows times 2, and their targets."""
    return 2 * X, y


def form_cases() -> list[Case]:
    """Return mistakes in the form of rows and labels, and in searches."""
    mixed = np.array(["a", None] * (N // 2), dtype=object)
    sparse = FRAME[["a", "b"]].astype(pd.SparseDtype("float64", 0.0))
    several = classifier().fit(X, SEVERAL)
    quick: dict[str, Any] = {
        "bandwidths": [2.0], "ridges": [1e-3], "epochs": 1, "refine": 0, "progress": False,
    }  # fmt: skip
    own = regressor(run_dir="tuned")
    in_metric = regressor(kernel=sk.Laplace(2.0, metric=[1.0, 1.0, 1.0]), bandwidth="auto")
    return [
        *kernel_cases(),
        ("give X.sparse.to_coo.. where all are sparse", fit_values(sparse, Y),
         fit_values(sparse.sparse.to_coo(), Y)),
        ("fill in such labels, or leave such", fit_classes(X, mixed),
         fit_classes(X, np.where(np.arange(N) % 2, "b", "a"))),
        ("give 0 or 1 there, or the classes of the rows in one column", fit_classes(X, SEVERAL + 1),
         fit_classes(X, SEVERAL)),
        ("leave interval out", lambda: several.predict(X, interval=0.5),
         lambda: several.predict(X)),
        ("several labels for a row; leave it out",
         lambda: several.score(dask.array.from_array(X), SEVERAL, np.ones(N)),
         lambda: several.score(dask.array.from_array(X), SEVERAL)),
        ("leave sample_weight out",
         lambda: regressor().fit(X, Y).score("data.zarr", None, np.ones(N)),
         lambda: regressor().fit(X, Y).score("data.zarr")),
        ("not the estimator; give the estimator by name", lambda: sk.tune(regressor(), X),
         lambda: sk.tune(X, Y, estimator=regressor(), **quick)),
        ("leave metric= out of the estimator",
         lambda: sk.tune(X, Y, estimator=in_metric.set_params(metric=np.ones(3)), **quick),
         lambda: sk.tune(X, Y, estimator=in_metric.set_params(metric="auto"), **quick)),
        ("give a KernelClassifier or a KernelRegressor, or leave it out",
         lambda: sk.tune(X, Y, estimator=3), lambda: sk.tune(X, Y, **quick)),
        ("leave refit out", lambda: sk.tune(X, Y, estimator=own, refit=True, **quick),
         lambda: sk.tune(X, Y, estimator=own, **quick)),
        ("cannot be given with settings.*leave it out", lambda: sk.tune("run.toml", Y),
         lambda: sk.tune("run.toml", rows=50, **quick)),
        ("train the best settings with train_model.tuned.config.",
         lambda: sk.tune("run.toml", refit=True),
         lambda: sk.train_model(sk.tune("run.toml", rows=50, **quick).config)),
        ("give the source as X", lambda: sk.tune(X, Y, source=sk.ArraySource(X, Y)),
         lambda: sk.tune(sk.ArraySource(X, Y), **quick)),
    ]  # fmt: skip


def compressed_cases() -> list[Case]:
    """Return mistakes in `compress`."""
    model = regressor().fit(X, Y)
    rows = np.random.default_rng(1).normal(size=(200, 3))

    def small(given: Any = rows, **limits: Any) -> Callable[..., Any]:
        return lambda model=model: sk.compress(model, given, **limits)

    def fourier(n: int) -> sk.KernelRegressor:
        given = {"features": "fourier", "n_features": n, "n_centers": "auto", "solver": "sgd"}
        return regressor(**given, ridge="auto").fit(X, Y)

    return [
        ("give one of them: each decides", small(n_centers=5, tolerance=0.1), small(n_centers=5)),
        ("centers of the model, .*lower it", small(n_centers=20), small(n_centers=19)),
        ("train a model with a smaller n_features", lambda: sk.compress(fourier(40), rows),
         lambda: fourier(20)),
        ("must lie between 0 and 1", small(tolerance=2.0), small(tolerance=0.5)),
        ("give a fitted KernelClassifier or KernelRegressor",
         lambda: sk.compress("runs/first", rows), small()),
        ("give more rows, raise tolerance=", small(rows[:12], tolerance=1e-9),
         small(tolerance=0.5)),
        ("above tolerance=.*; raise tolerance=, pass n_centers=", small(tolerance=1e-9),
         lambda: (small(tolerance=0.5)(), small(n_centers=5)())),
        ("give at least twice as many rows as centers", small(rows[:16], n_centers=15),
         small(rows[:30], n_centers=15)),
        ("give more rows, like those that will be predicted", small(rows[:4]), small()),
        ("lower n_centers to .*, or raise memory=",
         lambda: small(n_centers=15)(model.set_params(memory="400 kB")),
         lambda: small(n_centers=15)(model.set_params(memory="1 MB"))),
        ("needs .* of memory allowed; raise memory=",
         lambda: small()(model.set_params(memory="1 kB")),
         lambda: small()(model.set_params(memory="auto"))),
    ]  # fmt: skip


TABLES = (fit_cases, answer_cases, row_cases, form_cases, compressed_cases)
