"""Prepare and train a run as one of its ranks, on a worker."""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from streamkern.backend.ranks import Communicator
from streamkern.basics.errors import RunLockedError, RunLostError, StreamkernError
from streamkern.basics.progress import ProgressSetting, Relay
from streamkern.basics.stop import StopRequest, handle_stop
from streamkern.basics.user_class import import_user_modules
from streamkern.config.run_config import RunConfig
from streamkern.rundir.run_directory import RunDirectory
from streamkern.train.loop.sinks import make_sinks
from streamkern.train.placement.task import RankSpec, SendMessage
from streamkern.train.resolve.run_inputs import NO_INPUTS, RunInputs
from streamkern.train.start_run import acquire_run, run_directory, start_trainer

_LOCK_RETRY_S = 0.5
"""Seconds between two attempts to lock the run directory."""


def prepare_rank(
    ranks: Communicator, spec: RankSpec, settings: dict[str, Any], stop: StopRequest
) -> None:
    """Prepare the run as a single rank, see `prepare_run`."""
    import_user_modules(settings["modules"])
    prepare_run(
        settings["config"], stop, pickle.loads(settings["inputs"]),
        progress=_progress_setting(settings, spec.send_message),
    )  # fmt: skip


def has_setup(directory: RunDirectory) -> bool:
    """Return whether the directory has a setup with valid metadata. Arrays are not read."""
    return directory.load_setup(lambda *of: None) is not None


def work_as_rank(
    ranks: Communicator, spec: RankSpec, settings: dict[str, Any], stop: StopRequest
) -> dict[str, Any]:
    """Train as one of the ranks, see `train_rank`."""
    import_user_modules(settings["modules"])
    config = settings["config"]
    if config.run.threads == "auto":
        config = config.with_overrides({"run.threads": spec.threads})
    if settings["devices"]:
        config = config.with_overrides({"run.device": settings["devices"][spec.rank]})
    addresses: dict[str, Any] = {"workers": list(spec.addresses)}
    if settings["dashboard"] is not None:
        addresses["dashboard"] = settings["dashboard"]
    give_up = time.monotonic() + spec.earlier_ranks_s
    while True:
        try:
            inputs = replace(pickle.loads(settings["inputs"]), rank_addresses=addresses)
            return train_rank(
                config, ranks, stop, inputs,
                progress=_progress_setting(settings, spec.send_message),
                send_message=spec.send_message,
            )  # fmt: skip
        except RunLockedError as error:  # the rank 0 before this one has not ended yet
            if isinstance(error, RunLostError) or time.monotonic() > give_up:
                raise
        time.sleep(_LOCK_RETRY_S)


def _progress_setting(settings: dict[str, Any], send_message: SendMessage) -> ProgressSetting:
    return Relay(lambda text: send_message({"line": text})) if settings["progress"] else False


def read_last_step(settings: dict[str, Any]) -> int:
    """Return the step of the newest checkpoint; -1 if there is none. settings : see `train_over`"""
    return max(run_directory(settings["config"], writable=False).steps(), default=-1)


def prepare_run(
    config: RunConfig,
    stop: StopRequest | None = None,
    inputs: RunInputs = NO_INPUTS,
    *,
    progress: ProgressSetting = False,
) -> None:
    """Record a run on one rank before all ranks start, if it has no setup yet.

    All ranks then have the recorded sizes. If the ranks cannot compute the setup together, it is
    computed here.
    """
    with contextlib.suppress(StreamkernError):  # the steps below repair or report the damage
        if has_setup(run_directory(config, writable=False)):
            return
    directory = run_directory(config)
    with handle_stop(stop, saves_work=True, position=lambda: "in the setup") as request:
        with acquire_run(config, inputs, directory, request) as (run, *_):
            computes_together = run.method.setup_together(run.problem)
            run.backend.close()
        if not computes_together:
            with start_trainer(config, inputs, run_directory(config), request, progress) as trainer:
                trainer.checkpoints.wait()
                trainer.run.backend.close()


def train_rank(
    config: RunConfig,
    ranks: Communicator,
    stop: StopRequest,
    inputs: RunInputs = NO_INPUTS,
    *,
    progress: ProgressSetting = False,
    send_message: SendMessage = lambda message: None,
) -> dict[str, Any]:
    """Train a run to its end as one rank. Collective.

    Returns the figures of the run, and the times of this rank: "metrics", "history" and "samples"
    as in `Result`, and "timing" with the seconds "waited_s" spent waiting for other ranks.

    send_message : called with each evaluation on rank 0

    Raises RankLostError if another rank is lost, and the errors of `train`.
    """
    is_rank0 = ranks.rank == 0
    with (
        handle_stop(stop, saves_work=True, position=lambda: "before the next step") as request,
        start_trainer(
            config, replace(inputs, ranks=ranks), run_directory(config, writable=is_rank0), request,
            progress if is_rank0 else False, lambda record: send_message({"evaluation": record}),
            callbacks=make_sinks(config.run) if is_rank0 else (),
        ) as trainer,
    ):  # fmt: skip
        waited_in_setup_s = trainer.ranks.waited_s
        result = trainer.run_to_end()
        waited_timing = {"waited_s": trainer.ranks.waited_s - waited_in_setup_s}
        timing: Mapping[str, float] = result.timing | waited_timing
        trainer.run.backend.close()
    return {
        "metrics": result.metrics, "timing": dict(timing), "samples": result.samples,
        "history": result.history,
    }  # fmt: skip
