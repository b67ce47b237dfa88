"""Mistakes in the settings of solvers, and in rows, centers and sizes that they cannot use."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import streamkern as sk
from streamkern.backend.devices import get_backend
from streamkern.config.run_config import RunConfig
from streamkern.kernels.products import KernelOperator
from streamkern.solver.precondition.block import block_slices
from streamkern.solver.precondition.low_rank import sample_eigenpairs
from tests.remedies import Case, Do, N, X, Y, cases_of, fit_values, long_rows
from tests.remedies.training import USUAL, trained

COVERED = ("solver", "centers", "planning")

NOT_TRIED = {
    "solver/base.py:Solver.back_off:1": "guards against what no data was seen to do",
    "solver/direct.py:Direct.assemble:1": "no quick data has a ridge found to be 0",
    "solver/falkon_step.py:PreconditionedSolver._divergence_error:1": "tests/solver/test_falkon.py",
    "solver/precondition/low_rank.py:build_extended_low_rank:1": "LAPACK fails, or others refuse",
    "solver/precondition/norm.py:inverse_root:1": "others refuse before",
    "solver/precondition/low_rank.py:sample_eigenpairs:2": "LAPACK fails; others refuse before",
}

FREE: dict[str, Any] = {"n_centers": "auto", "ridge": "auto"}


def setting_cases() -> list[Case]:
    """Return mistakes in settings: (words, wrong settings, right ones)."""
    sk.ingest_store(np.repeat(X[:3], 20, axis=0), "few.zarr", y=Y)
    sk.ingest_store(X[:1], "one.zarr", y=Y[:1])
    auto: dict[str, Any] = {"model.n_centers": "auto"}
    none: dict[str, Any] = {"solver.ridge": "auto"}

    def solver(name: str, **more: Any) -> dict[str, Any]:
        return none | {"solver.name": name} | {f"solver.{k}": v for k, v in more.items()}

    posterior = {"solver.posterior": True}
    stopping = {"run.early_stopping": True, "data.epochs": 3}
    fourier = {"model.features": "fourier", "model.n_centers": "auto", "model.n_features": 10}
    cases = [
        ("needs solver='direct', which has no setting solver.block_size; leave one of them out",
         posterior | {"solver.block_size": 5}, posterior),
        ("leave it out, or use another solver", solver("direct") | stopping, solver("direct")),
        ("cannot be used with solver='direct'.*or use another solver", solver("direct") | stopping,
         solver("block") | stopping),
        ("which copies, random transforms.*train on the rows themselves",
         posterior | {"data.transforms": [{"kind": "noise", "sigma": 1.0}]}, posterior),
        ('set name = "eigenpro4" to delay the projection', solver("eigenpro3", period=2),
         solver("eigenpro4", period=2) | {"data.batch_size": 20}),
        ("whose products are not of half precision; leave one of them at its default",
         solver("block", factor_dtype="float16") | {"run.precision": "float64"},
         solver("block", factor_dtype="float16")),
        ("must be at most 1 .*lower it", auto | solver("eigenpro1", damping=2.0),
         auto | solver("eigenpro1", damping=1.0)),
        ("is not defined for solver 'eigenpro1' on a kernel; set it to 0 or use another solver",
         auto | solver("eigenpro1") | {"solver.ridge": 0.1},
         auto | solver("eigenpro1") | {"solver.ridge": 0}),
        ('leave the ridge at "auto", or set it above 0',
         solver("direct", ridge=0.0) | {"model.loss": "huber", "data.epochs": 2},
         solver("direct", ridge=1e-3) | {"model.loss": "huber", "data.epochs": 2}),
        ("set it to the number of steps plus 1, or leave it out",
         solver("direct") | {"model.loss": "huber", "data.epochs": 1},
         solver("direct") | {"model.loss": "huber", "data.epochs": 2}),
        ("level=10 must lie between 1 and the number of features - 1 = 9; lower it",
         fourier | solver("eigenpro1", level=10), fourier | solver("eigenpro1", level=9)),
        ("because the eigenvectors are those of 9 rows; lower level.*or raise n_nystrom",
         solver("eigenpro3", n_nystrom=9, level=9), solver("eigenpro3", n_nystrom=9, level=8),
         solver("eigenpro3", n_nystrom=10, level=9)),
        ("cannot be trained by solver.name=.falkon.; use one of .*sgd", fourier | solver("falkon"),
         fourier | solver("sgd")),
        ("batch_size=99 must lie between 1 and n_rows=60; lower it", {"data.batch_size": 99},
         {"data.batch_size": 60}),
        ("block_size=30 must lie between 1 and", solver("block", block_size=30),
         solver("block", block_size=20)),
        ("set centers = 'random', or another selector", {"model.centers": "balanced"},
         {"model.centers": "random"}),
        ("lower n_centers, or set centers = 'random'",
         {"model.centers": "rpcholesky", "data.train": "few.zarr"},
         {"model.centers": "rpcholesky", "data.train": "few.zarr", "model.n_centers": 3}),
        ("n_nystrom=1 must lie between 2 and n_rows=1; use more training rows",
         auto | solver("eigenpro3") | {"data.train": "one.zarr"}, auto | solver("eigenpro3")),
        ("level=48 must lie between 1 and n_nystrom - 1 = 47; lower it",
         solver("eigenpro3", level=48), solver("eigenpro3", level=47)),
        ("raise memory or lower n_centers", {"run.memory": "1 MiB"}, {"run.memory": "1 GiB"}),
    ]  # fmt: skip
    return cases_of(lambda given: partial(trained, given), cases)


def row_cases() -> list[Case]:
    """Return mistakes in rows and centers."""
    out, is_other_row = X.copy(), np.arange(N) != 7
    out[7] *= 1e7
    far = X.copy()
    far[7] *= 1e4
    steep: dict[str, Any] = {"kernel": sk.Polynomial(8), "bandwidth": "auto", "scale": "none"}
    zero = {"kernel": "relu_ntk", "bandwidth": "auto", "n_centers": "auto"}
    equal = np.ones_like(X)
    names = np.array([["1", "2", "3"]])

    def fits(rows: Any, keep: Any = slice(None), **more: Any) -> Do:
        return fit_values(rows[keep], Y[keep], **more)

    return [
        ("cannot solve its normal equations.*check the data for outliers",
         fits(out, solver="direct", **steep), fits(out, is_other_row, solver="direct", **steep)),
        ("the kernel between the centers and .*scale the features, or widen the bandwidth",
         fits(far, solver="block", **steep | {"kernel": sk.Polynomial(3)}),
         fits(far, solver="block", **steep | {"kernel": sk.Polynomial(3), "scale": "auto"})),
        *((rf"\({case} 0\); .*if all rows are equal, set solver='direct'",
                 fits(equal, solver=solver, **zero), fits(equal, solver="direct", **zero))
          for case, solver in (("largest k.*", "block"), ("leverage", "sgd"))),
        ("trace of the sample", fits(out, solver="eigenpro3", **steep | FREE),
         fits(out, is_other_row, solver="eigenpro3", **steep | FREE)),
        ("cannot be factored.*check the data for outliers", fits(out, solver="block", **steep),
         fits(out, is_other_row, solver="block", **steep)),
        ("has rank 1 to working precision; .*give a smaller bandwidth",
         fits(X, solver="eigenpro3", **FREE | {"bandwidth": 1e9}),
         fits(X, solver="eigenpro3", **FREE | {"bandwidth": 2.0})),
        ("centers have dtype .*; convert them to a floating type",
         lambda: trained({"model.n_centers": "auto"}, centers=names),
         lambda: trained({"model.n_centers": "auto"}, centers=names.astype("f4"))),
        ("give at least one row", lambda: trained({"model.n_centers": "auto"}, centers=X[:0]),
         lambda: trained({"model.n_centers": "auto"}, centers=X[:1])),
        ("centers contain NaN or infinity in row 0; remove that row",
         lambda: trained({"model.n_centers": "auto"}, centers=X[:5] / [[0.0]] * 5),
         lambda: trained({"model.n_centers": "auto"}, centers=X[:5])),
    ]  # fmt: skip


def rank_cases() -> list[Case]:
    """Return mistakes in who shares the steps, and in rows that are given as centers."""

    def planned(**given: Any) -> None:
        settings = {k: v for k, v in USUAL.items() if k != "solver.ridge"}
        settings |= {"run.run_dir": "r", "data.epochs": 2}
        named = {k.replace("__", "."): v for k, v in given.items()}
        sk.plan(RunConfig().with_overrides(settings | named), measure=False)

    sgd = {"solver.name": "sgd", "solver.ridge": "auto", "model.n_centers": "auto"}
    return [
        ("cannot share the steps of solver='eigenpro1'; use one rank, or train with solver",
               lambda: planned(run__ranks=2, solver__name="eigenpro1", model__n_centers="auto"),
               lambda: (planned(solver__name="eigenpro1", model__n_centers="auto"),
                        planned(run__ranks=2, solver__name="block"))),
        ("set it to 1, or train with solver='block', solver='eigenpro3'",
               lambda: planned(run__ranks=2, run__center_ranks=2, solver__name="direct"),
               lambda: (planned(run__ranks=2, solver__name="direct"),
                        *(planned(run__ranks=2, run__center_ranks=2, solver__name=name)
                          for name in ("block", "eigenpro3", "eigenpro4", "falkon")))),
        ("give centers='all' without random augmentation, or use another solver",
               lambda: trained(sgd, centers=X[:9]),
               lambda: (trained(sgd | {"model.centers": "all"}),
                        trained({"model.n_centers": "auto"}, centers=X[:9]))),
        ("give both as sparse rows, or both as dense ones",
         lambda: trained({"model.n_centers": "auto"}, centers=long_rows(n=9)),
         lambda: trained({"model.n_centers": "auto"}, centers=X[:9])),
        ("block_size=20 must lie between 1 and n_centers=10", lambda: block_slices(10, 20),
         lambda: block_slices(10, 10)),
        ("level=5 must lie between 1 and n_nystrom - 1 = 4", lambda: eigenpairs(5),
         lambda: eigenpairs(4)),
    ]  # fmt: skip


def center_cases() -> list[Case]:
    """Return mistakes with sparse centers that have other features than the rows."""

    def fit(d: int) -> Any:
        centers = long_rows(n=9, d=d)
        return fit_values(long_rows(), Y, n_centers="auto", centers=centers)

    return [("give rows and centers with the same features", fit(8000), fit(9000))]


def eigenpairs(level: int) -> Any:
    """Return those of the kernel matrix of five rows."""
    op = KernelOperator(sk.Gaussian(2.0), get_backend("cpu", 1, "none"), "exact", np.zeros(3))
    points = op.points(X[:5].astype("f4"), left=True, right=True)
    return sample_eigenpairs(op, op.matrix(points, points) / 5, level, 0)


TABLES = (setting_cases, row_cases, rank_cases, center_cases)
