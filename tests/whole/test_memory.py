"""Check that the memory of a run equals its plan, and does not grow with the rows.

Input that is read in pieces takes the memory that is planned too, though all of it would take more.
The peak is VmHWM above the resident size after all imports, so this runs on Linux only.
Checkpoints, the log and an evaluation are part of it.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern.backend.numba_backend import numba_problem
from streamkern.ingest.ingest import ingest
from streamkern.store.writer import StoreWriter

needs_numba = pytest.mark.skipif(numba_problem() is not None, reason=str(numba_problem()))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/status"),
]

D, C, P, UNIT = 300, 10, 1000, 3495  # units of 4 MiB of float32
BUDGET = 210 << 20
ROWS, FEATURES = 60_000, 1000  # 458 MiB of float64

CHILD = """
import json, sys
import dask, sklearn.utils.validation  # all imports come before the baseline
from benchmarks.resident import begin_peak, resident_bytes
from streamkern.config.run_config import RunConfig
from streamkern.train.resolve.resolved_run import open_run
from streamkern.train.train import train

config = RunConfig.from_tables(json.loads(sys.argv[1]))
planned = open_run(config)
planned.backend.close()
baseline = begin_peak()  # compiling left memory free, and the imports had a peak of their own
result = train(config)
result.model.backend.close()
peak = resident_bytes("VmHWM") - baseline
phases = {name: planned.buffers.total(name) for name in planned.buffers.phases}
print(json.dumps({"planned": planned.buffers.peak, "peak": peak, "phases": phases,
                  "compiler": planned.problem.library_bytes,
                  "sizes": str(planned.sizes), "steps": result.samples}))
"""

INPUT_CHILD = """
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("memory")


@cache
def make_store(folder: Path, rows: int) -> Path:
    """Write random rows that do not compress, with labels of the first feature."""
    url = folder / f"{rows}.zarr"
    classes = [str(k) for k in range(C)]
    rng = np.random.default_rng(0)
    writer = StoreWriter(
        url, (D,), np.float32, C, classes, chunk_rows=UNIT, n_rows=rows, compress="none"
    )
    for i, start in enumerate(range(0, rows, UNIT)):
        X = rng.standard_normal((min(UNIT, rows - start), D), dtype=np.float32)
        writer.write_chunk(i, X, np.clip(X[:, 0] * 2 + 5, 0, 9).astype(np.int64))
    writer.finish()
    return url


@cache
def measured(
    folder: Path,
    rows: int,
    solver: str,
    memory: str,
    accelerator: str = "none",
    centers: str = "random",
    metric: str = "none",
    early: bool = False,
) -> dict[str, Any]:
    """Return peak and plan of one run in a new process. solver : as "block" or "block, fourier"."""
    name, _, features = solver.partition(", ")
    tables: dict[str, dict[str, Any]] = {
        "data": {
            "train": str(make_store(folder, rows)),
            "test": str(make_store(folder, 4000)),
            "transforms": [{"kind": "noise", "sigma": 0.1}],
            "epochs": 2 if solver == "falkon" or early else 1,
        },
        "model": {"bandwidth": 20.0, "n_centers": P, "centers": centers, "metric": metric},
        "solver": {"name": name} | ({"n_nystrom": 500} if name.startswith("eigenpro") else {}),
        "run": {
            "memory": memory,
            "device": "cpu",
            "accelerator": accelerator,
            "run_dir": str(
                folder / f"run-{rows}-{solver}-{memory}-{accelerator}-{centers}-{metric}-{early}"
            ),
            "early_stopping": early,
            "checkpoint_every": 50,
        },
    }
    if features:
        tables["model"]["features"] = features
    if features == "fourier":
        tables["model"] |= {"n_features": 4 * P, "n_centers": "auto"}
    return run_alone(CHILD, tables)


def run_alone(script: str, arguments: Any) -> dict[str, Any]:
    """Return the JSON values that a script prints in a new process."""
    command = [sys.executable, "-c", script, json.dumps(arguments)]
    child = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False
    )
    assert child.returncode == 0, child.stderr
    report: dict[str, Any] = json.loads(child.stdout)
    return report


