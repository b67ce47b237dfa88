"""Start from another run: continue it with its model, or take its weights as the initial ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from streamkern.backend.base import tiles
from streamkern.backend.rank_grid import CenterPartition
from streamkern.backend.ranks import Communicator
from streamkern.basics.array_types import HostArray
from streamkern.basics.errors import ConfigError, ResumeMismatchError, RunError
from streamkern.basics.message import mention
from streamkern.basics.text import redact
from streamkern.config.run_config import NEUTRAL_VALUES, RunConfig
from streamkern.config.solver import solver_options
from streamkern.filesystem.urls import local_path
from streamkern.kernels.builtin import class_reference, get_kernel
from streamkern.kernels.own import checked_kernel_record
from streamkern.losses.own import loss_of_run
from streamkern.planning.memory import SAVED_CHUNK_BYTES
from streamkern.rundir.checkpoint_format import checkpoint_errors
from streamkern.rundir.run_directory import RunDirectory
from streamkern.train.loop.rank_coordinator import RankCoordinator
from streamkern.train.loop.step_loop import StepLoop
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.resolve.training_data import storage_options_for
from streamkern.train.restart.parent_run import ParentRun
from streamkern.train.restart.run_snapshot import RunSnapshot
from streamkern.train.restart.stored_centers import StoredCenters
from streamkern.train.saved_model import model_digest

ParentId = tuple[dict[str, Any], str]
"""`ParentRun.ancestry` of a parent run, and the SHA-256 of its centers."""


def complete_from_parent(
    config: RunConfig, inputs: RunInputs, directory: RunDirectory | None,
    recorded: Mapping[str, Any] | None, parent_id: ParentId | None,
) -> tuple[RunConfig, RunInputs]:  # fmt: skip
    """Return the settings and inputs of a run, completed from its parent run if it continues one.

    Once a run has started, its own directory holds all that it needs, and the parent run may have
    been deleted.

    directory : directory of the new run, or None
    recorded : result of `recorded_run` for this directory
    parent_id : identity of the parent run that rank 0 has found; None on rank 0

    Raises
    ------
    ConfigError
        The settings contradict the parent run, whose kernel, centers, metric and scaling are kept.
    ResumeMismatchError
        The directory holds a run that has another parent run, or none.
    """
    ancestry = None if recorded is None else recorded["identity"].get("continues")
    parent_location = inputs.continues
    if parent_location is None:
        if ancestry is not None and directory is not None:
            raise ResumeMismatchError(
                f"{directory.location} holds a run that continues {ancestry['run']}",
                f"repeat {mention('continues', ancestry['run'])}, or give another run_dir",
            )
        return config, inputs
    if directory is not None and _absolute(directory.location) == _absolute(parent_location):
        raise ConfigError(
            f"{mention('run_dir', directory.location)} is the run that is continued, which must "
            "not change",
            "give the new run another run_dir, such as "
            f"{mention('run_dir', directory.location.rstrip('/') + '-2')}",
        )
    config = _with_warm_start(config, parent_location, inputs)
    if recorded is None:
        return _read_parent(parent_location, config, inputs, parent_id)
    assert directory is not None
    if ancestry is None or ancestry["run"] != _absolute(parent_location):
        other_parent = "no other run" if ancestry is None else ancestry["run"]
        raise ResumeMismatchError(
            f"{directory.location} holds a run that continues {other_parent}, not "
            f"{_absolute(parent_location)}",
            "give another run_dir",
        )
    # `_find` opens the directory again, because a load changes the state of `directory`.
    own_run = _find(config, config.run.run_dir or "")
    if own_run is None:
        raise RunError(
            f"the setup in {directory.location} is missing, but a run that continues another one "
            "cannot be resumed without its setup",
            "restore it from a copy, or continue in another run_dir",
        )
    with checkpoint_errors(own_run.check().location):
        # There is no digest for Fourier features, which are read from the setup.
        digest = recorded["identity"].get("centers", {"sha256": ""})
        centers = replace(own_run.stored_centers, recorded_sha256=digest["sha256"])
        parent = replace(own_run, ancestry=ancestry, centers=centers)
    return _with_model_of(recorded["identity"]["settings"], parent, parent_id, config, inputs)


def _find(config: RunConfig, run_dir: str, *, load_weights: bool = False) -> ParentRun | None:
    options = storage_options_for(config, run_dir)
    return ParentRun.find(run_dir, options, load_centers=False, load_weights=load_weights)


def _with_warm_start(config: RunConfig, parent_path: str, inputs: RunInputs) -> RunConfig:
    """Return the settings with the run in `parent_path` as solver.warm_start."""
    for name, array in (("centers", inputs.centers), ("metric", inputs.metric)):
        if array is not None:
            raise ConfigError(
                f"{name} cannot be given, because the run that is continued determines them",
                f"leave {mention(f'{name}=')} out",
            )
    name, warm_start = config.solver.name, config.solver.warm_start
    if "warm_start" not in solver_options(name):
        raise ConfigError(
            f"{mention('solver.name', name)} cannot start from existing weights, and so cannot "
            "continue a run",
            "use another solver, such as 'block'",
        )
    if warm_start is not None and _absolute(warm_start) != _absolute(parent_path):
        raise ConfigError(
            f"{mention(f'solver.warm_start={redact(warm_start)}')} differs from the run that is "
            "continued, which provides the weights",
            "leave it out",
        )
    path = local_path(parent_path)
    return config.with_overrides(
        {"solver.warm_start": parent_path if path is None else str(path.absolute())}
    )


def _read_parent(
    parent_path: str, config: RunConfig, inputs: RunInputs, parent_id: ParentId | None
) -> tuple[RunConfig, RunInputs]:
    """Return settings and inputs from the parent run. Its weights are loaded later, by the
    setup."""
    parent = _find(config, parent_path, load_weights=parent_id is None)
    if parent is None or parent.setup.run is None:
        raise ConfigError(
            f"{redact(parent_path)} has no checkpoint to continue from yet",
            "train that run to its first checkpoint",
        )
    settings = parent.record["identity"]["settings"]
    with checkpoint_errors(parent.check().location):
        ancestry = _ancestry(_absolute(parent_path), parent) if parent_id is None else parent_id[0]
        parent = replace(parent, ancestry=ancestry, checkpoint=None)
        # The caller of the parent run gave these facts about the targets, which still hold.
        inherited = ("flat", "labels", "weight_column")
        facts = inputs.facts or {k: parent.facts[k] for k in inherited if k in parent.facts}
    return _with_model_of(settings, parent, parent_id, config, replace(inputs, facts=facts))


def _ancestry(parent_path: str, parent: ParentRun) -> dict[str, Any]:
    """Return the ancestry of a run that continues `parent`, as JSON values.

    It describes the parent run, and its ancestors in the list "before", the nearest first.
    """
    saved, grandparent_entry = parent.loaded_checkpoint, parent.record["identity"].get("continues")
    position = saved.meta["position"]
    epochs = (
        position["epoch"]
        + (position["batch"] > 0)
        + (0 if grandparent_entry is None else grandparent_entry["epochs"])
    )
    grandparent = {k: v for k, v in (grandparent_entry or {}).items() if k != "before"}
    return {
        "run": parent_path, "step": saved.step, "samples": position["samples"], "epochs": epochs,
        "model": model_digest(parent),
        "before": [] if grandparent_entry is None else [grandparent, *grandparent_entry["before"]],
    }  # fmt: skip


def _with_model_of(
    settings: Mapping[str, Mapping[str, Any]], parent: ParentRun, parent_id: ParentId | None,
    config: RunConfig, inputs: RunInputs,
) -> tuple[RunConfig, RunInputs]:  # fmt: skip
    """Return settings and inputs with the model of the parent run.

    Settings of [model] at their defaults count as not given. Others must be equal to the settings
    of the parent run, except for the loss, if the parent run minimised squares.

    settings : recorded settings of the parent run
    parent_id : see `complete_from_parent`
    """
    requested, defaults = config.identity()["model"], RunConfig().identity()["model"]
    # Records leave out settings that have their neutral values.
    neutral = {k.partition(".")[2]: v for k, v in NEUTRAL_VALUES.items() if k.startswith("model.")}
    recorded = settings["model"]
    recorded_or_default = {**defaults, **neutral, **recorded}
    kernel = checked_kernel_record(recorded.get("kernel"))
    kernel_object = None
    if isinstance(kernel, Mapping) and "kind" not in kernel:  # description of a `Kernel` object
        kernel_object = get_kernel(kernel, "auto")
        # The request may name the same class.
        if requested["kernel"] == class_reference(type(kernel_object)):
            requested["kernel"] = recorded["kernel"]
    changed = [k for k, v in requested.items() if v not in (defaults.get(k), recorded.get(k))]
    if "loss" not in recorded:
        changed = [k for k in changed if k not in ("loss", "quantile")]
    if changed:
        changes = "; ".join(
            f"{mention(f'model.{k}')}: was {recorded_or_default.get(k)!r}, now {requested[k]!r}"
            for k in changed
        )
        raise ConfigError(
            "a run that continues another one keeps the model of that run, "
            f"{parent.ancestry['run']}: {changes}",
            "leave these settings out, or start a new run",
        )
    overrides = {f"model.{k}": v for k, v in {**defaults, **recorded}.items()}
    if kernel_object is not None:
        overrides["model.kernel"] = kernel_object
    if "loss" in recorded:
        overrides["model.loss"] = loss_of_run(recorded["loss"])
    if parent_id is not None:
        parent = replace(parent, centers=replace(parent.stored_centers, sha256=parent_id[1]))
    centers = None if recorded.get("features") == "fourier" else parent.stored_centers
    if centers is not None and overrides["model.n_centers"] != "auto":
        # If the parent had fewer rows than requested centers, it has as many centers as rows.
        overrides["model.n_centers"] = centers.shape[0]
    if config.run.precision == "auto" and parent.stored_centers.dtype == np.float64:
        overrides["run.precision"] = "float64"
    metric = None if "metric" in recorded else parent.metric
    inputs = replace(inputs, continued_run=parent, centers=centers, metric=metric)
    return config.with_overrides(overrides), inputs


def _absolute(path_or_url: str) -> str:
    """Return a path or URL in the form in which it is recorded and compared."""
    path = local_path(path_or_url)
    return redact(path_or_url).rstrip("/") if path is None else str(path.absolute())


def load_warm_start(config: RunConfig) -> ParentRun | None:
    """Load the weights of the newest good checkpoint of solver.warm_start; None if it is not set.

    Warns if a newer checkpoint is damaged. Raises ConfigError if there is no checkpoint.
    """
    parent_path = config.solver.warm_start
    if parent_path is None:
        return None
    run = ParentRun.find(parent_path, storage_options_for(config, parent_path), load_centers=False)
    if run is None:
        raise ConfigError(
            f"{mention(f'solver.warm_start={redact(parent_path)}')} has no checkpoint yet",
            "train that run to its first checkpoint, or leave warm_start out",
        )
    run.warn_of_damage()
    with checkpoint_errors(run.check().location):
        alpha = run.weights[np.argsort(run.order)]
        samples = run.loaded_checkpoint.meta["position"]["samples"]
        without_arrays = replace(run.loaded_checkpoint, arrays={})
        return replace(run, alpha=alpha, samples=samples, checkpoint=without_arrays)


def given_weights(run: ResolvedRun) -> ParentRun | None:
    """Return the weights that the run starts from; None if it starts from zero.

    Raises ConfigError if they do not fit the run. Their centers are compared later, by
    `initial_weights`.
    """
    warm = run.inputs.warm_start or load_warm_start(run.config)
    if warm is not None:
        warm.check_fits(run.config, run.data.source, run.metric)
        parent = run.inputs.continued_run
        if parent is not None and (step := warm.loaded_checkpoint.step) != parent.ancestry["step"]:
            raise ConfigError(
                f"{warm.location} has been trained on, from step {parent.ancestry['step']} to "
                f"{step}, since this run began to continue it",
                "continue that run in another run_dir",
            )
    return warm


def initial_weights(
    warm: ParentRun | None, step_loop: StepLoop, coordinator: RankCoordinator, *, saved: bool
) -> HostArray | None:
    """Return the initial weights (q, c) of this rank's centers; None to start from zero.

    Collective: all ranks call it for a run without a checkpoint.

    warm : result of `given_weights` on rank 0; None on other ranks
    saved : whether the setup is in the run directory

    Raises ConfigError if the weights belong to other centers.
    """
    assembled, share, ranks, alpha = step_loop.assembled, step_loop.share, step_loop.ranks, None
    config = step_loop.run.config
    if warm is not None:
        Z: HostArray | StoredCenters = assembled.arrays["Z"]
        run_dir = config.run.run_dir
        if saved and run_dir is not None:
            options = storage_options_for(config, run_dir)
            own_run = RunSnapshot.find(run_dir, options, load_centers=False, load_weights=False)
            if own_run is not None and (
                warm.has_centers(own_run.stored_centers) or not share.is_replicated
            ):
                Z = own_run.stored_centers
        alpha = warm.weights_for(Z, assembled.meta)
        if (slope := assembled.meta["setup"].get("warm_slope")) is not None:
            alpha *= slope
    if ranks.is_single or config.solver.warm_start is None:
        return alpha
    coordinator.check_step()
    return scatter_weights(
        alpha, (share.n, step_loop.run.problem.c), assembled.op.dtype, share, ranks
    )


def scatter_weights(
    alpha: HostArray | None, shape: tuple[int, int], dtype: np.dtype[Any], share: CenterPartition,
    ranks: Communicator,
) -> HostArray:  # fmt: skip
    """Return this rank's rows (q, c) of `alpha`, which rank 0 broadcasts in chunks. Collective.

    alpha : (p, c) on rank 0; None on other ranks
    shape : (q, c)
    share : centers of this rank
    """
    own_weights = np.empty(shape, dtype)
    row_bytes = max(1, own_weights[:1].nbytes)
    for rows in tiles(share.p, max(1, SAVED_CHUNK_BYTES // row_bytes)):
        chunk = np.empty((rows.stop - rows.start, shape[1]), dtype)
        if alpha is not None:
            chunk[...] = alpha[rows]
        chunk = ranks.broadcast(chunk)
        first, stop = np.searchsorted(share.ids, (rows.start, rows.stop)).tolist()
        own_weights[first:stop] = chunk[share.ids[first:stop] - rows.start]
    return own_weights
