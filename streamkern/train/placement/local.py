"""Local Dask cluster, with as many worker processes as there are ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any

from streamkern.basics.errors import RunError
from streamkern.basics.machine import available_cpus
from streamkern.basics.optional import import_optional, on_demand
from streamkern.basics.stop import SIGNALS
from streamkern.filesystem.abandoned import RANKS_PREFIX, create_locked_folder, remove_locked

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
