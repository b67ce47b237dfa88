"""Mistakes about the machine, its devices and memory, and about numbers with units."""

from __future__ import annotations

import signal
import sys
from typing import Any
from unittest import mock

import numpy as np

import streamkern as sk
from streamkern.backend.devices import get_backend
from streamkern.backend.expression import check_expression, render
from streamkern.backend.rank_grid import check_columns
from streamkern.basics.optional import import_optional
from streamkern.basics.user_class import import_user_class
from streamkern.basics.values import checked_list, parse_seconds
from streamkern.filesystem.cache import Cache
from streamkern.kernels.base import Kernel
from streamkern.kernels.own import checked_kernel_record
from tests.remedies import Case, X, Y
from tests.remedies.training import trained

COVERED = ("backend", "basics")

GPU = "needs a GPU; tests/backend/test_cupy_backend.py"
LOST = "a rank is lost; tests/backend/test_ranks.py"
NOT_TRIED = {
    "backend/cupy_backend.py:CupyBackend.__init__:1": GPU,
    "backend/cupy_backend.py:CupyBackend.active:1": GPU,
    "backend/ranks.py:on_devices:1": "needs GPUs",
    "backend/devices.py:probe:1": GPU,
    "backend/devices.py:refuse_rounding:1": GPU,
    "backend/ranks.py:Collective._total:1": LOST,
    "backend/ranks.py:process_group:1": LOST,
}


class Own(Kernel):
    """A user-defined kernel, of s, the scaled squared distance."""

    def __init__(self, bandwidth: float, expression: str) -> None:
        super().__init__(bandwidth)
        self.expression = expression

    def profile(self, sq: Any, xp: Any) -> Any:
        return xp.exp(-sq)


class Early(sk.Callback):
    """Ends the process's work before the first step."""

    def begin(self, run: sk.TrainStart) -> None:
        signal.raise_signal(signal.SIGTERM)


def by_name() -> None:
    """Name a class that is a kernel."""
    assert import_user_class(f"{__name__}:Own", Kernel, "model.kernel") is Own


def without_h5py() -> None:
    """Need a package that is not there, until it is installed."""
    with mock.patch.dict(sys.modules, {"h5py": None}):
        import_optional("h5py", "this", "files")


def without_numba() -> None:
    """Ask for Numba where it is not installed."""
    with mock.patch("streamkern.backend.devices.numba_problem", return_value="it is not there"):
        get_backend("cpu", 1, "numba")


def machine_cases() -> list[Case]:
    """Return all remedies of this module: (words, wrong, right)."""
    rows = sk.RowRandom(np, 0, 0, 0, np.arange(3), np.float64)
    return [
        ("the module 'none_such' cannot be imported.*add its folder to PYTHONPATH",
         lambda: import_user_class("none_such:Own", Kernel, "model.kernel"), by_name),
        ("has not defined; import its module first, or define the class",
         lambda: checked_kernel_record("none_such:Own"),
         lambda: checked_kernel_record(f"{__name__}:Own")),
        ("is not a subclass of streamkern.Kernel; give the .module:Class. of a subclass",
         lambda: import_user_class(f"{__name__}:Early", Kernel, "model.kernel"), by_name),
        ("threads=0 must be at least 1", lambda: get_backend("cpu", 0, "none"),
         lambda: get_backend("cpu", 1, "none")),
        ("accelerator='jax' is not known; use one of .*none", lambda: get_backend("cpu", 1, "jax"),
         lambda: get_backend("cpu", 1, "none")),
        ("device='tpu' is not known; use 'auto', 'cpu'", lambda: get_backend("tpu"),
         lambda: (get_backend("auto"), get_backend("cpu"))),
        ("cannot be used: .*; use device='cpu'", lambda: get_backend("gpu:99"),
         lambda: get_backend("cpu")),
        ("accelerator='numba' cannot be used: .*; use 'none'", without_numba,
         lambda: get_backend("cpu", 1, "none")),
        ("it may contain numbers, s, p, x, z, .* and sqrt, exp, cos, pow, in Python's notation",
         lambda: render("log(s)", "{}"), lambda: render("sqrt(s)", "{}")),
        ("was never closed; write it in Python's notation", lambda: render("exp(-s", "{}"),
         lambda: render("exp(-s)", "{}")),
        ("correct one of them, or leave the expression out",
         lambda: check_expression(Own(2.0, "exp(s)")),
         lambda: check_expression(Own(2.0, "exp(-s)"))),
        ("center_ranks=2 must divide run.ranks=3; correct one", lambda: check_columns(3, 2),
         lambda: (check_columns(4, 2), check_columns(3, 3))),
        ("needs h5py: .*pip install", without_h5py,
         lambda: import_optional("h5py", "this", "files")),
        ("idle_s=-1 must be a number, 0 or above", lambda: Cache("kept", idle_s=-1),
         lambda: Cache("kept", idle_s=1)),
        ("unit_rows=0 must be a whole number, at least 1",
         lambda: sk.ArraySource(X, Y, unit_rows=0), lambda: sk.ArraySource(X, Y, unit_rows=1)),
        ('write for example "512 MiB" or "1.5 GB"',
         lambda: sk.ingest_store(X, "m.zarr", y=Y, memory="much"),
         lambda: (sk.ingest_store(X, "m.zarr", y=Y, memory="512 MiB"),
                  sk.ingest_store(X, "n.zarr", y=Y, memory="1.5 GB"))),
        ("must be a list; put it into brackets", lambda: checked_list("row_shape", 3),
         lambda: checked_list("row_shape", [3])),
        ('write for example "30 s" or "5 min"', lambda: parse_seconds("5"),
         lambda: (parse_seconds("30 s"), parse_seconds("5 min"))),
        ("is no dtype of random numbers; use float32 or float64",
         lambda: sk.RowRandom(np, 0, 0, 0, np.arange(3), np.int64),
         lambda: sk.RowRandom(np, 0, 0, 0, np.arange(3), np.float32)),
        (r"spans 0 values; choose low and high so that they span 1 to 2\*\*32 values",
         lambda: rows.integers(3, 3), lambda: rows.integers(3, 4)),
        ("stopped by SIGTERM before the next step; run the same command again to continue",
         lambda: trained({"run.run_dir": "early"}, callbacks=[Early()]),
         lambda: trained({"run.run_dir": "early"})),
    ]  # fmt: skip


TABLES = (machine_cases,)
