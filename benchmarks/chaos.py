"""Test everything that streamkern does on object storage, while a fifth of the requests fail.

    python -m benchmarks.chaos --faults 10000 --json chaos.json
    python -m benchmarks.chaos --faults 2000 --engine s3fs --seed 7 --only train checkpoint

An S3 server, and a proxy that injects faults, run in processes of their own. Rounds of workloads
run until the requested number of faults was injected. Each workload compares its result with a
local reference, byte for byte:

    ingest      arrays, and raw files from S3 to S3; the second ingest is killed and resumed
    read        epochs through a BatchReader, and read_chunk on eight threads
    list        listings, descriptions and a verification
    checkpoint  saves and loads of a run directory, from two processes
    train       a run with data, test data and run directory on S3, killed and resumed
    predict     a model from S3, and predictions to S3
    stall       connections that stay silent for longer than the limit, and have to be closed

If a workload takes more than `--limit` seconds, the run ends with the stack of every thread. The
same rounds without faults, in another process, show the memory of the work: with faults it may be
a tenth and 32 MiB more. The exit code is 1 if anything was wrong. Needs the packages of `pip
install -e . --group dev`, and Linux for the memory.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import multiprocessing
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos_workloads import WORKLOADS, Place, make_truth, upload_truth
from benchmarks.harness import (
    REPOSITORY,
    SCHEMA,
    WrongResult,
    environment,
    json_parser,
    write_results,
)
from benchmarks.resident import resident_bytes
from tests.fault_proxy import FaultProxy
from tests.s3_server import S3Server

MODULE = "benchmarks.chaos"
ENGINES = ("obstore", "s3fs")
# One fault in a row of all that may pass, or two without `expired`: credentials are read again
# once in a row, and then the answer counts.
FAULTS = {
    "refuse": 0.02, "reset": 0.025, "truncate": 0.025, "shorten": 0.03, "badbytes": 0.03,
    "stall": 0.01, "slowdns": 0.02, "error500": 0.03, "error503": 0.03, "slowdown": 0.02,
    "badupload": 0.03, "lostreply": 0.03,
}  # fmt: skip
MIXES: tuple[dict[str, Any], ...] = (
    {"faults": FAULTS, "max_consecutive": 2},
    {"faults": {**FAULTS, "expired": 0.01}, "max_consecutive": 1},
)
QUICK = {"refuse_s": 0.005, "slow_s": 0.1, "stall_s": 0.3}
MORE_MEMORY, MORE_MIB = 1.1, 32.0
LIMIT_S = 300.0


@dataclass
class Tally:
    """Counts of the rounds so far."""

    faults: Counter[str] = field(default_factory=Counter)
    by_method: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    workloads: int = 0
    wrong: list[str] = field(default_factory=list)

    def take(self, proxy: FaultProxy) -> None:
        """Add the requests since the last time."""
        for method, _, fault in proxy.log():
            self.requests[method] += 1
            if fault is not None:
                self.faults[fault] += 1
                self.by_method[f"{method} {fault}"] += 1


def chaos(
    faults: int,
    *,
    engines: Sequence[str] = ENGINES,
    only: Sequence[str] = tuple(WORKLOADS),
    seed: int = 0,
    limit_s: float = LIMIT_S,
    mixes: Sequence[dict[str, Any]] = MIXES,
) -> dict[str, Any]:
    """Run rounds of workloads, at least one, until `faults` were injected; return counts."""
    tally, began = Tally(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder, S3Server() as server:
        truth = make_truth(Path(folder))
        upload_truth(truth, server)
        with FaultProxy(server.endpoint, seed=seed, **QUICK) as proxy:
            for n, engine, name in _order(engines, only):
                if n > 0 and sum(tally.faults.values()) >= faults:
                    break
                options = {"engine": engine, **server.options(proxy.endpoint)}
                key, draw = f"{n}/{engine}/{name}", random.Random(f"{seed} {n} {engine} {name}")
                place = Place(truth, server, options, key, proxy, limit_s, draw)
                proxy.set(**QUICK, limit=None, **(mixes[n % len(mixes)]))
                _one(place, name, tally)
                if faults:
                    print(f"{key}: {sum(tally.faults.values())} faults", flush=True)
            n_open = connections_to(proxy.port)
    return {
        "seed": seed, "engines": list(engines), "only": list(only), "asked": faults,
        "faults_total": sum(tally.faults.values()), "requests_total": sum(tally.requests.values()),
        "faults": dict(tally.faults), "faults_by_method": dict(sorted(tally.by_method.items())),
        "requests": dict(tally.requests), "workloads": tally.workloads,
        "connections_left": n_open, "seconds": round(time.monotonic() - began, 1),
        "seconds_by_workload": {k: round(s, 1) for k, s in tally.seconds.items()},
        "peak_mib": resident_bytes("VmHWM") / 2**20 or None, "wrong": tally.wrong,
    }  # fmt: skip


def _order(engines: Sequence[str], only: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """Round, engine, workload, without end; stalls take long and come in the first round only."""
    n, names = 0, only
    while names:
        yield from ((n, engine, name) for engine in engines for name in names)
        n, names = n + 1, [name for name in only if name != "stall"]


def _one(place: Place, name: str, tally: Tally) -> None:
    """Run a workload within its time limit, and check that it leaves no threads or files."""
    began, threads = time.monotonic(), set(threading.enumerate())
    with watchdog(place.limit_s):
        try:
            WORKLOADS[name](place)
        except Exception as error:  # counted and shown: the other workloads go on
            notes = "; ".join(getattr(error, "__notes__", ()))
            tally.wrong.append(f"{place.key}: {type(error).__name__}: {error} {notes}".strip())
            print(f"WRONG: {tally.wrong[-1]}", flush=True)
    ours = [t for t in threading.enumerate() if t not in threads and is_ours(t)]
    for thread in ours:
        thread.join(5.0)  # one that was told to end may be on its last lines
    names = [t.name for t in ours if t.is_alive()]
    if names or multiprocessing.active_children():
        tally.wrong.append(f"{place.key}: left {names} {multiprocessing.active_children()}")
    tally.workloads += 1
    tally.seconds[name] += time.monotonic() - began
    tally.take(place.proxy)


def is_ours(thread: threading.Thread) -> bool:
    """Return whether streamkern started the thread; threads of libraries stay alive."""
    return thread.name.startswith("streamkern")


@contextlib.contextmanager
def watchdog(limit_s: float) -> Iterator[None]:
    """End this process, and print the stack of every thread, if the work takes longer."""
    faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def connections_to(port: int, patience_s: float = 10.0) -> int:
    """Connections of this process to a port of this machine that stay open.

    A pool is closed in the background once nothing refers to its file system or store.
    """
    import psutil

    give_up = time.monotonic() + patience_s
    while True:
        gc.collect()
        connections = psutil.Process().net_connections("tcp")
        n_open = sum(c.status == "ESTABLISHED" and c.raddr[1] == port for c in connections)
        if not n_open or time.monotonic() > give_up:
            return n_open
        time.sleep(0.1)


def plain_peak_mib(engines: Sequence[str], only: Sequence[str], limit_s: float) -> float:
    """Return the peak memory of one round without faults, in a process of its own."""
    command = [sys.executable, "-m", MODULE, "--plain", "--limit", str(limit_s), "--engine"]
    command += ["both" if len(engines) > 1 else engines[0], "--only", *only]
    completed = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    if completed.returncode:
        raise WrongResult(
            f"a round without faults: {completed.stdout[-2000:]} {completed.stderr[-2000:]}"
        )
    return float(json.loads(completed.stdout.splitlines()[-1])["peak_mib"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rounds; return 0 if there was no failure."""
    parser = json_parser(__doc__, f"python -m {MODULE}")
    parser.add_argument("--faults", type=int, default=10_000)
    parser.add_argument("--engine", choices=(*ENGINES, "both"), default="both")
    parser.add_argument("--only", nargs="+", choices=tuple(WORKLOADS), default=tuple(WORKLOADS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for one workload")
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    engines = ENGINES if args.engine == "both" else (args.engine,)
    if args.plain:
        only = [name for name in args.only if name != "stall"]
        results = chaos(0, engines=engines, only=only, limit_s=args.limit, mixes=[{}])
        print(json.dumps(results))
        return 1 if results["wrong"] else 0
    plain = plain_peak_mib(engines, args.only, args.limit)
    results = chaos(
        args.faults, engines=engines, only=args.only, seed=args.seed, limit_s=args.limit
    )
    results |= {"schema": SCHEMA, "plain_peak_mib": plain, **environment()}
    if results["peak_mib"] > MORE_MEMORY * plain + MORE_MIB:
        results["wrong"].append(
            f"memory: {results['peak_mib']:.0f} MiB, {plain:.0f} without faults"
        )
    print(json.dumps({k: v for k, v in results.items() if k != "machine"}, indent=1))
    write_results(args.json, results)
    return 1 if results["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
