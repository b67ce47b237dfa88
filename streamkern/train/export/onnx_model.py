"""Write a model as an ONNX file, or as a C file that is generated from the same graph."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.text import redact, size_text
from streamkern.basics.version import __version__
from streamkern.basics.warning import warn
from streamkern.filesystem.durable import (
    check_writable,
    disk_full_hint,
    make_folders,
    write_atomically,
)
from streamkern.filesystem.path_kinds import local_file
from streamkern.ingest.tables.encoder import Encoder
from streamkern.kernels.base import Kernel
from streamkern.predict.probabilities import Isotonic, Softmax
from streamkern.store.class_labels import labels_from_names
from streamkern.train.export.c_operators import c_text
from streamkern.train.export.c_source import check_size, identifier
from streamkern.train.export.features import interpolate, plain_rows, scale_features, table_rows
from streamkern.train.export.leaves import unequal_leaves
from streamkern.train.export.traced import Graph, Traced, TracedModule
from streamkern.train.model.kernel_model import KernelModel

EXPORT_DTYPES = ("auto", "float32", "float64")
MAX_ONNX_BYTES = 2_000_000_000
"""Largest size of an ONNX file in bytes, which is limited by protocol buffers."""
MIN_LABEL_SCORE = 0.5
"""Score above which a row has a label, if rows may have several labels."""


@dataclass(frozen=True)
class ExportedOutputs:
    """The form of the outputs of an exported model.

    classes : (c,) labels in ascending order; None for numeric targets
    order : (c,) index of the model's output for each of these labels; None without classes
    indicator : whether a row may have several labels; each output is then the score of a label
    flat : whether the predictions of one target have the shape (n,) and not (n, 1)
    """

    classes: npt.NDArray[Any] | None = None
    order: npt.NDArray[np.int64] | None = None
    indicator: bool = False
    flat: bool = False

    @classmethod
    def of_run(cls, model: KernelModel, facts: Mapping[str, Any]) -> ExportedOutputs:
        """Return the form of the outputs for a model of a run. facts : facts of its setup"""
        flat = bool(facts.get("flat", model.n_outputs == 1)) and model.levels is None
        if facts.get("indicator") is not None:
            return cls(indicator=True)
        if model.classes is None:
            return cls(flat=flat)
        labels = labels_from_names(model.classes, facts.get("labels"))
        order = np.argsort(labels, kind="stable")
        return cls(labels[order], order)


def write_onnx(
    model: KernelModel, centers: npt.NDArray[Any], outputs: ExportedOutputs,
    path: str | os.PathLike[str], *, dtype: str = "auto", overwrite: bool = False,
) -> None:  # fmt: skip
    """Write a model to an ONNX file, atomically.

    Parameters
    ----------
    centers : (p, d) scaled centers in the order of the weights, before the metric is applied
    outputs : form of the outputs
    path : path of the file, which ends in .onnx
    dtype : arithmetic of the kernel, "float32" or "float64"; "auto": as for predictions.
        float32 gives a warning for a model whose weights may multiply rounding errors: it was
        solved in float64, or its predictions are summed in float64 (see `wide_sum`).
    overwrite : whether to replace an existing file

    Raises
    ------
    ConfigError
        The model has parts that ONNX cannot express, or is larger than 2 GB; or the path has
        another ending, is a folder, a URL or an existing file, or cannot be written.
    MissingDependencyError
        onnx is not installed.
    """
    checked_ending(path, ".onnx")
    file_path = checked_path(path, overwrite)
    graph_model = onnx_model(model, centers, outputs, export_dtype(model, dtype))
    _write(file_path, graph_model.SerializeToString(), overwrite)


def write_c(
    model: KernelModel, centers: npt.NDArray[Any], outputs: ExportedOutputs,
    path: str | os.PathLike[str], *, dtype: str = "auto", overwrite: bool = False,
) -> None:  # fmt: skip
    """Write a model to a C file without dependencies. Parameters and errors: see `write_onnx`.

    Raises ConfigError also if the file would be larger than `MAX_C_FILE_BYTES`.
    """
    checked_ending(path, ".c")
    file_path = checked_path(path, overwrite)
    graph_model = onnx_model(model, centers, outputs, export_dtype(model, dtype), for_runtime=False)
    check_size(graph_model)
    kernel = repr(model.op.kernel).replace("*/", "* /")
    headline = f"A model of streamkern {__version__} with the kernel {kernel}."
    stem = identifier(file_path.stem)
    text = c_text(graph_model, stem if stem[:1].isalpha() else f"model_{stem}", headline)
    _write(file_path, text.encode(), overwrite)


def checked_ending(path: Any, *endings: str) -> str:
    """Return the ending of a path, one of `endings`. Raises ConfigError if it has another one."""
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(
            f"{mention('path', path)} is not the path of a file", f'give one, "model{endings[0]}"'
        )
    text = os.fspath(path)
    ending = next((ending for ending in endings if text.endswith(ending)), None)
    if ending is None:
        raise ConfigError(
            f"{redact(text)!r} does not end in {' or '.join(endings)}",
            f"give {' or '.join(redact(text) + ending for ending in endings)}",
        )
    return ending


def checked_path(path: str | os.PathLike[str], overwrite: bool) -> Path:
    """Return the local path of the file. Raises ConfigError if it cannot be written."""
    file_path = local_file(path, "the export")
    if file_path.is_dir():
        raise ConfigError(f"{file_path} is a folder", "give the path of a file in it")
    if file_path.exists() and not overwrite:
        remedy = f"give another path, or {mention('overwrite', True)}"
        raise ConfigError(f"{file_path} exists already", remedy)
    check_writable(file_path)
    return file_path


def export_dtype(model: KernelModel, dtype: str) -> np.dtype[Any]:
    """Return the dtype of an export; warn if it loses accuracy. dtype : see `write_onnx`"""
    if dtype not in EXPORT_DTYPES:
        raise ConfigError(f"{mention('dtype', dtype)} is not known", f"use one of {EXPORT_DTYPES}")
    sums_in_float64 = model.kernel_sum.op.dtype == np.float64
    if dtype == "auto":
        dtype = "float64" if sums_in_float64 else "float32"
    elif dtype == "float32" and model.op.dtype == np.float64:
        warn(
            "the model was solved in float64, and its weights may multiply the rounding errors of "
            "float32 kernel values so that the predictions of the file are useless; compare them "
            f"with the model's, or leave out {mention('dtype', dtype)}"
        )
    elif dtype == "float32" and sums_in_float64:
        warn(
            "the rounding errors of float32 are visible in the predictions of this model, which "
            "therefore computes its sums in float64; compare the predictions of the file with the "
            f"model's, or leave out {mention('dtype', dtype)}"
        )
    return np.dtype(dtype)


def _write(file_path: Path, data: bytes, overwrite: bool) -> None:
    with disk_full_hint(str(file_path), resumes=False):
        make_folders(file_path.parent)
        write_atomically(file_path, data, exclusive=not overwrite)


def onnx_model(
    model: KernelModel, centers: npt.NDArray[Any], outputs: ExportedOutputs, dtype: np.dtype[Any],
    *, for_runtime: bool = True,
) -> Any:  # fmt: skip
    """Return the ONNX model; see `write_onnx`. for_runtime : see `Graph`"""
    size = (centers.size + len(centers) * model.n_outputs) * dtype.itemsize
    if size > MAX_ONNX_BYTES:
        raise ConfigError(
            f"the centers and weights take {size_text(size)}, more than the 2 GB of an ONNX file",
            "train with fewer centers",
        )
    graph = Graph(for_runtime)
    if model.encoder is None:
        X = plain_rows(graph, model.row_shape, dtype, sparse=model.op.kernel.sparse)
    else:
        X = table_rows(graph, Encoder.from_json(model.encoder, "the model"))
    X = scale_features(graph, X, model.fixed_transforms, centers.shape[1])
    # Round features as in training, because categorical ones are compared for equality.
    X = X.astype(model.op.dtype).astype(dtype)
    F = _kernel_values(graph, model, X, centers) @ model.backend.to_host(model.weights)
    _add_outputs(graph, model, F, outputs)
    return graph.model({"streamkern_version": __version__, "kernel": repr(model.op.kernel)})


def _kernel_values(
    graph: Graph, model: KernelModel, X: Traced, centers: npt.NDArray[Any]
) -> Traced:
    """Return K(X, Z), (n, p). X : (n, d), scaled. centers : (p, d), scaled"""
    kernel, dtype = model.op.kernel, X.dtype
    xp = TracedModule(graph, repr(kernel))
    Z, column_numbers = kernel.columns(np.asarray(centers, np.float64))
    unequal_terms = [
        X.take([j], axis=1).equals(Z[None, :, j]).astype(dtype) * -weight + weight
        for j, weight in kernel.categorical
    ]
    if kernel.trees is not None:
        factor = kernel.trees.weight / len(kernel.trees)
        unequal_terms.append(unequal_leaves(graph, X, kernel.trees, Z) * factor)
    if model.op.origin is not None and kernel.geometry != "inner":
        X, Z = (A - np.asarray(model.op.origin, np.float64) for A in (X, Z))
    X, Z = (_in_metric(kernel, A) for A in (X, Z))
    if model.op.precision == "fast":  # this precision rounds the points to float16
        X, Z = (A.astype(np.float16).astype(A.dtype) for A in (X, Z))
    if kernel.geometry == "l1":
        differences = X.reshape(-1, 1, Z.shape[1]) - Z[None]
        return _as_traced(kernel.profile(xp.abs(differences).sum(axis=2), xp))
    row_terms, center_terms = (X * X).sum(axis=1, keepdims=True), (Z * Z).sum(axis=1)
    products = X @ Z.T
    if kernel.geometry == "inner":
        column_terms = graph.add_constant(
            center_terms if column_numbers is None else column_numbers, dtype
        )
        return _as_traced(kernel.of_products(products, row_terms, column_terms, xp))
    squares = products * -2.0 + row_terms + center_terms
    for term in unequal_terms:
        squares += term * (1 / kernel.bandwidth**2)
    return _as_traced(kernel.profile(xp.maximum(squares, 0), xp))


def _as_traced(values: Any) -> Traced:
    """Return the result of a kernel's function, which has traced it, for the type checker."""
    assert isinstance(values, Traced)
    return values


