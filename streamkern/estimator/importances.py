"""The feature names of a fitted estimator, and the importances of its features."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.utils import Bunch

from streamkern.estimator.files import remove_temporary_stores
from streamkern.estimator.fitted import Schema
from streamkern.estimator.predicting import PredictionMixin, on_snapshot
from streamkern.ingest.tables.encoder import Encoder
from streamkern.kernels.importances import importances
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.patch_features import patch_names, patches_among
from streamkern.stream.sources.quantile_scores import scores_among
from streamkern.train.model.permutation import (
    MAX_PERMUTED_ROWS,
    SHUFFLES_PER_COLUMN,
    permutation_importances,
)


class ImportancesMixin(PredictionMixin):
    """Mixin of estimators: feature names, importances in the metric, permutation importances."""

    @property
    def feature_importances_(self) -> npt.NDArray[np.float64]:
        """(n_features_in_,) share of each column in the trace of the kernel's metric.

        The shares are aligned with `feature_names_in_` and sum to 1. The share of a table column is
        the sum over its features, including its quantile score. A categorical feature
        (`kernel_.categorical`) adds half its weight before normalisation; trees are left out. The
        shares show along which columns the model varies most; `permutation_importances` shows how
        much a column reduces the error.

        Raises AttributeError for a model without a metric, or with features of image patches.
        """
        shares, schema = self._metric_shares("feature_importances_"), self._state.schema
        if patches_among(self._state.fixed):
            raise AttributeError(
                "feature_importances_ has a share for each column, but this model has a metric "
                "of patch features; use metric_importances_, or permutation_importances"
            )
        if scores := scores_among(self._state.fixed):
            shares = scores.shares_with_scores(shares)
        if schema.encoder is None:
            return shares
        groups = Encoder.from_json(schema.encoder, "the model").groups
        return np.array([shares[features].sum() for _, features in groups])

    @property
    def metric_importances_(self) -> npt.NDArray[np.float64]:
        """(d,) share of each feature of the kernel in the trace of its metric; they sum to 1.

        `get_feature_names_out` names the features, which are those after encoding and scaling.

        Raises AttributeError for a model without a metric.
        """
        return self._metric_shares("metric_importances_")

    def _metric_shares(self, name: str) -> npt.NDArray[np.float64]:
        """Return the (d,) shares. name : the public attribute, for the error message"""
        kernel = self._state.attributes["kernel_"]
        if kernel.metric is None:
            raise AttributeError(
                f"this model has no metric, so it has no {name}; use permutation_importances, or "
                "fit with metric='learn' (which may still choose no metric)"
            )
        return importances(kernel.metric, kernel.categorical)

    @on_snapshot
    def get_feature_names_out(self, input_features: Any = None) -> npt.NDArray[Any]:
        """Return the names of the d features of the kernel, as an array of objects.

        Columns of a table with words, dates or gaps become one or more features each. Features
        without names are called x0, x1 and so on. The names of quantile scores come last.

        input_features : ignored; present for scikit-learn's API.
        """
        schema = self._state.schema
        names = schema.columns or [f"x{j}" for j in range(math.prod(schema.row_shape))]
        if scores := scores_among(self._state.fixed):
            names = scores.names(names)
        if patches := patches_among(self._state.fixed):
            names = patch_names(patches)
        return np.array(names, dtype=object)

    @on_snapshot
    def permutation_importances(
        self, X: Any, y: Any = None, *, sample_weight: Any = None, n_rows: int = MAX_PERMUTED_ROWS,
        n_repeats: int = SHUFFLES_PER_COLUMN, random_state: int = 0,
    ) -> Bunch:  # fmt: skip
        """Measure how much the score falls if a column of held-out rows is shuffled.

        Parameters
        ----------
        X, y, sample_weight : rows that the model was not trained on, in the forms that `fit` takes.
        n_rows : largest number of rows to use; they are drawn at random.
        n_repeats : number of shuffles of each column.
        random_state : seed of the drawn rows and of the shuffles.

        Returns
        -------
        importances : a `Bunch` of scikit-learn with `importances_mean` and `importances_std`, (k,)
            the mean and the standard deviation of the decreases of the score: the accuracy of
            classes, the D2 of the pinball loss of quantiles (`d2_pinball_score`, the mean
            over the quantiles), else R2; `feature_names`, (k,) names of the columns of X; and
            `score`, the score on the unshuffled rows.

        Raises
        ------
        DataError
            The rows do not match the training rows.
        """
        with remove_temporary_stores(), self._model() as model:
            source, _ = self._open_data(X, y, sample_weight, expected=self._state.schema)
            result = permutation_importances(
                model, source, n_rows=n_rows, n_repeats=n_repeats, seed=random_state
            )
        return Bunch(
            importances_mean=result.mean, importances_std=result.std,
            feature_names=np.array(result.names, dtype=object), score=result.score,
        )  # fmt: skip

    def _open_data(
        self, X: Any, y: Any, sample_weight: Any = None, *, expected: Schema | None = None
    ) -> tuple[BaseSource, Schema]:
        """Return checked rows with targets, and their schema.

        expected : schema of the training rows
        """
        raise NotImplementedError
