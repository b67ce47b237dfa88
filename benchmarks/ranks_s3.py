"""Measure how long each of two ranks waits for data from object storage with 40 ms a request.

    python -m benchmarks.ranks_s3 --json benchmarks/results/ranks_s3.json

More than 1.2e7 rows, each with its own noise, pass through two processes with one thread each.
They are `--copies` of a store, which is read again for each copy. `stall` is the share of the time
of its steps in which a rank waited for rows, and `waited` the share in which it waited for the
other rank.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import streamkern as sk
from benchmarks.harness import bandwidth, environment, json_parser, one_hot, points, write_results
from benchmarks.ranks import trained
from benchmarks.s3_files import FileServer
from streamkern.train.rank_work import prepare_run

LATENCY_S, BUCKET = 0.04, "bucket"
MOST_STALL = 0.05
D, CENTERS, BLOCK, BATCH, CHUNK_MB = 32, 512, 256, 4096, 1


def measure(rows: int, copies: int) -> dict[str, Any]:
    """Shares of the time of the steps, rank by rank."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / BUCKET).mkdir()
        X = points(rows, D, 1)
        sk.ingest_store(X, f"{folder}/{BUCKET}/train.zarr", y=one_hot(X), chunk_mb=CHUNK_MB)
        with FileServer(folder, LATENCY_S) as server:
            options = {"key": "any", "secret": "any", "endpoint_url": server.endpoint}
            config = sk.RunConfig.from_tables({
                "data": {
                    "train": f"s3://{BUCKET}/train.zarr", "storage_options": options,
                    "scale": "none", "epochs": 1, "batch_size": BATCH, "copies": copies,
                    "transforms": [{"kind": "noise", "sigma": 0.1}],
                },
                "model": {
                    "kernel": "laplace", "bandwidth": bandwidth(D), "n_centers": CENTERS,
                },
                "solver": {"name": "block", "block_size": BLOCK, "ridge": 1e-6},
                "run": {"run_dir": f"{folder}/run", "device": "cpu", "ranks": 2},
            })  # fmt: skip
            prepare_run(config)
            found = trained(config, 2)
    times = [each["timing"] for each in found]
    return {
        "rows": rows, "copies": copies, "latency_ms": 1e3 * LATENCY_S, "d": D, "centers": CENTERS,
        "samples": found[0]["samples"],
        "seconds": [each["loop_s"] for each in times],
        "stall": [each["stall_s"] / each["loop_s"] for each in times],
        "waited": [each["waited_s"] / each["loop_s"] for each in times],
    }  # fmt: skip


def main() -> int:
    parser = json_parser(__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--copies", type=int, default=61)
    args = parser.parse_args()
    here = environment()
    found = measure(args.rows, args.copies)
    print(json.dumps(found, indent=1))
    write_results(args.json, {"environment": here, **found})
    return int(max(found["stall"]) > MOST_STALL)


if __name__ == "__main__":
    sys.exit(main())
