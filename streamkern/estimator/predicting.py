"""Predictions of a fitted estimator: in memory, written to a file, or lazy for a Dask array."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import numpy as np
import numpy.typing as npt
from sklearn.utils.validation import check_is_fitted

from streamkern.basics.errors import ConfigError, DataError
from streamkern.basics.message import mention
from streamkern.basics.optional import import_optional
from streamkern.basics.text import some
from streamkern.estimator import inputs
from streamkern.estimator.files import is_files, open_file_rows, open_without_targets
from streamkern.estimator.fitted import FittedAttribute, Schema
from streamkern.estimator.lazy import is_lazy, predict_lazy_array, predict_lazy_frame
from streamkern.estimator.mistakes import hide_traceback
from streamkern.estimator.opened_model import ModelOpeningMixin
from streamkern.ingest.columns import unused_columns
from streamkern.ingest.convert_input import convert_input
from streamkern.ingest.frames import is_dask_table, is_frame
from streamkern.ingest.numeric import frame_numbers, is_sparse
from streamkern.ingest.tables.encoder import Encoder
from streamkern.losses.losses import loss_for_figures
from streamkern.predict.prediction_table import QUANTILE_TOLERANCE, OutputFormat
from streamkern.store.sparse_rows import PackedRows
from streamkern.stream.sources.alignment import check_row_shape
from streamkern.stream.sources.arrays import ArraySource

_P = ParamSpec("_P")
_T = TypeVar("_T")

OUTPUT_CONTAINERS = ("default", "pandas")
"""Values of the argument `predict` of `set_output`."""
INTERVAL_COLUMNS = ("lower", "upper")
"""Names of the columns of intervals in a data frame."""


def on_snapshot(method: Callable[Concatenate[Any, _P], _T]) -> Callable[Concatenate[Any, _P], _T]:
    """Decorate a public method so that it works on a snapshot of the estimator.

    Changes by other threads during the call have no effect on it. Without a fit it raises
    NotFittedError.
    """

    @hide_traceback
    @functools.wraps(method)
    def call(estimator: Any, /, *args: _P.args, **values: _P.kwargs) -> _T:
        snapshot = estimator._snapshot()
        check_is_fitted(snapshot)
        return method(snapshot, *args, **values)

    return call


class PredictionMixin(ModelOpeningMixin):
    """Mixin of estimators: fitted attributes, and predictions in all forms."""

    n_features_in_ = FittedAttribute()
    feature_names_in_ = FittedAttribute()
    centers_ = FittedAttribute()
    dual_coef_ = FittedAttribute()
    intercept_ = FittedAttribute()
    kernel_ = FittedAttribute()
    bandwidth_ = FittedAttribute()
    n_centers_ = FittedAttribute()
    ridge_ = FittedAttribute()
    solver_ = FittedAttribute()
    history_ = FittedAttribute()
    loss_curve_ = FittedAttribute()
    validation_scores_ = FittedAttribute()
    n_iter_ = FittedAttribute()
    report_ = FittedAttribute()

    def __sklearn_is_fitted__(self) -> bool:
        return self._fitted_ is not None

    def _snapshot(self) -> Self:
        """Return a shallow copy, with the parameters and the fit of this moment."""
        snapshot = object.__new__(type(self))
        vars(snapshot).update(vars(self))  # one step of the interpreter, so threads do not matter
        return snapshot

    def _copy_for_checks(self, schema: Schema | None = None) -> Self:
        """Return a copy on which scikit-learn's checks can set `n_features_in_` and other names.

        schema : schema whose attributes the checks compare with
        """
        estimator = self._snapshot()
        vars(estimator).pop("_fitted_", None)
        vars(estimator).update({} if schema is None else schema.attributes)
        return estimator

    @property
    def encoded_features_(self) -> npt.NDArray[Any]:
        """(d,) names of the features that the encoder made of the columns of a table.

        They are in the order of the columns of `centers_`, and of `metric_importances_`.
        """
        schema = self._state.schema
        if schema.encoder is None:
            raise AttributeError(
                "this model was trained on numbers without encoding, so it has no "
                "encoded_features_; use get_feature_names_out()"
            )
        return np.array(schema.columns, dtype=object)

    def set_output(self, *, predict: str | None = None, transform: Any = None) -> Self:
        """Set the container of predictions and scores.

        Parameters
        ----------
        predict : "pandas": a Series or DataFrame with the index of X, and the names of the
            targets or classes; rows without an index are numbered. A Dask data frame gives a lazy
            one, and a Dask array, which has no index, a Dask array. "default": an array. None:
            unchanged.
        transform : for transformers; only None and "default" are accepted.

        Returns
        -------
        self : the estimator; clones and copies of it have the same setting.

        Raises
        ------
        ConfigError
            `predict` is another value, or `transform` is set.
        """
        if transform not in (None, "default"):
            raise ConfigError(
                f"{mention('transform', transform)} is for transformers, but "
                f"{type(self).__name__} has no transform",
                "give predict='pandas' for predictions with the index of X",
            )
        if predict not in (None, *OUTPUT_CONTAINERS):
            raise ConfigError(f"predict={predict!r} must be one of {some(OUTPUT_CONTAINERS)}")
        if predict is not None:
            self._sklearn_output_config = {"predict": predict}  # which `clone` copies
        return self

    _sklearn_output_config: Mapping[str, str] = {}

    @property
    def _returns_frames(self) -> bool:
        """True if predictions are returned as pandas objects."""
        return self._sklearn_output_config.get("predict") == "pandas"

    def _predict(self, X: Any, method: str) -> Any:
        """Return predictions for X in the container of `set_output`.

        method : name of the method that computes the predictions from f(X), such as "_labels"
        """
        X = convert_input(X, "X")
        if not is_lazy(X):
            return self._in_container(getattr(self, method)(self._values(X)), X, method)
        X = self._without_targets(X, self._state.schema)
        as_frame = self._returns_frames and is_dask_table(X)
        meta = self._empty_prediction(X, method, as_frame=as_frame)
        return (predict_lazy_frame if as_frame else predict_lazy_array)(self, X, method, meta)

    def _predict_block(self, X: Any, method: str) -> Any:
        """Return predictions for a block of a Dask array, which may be empty after a filter."""
        if not X.shape[0]:
            return self._empty_prediction(X, method, as_frame=self._returns_frames)
        return self._predict(X, method)

    def _empty_prediction(self, X: Any, method: str, *, as_frame: bool) -> Any:
        """Return the predictions for no rows, which show their dtype, columns and container."""
        no_outputs = np.zeros((0, len(self._state.targets.mean)), self._dtype)
        predictions = getattr(self, method)(no_outputs)
        return self._to_frame(predictions, X, method) if as_frame else predictions

    def _in_container(self, predictions: npt.NDArray[Any], X: Any, method: str) -> Any:
        """Return predictions in the container of `set_output`."""
        return self._to_frame(predictions, X, method) if self._returns_frames else predictions

    def _to_frame(self, predictions: npt.NDArray[Any], X: Any, method: str) -> Any:
        """Return predictions as a pandas object with the index of X, if it has one.

        Intervals have the two columns `INTERVAL_COLUMNS`, or these two for each output.
        """
        pandas = import_optional("pandas", 'set_output(predict="pandas")', "frames")
        X = X.to_native() if is_frame(X) else X
        index = getattr(X, "index", None) if isinstance(X, pandas.DataFrame) else None
        names = self._column_names(method)
        if method == "_ends":  # intervals, (n, 2) or (n, c, 2)
            columns: Any = list(INTERVAL_COLUMNS)
            if predictions.ndim == 3:
                columns = pandas.MultiIndex.from_product(
                    [names or range(predictions.shape[1]), INTERVAL_COLUMNS]
                )
            return pandas.DataFrame(predictions.reshape(len(predictions), -1), index, columns)
        if predictions.ndim == 1:
            return pandas.Series(predictions, index, name=None if names is None else names[0])
        return pandas.DataFrame(predictions, index, names)

    def _column_names(self, _method: str) -> Sequence[Any] | None:
        """Return the names of the columns of predictions."""
        schema, loss = self._state.schema, loss_for_figures(self._state.meta)
        names = schema.output_names or schema.target_columns
        return names if loss is None else loss.output_names(names)

    @property
    def _dtype(self) -> np.dtype[Any]:
        """Dtype of f(X)."""
        fitted = self._state
        if fitted.schema.classes is None:
            return np.dtype(np.float64)
        dtype: np.dtype[Any] = fitted.attributes["dual_coef_"].dtype
        return dtype

    def _values(self, X: Any, **appended: bool) -> npt.NDArray[Any]:
        """Return f(X), (n, c). appended : columns to append, as in `KernelModel.values`"""
        schema = self._state.schema
        if is_files(X):
            with self._model() as model, open_file_rows(X, schema, targets=False) as rows:
                return np.concatenate([F for _, _, F in model.predicted_tiles(rows, **appended)])
        if not inputs.is_stream(X):
            rows = self._check_rows(X, schema)
            with self._model(rows.shape[0]) as model:
                return model.values(rows, **appended)
        source = open_without_targets(X, schema)
        with self._model() as model:
            return model.predict(source, **appended)

    def _as_targets(self, F: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return outputs (n, c) in the shape that y had in training, (n,) or (n, c)."""
        return F[:, 0] if self._state.flat else F

    def _predict_quantiles(self, X: Any, quantiles: Sequence[float]) -> Any:
        """Return the outputs, (n, q), for some of the quantiles of a model that has several."""
        levels = self._state.levels
        if levels is None:
            raise ConfigError(
                f"{mention('quantiles=')} chooses outputs of a model of several quantiles, but "
                "this model has no quantiles to choose from",
                "leave it out, or train with a list as quantile",
            )
        try:
            requested = np.atleast_1d(np.asarray(quantiles, np.float64))
        except (TypeError, ValueError):
            requested = np.empty(0)
        if requested.ndim != 1 or not len(requested):
            raise ConfigError(
                f"{mention('quantiles', quantiles)} must be a number or a list of numbers",
                f"choose from {some([f'{q:g}' for q in levels])}",
            )
        # The output of each requested quantile; none if the model lacks the quantile.
        columns = [
            k
            for q in requested
            for k in np.flatnonzero(np.isclose(levels, q, 0, QUANTILE_TOLERANCE))
        ]
        if len(columns) != len(requested):
            raise ConfigError(
                f"{mention('quantiles', requested.tolist())} must be among the quantiles that the "
                f"model was trained for, {some([f'{q:g}' for q in levels])}",
                "correct it, or train a model for these quantiles",
            )
        predictions = self._predict(X, "_as_targets")
        return (
            predictions.iloc[:, columns]
            if hasattr(predictions, "iloc")
            else predictions[:, columns]
        )

    def _predict_interval(self, X: Any, interval: float, normalised: bool) -> tuple[Any, Any]:
        """Return values and the ends of their intervals, for rows that are not lazy."""
        calibration, lacking = self._state.calibration, self._needed_calibration_text
        loss, c = loss_for_figures(self._state.meta), len(self._state.targets.mean)
        form = OutputFormat.from_request(
            calibration, None, False, interval, lacking, normalised, loss
        )
        X = self._check_not_lazy(X, f"interval={interval!r}")
        values = form(self._values(X, spread=normalised))
        if form.ends is not None:  # two of the quantiles of a model of several
            F, intervals = values[:, :c], values[:, c:]
        else:
            F, *ends = np.split(values, 3, axis=1)
            intervals = np.stack(ends, axis=2)
            intervals = intervals[:, 0] if self._state.flat else intervals
        F = self._in_container(self._as_targets(F), X, "_as_targets")
        return F, self._in_container(intervals, X, "_ends")

    def _predict_std(self, X: Any) -> tuple[Any, Any]:
        """Return values and their standard deviations, for rows that are not lazy."""
        X = self._check_not_lazy(X, "return_std=True")
        F, std = map(self._as_targets, np.split(self._values(X, std=True), 2, axis=1))
        return self._in_container(F, X, "_as_targets"), self._in_container(std, X, "_as_targets")

    @staticmethod
    def _check_not_lazy(X: Any, request: str) -> Any:
        """Return X, see `convert_input`; ConfigError if it is lazy.

        request : the argument that needs rows in memory, for the message
        """
        X = convert_input(X, "X")
        if is_lazy(X):
            raise ConfigError(
                f"{request} is not available for Dask arrays, whose predictions are lazy",
                "give X as an array, a store or a source",
            )
        return X

    def _write(self, X: Any, out: Any, **options: Any) -> None:
        """Write the predictions to `out`. options : as in `KernelModel.predict_to`"""
        with contextlib.ExitStack() as stack:
            source = self._open_rows(X, stack)
            stack.enter_context(self._model()).predict_to(source, out, **options)

    def _open_rows(self, X: Any, stack: contextlib.ExitStack) -> Any:
        """Return a source of the rows of X, in any form that `predict` takes, without targets.

        stack : closes the files that this method opens
        """
        X = convert_input(X, "X")
        schema = self._state.schema
        if is_files(X):
            return stack.enter_context(open_file_rows(X, schema, targets=False))
        if inputs.is_stream(X):
            return open_without_targets(X, schema)
        source = ArraySource(self._check_rows(X, schema))
        source.encoder = schema.encoder
        return source

    @staticmethod
    def _without_targets(X: Any, schema: Schema) -> Any:
        """Return a data frame without columns that were no features of the training table.

        They are its targets and weights, and the columns that `ingest` left out. Other data are
        returned unchanged. Raises DataError for a Dask data frame if the model encodes columns.
        """
        unused = {*(schema.target_columns or ()), schema.weight_column}
        unused |= {*unused_columns(schema.file_form)}
        unused -= {*(schema.given_columns or ())}
        if is_frame(X):
            columns = [name for name in X.columns if name in unused]
            return X.drop(columns) if columns else X
        if is_dask_table(X) and X.ndim == 2:
            if schema.encoder is not None:
                raise DataError(
                    "X is a Dask data frame, but the model encodes text, dates or missing values, "
                    "and Dask data frames must be numeric",
                    "give X.compute() if it fits in memory, or predict one partition at a time: "
                    "[model.predict(part.compute()) for part in X.partitions]",
                )
            return X.drop(columns=[name for name in X.columns if name in unused])
        return X

    def _check_rows(self, X: Any, schema: Schema) -> Any:
        """Return checked rows in memory, with the row shape of the training data.

        Flattened images get that shape. A data frame is encoded by the encoder of the training.
        Sparse rows stay sparse. Raises RowShapeError for rows of another shape or another number
        of features, and DataError for rows that are not finite numbers.
        """
        X = self._without_targets(X, schema)
        if schema.encoder is not None:
            rows = inputs.encode_rows(X, Encoder.from_json(schema.encoder, "the model"))
        else:
            estimator = self._copy_for_checks(schema)
            numbers = frame_numbers(X, "X") if is_frame(X) else None
            rows = inputs.checked_rows(
                estimator, X, reset=False, nameless=schema.named_by_store, numbers=numbers
            )
        if schema.sparse:
            return PackedRows.of_matrix(rows)
        check_row_shape("X has", rows.shape[1:], "the model was trained on", schema.row_shape)
        return rows if is_sparse(rows) else rows.reshape(len(rows), *schema.row_shape)
