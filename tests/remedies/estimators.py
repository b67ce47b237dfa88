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
    N,
    Remedy,
    X,
    Y,
    classifier,
    long_rows,
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


def begun() -> sk.KernelRegressor:
    return regressor(solver="block").partial_fit(X, Y)


def of_fits() -> list[Remedy]:
    """Mistakes in what an estimator is given to fit."""
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
        Remedy("give targets, or a store", lambda: regressor().fit(X),
               lambda: regressor().fit(X, Y)),
        Remedy("give one target for each row",
               lambda: regressor().fit(X, Y[1:]), lambda: regressor().fit(X, Y)),
        Remedy("give weights of 0 or above",
               lambda: regressor().fit(X, Y, -np.ones(N)),
               lambda: regressor().fit(X, Y, np.zeros(N) + (np.arange(N) > 5))),
        Remedy("leave it out, or use another solver",
               lambda: regressor(warm_start=True, solver="direct").fit(X, Y),
               lambda: regressor(warm_start=True, solver="block").fit(X, Y)),
        Remedy("set warm_start to the run_dir of the fit to start from",
               lambda: regressor(warm_start=True, solver="block", run_dir="w").fit(X, Y),
               lambda: regressor(warm_start="start", solver="block", run_dir="w").fit(
                   *of_run("start"))),
        Remedy("must be True, False or a run directory",
               lambda: regressor(warm_start=3).fit(X, Y),
               lambda: regressor(warm_start=False).fit(X, Y)),
        Remedy('must be 0, 1 or "auto"',
               lambda: regressor(verbose=3).fit(X, Y), lambda: regressor(verbose=0).fit(X, Y)),
        Remedy("must be a whole number with run_dir",
               lambda: regressor(random_state=None, run_dir="z").fit(X, Y),
               lambda: regressor(random_state=1, run_dir="z").fit(X, Y)),
        *(Remedy('metric=None must be "auto", "none", "learn", an array.*leave it out',
                 lambda: regressor(metric=None).fit(X, Y),
                 lambda metric=metric: sk.KernelRegressor(  # type: ignore[misc]
                     n_centers=20, epochs=1, **metric).fit(X, Y))
          for metric in ({}, {"metric": "none"}, {"metric": "learn"}, {"metric": np.ones(3)})),
        Remedy("give scales .d,., or a matrix",
               lambda: regressor(metric=[[1.0], [1.0, 2.0]]).fit(X, Y),
               lambda: regressor(metric=[1.0, 1.0, 2.0]).fit(X, Y)),
        Remedy(r"give scales \(3,\)",
               lambda: regressor(metric=[1.0, 1.0]).fit(X, Y),
               lambda: regressor(metric=np.ones(3)).fit(X, Y)),
        Remedy("give at least one feature a scale above 0",
               lambda: regressor(metric=np.zeros(3)).fit(X, Y),
               lambda: regressor(metric=[0.0, 1.0, 0.0]).fit(X, Y)),
        Remedy(r"is a class; give a kernel, such as Laplace\(2.0\)",
               lambda: regressor(kernel=sk.Laplace, bandwidth="auto").fit(X, Y),
               lambda: (regressor(kernel=sk.Laplace(2.0), bandwidth="auto").fit(X, Y),
                        regressor(kernel="laplace").fit(X, Y))),
        Remedy("has no parameter 'gamma'; did you mean 'bandwidth'",
               lambda: regressor(gamma=2.0), lambda: regressor(bandwidth=2.0)),
        Remedy("search over bandwidth",
               lambda: regressor().set_params(kernel__bandwidth=2.0),
               lambda: regressor().set_params(bandwidth=2.0)),
        Remedy("of a loss cannot be set by name; search over loss with a list of losses",
               lambda: regressor().set_params(loss__quantile=0.9),
               lambda: regressor().set_params(loss="huber")),
        Remedy("give every column a name of its own",
               lambda: regressor().fit(twice, Y),
               lambda: regressor().fit(twice.set_axis(["a", "b"], axis=1), Y)),
        Remedy(
            r"say whether they are numbers, or names .*X.astype",
            lambda: regressor().fit(numbers, Y),
               lambda: regressor().fit(numbers.astype({"n": float}), Y)),
        Remedy("convert the names: X.columns = X.columns.map.str",
               lambda: regressor().fit(unnamed, Y),
               lambda: regressor().fit(unnamed.set_axis(unnamed.columns.map(str), axis=1), Y)),
        Remedy("fill them, X.filled.value.",
               lambda: regressor().fit(np.ma.masked_greater(X, 1.0), Y),
               lambda: regressor().fit(np.ma.masked_greater(X, 1.0).filled(0), Y)),
        Remedy("among numbers, which is not a class; correct such rows, or leave",
               lambda: classifier().fit(gaps, "y"), lambda: classifier().fit(filled, "y")),
        Remedy("use KernelClassifier, or ingest it with targets='values'",
               lambda: regressor().fit("labels.zarr"), lambda: classifier().fit("labels.zarr")),
        Remedy("use KernelRegressor", lambda: classifier().fit("data.zarr"),
               lambda: regressor().fit("data.zarr")),
        *(Remedy(f"own targets and weights; leave {name} out",
                 lambda given=given: regressor().fit("data.zarr", *given),  # type: ignore[misc]
                 lambda: regressor().fit("data.zarr"))
          for name, given in (("y", (Y,)), ("sample_weight", (None, np.ones(N))))),
        Remedy("own targets and weights; leave y out",
               lambda: regressor().fit(sk.ZarrSource("data.zarr"), "y"),
               lambda: regressor().fit(sk.ZarrSource("data.zarr"))),
        Remedy("is not the target of this store.*leave y out",
               lambda: regressor().fit("data.zarr", "fare"), lambda: regressor().fit("data.zarr")),
        Remedy("has no weights; leave sample_weight out",
               lambda: regressor().fit("data.zarr", sample_weight="w"),
               lambda: regressor().fit("data.zarr")),
        Remedy("give more rows a weight of this size",
               lambda: regressor().fit(X, Y, np.r_[1e35, np.ones(N - 1)]),
               lambda: regressor().fit(X, Y, np.r_[1e35, np.full(N - 1, 1e34)])),
        Remedy("give some rows a weight above 0", lambda: regressor().fit(X, Y, np.zeros(N)),
               lambda: regressor().fit(X, Y, np.arange(N) % 2)),
        Remedy("write numbers with a decimal point and nothing around them, or use Kernel",
               lambda: regressor().fit(X, COMMAS),
               lambda: regressor().fit(X, [text.replace(",", ".") for text in COMMAS])),
        Remedy("write numbers with a decimal point and nothing around them, or use Kernel",
               lambda: regressor().fit(X, LABELS), lambda: classifier().fit(X, LABELS)),
        Remedy("would be as many classes; give numbers to KernelRegressor",
               lambda: classifier().fit(X, COMMAS),
               lambda: regressor().fit(X, [text.replace(",", ".") for text in COMMAS])),
        Remedy("continuous: .*use KernelRegressor", lambda: classifier().fit(X, Y),
               lambda: regressor().fit(X, Y)),
        Remedy(r"if they are classes, give text: np.asarray\(y\).astype\(int\).astype\(str\)",
               lambda: classifier().fit(X, np.arange(60)),
               lambda: classifier().fit(X, np.arange(60).astype(int).astype(str))),
        Remedy("ingest the rows with targets='classes'.*and fit the store",
               lambda: classifier().fit(X, SIZES),
               lambda: (sk.ingest_store(X, "sizes.zarr", y=SIZES, targets="classes"),
                        classifier().fit("sizes.zarr"))),
        Remedy("set it back", lambda: begun().set_params(ridge=0.5).partial_fit(X, Y),
               lambda: begun().set_params(ridge=0.5).set_params(ridge=1e-3).partial_fit(X, Y)),
        Remedy("start a new model with fit, or with partial_fit of a clone",
               lambda: begun().set_params(ridge=0.5).partial_fit(X, Y),
               lambda: (begun().set_params(ridge=0.5).fit(X, Y),
                        clone(begun()).set_params(ridge=0.5).partial_fit(X, Y))),
        Remedy("use partial_fit before compress",
               lambda: sk.compress(begun(), X, n_centers=9).partial_fit(X, Y),
               lambda: sk.compress(begun().partial_fit(X, Y), X, n_centers=9)),
        Remedy("start a new model with partial_fit of a clone",
               lambda: sk.compress(begun(), X, n_centers=9).partial_fit(X, Y),
               lambda: clone(sk.compress(begun(), X, n_centers=9)).partial_fit(X, Y)),
        Remedy("leave it out, or give sample_weight",
               lambda: classifier(class_weight="balanced").fit(X, SEVERAL),
               lambda: classifier().fit(X, SEVERAL, np.ones(N))),
        Remedy("is for rows of one class each.*leave it out",
               lambda: classifier(calibrate=True).fit(X, SEVERAL),
               lambda: classifier().fit(X, SEVERAL)),
        Remedy("use fit",
               lambda: classifier(class_weight="balanced").partial_fit(X, LABELS),
               lambda: classifier(class_weight="balanced").fit(X, LABELS)),
        Remedy("partial_fit with classes= in the first",
               lambda: classifier(solver="block").partial_fit(X, LABELS)
               .partial_fit(X, np.full(N, "new")),
               lambda: classifier(solver="block").partial_fit(
                   X, LABELS, classes=["up", "down", "new"]).partial_fit(X, np.full(N, "new"))),
        Remedy("give all classes in the first call",
               lambda: classifier(solver="block").partial_fit(X, LABELS)
               .partial_fit(X, LABELS, classes=["up", "down", "new"]),
               lambda: classifier(solver="block").partial_fit(
                   X, LABELS, classes=["up", "down", "new"]).partial_fit(X, LABELS)),
        Remedy("give a first block of at least so many rows",
               lambda: regressor(solver="block").partial_fit(X[:9], Y[:9]),
               lambda: regressor(solver="block").partial_fit(X[:20], Y[:20])),
        Remedy("give as many outputs as in training",
               lambda: regressor(solver="block").partial_fit(X, Y).partial_fit(X, np.c_[Y, Y]),
               lambda: regressor(solver="block").partial_fit(X, Y).partial_fit(X, Y)),
        Remedy("leave centers and n_centers out",
               lambda: regressor(solver="sgd", ridge="auto").fit(X, Y),
               lambda: regressor(solver="sgd", ridge="auto", n_centers="auto").fit(X, Y)),
        Remedy("but centers is an array; leave one of them out",
               lambda: regressor(centers=X[:9], n_centers="all").fit(X, Y),
               lambda: regressor(centers=X[:9], n_centers="auto").fit(X, Y)),
        Remedy("did you mean 'ridge'", lambda: regressor().set_params(alpha=1.0),
               lambda: regressor().set_params(ridge=1.0)),
        Remedy("leave n_centers out", lambda: regressor(centers=X[:9]).fit(X, Y),
               lambda: regressor(centers=X[:9], n_centers="auto").fit(X, Y)),
    ]  # fmt: skip


