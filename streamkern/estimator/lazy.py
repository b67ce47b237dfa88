"""Predictions for a Dask array or data frame: lazy like it, one block of rows after another.

They use the model at the moment of the call, even if its estimator is fitted again before they are
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

# Dask computes blocks on many threads, and each block uses all threads and memory of its own.
_TURN = threading.Lock()

# Large ones, or objects of the user: callbacks hold files and connections of one process.
_OF_TRAINING = ("_skl_callbacks", "callbacks", "centers", "metric", "transforms")


def is_lazy(X: Any) -> bool:
    """Return whether predictions for X are lazy: X is computed by Dask."""
    return hasattr(X, "__dask_graph__")


def lazy_answers(estimator: Any, X: Any, method: str, like: npt.NDArray[Any]) -> Any:
    """Return a Dask array of `estimator._answer_of_block(block, method)`, chunked as the rows of X.

    like : the prediction for no rows
    X : a Dask array, or data frame, whose columns go by name

    Raises the errors for arrays in memory as far as they are detected without computing.
    """
    if is_dask_table(X):
        X = as_dask_array(X, "X", lazy_columns_in_order(estimator, X))
    inputs.check_features(estimator, X)
    if any(count > 1 for count in X.numblocks[1:]):
        X = X.rechunk(dict.fromkeys(range(1, X.ndim), -1))
    return X.map_blocks(
        _answer, on_demand("dask").delayed(_now(estimator)), method,
        chunks=(X.chunks[0], *((k,) for k in like.shape[1:])),
        drop_axis=list(range(like.ndim, X.ndim)), dtype=like.dtype, meta=like,
    )  # fmt: skip


def framed_answers(estimator: Any, table: Any, method: str, like: Any) -> Any:
    """Return these predictions as a Dask data frame, or column, with the index of `table`."""
    columns = lazy_columns_in_order(estimator, table)
    table = table if columns is None else table[columns]
    return table.map_partitions(
        _answer, on_demand("dask").delayed(_now(estimator, framed=True)), method, meta=like
    )


def lazy_columns_in_order(estimator: Any, table: Any) -> list[str] | None:
    """Return the columns of a Dask frame in the order trained on; None if they go by position."""
    if table.ndim != 2:
        return None
    return inputs.columns_in_order(names_of_columns(table), estimator._state.schema.columns, "X")


def _now(estimator: Any, *, framed: bool = False) -> Any:
    """Return the present estimator without its state for training; for blocks without names."""
    still = estimator._snapshot()
    for name in _OF_TRAINING:
        vars(still).pop(name, None)
    fitted = still._state.to_predict()
    if not framed:
        fitted = replace(fitted, schema=replace(fitted.schema, named_by_store=True))
        vars(still).pop("_sklearn_output_config", None)
    still._fitted_ = fitted
    return still


def _answer(block: Any, estimator: Any, method: str) -> Any:
    with _TURN:
        return estimator._answer_of_block(block, method)