def _in_metric(kernel: Kernel, A: Any) -> Any:
    """Return points (n, d) divided by the bandwidth, and mapped by the metric."""
    if kernel.metric is None:
        return A * (1 / kernel.bandwidth)
    metric = kernel.metric / kernel.bandwidth
    return A * metric if metric.ndim == 1 else A @ metric


def _add_outputs(graph: Graph, model: KernelModel, F: Traced, outputs: ExportedOutputs) -> None:
    """Add the outputs of the graph. F : (n, c), K(X, Z) times the weights"""
    dtype, c = F.dtype, model.n_outputs
    for_classes = outputs.classes is not None
    xp = TracedModule(graph, repr(model.loss))
    # As in `KernelModel`, numeric outputs are float64, so that a large mean costs no digits.
    F = model.targets.in_target_units(xp, F, dtype if for_classes else np.float64)
    if for_classes:
        _add_classes(graph, model, F, outputs)
        return
    if model.calibration is not None and model.calibration.shifts is not None:
        F += model.calibration.shifts
    if model.loss is not None:
        F = model.loss.ordered(xp, model.loss.predict(xp, F))
    if outputs.indicator:
        graph.add_output((F > MIN_LABEL_SCORE).astype(np.int64), "labels", (c,))
        graph.add_output(F.astype(dtype), "scores", (c,))
    elif outputs.flat:
        graph.add_output(F.astype(dtype).reshape(-1), "predictions", ())
    else:
        graph.add_output(F.astype(dtype), "predictions", (c,))


