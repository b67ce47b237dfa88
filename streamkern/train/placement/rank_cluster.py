"""The Dask cluster on which a driver runs ranks: its workers, their processes, and messages.

Without a cluster of the user, it is a local one with a worker process for each rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any

from streamkern.basics.errors import ClusterError, ConfigError, RunError
from streamkern.basics.machine import available_cpus
from streamkern.basics.message import mention
from streamkern.basics.optional import import_optional, on_demand
from streamkern.basics.stop import SIGNALS
from streamkern.basics.text import size_text
from streamkern.filesystem.abandoned import RANKS_PREFIX, create_locked_folder, remove_locked
from streamkern.stream.unit_readers import cluster_text, run_on

_NANNY_TIMEOUT_S = 5.0
"""Seconds to wait for the reply of a nanny, after which its machine counts as lost."""


@dataclass(frozen=True)
class WorkerInfo:
    """A worker of the cluster.

    address : address of the worker, such as "tcp://10.0.0.2:41234"
    host : its host
    nanny : address of the nanny, which can kill the worker's process and starts another one
    takes_tasks : whether the worker is running, and neither paused nor closing
    """

    address: str
    host: str
    nanny: str
    takes_tasks: bool


class RankCluster:
    """A `distributed.Client` whose requests have a time limit.

    client : the client; its workers need nannies
    name : unique name of this set of ranks; ranks and driver send each other messages under it
    timeout_s : seconds without a message after which a rank counts as lost
    driver_timeout_s : seconds without a message from the driver after which ranks save and end

    Raises
    ------
    ClusterError
        Any method raises it if the scheduler is gone or does not answer for `timeout_s`.
    """

    def __init__(self, client: Any, name: str, timeout_s: float, driver_timeout_s: float) -> None:
        self.client, self.name = client, name
        self.timeout_s, self.driver_timeout_s = timeout_s, driver_timeout_s
        self.message_arrived = threading.Event()
        self._beats = 0

    def listen(self, receive: Callable[[dict[str, Any]], None]) -> None:
        """Call `receive` with each message of a rank, on the client's thread."""
        self.client.subscribe_topic(self.name, lambda event: receive(event[1]))

    def stop_listening(self) -> None:
        """Stop calling the function given to `listen`."""
        if self.client.status == "running":
            self.client.unsubscribe_topic(self.name)

    def message_ranks(self, generation: int, stop: str | None) -> None:
        """Send a message to all ranks. It also shows them that the driver is alive.

        generation : number of the current generation; ranks of an older generation end
        stop : why the run is to stop, or None
        """
        self._beats += 1
        message = {"generation": generation, "stop": stop, "beat": self._beats}
        self._wait_for(self.client.scheduler.set_metadata(keys=[self.name], value=message))

    def workers(self) -> dict[str, WorkerInfo]:
        """Return the workers of the cluster by address, in the order of the addresses.

        Raises ConfigError if a worker has no nanny, or a limit on its memory.
        """
        workers = self._wait_for(self.client.scheduler.identity())["workers"]
        without_nanny = [address for address, worker in workers.items() if not worker["nanny"]]
        if without_nanny:
            raise ConfigError(
                f"the worker {without_nanny[0]} of {cluster_text(self.client)} has no nanny, but a "
                "nanny must end its process if another rank is lost",
                "start the worker without --no-nanny",
            )
        limited = [address for address, worker in workers.items() if worker["memory_limit"]]
        if limited:
            limit = size_text(workers[limited[0]]["memory_limit"])
            raise ConfigError(
                f"the worker {limited[0]} of {cluster_text(self.client)} has a memory limit of "
                f"{limit}, at which Dask would stop or kill it during training",
                f"start the worker with --memory-limit 0, and set {mention('run.memory')} instead",
            )
        return {
            address: WorkerInfo(
                address, worker["host"], worker["nanny"], worker["status"] == "running"
            )
            for address, worker in sorted(workers.items())
        }

    def processes(self, workers: list[WorkerInfo]) -> dict[str, int]:
        """Return the process ids of workers, keyed by the address of their nanny.

        Nannies that do not answer are left out.
        """
        return self.run_on_each(_process, [worker.nanny for worker in workers])

    def kill(self, processes: Mapping[str, int]) -> set[str]:
        """Kill processes, even suspended ones, and return the nannies that answered.

        The processes of these nannies have certainly ended, and the nannies start new ones.

        processes : process ids, by the address of the nanny
        """
        return set(self.run_on_each(_kill, list(processes), dict(processes)))

    def run_on_each(
        self, function: Callable[..., Any], addresses: list[str], *args: Any
    ) -> dict[str, Any]:
        """Run a function on workers or nannies, and return its results by address.

        Those that do not answer are left out.
        """

        async def replies_of(address: str) -> dict[str, Any]:
            # Nannies are called by their own addresses: the scheduler may have forgotten a worker.
            replies = self.client.run(function, *args, workers=[address], on_error="ignore")
            return dict(await asyncio.wait_for(replies, _NANNY_TIMEOUT_S))

        async def all_replies() -> list[dict[str, Any] | BaseException]:
            return await asyncio.gather(*map(replies_of, addresses), return_exceptions=True)

        by_address: dict[str, Any] = {}
        for reply in self._wait_for(all_replies(), self.timeout_s + _NANNY_TIMEOUT_S):
            by_address |= reply if isinstance(reply, dict) else {}
        return by_address

    def _wait_for(self, request: Any, wait_s: float | None = None) -> Any:
        """Return the reply to a request; raise ClusterError if there is none within the time."""
        reply = run_on(self.client.loop, request)
        try:
            return reply.result(wait_s or self.timeout_s)
        except (OSError, CancelledError) as error:
            raise ClusterError(
                f"{cluster_text(self.client)} is gone, or has not answered for "
                f"{self.timeout_s:g} s",
                "start it again, then run the same command again to continue",
            ) from error
        finally:
            reply.cancel()


