"""Check that new arrays reuse the memory of freed ones."""

import subprocess
import sys

import pytest

from streamkern.backend import freed_arrays

CHILD = """
import resource, sys
import numpy as np
from streamkern.backend import freed_arrays

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

keep = sys.argv[1] == "keep"
if keep:
    freed_arrays.keep()
before = faults()
for at in range(20):
    large = np.ones(1 << 20), np.ones(1 << 20)  # 8 MiB each
    del large
print(faults() - before)
"""


@pytest.mark.skipif(freed_arrays._MALLOC_TRIM is None, reason="needs glibc")
def test_new_arrays_reuse_freed_memory() -> None:
    counts = {
        way: int(subprocess.check_output([sys.executable, "-c", CHILD, way]))
        for way in ("keep", "leave")
    }
    pages = 2 * (8 << 20) // 4096
    assert counts["keep"] < 1.5 * pages
    assert counts["leave"] > 2 * counts["keep"]
