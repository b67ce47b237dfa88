"""Check the measured resources of a process."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHILD = """
import numpy as np
from streamkern.basics.machine import MemoryMeter

taken = MemoryMeter()
held = np.ones({before} << 17)     # MiB
del held
after = MemoryMeter()
held = np.ones({after} << 17)
print(taken.peak(), after.peak())
"""


def peaks(first_mib: int, second_mib: int) -> list[str]:
    """Return the peaks of two monitors, which start before the first and before the second MiB is
    allocated."""
    code = CHILD.format(before=first_mib, after=second_mib)
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return completed.stdout.split()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc, as Linux has it")
def test_peak_memory_is_measured_per_interval() -> None:
    first, second = peaks(20, 60)
    assert 59 < int(first) / 2**20 < 64
    assert 59 < int(second) / 2**20 < 64


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc, as Linux has it")
def test_peak_below_older_peak_is_unknown() -> None:
    first, second = peaks(60, 20)
    assert 59 < int(first) / 2**20 < 64
    assert second == "None"