def of_answers() -> list[Remedy]:
    """Mistakes in what a fitted model is asked."""
    model, classes = regressor().fit(X, Y), classifier(calibrate=False).fit(X, LABELS)
    table = regressor().fit(FRAME, Y)
    known = regressor(calibrate=True).fit(X, Y)
    lazy = dask.array.from_array(X)
    of_quantiles = {"loss": "quantile", "quantile": [0.25, 0.75], "solver": "block"}
    quantiles = regressor(**of_quantiles).fit(X, Y)
    Path("noted").mkdir()
    Path("noted/README.md").write_text("of mine")
    return [
        Remedy("call predict once for each",
               lambda: known.predict(X, interval=0.5, return_std=True),
               lambda: known.predict(X, interval=0.5)),
        Remedy("train with calibrate=True", lambda: model.predict(X, interval=0.5),
               lambda: regressor(calibrate=True).fit(X, Y).predict(X, interval=0.5)),
        Remedy("a number between 0 and 1, such as 0.9", lambda: known.predict(X, interval=50),
               lambda: known.predict(X, interval=0.5)),
        Remedy("give a smaller interval", lambda: known.predict(X, interval=0.99),
               lambda: known.predict(X, interval=0.5)),
        Remedy("train with posterior=True and solver='direct'",
               lambda: model.predict(X, return_std=True),
               lambda: regressor(posterior=True, solver="direct").fit(X, Y)
               .predict(X, return_std=True)),
        Remedy("leave it out, or train with a list as quantile",
               lambda: model.predict(X, quantiles=[0.5]),
               lambda: quantiles.predict(X, quantiles=[0.25])),
        Remedy("must be a number or a list of numbers; choose from",
               lambda: quantiles.predict(X, quantiles="all"),
               lambda: quantiles.predict(X, quantiles=0.25)),
        Remedy("leave it out, or give a single quantile",
               lambda: regressor(**of_quantiles | {"loss": "expectile"}, calibrate=True).fit(X, Y),
               lambda: regressor(**of_quantiles | {"loss": "expectile"}).fit(X, Y)),
        Remedy("correct it, or train a model for", lambda: quantiles.predict(X, quantiles=[0.5]),
               lambda: quantiles.predict(X, quantiles=[0.25])),
        Remedy("leave it out, or leave return_std, interval and out out",
               lambda: quantiles.predict(X, quantiles=[0.25], interval=0.5),
               lambda: quantiles.predict(X, quantiles=[0.25])),
        Remedy("mean_pinball_loss or d2_pinball_score", lambda: quantiles.score(X, Y),
               lambda: model.score(X, Y)),
        Remedy("give one quantile, or train a model for each target",
               lambda: regressor(**of_quantiles).fit(X, np.column_stack([Y, Y])),
               lambda: regressor(**of_quantiles).fit(X, Y)),
        Remedy("train with calibrate=True", lambda: classes.predict_proba(X),
               lambda: classifier(calibrate=True).fit(X, LABELS).predict_proba(X)),
        Remedy("use permutation_importances", lambda: model.feature_importances_,
               lambda: model.permutation_importances(X, Y)),
        Remedy("give X as an array", lambda: known.predict(lazy, interval=0.5),
               lambda: known.predict(np.asarray(lazy), interval=0.5)),
        Remedy("give predict='pandas'", lambda: model.set_output(transform="pandas"),
               lambda: regressor().set_output(predict="pandas")),
        Remedy("predict='polars' must be one of", lambda: model.set_output(predict="polars"),
               lambda: model.set_output(predict="default")),
        Remedy("give the columns trained on, in any order: 'a', 'b', 'w'",
               lambda: table.predict(FRAME[["a", "b"]]),
               lambda: table.predict(FRAME[["w", "a", "b"]])),
        Remedy("give a data frame with the columns", lambda: table.predict(X),
               lambda: table.predict(FRAME)),
        Remedy("is expecting 3 features", lambda: model.predict(X[:, :2]),
               lambda: model.predict(X)),
        Remedy("must be the path or URL of a run directory", lambda: sk.load(3),  # type: ignore[arg-type]
               lambda: sk.load("run")),
        Remedy("give one of them, such as", lambda: sk.load("."), lambda: sk.load("run")),
        Remedy("which is a zarr store; give the run directory", lambda: sk.load("data.zarr"),
               lambda: sk.load("run")),
        Remedy("give a new or empty directory", lambda: model.save("run"),
               lambda: model.save("saved")),
        Remedy("save to a local folder, and", lambda: model.save("memory://card", card=True),
               lambda: model.save("with_card", card=True)),
        Remedy("leave card=True out to keep it", lambda: model.save("noted", card=True),
               lambda: model.save("noted")),
        Remedy("or move it away", lambda: model.save("noted", card=True),
               lambda: (Path("noted/README.md").rename("mine.md"), model.save("noted", card=True))),
        Remedy("choose another place|give a new or empty directory",
               lambda: model.save("data.zarr"), lambda: model.save("saved_too")),
    ]  # fmt: skip


