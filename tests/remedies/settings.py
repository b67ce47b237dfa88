"""Mistakes in settings, of run files and of Python."""

from __future__ import annotations

from pathlib import Path

import streamkern as sk
from streamkern.config.run_config import RunConfig, as_config
from tests.remedies import Remedy, X, Y, settings

COVERED = ("config",)


def written(name: str, epochs: int) -> RunConfig:
    """Return what a run file says that has this number of epochs."""
    Path(name).write_text(f"[data]\nepochs = {epochs}\n")
    return sk.load_run_file(name)


def remedies() -> list[Remedy]:
    """Mistakes in settings, of run files and of Python."""
    quick = {"data": {"epochs": 1}, "model": {"n_centers": 20, "metric": "none"}}
    fourier = {"model__features": "fourier", "solver__name": "sgd"}
    return [
        Remedy("make data.train a list, or leave weights out",
               lambda: settings(data__train="a.zarr", data__weights=[1.0]),
               lambda: settings(data__train=["a.zarr"], data__weights=[1.0])),
        Remedy("give one number for each store",
               lambda: settings(data__train=["a", "b"], data__weights=[1.0]),
               lambda: settings(data__train=["a", "b"], data__weights=[1.0, 2.0])),
        Remedy("is used by no part of .*leave it out",
               lambda: settings(model__kernel="linear", model__bandwidth=2.0),
               lambda: settings(model__kernel="linear")),
        Remedy("is not used by .*leave it out, or give one of quantile, expectile",
               lambda: settings(model__loss="huber", model__quantile=0.5),
               lambda: settings(model__loss="quantile", model__quantile=0.5)),
        Remedy("needs the squared error, not .*leave one of them out; model.loss=.poisson",
               lambda: settings(model__target_transform="log", model__loss="huber"),
               lambda: settings(model__loss="poisson", solver__name="block")),
        Remedy("cannot be minimised with .*leave one of them out",
               lambda: settings(model__loss="poisson", solver__name="falkon"),
               lambda: settings(model__loss="poisson", solver__name="block")),
        Remedy("lower level or raise n_nystrom",
               lambda: settings(solver__name="eigenpro2", solver__level=20, solver__n_nystrom=20),
               lambda: settings(solver__name="eigenpro2", solver__level=20, solver__n_nystrom=40)),
        Remedy('set name = "eigenpro4" to delay the projection',
               lambda: settings(solver__name="eigenpro3", solver__period=2),
               lambda: settings(solver__name="eigenpro4", solver__period=2)),
        Remedy("give solver.projection=.resident. or solver.projection=.inexact",
               lambda: settings(solver__name="eigenpro3", solver__projection_epochs=2),
               lambda: settings(solver__name="eigenpro3", solver__projection_epochs=2,
                                solver__projection="inexact")),
        Remedy("solver.damping=2 must be at most 1 with solver.name='eigenpro1'.*lower it",
               lambda: settings(solver__name="eigenpro1", solver__damping=2.0),
               lambda: settings(solver__name="eigenpro1", solver__damping=1.0)),
        Remedy("cannot be trained by solver.name='falkon'; use one of block, ",
               lambda: settings(**fourier | {"solver__name": "falkon"}),
               lambda: settings(**fourier | {"solver__name": "block"})),
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
        Remedy("patch_size=5 has no effect while model.patch_features is 0; set model",
               lambda: settings(model__patch_size=5),
               lambda: settings(model__patch_size=5, model__patch_features=20)),
        Remedy("must be even",
               lambda: settings(model__n_features=11, **fourier),
               lambda: settings(model__n_features=12, **fourier)),
        Remedy('leave n_centers out or set centers = "random"',
               lambda: settings(model__n_centers=10, model__centers="all"),
               lambda: settings(model__n_centers=10, model__centers="random")),
        Remedy("leave it out, or give solver.name='falkon'",
               lambda: settings(solver__name="sgd", solver__tolerance=0.1),
               lambda: (settings(solver__name="sgd"),
                        settings(solver__name="falkon", solver__tolerance=0.1))),
        Remedy("leave it at \"auto\", or give solver.name='block' or solver.name='eigenpro1'",
               lambda: settings(solver__name="sgd", solver__damping=0.1),
               lambda: [settings(solver__name=name, solver__damping=value) for name, value in
                        (("sgd", "auto"), ("block", 0.1), ("eigenpro1", 0.1))]),
        Remedy("model.kernel: .* has no parameter 'offset'; it takes degree, gamma, c0",
               lambda: settings(model__kernel={"kind": "polynomial", "offset": 1.0}),
               lambda: settings(model__kernel={"kind": "polynomial", "c0": 1.0})),
        Remedy("must be a RunConfig, the path of a run file, or the tables of one",
               lambda: sk.train_model(3),  # type: ignore[arg-type]
               lambda: [as_config(given) for given in
                        (RunConfig(), "run.toml", {"data": {"train": "data.zarr"}})]),
        Remedy("to give data, set data.train, or pass source=",
               lambda: sk.train_model(X),  # type: ignore[arg-type]
               lambda: sk.train_model(quick, source=sk.ArraySource(X, Y))),
        Remedy("run file 'wrong.toml': data.epochs=0 must be .*correct it",
               lambda: written("wrong.toml", 0), lambda: written("wrong.toml", 1)),
        Remedy(r"data.transforms\[0\].sigma is missing: .*set it in the same table",
               lambda: settings(data__transforms=[{"kind": "noise"}]),
               lambda: settings(data__transforms=[{"kind": "noise", "sigma": 0.5}])),
        Remedy("did you mean solver.name",
               lambda: RunConfig().with_overrides({"solver": "block"}),
               lambda: RunConfig().with_overrides({"solver.name": "block"})),
        Remedy('did you mean "laplace"', lambda: settings(model__kernel="exponential"),
               lambda: settings(model__kernel="laplace")),
        Remedy("RunConfig.from_tables.tables., or load_run_file",
               lambda: RunConfig({"model": {"n_centers": 5}}),
               lambda: RunConfig.from_tables({"model": {"n_centers": 5}})),
        Remedy("is a section of settings; name one of its settings: .*run.random_state",
               lambda: RunConfig().with_overrides({"run": 3}),
               lambda: RunConfig().with_overrides({"run.random_state": 3})),
        Remedy("correct it or leave it out for the default",
               lambda: settings(data__epochs=0), lambda: settings(data__epochs="auto")),
        Remedy("give the path of a TOML file",
               lambda: sk.load_run_file("none.toml"), lambda: sk.load_run_file("run.toml")),
        Remedy("or give a run file",
               lambda: sk.load_run_file("rides.csv"), lambda: sk.load_run_file("run.toml")),
    ]  # fmt: skip
