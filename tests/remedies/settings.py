"""Mistakes in settings, of run files and of Python."""

from __future__ import annotations

import streamkern as sk
from streamkern.config.run_config import RunConfig
from tests.remedies import (
    Remedy,
    settings,
)


def remedies() -> list[Remedy]:
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