def of_run(place: str) -> tuple[Any, Any]:
    """Return rows and targets, to which a model was fitted with this run_dir."""
    regressor(solver="block", run_dir=place).fit(X, Y)
    return X, Y


def of_kernels() -> list[Remedy]:
    """Kernels of scikit-learn's, and ours, which have the same values."""
    pairs: list[tuple[str, Any, Any]] = [
        (r"give Gaussian\(length_scale\)", RBF(3.0), sk.Gaussian(3.0)),
        (r"give Cauchy\(sqrt\(2\) \* length_scale\) for alpha of 1", RationalQuadratic(3.0),
         sk.Cauchy(np.sqrt(2) * 3.0)),
        *((r"Laplace, Matern32 or Matern52\(length_scale\) for nu of 0.5, 1.5 or 2.5",
           Matern(3.0, nu=nu), ours(3.0))
          for nu, ours in ((0.5, sk.Laplace), (1.5, sk.Matern32), (2.5, sk.Matern52))),
        ("a sum of kernels of streamkern",
         RBF(3.0) + RBF(1.0), sk.Gaussian(3.0) + sk.Gaussian(1.0)),
        ("a product of kernels of streamkern",
         RBF(3.0) * Matern(1.0, nu=0.5), sk.Gaussian(3.0) * sk.Laplace(1.0)),
        ("kernel='linear'", DotProduct(0.0), "linear"),
    ]  # fmt: skip

    def alike(theirs: Any, ours: Any) -> None:
        given = {"scale": "none", "fit_intercept": False, "ridge": 1.0 / N, "centers": "all",
                 "n_centers": "auto", "bandwidth": "auto", "solver": "direct",
                 "precision": "float64"}  # fmt: skip
        found = regressor(kernel=ours, **given).fit(X, Y).predict(X)
        K = theirs(X)
        np.testing.assert_allclose(found, K @ np.linalg.solve(K + np.eye(N), Y), atol=1e-4)

    return [
        Remedy(says,
               lambda theirs=theirs: regressor(kernel=theirs, bandwidth="auto").fit(X, Y),  # type: ignore[misc]
               lambda theirs=theirs, ours=ours: alike(theirs, ours))  # type: ignore[misc]
        for says, theirs, ours in pairs
    ]  # fmt: skip


