"""Mistakes in files, stores and sources."""

from __future__ import annotations

import numpy as np

import streamkern as sk
from tests.remedies import FRAME, Case, N, X, Y, fit_values, ingested


def data_cases() -> list[Case]:
    """Return mistakes in files and stores."""
    frame = FRAME.assign(fare=Y)
    gaps = np.where(np.arange(N) == 7, np.nan, Y)
    noise = {"kind": "noise", "sigma": 1.0}

    return [
        ("name columns of the file with x= and y=",
         lambda: ingested("rides.csv", y="target"), lambda: ingested("rides.csv", y="fare")),
        ("has no column 'target'", lambda: ingested(frame, y="target"),
         lambda: ingested(frame, y="fare")),
        ("pass overwrite=True to replace it, or append",
         lambda: sk.ingest_store(X[:9], "data.zarr", y=Y[:9]),
         lambda: (ingested(X, y=Y), sk.append_store(X[:9], "made.zarr", y=Y[:9]))),
        ("leave like= out", lambda: ingested("rides.csv", y="fare", like="data.zarr"),
         lambda: ingested("rides.csv", y="fare")),
        ("leave them out", lambda: ingested(X, y=Y, drop=["a"]), lambda: ingested(X, y=Y)),
        ('use "error" or "fill"', lambda: ingested(X, y=Y, missing="skip"),
         lambda: ingested(X, y=Y, missing="fill")),
        ("is an archive, not a zarr store; unpack it", lambda: sk.open_store("rows.tar"),
         lambda: ingested("rows.npz")),
        ("make a store from it with streamkern ingest", lambda: sk.open_store("rides.csv"),
         lambda: ingested("rides.csv", y="fare")),
        ("which is a folder of other files; make a store from these files with streamkern ingest",
         lambda: sk.open_store("parts"), lambda: ingested("parts/*.npz")),
        ("is a run directory, not a zarr store; give the path of a store",
         lambda: sk.open_store("run"), lambda: sk.open_store("data.zarr")),
        ("lies within the store .*give a path outside of it",
         lambda: sk.ingest_store(X, "data.zarr/sub.zarr", y=Y),
         lambda: sk.ingest_store(X, "sub.zarr", y=Y)),
        ("write for example|must be a whole number|at least",
         lambda: sk.augment_store("data.zarr", "aug.zarr", copies=0, transforms=[noise]),
         lambda: sk.augment_store("data.zarr", "aug.zarr", copies=1, transforms=[noise])),
        ("correct such rows, or leave them out", fit_values(X, gaps),
         fit_values(X[~np.isnan(gaps)], Y[~np.isnan(gaps)])),
    ]  # fmt: skip


TABLES = (data_cases,)
