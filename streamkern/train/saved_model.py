"""A model saved as a finished run directory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.devices import get_backend
from streamkern.basics.errors import RunError
from streamkern.rundir.checkpoint_format import Saved
from streamkern.rundir.run_directory import RunDirectory
from streamkern.train.early_stopping import kept_scores
from streamkern.train.guard import LossCurve
from streamkern.train.model import KernelModel, model_of
from streamkern.train.run_identity import library_versions
from streamkern.train.scaling import save_scaling
from streamkern.train.step_loop import Kept


@dataclass(frozen=True)
class WholeModel:
    """All parts of a model.

    settings : settings of the run
    setup, state : arrays and JSON values of a run: see `start` and `StepLoop.kept`
    metrics, validation_scores : as in `Result`
    history : evaluations
    losses : mean training loss of each epoch
    ended : why training ended before its last epoch, or None
    """

    settings: Mapping[str, Any]
    setup: Kept
    state: Kept
    metrics: Mapping[str, float] = field(default_factory=dict)
    history: Sequence[Mapping[str, Any]] = ()
    losses: Sequence[float] = ()
    ended: str | None = None
    validation_scores: Sequence[float] = ()


def model_only(
    model: KernelModel,
    Z: npt.NDArray[Any],
    order: npt.NDArray[np.int64],
    meta: Mapping[str, Any],
    *,
    epochs: int,
    samples: int,
    ridge: float,
    ridges: Sequence[float] | None = None,
) -> tuple[Kept, Kept]:
    """Return (setup, state) of a model without the state of its solver.

    Z : (p, d) centers of the model
    order : (p,) center i was center order[i] of the chosen centers
    meta : metadata of the setup
    """
    assert model.op.origin is not None
    scale_arrays, scaling = save_scaling(model.fixed)
    arrays = {
        "Z": Z, "order": order, "shift": model.op.origin,
        "sample_rows": np.empty(0, np.int64), **model.targets.arrays(), **scale_arrays,
    }  # fmt: skip
    if model.op.kernel.metric is not None:
        arrays["metric"] = model.op.kernel.metric
    told: dict[str, npt.NDArray[Any]] = {} if ridges is None else {"ridges": np.array(ridges)}
    for known in (model.calibration, model.posterior):
        told |= {} if known is None else known.arrays()
    position = {"epoch": epochs, "batch": 0, "step": 0, "samples": samples, "done": True}
    state = {"position": position, "state": {"ridge": ridge}, "evaluated": "alpha"}
    return (arrays, dict(meta) | {"scaling": scaling}), (
        {"alpha": model.backend.to_host(model.weights)} | told,
        state | {"model_only": True},
    )


def save_model(
    whole: WholeModel,
    place: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Write the model to a directory that is new, empty, or holds all or a part of this same model.

    Raises
    ------
    ConfigError
        The model could not be loaded again: it has a function or a kernel of the user.
    RunError, StorageError
        The directory holds something else, or cannot be written.
    """
    directory = RunDirectory(place, keep=1, storage_options=storage_options)
    record = _record(whole, directory.place)
    with directory:
        there = directory.recorded() or directory.read_config()
        if there is not None and there != record:
            raise RunError(
                f"{directory.place} holds another model or run already; give a new or empty "
                "directory"
            )
        if directory.steps():
            return
        directory.write_config(record)
        with directory.open_log() as log:
            for entry in whole.history:
                log.write(**{"epoch": 0, **entry, "event": "evaluation"})
            at = {k: whole.state[1]["position"][k] for k in ("step", "epoch", "samples")}
            for epoch, loss in enumerate(whole.losses, 1):
                if np.isfinite(loss):
                    share = epoch / len(whole.losses)
                    reached = {"epoch": epoch, "samples": round(share * at["samples"])}
                    log.write(**at | reached, event="train", train_mse=loss)
            if whole.ended is not None:
                log.write(**at, event="finished", why=whole.ended)
            directory.save_setup(*whole.setup)
            arrays, meta = whole.state
            metrics = {k: v if np.isfinite(v) else None for k, v in whole.metrics.items()}
            curve = LossCurve([(loss, 0.0) for loss in whole.losses])
            kept: dict[str, Any] = {"losses": curve.entries(), "order": {}, "metrics": metrics}
            if whole.validation_scores:
                kept["validation"] = kept_scores(whole.validation_scores)
            directory.save(meta["position"]["step"], arrays, meta | kept)


def _record(whole: WholeModel, place: str) -> dict[str, Any]:
    """Return the record of the directory, after checking that the model can be loaded again."""
    backend = get_backend("cpu", 1)
    try:
        setup, state = (Saved(0, *part) for part in (whole.setup, whole.state))
        digest = model_of(place, backend, setup, state).digest()
    finally:
        backend.close()
    identity = {"settings": dict(whole.settings), "data": {}, "saved": {"model": digest}}
    return {"identity": identity, "sizes": whole.setup[1]["sizes"], "versions": library_versions()}
