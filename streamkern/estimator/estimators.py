"""Kernel regression and classification with scikit-learn's interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from sklearn.base import ClassifierMixin, RegressorMixin

from streamkern.basics.errors import ConfigError, DataError
from streamkern.basics.message import mention
from streamkern.estimator import inputs, targets
from streamkern.estimator.base import KernelEstimator
from streamkern.estimator.class_predictions import ClassPredictionMixin
from streamkern.estimator.docstrings import docstring
from streamkern.estimator.files import missing_targets_error, remove_temporary_stores, resolve_data
from streamkern.estimator.labels import (
    Labels,
    SeveralLabels,
    check_label_columns,
    check_target_form,
    checked_indicator,
    checked_labels,
    checked_lazy_indicator,
    indicator_labels,
    is_indicator,
    target_shape,
)
from streamkern.estimator.mistakes import hide_traceback, suggest_keywords
from streamkern.estimator.predicting import on_snapshot
from streamkern.ingest.numeric import is_sparse
from streamkern.predict.prediction_table import NO_POSTERIOR, check_normalised
from streamkern.stream.sources.alignment import align_classes
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.base import BaseSource

__all__ = ["KernelClassifier", "KernelRegressor"]


@suggest_keywords
@dataclass(kw_only=True, eq=False, repr=False)
class KernelRegressor(RegressorMixin, KernelEstimator):  # type: ignore[misc]
    __doc__ = docstring(
        """Least-squares regression with f(x) = mean(y) + sum_j alpha_j k(x, z_j), by streaming.

X may be an array, a DataFrame, or a store, which is read in pieces. Features are scaled, see
`scale`.
""",
        """\
