"""SIGKILL a run at random instants, resume it, and compare every bit with an uninterrupted run.

    python -m benchmarks.kill_resume --kills 50
    python -m benchmarks.kill_resume --kills 10 --solver eigenpro4 --signal TERM

Each life of the run is a real process; it is killed at a uniformly random moment, also inside
setup, evaluation and checkpoint writes (a checkpoint every 3 steps makes those frequent).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

RUN = """
import sys
from streamkern.cli import main
sys.exit(main())
"""


def make_data(folder: Path) -> Path:
    """A store of 6 000 rows, 64 features, ten classes."""
    from streamkern.ingest import ingest

    url = folder / "train.zarr"
    if not url.exists():
        rng = np.random.default_rng(0)
        X = rng.standard_normal((6000, 64)).astype(np.float32)
        y = np.abs(X[:, :10]).argmax(axis=1)
        ingest(X, url, y=y, chunk_mb=0.25)
    return url


def run_file(folder: Path, name: str, **tables: dict[str, object]) -> Path:
    """A run file in which a life lasts long enough to be killed several times."""
    settings: dict[str, dict[str, object]] = {
        "data": {
            "train": str(folder / "train.zarr"),
            "test": str(folder / "train.zarr"),
            "copies": 8,
            "epochs": 2,
            "batch_size": 200,
            "transforms": [{"kind": "scale", "mode": "feature"}, {"kind": "noise", "sigma": 0.3}],
        },
        "model": {"kernel": "laplace", "bandwidth": 8.0, "n_centers": 1200},
        "solver": {},
        "run": {"run_dir": str(folder / name), "checkpoint_every": 3, "memory": "1 GiB"},
    }
    for table, entries in tables.items():
        settings[table] |= entries
    lines = []
    for table, entries in settings.items():
        lines.append(f"[{table}]")
        for key, value in entries.items():
            if isinstance(value, list):
                inner = ", ".join(
                    "{" + ", ".join(f"{k} = {json.dumps(v)}" for k, v in item.items()) + "}"
                    for item in value
                )
                lines.append(f"{key} = [{inner}]")
            else:
                lines.append(f"{key} = {json.dumps(value)}")
    path = folder / f"{name}.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def start(path: Path) -> subprocess.Popen[bytes]:
    """One life of the run."""
    return subprocess.Popen(
        [sys.executable, "-c", RUN, "train", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(path: Path) -> None:
    """A life that nobody disturbs."""
    process = start(path)
    _, errors = process.communicate()
    if process.returncode != 0:
        raise RuntimeError(errors.decode())


def killed_run(
    path: Path, kills: int, longest_s: float, seed: int = 0, number: int = signal.SIGKILL
) -> dict[str, int]:
    """Run `path` to its end through up to `kills` kills; counts of how its lives ended.

    A life that ends by itself (0) was not killed, and is the last.
    """
    draw = random.Random(seed)
    ended: dict[str, int] = {}
    for _ in range(kills):
        process = start(path)
        time.sleep(draw.uniform(0.3, longest_s))
        process.send_signal(number)
        _, errors = process.communicate()
        code = process.returncode
        if code not in (-signal.SIGKILL, 75, -signal.SIGTERM, 0):
            raise RuntimeError(f"exit code {code}: {errors.decode()}")
        ended[str(code)] = ended.get(str(code), 0) + 1
        if code == 0:
            break
    finish(path)
    return ended


def final_arrays(run_dir: Path) -> dict[str, np.ndarray]:
    """Every array of the last checkpoint."""
    from streamkern.checkpoint import RunDirectory

    with RunDirectory(run_dir, writable=False) as run:
        saved = run.load_latest()
    assert saved is not None
    assert saved.meta["position"]["done"]
    return saved.arrays


def differing(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> list[str]:
    """Names of the arrays that are not equal bit for bit."""
    return [k for k in sorted(a.keys() | b.keys()) if a[k].tobytes() != b[k].tobytes()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--solver", default="block")
    parser.add_argument("--signal", choices=["KILL", "TERM"], default="KILL")
    parser.add_argument("--epochs", type=int, default=12, help="enough to outlive the kills")
    parser.add_argument("--longest", type=float, default=4.0, help="seconds before a kill")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/streamkern-bench/kill"))
    arguments = parser.parse_args()
    shutil.rmtree(arguments.folder, ignore_errors=True)
    arguments.folder.mkdir(parents=True)
    make_data(arguments.folder)
    solver: dict[str, object] = {"name": arguments.solver}
    data: dict[str, object] = {"epochs": arguments.epochs}
    plain = run_file(arguments.folder, "plain", solver=solver, data=data)
    killed = run_file(arguments.folder, "killed", solver=solver, data=data)
    began = time.perf_counter()
    finish(plain)
    whole_s = time.perf_counter() - began
    number = signal.Signals[f"SIG{arguments.signal}"]
    ended = killed_run(killed, arguments.kills, arguments.longest, number=number)
    folder = arguments.folder
    different = differing(final_arrays(folder / "plain"), final_arrays(folder / "killed"))
    report = {
        "solver": arguments.solver,
        "kills": ended,
        "uninterrupted_s": round(whole_s, 2),
        "different_arrays": different,
    }
    print(json.dumps(report))
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
