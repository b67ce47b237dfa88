"""Thousands of outputs with values: seconds of processor and of the clock, and memory, of a fit.

    python -m benchmarks.many_outputs block 10000
    python -m benchmarks.many_outputs direct 50000 --rows 3000 --centers 500

The targets are tanh(X W) with noise of 0.1; kernel, bandwidth and ridge are found. Memory is the
most that the process held, with Python, its libraries and the data.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

import numpy as np

import streamkern as sk


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("solver", choices=["block", "direct", "falkon"])
    parser.add_argument("outputs", type=int)
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--centers", type=int, default=500)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    X = rng.normal(size=(options.rows, 8)).astype(np.float32)
    Y = np.tanh(X @ rng.normal(size=(8, options.outputs)).astype(np.float32))
    Y += 0.1 * rng.normal(size=Y.shape).astype(np.float32)
    wall, busy = time.perf_counter(), time.process_time()
    model = sk.KernelRegressor(solver=options.solver, n_centers=options.centers).fit(X, Y)
    wall, busy = time.perf_counter() - wall, time.process_time() - busy
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = {"seconds": round(wall, 1), "processor": round(busy, 1), "MiB": most >> 10}
    fit = {"solver": options.solver, "outputs": options.outputs, "ridge": model.report_["ridge"]}
    print(json.dumps(fit | report))


if __name__ == "__main__":
    main()
