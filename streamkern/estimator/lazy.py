"""Lazy predictions for a Dask array or data frame, computed one block of rows after another.

They use the model at the moment of the call, even if the estimator is fitted again before they are
computed.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy.typing as npt

from streamkern.basics.optional import on_demand
from streamkern.estimator import inputs
from streamkern.ingest.frames import is_dask_table, names_of_columns
from streamkern.ingest.numeric import as_dask_array

# Dask computes blocks on many threads. One block at a time is predicted, on all processors.
_BLOCK_LOCK = threading.Lock()

# Attributes that predictions do not need. They may be large, or may not be picklable: callbacks
# hold files and connections.
_TRAINING_ATTRIBUTES = ("_skl_callbacks", "callbacks", "centers", "metric", "transforms")


def is_lazy(X: Any) -> bool:
    """Return whether predictions for X are lazy: X is computed by Dask."""
    return hasattr(X, "__dask_graph__")


def predict_lazy_array(estimator: Any, X: Any, method: str, meta: npt.NDArray[Any]) -> Any:
    """Return a Dask array of `estimator._predict_block(block, method)`, chunked as the rows of X.

    X : a Dask array, or a Dask data frame, whose columns are found by name
    meta : the prediction for an array without rows, which has the dtype and number of columns

    Raises the errors that arrays in memory would raise, if they are detected without computing.
    """
    if is_dask_table(X):
        X = as_dask_array(X, "X", order_lazy_columns(estimator, X))
    inputs.check_features(estimator, X)
    if any(count > 1 for count in X.numblocks[1:]):
        X = X.rechunk(dict.fromkeys(range(1, X.ndim), -1))
    return X.map_blocks(
        _predict_one_block, on_demand("dask").delayed(_copy_for_prediction(estimator)), method,
        chunks=(X.chunks[0], *((k,) for k in meta.shape[1:])),
        drop_axis=list(range(meta.ndim, X.ndim)), dtype=meta.dtype, meta=meta,
    )  # fmt: skip


def predict_lazy_frame(estimator: Any, table: Any, method: str, meta: Any) -> Any:
    """Return predictions as a Dask data frame or series, indexed as `table`.

    meta : the prediction for a table without rows, a pandas object
    """
    columns = order_lazy_columns(estimator, table)
    table = table if columns is None else table[columns]
    predictor = on_demand("dask").delayed(_copy_for_prediction(estimator, as_frame=True))
    return table.map_partitions(_predict_one_block, predictor, method, meta=meta)


def order_lazy_columns(estimator: Any, table: Any) -> list[str] | None:
    """Return the columns of a Dask frame in the order of training; None if names are missing."""
    if table.ndim != 2:
        return None
    return inputs.order_columns(names_of_columns(table), estimator._state.schema.columns)


def _copy_for_prediction(estimator: Any, *, as_frame: bool = False) -> Any:
    """Return a copy of the estimator that predicts, without its state for training.

    as_frame : whether it predicts data frames; otherwise it takes and returns arrays
    """
    predictor = estimator._snapshot()
    for name in _TRAINING_ATTRIBUTES:
        vars(predictor).pop(name, None)
    fitted = predictor._state.without_training_state()
    if not as_frame:
        fitted = replace(fitted, schema=replace(fitted.schema, named_by_store=True))
        vars(predictor).pop("_sklearn_output_config", None)
    predictor._fitted_ = fitted
    return predictor


def _predict_one_block(block: Any, estimator: Any, method: str) -> Any:
    """Return the predictions for a block of rows."""
    with _BLOCK_LOCK:
        return estimator._predict_block(block, method)