async def _process(dask_worker: Any) -> Any:
    """Return the worker's process id, after any restart in progress. Runs on the nanny."""
    while dask_worker.process is None or dask_worker.process.status.name == "starting":
        await asyncio.sleep(0.01)
    return dask_worker.pid


async def _kill(processes: Mapping[str, int], dask_worker: Any) -> bool:
    """Kill the worker's process unless it was replaced already, and wait until it has ended.

    Runs on the nanny.
    """
    process = processes[dask_worker.address]
    if dask_worker.pid == process:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.kill(process, signal.SIGKILL)
    while dask_worker.pid == process:
        await asyncio.sleep(0.01)
    return True


_BLAS_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# By default, Dask's cluster removes a worker 15 s after it was killed, even while it restarts.
_KEEP_LOST_WORKERS = {"distributed.deploy.lost-worker-timeout": "365 days"}


@contextlib.contextmanager
def local_cluster(ranks: int, threads: int | None = None) -> Iterator[Any]:
    """Yield a Dask client with `ranks` local worker processes.

    The workers end with the context, or with this process. Each has one task at a time, and no
    memory limit, at which Dask would kill it.

    threads : BLAS threads of each worker; None for its share of the processors

    Raises RunError if the processes cannot be started.
    """
    distributed = import_optional("distributed", "a run of several ranks", "ranks")
    _check_main_script(ranks)
    threads_per_worker = str(threads or max(1, available_cpus() // ranks))
    _start_resource_tracker()
    with (
        _restored_environment(),
        on_demand("dask").config.set(_KEEP_LOST_WORKERS),
        _worker_folder() as folder,
        _start_cluster(
            distributed.LocalCluster,
            n_workers=ranks, threads_per_worker=1, processes=True, memory_limit=None,
            host="127.0.0.1", scheduler_port=0, dashboard_address="127.0.0.1:0",
            local_directory=folder, silence_logs=logging.CRITICAL, preload=[__name__],
            env=dict.fromkeys(_BLAS_THREADS, threads_per_worker),
        ) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):  # fmt: skip
        yield client


@contextlib.contextmanager
def _worker_folder() -> Iterator[str]:
    """Yield a folder for files of workers, and remove it at the end.

    Folders that killed drivers have left are removed first.
    """
    folder, lock = create_locked_folder(RANKS_PREFIX)
    try:
        yield str(folder)
    finally:
        remove_locked(folder, lock)


def _check_main_script(ranks: int) -> None:
    """Raise RunError if worker processes could not import the main script, for example stdin.

    Otherwise each of them would end with a traceback.
    """
    main = sys.modules["__main__"]
    path = None if getattr(main, "__spec__", None) else getattr(main, "__file__", None)
    if path is not None and not os.path.exists(path):
        raise RunError(
            f"the processes of {ranks} ranks import the script that starts them, but {path} is "
            "not a file",
            'write it to a file, and train below `if __name__ == "__main__":`',
        )


def _start_cluster(cluster_class: Callable[..., Any], **options: Any) -> Any:
    """Call `cluster_class` with options; raise RunError if processes cannot be started."""
    try:
        return cluster_class(**options)
    except RuntimeError as error:
        raise RunError(
            f"the processes of {options['n_workers']} ranks could not be started ({error})",
            'train below `if __name__ == "__main__":` in a file, because the processes import it',
        ) from error


def _start_resource_tracker() -> None:
    """Start Python's resource tracker without warnings, unless it is already running.

    After a SIGKILL of this process, the tracker removes leaked semaphores, and would print a
    warning of them.
    """
    if os.name != "posix":
        return
    old_value = os.environ.get("PYTHONWARNINGS")
    without_warning = "ignore:resource_tracker:UserWarning"
    os.environ["PYTHONWARNINGS"] = (
        f"{old_value},{without_warning}" if old_value else without_warning
    )
    try:
        resource_tracker.ensure_running()
    finally:
        os.environ.pop("PYTHONWARNINGS")
        if old_value is not None:
            os.environ["PYTHONWARNINGS"] = old_value


@contextlib.contextmanager
def _restored_environment() -> Iterator[None]:
    """Restore the environment variables at the end, because Dask changes them for its workers."""
    old_environment = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - old_environment.keys():
            del os.environ[name]
        os.environ.update(old_environment)


def dask_setup(worker: Any) -> None:
    """Ignore signals of the terminal in a worker; Dask calls this function when the worker starts.

    The driver receives the signals, and passes them on to the ranks. A worker ends by itself if the
    driver's process has ended.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
