"""A cluster on this machine, for ranks that share its cores."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from streamkern.basics.machine import available_cpus
from streamkern.basics.optional import need
from streamkern.stream.cluster import connect

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@contextlib.contextmanager
def local_cluster(ranks: int, threads: int | None = None) -> Iterator[Any]:
    """A client of `ranks` workers here, a process each, that end with the block or this process.

    threads : of each; by default its share of the cores.
    """
    share = threads or max(1, available_cpus() // ranks)
    make = need("distributed", "a run of several ranks", "ranks").LocalCluster
    cluster = make(
        n_workers=ranks,
        threads_per_worker=share,
        processes=True,
        memory_limit=None,  # or their nannies would pause and kill trainers
        dashboard_address="127.0.0.1:0",
        silence_logs=logging.CRITICAL,
        env=dict.fromkeys(_THREADS, str(share)),
    )
    with cluster, connect(cluster.scheduler_address) as client:
        yield client
