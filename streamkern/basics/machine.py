"""Processors, memory and thread pools of this process, and whether another process is alive."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar


def available_cpus() -> int:
    """Return the number of processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory() -> int:
    """Return the bytes of host memory that this process can still allocate.

    This is the minimum of the memory that the kernel reports as available, of the memory left to
    the container (control groups v2, at ``/sys/fs/cgroup``), and of the limits of the process.
    """
    free_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo") as lines:
            fields = {line.split(":")[0]: line.split()[1] for line in lines}
        free_bytes = int(fields["MemAvailable"]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    try:
        group = "/sys/fs/cgroup/memory"
        with open(f"{group}.max") as limit, open(f"{group}.current") as usage:
            unused = int(limit.read()) - int(usage.read())
        # Pages of files read long ago count as used, but are freed on demand.
        with open(f"{group}.stat") as lines:
            cached = next((int(x.split()[1]) for x in lines if x.startswith("inactive_file ")), 0)
        free_bytes = min(free_bytes, unused + cached)
    except (OSError, ValueError):  # no control group, or "max" for no limit
        pass
    return int(max(min(free_bytes, _address_space_left()), 0))


class MemoryMeter:
    """Meter of the memory that this process allocates after the meter was made; on Linux only."""

    def __init__(self) -> None:
        self._start = _resident_bytes()

    def peak(self) -> int | None:
        """Return the largest number of bytes held at once, minus the bytes held at the start.

        Returns None on other systems than Linux, and if the process had held more memory before the
        start, because the system records only the maximum over the whole life of a process.
        """
        now, start = _resident_bytes(), self._start
        if now is None or start is None or now[1] <= start[1]:
            return None
        return now[1] - start[0]


def _resident_bytes() -> tuple[int, int] | None:
    """Return the bytes of memory that this process holds, and their maximum; None if unknown."""
    try:
        with open("/proc/self/status") as lines:
            fields = {line.partition(":")[0]: line.split()[1:2] for line in lines}
        return int(fields["VmRSS"][0]) * 1024, int(fields["VmHWM"][0]) * 1024
    except (OSError, LookupError, ValueError):
        return None


def is_alive(pid: int) -> bool:
    """Return whether a process with this id exists. Not for Windows, where signal 0 is Ctrl-C."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def boot_id() -> str | None:
    """Return the kernel's id of this boot, the same in all containers; None if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


# Address space that a thread reserves without using it: its stack, and an arena of glibc.
_BYTES_PER_THREAD = (8 + 64) << 20


def _address_space_left() -> float:
    """Return the bytes left within RLIMIT_AS and RLIMIT_DATA (``ulimit -v``, ``-d``).

    A reserve for the threads is subtracted. Inf if there is no limit, or it is unknown.

    If an allocation exceeds them, some libraries do not raise an error: OpenBLAS retries forever.
    """
    try:
        import resource  # not on Windows

        with open("/proc/self/statm") as file:
            pages = [int(n) for n in file.read().split()]
    except (ImportError, OSError):
        return math.inf
    threads = _BYTES_PER_THREAD * (available_cpus() + 1)
    used_pages = {resource.RLIMIT_AS: pages[0], resource.RLIMIT_DATA: pages[5]}
    page = os.sysconf("SC_PAGE_SIZE")
    remaining = math.inf
    for kind, n_pages in used_pages.items():
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            remaining = min(remaining, limit - n_pages * page - threads)
    return remaining


_T = TypeVar("_T")


def ordered_map(
    pool: ThreadPoolExecutor, calls: Iterable[Callable[[], _T]], n_ahead: int
) -> Generator[_T, None, None]:
    """Run `calls` on a pool and yield their results in order.

    n_ahead : number of calls that may run, or be finished, ahead of the next result

    Closing the generator, or an error in a call, cancels calls that have not begun and waits for
    the others.
    """
    pending: deque[Future[_T]] = deque()
    try:
        for call in calls:
            pending.append(pool.submit(call))
            if len(pending) > n_ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
        wait(pending)
