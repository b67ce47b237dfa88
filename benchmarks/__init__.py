"""Benchmarks: `python -m benchmarks` for speed; the other scripts are run by their own names."""

import os

# After a call on several threads OpenBLAS's workers spin for 2^28 cycles, 0.1 s, on the cores that
# the next library needs: measured, a PyTorch call of 2 ms then takes 31. 2^18 cycles are 0.1 ms.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "18")
