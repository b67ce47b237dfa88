"""Names of the features of a fitted estimator, and measures of how much each matters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.utils import Bunch

from streamkern.estimator.files import temporary_stores
from streamkern.estimator.fitted import Schema
from streamkern.estimator.predicting import Predicting, from_one_fit
from streamkern.ingest.tables.encoder import Encoder
from streamkern.kernels.importances import importances
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.patch_features import patch_names, patches_among
from streamkern.stream.sources.quantile_scores import scores_among
from streamkern.train.model.permutation import PERMUTED_ROWS, REPEATS, permutation_importances


class FeatureImportances(Predicting):
    """An estimator that can measure the importance of its columns."""

    @property
    def feature_importances_(self) -> npt.NDArray[np.float64]:
        """(n_features_in_,) share of each column in the trace of the kernel's metric.

        A feature that the kernel compares for equality (`kernel_.categorical`) has half its weight
        besides. They are aligned with `feature_names_in_` and sum to 1: for a column of a table
        that became several features, or has a quantile score beside its values, the sum of these in
        `metric_importances_`. They show along which columns the model varies most, and not how much
        a column reduces the error: for that see
        `permutation_importances`.
        """
        shares, schema = self._metric_shares("feature_importances_"), self._state.schema
        if patches_among(self._state.fixed):
            raise AttributeError(
                "feature_importances_ are those of columns, and the metric of this model is of "
                "patch features; use metric_importances_, or permutation_importances"
            )
        if scores := scores_among(self._state.fixed):
            shares = scores.folded(shares)
        if schema.encoder is None:
            return shares
        groups = Encoder.from_json(schema.encoder, "the model").groups
        return np.array([shares[features].sum() for _, features in groups])

    @property
    def metric_importances_(self) -> npt.NDArray[np.float64]:
        """(d,) share of each feature of the kernel in the trace of its metric.

        Features are those after encoding and scaling; `get_feature_names_out` names them.
        """
        return self._metric_shares("metric_importances_")

    def _metric_shares(self, name: str) -> npt.NDArray[np.float64]:
        kernel = self._state.attributes["kernel_"]
        if kernel.metric is None:
            raise AttributeError(
                f"{name} are those of a metric, and this model has no metric; use "
                "permutation_importances, or fit with metric='learn', which may "
                "find that none is better"
            )
        return importances(kernel.metric, kernel.categorical)

    @from_one_fit
    def get_feature_names_out(self, input_features: Any = None) -> npt.NDArray[Any]:
        """Return the names of the d features of the kernel, as an array of objects.

        For a table with words, dates or gaps they are those that its columns became; without names
        they are x0, x1 and so on. Names of quantile scores follow.
        input_features : is not used; scikit-learn gives it.
        """
        schema = self._state.schema
        names = schema.columns or [f"x{j}" for j in range(math.prod(schema.row_shape))]
        if scores := scores_among(self._state.fixed):
            names = scores.names(names)
        if patches := patches_among(self._state.fixed):
            names = patch_names(patches)
        return np.array(names, dtype=object)

    @from_one_fit
    def permutation_importances(
        self, X: Any, y: Any = None, *, sample_weight: Any = None, n_rows: int = PERMUTED_ROWS,
        n_repeats: int = REPEATS, random_state: int = 0,
    ) -> Bunch:  # fmt: skip
        """Measure the increase in error if a column of held-out rows is shuffled.

        Parameters
        ----------
        X, y, sample_weight : rows that the model was not trained on, as `fit` takes them. At most
            `n_rows` random ones are used.
        n_repeats : shuffles of each column.
        random_state : the seed of rows and shuffles.

        Returns
        -------
        found : a `Bunch` as of scikit-learn, with `importances_mean` and `importances_std`, (k,)
            decreases of the accuracy or R2, `feature_names`, (k,) names of the columns as they were
            given, and `score` on the rows as they are.

        Raises
        ------
        DataError
            The rows do not match those of the training.
        """
        with temporary_stores(), self._model() as model:
            source, _ = self._source(X, y, sample_weight, like=self._state.schema)
            found = permutation_importances(
                model, source, n_rows=n_rows, n_repeats=n_repeats, seed=random_state
            )
        return Bunch(
            importances_mean=found.mean, importances_std=found.std,
            feature_names=np.array(found.names, dtype=object), score=found.score,
        )  # fmt: skip

    def _source(
        self, X: Any, y: Any, sample_weight: Any = None, *, like: Schema | None = None
    ) -> tuple[BaseSource, Schema]:
        """Return checked rows with targets, and their schema. like : of the rows trained on"""
        raise NotImplementedError
