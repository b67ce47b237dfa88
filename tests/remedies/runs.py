"""Mistakes about runs that go on: resumed, continued by another one, or started from weights."""

from __future__ import annotations

import contextlib
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import streamkern as sk
from streamkern.rundir.run_directory import RunDirectory
from streamkern.train.restart.run_snapshot import RunSnapshot
from tests.remedies import FRAME, Case, Do, X, Y, cases_of
from tests.remedies.training import Ending, trained

COVERED = (
    "train/continue_run.py", "train/restart/parent_run.py",
    "train/run_identity.py", "train/restart/run_snapshot.py", "train/restart/stored_centers.py",
    "train/setup/choose_centers.py",
)  # fmt: skip

BLOCK: dict[str, Any] = {"solver.name": "block", "data.epochs": 2}


def run(name: str, **more: Any) -> dict[str, Any]:
    """Return settings of a run of the block solver in the folder `name`."""
    return BLOCK | {"run.run_dir": name} | more


def stopped(given: dict[str, Any], **beside: Any) -> None:
    """Train for one of two passes."""
    with contextlib.suppress(sk.TrainingInterrupted):
        trained(given, callbacks=[Ending()], **beside)


def started_run(name: str, given: dict[str, Any], **beside: Any) -> None:
    """Make a run that was ended between its setup and its first checkpoint."""
    stopped(given | {"run.run_dir": name}, **beside)
    shutil.rmtree(f"{name}/checkpoints")


def continued_cases() -> list[Case]:
    """Return mistakes about a run "b" that continues another one, "a"."""
    trained(run("a"))
    trained(run("b"), continues="a")
    trained(run("c"))
    shutil.copytree("b", "no_setup")
    for manifest in Path("no_setup").glob("*setup.json"):
        manifest.unlink()
    for name in ("only_begun", "untrained"):
        started_run(name, BLOCK)
    cases = [
        ("keeps the model of that run.*leave these settings out", {"model.kernel": "laplace"},
         {}),
        ("cannot start from existing weights, .*use another solver, such as 'block'",
         {"solver.name": "direct"}, {"solver.name": "block"}),
        ("differs from the run that is continued.*leave it out", {"solver.warm_start": "c"}, {}),
        ("run.precision gives float64 .*set run.precision to its value in that run",
         {"run.precision": "float64"}, {"run.precision": "exact"}),
        ("data.transforms scales rows differently.*leave the scale out",
         {"data.transforms": [{"kind": "scale", "mode": "global"}]}, {}),
        ("data.scale='none' contradicts.*leave it out", {"data.scale": "none"}, {}),
    ]  # fmt: skip

    def resumed(given: dict[str, Any]) -> Do:
        return lambda: trained(BLOCK | given, continues="a")

    def replaced() -> None:
        trained(run("first", **{"run.random_state": 1}))
        first = RunSnapshot.find("first", load_centers=False, load_weights=False)
        assert first is not None
        shutil.rmtree("first")
        trained(run("first", **{"run.random_state": 2}))
        first.stored_centers.digests()

    def trained_on() -> None:
        stopped(run("parent"))
        started_run("child", BLOCK, continues="parent")
        trained(run("parent"))
        trained(run("child"), continues="parent")

    return [
        *cases_of(resumed, cases),
        ("or start a new run", resumed({"model.kernel": "laplace"}),
         lambda: trained(run("own", **{"model.kernel": "laplace"}))),
        ("centers cannot be given, because .* determines them; leave centers= out",
         lambda: trained(BLOCK, continues="a", centers=X[:20]),
         lambda: trained(BLOCK, continues="a")),
        ("give the new run another run_dir, such as run_dir=.*a-2",
         lambda: trained(run("a"), continues="a"), lambda: trained(run("a-2"), continues="a")),
        ("holds a run that continues .*a; repeat continues=", lambda: trained(run("b")),
         lambda: trained(run("b"), continues="a")),
        ("not .*c; give another run_dir", lambda: trained(run("b"), continues="c"),
         lambda: trained(run("d"), continues="c")),
        ("restore it from a copy, or continue in another run_dir",
               lambda: trained(run("no_setup"), continues="a"),
               lambda: (shutil.copytree("b", "no_setup", dirs_exist_ok=True),
                        trained(run("no_setup"), continues="a"),
                        trained(run("e"), continues="a"))),
        ("there is no run in .*data.zarr, which is a zarr store; give the run directory",
         lambda: trained(run("g"), continues="data.zarr"),
         lambda: trained(run("g"), continues="a")),
        ("has no checkpoint to continue from yet; train that run to its first checkpoint",
         lambda: trained(run("f"), continues="only_begun"),
         lambda: (trained(run("only_begun")), trained(run("f"), continues="only_begun"))),
        ("has no checkpoint yet; train the run to its first checkpoint",
         lambda: sk.load("untrained"), lambda: (trained(run("untrained")), sk.load("untrained"))),
        ("start again in another run_dir", replaced,
         lambda: trained(run("second"), continues="first")),
        ("since this run began to continue it; continue that run in another run_dir", trained_on,
         lambda: trained(run("child-2"), continues="parent")),
    ]  # fmt: skip


