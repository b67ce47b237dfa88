"""Mistakes, what the answer to each must say, and what doing as it says looks like.

A sentence of an error names a remedy. Here each remedy is done, word for word, and works.
"""

from __future__ import annotations

import shlex
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.gaussian_process.kernels import RBF

import streamkern as sk
from streamkern.cli.main import main
from streamkern.config.run_config import RunConfig

N = 60
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 3))
Y = X[:, 0] + 0.1 * X[:, 1]
LABELS = np.where(X[:, 0] > 0, "up", "down")
FRAME = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "w": RNG.choice(list("xyz"), N)})
SEVERAL = (X[:, :2] > 0).astype(int)
QUICK: dict[str, Any] = {
    "n_centers": 20, "kernel": "gaussian", "bandwidth": 2.0, "ridge": 1e-3, "metric": "none",
    "epochs": 2,
}  # fmt: skip
TRAIN = "train --train data.zarr --epochs 2 --set model.n_centers=20 --set model.metric=none"

Do = Callable[[], Any]


@dataclass(frozen=True)
class Remedy:
    """wrong : fails with a sentence that has the words `says`. right : what it says to do."""

    says: str
    wrong: Do
    right: Do


def regressor(**parameters: Any) -> sk.KernelRegressor:
    return sk.KernelRegressor(**QUICK | parameters)


def classifier(**parameters: Any) -> sk.KernelClassifier:
    return sk.KernelClassifier(**QUICK | parameters)


def settings(**given: Any) -> RunConfig:
    """`model__kernel="laplace"` for model.kernel."""
    return RunConfig().with_overrides({k.replace("__", "."): v for k, v in given.items()})


def command(line: str) -> None:
    """Run a command, which must end well."""
    code = main(shlex.split(line))
    if code:
        raise SystemExit(code)


def prepare() -> None:
    """Make stores and runs in the current folder."""
    sk.ingest_store(X, "data.zarr", y=Y)
    sk.ingest_store(X, "labels.zarr", y=LABELS)
    FRAME.assign(fare=Y).to_csv("rides.csv", index=False)
    np.savez("rows.npz", X=X, y=Y)
    np.save("array.npy", np.ones(3))
    regressor(run_dir="run").fit("data.zarr")
    regressor(run_dir="calibrated", calibrate=True).fit("data.zarr")
    classifier(run_dir="classes").fit("labels.zarr")
    Path("parts").mkdir()
    np.savez("parts/one.npz", X=X, y=Y)
    with tarfile.open("rows.tar", "w") as archive:
        archive.add("rows.npz")
    FRAME.assign(fare=Y).to_pickle("rides.pkl")
    Path("empty.toml").write_text('[model]\nmetric = "none"\n')
    Path("run.toml").write_text('[data]\ntrain = "data.zarr"\n')