def _add_classes(graph: Graph, model: KernelModel, F: Traced, outputs: ExportedOutputs) -> None:
    """Add labels (n,), probabilities (n, c) if the model has them, and scores (n, c)."""
    classes, order, c = outputs.classes, outputs.order, model.n_outputs
    assert classes is not None

    def in_order(values: Traced) -> Traced:
        return values if order is None else values.take(order, axis=1)

    scores = in_order(F)
    best_index = graph.add_node("ArgMax", scores, dtype=np.int64, axis=1, keepdims=0)
    labels, kind = _label_values(classes)
    graph.add_output(
        graph.add_node("Gather", graph.add_constant(labels, kind), best_index, axis=0), "labels", ()
    )
    estimator = None if model.calibration is None else model.calibration.probabilities
    if estimator is not None:
        p = _probabilities(graph, F.astype(np.float64), estimator)
        graph.add_output(in_order(p).astype(F.dtype), "probabilities", (c,))
    graph.add_output(scores, "scores", (c,))


def _label_values(classes: npt.NDArray[Any]) -> tuple[Any, npt.DTypeLike]:
    """Return labels and their dtype in ONNX: int64, bool, float64 or text."""
    kinds: dict[str, npt.DTypeLike] = {"i": np.int64, "u": np.int64, "b": np.bool_, "f": np.float64}
    kind = kinds.get(classes.dtype.kind)
    if kind is not None:
        return classes, kind
    # `tolist` turns some dates into numbers, and others into different dates.
    labels = classes if classes.dtype.kind in "mM" else classes.tolist()
    return [str(label) for label in labels], np.str_


def _probabilities(graph: Graph, F: Traced, estimator: Softmax | Isotonic) -> Traced:
    """Return probabilities (n, c) of values (n, c)."""
    if isinstance(estimator, Softmax):
        return graph.add_node("Softmax", F * estimator.slope + estimator.shift, axis=1)
    piece_ends = estimator.ends.tolist()
    columns = [
        interpolate(graph, F.take([k], axis=1), estimator.knots[a:b], estimator.values[a:b])
        for k, (a, b) in enumerate(pairwise(piece_ends))
    ]
    p = graph.add_node("Concat", *columns, axis=1)
    return graph.add_node("Div", p, p.sum(axis=1, keepdims=True))
