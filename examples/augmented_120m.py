"""120 million samples through 60 000 centers, after Fig. 6 of EP3 (arXiv 2302.02605).

    python examples/augmented_120m.py                          a stand-in for FashionMNIST
    python examples/augmented_120m.py --data fashion-mnist     IDX files, plain or .gz
    python examples/augmented_120m.py --replicas 20            fewer samples
    python examples/augmented_120m.py --centers 5000           a smaller model
    python examples/augmented_120m.py --block-size 15000       less setup and memory

Every training image is a center. The samples are 2000 replicas of the images with Gaussian noise.
No replica is stored: the images are sent to the device as uint8, which scales them and draws the
noise. EP3 states neither the bandwidth nor the noise of its figure. Here pixels are scaled to mean
0 and standard deviation 1, and `--sigma` and `--bandwidth` are in these units.

`--data` is a folder with the four files of MNIST or a similar data set, under their usual names.
They are written to Zarr stores once. All centers train within 1 GiB, in blocks of 469. Larger
blocks need more memory (`streamkern plan`; 56 GiB for a single block). The run then needs fewer
samples, but setup and each step take longer.

On a CPU the time is first estimated by short runs on the test images. If it exceeds
`--max-minutes`, the script ends with an error that suggests options that fit. The same command
resumes a run that was stopped or killed.
"""

from __future__ import annotations

import argparse
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from scipy.ndimage import zoom

import streamkern as sk
from streamkern.basics.text import text_table
from streamkern.cli.overview import plan_overview
from streamkern.cli.runs import show_evaluation
from streamkern.rundir.run_log import read_log
from streamkern.train.resolve.resolved_run import open_run
from streamkern.train.resolve.training_data import open_test

Stores = tuple[Path, Path]


def idx_file(folder: Path, name: str) -> Path:
    """Return the file `name` or `name`.gz in a folder; `?` in the name is a hyphen or a dot."""
    found = [path for ending in ("", ".gz") for path in folder.glob(name + ending)]
    if not found:
        name = name.replace("?", "-")
        raise sk.DataError(f"there is no {name} or {name}.gz in {folder}, which --data needs")
    return found[0]