def of_rows() -> list[Remedy]:
    """Mistakes in the columns and the shape of rows, and in targets that are left out or alike."""
    numbers = FRAME[["a", "b"]]
    model = regressor().fit(numbers, Y)
    classes, several = classifier().fit(X, LABELS), classifier().fit(X, SEVERAL)
    lazy = dask.dataframe.from_pandas(FRAME, npartitions=2)
    images, days = np.ones((N, 3, 3)) * X[:, :1, None], np.arange(N).astype("M8[D]")
    pairs = pd.Series([(1.0, 2.0)] * N)
    of_function = regressor(transforms=[doubled], run_dir="with_function").fit(X, Y)
    numbers.assign(fare=np.abs(Y)).to_csv("fractions.csv", index=False)
    sk.ingest_store("fractions.csv", "fractions.zarr", y="fare", targets="classes")
    sk.ingest_store(X, "other.zarr", y=np.where(LABELS == "up", "up", "new"))
    sk.ingest_store(X, "same.zarr", y=LABELS[::-1])
    pd.DataFrame(X[:, :2], columns=["a", "fare"]).to_csv("blanks.txt", sep=" ", index=False)
    sk.ingest_store(X, "alike.zarr", y=np.where(X[:, 1] > 0, SEVERAL[:, 0].astype(str), "00"))
    sk.ingest_store(X, "written.zarr", y=SEVERAL[:, 0].astype(str))
    block = {"solver": "block"}
    no_y = "have no targets y; give targets"
    odd: list[tuple[str, Any, Any]] = [
        (r"give y=list\(map\(str, y\)\)", labels, list(map(str, labels)))
        for labels in (["a", 1] * (N // 2), [2**70, 1] * (N // 2),
                       np.array([1j, "a"] * (N // 2), dtype=object))
    ]  # fmt: skip
    return [
        Remedy(no_y, lambda: regressor(**block).partial_fit(X, Y).partial_fit(X),
               lambda: regressor(**block).partial_fit(X, Y).partial_fit(X, Y)),
        Remedy(no_y, lambda: regressor().fit(X, Y, test=X),
               lambda: regressor().fit(X, Y, test=(X, Y))),
        Remedy(no_y, lambda: classes.score(X), lambda: classes.score(X, LABELS)),
        Remedy(no_y, lambda: regressor().fit(X, Y).score(X),
               lambda: regressor().fit(X, Y).score(X, Y)),
        Remedy(no_y, lambda: sk.evaluate(classes, X), lambda: sk.evaluate(classes, X, LABELS)),
        Remedy(r"test is a tuple of 3; give test=\(X, y\), or a store",
               lambda: regressor().fit(X, Y, test=(X, Y, Y)),
               lambda: (regressor().fit(X, Y, test=(X, Y)),
                        regressor().fit(X, Y, test="data.zarr"))),
        Remedy("lacks 'b'; give the columns trained on, in any order: 'a', 'b'",
               lambda: model.predict(lazy[["a"]]), lambda: model.predict(lazy[["b", "a"]])),
        Remedy("is expecting 3 features as input; give the",
               lambda: classes.predict(dask.array.from_array(X[:, :2])),
               lambda: classes.predict(dask.array.from_array(X))),
        Remedy("not numbers, 'w', .*or leave them out if the model",
               lambda: model.predict(FRAME), lambda: model.predict(FRAME.drop(columns="w"))),
        Remedy("not numbers, 'b', .*convert these columns to numbers",
               lambda: model.predict(numbers.assign(b=numbers.b.map(str))),
               lambda: model.predict(numbers.assign(b=numbers.b.map(str)).astype(float))),
        Remedy("are vectors.*give another scale",
               lambda: regressor(scale="quantiles").fit(images[..., None], Y),
               lambda: regressor(scale="global").fit(images[..., None], Y)),
        Remedy(r"give them a channel: X\[..., None\]", lambda: regressor().fit(images, Y),
               lambda: regressor().fit(images[..., None], Y)),
        Remedy(r"\(y - y.min\(\)\) / np.timedelta64\(1, 'D'\)",
               lambda: regressor().fit(X, days),
               lambda: regressor().fit(X, (days - days.min()) / np.timedelta64(1, "D"))),
        *(Remedy(says, lambda y=y: classifier().fit(X, y),  # type: ignore[misc]
                 lambda mended=mended: classifier().fit(X, mended))  # type: ignore[misc]
          for says, y, mended in odd),
        Remedy(r"decode the labels: \[k.decode\(\) for k in y\]",
               lambda: classifier().fit(X, [k.encode() for k in LABELS]),
               lambda: classifier().fit(X, [k.encode().decode() for k in LABELS])),
        Remedy("which is not a number; give a number for each row",
               lambda: regressor().fit(X, pd.cut(Y, 3)), lambda: regressor().fit(X, Y)),
        Remedy("y has no value in some row; leave such rows out",
               lambda: classifier().fit(X, np.full((len(X), 2), pd.NA)),
               lambda: classifier().fit(X, SEVERAL)),
        Remedy(r"give a column for each number: np.array\(list\(y\)\)",
               lambda: regressor().fit(X, pairs),
               lambda: regressor().fit(X, np.array(list(pairs)))),
        Remedy("give one weight for each row", lambda: regressor().fit(X, Y, np.ones(3)),
               lambda: regressor().fit(X, Y, np.ones(N))),
        Remedy("labels for each row; give 2 columns of 0 or 1",
               lambda: (sk.ingest_store(X, "three.zarr", y=np.ones((N, 3))),
                        several.score("three.zarr")),
               lambda: (sk.ingest_store(X, "two.zarr", y=SEVERAL), several.score("two.zarr"))),
        Remedy("is empty, .*fill in such labels, or leave",
               lambda: classifier().fit(X, ["", "c"] * (N // 2)),
               lambda: classifier().fit(X, ["a", "c"] * (N // 2))),
        Remedy("has a character that files cannot store; remove the character",
               lambda: classifier().fit(X, ["a\0b", "c"] * (N // 2)),
               lambda: classifier().fit(X, ["ab", "c"] * (N // 2))),
        Remedy(r"give labels of shape \(n,\)", lambda: classes.score(X, SEVERAL),
               lambda: classes.score(X, LABELS)),
        Remedy(r"give columns of 0 or 1, \(n, 2\)", lambda: several.score(X, LABELS),
               lambda: several.score(X, SEVERAL)),
        Remedy("delimiter is an option of streamkern.ingest_store",
               lambda: regressor().fit("blanks.txt", "fare"),
               lambda: (sk.ingest_store("blanks.txt", "blanks.zarr", y="fare", delimiter=" "),
                        regressor().fit("blanks.zarr"))),
        Remedy("read the file into a data frame and give the",
               lambda: regressor().fit("blanks.txt", "fare"),
               lambda: regressor().fit(pd.read_csv("blanks.txt", sep=" "), "fare")),
        Remedy("classes '0', '00', which all stand for .* '0'.* give them the same label",
               lambda: classifier().fit(X, SEVERAL[:, 0]).score("alike.zarr"),
               lambda: classifier().fit(X, SEVERAL[:, 0]).score("written.zarr")),
        Remedy("known classes are .*; leave such rows out", lambda: classes.score("other.zarr"),
               lambda: classes.score("same.zarr")),
        Remedy("leave it out, and give X as a Dask array",
               lambda: several.predict(X, out="several.csv"),
               lambda: several.predict(dask.array.from_array(X)).to_zarr("several.zarr")),
        Remedy("leave interval out", lambda: classes.predict(X, interval=0.5, out="sets.csv"),
               lambda: classes.predict(X, out="sets.csv")),
        Remedy("use KernelRegressor, or ingest the rows with targets='classes'",
               lambda: classifier().fit("fractions.csv", "fare"),
               lambda: (regressor().fit("fractions.csv", "fare"),
                        classifier().fit("fractions.zarr"))),
        Remedy("must be a fitted KernelRegressor or KernelClassifier, or a run directory",
               lambda: sk.evaluate(3, X, Y),  # type: ignore[arg-type]
               lambda: (sk.evaluate("run", X, Y), sk.evaluate(classes, X, LABELS))),
        Remedy(r"give it again with set_params\(transforms=...\)",
               lambda: sk.load("with_function").fit(X, Y),
               lambda: sk.load("with_function").set_params(
                   transforms=of_function.transforms).fit(X, Y)),
    ]  # fmt: skip


def doubled(X: Any, y: Any, rng: Any) -> Any:
    """Return rows times 2, and their targets."""
    return 2 * X, y


def of_forms() -> list[Remedy]:
    """Mistakes in the form of rows and labels, and in searches."""
    mixed = np.array(["a", None] * (N // 2), dtype=object)
    sparse = FRAME[["a", "b"]].astype(pd.SparseDtype("float64", 0.0))
    several = classifier().fit(X, SEVERAL)
    quick: dict[str, Any] = {
        "bandwidths": [2.0], "ridges": [1e-3], "epochs": 1, "refine": 0, "progress": False,
    }  # fmt: skip
    own = regressor(run_dir="tuned")
    in_metric = regressor(kernel=sk.Laplace(2.0, metric=[1.0, 1.0, 1.0]), bandwidth="auto")
    return [
        *of_kernels(),
        Remedy("give X.sparse.to_coo.. where all are sparse",
               lambda: regressor().fit(sparse, Y),
               lambda: regressor().fit(sparse.sparse.to_coo(), Y)),
        Remedy("fill in such labels, or leave such", lambda: classifier().fit(X, mixed),
               lambda: classifier().fit(X, np.where(np.arange(N) % 2, "b", "a"))),
        Remedy("give 0 or 1 there, or the classes of the rows in one column",
               lambda: classifier().fit(X, SEVERAL + 1), lambda: classifier().fit(X, SEVERAL)),
        Remedy("leave interval out", lambda: several.predict(X, interval=0.5),
               lambda: several.predict(X)),
        Remedy("several labels for a row; leave it out",
               lambda: several.score(dask.array.from_array(X), SEVERAL, np.ones(N)),
               lambda: several.score(dask.array.from_array(X), SEVERAL)),
        Remedy("leave sample_weight out",
               lambda: regressor().fit(X, Y).score("data.zarr", None, np.ones(N)),
               lambda: regressor().fit(X, Y).score("data.zarr")),
        Remedy("not the estimator; give the estimator by name",
               lambda: sk.tune(regressor(), X),
               lambda: sk.tune(X, Y, estimator=regressor(), **quick)),
        Remedy("leave metric= out of the estimator",
               lambda: sk.tune(X, Y, estimator=in_metric.set_params(metric=np.ones(3)), **quick),
               lambda: sk.tune(X, Y, estimator=in_metric.set_params(metric="auto"), **quick)),
        Remedy("must be a KernelClassifier or a KernelRegressor, or None",
               lambda: sk.tune(X, Y, estimator=3), lambda: sk.tune(X, Y, **quick)),  # type: ignore[arg-type]
        Remedy("leave refit out", lambda: sk.tune(X, Y, estimator=own, refit=True, **quick),
               lambda: sk.tune(X, Y, estimator=own, **quick)),
        Remedy("cannot be given with settings.*leave it out", lambda: sk.tune("run.toml", Y),
               lambda: sk.tune("run.toml", rows=50, **quick)),
        Remedy("train the best settings with train_model.tuned.config.",
               lambda: sk.tune("run.toml", refit=True),
               lambda: sk.train_model(sk.tune("run.toml", rows=50, **quick).config)),
        Remedy("give the source as X",
               lambda: sk.tune(X, Y, source=sk.ArraySource(X, Y)),
               lambda: sk.tune(sk.ArraySource(X, Y), **quick)),
    ]  # fmt: skip


def of_centers() -> list[Remedy]:
    """Sparse centers of other features than the rows."""

    def fit(d: int) -> Any:
        centers = long_rows(n=9, d=d)
        return lambda: regressor(n_centers="auto", centers=centers).fit(long_rows(), Y)

    return [Remedy("give rows and centers with the same features", fit(8000), fit(9000))]


def of_compressed() -> list[Remedy]:
    """Mistakes in `compress`."""
    model = regressor().fit(X, Y)
    rows = np.random.default_rng(1).normal(size=(200, 3))

    def small(given: Any = rows, **limits: Any) -> Callable[..., Any]:
        return lambda model=model: sk.compress(model, given, **limits)

    def fourier(n: int) -> sk.KernelRegressor:
        given = {"features": "fourier", "n_features": n, "n_centers": "auto", "solver": "sgd"}
        return regressor(**given, ridge="auto").fit(X, Y)

    return [
        Remedy("give one of them: each decides", small(n_centers=5, tolerance=0.1),
               small(n_centers=5)),
        Remedy("centers of the model, .*lower it", small(n_centers=20), small(n_centers=19)),
        Remedy("train a model with a smaller n_features", lambda: sk.compress(fourier(40), rows),
               lambda: fourier(20)),
        Remedy("must lie between 0 and 1", small(tolerance=2.0), small(tolerance=0.5)),
        Remedy("give a fitted KernelClassifier or KernelRegressor",
               lambda: sk.compress("runs/first", rows), small()),
        Remedy("give more rows, raise tolerance=", small(rows[:12], tolerance=1e-9),
               small(tolerance=0.5)),
        Remedy("above tolerance=.*; raise tolerance=, pass n_centers=", small(tolerance=1e-9),
               lambda: (small(tolerance=0.5)(), small(n_centers=5)())),
        Remedy("give at least twice as many rows as centers", small(rows[:16], n_centers=15),
               small(rows[:30], n_centers=15)),
        Remedy("give more rows, like those that will be predicted", small(rows[:4]), small()),
        Remedy("lower n_centers to .*, or raise memory=",
               lambda: small(n_centers=15)(model.set_params(memory="400 kB")),
               lambda: small(n_centers=15)(model.set_params(memory="1 MB"))),
        Remedy("needs .* of memory allowed; raise memory=",
               lambda: small()(model.set_params(memory="1 kB")),
               lambda: small()(model.set_params(memory="auto"))),
    ]  # fmt: skip


def remedies() -> list[Remedy]:
    """Return all remedies of this module."""
    return [*of_fits(), *of_answers(), *of_rows(), *of_forms(), *of_centers(), *of_compressed()]
