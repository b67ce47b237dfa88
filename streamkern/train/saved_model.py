"""Load trained models from run directories, and write models as finished runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Backend
from streamkern.backend.devices import get_backend
from streamkern.basics.errors import RunError
from streamkern.basics.warning import warn
from streamkern.ingest.columns import RecordedArrays
from streamkern.predict.calibration import Calibration, no_calibration_text
from streamkern.rundir.checkpoint_format import SavedGroup, checkpoint_errors
from streamkern.rundir.run_directory import RunDirectory
from streamkern.solver.posterior import Posterior
from streamkern.train.differences import library_versions
from streamkern.train.loop.guard import LossCurve
from streamkern.train.loop.schedule import evaluations_in, figures_as_json, figures_from_json
from streamkern.train.loop.step_loop import ArraysAndMeta, Result
from streamkern.train.model.kernel_model import KernelModel
from streamkern.train.model.wide_sum import may_be_wide
from streamkern.train.resolve.early_stopping import scores_as_json, scores_from_json
from streamkern.train.restart.run_snapshot import RunSnapshot, column_names
from streamkern.train.restart.scaling import save_scaling
from streamkern.train.setup.assemble import operator, recorded_accelerator

# -- loading ---------------------------------------------------------------------------------------


def load_model(
    run_dir: str | os.PathLike[str],
    *,
    device: str = "auto",
    threads: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> KernelModel:
    """Return the model of the newest intact checkpoint of a run, which may be running.

    Warns if a newer checkpoint is damaged. The caller closes `model.backend`.

    Raises the errors of `RunSnapshot.open`.
    """
    run = RunSnapshot.open(run_dir, storage_options)
    run.warn_of_damage()
    with checkpoint_errors(run.location):
        backend = get_backend(device, threads, recorded_accelerator(run.setup.meta))
        try:
            model = model_from_run(run, backend)
            return replace(model, arrays=RecordedArrays.from_run(run.setup.run, model.file_form))
        except BaseException:
            backend.close()
            raise


def load_result(
    run_dir: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> tuple[RunSnapshot, Result]:
    """Return the newest intact checkpoint of a run, and the result that `train` would return there.

    The run may be running. The caller closes `result.model.backend`, which uses one CPU thread.
    Warns if a newer checkpoint, or the log, is damaged; `Result.skipped` records it as well.

    Raises
    ------
    RunError, CheckpointError, StorageError
        There is no run, or it has no checkpoint, or its files cannot be verified.
    """
    run = RunSnapshot.open(run_dir, storage_options)
    record = run.record
    records, damage = RunDirectory(
        run_dir, writable=False, storage_options=storage_options
    ).read_log()
    run.warn_of_damage()
    if damage is not None:
        warn(damage)
    with checkpoint_errors(run.location):
        result = _result(run, records)
        result.model.arrays = RecordedArrays.from_run(record, run.setup.meta.get("file_form"))
    if damage is not None:
        result.skipped += (damage,)
    return run, result


def _result(run: RunSnapshot, records: list[dict[str, Any]]) -> Result:
    """Return the result of a run. records : records of its log"""
    meta, saved = run.setup.meta, run.loaded_checkpoint.meta
    position = saved["position"]
    end_reasons = [record.get("why") for record in records if record.get("event") == "finished"]
    backend = get_backend("cpu", 1)
    try:
        return Result(
            model_from_run(run, backend),
            run.setup.arrays["Z"],
            run.order,
            meta,
            position["samples"],
            metrics=figures_from_json(saved["metrics"] or {}),
            history=evaluations_in(records),
            ended=end_reasons[-1] if end_reasons else None,
            skipped=run.damaged_checkpoints,
            ridge=saved["state"].get("ridge", 0.0) or meta["setup"].get("ridge", 0.0),
            ridges=run.setup.arrays.get("ridges", run.loaded_checkpoint.arrays.get("ridges")),
            epochs=position["epoch"],
            losses=LossCurve(saved.get("losses", ())).losses(position["epoch"]),
            validation_scores=scores_from_json(saved.get("validation", ())),
        )
    except BaseException:
        backend.close()
        raise


def model_from_run(run: RunSnapshot, backend: Backend) -> KernelModel:
    """Return the model of a run whose centers and weights are loaded."""
    op = operator(backend, run.setup.arrays, run.setup.meta)
    with backend.active():
        Z = op.points(backend.asarray(run.setup.arrays["Z"]), right=True)
    arrays = run.loaded_checkpoint.arrays
    settings = {} if run.setup.run is None else run.record["identity"]["settings"]
    return KernelModel(
        op, Z, backend.asarray(run.weights), run.classes, run.row_shape, run.fixed_transforms,
        run.targets, damaged_checkpoints=run.damaged_checkpoints, **column_names(run.setup.meta),
        origin={"run": run.location, "step": run.loaded_checkpoint.step},
        calibration=Calibration.from_arrays(arrays), posterior=Posterior.from_arrays(arrays),
        lacking=no_calibration_text(run.setup.meta), loss=run.loss,
        centers=run.setup.arrays["Z"] if may_be_wide(settings) else None,
    )  # fmt: skip


def model_digest(run: RunSnapshot) -> str:
    """Return `KernelModel.digest` of a run whose weights are loaded. The centers are not needed."""
    no_centers = np.empty((0, *run.centers.shape[1:]), run.centers.dtype)
    setup = replace(run.setup, arrays=run.setup.arrays | {"Z": no_centers})
    backend = get_backend("cpu", 1)
    try:
        return model_from_run(replace(run, setup=setup), backend).digest()
    finally:
        backend.close()


# -- saving ----------------------------------------------------------------------------------------


def model_state(
    model: KernelModel,
    Z: npt.NDArray[Any],
    order: npt.NDArray[np.int64],
    meta: Mapping[str, Any],
    *,
    epochs: int,
    samples: int,
    ridge: float,
    ridges: Sequence[float] | None = None,
) -> tuple[ArraysAndMeta, ArraysAndMeta]:
    """Return the setup and the state of a model, for `save_model`, without a solver's state.

    Z : (p, d) centers of the model, in storage order
    order : (p,); row i of Z was row order[i] of the centers as selected
    meta : metadata of the setup
    epochs, samples, ridge, ridges : as in `Result`
    """
    assert model.op.origin is not None
    scale_arrays, scaling = save_scaling(model.fixed_transforms)
    arrays = {
        "Z": Z, "order": order, "shift": model.op.origin,
        "sample_rows": np.empty(0, np.int64), **model.targets.arrays(), **scale_arrays,
        **model.op.kernel.arrays(),
    }  # fmt: skip
    weights = {"alpha": model.backend.to_host(model.weights)}
    weights |= {} if ridges is None else {"ridges": np.array(ridges)}
    for model_part in (model.calibration, model.posterior):
        weights |= {} if model_part is None else model_part.arrays()
    position = {"epoch": epochs, "batch": 0, "step": 0, "samples": samples, "done": True}
    state = {"position": position, "state": {"ridge": ridge}, "evaluated": "alpha"}
    return (arrays, dict(meta) | {"scaling": scaling}), (weights, state | {"model_only": True})


def save_model(
    location: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None,
    setup: ArraysAndMeta,
    state: ArraysAndMeta,
    *,
    settings: Mapping[str, Any],
    metrics: Mapping[str, float],
    history: Sequence[Mapping[str, Any]],
    losses: Sequence[float],
    ended: str | None,
    validation_scores: Sequence[float],
) -> None:
    """Write a model to a directory that is new, empty, or holds all or a part of the same model.

    setup, state : arrays and JSON values of the setup, see `Assembled`, and of the state, see
        `StepLoop.snapshot`
    settings : settings of the run
    metrics, history, losses, ended, validation_scores : as in `Result`

    Raises
    ------
    ConfigError
        The model has a user-defined function or kernel, which could not be loaded.
    RunError, StorageError
        The directory holds something else, or cannot be written.
    """
    directory = RunDirectory(location, keep=1, storage_options=storage_options)
    run = RunSnapshot(
        directory.location, SavedGroup(0, *setup), SavedGroup(0, *state), setup[0]["Z"]
    )
    identity = {"settings": dict(settings), "data": {}, "saved": {"model": model_digest(run)}}
    record = {
        "identity": identity, "sizes": setup[1]["sizes"], "versions": library_versions(),
    }  # fmt: skip
    with directory:
        existing_record = directory.read_record() or directory.read_config()
        if existing_record is not None and existing_record != record:
            raise RunError(
                f"{directory.location} holds another model or run already",
                "give a new or empty directory",
            )
        if directory.steps():  # an earlier call has written everything
            return
        # The log of such a run, then its setup, and last its only checkpoint.
        directory.write_config(record)
        arrays, meta = state
        position = {name: meta["position"][name] for name in ("step", "epoch", "samples")}
        with directory.open_log() as log:
            for entry in history:
                log.write(**{"epoch": 0, **entry, "event": "evaluation"})
            for epoch, loss in enumerate(losses, 1):
                if np.isfinite(loss):
                    samples = round(epoch / len(losses) * position["samples"])
                    epoch_end = {"epoch": epoch, "samples": samples}
                    log.write(**position | epoch_end, event="train", train_mse=loss)
            if ended is not None:
                log.write(**position, event="finished", why=ended)
            directory.save_setup(*setup)
            figures: dict[str, Any] = {
                "losses": LossCurve([(loss, 0.0) for loss in losses]).entries(), "order": {},
                "metrics": figures_as_json(metrics),
            }  # fmt: skip
            if validation_scores:
                figures["validation"] = scores_as_json(validation_scores)
            directory.save(position["step"], arrays, meta | figures)
