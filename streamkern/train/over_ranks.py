"""Train over several ranks, in the process that starts them.

One rank records the run in the run directory. Then all ranks compute the setup together, or load it
from there. Each rank has all weights, or its part of them, and all ranks make the same decisions.
Only rank 0 chooses, writes, evaluates and reports. This process assigns the GPUs of the machine to
the ranks, and shows their events: progress, evaluations, warnings and lost ranks.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from streamkern.backend.devices import gpu_count, gpu_problem
from streamkern.backend.rank_grid import check_columns
from streamkern.basics.errors import ConfigError, ResumeMismatchError, StreamkernError
from streamkern.basics.message import mention
from streamkern.basics.optional import import_optional
from streamkern.basics.progress import ProgressLine
from streamkern.basics.stop import StopRequest
from streamkern.basics.user_class import user_modules
from streamkern.basics.warning import warn
from streamkern.config.run_config import RunConfig
from streamkern.filesystem.urls import local_path
from streamkern.kernels.base import Kernel
from streamkern.losses.base import Loss
from streamkern.solver.methods import find
from streamkern.stream.cluster import check_versions, connect, dashboard_link
from streamkern.train.placement.launcher import run_ranks
from streamkern.train.placement.rank_cluster import local_cluster
from streamkern.train.rank_work import has_setup, prepare_rank, read_last_step, work_as_rank
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.resolve.training_data import open_test
from streamkern.train.restart.run_snapshot import recorded_run
from streamkern.train.run_identity import check_same_model, check_same_run, run_record
from streamkern.train.start_run import open_recorded_run, run_directory

MAX_TASK_BYTES = 256 << 20
"""Largest size, in bytes, of the pickled inputs that are sent to every rank."""


def train_over(
    config: RunConfig,
    inputs: RunInputs,
    request: StopRequest,
    *,
    progress: bool = False,
    on_event: EventHandler = lambda event: None,
) -> dict[str, Any]:
    """Train to the end with `run.ranks` ranks, and return the result of rank 0, see `train_rank`.

    Ranks run on the workers of the client in `inputs`, of `run.cluster`, or of a cluster on this
    machine that ends with the run.

    inputs : inputs that are not in the settings; they are sent to every rank
    request : request by which a signal ends the run
    progress : whether rank 0 sends the text of a progress line
    on_event : called with each event, whose kind is in "event":

        - "ranks": a generation of ranks starts, with "ranks" of the "wanted" ranks.
        - "lost": a rank is lost; "why" says how, and "stopping" whether the run was to end. "kept"
          names the state that the run resumes from: "checkpoint", "setup" or "nothing".
        - "message": "message" is {"line": text} or {"evaluation": record} from rank 0, or
          {"warning": text} from any rank.

    Raises ConfigError for settings or inputs that do not suit several ranks, MissingDependencyError
    without the packages of the extra `ranks`, ResumeMismatchError if the run directory holds
    another run, and the errors of the ranks.
    """
    check_placeable(config)
    import_optional("xgboost.collective", "a run of several ranks", "ranks")
    client = inputs.client
    ranks = config.run.n_ranks
    is_local = client is None and config.run.cluster is None
    devices: Sequence[str] = rank_devices(config) if is_local else ()
    if is_local:
        if config.run.threads != "auto":  # the settings have the total of all ranks
            config = config.with_overrides({"run.threads": max(1, config.run.threads // ranks)})
    else:
        _check_absolute(config)
    _check_recorded_run(config, inputs)
    settings = {
        "config": config, "inputs": _pickle_inputs(config, inputs),
        "progress": progress, "devices": devices,
        # Modules of the caller's classes; the record of an older run has only the classes' names.
        "modules": user_modules(Kernel, Loss),
    }  # fmt: skip

    def forward(event: dict[str, Any]) -> None:
        if event["event"] == "lost":
            event = event | {"kept": _resume_point(config)}
        on_event(event)

    with _cluster(config, client) as workers:
        settings["dashboard"] = None if is_local else dashboard_link(workers)
        if not is_local:
            check_versions(workers)
        result: dict[str, Any] = run_ranks(
            workers, work_as_rank, settings, ranks=ranks, min_ranks=config.run.min_ranks,
            multiple=config.run.center_ranks, prepare=prepare_rank, read_progress=read_last_step,
            stop=request, on_event=forward,
        )  # fmt: skip
    return result


def check_placeable(config: RunConfig) -> None:
    """Raise ConfigError if the settings of the ranks are incomplete or contradict each other."""
    if config.run.run_dir is None:
        raise ConfigError(
            f"{mention('run.ranks', config.run.ranks)} needs a {mention('run.run_dir')} that all "
            "ranks can read and write",
            "set it",
        )
    check_columns(config.run.n_ranks, config.run.center_ranks)
    method = find(config.solver.name, config.model.features)
    method.check_ranks(config.run.n_ranks, config.run.center_ranks)
    if config.run.min_ranks > config.run.n_ranks:
        raise ConfigError(
            f"{mention('run.min_ranks', config.run.min_ranks)} must not be above "
            f"{mention('run.ranks', config.run.ranks)}",
            "lower it",
        )
    if config.data.dask is not None:
        raise ConfigError(
            f"{mention('run.ranks', config.run.ranks)} reads rows on the ranks, so it cannot use "
            f"the cluster of {mention('data.dask')} for reading",
            "leave one of them out",
        )


def _resume_point(config: RunConfig) -> str:
    """Return the kind of state from which ranks resume; "checkpoint" if it cannot be read now."""
    with contextlib.suppress(StreamkernError):
        directory = run_directory(config, writable=False)
        if not directory.steps():
            return "setup" if has_setup(directory) else "nothing"
    return "checkpoint"


def _check_absolute(config: RunConfig) -> None:
    """Raise ConfigError if run.run_dir, data.train or data.test is a relative path.

    Workers have working directories of their own.
    """
    for url in filter(None, (config.run.run_dir, *config.data.train_urls, config.data.test)):
        path = local_path(url)
        if path is not None and not os.path.isabs(path):
            raise ConfigError(
                f"{mention('run.ranks', config.run.ranks)} on a cluster: {url!r} is a relative "
                "path, but the workers have other working directories",
                "give an absolute path that all workers see, or a URL",
            )


def _check_recorded_run(config: RunConfig, inputs: RunInputs) -> None:
    """Raise ResumeMismatchError if the directory holds another run, before ranks are started.

    Other errors are ignored here: they may not occur on the workers, as the data may be visible
    only there. The workers report their own.
    """
    cpu_config = config.with_overrides({"run.device": "cpu", "run.accelerator": "none"})
    directory = run_directory(config, writable=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ranks issue the same warnings
        try:
            if recorded_run(directory) is not None:
                if inputs.continues is None:
                    check_same_model(directory, config, inputs)
                run = open_recorded_run(cpu_config, inputs, directory)
                run.backend.close()
                check_same_run(directory, run_record(run))
        except ResumeMismatchError:
            raise
        except StreamkernError:
            return


def is_complete(config: RunConfig, inputs: RunInputs) -> bool:
    """Return whether the run is complete and this process can evaluate it without ranks.

    The process cannot if it does not see the data, or has too little memory for all weights.
    """
    check_placeable(config)
    directory, one_rank_config = run_directory(config, writable=False), as_one_rank(config)
    with warnings.catch_warnings(), contextlib.suppress(StreamkernError):
        warnings.simplefilter("ignore")  # issued again when the run is read
        saved = directory.load_latest(lambda *of: None)
        if saved is None or not saved.meta["position"]["done"]:
            return False
        run = open_recorded_run(one_rank_config, inputs, directory)
        run.backend.close()
        open_test(one_rank_config, run.data, inputs.test)
        return True
    return False


def as_one_rank(config: RunConfig) -> RunConfig:
    """Return the settings of the same run with one rank, in this process."""
    changes = {"run.ranks": 1, "run.min_ranks": 1, "run.center_ranks": 1, "run.cluster": None}
    return config.with_overrides(changes)


def _pickle_inputs(config: RunConfig, inputs: RunInputs) -> bytes:
    """Return the inputs that are not in the settings, pickled.

    Raises ConfigError if they cannot be pickled, or take more than `MAX_TASK_BYTES`.
    """
    cloudpickle = import_optional("cloudpickle", "a run of several ranks", "ranks")
    try:
        pickled: bytes = cloudpickle.dumps(replace(inputs, client=None))
    except Exception as error:
        raise ConfigError(
            f"{mention('run.ranks', config.run.ranks)}: the data or the kernel cannot be sent to "
            f"other processes: {error}",
            "use objects that can be pickled, or name stores in the settings",
        ) from error
    if len(pickled) > MAX_TASK_BYTES:
        raise ConfigError(
            f"{mention('run.ranks', config.run.ranks)} would send {len(pickled) >> 20} MiB of "
            f"arrays to every rank; at most {MAX_TASK_BYTES >> 20} MiB are allowed",
            "write them to a store (streamkern.ingest_store), and give the store",
        )
    return pickled


@contextlib.contextmanager
def _cluster(config: RunConfig, client: Any) -> Iterator[Any]:
    """Yield the Dask client whose workers run the ranks."""
    if client is not None:
        yield client
    elif config.run.cluster is not None:
        with connect(config.run.cluster, setting="run.cluster") as opened_client:
            yield opened_client
    else:
        threads = None if config.run.threads == "auto" else config.run.threads
        with local_cluster(config.run.n_ranks, threads) as opened_client:
            yield opened_client


def with_rank_count(config: RunConfig, *, on_cluster: bool = False) -> RunConfig:
    """Return the settings with run.ranks="gpus" replaced by the number of GPUs of this machine.

    on_cluster : whether the ranks run on a cluster that the caller has given

    Raises ConfigError if there are no GPUs, or if the settings exclude them.
    """
    if config.run.ranks != "gpus":
        return config
    if on_cluster or config.run.cluster is not None:
        raise ConfigError(
            f"{mention('run.ranks', 'gpus')} is for the GPUs of this machine, and cannot be used "
            "on a cluster",
            "give the number of its workers",
        )
    if config.run.device not in ("auto", "gpu"):
        raise ConfigError(
            f"{mention('run.ranks', 'gpus')} computes on all GPUs, and cannot be used with "
            f"{mention('run.device', config.run.device)}",
            "leave one of them out",
        )
    n_gpus = gpu_count()
    if not n_gpus:
        raise ConfigError(
            f"{mention('run.ranks', 'gpus')} needs a GPU, but none was found: {gpu_problem()}",
            "give a number",
        )
    return config.with_overrides({"run.ranks": n_gpus, "run.device": "gpu"})


def rank_devices(config: RunConfig) -> Sequence[str]:
    """Return run.device for each rank on this machine; () if all ranks use the CPU.

    Raises ConfigError if several ranks would share a GPU.
    """
    ranks, device = config.run.n_ranks, config.run.device
    n_gpus = 0 if device == "cpu" else gpu_count()
    if not n_gpus:
        return ()
    if device not in ("auto", "gpu") or ranks > n_gpus:
        raise ConfigError(
            f"{mention('run.ranks', ranks)} with {mention('run.device', device)} needs a GPU for "
            f"each rank, and this machine has {n_gpus}",
            f"give {mention('run.ranks', 'gpus')}, or {mention('run.device', 'cpu')}",
        )
    return [f"gpu:{rank}" for rank in range(ranks)]


EventHandler = Callable[[dict[str, Any]], None]
"""Function that is called with each event of `train_over`."""
_RESUME_TEXTS = {
    "checkpoint": "the run continues from its last checkpoint",
    "setup": "there is no checkpoint yet, so the run begins its first epoch again",
    "nothing": "there is no checkpoint yet, so the setup begins again",
}


class RankEventHandler:
    """Event handler of `train_over` that shows the progress line, evaluations and warnings.

    A warning that several ranks send is issued once.

    line : progress line
    on_evaluation : called with the record of each evaluation; None ignores them
    """

    def __init__(
        self, line: ProgressLine, on_evaluation: Callable[[dict[str, Any]], None] | None
    ) -> None:
        self._line, self._on_evaluation = line, on_evaluation
        self._shown_warnings = set[str]()

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "lost":
            when = ", once the same command is run again" if event["stopping"] else ""
            self._warn(f"{event['why']}; {_RESUME_TEXTS[event['kept']]}{when}", repeat=True)
        elif event["event"] == "ranks" and event["wanted"] > event["ranks"]:
            self._warn(f"there are workers for {event['ranks']} of {event['wanted']} ranks")
        elif event["event"] == "message":
            self._show(event["message"])

    def _show(self, message: dict[str, Any]) -> None:
        if message.get("line"):
            self._line.draw(message["line"])
        elif "line" in message:
            self._line.close()
        if "warning" in message:
            self._warn(message["warning"])
        if "evaluation" in message and self._on_evaluation is not None:
            self._line.close()
            self._on_evaluation(message["evaluation"])

    def _warn(self, text: str, *, repeat: bool = False) -> None:
        if repeat or text not in self._shown_warnings:
            self._shown_warnings.add(text)
            self._line.close()
            warn(text)
