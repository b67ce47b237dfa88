"""The modules whose hands a batch goes through, from its chunk on the disk to the update.

    python tools/batch_path.py

Trains a little from a store on this disk, and looks at every call between the first read of the
loop and its end: a module is passed where rows are given to one of its functions or come out of it.
What a solver calls to compute its step is not on the way.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from streamkern.config.run_config import RunConfig  # noqa: E402
from streamkern.ingest.ingest import ingest  # noqa: E402
from streamkern.train.train import train  # noqa: E402

FEATURES = 37  # of no other array


def holds_rows(value: Any, depth: int = 0) -> bool:
    """Return whether a value contains rows, as they are stored or as a product takes them."""
    if isinstance(value, np.ndarray):
        return value.ndim == 2 and value.shape[1] in (FEATURES, FEATURES + 2)
    if depth == 2:
        return False
    if not isinstance(value, tuple | list):
        value = [getattr(value, field.name) for field in fields(value)] if _is_record(value) else ()
    return any(holds_rows(part, depth + 1) for part in value)


def _is_record(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def passed(folder: Path) -> set[str]:
    """Return the modules, as paths in the package."""
    rows = np.random.default_rng(0).normal(size=(4000, FEATURES)).astype(np.float32)
    ingest(rows, folder / "train.zarr", y=np.arange(4000) % 3, chunk_mb=0.05)
    run = {"device": "cpu", "threads": 1, "calibrate": False}  # no rows are taken out
    data = {"train": str(folder / "train.zarr"), "batch_size": 200, "epochs": 2}
    model = {"n_centers": 100, "kernel": "laplace", "bandwidth": 3.0}
    solver = {"name": "block"}
    package, found = (
        str(ROOT / "streamkern") + os.sep,
        dict.fromkeys(("first", "inside", "last"), False),
    )
    modules: set[str] = set()

    def look(frame: FrameType, event: str, result: Any) -> None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if event not in ("call", "return") or not file.startswith(package):
            return
        module = file.removeprefix(package)
        found["first"] |= (module, name) == ("stream/batch_reader.py", "_read_into")
        found["last"] |= (module, name) == ("train/trainer.py", "_finish")
        if (module, name) == ("solver/base.py", "step"):
            found["inside"] = event == "call"
        aside = found["inside"] and not module.startswith("solver/")
        if not found["first"] or found["last"] or aside or module in modules:
            return
        # Not `self`: an object may hold rows besides.
        given = [value for key, value in frame.f_locals.items() if key != "self"]
        if any(map(holds_rows, [result] if event == "return" else given)):
            modules.add(module)

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        train(RunConfig.from_tables({"data": data, "model": model, "solver": solver, "run": run}))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert found["first"]
    assert found["last"]
    return modules


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        modules = sorted(passed(Path(folder)))
    print(f"{len(modules)} modules", *modules, sep="\n  ")
