"""What this process may use of the machine."""

from __future__ import annotations

import os


def available_cpus() -> int:
    """Processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory() -> int:
    """Bytes of host memory that can be taken, from the kernel and the control group's limit."""
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
            left = int(limit.read()) - int(now.read())
        # Pages of files read long ago count as in use, but are given up when asked for.
        with open(f"{group}.stat") as lines:
            cached = next((int(x.split()[1]) for x in lines if x.startswith("inactive_file ")), 0)
        free = min(free, left + cached)
    except (OSError, ValueError):  # no control group, or "max"
        pass
    return max(free, 0)