>>> import numpy as np, streamkern
>>> X = np.random.default_rng(0).uniform(-2, 2, (300, 2))
>>> y = np.sin(X).sum(axis=1)
>>> model = streamkern.KernelRegressor().fit(X[:200], y[:200])
>>> model.score(X[200:], y[200:]) > 0.99
True
""",
        {"posterior": False, "target_transform": "auto"},
    )

    posterior: bool = False
    target_transform: str = "auto"

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    @hide_traceback
    def partial_fit(self, X: Any, y: Any = None) -> Self:
        """Train on one more block of rows.

        The first call chooses centers, bandwidth, scaling, intercept and preconditioner from its
        block, so it should be large and representative. Every call trains `epochs` ("auto": one)
        epochs on its block with the same solver state and running average. The first call discards
        an earlier `fit`, with a warning, and raises ConfigError for a model from `compress`; a
        later `fit` starts anew. A ridge of "auto" means no ridge, because the number of rows to
        come is unknown. `run_dir` is not used; `save` stores the state. Returns the fitted
        estimator.

        Parameters
        ----------
        X : a block of rows, as in `fit`. Sample weights of a source are divided by their mean over
            the block.
        y : (n,) or (n, c) values; None if X contains them.
        """
        return self._partial_fit(X, y)

    @on_snapshot
    def predict(
        self, X: Any, *, return_std: bool = False, interval: float | None = None,
        normalised: bool = False, quantiles: Sequence[float] | None = None, out: Any = None,
        overwrite: bool = False, order: str = "source",
    ) -> Any:  # fmt: skip
        """Return predicted values.

        Parameters
        ----------
        X : rows, as in `fit`. For a store, row k of the result belongs to row k of the files or
            arrays that were ingested.
        return_std : whether to return standard deviations as well. They describe f(x) as a Gaussian
            process, without the noise of the targets, and need a fit with `posterior=True`.
        interval : level between 0 and 1, the probability with which an interval contains the
            target; the intervals are returned as well. It needs a fit with `calibrate=True`, or a
            model of several quantiles that has both ends: for 0.9 they are 0.05 and 0.95.
        normalised : whether intervals are wider for rows with larger expected residuals, and
            narrower for others, rather than equally wide for all.
        quantiles : the quantiles to return, of a model of several; default: all of them.
        out : path or URL of a file to write instead, .zarr, .npy, .csv or .parquet. Arrays of the
            size of the data are then not held in memory.
        overwrite : whether predictions of streamkern at `out` are replaced.
        order : order of the rows in `out`: "source", or "store" for the order in which the store is
            read, with the numbers of the rows.

        Returns
        -------
        y : float64, (n,) if y was (n,) or a store has one target, else (n, c); None with `out`.
            (n, q) for several quantiles, in increasing order or in the order of `quantiles`. A Dask
            array or data frame gives a lazy result. See `set_output` for the container.
        intervals : with `interval`, as (y, intervals): (n, 2) lower and upper ends, or (n, c, 2).
        std : with `return_std`, as (y, std): standard deviations in the shape of y.

        Raises
        ------
        ConfigError
            The fit cannot give the requested results, or they cannot be combined.
        DataError
            The rows do not match the training rows.
        """
        if return_std and interval is not None:
            raise ConfigError(
                f"return_std=True and interval={interval!r} cannot be combined",
                "call predict once for each",
            )
        check_normalised(interval, normalised)
        if quantiles is not None:
            if return_std or interval is not None or out is not None:
                raise ConfigError(
                    f"{mention('quantiles=')} cannot be combined with return_std, interval and out",
                    "leave it out, or leave return_std, interval and out out",
                )
            return self._predict_quantiles(X, quantiles)
        if return_std and self._state.posterior is None:
            raise ConfigError(f"return_std=True needs {NO_POSTERIOR}")
        if out is not None:
            columns = {"interval": interval, "normalised": normalised, "std": return_std}
            return self._write(X, out, overwrite=overwrite, order=order, **columns)
        if return_std:
            return self._predict_std(X)
        if interval is not None:
            return self._predict_interval(X, interval, normalised)
        return self._predict(X, "_as_targets")

    @on_snapshot
    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Return R2, the unweighted mean over the outputs; y is None if X contains it.

        It is R2 for every loss, as in scikit-learn. For a quantile or an expectile, which are not
        means, even a perfect model has a low R2. `evaluate` returns the metric of the loss, and so
        do scorers of scikit-learn, such as "neg_mean_absolute_error" and
        `make_scorer(mean_pinball_loss, alpha=0.9, greater_is_better=False)`.

        Raises ConfigError for a model of several quantiles, which has no R2; evaluate it with
        `sklearn.metrics.d2_pinball_score`.
        """
        if self._state.levels is not None:
            raise ConfigError(
                "score is R2, which is not defined for several quantiles of one target",
                "pass scoring=, or use mean_pinball_loss or d2_pinball_score of scikit-learn for "
                "each quantile",
            )
        data = resolve_data(X, y, sample_weight, self._state.schema)
        if not inputs.is_stream(data.X):
            if data.y is None:
                raise missing_targets_error(type(self).__name__, self._state.schema)
            y = targets.checked_values(data.y, target_shape(data.y)[0])
            weights = targets.checked_weights(data.sample_weight, y)
            return float(super().score(data.X, y, weights))
        return self._evaluate(X, y, sample_weight)["r2"]

    def _open_stream(
        self, X: Any, y: Any, sample_weight: Any = None, labels: Labels | None = None
    ) -> tuple[BaseSource, None]:
        source = inputs.open_stream(X, targets.to_floating(y), sample_weight)
        if source.classes is not None:
            raise DataError(
                f"the targets of the data are {source.n_outputs} classes, not values",
                "use KernelClassifier, or ingest it with targets='values'",
            )
        return source, None

    def _open_arrays(
        self, X: Any, y: Any, w: Any, labels: Labels | None = None
    ) -> tuple[ArraySource, None]:
        return ArraySource(X, targets.checked_values(y, X.shape[0]), sample_weight=w), None


