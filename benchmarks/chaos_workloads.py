"""The workloads of `chaos`: each does one thing on object storage and compares it with truth."""

from __future__ import annotations

import contextlib
import faulthandler
import gzip
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import WrongResult, check
from tests.fault_proxy import FaultProxy
from tests.s3_server import S3Server

LONG_STALLS = {"faults": {"stall": 0.2}, "limit": 12, "max_consecutive": 1, "stall_s": 90.0}
ROWS, D, CLASSES, CHUNK_ROWS = 1200, 16, 3, 40
CHUNK_MB = CHUNK_ROWS * D * 4 / 2**20
KILLS, LONGEST_LIFE_S = 2, 4.0


@dataclass
class Truth:
    """Reference results, computed without S3 in `folder`."""

    folder: Path
    X: np.ndarray
    y: np.ndarray
    fingerprint: str = ""
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    values: np.ndarray = field(default_factory=lambda: np.empty(0))


@dataclass
class Place:
    """A prefix in a bucket behind the proxy, with a name that was not used before."""

    truth: Truth
    server: S3Server
    options: dict[str, Any]  # through the proxy
    key: str
    proxy: FaultProxy
    limit_s: float
    draw: random.Random

    @property
    def url(self) -> str:
        return f"s3://{self.server.bucket}/{self.key}"

    @property
    def data(self) -> str:
        return f"s3://{self.server.bucket}/truth"

    def upload(self, name: str, data: bytes) -> str:
        """Put an object past the proxy; its URL."""
        key = f"{self.key}/{name}"
        self.server.client().put_object(Bucket=self.server.bucket, Key=key, Body=data)
        return f"s3://{self.server.bucket}/{key}"


# ------------------------------------------------------------------------------------- the truth


def make_truth(folder: Path) -> Truth:
    """Write a store, a finished run and its predictions to the local disk."""
    import streamkern as sk

    rng = np.random.default_rng(0)
    X = rng.standard_normal((ROWS, D)).astype(np.float32)
    y = np.abs(X[:, :CLASSES]).argmax(axis=1)
    spec = sk.ingest_store(X, folder / "train.zarr", y=y, chunk_mb=CHUNK_MB)
    truth = Truth(folder, X, y, spec.fingerprint)
    data = {"train": str(folder / "train.zarr"), "test": str(folder / "train.zarr")}
    result = sk.train_model(sk.RunConfig.from_tables(run_tables(data, str(folder / "run"))))
    with result.model.backend:
        result.model.predict_to(sk.ZarrSource(folder / "train.zarr"), str(folder / "predicted"))
    truth.weights = last_arrays(str(folder / "run"), None)
    truth.values = predictions(folder / "predicted")
    return truth


def run_tables(data: dict[str, Any], run_dir: str) -> dict[str, dict[str, Any]]:
    """Return the settings of a run of 24 steps an epoch, with a checkpoint after every fourth
    step."""
    noise = {"transforms": [{"kind": "noise", "sigma": 0.1}]}
    data = {"batch_size": 30, "epochs": 2, "scale": "none", **noise, **data}
    return {
        "data": data,
        "model": {"bandwidth": 4.0, "n_centers": 120},
        "solver": {"name": "eigenpro4", "n_nystrom": 100, "period": 4},
        "run": {
            "run_dir": run_dir, "checkpoint_every": 4, "evaluate_every": 20, "device": "cpu",
            "threads": 1, "memory": "1 GiB",
        },
    }  # fmt: skip


def last_arrays(url: str, options: dict[str, Any] | None) -> dict[str, np.ndarray]:
    """Return every array of the last checkpoint of a finished run."""
    from streamkern.rundir.run_directory import RunDirectory

    with RunDirectory(url, writable=False, storage_options=options) as run:
        saved = run.load_latest()
    check(saved is not None and saved.meta["position"]["done"], "the end of the run")
    assert saved is not None
    return saved.arrays


def predictions(url: Any, options: dict[str, Any] | None = None) -> np.ndarray:
    """Return predicted values and labels, side by side."""
    import zarr

    from streamkern.filesystem.urls import zarr_store

    group: Any = zarr.open_group(zarr_store(url, storage_options=options), mode="r")
    check(group.attrs["streamkern"]["status"] == "complete", "the end of the predictions")
    return np.column_stack([group["values"][:], group["labels"][:]])


def upload_truth(truth: Truth, server: S3Server) -> None:
    """Copy the store and the run to the server, without the fault proxy."""
    for name in ("train.zarr", "run"):
        for path in (truth.folder / name).rglob("*"):
            if path.is_file():
                key = f"truth/{path.relative_to(truth.folder).as_posix()}"
                server.client().put_object(
                    Bucket=server.bucket, Key=key, Body=path.read_bytes()
                )  # fmt: skip


# ------------------------------------------------------------------------------------- workloads