def of_settings() -> list[Remedy]:
    """Mistakes in settings, of run files and of Python."""
    fourier = {"model__features": "fourier", "solver__name": "sgd"}
    return [
        Remedy("make data.train a list, or leave weights out",
               lambda: settings(data__train="a.zarr", data__weights=[1.0]),
               lambda: settings(data__train=["a.zarr"], data__weights=[1.0])),
        Remedy("give one for each",
               lambda: settings(data__train=["a", "b"], data__weights=[1.0]),
               lambda: settings(data__train=["a", "b"], data__weights=[1.0, 2.0])),
        Remedy("is used by no part of .*leave it out",
               lambda: settings(model__kernel="linear", model__bandwidth=2.0),
               lambda: settings(model__kernel="linear")),
        Remedy("leave centers and n_centers out, and set n_features",
               lambda: settings(model__n_centers=10, **fourier),
               lambda: settings(model__n_features=10, **fourier)),
        Remedy('or set features = "nystrom"',
               lambda: settings(model__n_centers=10, **fourier),
               lambda: settings(model__n_centers=10, model__features="nystrom",
                                solver__name="sgd")),
        Remedy("leave one of them out",
               lambda: settings(model__metric="learn", **fourier),
               lambda: settings(**fourier)),
        Remedy("leave one of them out",
               lambda: settings(model__metric="learn", model__kernel=sk.Laplace(2, metric=[1.0])),
               lambda: settings(model__kernel=sk.Laplace(2, metric=[1.0]))),
        Remedy("leave it out, or set n_centers",
               lambda: settings(model__n_features=10),
               lambda: settings(model__n_centers=10)),
        Remedy("must be even",
               lambda: settings(model__n_features=11, **fourier),
               lambda: settings(model__n_features=12, **fourier)),
        Remedy('leave n_centers out or set centers = "random"',
               lambda: settings(model__n_centers=10, model__centers="all"),
               lambda: settings(model__n_centers=10, model__centers="random")),
        Remedy("or use another solver: this one takes",
               lambda: settings(solver__name="sgd", solver__tolerance=0.1),
               lambda: settings(solver__name="falkon", solver__tolerance=0.1)),
        Remedy("did you mean solver.name",
               lambda: RunConfig().with_overrides({"solver": "block"}),
               lambda: RunConfig().with_overrides({"solver.name": "block"})),
        Remedy('did you mean "gaussian"',
               lambda: settings(model__kernel="rbf"), lambda: settings(model__kernel="gaussian")),
        Remedy("is a section of settings; name one of them: .*run.random_state",
               lambda: RunConfig().with_overrides({"run": 3}),
               lambda: RunConfig().with_overrides({"run.random_state": 3})),
        Remedy("correct it or leave it out for the default",
               lambda: settings(data__epochs=0), lambda: settings(data__epochs="auto")),
        Remedy("give the path of a TOML file",
               lambda: sk.load_run_file("none.toml"), lambda: sk.load_run_file("run.toml")),
        Remedy("or give a run file",
               lambda: sk.load_run_file("rides.csv"), lambda: sk.load_run_file("run.toml")),
    ]  # fmt: skip


