"""A run over several ranks: the work of each rank, and its placement on workers.

One rank records the run in the run directory; then all of them compute the setup, or load it as a
resumed run does, from the same files. Rank 0 chooses, writes, evaluates and reports; the others
have the same weights, and make the same decisions.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from streamkern.backend.rank_grid import check_columns
from streamkern.backend.ranks import Communicator
from streamkern.basics.errors import (
    ConfigError,
    ResumeMismatchError,
    RunLockedError,
    RunLostError,
    StreamkernError,
)
from streamkern.basics.optional import import_optional
from streamkern.basics.progress import ProgressSetting, Relay
from streamkern.basics.stop import StopRequest, resumable
from streamkern.config.run_config import RunConfig
from streamkern.filesystem.urls import local_path
from streamkern.rundir.run_directory import RunDirectory
from streamkern.solver.methods import find
from streamkern.stream.cluster import check_versions, connect, dashboard_link
from streamkern.train.gpu_ranks import devices_of
from streamkern.train.placement.launcher import place
from streamkern.train.placement.local import local_cluster
from streamkern.train.placement.task import RankSpec
from streamkern.train.resolve import NO_INPUTS, RunInputs
from streamkern.train.run_identity import check_same_model, check_same_run, run_record
from streamkern.train.run_snapshot import recorded_run
from streamkern.train.sinks import sinks_of
from streamkern.train.start_run import acquired_run, opened_run, run_directory, started_trainer
from streamkern.train.training_data import open_test

MAX_TASK_BYTES = 256 << 20
"""Largest size of the arrays that are given and sent to every rank, in bytes."""

_LOOK_S = 0.5

Told = Callable[[dict[str, Any]], None]


def train_over(
    config: RunConfig,
    given: RunInputs,
    request: StopRequest,
    *,
    progress: bool = False,
    continues: str | os.PathLike[str] | None = None,
    on_event: Told = lambda event: None,
) -> dict[str, Any]:
    """Train to the end with `run.ranks` ranks, and return the result of rank 0, see `train_rank`.

    Ranks run on the workers of `run.cluster`, of the client in `given`, or of a cluster on this
    machine that ends with the run.

    given : inputs that are not in the settings; sent to every rank
    progress : whether to report the text of a progress line
    on_event : called when ranks begin ("ranks"), when one is lost ("lost", with the state "kept" to
        resume from: "checkpoint", "setup", "nothing"), and with messages of rank 0 ("told"):
        {"line": text}, {"evaluation": record}; and {"warning": text}, from any rank
    """
    check_placeable(config)
    import_optional("xgboost.collective", "a run of several ranks", "ranks")
    client = given.client
    ranks, local = config.run.n_ranks, client is None and config.run.cluster is None
    devices: Sequence[str] = devices_of(config) if local else ()
    if local:
        if config.run.threads != "auto":  # the total of all ranks
            config = config.with_overrides({"run.threads": max(1, config.run.threads // ranks)})
    else:
        _check_absolute(config)
    _check_known(config, given, continues)
    settings = {
        "config": config, "given": _packed(config, given),
        "continues": None if continues is None else str(continues),
        "progress": progress, "devices": devices,
    }  # fmt: skip

    def told(event: dict[str, Any]) -> None:
        on_event(event | ({"kept": _kept(config)} if event["event"] == "lost" else {}))

    with _cluster(config, client) as workers:
        settings["dashboard"] = None if local else dashboard_link(workers)
        if not local:
            check_versions(workers)
        found: dict[str, Any] = place(
            workers, _work, settings, ranks=ranks, min_ranks=config.run.min_ranks,
            multiple=config.run.center_ranks, prepare=_prepare, reached=_reached, stop=request,
            on_event=told,
        )  # fmt: skip
    return found


def check_placeable(config: RunConfig) -> None:
    """Raise ConfigError if ranks would have no run directory, or cannot share the steps."""
    if config.run.run_dir is None:
        raise ConfigError(
            f"run.ranks={config.run.ranks} needs a run.run_dir that all ranks see, from which they "
            "begin; set it"
        )
    check_columns(config.run.n_ranks, config.run.center_ranks)
    method = find(config.solver.name, config.model.features)
    method.check_ranks(config.run.n_ranks, config.run.center_ranks)
    if config.run.min_ranks > config.run.n_ranks:
        raise ConfigError(
            f"run.min_ranks={config.run.min_ranks} must not be above run.ranks={config.run.ranks}; "
            "lower it"
        )
    if config.data.dask is not None:
        raise ConfigError(
            f"run.ranks={config.run.ranks} reads on the ranks themselves, and data.dask names a "
            "cluster to read on; leave one of them out"
        )


def _kept(config: RunConfig) -> str:
    """Return the state from which ranks resume; "checkpoint" if it cannot be read now."""
    with contextlib.suppress(StreamkernError):
        directory = run_directory(config, writable=False)
        if not directory.steps():
            return "setup" if has_setup(directory) else "nothing"
    return "checkpoint"


def _check_absolute(config: RunConfig) -> None:
    """Raise ConfigError for a relative path: workers have another working directory."""
    for url in filter(None, (config.run.run_dir, *config.data.train_urls, config.data.test)):
        path = local_path(url)
        if path is not None and not os.path.isabs(path):
            raise ConfigError(
                f"run.ranks={config.run.ranks} on a cluster: {url!r} is a path in this folder, "
                "and its workers have their own; give an absolute path that all see, or a URL"
            )


def _check_known(
    config: RunConfig, given: RunInputs, continues: str | os.PathLike[str] | None
) -> None:  # fmt: skip
    """Raise ResumeMismatchError if the directory holds another run, before a worker begins.

    Problems that this process cannot detect, such as data visible only to workers, are reported by
    the workers.
    """
    here = config.with_overrides({"run.device": "cpu", "run.accelerator": "none"})
    directory = run_directory(config, writable=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ranks issue the same warnings
        try:
            if recorded_run(directory) is not None:
                if continues is None:
                    check_same_model(directory, config, given)
                run = opened_run(here, given, directory, continues)
                run.backend.close()
                check_same_run(directory, run_record(run))
        except ResumeMismatchError:
            raise
        except StreamkernError:
            return


def ended_before(
    config: RunConfig, given: RunInputs, continues: str | os.PathLike[str] | None
) -> bool:  # fmt: skip
    """Return whether the run is complete and this process can compute the rest alone.

    The rest are the figures on the test data, computed as in a run of one rank. If this process can
    not read the data, or has too little memory for all of the weights, the ranks do it.
    """
    check_placeable(config)
    directory, one = run_directory(config, writable=False), train_alone(config)
    with warnings.catch_warnings(), contextlib.suppress(StreamkernError):
        warnings.simplefilter("ignore")  # issued again when the run is read
        saved = directory.load_latest(lambda *of: None)
        if saved is None or not saved.meta["position"]["done"]:
            return False
        run = opened_run(one, given, directory, continues)
        run.backend.close()
        open_test(one, run.data, given.test)
        return True
    return False


def train_alone(config: RunConfig) -> RunConfig:
    """Return the settings of the same run with one rank, in this process."""
    asked = {"run.ranks": 1, "run.min_ranks": 1, "run.center_ranks": 1, "run.cluster": None}
    return config.with_overrides(asked)


def _packed(config: RunConfig, given: RunInputs) -> bytes:
    """Return the inputs that are not in the settings, pickled."""
    cloudpickle = import_optional("cloudpickle", "a run of several ranks", "ranks")
    try:
        packed: bytes = cloudpickle.dumps(replace(given, client=None))
    except Exception as error:
        raise ConfigError(
            f"run.ranks={config.run.ranks}: the data or the kernel cannot travel to other "
            f"processes: {error}; make it of things that can be pickled, or name stores in the "
            "settings"
        ) from error
    if len(packed) > MAX_TASK_BYTES:
        raise ConfigError(
            f"run.ranks={config.run.ranks} would send {len(packed) >> 20} MiB of arrays to every "
            f"rank, of at most {MAX_TASK_BYTES >> 20}; write them to a store "
            "(streamkern.ingest_store) and name that"
        )
    return packed


@contextlib.contextmanager
def _cluster(config: RunConfig, client: Any) -> Iterator[Any]:
    if client is not None:
        yield client
    elif config.run.cluster is not None:
        with connect(config.run.cluster, setting="run.cluster") as made:
            yield made
    else:
        threads = None if config.run.threads == "auto" else config.run.threads
        with local_cluster(config.run.n_ranks, threads) as made:
            yield made


# ------------------------------------------------------------------- functions run on the workers


def _prepare(settings: dict[str, Any], stop: StopRequest, tell: Told) -> None:
    prepare_run(
        settings["config"], stop, pickle.loads(settings["given"]), continues=settings["continues"],
        progress=_line(settings, tell),
    )  # fmt: skip


def has_setup(directory: RunDirectory) -> bool:
    """Return whether the directory has a setup whose metadata verifies; arrays are not read."""
    return directory.load_setup(lambda *of: None) is not None


def _work(
    ranks: Communicator, spec: RankSpec, settings: dict[str, Any], stop: StopRequest
) -> dict[str, Any]:
    config = settings["config"]
    if config.run.threads == "auto":
        config = config.with_overrides({"run.threads": spec.threads})
    if settings["devices"]:
        config = config.with_overrides({"run.device": settings["devices"][spec.rank]})
    placed: dict[str, Any] = {"workers": list(spec.addresses)}
    if settings["dashboard"] is not None:
        placed["dashboard"] = settings["dashboard"]
    give_up = time.monotonic() + spec.outlived_s
    while True:
        try:
            return train_rank(
                config, ranks, stop, replace(pickle.loads(settings["given"]), placed=placed),
                continues=settings["continues"], progress=_line(settings, spec.tell),
                tell=spec.tell,
            )  # fmt: skip
        except RunLockedError as error:  # by the previous rank 0, which ends by itself
            if isinstance(error, RunLostError) or time.monotonic() > give_up:
                raise
        time.sleep(_LOOK_S)


def _line(settings: dict[str, Any], tell: Told) -> ProgressSetting:
    return Relay(lambda text: tell({"line": text})) if settings["progress"] else False


def _reached(settings: dict[str, Any]) -> int:
    """Return the step of the newest checkpoint; -1 if there is none."""
    return max(run_directory(settings["config"], writable=False).steps(), default=-1)


def prepare_run(
    config: RunConfig,
    stop: StopRequest | None = None,
    given: RunInputs = NO_INPUTS,
    *,
    continues: str | None = None,
    progress: ProgressSetting = False,
) -> None:
    """Prepare a run on one rank, before all ranks begin, if it has no setup yet.

    It records the run, so that all ranks have the same sizes, and computes the setup if the ranks
    cannot do so together.
    """
    with contextlib.suppress(StreamkernError):  # missing or damaged parts are made or reported
        if has_setup(run_directory(config, writable=False)):
            return  # each rank reads its part
    directory = run_directory(config)
    with resumable(stop, kept=True, where=lambda: "in the setup") as request:
        with acquired_run(config, given, directory, request, continues) as at:
            together = at.run.method.setup_together(at.run.problem)
            at.run.backend.close()
        if not together:
            with started_trainer(
                config, given, run_directory(config), request, progress, continues=continues
            ) as trainer:
                trainer.checkpoints.wait()
                trainer.run.backend.close()


def train_rank(
    config: RunConfig,
    ranks: Communicator,
    stop: StopRequest,
    given: RunInputs = NO_INPUTS,
    *,
    continues: str | None = None,
    progress: ProgressSetting = False,
    tell: Told = lambda said: None,
) -> dict[str, Any]:
    """Train to the end as one rank, after the setup. Return figures and the times of this rank.

    tell : called with each evaluation on rank 0

    Raises RankLostError if another rank is lost, and the errors of `train`.
    """
    first = ranks.rank == 0
    with (
        resumable(stop, kept=True, where=lambda: "before the next step") as request,
        started_trainer(
            config, replace(given, ranks=ranks), run_directory(config, writable=first), request,
            progress if first else False, lambda record: tell({"evaluation": record}), continues,
            callbacks=sinks_of(config.run) if first else (),
        ) as trainer,
    ):  # fmt: skip
        in_setup = trainer.ranks.waited_s
        result = trainer.run_to_end()
        waited = {"waited_s": trainer.ranks.waited_s - in_setup}
        timing: Mapping[str, float] = result.timing | waited
        trainer.run.backend.close()
    return {
        "metrics": result.metrics, "timing": dict(timing), "samples": result.samples,
        "history": result.history,
    }  # fmt: skip