def resumed_cases() -> list[Case]:
    """Return mistakes about the run in a directory."""
    rows = {size: sk.ArraySource(X, Y, unit_rows=size) for size in (20, 30)}
    plain = {"data.scale": "none"}
    stopped(run("ordered", **plain), source=rows[20])
    shutil.copytree("run", "other_version")
    with RunDirectory("other_version") as directory:
        saved = directory.load_setup()
        assert saved is not None
        record = directory.read_record()
        assert record is not None
        shutil.rmtree("other_version/checkpoints")
        directory.write_config(record | {"more": 1})
        directory.save_setup(saved.arrays, saved.meta)
    return [
        ("holds a run of another version of streamkern.*or give another run_dir",
         lambda: trained(run("other_version")), lambda: trained(run("this_version"))),
        ("model.n_centers: was 20, now 9; restore these, or give another run_dir",
         lambda: (trained(run("resumed")), trained(run("resumed", **{"model.n_centers": 9}))),
         lambda: (trained(run("resumed")), trained(run("new", **{"model.n_centers": 9})))),
        ("or continue this run in another one .*continues of train_model",
         lambda: trained(run("resumed", **{"data.epochs": 3})),
         lambda: trained(run("more", **{"data.epochs": 1}), continues="resumed")),
        ("read the data in the same units.*or give another run_dir",
               lambda: trained(run("ordered", **plain), source=rows[30]),
               lambda: (trained(run("ordered", **plain), source=rows[20]),
                        trained(run("reordered", **plain), source=rows[30]))),
    ]  # fmt: skip