def of_fits() -> list[Remedy]:
    """Mistakes in what an estimator is given to fit."""
    twice = pd.DataFrame(np.c_[X[:, 0], X[:, 0]], columns=["a", "a"])
    numbers = pd.DataFrame({"n": [f"{k}" for k in range(N)], "b": X[:, 1]})
    unnamed = pd.DataFrame({0: X[:, 0], 1: FRAME.w})
    return [
        Remedy("give targets, or a store", lambda: regressor().fit(X),
               lambda: regressor().fit(X, Y)),
        Remedy("give one target for each row",
               lambda: regressor().fit(X, Y[1:]), lambda: regressor().fit(X, Y)),
        Remedy("weights are 0 or above",
               lambda: regressor().fit(X, Y, -np.ones(N)),
               lambda: regressor().fit(X, Y, np.zeros(N) + (np.arange(N) > 5))),
        Remedy("leave it out, or use another solver",
               lambda: regressor(warm_start=True, solver="direct").fit(X, Y),
               lambda: regressor(warm_start=True, solver="block").fit(X, Y)),
        Remedy("give warm_start the run_dir of the fit to start from",
               lambda: regressor(warm_start=True, solver="block", run_dir="w").fit(X, Y),
               lambda: regressor(solver="block", run_dir="w").fit(X, Y)),
        Remedy("must be True, False or a run directory",
               lambda: regressor(warm_start=3).fit(X, Y),
               lambda: regressor(warm_start=False).fit(X, Y)),
        Remedy('must be 0, 1 or "auto"',
               lambda: regressor(verbose=3).fit(X, Y), lambda: regressor(verbose=0).fit(X, Y)),
        Remedy("must be a whole number with run_dir",
               lambda: regressor(random_state=None, run_dir="z").fit(X, Y),
               lambda: regressor(random_state=1, run_dir="z").fit(X, Y)),
        Remedy('metric=None must be "auto", another word',
               lambda: regressor(metric=None).fit(X, Y), lambda: regressor().fit(X, Y)),
        Remedy("give scales .d,., or a matrix",
               lambda: regressor(metric=[[1.0], [1.0, 2.0]]).fit(X, Y),
               lambda: regressor(metric=[1.0, 1.0, 2.0]).fit(X, Y)),
        Remedy(r"give scales \(3,\)",
               lambda: regressor(metric=[1.0, 1.0]).fit(X, Y),
               lambda: regressor(metric=np.ones(3)).fit(X, Y)),
        Remedy("give some a scale",
               lambda: regressor(metric=np.zeros(3)).fit(X, Y),
               lambda: regressor(metric=[0.0, 1.0, 0.0]).fit(X, Y)),
        Remedy(r"is a class; give a kernel, such as Laplace\(2.0\)",
               lambda: regressor(kernel=sk.Laplace, bandwidth="auto").fit(X, Y),
               lambda: regressor(kernel=sk.Laplace(2.0), bandwidth="auto").fit(X, Y)),
        Remedy("has no parameter 'gamma'; did you mean 'bandwidth'",
               lambda: regressor(gamma=2.0), lambda: regressor(bandwidth=2.0)),
        Remedy("search over bandwidth",
               lambda: regressor().set_params(kernel__bandwidth=2.0),
               lambda: regressor().set_params(bandwidth=2.0)),
        Remedy("give every column a name of its own",
               lambda: regressor().fit(twice, Y),
               lambda: regressor().fit(twice.set_axis(["a", "b"], axis=1), Y)),
        Remedy(
            r"say whether they are numbers, or names .*X.astype",
            lambda: regressor().fit(numbers, Y),
               lambda: regressor().fit(numbers.astype({"n": float}), Y)),
        Remedy("give text: X.columns = X.columns.map.str",
               lambda: regressor().fit(unnamed, Y),
               lambda: regressor().fit(unnamed.set_axis(unnamed.columns.map(str), axis=1), Y)),
        Remedy("fill them, X.filled.value.",
               lambda: regressor().fit(np.ma.masked_greater(X, 1.0), Y),
               lambda: regressor().fit(np.ma.masked_greater(X, 1.0).filled(0), Y)),
        Remedy("use KernelClassifier, or ingest it with targets='values'",
               lambda: regressor().fit("labels.zarr"), lambda: classifier().fit("labels.zarr")),
        Remedy("use KernelRegressor", lambda: classifier().fit("data.zarr"),
               lambda: regressor().fit("data.zarr")),
        Remedy("it brings its own y", lambda: regressor().fit("data.zarr", Y),
               lambda: regressor().fit("data.zarr")),
        Remedy("leave it out, or give sample_weight",
               lambda: classifier(class_weight="balanced").fit(X, SEVERAL),
               lambda: classifier().fit(X, SEVERAL, np.ones(N))),
        Remedy("is for rows of one class each.*leave it out",
               lambda: classifier(calibrate=True).fit(X, SEVERAL),
               lambda: classifier().fit(X, SEVERAL)),
        Remedy("use fit",
               lambda: classifier(class_weight="balanced").partial_fit(X, LABELS),
               lambda: classifier(class_weight="balanced").fit(X, LABELS)),
        Remedy("name all labels in the first call's classes=",
               lambda: classifier(solver="block").partial_fit(X, LABELS)
               .partial_fit(X, np.full(N, "new")),
               lambda: classifier(solver="block").partial_fit(
                   X, LABELS, classes=["up", "down", "new"]).partial_fit(X, np.full(N, "new"))),
        Remedy("name all of them there",
               lambda: classifier(solver="block").partial_fit(X, LABELS)
               .partial_fit(X, LABELS, classes=["up", "down", "new"]),
               lambda: classifier(solver="block").partial_fit(
                   X, LABELS, classes=["up", "down", "new"]).partial_fit(X, LABELS)),
        Remedy("give a first block of at least so many rows",
               lambda: regressor(solver="block").partial_fit(X[:9], Y[:9]),
               lambda: regressor(solver="block").partial_fit(X[:20], Y[:20])),
        Remedy("give as many",
               lambda: regressor(solver="block").partial_fit(X, Y).partial_fit(X, np.c_[Y, Y]),
               lambda: regressor(solver="block").partial_fit(X, Y).partial_fit(X, Y)),
        Remedy("leave centers and n_centers out",
               lambda: regressor(solver="sgd", ridge="auto").fit(X, Y),
               lambda: regressor(solver="sgd", ridge="auto", n_centers="auto").fit(X, Y)),
        Remedy("leave n_centers out", lambda: regressor(centers=X[:9]).fit(X, Y),
               lambda: regressor(centers=X[:9], n_centers="auto").fit(X, Y)),
    ]  # fmt: skip


