"""Train on a million noisy digits that are never stored, stop half-way, resume, compare.

    tools/demo                        the whole of it, below three minutes on two cores
    python examples/digits.py --quick                a few seconds, a short stream
    python examples/digits.py --samples 200000       another length
    python examples/digits.py --folder runs/mine     another place; --fresh starts over

What it does, in `runs/digits`:

1. writes scikit-learn's digits to a Zarr store as uint8 pixels: 1437 rows to train on, and 20
   noisy copies of the other 360 to test on;
2. solves the problem exactly, in float64, as the yardstick;
3. trains on fresh noisy copies of the 1437 rows, made while streaming, with the default solver.
   The process is sent SIGTERM on the way and the same command resumes it;
4. trains on the same stream with EigenPro 3.0;
5. draws the test error of both against the samples seen, and prints a table.

Calling it again goes on where it was, or prints the results.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.spatial.distance import cdist

import streamkern as sk
from streamkern.report import read_log

N_TRAIN, N_CLASSES, NOISE, BANDWIDTH, TEST_COPIES = 1437, 10, 0.5, 8.0, 20
SOLVERS = {"block": "block preconditioner (default)", "eigenpro3": "EigenPro 3.0"}
MARKER = "streamkern-digits.json"
OURS = (MARKER, "train.zarr", "test.zarr", "exact.json", "digits.png", "results.json")


# ------------------------------------------------------------------------------------- the task


@dataclass(frozen=True)
class Task:
    """The digits, split once and for all.

    X : (1437, 64) uint8 and y : (1437,) to train on. X_test : (7200, 64) float32, 20 noisy copies
    of 360 other digits, in pixel units; y_test : (7200,). mean, std : of all training pixels.
    """

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray
    mean: float
    std: float

    def scaled(self, X: np.ndarray) -> np.ndarray:
        """float64 pixels with the training pixels' mean taken to 0 and deviation to 1."""
        return (X.astype(np.float64) - self.mean) / self.std


def make_task() -> Task:
    """The split and the noisy test set; the same in every call."""
    from sklearn.datasets import load_digits

    X, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(X))
    X, y = X[order].astype(np.uint8), y[order]
    mean, std = float(X[:N_TRAIN].mean()), float(X[:N_TRAIN].std())
    clean = np.tile(X[N_TRAIN:].astype(np.float64), (TEST_COPIES, 1))
    noise = np.random.default_rng([0, 1]).standard_normal(clean.shape)
    X_test = (clean + NOISE * std * noise).astype(np.float32)
    return Task(X[:N_TRAIN], y[:N_TRAIN], X_test, np.tile(y[N_TRAIN:], TEST_COPIES), mean, std)


def exact_error(task: Task, n_samples: int, block_rows: int = 20_000) -> float:
    """Test MSE of the least-squares model over all training digits as centers.

    In float64 with NumPy and SciPy alone, nothing of streamkern: K^T K and K^T Y summed over
    `n_samples` noisy rows, distances taken by differences. Cost n p^2.
    """
    rng, one_hot = np.random.default_rng([0, 2]), np.eye(N_CLASSES)
    Z = task.scaled(task.X)

    def kernel(X: np.ndarray) -> np.ndarray:
        D = cdist(X, Z)
        D *= -1 / BANDWIDTH
        return np.exp(D, out=D)

    A, B = np.zeros((len(Z), len(Z))), np.zeros((len(Z), N_CLASSES))
    # Every digit equally often, as in the stream; in the last round some are left out.
    rows = np.concatenate([rng.permutation(len(Z)) for _ in range(-(-n_samples // len(Z)))])
    for start in range(0, n_samples, block_rows):
        part = rows[start : min(start + block_rows, n_samples)]
        K = kernel(Z[part] + NOISE * rng.standard_normal((len(part), Z.shape[1])))
        A += K.T @ K
        B += K.T @ one_hot[task.y[part]]
    alpha = cho_solve(cho_factor(A), B)
    F = kernel(task.scaled(task.X_test)) @ alpha
    return float(((F - one_hot[task.y_test]) ** 2).mean())
