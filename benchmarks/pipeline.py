"""What streaming costs: training from the store against the same batches already in memory.

    python -m benchmarks.pipeline --rows 60000 --repeats 3

p = 10 000, d = 784, c = 10, the default solver. The two take turns in one process; quoted are the
medians and their ratio, and the share of the loop spent waiting for data.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

from benchmarks.out_of_core import make_store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--centers", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", default="4 GiB")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/streamkern-bench"))
    arguments = parser.parse_args()
    from streamkern.assemble import start
    from streamkern.config import RunConfig
    from streamkern.feed import Feed
    from streamkern.prefetch import Loader
    from streamkern.problem import open_run

    arguments.folder.mkdir(parents=True, exist_ok=True)
    config = RunConfig.from_tables(
        {
            "data": {"train": str(make_store(arguments.folder, arguments.rows))},
            "model": {"bandwidth": 20.0, "n_centers": arguments.centers},
            "run": {"memory": arguments.memory, "device": "cpu"},
        }
    )
    run = open_run(config)
    began = time.perf_counter()
    made = start(run, report=lambda event, fields: None)
    setup_s = time.perf_counter() - began

    def epoch(keep: bool) -> list[tuple[np.ndarray, np.ndarray]]:
        kept = []
        loader = Loader(
            run.data.source,
            batch_size=made.batch_size,
            seed=0,
            block_bytes=run.sizes.loader_block_bytes,
            in_flight_bytes=run.sizes.loader_in_flight_bytes,
        )
        state = made.solver.init()
        with loader, Feed(loader, run.backend, dtype=np.float32, seed=0) as feed:
            for i, batch in enumerate(feed.epoch(0)):
                if keep:
                    kept.append((batch.X.copy(), batch.Y.copy()))
                else:
                    made.solver.step(state, batch.X, batch.Y, batch.rows, i)
            stalls.append(loader.stats.stall_s)
        return kept

    def in_memory() -> None:
        state = made.solver.init()
        for i, (X, Y) in enumerate(batches):
            made.solver.step(state, X, Y, np.arange(len(X)), i)

    stalls: list[float] = []
    batches = epoch(keep=True)
    times: dict[str, list[float]] = {"store": [], "memory": []}
    in_memory()
    for _ in range(arguments.repeats):
        for name, work in (("memory", in_memory), ("store", lambda: epoch(keep=False))):
            began = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - began)
    store, memory = (statistics.median(times[k]) for k in ("store", "memory"))
    print(
        json.dumps(
            {
                "rows": arguments.rows,
                "batch_size": made.batch_size,
                "block_size": run.sizes.block_size,
                "setup_s": round(setup_s, 2),
                "samples_per_s": {
                    "store": arguments.rows / store,
                    "memory": arguments.rows / memory,
                },
                "store_over_memory": store / memory,
                "ratios": [a / b for a, b in zip(times["store"], times["memory"], strict=True)],
                "stall_share": statistics.median(stalls[1:]) / store,
            }
        )
    )
    run.backend.close()


if __name__ == "__main__":
    main()
