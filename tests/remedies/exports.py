"""Mistakes in models that are exported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import streamkern as sk
from streamkern.kernels.base import Kernel
from tests.remedies import Case, X, Y, command, long_rows, regressor

COVERED = ("train/export",)
NOT_TRIED = {
    "train/export/onnx_model.py:onnx_model:1": "the centers take more than 2 GB",
    "train/export/c_source.py:check_size:1": "the text takes more than 250 MB",
    "train/export/c_operators.py:add_node:1": "every operator of the graphs is known",
}


class LogAdd(Kernel):
    """The Laplace kernel of the squared distance, by a function that is not exported."""

    def profile(self, sq: Any, xp: Any) -> Any:
        return xp.exp(-xp.logaddexp(sq, -xp.inf))


class Same(Kernel):
    """The same by functions that are exported."""

    def profile(self, sq: Any, xp: Any) -> Any:
        return xp.exp(-sq)


@sk.deterministic
def half(A: Any, targets: Any, rng: Any) -> tuple[Any, Any]:
    return A / 2, targets


def exported(path: Any, options: dict[str, Any] | None = None, **how: Any) -> Callable[[], Any]:
    return lambda: regressor(**options or {}).fit(X, Y).to_onnx(path, **how)


def twice() -> None:
    """Export a model to the same file twice."""
    exported("i.onnx", overwrite=True)()
    exported("i.onnx")()


def in_a_folder() -> None:
    """Export a model to a folder."""
    Path("folder.onnx").mkdir(exist_ok=True)
    exported("folder.onnx")()


def of_images(path: str, **options: Any) -> None:
    """Export a model of images."""
    pixels = np.random.default_rng(0).normal(size=(len(X), 4, 4, 1))
    regressor(**options).fit(pixels, Y).to_onnx(path, overwrite=True)


def words(n: int) -> None:
    """Export a model of n words."""
    names = pd.DataFrame({"name": [f"w{k % n}" for k in range(11_000)]}, dtype="category")
    targets = [float(k % 7) for k in range(11_000)]
    regressor().fit(names, targets).to_onnx(f"words{n}.onnx")


def column(name: str) -> None:
    """Export a model of a table with a column of this name."""
    table = pd.DataFrame({name: ["a", "b"] * (len(X) // 2)})
    regressor().fit(table, Y[: len(table)]).to_onnx(f"column{name}.onnx")


def sparse_model() -> Any:
    return regressor().fit(long_rows(), Y).to_onnx("sparse.onnx")


def export_cases() -> list[Case]:
    """Return the mistakes."""
    own: dict[str, Any] = {"bandwidth": "auto"}
    arc = {"kernel": "relu_ntk", **own}
    return [
        ("use one of .'auto', 'float32', 'float64'.", exported("a.onnx", dtype="float16"),
         exported("a.onnx", dtype="float64")),
        ("give another path, or overwrite=True", twice, exported("i.onnx", overwrite=True)),
        ("'i.bin' does not end in .onnx; give i.bin.onnx", exported("i.bin"),
         exported("i.bin.onnx")),
        ('path=3 is not the path of a file; give one, "model.onnx"', exported(3),
         exported("model.onnx")),
        ("exists already; give another path, or --overwrite",
         lambda: command("export run rides.csv.onnx") or command("export run rides.csv.onnx"),
         lambda: command("export run rides.csv.onnx --overwrite")),
        ("use abs, .* or where", exported("b.onnx", {"kernel": LogAdd(2.0), **own}),
         exported("b.onnx", {"kernel": Same(2.0), **own})),
        ("export with dtype='float32'", exported("c.onnx", arc, dtype="float64"),
         exported("c.onnx", arc, dtype="float32")),
        ("apply it to the rows before training", exported("d.onnx", {"transforms": [half]}),
         exported("d.onnx")),
        ("export a model of the pixels, or predict with streamkern",
         lambda: of_images("g.onnx", patch_features=3), lambda: of_images("g.onnx")),
        ("give the path of a local file$", exported("s3://bucket/e.onnx"), exported("e.onnx")),
        ("give the path of a file in it", in_a_folder, exported("f.onnx")),
        ("give the column another name", lambda: column("predictions"), lambda: column("X")),
        ("give the column a name", lambda: column(""), lambda: column("c0")),
        ("load the model with streamkern.load", sparse_model, lambda: exported("h.onnx")()),
        ("or train with fewer different words", lambda: words(11_000), lambda: words(300)),
    ]  # fmt: skip


TABLES = (export_cases,)
