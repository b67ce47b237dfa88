"""Continue a run in another one: load the parent run, and take its model for the settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from streamkern.basics.errors import ConfigError, ResumeMismatchError, RunError
from streamkern.basics.message import mention
from streamkern.basics.text import redact
from streamkern.config.run_config import NEUTRAL_VALUES, RunConfig
from streamkern.config.solver import options_of
from streamkern.filesystem.urls import local_path
from streamkern.kernels.builtin import get_kernel, reference_of
from streamkern.kernels.own import kernel_of_run
from streamkern.losses.own import loss_of_run
from streamkern.rundir.checkpoint_format import checkpoint_errors
from streamkern.rundir.run_directory import RunDirectory
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.resolve.training_data import storage_options_for
from streamkern.train.restart.parent_run import ParentRun
from streamkern.train.restart.run_snapshot import recorded_run
from streamkern.train.saved_model import model_digest

ParentId = tuple[dict[str, Any], str]
"""`ParentRun.ancestry` of a parent run, and the SHA-256 of its centers."""


def continuing(
    config: RunConfig, inputs: RunInputs, directory: RunDirectory | None,
    parent_id: ParentId | None = None,
) -> tuple[RunConfig, RunInputs]:  # fmt: skip
    """Return the settings and inputs of a run, completed from its parent run if it continues one.

    Once a run has started, its own directory holds all that it needs, and the parent run may have
    been deleted.

    directory : directory of the new run, or None
    parent_id : identity of the parent run that rank 0 has found; given on the other ranks

    Raises
    ------
    ConfigError
        The settings contradict the parent run, whose kernel, centers, metric and scaling are kept.
    ResumeMismatchError
        The directory holds a run that has another parent run, or none.
    """
    recorded = recorded_run(directory)
    ancestry = None if recorded is None else recorded["identity"].get("continues")
    place = inputs.continues
    if place is None:
        if ancestry is not None and directory is not None:
            raise ResumeMismatchError(
                f"{directory.place} holds a run that continues {ancestry['run']}",
                f"repeat {mention('continues', ancestry['run'])}, or give another run_dir",
            )
        return config, inputs
    if directory is not None and _absolute(directory.place) == _absolute(place):
        raise ConfigError(
            f"{mention('run_dir', directory.place)} is the run that is continued, which stays as "
            f"it is",
            "give the new one its own, such as "
            f"{mention('run_dir', directory.place.rstrip('/') + '-2')}",
        )
    config = _warm_started(config, place, inputs)
    if recorded is None:
        return _from_parent(place, config, inputs, parent_id)
    assert directory is not None
    if ancestry is None or ancestry["run"] != _absolute(place):
        what = "no other run" if ancestry is None else ancestry["run"]
        raise ResumeMismatchError(
            f"{directory.place} holds a run that continues {what}, and not {_absolute(place)}",
            "give another run_dir",
        )
    # `_find` opens the directory again, because a load changes the state of `directory`.
    begun = _find(config, config.run.run_dir or "")
    if begun is None:
        raise RunError(
            f"the setup in {directory.place} is gone, without which a run that continues another "
            "one cannot go on",
            "restore it from a copy, or continue in another run_dir",
        )
    with checkpoint_errors(begun.check().place):
        # There is no digest for Fourier features, which are read from the setup.
        digest = recorded["identity"].get("centers", {"sha256": ""})
        centers = replace(begun.stored, recorded=digest["sha256"])
        parent = replace(begun, ancestry=ancestry, centers=centers)
    return _with_model_of(recorded["identity"]["settings"], parent, parent_id, config, inputs)


def _find(config: RunConfig, place: str, *, load_weights: bool = False) -> ParentRun | None:
    options = storage_options_for(config, place)
    return ParentRun.find(place, options, load_centers=False, load_weights=load_weights)


def _warm_started(config: RunConfig, place: str, inputs: RunInputs) -> RunConfig:
    """Return the settings with the run in `place` as solver.warm_start."""
    for name, array in (("centers", inputs.centers), ("metric", inputs.metric)):
        if array is not None:
            raise ConfigError(
                f"{name} are those of the run that is continued", f"leave {mention(f'{name}=')} out"
            )
    name, own = config.solver.name, config.solver.warm_start
    if "warm_start" not in options_of(name):
        raise ConfigError(
            f"{mention('solver.name', name)} starts from nothing and cannot continue a run",
            "use another one, such as 'block'",
        )
    if own is not None and _absolute(own) != _absolute(place):
        raise ConfigError(
            f"{mention(f'solver.warm_start={redact(own)}')} is another run than the one that is "
            "continued, whose weights are taken",
            "leave it out",
        )
    path = local_path(place)
    return config.with_overrides(
        {"solver.warm_start": place if path is None else str(path.absolute())}
    )


def _from_parent(
    place: str, config: RunConfig, inputs: RunInputs, parent_id: ParentId | None
) -> tuple[RunConfig, RunInputs]:
    """Return settings and inputs from the parent run. Its weights are loaded later, by the
    setup."""
    parent = _find(config, place, load_weights=parent_id is None)
    if parent is None or parent.setup.run is None:
        raise ConfigError(
            f"{redact(place)} has no checkpoint to continue from yet", "train it first"
        )
    settings = parent.record["identity"]["settings"]
    with checkpoint_errors(parent.check().place):
        ancestry = _ancestry(_absolute(place), parent) if parent_id is None else parent_id[0]
        parent = replace(parent, ancestry=ancestry, checkpoint=None)
        # The caller of the parent run gave these facts about the targets, which still hold.
        inherited = ("flat", "labels", "weight_column")
        facts = inputs.facts or {k: parent.facts[k] for k in inherited if k in parent.facts}
    return _with_model_of(settings, parent, parent_id, config, replace(inputs, facts=facts))


def _ancestry(place: str, parent: ParentRun) -> dict[str, Any]:
    """Return the ancestry of a run that continues `parent`, as JSON values.

    It describes the parent run, and its ancestors in the list "before", the nearest first.
    """
    saved, own = parent.saved, parent.record["identity"].get("continues")
    position = saved.meta["position"]
    epochs = position["epoch"] + (position["batch"] > 0) + (0 if own is None else own["epochs"])
    grandparent = {k: v for k, v in (own or {}).items() if k != "before"}
    return {
        "run": place, "step": saved.step, "samples": position["samples"], "epochs": epochs,
        "model": model_digest(parent),
        "before": [] if own is None else [grandparent, *own["before"]],
    }  # fmt: skip


def _with_model_of(
    settings: Mapping[str, Mapping[str, Any]], parent: ParentRun, parent_id: ParentId | None,
    config: RunConfig, inputs: RunInputs,
) -> tuple[RunConfig, RunInputs]:  # fmt: skip
    """Return settings and inputs with the model of the parent run.

    Settings of [model] at their defaults count as not given. Others must be equal to the settings
    of the parent run, except for the loss, if the parent run minimised squares.

    settings : recorded settings of the parent run
    """
    requested, usual = config.identity()["model"], RunConfig().identity()["model"]
    added = {k.partition(".")[2]: v for k, v in NEUTRAL_VALUES.items() if k.startswith("model.")}
    old, named = settings["model"], {**usual, **added, **settings["model"]}
    kernel = kernel_of_run(old.get("kernel"))
    made = None
    if isinstance(kernel, Mapping) and "kind" not in kernel:  # description of a `Kernel` object
        made = get_kernel(kernel, "auto")
        if requested["kernel"] == reference_of(type(made)):  # the same class, given by its name
            requested["kernel"] = old["kernel"]
    # Settings that the record lacks were given as arrays; they may be at their defaults now.
    other = [k for k, v in requested.items() if v not in (usual.get(k), old.get(k, usual.get(k)))]
    if "loss" not in old:
        other = [k for k in other if k not in ("loss", "quantile")]
    if other:
        wrong = "; ".join(
            f"{mention(f'model.{k}')}: was {named.get(k)!r}, now {requested[k]!r}" for k in other
        )
        raise ConfigError(
            f"a run keeps the model of the one it continues, {parent.ancestry['run']}: {wrong}",
            "leave these out, or start a run of its own",
        )
    own = {f"model.{k}": v for k, v in {**usual, **old}.items()}
    if made is not None:
        own["model.kernel"] = made
    if "loss" in old:
        own["model.loss"] = loss_of_run(old["loss"])
    if parent_id is not None:
        parent = replace(parent, centers=replace(parent.stored, sha256=parent_id[1]))
    centers = None if old.get("features") == "fourier" else parent.stored
    if centers is not None and own["model.n_centers"] != "auto":
        own["model.n_centers"] = centers.shape[0]  # fewer than asked for, if the rows were fewer
    if config.run.precision == "auto" and parent.stored.dtype == np.float64:
        own["run.precision"] = "float64"
    metric = None if "metric" in old else parent.metric
    inputs = replace(inputs, continued=parent, centers=centers, metric=metric)
    return config.with_overrides(own), inputs


def _absolute(place: str) -> str:
    """Return a path or URL in the form in which it is recorded and compared."""
    path = local_path(place)
    return redact(place).rstrip("/") if path is None else str(path.absolute())