@suggest_keywords
@dataclass(kw_only=True, eq=False, repr=False)
class KernelClassifier(ClassifierMixin, ClassPredictionMixin, KernelEstimator):  # type: ignore[misc]
    __doc__ = docstring(
        """Least-squares classification: regression on one-hot targets, the largest output wins.

f(x) = shares of the classes + sum_j alpha_j k(x, z_j), trained by streaming: X may be an array, a
DataFrame, or a store, which is read in pieces. Features are scaled, see `scale`. If y has a column
of 0 or 1 for each of several labels, `predict` returns the labels whose f(x) is above a half.
""",
        """\
>>> from sklearn.datasets import load_iris
>>> import streamkern
>>> X, y = load_iris(return_X_y=True)
>>> model = streamkern.KernelClassifier().fit(X[::2], y[::2])
>>> model.score(X[1::2], y[1::2]) > 0.9
True
""",
        {"class_weight": None, "class_sampling": None},
    )

    class_weight: Any = None
    class_sampling: Any = None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags

    @hide_traceback
    def partial_fit(self, X: Any, y: Any = None, classes: Any = None) -> Self:
        """Train on one more block of rows.

        The first call chooses centers, bandwidth, scaling, intercept and preconditioner from its
        block, so it should be large and representative. Every call trains `epochs` ("auto": one)
        epochs on its block with the same solver state and running average. The first call discards
        an earlier `fit`, with a warning, and raises ConfigError for a model from `compress`; a
        later `fit` starts anew. A ridge of "auto" means no ridge. `run_dir` is not used; `save`
        stores the state. Returns the fitted estimator.

        Parameters
        ----------
        X : a block of rows, as in `fit`.
        y : (n,) labels; None if X contains them.
        classes : all labels of the data; required in the first call unless its block has all.
        """
        for name in ("class_weight", "class_sampling"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"{name} cannot be used with partial_fit, because the number of rows of each "
                    "class is not known in advance",
                    f"use fit, or leave {name} out",
                )
        if classes is None:
            return self._partial_fit(X, y)
        labels = checked_labels(classes, len(classes), "classes")
        return self._partial_fit(X, y, Labels.from_targets(labels))

    @on_snapshot
    def predict(
        self, X: Any, *, interval: float | None = None, out: Any = None, overwrite: bool = False,
        order: str = "source",
    ) -> Any:  # fmt: skip
        """Return predicted labels.

        Parameters
        ----------
        X : rows, as in `fit`. For a store, row k of the result belongs to row k of the files or
            arrays that were ingested.
        interval : level between 0 and 1, the probability with which a set of classes contains the
            class; the sets are returned as well. It needs calibration rows, see `calibrate`.
        out, overwrite, order : as in `KernelRegressor.predict`.

        Returns
        -------
        y : (n,) labels with the dtype of the training labels, or (n, L) of 0 and 1 if y had a
            column for each label; None with `out`. A Dask array or data frame gives a lazy result.
            See `set_output` for the container.
        sets : with `interval`, as (y, sets): (n, c) bool, the classes in the set of each row, in
            the order of `classes_`.

        Raises
        ------
        ConfigError
            The fit has no calibration rows for sets, or `interval` and `out` are combined.
        DataError
            The rows do not match the training rows.
        """
        if interval is not None:
            self._check_sets(interval, out)
            return self._predict_sets(X, interval)
        if out is not None:
            if self._trained_labels.indicator is not None:
                raise ConfigError(
                    f"out={out!r} cannot be used for several labels of a row",
                    "leave it out, and give X as a Dask array, whose predictions can be stored in "
                    "pieces",
                )
            return self._write(X, out, overwrite=overwrite, order=order)
        return self._predict(X, "_labels")

    @on_snapshot
    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Return the accuracy, for every loss; y is None if X contains it.

        With several labels for a row, it is the share of rows with exactly the right labels.
        """
        labels = self._trained_labels
        data = resolve_data(X, y, sample_weight, self._state.schema)
        if not inputs.is_stream(data.X):
            y = data.y
            if y is None:
                raise missing_targets_error(type(self).__name__, self._state.schema)
            if self._takes_indicator(y, labels) and not is_sparse(y):
                y = checked_indicator(y, len(y))
            if labels.indicator is None:
                y = labels.to_comparable(checked_labels(y, target_shape(y)[0]))
            weights = targets.checked_weights(data.sample_weight, y)
            return float(super().score(data.X, y, weights))
        if labels.indicator is None:
            return self._evaluate(X, y, sample_weight)["accuracy"]
        if sample_weight is not None:
            raise ConfigError(
                "score cannot use sample_weight on streamed data with several labels for a row",
                "leave it out",
            )
        with remove_temporary_stores(), self._model() as model:
            source, _ = self._open_data(data.X, data.y, expected=self._state.schema)
            return self._subset_accuracy(model, source)

    def _takes_indicator(self, y: Any, labels: Labels | None) -> bool:
        """Return whether y has a column of 0 or 1 for each label.

        labels : labels of earlier data; DataError if y has another form than these

        Raises ConfigError for parameters that cannot be used with such columns.
        """
        indicator = is_indicator(y)
        if labels is not None:
            check_target_form(y, labels)
        elif indicator:
            self._check_indicator_parameters()
        return indicator

    def _check_indicator_parameters(self) -> None:
        """Raise ConfigError for parameters that are not defined for several labels of a row."""
        for name in ("class_weight", "class_sampling"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"{name} needs rows of one class each, but y has a column for each label",
                    "leave it out, or give sample_weight",
                )
        if self.calibrate is True:
            raise ConfigError(
                "calibrate=True needs rows of one class each, but y has a column for each label",
                "leave it out",
            )

    def _open_stream(
        self, X: Any, y: Any, sample_weight: Any = None, labels: Labels | None = None
    ) -> tuple[BaseSource, Labels]:
        if y is not None and self._takes_indicator(y, labels):
            source = inputs.open_stream(X, checked_lazy_indicator(y), sample_weight)
            return source, labels or indicator_labels(target_shape(y)[1], y)
        if y is not None and labels is not None:
            ids = labels.lazy_ids(y)
            return inputs.open_stream(X, ids, sample_weight, classes=labels.names), labels
        source = inputs.open_stream(X, y, sample_weight)
        if source.classes is None and source.n_outputs > 1:
            if labels is None:
                self._check_indicator_parameters()
                labels = indicator_labels(source.n_outputs)
            check_label_columns(source.n_outputs, labels)
            return SeveralLabels(source), labels
        if source.classes is None:
            raise DataError(
                "the targets of the data are values, not classes",
                "use KernelRegressor, or ingest it with targets='classes'",
            )
        if labels is None:
            if y is not None:
                n_classes, n_rows = len(source.classes), source.n_rows
                targets.refuse_numbers_as_labels(source.classes, n_rows)
                targets.refuse_values_as_labels(source.label_dtype, n_classes, n_rows)
            return source, Labels.from_names(source.classes, source.label_dtype)
        return align_classes(source, labels.names, labels.dtype, "the data"), labels

    def _open_arrays(
        self, X: Any, y: Any, w: Any, labels: Labels | None = None
    ) -> tuple[ArraySource, Labels]:
        if self._takes_indicator(y, labels):
            source = ArraySource(X, checked_indicator(y, X.shape[0]), sample_weight=w)
            return source, labels or indicator_labels(target_shape(y)[1], y)
        y = checked_labels(y, X.shape[0])
        if labels is None:
            labels = Labels.from_targets(y)
            targets.refuse_numbers_as_labels(labels.texts, len(y))
            n_classes, ids = len(labels.classes), labels.ids(y)
            targets.refuse_values_as_labels(labels.classes.dtype, n_classes, len(y), ids)
        return ArraySource(X, labels.ids(y), classes=labels.names, sample_weight=w), labels