def ingest(place: Place) -> None:
    """Ingest arrays to S3, and from S3 to S3 with kills."""
    import streamkern as sk

    truth = place.truth
    options: dict[str, Any] = {"storage_options": place.options, "chunk_mb": CHUNK_MB}
    sk.ingest_store(truth.X, f"{place.url}/arrays", y=truth.y, **options)
    same_store(place, "arrays")
    lines = np.column_stack([truth.X.astype(str), truth.y.astype(str)])
    text = "\n".join(",".join(line) for line in [[f"x{i}" for i in range(D)] + ["y"], *lines])
    raw = place.upload("rows.csv.gz", gzip.compress(text.encode(), 1))
    plain = {k: v for k, v in place.options.items() if k not in ("key", "secret")}
    given = [f"--storage-option={name}={value}" for name, value in plain.items()]
    command = ["ingest", raw, f"{place.url}/csv", "--y=y", f"--chunk-mb={CHUNK_MB}", *given]
    lives(place, command)
    same_store(place, "csv")


def same_store(place: Place, name: str) -> None:
    """Check every byte of a written store, read without the fault proxy."""
    import streamkern as sk

    options = {**place.options, "endpoint_url": place.server.endpoint}
    store = sk.open_store(f"{place.url}/{name}", storage_options=options)
    store.verify()
    check(store.spec.fingerprint == place.truth.fingerprint, f"the store from {name}")
    truth = sk.open_store(place.truth.folder / "train.zarr")
    for i in range(truth.n_chunks):
        same(store.read_chunk(i), truth.read_chunk(i), f"chunk {i} of the store from {name}")