def assert_planned(report: dict[str, Any], memory: str = "none") -> None:
    """Check that the run keeps its memory limit, and that the plan is met within 10 %.

    A plan that is kept, but half empty, would be wrong too. The compiler came with the plan, before
    the baseline, and compiles nothing that it has kept.
    """
    budget = math.inf if memory == "none" else int(memory.split()[0]) << 20
    assert report["planned"] <= budget
    assert report["peak"] <= min(budget, 1.1 * report["planned"]), report
    assert report["peak"] >= 0.5 * (report["planned"] - report["compiler"]), report


@pytest.mark.full(all_but_every=8)
@pytest.mark.parametrize(
    ("rows", "solver", "memory", "accelerator"),
    [
        (60_000, "block", "160 MiB", "none"),
        (120_000, "block", "160 MiB", "none"),
        (60_000, "eigenpro4", "170 MiB", "none"),
        (60_000, "direct", "220 MiB", "none"),
        (60_000, "falkon", "170 MiB", "none"),
        (60_000, "eigenpro1, fourier", "230 MiB", "none"),
        (60_000, "sgd, nystrom", "170 MiB", "none"),
        pytest.param(60_000, "block", "300 MiB", "numba", marks=needs_numba),
    ],
)
def test_peak_memory_equals_plan(
    rows: int, solver: str, memory: str, accelerator: str, folder: Path
) -> None:
    """Check 72 and 144 MB of rows; the peak must be within the plan, and above half of it."""
    assert_planned(measured(folder, rows, solver, memory, accelerator), memory)


@pytest.mark.full(all_but_every=3)
@pytest.mark.parametrize("centers", ["balanced", "kmeans", "rpcholesky"])
def test_memory_of_center_selection_is_planned(centers: str, folder: Path) -> None:
    assert_planned(measured(folder, 60_000, "block", "200 MiB", centers=centers), "200 MiB")


@pytest.mark.full
def test_memory_of_metric_learning_is_planned(folder: Path) -> None:
    report = measured(folder, 60_000, "block", "240 MiB", metric="learn")
    assert 0.9 * report["planned"] <= report["phases"]["metric"]
    assert_planned(report, "240 MiB")


@pytest.mark.full
def test_memory_of_validation_rows_is_planned(folder: Path) -> None:
    assert_planned(measured(folder, 60_000, "block", "200 MiB", early=True), "200 MiB")


@pytest.mark.full
def test_memory_of_patch_features_is_planned(tmp_path: Path) -> None:
    """Check that filters are drawn before anything is counted, from a sample that is no larger."""
    rng, url = np.random.default_rng(0), tmp_path / "images.zarr"
    X = rng.integers(0, 256, (6000, 32, 32, 3), dtype=np.uint8)
    ingest(X, str(url), y=X[:, 0, 0, 0] // 26)
    tables = {
        "data": {"train": str(url), "batch_size": 512, "epochs": 1},
        "model": {"patch_features": 64, "bandwidth": 20.0, "n_centers": P},
        "solver": {"name": "block", "ridge": 1e-4},
        "run": {"device": "cpu", "accelerator": "none", "threads": 2},
    }
    assert_planned(run_alone(CHILD, tables))


@pytest.mark.full
def test_memory_of_four_times_the_rows_is_as_planned(folder: Path) -> None:
    rows = 240_000
    few, many = (measured(folder, n, "block", "160 MiB") for n in (60_000, rows))
    assert many["planned"] < 1.01 * few["planned"]  # a long run's setup takes a larger sample
    # How full the blocks of the loader are is chance, more so on a busy machine: the peak of few
    # rows is not a measure. Rows that stayed would be more than all that is planned.
    assert many["peak"] <= 1.1 * many["planned"] < rows * D * 4, many


@pytest.mark.full(all_but_every=2)
@pytest.mark.parametrize("kind", ["sparse", "frame"])
def test_rows_read_in_pieces_fit_the_budget(kind: str) -> None:
    peaks = run_alone(INPUT_CHILD, [kind, ROWS, FEATURES, BUDGET])
    assert ROWS * FEATURES * 8 > 2 * BUDGET
    # What Dask needs to make a block nobody can plan.
    assert max(peaks.values()) < (1 if kind == "sparse" else 1.25) * BUDGET, peaks
