"""Errors of exported models over kernels, encoders and losses.

    python -m benchmarks.exports

Each model is trained in float64 and exported to ONNX in float32 and float64, and to C. An error is
the largest difference from `predict`, on new rows and on training rows, as a share of the spread
(the standard deviation) of the outputs. Float32 is shown for new rows and for training rows, as
some training rows equal a center, where the kernel may have a kink. The table shows the largest
error for each kernel, each encoder and each loss. The exit code is 1 if an error is above its limit
in `LIMITS`.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pandas as pd

import streamkern as sk
from streamkern.basics.text import text_table
from streamkern.kernels.builtin import KERNELS

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
ENCODERS = ("numbers", "table")
LOSSES = ("squared_error", "log_loss", "quantile", "poisson", "huber")
LIMITS = {"ONNX float32, new": 1e-4, "ONNX float32, trained": 1e-2, "ONNX float64": 1e-6,
          "C float64": 1e-6}  # fmt: skip
"""Exports -> the largest error that is right."""
TRAINED, OTHERS = 150, 50
"""Numbers of training rows, and of new rows; as many training rows are predicted."""
_OPTIONS: dict[str, Any] = {
    "n_centers": 40, "epochs": 2, "metric": "none", "ridge": 1e-3, "random_state": 0, "verbose": 0,
    "precision": "float64", "threads": 1, "device": "cpu",
}  # fmt: skip
_C_TYPES = {"float": ctypes.c_float, "double": ctypes.c_double, "int64_t": ctypes.c_int64,
            "const char *": ctypes.c_char_p, "unsigned char": ctypes.c_ubyte}  # fmt: skip
_SIGNATURE = re.compile(
    r"(const )?(const char \*|float|double|int64_t|unsigned char) (\w+)\[(\d+)\]"
)


class CompiledModel:
    """The function of a C file. parameters : (const, type, name, length) of each argument"""

    def __init__(self, path: Path, *flags: str) -> None:
        text, name = path.read_text(), path.stem
        signature = re.search(rf"void {name}_predict\(\n(.*?)\)\n{{", text, re.S)
        assert signature is not None
        self.parameters = _SIGNATURE.findall(signature[1])
        source_file, library_file = path.with_name("whole.c"), path.with_suffix(".so")
        size = f"size_t size_of_workspace(void) {{ return sizeof(struct {name}_workspace); }}\n"
        source_file.write_text(text + size)
        assert COMPILER is not None
        words = ("-std=c11", "-Wall", "-Werror", "-pedantic", "-shared", "-fPIC", *flags)
        subprocess.run(
            [COMPILER, *words, "-o", library_file, source_file, "-lm"],
            check=True,
            capture_output=True,
            text=True,
        )
        library = ctypes.CDLL(str(library_file))
        library.size_of_workspace.restype = ctypes.c_size_t
        self._call = library[f"{name}_predict"]
        self._workspace = ctypes.create_string_buffer(library.size_of_workspace())

    def __call__(self, *inputs: Any) -> dict[str, Any]:
        """Return the outputs for one row, by name. inputs : a sequence for each argument"""
        arrays, outputs = [], {}
        for k, (_, kind, name, size) in enumerate(self.parameters):
            array = (_C_TYPES[kind] * int(size))()
            if k < len(inputs):
                array[:] = list(inputs[k])
            else:
                outputs[name] = array
            arrays.append(array)
        self._call(*arrays, self._workspace)
        return {
            name: list(array) if array._type_ is ctypes.c_char_p else np.array(array)
            for name, array in outputs.items()
        }


def errors(kernel: str, encoder: str, loss: str, folder: Path) -> dict[str, float]:
    """Return the error of each export of one model, without exports that do not support its kernel.

    folder : of the files; another one for each model, as a compiled one stays loaded
    """
    rows, y = _data(encoder, loss)
    new_rows = rows[TRAINED - OTHERS :]
    model = _model(kernel, encoder, loss).fit(rows[:TRAINED], y[:TRAINED])
    truth = {"predictions": model.predict(new_rows)}
    if loss == "log_loss":
        truth = {
            "scores": model.predict_values(new_rows),
            "probabilities": model.predict_proba(new_rows),
        }
    model.to_c(folder / "m.c", overwrite=True)
    narrow = _shares(truth, _onnx(model, new_rows, "float32", folder))
    wide = _shares(truth, _c(CompiledModel(folder / "m.c"), new_rows))
    results = {
        "ONNX float32, new": float(narrow[OTHERS:].max()),
        "ONNX float32, trained": float(narrow[:OTHERS].max()),
        "C float64": float(wide.max()),
    }
    if kernel != "relu_ntk":  # onnxruntime has the arc cosine in float32 only
        wide = _shares(truth, _onnx(model, new_rows, "float64", folder))
        results["ONNX float64"] = float(wide.max())
    return results


def _model(kernel: str, encoder: str, loss: str) -> Any:
    options = _OPTIONS | {"kernel": kernel, "loss": loss}
    options |= {"scale": "quantiles"} if encoder == "table" else {}
    if loss == "log_loss":
        return sk.KernelClassifier(**options)
    options |= {"quantile": [0.1, 0.5, 0.9]} if loss == "quantile" else {}
    return sk.KernelRegressor(**options)


def _data(encoder: str, loss: str) -> tuple[Any, np.ndarray]:
    """Return rows, as an array of numbers or a frame of all kinds of columns, and targets."""
    rng, n = np.random.default_rng(0), TRAINED + OTHERS
    X = rng.normal(size=(n, 3)).astype(np.float32)  # an export in float32 gets the same numbers
    y = np.sin(2 * X[:, 0]) + X[:, 1] + 0.1 * rng.normal(size=n)
    rows: Any = X
    if encoder == "table":
        day = pd.Timestamp("2019-01-01") + pd.to_timedelta(rng.integers(0, 1500, n), "D")
        rows = pd.DataFrame({
            "a": X[:, 0], "gap": np.where(rng.random(n) < 0.2, np.nan, np.exp(X[:, 1])),
            "day": day, "shop": rng.choice(["here", "zwölf", "in town", ""], n),
            "street": [f"street {k}" for k in rng.integers(0, 30, n)],
        })  # fmt: skip
        y += (rows["shop"] == "here").to_numpy()
    if loss == "log_loss":
        return rows, np.digitize(y, [-0.5, 0.7])
    return rows, rng.poisson(np.exp(y)) if loss == "poisson" else y


def _onnx(model: Any, rows: Any, dtype: str, folder: Path) -> dict[str, np.ndarray]:
    """Return the outputs of onnxruntime by name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the model was solved in float64", UserWarning)
        model.to_onnx(folder / "m.onnx", dtype=dtype, overwrite=True)
    session = onnxruntime.InferenceSession(folder / "m.onnx", providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    if isinstance(rows, pd.DataFrame):
        feed = {name: column[:, None] for name, column in _columns(rows).items()}
    else:
        feed = {"X": rows.astype(dtype)}
    return dict(zip(names, session.run(None, feed), strict=True))


def _c(function: CompiledModel, rows: Any) -> dict[str, np.ndarray]:
    """Return the outputs of the C function by name, for rows (n, d) or a table."""
    if isinstance(rows, pd.DataFrame):
        columns = [
            [cell.encode() for cell in column] if column.dtype == object else column
            for column in _columns(rows).values()
        ]
        found = [function(*([cell] for cell in row)) for row in zip(*columns, strict=True)]
    else:
        found = [function(row) for row in rows]
    return {name: np.array([row[name] for row in found]) for name in found[0]}


def _columns(frame: pd.DataFrame) -> dict[str, np.ndarray]:
    """Return the columns as an exported model takes them: words, or numbers in float64."""
    days = (frame["day"] - pd.Timestamp("1970-01-01")) / pd.Timedelta("1D")
    return {
        name: column.to_numpy(object if name in ("shop", "street") else float)
        for name, column in frame.assign(day=days).items()
    }  # fmt: skip


def _shares(truth: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the largest difference of each row, as a share of the spread of its output."""
    shares = [
        np.abs(found[name].reshape(values.shape) - values) / values.std(axis=0)
        for name, values in truth.items()
    ]
    return np.max([share.reshape(len(share), -1).max(axis=1) for share in shares], axis=0)


def wrong(found: Mapping[str, float]) -> dict[str, float]:
    """Return the errors above their limit."""
    return {name: error for name, error in found.items() if not error <= LIMITS[name]}


def worst(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the largest error of every kernel, encoder and loss, and of all."""
    groups: list[tuple[str, str, Iterable[Mapping[str, Any]]]] = [
        (kind, value, [case for case in cases if case[kind] == value])
        for kind in ("kernel", "encoder", "loss")
        for value in dict.fromkeys(case[kind] for case in cases)
    ]
    found = []
    for kind, value, members in [*groups, ("all", "", cases)]:
        row: dict[str, Any] = {"of": f"{kind} {value}".strip()}
        for name in LIMITS:
            values = [case[name] for case in members if name in case]
            row[name] = f"{max(values):.0e}" if values else "refused"
        found.append(row)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if every error is below its limit."""
    description, _, more = str(__doc__).partition("\n\n")
    argparse.ArgumentParser(
        prog="python -m benchmarks.exports", description=description, epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args(arguments)  # fmt: skip
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for case in itertools.product(KERNELS, ENCODERS, LOSSES):
            own = Path(tempfile.mkdtemp(dir=folder))
            cases.append(dict(zip(("kernel", "encoder", "loss"), case, strict=True)))
            cases[-1] |= errors(*case, own)
    print(text_table(worst(cases), ["of", *LIMITS]))
    exceeding = [
        (case, found)
        for case in cases
        if (found := wrong({n: case[n] for n in case if n in LIMITS}))
    ]
    for case, found in exceeding:
        print("above the limit:", case["kernel"], case["encoder"], case["loss"], found)
    return 1 if exceeding else 0


if __name__ == "__main__":
    sys.exit(main())