def warm_start_cases() -> list[Case]:
    """Return mistakes about the weights that a run starts from."""
    wide, turned = np.c_[Y, X[:, 0]], FRAME[["a", "b"]].assign(u=Y, v=X[:, 0])
    sk.ingest_store(X, "two.zarr", y=wide)
    sk.ingest_store(X, "above.zarr", y=np.square(Y))
    for name, order in (("uv", ["u", "v"]), ("vu", ["v", "u"])):
        turned.to_csv(f"{name}.csv", index=False)
        sk.ingest_store(f"{name}.csv", f"{name}.zarr", x=["a", "b"], y=order)
    trained(run("w"))
    trained(run("of_uv", **{"data.train": "uv.zarr"}))
    trained(run("moved"), metric=np.array([1.0, 2.0, 3.0]))
    started_run("without", BLOCK)
    warm, classes = {"solver.warm_start": "w"}, {"data.train": "labels.zarr"}
    trained(run("of_log_loss", **classes | {"model.loss": "log_loss"}))
    trained(run("of_quantile", **{"model.loss": "quantile"}))
    above, logs = {"data.train": "above.zarr"}, {"model.target_transform": "log"}
    plain = {"model.target_transform": "none"}
    trained(run("of_logs", **above | logs))
    of_logs = above | {"solver.warm_start": "of_logs"}
    trained(run("minimises_squares", **above | plain))
    trained(run("of_counts", **above | {"model.loss": "poisson"}))
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("was trained on other targets.*use data with the same targets.*or leave warm_start out",
         warm | {"data.train": "two.zarr"}, warm, {"data.train": "two.zarr"}),
        ("use data with the same targets in the same order",
         {"solver.warm_start": "of_uv", "data.train": "vu.zarr"},
         {"solver.warm_start": "of_uv", "data.train": "uv.zarr"}),
        ("with model.fit_intercept=true; give this run the same",
         warm | {"model.fit_intercept": False}, warm | {"model.fit_intercept": True}),
        ("has other centers than this run.*give both runs the same centers",
         warm | {"run.random_state": 3}, warm),
        ("has other centers.*or leave warm_start out", warm | {"run.random_state": 3},
         {"run.random_state": 3}),
        ("has no checkpoint yet; train that run to its first checkpoint, or leave warm_start out",
         {"solver.warm_start": "without"}, {}),
        ("only weights of squares can be the start of another loss; give both runs the same loss",
         classes | {"solver.warm_start": "of_log_loss"},
         classes | {"solver.warm_start": "of_log_loss", "model.loss": "log_loss"}),
        ("start of another loss.*or leave warm_start out",
         classes | {"solver.warm_start": "of_log_loss"}, classes),
        ("several quantiles of .* cannot start from it.*or leave warm_start out",
         warm | {"model.loss": "quantile", "model.quantile": [0.25, 0.75]},
         {"model.loss": "quantile", "model.quantile": [0.25, 0.75]}),
        ("cannot start from it; give a single quantile",
         warm | {"model.loss": "quantile", "model.quantile": [0.25, 0.75]},
         warm | {"model.loss": "quantile", "model.quantile": 0.25}),
        ("whose weights predict values, .*train it with model.loss=.poisson.",
         above | {"solver.warm_start": "minimises_squares", "model.loss": "poisson"},
         above | {"solver.warm_start": "of_counts", "model.loss": "poisson"}),
        ("whose weights predict values, .*or leave warm_start out",
         above | {"solver.warm_start": "minimises_squares", "model.loss": "poisson"},
         above | {"model.loss": "poisson"}),
        ("from which only squares can be continued.*or leave warm_start out",
         of_logs | {"model.loss": "huber"}, above | {"model.loss": "huber"}),
        ("trained on a log scale .*leave it out to use the scale of the weights", of_logs | plain,
         of_logs),
        ("trained on the scale of .*or leave warm_start out", warm | logs, above | logs),
        ("was trained with model.quantile=0.5, but this run has .*give both runs the same quantile",
         {"solver.warm_start": "of_quantile", "model.loss": "quantile", "model.quantile": 0.9},
         {"solver.warm_start": "of_quantile", "model.loss": "quantile", "model.quantile": 0.5}),
        ("was trained with model.quantile=0.5.*or leave warm_start out",
         {"solver.warm_start": "of_quantile", "model.loss": "quantile", "model.quantile": 0.9},
         {"model.loss": "quantile", "model.quantile": 0.9}),
    ]  # fmt: skip

    def replaced() -> None:
        stopped(run("source"))
        started_run("from_source", BLOCK | {"solver.warm_start": "source"})
        trained(run("source"))
        trained(run("from_source", **{"solver.warm_start": "source"}))

    own, other = np.array([1.0, 2.0, 3.0]), np.ones(3)
    moved = BLOCK | {"solver.warm_start": "moved"}
    return [
        *cases_of(lambda given: partial(trained, BLOCK | given), cases),
        ("since the setup of this run; start this run again in another run_dir", replaced,
         lambda: trained(run("anew", **{"solver.warm_start": "source"}))),
        ("leave model.metric out to use the metric of the weights, or leave warm_start out",
         lambda: trained(moved, metric=other),
         lambda: (trained(moved | {"model.metric": "auto"}), trained(BLOCK, metric=own))),
    ]  # fmt: skip


TABLES = (continued_cases, resumed_cases, warm_start_cases)
