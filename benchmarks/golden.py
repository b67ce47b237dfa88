"""Print SHA-256 sums of small runs of everything, to show changes of bits.

    python -m benchmarks.golden > before.txt
    (change code that must not alter results)
    python -m benchmarks.golden | diff before.txt -

The runs use the CPU, NumPy alone, float32 and one thread, and only public names of streamkern, so
that the same file runs before and after a change. Sums of numbers depend on the machine and its
BLAS; compare two revisions on one machine.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Read when NumPy is first loaded.
os.environ |= dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), "1")

import numpy as np

import streamkern as sk

N, D, C, P, N_TEST = 600, 6, 3, 90, 64
ON_FOURIER = {
    "model.kernel": "gaussian",
    "model.features": "fourier",
    "model.n_features": 80,
    "model.n_centers": "auto",
}
ALL_CENTERS = {"model.n_centers": "auto", "model.centers": "all"}
SAMPLED = {"solver.n_nystrom": 80, "solver.level": 10}
METHODS: dict[str, dict[str, Any]] = {
    "auto": {},
    "block": {"solver.name": "block", "solver.block_size": 40},
    "block ridge": {"solver.name": "block", "solver.block_size": P, "solver.ridge": 1e-3},
    "direct": {"solver.name": "direct", "solver.ridge": 1e-3},
    "falkon": {"solver.name": "falkon", "solver.ridge": 1e-3},
    "sgd": {"solver.name": "sgd", **ALL_CENTERS},
    "eigenpro1": {"solver.name": "eigenpro1", **ALL_CENTERS},
    "eigenpro2": {"solver.name": "eigenpro2", **ALL_CENTERS},
    "eigenpro3": {"solver.name": "eigenpro3", **SAMPLED},
    **{
        f"eigenpro4 {projection}": {
            "solver.name": "eigenpro4",
            "solver.period": 3,
            "solver.projection": projection,
            **SAMPLED,
        }
        for projection in ("exact", "resident", "inexact")
    },
    **{
        f"{solver} nystrom": {"solver.name": solver, "model.features": "nystrom"}
        for solver in ("sgd", "eigenpro1", "block", "direct")
    },
    **{
        f"{solver} fourier": {"solver.name": solver, "solver.ridge": 1e-3, **ON_FOURIER}
        for solver in ("sgd", "eigenpro1", "block", "direct")
    },
    **{f"centers {way}": {"model.centers": way} for way in ("balanced", "kmeans", "rpcholesky")},
    **{
        f"kernel {name}": {"model.kernel": name, "model.bandwidth": bandwidth}
        for name, bandwidth in (("matern52", 3.0), ("laplace_l1", 9.0), ("relu_ntk", "auto"))
    },
}
STREAMS: dict[str, dict[str, Any]] = {
    "as stored": {},
    "augmented": {
        "data.copies": 2,
        "data.transforms": [{"kind": "noise", "sigma": 0.1}, {"kind": "mixup", "alpha": 0.4}],
    },
}


def digest(*parts: Any) -> str:
    """Return the SHA-256 of arrays, with their dtypes and shapes, and of bytes."""
    sums = hashlib.sha256()
    for part in parts:
        if not isinstance(part, bytes):
            array = np.ascontiguousarray(part)
            sums.update(f"{array.dtype} {array.shape}".encode())
            part = array.tobytes()
        sums.update(part)
    return sums.hexdigest()


def tree_digest(folder: Path) -> str:
    """Return the SHA-256 of the chunks below a folder and of their names. JSON documents are left
    out, because they contain times."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix != ".json")
    return digest(*(part for p in files for part in (str(p.relative_to(folder)).encode(), _of(p))))


def _of(path: Path) -> bytes:
    return path.read_bytes()


def rows(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return X (n, D) float32 and class ids y (n,) that a model can learn."""
    X = np.random.default_rng([seed, 77]).standard_normal((n, D)).astype(np.float32)
    return X, np.abs(X[:, :C]).argmax(axis=1)


def golden(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the SHA-256 of each result."""
    np.savez(folder / "train.npz", X=rows(N, 0)[0], y=rows(N, 0)[1])
    np.savez(folder / "test.npz", X=rows(N_TEST, 1)[0], y=rows(N_TEST, 1)[1])
    for name in ("train", "test"):
        sk.ingest_store(str(folder / f"{name}.npz"), folder / f"{name}.zarr", chunk_mb=0.002)
        yield f"ingest {name}", tree_digest(folder / f"{name}.zarr")
        yield f"{name}: fingerprint", sk.open_store(folder / f"{name}.zarr").spec.fingerprint
    noise = {"kind": "noise", "sigma": 0.5}
    sk.augment_store(folder / "train.zarr", folder / "more.zarr", copies=2, transforms=[noise])
    yield "augment", tree_digest(folder / "more.zarr")
    for method, overrides in METHODS.items():
        for stream, changes in STREAMS.items():
            if changes and overrides.get("model.centers") == "all":
                continue  # refused: there is a center for every stored row
            yield from _trained(folder, f"{method}, {stream}", overrides | changes)
    yield from _estimators()


def _trained(folder: Path, name: str, overrides: dict[str, Any]) -> Iterator[tuple[str, str]]:
    run_dir = folder / name.replace(" ", "-").replace(",", "")
    tables = {
        "data": {
            "train": str(folder / "train.zarr"),
            "test": str(folder / "test.zarr"),
            "batch_size": 50,
            "epochs": 2,
        },
        "model": {"kernel": "laplace", "bandwidth": 3.0, "n_centers": P},
        "run": {
            "run_dir": str(run_dir),
            "device": "cpu",
            "accelerator": "none",
            "threads": 1,
            "memory": "1 GiB",
            "checkpoint_every": 5,
            "evaluate_every": 5,
        },
    }
    result = sk.train_model(sk.RunConfig.from_tables(tables).with_overrides(overrides))
    model = result.model
    with model.backend:
        yield f"{name}: alpha", digest(model.backend.to_host(model.weights))
        yield f"{name}: centers", digest(result.Z)
        yield f"{name}: answers", digest(model.values(rows(N_TEST, 1)[0]))
        out = folder / f"{run_dir.name}.npy"
        model.predict_to(sk.ZarrSource(folder / "test.zarr"), str(out))
        yield f"{name}: file of answers", digest(_of(out))


def _estimators() -> Iterator[tuple[str, str]]:
    (X, y), (T, _) = rows(N, 0), rows(N_TEST, 1)
    options: dict[str, Any] = {
        "kernel": "laplace",
        "n_centers": P,
        "bandwidth": 3.0,
        "device": "cpu",
        "accelerator": "none",
        "threads": 1,
    }
    model = sk.KernelClassifier(**options).fit(X, y)
    yield "classifier", digest(model.decision_function(T), model.predict(T).astype(np.int64))
    yield "regressor", digest(sk.KernelRegressor(**options).fit(X, X @ np.ones(D)).predict(T))
    online = sk.KernelClassifier(**options)
    for part in range(0, N, 200):
        online.partial_fit(X[part : part + 200], y[part : part + 200], classes=np.arange(C))
    yield "partial_fit", digest(online.decision_function(T))


def main() -> int:
    """Print a line for each."""
    with tempfile.TemporaryDirectory() as folder:
        for case, found in golden(Path(folder)):
            print(f"{found}  {case}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
