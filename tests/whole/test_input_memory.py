"""What is read in pieces takes the memory that is planned, though all of it would take more.

The peak is VmHWM above the resident size before the call, so this runs on Linux only.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/status"),
]

BUDGET = 210 << 20
ROWS, FEATURES = 60_000, 1000  # 458 MiB of float64

CHILD = """
import json, sys
import dask.array as da, dask.dataframe as dd, numpy as np, scipy.sparse as sp
from benchmarks.resident import begin_peak, resident_bytes
from streamkern import KernelRegressor

def peak(call):
    before = begin_peak()
    call()
    return resident_bytes("VmHWM") - before

def made(block, block_info=None):
    return base * (1 + block_info[0]["chunk-location"][0] / 100)

kind, n, d, budget = json.loads(sys.argv[1])
base = np.random.default_rng(0).standard_normal((500, d))
sparse = sp.random_array((n, d), density=0.002, format="csr", rng=np.random.default_rng(0))
y = np.asarray(sparse.sum(axis=1)).ravel()
lazy = da.zeros((n, d), chunks=(500, -1)).map_blocks(made, dtype="f8")
X = sparse
if kind == "frame":
    X = dd.from_dask_array(lazy, columns=[str(i) for i in range(d)])
model = KernelRegressor(
    "laplace", bandwidth=5.0, solver="block", n_centers=200, epochs=1, batch_size=256,
    memory=budget, threads=1, accelerator="none",
)  # fmt: skip
KernelRegressor(**model.get_params()).fit(sparse[:300], y[:300])  # imports have a peak of their own
found = {"fit": peak(lambda: model.fit(X, y))}
predict = lambda: model.predict(X) if kind == "sparse" else model.predict(X).sum().compute()
found["predict"] = peak(predict)
found["score"] = peak(lambda: model.score(X, y))
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
@pytest.mark.parametrize("kind", ["sparse", "frame"])
def test_rows_that_are_read_in_pieces_fit_the_budget(kind: str) -> None:
    command = [sys.executable, "-c", CHILD, json.dumps([kind, ROWS, FEATURES, BUDGET])]
    child = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False
    )
    assert child.returncode == 0, child.stderr
    peaks: dict[str, Any] = json.loads(child.stdout)
    assert ROWS * FEATURES * 8 > 2 * BUDGET
    # What Dask needs to make a block nobody can plan.
    assert max(peaks.values()) < (1 if kind == "sparse" else 1.25) * BUDGET, peaks
