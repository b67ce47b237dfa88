"""Mistakes in what a search is asked, and in the folder of its results."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

import streamkern as sk
from streamkern.filesystem.ownership import file_lock
from streamkern.kernels.tree_partitions import placeholder_trees
from tests.remedies import LABELS, Case, N, X, Y, regressor

COVERED = ("tuning",)
NOT_TRIED = {
    "tuning/search.py:_search_result:1": "no quick training diverges for every candidate",
}
QUICK: dict[str, Any] = {"bandwidths": [2.0], "ridges": [1e-3], "epochs": 1, "refine": 0}


def tuned(X: Any = X, y: Any = Y, **given: Any) -> sk.Tuned:
    own = {"estimator": regressor()} if y is Y else {}
    return sk.tune(X, y, **QUICK | own | given)


def args_of(message: str, wrong: dict[str, Any], *right: dict[str, Any]) -> Case:
    """Return arguments of `tune`."""
    return (message, lambda: tuned(**wrong), lambda: [tuned(**given) for given in right])


def argument_cases() -> list[Case]:
    """Return mistakes in the arguments of `tune`."""
    labels = {"y": LABELS, "estimator": None}
    in_metric = sk.Laplace(2.0, metric=[1.0, 1.0, 1.0])
    every_row, block = (
        regressor(solver="eigenpro2", n_centers="auto", ridge="auto"),
        regressor(solver="block"),
    )
    alone = np.where(np.arange(N) < N - 4, "a", [f"c{k}" for k in range(N)])
    few = {"X": X[:4], "y": Y[:4], "estimator": regressor(n_centers=2)}
    plain = sk.ArraySource(X, Y)
    inner = sk.MixtureSource([plain, sk.AugmentedSource(plain, 2, [])])
    full = sk.AugmentedSource(sk.MixtureSource([plain, plain]), 2, [])
    return [
        args_of("rows=3 cannot be split; give at least 5 rows", {"rows": 3}, {"rows": 5}),
        args_of("give at most .* rows, or raise",
              {"rows": N, "estimator": regressor(memory=4000)},
              {"rows": N, "estimator": regressor(memory="1 GiB")}),
        args_of("leave centers out, and lower rows",
              {"centers": 5, "estimator": every_row, "ridges": "auto"},
              {"rows": 30, "estimator": every_row, "ridges": "auto"}),
        args_of("lower centers, or raise rows", {"rows": 20, "centers": 30, "estimator": block},
              {"rows": 20, "centers": 10, "estimator": block},
              {"rows": 50, "centers": 30, "estimator": block}),
        args_of("must be a list with at least one kernel; give for example", {"kernels": "laplace"},
              {"kernels": ["laplace"]}),
        args_of("give the kernel without a metric, and give the metric to the estimator",
              {"kernels": [in_metric]},
              {"kernels": [in_metric.with_metric(None)],
               "estimator": regressor(metric=in_metric.metric)}),
        args_of("give the kernel without trees, or the kernel 'auto'",
              {"kernels": [in_metric.with_metric(None).with_trees(placeholder_trees(8))]},
              {"kernels": [in_metric.with_metric(None)]}),
        args_of('bandwidths=3 must be "auto" or a list of numbers above 0', {"bandwidths": 3},
              {"bandwidths": [3.0]}),
        args_of('ridges=.* must be "auto" or a list of numbers 0 or above', {"ridges": [-1.0]},
              {"ridges": [0.0, 1.0]}),
        args_of("folds=0 must be a whole number, at least 1", {"folds": 0}, {"folds": 2}),
        args_of("give more rows", {"X": X[-5:], "y": alone[-5:]}, {"X": X, "y": alone}),
        args_of("a sample of 4 rows cannot be split; give at least 5 rows", few,
              few | {"X": X[:5], "y": Y[:5]}),
        args_of("augment the whole source instead, by an AugmentedSource", {"X": inner, "y": None},
              {"X": full, "y": None}),
        args_of('is not defined for values; take "auto", mse', {"metric": "accuracy"},
              {"metric": "auto"}, {"metric": "mse"}),
        args_of('is not known; take "auto", accuracy', labels | {"metric": "best"},
              labels | {"metric": "accuracy"}),
        args_of("leave bandwidths= out",
                {"estimator": regressor(kernel="linear", bandwidth="auto")},
              {"estimator": regressor(kernel="linear", bandwidth="auto"), "bandwidths": "auto"}),
        args_of('must be "grid" or "optuna"', {"sampler": "random"}, {"sampler": "grid"}),
        args_of("n_trials=3 is not defined for sampler='grid'; leave it out", {"n_trials": 3}, {}),
    ]  # fmt: skip


def folder_cases() -> list[Case]:
    """Return mistakes in the folder of the results."""
    for name in ("held", "damaged"):
        tuned(out=name)
    shutil.copytree("damaged", "copy")
    Path("damaged/journal.log").write_text("{}\n")
    for name, file, text in (
        ("old", "search.json", "{}"),
        ("other", "journal.log", '{"op_code": 0, "worker_id": "a", "study_name": "b"}\n'),
    ):
        Path(name).mkdir()
        Path(name, file).write_text(text)
    lock = file_lock(Path("held/search.lock"))

    def held() -> None:
        lock.acquire()
        try:
            tuned(out="held")
        finally:
            lock.release()

    return [
        args_of("is damaged .*; restore it from a copy", {"out": "damaged"}, {"out": "copy"}),
        args_of("or give another folder", {"out": "damaged"}, {"out": "another"}),
        args_of("holds a search with other settings or data: .*; restore the settings and data",
              {"out": "held", "rows": 30},
              {"out": "held"}),
        args_of("or give another folder", {"out": "held", "rows": 30}, {"out": "new", "rows": 30}),
        args_of("give a new or empty folder", {"out": "parts"}, {"out": "empty"}),
        args_of("of streamkern 0.1.0, which .*; give a new or empty folder", {"out": "old"},
              {"out": "young"}),
        args_of("is a study of Optuna, not a search of streamkern; give a new", {"out": "other"},
              {"out": "ours"}),
        ("wait for it, or give another folder", held,
         lambda: (tuned(out="held"), tuned(out="free"))),
    ]  # fmt: skip


TABLES = (argument_cases, folder_cases)
