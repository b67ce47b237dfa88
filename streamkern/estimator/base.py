"""Fitting, common to both estimators.

`fit` and `partial_fit` work on a snapshot of the estimator and store all results in one record
(`fitted.py`), which is assigned to the estimator at the end. An error or an interrupt therefore
leaves the estimator unchanged.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, is_classifier

from streamkern.basics.errors import ConfigError, DataError, StreamkernError, TrainingInterrupted
from streamkern.basics.message import mention
from streamkern.basics.values import checked_list
from streamkern.basics.warning import warn
from streamkern.config.solver import SOLVER_OPTIONS, solver_options
from streamkern.estimator import files, inputs, targets
from streamkern.estimator.callbacks import CallbackSupport, ScikitLearnCallbacks, with_callbacks
from streamkern.estimator.fitted import FittedModel, Schema, found_scaling
from streamkern.estimator.importances import FeatureImportances
from streamkern.estimator.labels import Labels, checked_labels, is_indicator, target_shape
from streamkern.estimator.mistakes import hide_traceback
from streamkern.estimator.parameters import own_names
from streamkern.estimator.saving import Saving
from streamkern.ingest.frames import is_frame
from streamkern.ingest.numeric import frame_numbers, is_sparse
from streamkern.ingest.tables.encoder import column_notes
from streamkern.predict.evaluation import with_defined_r2
from streamkern.stream.sources.alignment import align_columns, check_same_rows
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.transforms import bind_transform, from_config
from streamkern.train.loop.callbacks import check_callbacks
from streamkern.train.online import Online, SavedRun
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.saved_model import load_result
from streamkern.train.train import Result, train

_PARTIAL_FIT_LOCKS: MutableMapping[KernelEstimator, threading.RLock] = weakref.WeakKeyDictionary()
"""One lock per estimator, so that concurrent calls of `partial_fit` run one after the other."""


class KernelEstimator(CallbackSupport, FeatureImportances, Saving, BaseEstimator):  # type: ignore[misc]
    """Base class of both estimators; `docstrings` documents the parameters."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    # -- fitting ---------------------------------------------------------------------------

    @hide_traceback
    @with_callbacks  # type: ignore[untyped-decorator]
    def fit(
        self, X: Any, y: Any = None, sample_weight: Any = None, *, test: Any = None,
        client: Any = None,
    ) -> Self:  # fmt: skip
        """Train on all of the data.

        Parameters
        ----------
        X : (n, d) or (n, h, w, channels) array, dense or sparse; a data frame of any library, whose
            words, dates and gaps are encoded; arrays and frames of zarr, Dask and xarray, which are
            read in pieces; paths of files; or a store or source, which includes the targets.
        y : (n,) or (n, c) values; for a classifier (n,) labels, numbers or words, or (n, L), at
            least two columns of 0 or 1, one for each of the labels that a row may have; or the
            name of a column of X; None if X includes the targets.
        sample_weight : (n,) finite numbers, 0 or above, for arrays; a store includes its weights.
            They are divided by their mean, so that `ridge` keeps its scale: see `sample_weights`.
        test : held-out data evaluated during training: (X, y), or anything that X may be.
        client : a `distributed.Client`, whose workers run the `ranks`, or read the rows if there is
            one rank; it stays open, and is not stored in the estimator.

        Returns
        -------
        self : the fitted estimator. With `run_dir`, the same call resumes an interrupted fit, and
            returns the result of a finished one.

        An error or an interrupt leaves the estimator unchanged. With `run_dir`, an interrupt gives
        it the model that was saved there, if there is one, as `load` returns it.
        """
        self._fitted_ = self._snapshot()._trained(self, X, y, sample_weight, test, client)
        return self

    @files.temporary_stores()
    def _trained(
        self, owner: KernelEstimator, X: Any, y: Any, sample_weight: Any, test: Any, client: Any
    ) -> FittedModel:
        """Return the result of `fit`. owner : the estimator of which this one is a snapshot"""
        self._check_saved("centers", "loss", "metric", "transforms")
        last = self._last_fit()
        # With warm_start=True, the features and the encoder are those of the last fit.
        like = None if last is None else last.schema
        source, schema = self._source(X, y, sample_weight, like=like)
        held_out = None
        if test is not None:
            held_out, _ = self._source(*files.test_pair(test, y), like=schema)
        centers, metric = self._array_of_centers(), self._array_of_metric()
        if is_sparse(self.centers) and self.centers.shape[1] != schema.n_features:
            raise DataError(
                f"centers have {self.centers.shape[1]:,} features, but X has {schema.n_features:,}",
                "give rows and centers with the same features",
            )
        with own_names():
            config = self._config(self.epochs)
            # The weights of the last fit are valid only for features that are scaled as in it.
            scaling = last.scaling if last is not None and config.data.scale == "auto" else []
            stream = self._transformed(source, [*self._transforms(source), *scaling])
            callbacks, tasks = list(check_callbacks(self.callbacks)), None
            if ScikitLearnCallbacks.are_set(owner):
                metadata = None if sample_weight is None else {"sample_weight": sample_weight}
                tasks = ScikitLearnCallbacks(owner, schema, X=X, y=y, metadata=metadata)
                callbacks.append(tasks)
            try:
                result = train(
                    config, source=stream, test=held_out, centers=centers, metric=metric,
                    warm=None if last is None else last.warm, client=client,
                    facts=self._facts(schema), progress=self._progress(), callbacks=callbacks,
                )  # fmt: skip
            except (TrainingInterrupted, KeyboardInterrupt):
                owner._fitted_ = self._saved_by_run(schema) or owner._fitted_
                raise
            fitted = self._record_of(
                result, schema, X, scaling=scaling or found_scaling(result, stream),
                settings=RunInputs(centers=centers, metric=metric).recorded_settings(config),
            )  # fmt: skip
        if tasks is not None:
            tasks.fitted(fitted)
        return fitted

    def _saved_by_run(self, schema: Schema) -> FittedModel | None:
        """Return the model that an interrupted fit has saved in its run_dir, if there is one."""
        if self.run_dir is None:
            return None
        with contextlib.suppress(StreamkernError):  # nothing was saved yet, or a function was used
            run, result = load_result(self.run_dir)
            with contextlib.closing(result.model.backend):
                saved = FittedModel.of_run(run, result, self._built_transforms(), None)
            if (saved.schema.row_shape, saved.schema.classes) == (
                schema.row_shape, schema.classes,
            ):  # fmt: skip
                return saved
        return None

    def _partial_fit(self, X: Any, y: Any, labels: Labels | None = None) -> Self:
        """Train on one more block. labels : all labels of the data, if the caller gave them"""
        with _PARTIAL_FIT_LOCKS.setdefault(self, threading.RLock()):
            self._fitted_ = self._snapshot()._advanced(X, y, labels)
        return self

    @files.temporary_stores()
    def _advanced(self, X: Any, y: Any, labels: Labels | None) -> FittedModel:
        """Return the fit after training on one more block; see `_partial_fit`."""
        fitted = self._fitted_
        before = None if fitted is None or fitted.online is None else fitted
        self._check_saved(*(("centers", "metric") if before is None else ()), "loss", "transforms")
        if before is not None and before.schema.labels is not None and labels is not None:
            first_classes = before.schema.labels.classes
            if not np.array_equal(labels.classes, first_classes):
                raise ConfigError(
                    f"classes={labels.classes.tolist()} differ from the classes of the first call, "
                    f"{first_classes.tolist()}",
                    "give all classes in the first call",
                )
        self._check_unchanged(None if before is None else before.begun)
        like = None if before is None else before.schema
        source, schema = self._source(X, y, like=like, labels=labels)
        if fitted is not None and before is None:
            _check_discarded(fitted, source.n_rows)
        with own_names():
            if before is None or before.online is None:
                config = self._config(1 if self.epochs == "auto" else self.epochs)
                centers, metric = self._array_of_centers(), self._array_of_metric()
                run_inputs = RunInputs(centers=centers, metric=metric, facts=self._facts(schema))
                online: Online | SavedRun = Online(config, run_inputs)
                transforms, scaling = self._transforms(source), []
            else:
                online, transforms = before.online
                scaling = list(before.scaling)
                check_same_rows(source, schema, "X has")
                if schema.labels is None:
                    check_outputs(source, before.n_targets)
            if isinstance(online, SavedRun):
                online = online.open(self._execution())
            # A copy, because `advance` changes it; the settings of execution are those of this call
            online = replace(online, config=online.config.with_overrides(self._execution()))
            stream = self._transformed(source, transforms)
            result = online.advance(stream, self._progress())
            new_scaling = found_scaling(result, stream)
            return self._record_of(
                result, schema, X, scaling=[*scaling, *new_scaling],
                settings=online.inputs.recorded_settings(online.config),
                online=(online, [*transforms, *new_scaling]), begun=self._model_parameters(),
            )  # fmt: skip

    def _record_of(self, result: Result, schema: Schema, X: Any, **others: Any) -> FittedModel:
        """Return the record of a result, and close the backend of its model."""
        notes: dict[str, Any] = inputs.sparse_note(X)
        if encoder := column_notes(schema.encoder, "the model"):
            notes["encoder"] = encoder
        with contextlib.closing(result.model.backend):
            return FittedModel.of_result(result, schema, notes=notes, **others)

    def _execution(self) -> dict[str, Any]:
        """Return the settings of execution, which may differ between calls of `partial_fit`."""
        config = self._config(1 if self.epochs == "auto" else self.epochs)
        names = ("device", "accelerator", "memory", "device_memory", "threads")
        return {f"run.{name}": getattr(config.run, name) for name in names} | {
            "data.epochs": config.data.epochs,
            "run.early_stopping": config.run.early_stopping,
        }

    def _source(
        self, X: Any, y: Any, sample_weight: Any = None, *, like: Schema | None = None,
        labels: Labels | None = None,
    ) -> tuple[BaseSource, Schema]:  # fmt: skip
        """Return checked training data and their schema.

        like : schema of earlier data, which the new data must match
        labels : labels of a classifier, if they are known before its data are read
        """
        data = files.given_data(X, y, sample_weight, like)
        X, y, sample_weight, names = data.X, data.y, data.sample_weight, data.names
        if files.is_files(X):
            X, y, sample_weight = self._ingested(X, y, sample_weight, like), None, None
        if is_classifier(self) and names is not None and target_shape(y)[1:] == (1,):
            y = y[:, 0]
        if like is not None or is_indicator(y):
            labels = None if like is None else like.labels
        if inputs.is_stream(X):
            X = X if like is None else self._without_targets(X, like)
            source, labels = self._stream(X, y, sample_weight, labels)
            if like is not None:
                columns = like.target_columns
                return align_columns(source, like.columns, "X", columns, like.encoder), like
            flat = source.n_outputs == 1 if y is None else len(target_shape(y)) == 1
            schema = Schema.of_source(source, output_names=names, flat=flat, labels=labels)
            return source, schema.of_columns(source, data)
        if y is None:
            raise files.no_targets(type(self).__name__, like)
        if sample_weight is not None:
            fewest = 2 if like is None else 1
            X, y, sample_weight = targets.counted_rows(X, y, sample_weight, fewest=fewest)
        rows, schema = self._first_rows(X, y) if like is None else (self._rows(X, like), like)
        weights = targets.checked_weights(sample_weight, rows)
        source, labels = self._array_source(rows, y, weights, labels)
        source.columns = schema.columns if rows.ndim == 2 else None
        source.encoder = schema.encoder
        if like is None:
            flat = len(target_shape(y)) == 1
            schema = replace(schema, output_names=names, flat=flat, labels=labels)
            schema = schema.of_columns(source, data)
        return source, schema

    def _evaluated(self, X: Any, y: Any = None, sample_weight: Any = None) -> dict[str, float]:
        """Return the figures of rows with targets, by name; see `KernelModel.evaluate`."""
        fitted = self._state
        if files.is_files(X):
            opened = files.rows_of_files(X, fitted.schema, y, sample_weight, targets=True)
            with self._model() as model, opened as rows:
                return with_defined_r2(model.evaluate(rows), getattr(rows, "n_rows", None))
        source, _ = self._source(X, y, sample_weight, like=fitted.schema)
        if fitted.schema.labels is None:
            check_outputs(source, fitted.n_targets)
        with self._model() as model:
            return with_defined_r2(model.evaluate(source), source.n_rows)

    def _ingested(self, X: Any, y: Any, sample_weight: Any, like: Schema | None) -> BaseSource:
        """Return a source of the rows of files, in a temporary store. like : as in `_source`"""
        classes = is_classifier(self) and not files.are_several_labels(y, like)
        return files.ingest_temporarily(
            X, y, sample_weight, targets="classes" if classes else "values",
            seed=int(self._config(1).run.random_state), memory=self.memory, like=like,
        )  # fmt: skip

    def _first_rows(self, X: Any, y: Any) -> tuple[Any, Schema]:
        """Return checked rows, encoded if necessary, and the schema that they determine."""
        numbers = frame_numbers(X, "X") if is_frame(X) else None
        if not is_frame(X) or numbers is not None or not inputs.check_text_names(X):
            holder = self._for_checks()
            rows = inputs.checked_rows(holder, X, reset=True, numbers=numbers)
            names = getattr(holder, "feature_names_in_", None)
            columns = None if names is None else tuple(map(str, names))
            rows, form = inputs.sparse_if_long(rows)
            return rows, Schema(rows.shape[1:], columns, file_form=form)
        one_class_each = is_classifier(self) and np.ndim(y) == 1
        y = checked_labels(y, len(X)) if one_class_each else targets.checked_values(y, len(X))
        seed = int(self._config(1).run.random_state)
        rows, encoder = inputs.fitted_rows(X, y, seed, classes=one_class_each)
        return rows, Schema(rows.shape[1:], encoder.columns, encoder.json())

    def _last_fit(self) -> FittedModel | None:
        """Return the fit that `warm_start=True` starts from, or None before the first."""
        if isinstance(self.warm_start, str | os.PathLike) or not self.warm_start:
            return None
        if self.solver in SOLVER_OPTIONS and "warm_start" not in solver_options(self.solver):
            raise ConfigError(
                f"{mention('warm_start', True)} is not defined for solver {self.solver!r}",
                "leave it out, or use another solver",
            )
        if self.run_dir is not None:
            raise ConfigError(
                f"{mention('warm_start', True)} cannot be used with run_dir, which does not store "
                f"the weights to start from",
                "set warm_start to the run_dir of the fit to start from",
            )
        return self._fitted_

    def _stream(
        self, X: Any, y: Any, sample_weight: Any, labels: Labels | None
    ) -> tuple[BaseSource, Labels | None]:
        """Return the source of streamed data, and the labels of a classifier.

        labels : labels of the classifier, if they are known; None for a regression
        """
        raise NotImplementedError

    def _array_source(
        self, X: Any, y: Any, w: Any, labels: Labels | None
    ) -> tuple[ArraySource, Labels | None]:
        """Return the source of checked rows in memory, and the labels of a classifier.

        w : sample weights or None; labels : as in `_stream`
        """
        raise NotImplementedError

    def _built_transforms(self) -> list[Any]:
        """Return the parameter `transforms` as functions and transform objects."""
        transforms = checked_list("transforms", self.transforms)
        return [from_config([t])[0] if isinstance(t, Mapping) else t for t in transforms]

    def _transforms(self, source: BaseSource) -> list[Any]:
        """Return the transforms; a scaling among them uses the statistics of this source."""
        return [bind_transform(t, source) for t in self._built_transforms()]

    @staticmethod
    def _transformed(source: BaseSource, transforms: list[Any]) -> BaseSource:
        """Return a source that applies the transforms to the rows of `source`."""
        return AugmentedSource(source, 1, transforms) if transforms else source


def _check_discarded(fitted: FittedModel, n_rows: int) -> None:
    """Warn that `partial_fit` discards a fit, or raise ConfigError if it is a compressed model.

    n_rows : number of rows of the block
    """
    report, n_centers = fitted.attributes["report_"], fitted.attributes["n_centers_"]
    if "compressed" in report:
        raise ConfigError(
            "partial_fit cannot continue a compressed model, which has no state of the solver",
            "use partial_fit before compress, or start a new model with partial_fit of a clone "
            "(sklearn.base.clone)",
        )
    warn(
        f"partial_fit does not continue from fit: it discards the model of {n_centers:,} centers "
        f"and starts a new one from this block of {n_rows:,} rows; to train in blocks, use "
        "partial_fit from the start, with a large first block"
    )


def check_outputs(source: BaseSource, expected: int) -> None:
    """Raise DataError unless the targets have the number of columns that the model expects."""
    if source.n_outputs != expected:
        raise DataError(
            f"y has {source.n_outputs} outputs, but the model was trained on {expected}",
            "give as many outputs as in training",
        )