def stand_in(n: int, part: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images (n, 28, 28) uint8 and labels (n,) uint8, the same in every call.

    An image is a mixture of six smooth patterns of its class and 24 patterns of all classes,
    shifted to one of 25 positions, with pixel noise. Linear regression classifies three quarters of
    the test images correctly.

    part : number of the part, such as training or test; it is a part of the seed.
    """
    coarse = np.random.default_rng([0, 0]).standard_normal((84, 7, 7))
    smooth = zoom(coarse, (1, 32 / 7, 32 / 7), order=3).astype(np.float32).reshape(84, -1)
    own, shared = smooth[:60].reshape(10, 6, -1), smooth[60:]
    rng = np.random.default_rng([0, 1, part])
    y = rng.integers(0, 10, n, dtype=np.uint8)
    X = np.empty((n, 28, 28), np.uint8)
    for labels, images in zip(*(np.split(a, range(5000, n, 5000)) for a in (y, X)), strict=True):
        m = len(labels)
        mixed = rng.standard_normal((m, 24), dtype=np.float32) @ shared * 0.25
        mixed += np.einsum("ms,msk->mk", rng.dirichlet(np.full(6, 0.6), m), own[labels])
        places = np.lib.stride_tricks.sliding_window_view(
            mixed.reshape(m, 32, 32), (28, 28), axis=(1, 2)
        )
        clean = places[np.arange(m), rng.integers(0, 5, m), rng.integers(0, 5, m)]
        noisy = clean + 0.25 * rng.standard_normal(clean.shape, dtype=np.float32)
        images[...] = 255 / (1 + np.exp(1 - 2 * noisy))
    return X, y


def write_stores(folder: Path, data: Path | None) -> Stores:
    """Return the stores of training and test images, and write those that are not complete."""
    name = "stand-in" if data is None else f"{data.name}-{crc32(bytes(data.resolve())):08x}"
    stores = folder / name / "train.zarr", folder / name / "test.zarr"
    for part, (store, prefix) in enumerate(zip(stores, ("train", "t10k"), strict=True)):
        try:
            sk.open_store(store)
            continue
        except sk.DataError:  # missing, or unfinished: `ingest_store` goes on with it
            store.parent.mkdir(parents=True, exist_ok=True)
        X: Any
        y: Any
        if data is None:
            X, y = stand_in(10_000 if part else 60_000, part)
        else:
            X, y = (idx_file(data, f"{prefix}-{k}-ubyte") for k in ("images?idx3", "labels?idx1"))
        spec = sk.ingest_store(X, store, y=y, targets="classes")
        print(f"{store}: {spec.n_rows:,} images of {spec.row_shape} {spec.x_dtype}")
    return stores


def run_directory(options: argparse.Namespace) -> Path:
    """Return the run directory. Each size has its own, so that runs do not exclude each other."""
    folder: Path = options.folder
    blocks = f"-in-{options.block_size}s" if options.block_size else ""
    return folder / f"run-{options.replicas}-replicas-{options.centers or 'all'}-centers{blocks}"


def make_config(options: argparse.Namespace, stores: Stores) -> sk.RunConfig:
    """Return the settings of the run; streamkern chooses all other settings."""
    centers = {"centers": "all"} if options.centers is None else {"n_centers": options.centers}
    blocks = {} if options.block_size is None else {"block_size": options.block_size}
    return sk.RunConfig.from_tables(
        {
            "data": {
                "train": stores[0],
                "test": stores[1],
                "copies": options.replicas,
                "epochs": 1,
                "transforms": [{"kind": "scale"}, {"kind": "noise", "sigma": options.sigma}],
            },
            "model": {
                "kernel": "laplace",
                "bandwidth": options.bandwidth,
                "fit_intercept": False,  # as in EP3
                **centers,
            },
            "solver": {"name": "block", **blocks},  # whose time is that of its steps
            "run": {
                "run_dir": run_directory(options),
                "device": options.device,
                "precision": options.precision,
                "checkpoint_every": "10 s",
                "calibrate": False,  # every image is a center
                "evaluate_every": 0,
            },
        }
    )


def make_plan(config: sk.RunConfig) -> dict[str, Any]:
    """Return the plan of the run, as `streamkern plan` shows it: sizes, memory, FLOPs."""
    run = open_run(config)
    try:
        test = open_test(config, run.data)
        return plan_overview(run) | {"n_test": test.n_rows if test is not None else 0}
    finally:
        run.backend.close()


def measure(config: sk.RunConfig) -> tuple[float, float]:
    """Measure the seconds per sample with hardly any centers, and the FLOP/s with many.

    Each measurement is a run over one noisy replica of the test images, after a run to warm up.
    """
    n, rates = make_plan(config)["n_test"], []
    for n_centers in (min(100, n), min(100, n), min(8000, n)):
        probe = config.with_overrides(
            {"data.train": config.data.test, "data.test": None, "data.copies": 1,
             "model.centers": "random", "model.n_centers": n_centers,
             "solver.block_size": min(256, n_centers), "run.run_dir": None}
        )  # fmt: skip
        result = sk.train_model(probe)
        result.model.backend.close()
        loop_s = result.timing["loop_s"]
        rates.append((loop_s / n, make_plan(probe)["flops"]["training"] / loop_s))
    return rates[1][0], rates[2][1]


def estimate(config: sk.RunConfig, rates: tuple[float, float]) -> timedelta:
    """Estimate the time of setup, samples (2 p (d + 3 c) FLOPs each) and evaluations."""
    plan = make_plan(config)
    problem, flops = plan["problem"], sum(plan["flops"].values())
    row = 2 * problem["centers"] * (problem["features"] + problem["outputs"])
    flops += row * plan["n_test"] * (1 + len(shown_at(1, config.data.copies)))
    return timedelta(seconds=round(problem["rows_per_epoch"] * rates[0] + flops / rates[1]))


def shown_at(n_images: int, replicas: int) -> list[int]:
    """Return the samples in 1, 10, 100, ... replicas, below all: the points of Fig. 6."""
    return [n_images * 10**k for k in range(9) if 10**k < replicas]


def check_time(options: argparse.Namespace, stores: Stores, plan: dict[str, Any]) -> None:
    """Print the expected time; raise an error if it is too long, with options that fit."""
    n, p = plan["problem"]["rows_per_epoch"], plan["problem"]["centers"]
    rates = measure(make_config(options, stores))
    takes = estimate(make_config(options, stores), rates)
    text = f"{n:,} samples through {p:,} centers take about {takes} (h:min:s) on this CPU"
    print(f"{text}, at the {rates[1] / 1e9:.0f} GFLOP/s of a short run", flush=True)
    limit = timedelta(minutes=options.max_minutes)
    if takes <= limit or options.yes:
        return
    ways = []
    for name, now in (("replicas", options.replicas), ("centers", p)):
        for size in (k * 10**e for e in range(6, -1, -1) for k in (5, 2, 1) if k * 10**e < now):
            smaller = argparse.Namespace(**(vars(options) | {name: size}))
            takes = estimate(make_config(smaller, stores), rates)
            if takes <= limit:
                ways.append(f"--{name} {size} ({takes})")
                break
    raise sk.ConfigError(
        f"{text}, more than --max-minutes {options.max_minutes:g}; give "
        f"{', or '.join([*ways, '--yes to run it all the same'])}"
    )


def results(run_dir: Path, n_images: int) -> list[dict[str, Any]]:
    """Return one row for each evaluation.

    seconds : time in the training loop, evaluations included, over all resumes of the run.
    """
    rows: dict[int, dict[str, Any]] = {}
    spent, last = 0.0, 0.0
    for record in read_log(run_dir / "log.jsonl"):
        now = datetime.fromisoformat(record["time"]).timestamp()
        spent += 0.0 if record["event"] == "resume" else now - last
        last = now
        if record["event"] == "start":
            spent, rows = 0.0, {}
        samples = record["samples"]
        if record["event"] == "evaluation" and samples not in rows:
            rows[samples] = {
                "replicas": f"{samples / n_images:.4g}",
                "samples": samples,
                "test accuracy": f"{record['test_accuracy']:.4f}",
                "test MSE": f"{record['test_mse']:.5f}",
                "samples/s": round(samples / max(spent, 1e-3)),
                "seconds": f"{spent:.1f}",
            }
    return [rows[n] for n in sorted(rows)]


def run(options: argparse.Namespace) -> None:
    """Write the stores, estimate the time, train, and print the table."""
    stores = write_stores(options.folder, options.data)
    config, run_dir = make_config(options, stores), run_directory(options)
    plan = make_plan(config)
    if plan["device"] == "cpu" and not (run_dir / "run.json").exists():
        check_time(options, stores, plan)
    n_images = plan["problem"]["rows_per_epoch"] // options.replicas
    config = config.with_overrides({"run.evaluate_at": shown_at(n_images, options.replicas)})
    sk.train_model(config, progress=True, on_evaluation=show_evaluation).model.backend.close()
    rows = results(run_dir, n_images)
    print(f"\n{text_table(rows, list(rows[0]))}\n\nthe model is in {run_dir}")


def main(arguments: list[str] | None = None) -> int:
    """Run the example; return 0 at its end, or the exit code of a failed command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, help="folder of IDX files; without it a stand-in is made")
    add("--folder", type=Path, default=Path("runs/augmented"), help="for the stores and the run")
    add("--replicas", type=int, default=2000, help="noisy copies of every image (default 2000)")
    add("--centers", type=int, help="so many random images as centers (default: all)")
    add("--block-size", type=int, help="centers of a block (default: chosen)")
    add("--sigma", type=float, default=0.3, help="deviation of the noise (default 0.3)")
    add("--bandwidth", type=float, default=20.0, help="of the Laplace kernel (default 20)")
    add("--device", default="auto", help="auto, cpu, gpu or gpu:N")
    add("--precision", default="auto", help="as run.precision in a run file")
    add("--max-minutes", type=float, default=60, help="refuse longer runs on a CPU (default 60)")
    add("--yes", action="store_true", help="run it however long it takes")
    try:
        run(parser.parse_args(arguments))
    except sk.StreamkernError as error:
        print(f"augmented_120m: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
