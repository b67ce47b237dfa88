"""Mistakes in settings, of run files and of Python."""

from __future__ import annotations

from pathlib import Path

import streamkern as sk
from streamkern.config.run_config import RunConfig, as_config
from tests.remedies import Case, X, Y, settings

COVERED = ("config",)


def written(name: str, epochs: int) -> RunConfig:
    """Return what a run file says that has this number of epochs."""
    Path(name).write_text(f"[data]\nepochs = {epochs}\n")
    return sk.load_run_file(name)


def setting_cases() -> list[Case]:
    """Return mistakes in settings, of run files and of Python."""
    quick = {"data": {"epochs": 1}, "model": {"n_centers": 20, "metric": "none"}}
    fourier = {"model__features": "fourier", "solver__name": "sgd"}
    return [
        ("make data.train a list, or leave weights out",
         lambda: settings(data__train="a.zarr", data__weights=[1.0]),
         lambda: settings(data__train=["a.zarr"], data__weights=[1.0])),
        ("give one number for each store",
         lambda: settings(data__train=["a", "b"], data__weights=[1.0]),
         lambda: settings(data__train=["a", "b"], data__weights=[1.0, 2.0])),
        ("is not used by any part of .*leave it out",
         lambda: settings(model__kernel="linear", model__bandwidth=2.0),
         lambda: settings(model__kernel="linear")),
        ("is not used by .*leave it out, or give one of quantile, expectile",
         lambda: settings(model__loss="huber", model__quantile=0.5),
         lambda: settings(model__loss="quantile", model__quantile=0.5)),
        ("needs the squared error, not .*leave one of them out; model.loss=.poisson",
         lambda: settings(model__target_transform="log", model__loss="huber"),
         lambda: settings(model__loss="poisson", solver__name="block")),
        ("cannot be minimised with .*leave one of them out",
         lambda: settings(model__loss="poisson", solver__name="falkon", model__fit_intercept=False),
         lambda: settings(model__loss="poisson", solver__name="falkon")),
        ("lower level or raise n_nystrom",
         lambda: settings(solver__name="eigenpro2", solver__level=20, solver__n_nystrom=20),
         lambda: settings(solver__name="eigenpro2", solver__level=20, solver__n_nystrom=40)),
        ('set name = "eigenpro4" to delay the projection',
         lambda: settings(solver__name="eigenpro3", solver__period=2),
         lambda: settings(solver__name="eigenpro4", solver__period=2)),
        ("give solver.projection=.resident. or solver.projection=.inexact",
               lambda: settings(solver__name="eigenpro3", solver__projection_epochs=2),
               lambda: settings(solver__name="eigenpro3", solver__projection_epochs=2,
                                solver__projection="inexact")),
        ("solver.damping=2 must be at most 1 with solver.name='eigenpro1'.*lower it",
         lambda: settings(solver__name="eigenpro1", solver__damping=2.0),
         lambda: settings(solver__name="eigenpro1", solver__damping=1.0)),
        ("cannot be trained by solver.name='falkon'; use one of block, ",
         lambda: settings(**fourier | {"solver__name": "falkon"}),
         lambda: settings(**fourier | {"solver__name": "block"})),
        ('leave centers and n_centers out, and set n_features.*or set features = "nystrom"',
         lambda: settings(model__n_centers=10, **fourier),
         lambda: settings(model__n_features=10, **fourier),
         lambda: settings(model__n_centers=10, model__features="nystrom", solver__name="sgd")),
        ("leave one of them out", lambda: settings(model__metric="learn", **fourier),
         lambda: settings(**fourier)),
        ("leave one of them out",
         lambda: settings(model__metric="learn", model__kernel=sk.Laplace(2, metric=[1.0])),
         lambda: settings(model__kernel=sk.Laplace(2, metric=[1.0]))),
        ("leave it out, or set n_centers", lambda: settings(model__n_features=10),
         lambda: settings(model__n_centers=10)),
        ("patch_size=5 has no effect, because model.patch_features is 0; set model",
         lambda: settings(model__patch_size=5),
         lambda: settings(model__patch_size=5, model__patch_features=20)),
        ("must be even", lambda: settings(model__n_features=11, **fourier),
         lambda: settings(model__n_features=12, **fourier)),
        ('leave n_centers out or set centers = "random"',
         lambda: settings(model__n_centers=10, model__centers="all"),
         lambda: settings(model__n_centers=10, model__centers="random")),
        ("leave it out, or give solver.name='falkon'",
               lambda: settings(solver__name="sgd", solver__tolerance=0.1),
               lambda: (settings(solver__name="sgd"),
                        settings(solver__name="falkon", solver__tolerance=0.1))),
        ("leave it at \"auto\", or give solver.name='block' or solver.name='eigenpro1'",
               lambda: settings(solver__name="sgd", solver__damping=0.1),
               lambda: [settings(solver__name=name, solver__damping=value) for name, value in
                        (("sgd", "auto"), ("block", 0.1), ("eigenpro1", 0.1))]),
        ("model.kernel: .* has no parameter 'offset'; it takes degree, gamma, c0",
         lambda: settings(model__kernel={"kind": "polynomial", "offset": 1.0}),
         lambda: settings(model__kernel={"kind": "polynomial", "c0": 1.0})),
        ("must be a RunConfig, the path of a run file, or the tables of one",
               lambda: sk.train_model(3),
               lambda: [as_config(given) for given in
                        (RunConfig(), "run.toml", {"data": {"train": "data.zarr"}})]),
        ("to give data, set data.train, or pass source=", lambda: sk.train_model(X),
         lambda: sk.train_model(quick, source=sk.ArraySource(X, Y))),
        ("run file 'wrong.toml': data.epochs=0 must be .*correct it",
         lambda: written("wrong.toml", 0), lambda: written("wrong.toml", 1)),
        (r"data.transforms\[0\].sigma is missing: .*set it in the same table",
         lambda: settings(data__transforms=[{"kind": "noise"}]),
         lambda: settings(data__transforms=[{"kind": "noise", "sigma": 0.5}])),
        ("did you mean solver.name", lambda: RunConfig().with_overrides({"solver": "block"}),
         lambda: RunConfig().with_overrides({"solver.name": "block"})),
        ('did you mean "laplace"', lambda: settings(model__kernel="exponential"),
         lambda: settings(model__kernel="laplace")),
        ("RunConfig.from_tables.tables., or load_run_file",
         lambda: RunConfig({"model": {"n_centers": 5}}),
         lambda: RunConfig.from_tables({"model": {"n_centers": 5}})),
        ("is a section of settings; name one of its settings: .*run.random_state",
         lambda: RunConfig().with_overrides({"run": 3}),
         lambda: RunConfig().with_overrides({"run.random_state": 3})),
        ("correct it or leave it out for the default", lambda: settings(data__epochs=0),
         lambda: settings(data__epochs="auto")),
        ("give the path of a TOML file", lambda: sk.load_run_file("none.toml"),
         lambda: sk.load_run_file("run.toml")),
        ("or give a run file", lambda: sk.load_run_file("rides.csv"),
         lambda: sk.load_run_file("run.toml")),
    ]  # fmt: skip


TABLES = (setting_cases,)
