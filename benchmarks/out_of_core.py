"""Train from a float32 store that is larger than the given memory, and compare peak and plan.

    python -m benchmarks.out_of_core --rows 1340000            # 4.2 GB, memory 1 GiB
    python -m benchmarks.out_of_core --rows 2680000            # twice the rows, same peak
    python -m benchmarks.out_of_core --rows 200000 --in-memory # the cost of the pipeline
    python -m benchmarks.out_of_core --rows 500000 --s3        # over HTTP, 40 ms a request

The peak is VmHWM of a fresh process minus its resident size after all imports (Linux).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.resident import resident_bytes
from benchmarks.s3_files import FileServer

D, C = 784, 10


def blocks(rows: int, size: int = 10_000):
    """Return a signal of rank 40 plus noise, and labels of a random teacher; they depend only on
    `rows`."""
    rng = np.random.default_rng(7)
    basis = rng.standard_normal((40, D)).astype(np.float32) / 6
    teacher = rng.standard_normal((40, C)).astype(np.float32)
    for start in range(0, rows, size):
        k = min(size, rows - start)
        latent = rng.standard_normal((k, 40), dtype=np.float32)
        X = latent @ basis + 0.3 * rng.standard_normal((k, D), dtype=np.float32)
        yield X, (np.tanh(latent) @ teacher).argmax(axis=1)


def make_store(folder: Path, rows: int) -> Path:
    """Write the store, if it does not exist."""
    from streamkern.store.writer import StoreWriter

    url = folder / f"train-{rows}.zarr"
    if url.exists():
        return url
    size = 2675  # 8 MiB of float32
    classes = [str(k) for k in range(C)]
    writer = StoreWriter(url, (D,), np.float32, C, classes, chunk_rows=size, n_rows=rows)
    for i, (X, y) in enumerate(blocks(rows, size)):
        writer.write_chunk(i, X, y)
    writer.finish()
    return url


def child(arguments: argparse.Namespace) -> None:
    """Train one run in this process, and print one JSON line."""
    import dask  # noqa: F401 - imported before the baseline is taken, as all imports are
    import sklearn.utils.validation  # noqa: F401

    from streamkern.config.run_config import RunConfig
    from streamkern.stream.sources.arrays import ArraySource
    from streamkern.train.resolve.resolved_run import open_run
    from streamkern.train.resolve.run_inputs import RunInputs
    from streamkern.train.train import train

    name = f"train-{arguments.rows}.zarr"
    data = {"train": str(arguments.folder / name)}
    if arguments.endpoint:
        options = {"key": "any", "secret": "any", "endpoint_url": arguments.endpoint}
        data = {"train": f"s3://{arguments.folder.name}/{name}", "storage_options": options}
    config = RunConfig.from_tables(
        {
            "data": {**data, "batch_size": arguments.batch or "auto", "scale": "none", "epochs": 1},
            "model": {"kernel": "laplace", "bandwidth": 20.0, "n_centers": arguments.centers},
            "solver": {"name": arguments.solver},
            "run": {
                "memory": arguments.memory,
                "device": "cpu",
                "run_dir": arguments.run_dir,
                "checkpoint_every": 200,
            },
        }
    )
    source = None
    if arguments.in_memory:
        parts = list(blocks(arguments.rows, 2675))
        X = np.concatenate([p[0] for p in parts])
        y = np.concatenate([p[1] for p in parts])
        source = ArraySource(X, y, classes=[str(k) for k in range(C)], unit_rows=2675)
        del parts
    planned = open_run(config, RunInputs(source))
    planned.backend.close()
    baseline = resident_bytes("VmRSS")
    began = time.perf_counter()
    result = train(config, source=source)
    seconds = time.perf_counter() - began
    result.model.backend.close()
    print(
        json.dumps(
            {
                "rows": arguments.rows,
                "planned_mib": planned.buffers.peak / 2**20,
                "peak_mib": (resident_bytes("VmHWM") - baseline) / 2**20,
                "phases": {n: planned.buffers.total(n) / 2**20 for n in planned.buffers.phases},
                "block_size": planned.sizes.block_size,
                "batch_size": result.meta["setup"]["batch_size"],
                "seconds": seconds,
                "loop": result.timing,
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_340_000)
    parser.add_argument("--centers", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=None)
    parser.add_argument("--memory", default="1 GiB")
    parser.add_argument("--solver", default="auto")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/streamkern-bench"))
    parser.add_argument("--run-dir", default=None)
    parser.add_argument("--in-memory", action="store_true")
    parser.add_argument("--s3", action="store_true")
    parser.add_argument("--endpoint", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true")
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    make_store(arguments.folder, arguments.rows)
    command = [sys.executable, "-m", "benchmarks.out_of_core", "--child", *sys.argv[1:]]
    if not arguments.s3:
        subprocess.run(command, check=True)
        return
    with FileServer(arguments.folder.resolve().parent, latency_s=0.04) as server:
        subprocess.run([*command, "--endpoint", server.endpoint], check=True)


if __name__ == "__main__":
    main()