def read(place: Place) -> None:
    """Read two epochs in batches, and every chunk twice on eight threads."""
    import streamkern as sk
    from streamkern.stream.batch_reader import BatchReader

    url, local = f"{place.data}/train.zarr", sk.ZarrSource(place.truth.folder / "train.zarr")
    settings = {"batch_size": 70, "seed": 3, "block_bytes": 1 << 17}
    source = sk.ZarrSource(url, storage_options=place.options)
    with BatchReader(source, **settings) as ours, BatchReader(local, **settings) as theirs:
        for i, (a, b) in enumerate(zip(ours.epochs(0, 2), theirs.epochs(0, 2), strict=True)):
            same(a.arrays, b.arrays, f"batch {i} of two epochs")
    store = sk.open_store(url, storage_options=place.options)
    truth = sk.open_store(place.truth.folder / "train.zarr")

    def one(i: int) -> None:
        same(store.read_chunk(i), truth.read_chunk(i), f"chunk {i}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, [*range(truth.n_chunks)] * 2))


def list_all(place: Place) -> None:
    """List a store, open it, and verify its chunks."""
    import streamkern as sk
    from streamkern.cli.run_info import run_overview
    from streamkern.filesystem.urls import open_objects
    from streamkern.store.describe import describe_store

    root = place.truth.folder
    names = {
        f"{name}/{path.relative_to(root / name).as_posix()}": path.stat().st_size
        for name in ("train.zarr", "run")
        for path in (root / name).rglob("*")
        if path.is_file()
    }
    objects = open_objects(place.data, storage_options=place.options)
    for _ in range(20):
        check(dict(objects.list()) == names, "a listing")
        chunk_names = {key for key in names if key.startswith("train.zarr/X/")}
        check(
            {key for key, _ in objects.list("train.zarr/X")} == chunk_names, "a listing of a folder"
        )
        check(objects.stat("train.zarr/zarr.json")[0] == names["train.zarr/zarr.json"], "a size")
    store = sk.open_store(f"{place.data}/train.zarr", storage_options=place.options)
    local = sk.open_store(root / "train.zarr")
    found, expected = describe_store(store, exact=True), describe_store(local)
    differ = {key for key in expected if found[key] != expected[key]}
    check(differ <= {"url", "warnings"}, f"a description ({differ})")
    check(store.stored_chunks.absent_chunks() == 0, "the count of absent chunks")
    store.verify()
    run = run_overview(f"{place.data}/run", place.options)
    check(run["state"] == "finished" and not run["warnings"], "the overview of a run")


def checkpoint(place: Place) -> None:
    """Saves and loads by two writers, one after another."""
    from streamkern.rundir.run_directory import RunDirectory

    rng, step = np.random.default_rng(1), 0
    arrays = {"a": rng.standard_normal((300, 7)), "b": rng.integers(0, 9, 50), "c": np.array(1.5)}
    for life in range(2):
        with RunDirectory(place.url, storage_options=place.options) as run, run.open_log() as log:
            run.write_config({"name": "chaos"})
            run.save_setup(arrays, {"life": life})
            for _ in range(6):
                step += 1
                arrays["a"] += 1
                log.write(step=step, epoch=0, samples=step)
                run.save(step, arrays, {"step": step})
                saved = run.load_latest()
                check(saved is not None and saved.step == step, f"checkpoint {step}")
                assert saved is not None
                check(not saved.skipped, f"damaged checkpoints ({saved.skipped})")
                same(saved.arrays.values(), arrays.values(), f"checkpoint {step}")
            setup = run.load_setup()
            check(setup is not None and setup.meta == {"life": life}, "the setup")
            check(run.read_config() == {"name": "chaos"}, "the configuration")
            records, damage = run.read_log()
            check([r["step"] for r in records] == [*range(1, step + 1)], "the run log")
            check(damage is None, f"a damaged log ({damage})")


def train(place: Place) -> None:
    """Train a run in several processes, one after another; the last one is this process."""
    import streamkern as sk

    url = f"{place.data}/train.zarr"
    data = {"train": url, "test": url, "storage_options": place.options}
    config = sk.RunConfig.from_tables(run_tables(data, f"{place.url}/run"))
    lives(place, ["train", config])
    sk.train_model(config).model.backend.close()
    options = {**place.options, "endpoint_url": place.server.endpoint}
    arrays = last_arrays(f"{place.url}/run", options)
    check(arrays.keys() == place.truth.weights.keys(), "the names of the last checkpoint")
    same(arrays.values(), [place.truth.weights[name] for name in arrays], "the last checkpoint")


def predict(place: Place) -> None:
    """Read a model and rows from S3, and write predictions to S3."""
    import streamkern as sk
    from streamkern.train.saved_model import load_model

    source = sk.ZarrSource(f"{place.data}/train.zarr", storage_options=place.options)
    for name in ("one", "two"):
        options = place.options
        model = load_model(f"{place.data}/run", device="cpu", threads=1, storage_options=options)
        with model.backend:
            model.predict_to(source, f"{place.url}/{name}", storage_options=options)
        options = {**options, "endpoint_url": place.server.endpoint}
        same([predictions(f"{place.url}/{name}", options)], [place.truth.values], "a prediction")


def stall(place: Place) -> None:
    """Silence in the middle of an answer, much longer than the limit; uploads stall as well."""
    import streamkern as sk
    from streamkern.filesystem.objects import STALL_S

    store = sk.open_store(f"{place.data}/train.zarr", storage_options=place.options)
    place.proxy.set(**LONG_STALLS)
    objects = store_objects(place)
    truth = sk.open_store(place.truth.folder / "train.zarr")

    def one(i: int) -> None:
        same(store.read_chunk(i), truth.read_chunk(i), f"chunk {i}")
        objects.put(f"{i}", bytes(100_000 + i))

    began = time.monotonic()
    with ThreadPoolExecutor(truth.n_chunks) as pool:
        list(pool.map(one, range(truth.n_chunks)))
    seconds = time.monotonic() - began
    sizes = {(str(i), 100_000 + i) for i in range(truth.n_chunks)}
    place.proxy.set(faults={}, limit=None)
    check(set(objects.list()) == sizes, "what was written beside stalls")
    check(seconds < 3 * STALL_S + 60, f"the time in which stalls are cut ({seconds:.0f} s)")


def store_objects(place: Place) -> Any:
    """Objects below the place."""
    from streamkern.filesystem.urls import open_objects

    return open_objects(place.url, storage_options=place.options)


WORKLOADS: dict[str, Callable[[Place], None]] = {
    "ingest": ingest, "read": read, "list": list_all, "checkpoint": checkpoint, "train": train,
    "predict": predict, "stall": stall,
}  # fmt: skip


def same(actual: Any, expected: Any, description: str) -> None:
    """Stop unless these arrays are equal in every bit."""
    for a, b in zip(actual, expected, strict=True):
        bits = (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
        check(bits, description)


# ----------------------------------------------------------------------------- lives of a command


def lives(place: Place, command: Sequence[Any]) -> None:
    """Run a command of the CLI in processes that are killed at random, then once to its end.

    ["train", config] is a run without the command line around it, whose last life is the caller's.
    A raw file that arrives altered ends a life by gzip's checksum: it has no other.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["streamkern.cli.main", "streamkern.ingest.ingest", "streamkern.train.train"]
    )
    kills = KILLS
    with tempfile.TemporaryDirectory() as folder:
        for n in range(10):
            if not kills and command[0] == "train":
                return
            output_file = Path(folder, f"{n}.txt")
            life = context.Process(
                target=_live, args=(command, str(output_file), place.options, place.limit_s)
            )
            life.start()
            life.join(place.draw.uniform(0.3, LONGEST_LIFE_S) if kills else place.limit_s + 30)
            life.kill()
            life.join()
            code, text = life.exitcode, output_file.read_text() if output_file.exists() else ""
            life.close()
            if code == 0 or "already holds a store" in text:  # killed after its last write
                return
            altered = code in (2, 3) and ("CRC check" in text or "decompress" in text)
            killed = code == -9 and kills > 0
            check(altered or killed, f"a life of {command[0]} ({code}: {text})")
            kills -= killed
    raise WrongResult(f"{command[0]} came to no end")


def _live(
    command: Sequence[Any], output_file: str, options: dict[str, Any], limit_s: float
) -> None:
    """Run a command; its credentials are in the environment, as command lines may hold none."""
    os.environ["AWS_ACCESS_KEY_ID"] = options["key"]
    os.environ["AWS_SECRET_ACCESS_KEY"] = options["secret"]
    from streamkern.cli.main import run_command as cli
    from streamkern.train.train import train as run_training

    with Path(output_file).open("w") as file:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=file)
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            if command[0] == "train":
                run_training(command[1])
                sys.exit(0)
            sys.exit(cli(command))
