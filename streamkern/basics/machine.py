"""Processors, memory and threads of this process, and whether another one is alive."""

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
    """Return the available bytes of host memory, by the kernel and the control group's limit."""
    page = os.sysconf("SC_PAGE_SIZE")
    free = os.sysconf("SC_PHYS_PAGES") * page
    try:
        with open("/proc/meminfo") as lines:
            fields = {line.split(":")[0]: line.split()[1] for line in lines}
        free = int(fields["MemAvailable"]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    try:
        group = "/sys/fs/cgroup/memory"
        with open(f"{group}.max") as limit, open(f"{group}.current") as now:
            unused = int(limit.read()) - int(now.read())
        # Pages of files read long ago count as used, but are freed on demand.
        with open(f"{group}.stat") as lines:
            cached = next((int(x.split()[1]) for x in lines if x.startswith("inactive_file ")), 0)
        free = min(free, unused + cached)
    except (OSError, ValueError):  # no control group, or "max"
        pass
    return int(max(min(free, _limited()), 0))


class MemoryMeter:
    """Memory that this process allocates from now on; known on Linux only."""

    def __init__(self) -> None:
        self._before = _resident()

    def peak(self) -> int | None:
        """Return the most bytes held at once beyond those at first; None if unknown.

        It is unknown also if this process had held more before.
        """
        now, before = _resident(), self._before
        if now is None or before is None or now[1] <= before[1]:
            return None
        return now[1] - before[0]


def _resident() -> tuple[int, int] | None:
    """Return the bytes of memory this process holds, and the most it ever held."""
    try:
        with open("/proc/self/status") as lines:
            fields = {line.partition(":")[0]: line.split()[1:2] for line in lines}
        return int(fields["VmRSS"][0]) * 1024, int(fields["VmHWM"][0]) * 1024
    except (OSError, LookupError, ValueError):
        return None


def is_alive(pid: int) -> bool:
    """Return whether a process with this id exists. Not for Windows: there, signal 0 is Ctrl-C."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def boot_id() -> str | None:
    """Return an id of this boot of this machine, the same in all containers; None if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


# Address space that a thread reserves without using it: its stack, and an arena of glibc.
_PER_THREAD = (8 + 64) << 20


def _limited() -> float:
    """Return the bytes that RLIMIT_AS and RLIMIT_DATA (``ulimit -v``, ``-d``) leave; inf without.

    Beyond them, allocations in libraries fail in ways of their own: OpenBLAS retries forever.
    """
    try:
        import resource  # not on Windows

        with open("/proc/self/statm") as file:
            pages = [int(n) for n in file.read().split()]
    except (ImportError, OSError):
        return math.inf
    threads = _PER_THREAD * (available_cpus() + 1)
    used = {resource.RLIMIT_AS: pages[0], resource.RLIMIT_DATA: pages[5]}
    page, remaining = os.sysconf("SC_PAGE_SIZE"), math.inf
    for which, n_pages in used.items():
        limit = resource.getrlimit(which)[0]
        if limit != resource.RLIM_INFINITY:
            remaining = min(remaining, limit - n_pages * page - threads)
    return remaining


_T = TypeVar("_T")


def ordered_map(
    pool: ThreadPoolExecutor, calls: Iterable[Callable[[], _T]], n_ahead: int
) -> Generator[_T, None, None]:
    """Yield the results of `calls` in their order, with up to `n_ahead` in flight after the next.

    Closing the generator, or an error in a call, cancels calls that have not begun and waits for
    the rest.
    """
    waiting: deque[Future[_T]] = deque()
    try:
        for call in calls:
            waiting.append(pool.submit(call))
            if len(waiting) > n_ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        wait(waiting)