def of_answers() -> list[Remedy]:
    """Mistakes in what a fitted model is asked."""
    model, classes = regressor().fit(X, Y), classifier().fit(X, LABELS)
    table = regressor().fit(FRAME, Y)
    known = regressor(calibrate=True).fit(X, Y)
    lazy = __import__("dask.array").array.from_array(X)
    return [
        Remedy("ask for one at a time",
               lambda: known.predict(X, interval=0.5, return_std=True),
               lambda: known.predict(X, interval=0.5)),
        Remedy("train with calibrate=True", lambda: model.predict(X, interval=0.5),
               lambda: regressor(calibrate=True).fit(X, Y).predict(X, interval=0.5)),
        Remedy("a number between 0 and 1, such as 0.9", lambda: known.predict(X, interval=50),
               lambda: known.predict(X, interval=0.5)),
        Remedy("give a smaller one", lambda: known.predict(X, interval=0.99),
               lambda: known.predict(X, interval=0.5)),
        Remedy("train with posterior=True, which is known of solver='direct'",
               lambda: model.predict(X, return_std=True),
               lambda: regressor(posterior=True, solver="direct").fit(X, Y)
               .predict(X, return_std=True)),
        Remedy("train with calibrate=True", lambda: classes.predict_proba(X),
               lambda: classifier(calibrate=True).fit(X, LABELS).predict_proba(X)),
        Remedy("use permutation_importances", lambda: model.feature_importances_,
               lambda: model.permutation_importances(X, Y)),
        Remedy("give X as an array", lambda: known.predict(lazy, interval=0.5),
               lambda: known.predict(np.asarray(lazy), interval=0.5)),
        Remedy('give predict="pandas"', lambda: model.set_output(transform="pandas"),
               lambda: regressor().set_output(predict="pandas")),
        Remedy("predict='polars' must be one of", lambda: model.set_output(predict="polars"),
               lambda: model.set_output(predict="default")),
        Remedy("give the columns trained on, in any order: 'a', 'b', 'w'",
               lambda: table.predict(FRAME[["a", "b"]]),
               lambda: table.predict(FRAME[["w", "a", "b"]])),
        Remedy("takes a data frame with the columns", lambda: table.predict(X),
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
        Remedy("choose another place|give a new or empty directory",
               lambda: model.save("data.zarr"), lambda: model.save("saved_too")),
    ]  # fmt: skip


def of_forms() -> list[Remedy]:
    """Mistakes in the form of rows and labels, and in searches."""
    mixed = np.array(["a", None] * (N // 2), dtype=object)
    sparse = FRAME[["a", "b"]].astype(pd.SparseDtype("float64", 0.0))
    several = classifier().fit(X, SEVERAL)
    quick: dict[str, Any] = {
        "bandwidths": [2.0], "ridges": [1e-3], "epochs": 1, "refine": 0, "progress": False,
    }  # fmt: skip
    own = regressor(run_dir="tuned")
    return [
        Remedy("is a kernel of scikit-learn's; give Gaussian",
               lambda: regressor(kernel=RBF(2.0), bandwidth="auto").fit(X, Y),
               lambda: regressor(kernel=sk.Gaussian(2.0), bandwidth="auto").fit(X, Y)),
        Remedy("give X.sparse.to_coo.. where all are sparse",
               lambda: regressor().fit(sparse, Y),
               lambda: regressor().fit(sparse.sparse.to_coo(), Y)),
        Remedy("give it one, or leave such rows out", lambda: classifier().fit(X, mixed),
               lambda: classifier().fit(X, np.where(np.arange(N) % 2, "b", "a"))),
        Remedy("give 0 or 1 there, or the classes of the rows in one column",
               lambda: classifier().fit(X, SEVERAL + 1), lambda: classifier().fit(X, SEVERAL)),
        Remedy("leave interval out", lambda: several.predict(X, interval=0.5),
               lambda: several.predict(X)),
        Remedy("leave it out", lambda: regressor().fit(X, Y).score("data.zarr", None, np.ones(N)),
               lambda: regressor().fit(X, Y).score("data.zarr")),
        Remedy("the data comes first; give the estimator by name",
               lambda: sk.tune(regressor(), X),
               lambda: sk.tune(X, Y, estimator=regressor(), **quick)),
        Remedy("must be a KernelClassifier or a KernelRegressor, or None",
               lambda: sk.tune(X, Y, estimator=3), lambda: sk.tune(X, Y, **quick)),  # type: ignore[arg-type]
        Remedy("leave refit out", lambda: sk.tune(X, Y, estimator=own, refit=True, **quick),
               lambda: sk.tune(X, Y, estimator=own, **quick)),
        Remedy("can not be given with settings.*leave it out", lambda: sk.tune("run.toml", Y),
               lambda: sk.tune("run.toml", rows=50, **quick)),
        Remedy("train the best settings with train_model.tuned.config.",
               lambda: sk.tune("run.toml", refit=True),
               lambda: sk.train_model(sk.tune("run.toml", rows=50, **quick).config)),
        Remedy("give the source as X",
               lambda: sk.tune(X, Y, source=sk.ArraySource(X, Y)),
               lambda: sk.tune(sk.ArraySource(X, Y), **quick)),
    ]  # fmt: skip


def of_data() -> list[Remedy]:
    """Mistakes in files and stores."""
    frame = FRAME.assign(fare=Y)
    gaps = np.where(np.arange(N) == 7, np.nan, Y)
    noise = {"kind": "noise", "sigma": 1.0}

    def ingested(data: Any, **given: Any) -> Any:
        return sk.ingest_store(data, "made.zarr", overwrite=True, **given)

    return [
        Remedy("name those you mean with x= and y=|name those you mean",
               lambda: ingested("rides.csv", y="target"), lambda: ingested("rides.csv", y="fare")),
        Remedy("has no column 'target'", lambda: ingested(frame, y="target"),
               lambda: ingested(frame, y="fare")),
        Remedy("give a path, paths, arrays, a data frame", lambda: ingested(3),
               lambda: ingested(X, y=Y)),
        Remedy("pass overwrite=True to replace it, or append",
               lambda: sk.ingest_store(X[:9], "data.zarr", y=Y[:9]),
               lambda: (ingested(X, y=Y), sk.append_store(X[:9], "made.zarr", y=Y[:9]))),
        Remedy("leave like= out", lambda: ingested("rides.csv", y="fare", like="data.zarr"),
               lambda: ingested("rides.csv", y="fare")),
        Remedy("leave them out", lambda: ingested(X, y=Y, drop=["a"]), lambda: ingested(X, y=Y)),
        Remedy('use "error" or "fill"', lambda: ingested(X, y=Y, missing="skip"),
               lambda: ingested(X, y=Y, missing="fill")),
        Remedy("is an archive; unpack it", lambda: ingested("rows.tar"),
               lambda: ingested("rows.npz")),
        Remedy("to_parquet", lambda: ingested("rides.pkl"),
               lambda: (pd.read_pickle("rides.pkl").to_parquet("rides.parquet"),
                        ingested("rides.parquet", y="fare"))),
        Remedy("is an archive and no zarr store; unpack it", lambda: sk.open_store("rows.tar"),
               lambda: ingested("rows.npz")),
        Remedy("make one of it with streamkern ingest", lambda: sk.open_store("rides.csv"),
               lambda: ingested("rides.csv", y="fare")),
        Remedy("which is a folder of other files; make a store of files with streamkern ingest",
               lambda: sk.open_store("parts"), lambda: ingested("parts/*.npz")),
        Remedy("is a run directory and no zarr store; give the path of a store",
               lambda: sk.open_store("run"), lambda: sk.open_store("data.zarr")),
        Remedy("lies within the store .*give a place outside of it",
               lambda: sk.ingest_store(X, "data.zarr/sub.zarr", y=Y),
               lambda: sk.ingest_store(X, "sub.zarr", y=Y)),
        Remedy("as by streamkern.RowRandom", lambda: regressor().fit(generated(False)),
               lambda: regressor().fit(generated(True))),
        Remedy("it needs at least one row, and one output for each class",
               lambda: sk.GeneratorSource(print, 9, (2,), "f4", 1, classes=["a", "b"]),  # type: ignore[arg-type]
               lambda: sk.GeneratorSource(print, 9, (2,), "f4", 2, classes=["a", "b"])),  # type: ignore[arg-type]
        Remedy("write for example|must be a whole number|at least", lambda: sk.augment_store(
            "data.zarr", "aug.zarr", copies=0, transforms=[noise]),
               lambda: sk.augment_store("data.zarr", "aug.zarr", copies=1, transforms=[noise])),
        Remedy("correct such rows, or leave them out", lambda: regressor().fit(X, gaps),
               lambda: regressor().fit(X[~np.isnan(gaps)], Y[~np.isnan(gaps)])),
    ]  # fmt: skip


def generated(repeatable: bool) -> sk.GeneratorSource:
    """Rows of a function, which makes the same ones in each call, or does not."""

    def rows(seed: int, epoch: int, start: int, stop: int) -> tuple[Any, Any]:
        drawn = np.random.default_rng().random((stop - start, 3))
        own = sk.RowRandom(np, seed, epoch, 0, np.arange(start, stop), np.float64).uniform((3,))
        made = own if repeatable else drawn
        return made, made[:, 0]

    return sk.GeneratorSource(rows, N, (3,), np.float64, 1)


def of_commands() -> list[Remedy]:
    """Mistakes on the command line; what is said is on stderr."""
    commands = [
        ("for the model of a run, and .* leave it out", "info data.zarr --importances rows.npz",
         "info data.zarr"),
        ("set it in .data., or give --train URL", "plan empty.toml --no-measure",
         "plan empty.toml --no-measure --train data.zarr"),
        ("is in a folder that does not exist; make it first",
         "tune run.toml --write no/x.toml", "plan run.toml --no-measure"),
        ("must be KEY=VALUE", "info run --storage-option anon", "info run"),
        ("there is nothing to train on; give a run file, or --train URL", "plan --no-measure",
         "plan --no-measure --train data.zarr"),
        ("must be SECTION.KEY=VALUE, such as --set solver.level=100", f"{TRAIN} --set run.threads",
         f"{TRAIN} --set run.threads=1"),
        ("give a folder of runs", "runs nothing", "runs ."),
        ("give the path of a store or of a run directory", "info nothing", "info run"),
        ("give one of them, such as", "evaluate . rows.npz", "evaluate run rows.npz"),
        ("holds none; leave it out", "info data.zarr --plot x.png", "info data.zarr"),
        ("has none; leave it out", "info run --plot x.png", "info run"),
        ("there is no folder no; make it first", "report run --out no/x.html",
         "report run --out x.html"),
        ("was not made by streamkern report; name another file", "report run --out rides.csv",
         "report run --out y.html"),
        ("exists already and is not replaced; name another file",
         "tune run.toml --write run.toml --rows 50 --bandwidths 1 --ridges 0.001 --epochs 1",
         "tune run.toml --write new.toml --rows 50 --bandwidths 1 --ridges 0.001 --epochs 1 "
         "--refine 0 --set model.metric=none --set model.kernel=gaussian"),
        ("name columns, such as a,b,c, or leave it out", "ingest rides.csv e.zarr --x '' --y fare",
         "ingest rides.csv e.zarr --x a,b,w --y fare"),
        ("such as '{kind = \"noise\", sigma = 0.5}'", "augment data.zarr g.zarr --transform noise",
         "augment data.zarr g.zarr --transform '{kind = \"noise\", sigma = 0.5}'"),
        ("must be numbers with commas, such as 3,1",
         "augment data.zarr data.zarr h.zarr --weights x",
         "augment data.zarr data.zarr h.zarr --weights 3,1"),
        ("the last word must be the path of a new store", "ingest rides.csv rides.csv --y fare",
         "ingest rides.csv f.zarr --y fare"),
        ("name those you mean with --x and --y", "ingest rides.csv i.zarr --y target",
         "ingest rides.csv i.zarr --y fare"),
        ("pass --overwrite to replace it", "ingest rows.npz labels.zarr",
         "ingest rows.npz labels.zarr --overwrite"),
        ("train on it with --train data.zarr", "plan data.zarr",
         "plan --train data.zarr --no-measure"),
        ("did you mean --y?", "ingest rides.csv j.zarr --target fare",
         "ingest rides.csv j.zarr --y fare"),
        ("--set model.n_centers=20", "train --train data.zarr --n-centers 20", TRAIN),
        ("give interval, such as 0.9|give --interval",
         "predict calibrated rows.npz a.csv --normalised",
         "predict calibrated rows.npz a.csv --interval 0.5"),
        ("the model has values; leave it out", "predict run rows.npz b.csv --proba",
         "predict run rows.npz b.csv"),
        ("the model has classes; give --proba", "predict classes rows.npz c.csv --interval 0.9",
         "predict classes rows.npz c.csv"),
        ("--set run.calibrate=true", "predict run rows.npz d.csv --interval 0.5",
         f"{TRAIN} --run-dir again --set run.calibrate=true"),
        ("is .csv|is for .csv", "predict run rows.npz e.npy --escape-formulas",
         "predict run rows.npz e.csv --escape-formulas"),
        ("its ending must be .zarr, .npy or .csv or .parquet", "predict run rows.npz e.xlsx",
         "predict run rows.npz f.csv"),
        ("delete it", "predict run rows.npz rides.csv", "predict run rows.npz g.csv"),
        ("leave it out", "predict run rows.npz h.csv --with-input",
         "predict run rows.npz h.csv"),
        ('use "source" or "store"', "predict run data.zarr j.csv --order file",
         "predict run data.zarr j.csv --order store"),
        ("write .zarr, .csv or .parquet, or use the order of the source",
         "predict run data.zarr k.npy --order store", "predict run data.zarr k.csv --order store"),
        ("give a place outside of it", "predict run rows.npz data.zarr/p.csv",
         "predict run rows.npz l.csv"),
        ("is a file of data and no run file; make a store of it with streamkern ingest",
         "train rides.csv", "ingest rides.csv rides.zarr --y fare"),
        ("in settings|restore these, or give another run_dir",
         f"{TRAIN} --run-dir again --solver direct", f"{TRAIN} --run-dir other --solver direct"),
    ]  # fmt: skip
    return [Remedy(says, lambda line=wrong: command(line), lambda line=right: command(line))  # type: ignore[misc]
            for says, wrong, right in commands]  # fmt: skip
