"""Permutation importance: the decrease of a model's score when a column is shuffled.

The rows are rows that the model was not trained on.

Breiman (2001). All features that encode one column of a table are shuffled together, which is
equivalent to shuffling the column itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from streamkern.basics.array_types import Floats
from streamkern.basics.errors import ConfigError, DataError
from streamkern.basics.optional import on_demand
from streamkern.basics.values import checked_int
from streamkern.ingest.tables.encoder import Encoder
from streamkern.predict.input_rows import FileRows
from streamkern.store.row_block import RowBlock, concatenate_blocks
from streamkern.store.sparse_rows import sparse_features
from streamkern.stream.sources.base import BaseSource
from streamkern.train.model.kernel_model import KernelModel

MAX_PERMUTED_ROWS, SHUFFLES_PER_COLUMN = 2000, 5
"""Largest number of rows that are evaluated, and number of shuffles of each column."""


@dataclass(frozen=True)
class PermutationImportances:
    """Decrease of a score when each column is shuffled.

    names : names of the k columns, in the order of the table
    figure : the score: "accuracy" for classes; "d2_pinball" for quantiles, the mean over the
        outputs of 1 - loss / loss of the best constant; else "r2"
    score : the score on the unshuffled rows
    n_rows : number of rows that were evaluated
    mean, std : (k,) mean and standard deviation of the decrease of the score, over the shuffles of
        each of the k columns
    """

    names: tuple[str, ...]
    figure: str
    score: float
    n_rows: int
    mean: Floats
    std: Floats

    def describe(self) -> dict[str, Any]:
        """Return the importances as JSON values, the most important column first."""
        order = np.argsort(-self.mean, kind="stable")
        columns = [[self.names[j], float(self.mean[j]), float(self.std[j])] for j in order]
        return {
            "figure": self.figure, "score": self.score, "rows": self.n_rows, "columns": columns,
        }  # fmt: skip


def column_groups(
    encoder: Any, columns: tuple[str, ...] | None, n_features: int
) -> tuple[tuple[str, slice], ...]:
    """Return the name of each column, with the slice of features that encode it.

    encoder : as in `StoreSpec`; None if every column is a feature
    columns : names of the features, used without an encoder; None: "x0", "x1", ...
    n_features : number of features, d
    """
    if encoder is not None:
        return Encoder.from_json(encoder, "the model").groups
    names = columns or tuple(f"x{j}" for j in range(n_features))
    return tuple((name, slice(j, j + 1)) for j, name in enumerate(names))


def permutation_importances(
    model: KernelModel,
    source: BaseSource | FileRows,
    *,
    n_rows: int = MAX_PERMUTED_ROWS,
    n_repeats: int = SHUFFLES_PER_COLUMN,
    seed: Any = 0,
) -> PermutationImportances:
    """Return the importance of each column for the score of a model on rows with targets.

    source : rows with targets that the model was not trained on
    n_rows : largest number of these rows that are evaluated, drawn at random
    n_repeats : number of shuffles of each column
    seed : seed of the draw and of the shuffles

    Raises
    ------
    ConfigError
        The model was trained on sparse rows, or one of the numbers is wrong.
    DataError
        There are no rows, or they do not match the training rows.
    """
    if sparse_features(model.file_form) is not None:
        raise ConfigError(
            "importances cannot be computed for a model that was trained on sparse rows, because "
            "every feature would be shuffled",
            "leave them out, or train on a few features as dense rows",
        )
    n_rows, n_repeats = checked_int("n_rows", n_rows), checked_int("n_repeats", n_repeats)
    if seed is not None and not isinstance(seed, np.random.RandomState):
        seed = checked_int("random_state", seed, 0)
    rows = _random_rows(model, source, n_rows, seed)
    X = np.asarray(rows.X).reshape(len(rows.X), -1)
    groups = column_groups(model.encoder, model.columns, X.shape[1])
    # Column j holds, for each row, the row that group j is taken from; at first its own.
    source_rows = np.tile(np.arange(len(X))[:, None], len(groups))

    figure, score_of_values = _make_score(model)

    def score(
        column_shuffle: _ColumnShuffle, source_rows: npt.NDArray[np.int64], y: npt.NDArray[Any]
    ) -> float:
        return score_of_values(y, model.values(column_shuffle.rows(source_rows)), rows.w)

    column_shuffle = _ColumnShuffle(X, tuple(features for _, features in groups))
    y = rows.y
    importances = on_demand("sklearn.inspection").permutation_importance(
        column_shuffle, source_rows, y, scoring=score, n_repeats=n_repeats, random_state=seed
    )
    return PermutationImportances(
        tuple(name for name, _ in groups), figure, score(column_shuffle, source_rows, y), len(X),
        importances.importances_mean, importances.importances_std,
    )  # fmt: skip


def _make_score(model: KernelModel) -> tuple[str, Callable[[Floats, Floats, Any], float]]:
    """Return the name of the score of a model, and the score of (y, values, sample weights)."""
    metrics = on_demand("sklearn.metrics")
    quantiles = None if model.loss is None else model.loss.quantiles

    def accuracy(y: Floats, values: Floats, w: Any) -> float:
        return float(metrics.accuracy_score(y, values.argmax(axis=1), sample_weight=w))

    def r2(y: Floats, values: Floats, w: Any) -> float:
        y = np.broadcast_to(y.reshape(len(y), -1), values.shape)
        return float(metrics.r2_score(y, values, sample_weight=w))

    def d2_pinball(y: Floats, values: Floats, w: Any) -> float:
        y = np.broadcast_to(y.reshape(len(y), -1), values.shape)
        levels = np.broadcast_to(np.asarray(quantiles), values.shape[1])
        return float(np.mean([
            metrics.d2_pinball_score(y[:, j], values[:, j], sample_weight=w, alpha=level)
            for j, level in enumerate(levels)
        ]))  # fmt: skip

    if model.classes is not None:
        return "accuracy", accuracy
    return ("r2", r2) if quantiles is None else ("d2_pinball", d2_pinball)


class _ColumnShuffle:
    """Rows whose columns come from other rows; scikit-learn shuffles the indices of these rows."""

    def __init__(self, X: npt.NDArray[Any], groups: tuple[slice, ...]) -> None:
        self._X, self._groups = X, groups

    def fit(self) -> Self:
        """Do nothing: scikit-learn requires the method."""
        return self

    def rows(self, source_rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return (n, d) rows; the columns of group j come from the rows source_rows[:, j]."""
        X = np.empty_like(self._X)
        for j, features in enumerate(self._groups):
            X[:, features] = self._X[source_rows[:, j], features]
        return X


def _random_rows(model: KernelModel, source: Any, n_rows: int, seed: Any) -> RowBlock:
    """Return at most `n_rows` random rows, drawn in one pass over all rows."""
    rng, keys = np.random.default_rng(seed), np.empty(0)
    sample: RowBlock | None = None
    for block in model.align_source(source, with_targets=True).blocks():
        new_keys = rng.random(len(block.row_ids))
        candidates = block if sample is None else concatenate_blocks([sample, block])
        keys = np.concatenate([keys, new_keys])
        selected = np.sort(np.argsort(keys, kind="stable")[:n_rows])
        sample, keys = candidates.take(selected), keys[selected]
    if sample is None or not len(sample.row_ids):
        raise DataError("there are no rows to compute importances from", "give rows with targets")
    n_usable = len(sample.row_ids) if sample.w is None else np.count_nonzero(sample.w)
    n_required = 2 if model.classes is None else 1  # R2 and D2 need a variance
    if n_usable < n_required:
        condition = "" if sample.w is None else " with a sample weight above 0"
        raise DataError(
            f"importances need at least {n_required} rows{condition}, but only {n_usable} of the "
            f"{len(sample.row_ids)} sampled rows can be used",
            "give more such rows, or raise n_rows=",
        )
    return sample
