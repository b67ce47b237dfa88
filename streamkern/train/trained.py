"""A run loaded from its directory, as `train` returned it, or would return it at this
checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamkern.backend.devices import get_backend
from streamkern.basics.errors import RunError
from streamkern.basics.warning import warn
from streamkern.filesystem.ownership import no_run
from streamkern.ingest.columns import RecordedArrays
from streamkern.rundir.checkpoint_format import Saved, checkpoint_errors
from streamkern.rundir.run_directory import RunDirectory
from streamkern.train.device_loader import load_trained
from streamkern.train.early_stopping import scores_in
from streamkern.train.evaluations import evaluations_in
from streamkern.train.guard import LossCurve
from streamkern.train.model import model_of
from streamkern.train.run_identity import recorded_run
from streamkern.train.step_loop import Result


@dataclass(frozen=True)
class Trained:
    """A loaded run.

    result : as of `train`; the caller closes `result.model.backend`, which is one thread of the CPU
    settings : tables as in a run file, without the settings that a resumed run may change
    step : step of the checkpoint
    """

    place: str
    result: Result
    settings: dict[str, dict[str, Any]]
    step: int


def load_trained_run(
    run_dir: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> Trained:
    """Return the newest good checkpoint of a run. It may be read while the run is being written.

    Warns if a newer checkpoint, or the log, is damaged; `Result.skipped` records it as well.

    Raises
    ------
    RunError, CheckpointError, StorageError
        There is no run, or no trained one, or it cannot be verified.
    """
    directory = RunDirectory(run_dir, writable=False, storage_options=storage_options)
    with directory:
        recorded = recorded_run(directory)
        setup, saved = load_trained(directory)
        if recorded is None or setup is None or saved is None:
            raise RunError(no_run(run_dir, directory.place))
        records, damage = directory.read_log()
    for text in (*saved.skipped, *(() if damage is None else (damage,))):
        warn(text)
    with checkpoint_errors(directory.place):
        settings, position = recorded["identity"]["settings"], saved.meta["position"]
        result = _result(directory.place, setup, saved, records)
        result.model.arrays = RecordedArrays.from_run(recorded, setup.meta.get("file_form"))
        if damage is not None:
            result.skipped += (damage,)
        return Trained(directory.place, result, settings, position["step"])


def _result(place: str, setup: Saved, saved: Saved, records: list[dict[str, Any]]) -> Result:
    meta, state, position = setup.meta, saved.meta["state"], saved.meta["position"]
    why = [record.get("why") for record in records if record.get("event") == "finished"]
    backend = get_backend("cpu", 1)
    try:
        return Result(
            model_of(place, backend, setup, saved),
            setup.arrays["Z"],
            np.asarray(setup.arrays["order"]),
            meta,
            position["samples"],
            metrics={
                k: np.nan if v is None else v for k, v in (saved.meta["metrics"] or {}).items()
            },
            history=evaluations_in(records),
            ended=why[-1] if why else None,
            skipped=saved.skipped,
            ridge=meta["setup"].get("ridge", state.get("ridge", 0.0)),
            ridges=setup.arrays.get("ridges", saved.arrays.get("ridges")),
            epochs=position["epoch"],
            losses=LossCurve(saved.meta.get("losses", ())).losses(position["epoch"]),
            validation_scores=scores_in(saved.meta.get("validation", ())),
        )
    except BaseException:
        backend.close()
        raise
