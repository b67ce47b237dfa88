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
from collections.abc import MutableMapping
from dataclasses import replace
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, is_classifier

from streamkern.basics.errors import ConfigError, StreamkernError, TrainingInterrupted
from streamkern.basics.message import mention
from streamkern.basics.values import checked_list
from streamkern.basics.warning import warn
from streamkern.centers.given_centers import check_sparse_centers
from streamkern.config.solver import SOLVER_OPTIONS, solver_options
from streamkern.estimator import files, inputs, targets
from streamkern.estimator.callbacks import CallbackSupport, ScikitLearnCallbacks, with_callbacks
from streamkern.estimator.fitted import FittedModel, Schema, find_added_transforms
from streamkern.estimator.importances import ImportancesMixin
from streamkern.estimator.labels import Labels, checked_labels, is_indicator, target_shape
from streamkern.estimator.lazy import is_lazy
from streamkern.estimator.mistakes import hide_traceback
from streamkern.estimator.parameters import use_parameter_names
from streamkern.estimator.saving import SavingMixin
from streamkern.ingest.frames import is_frame
from streamkern.ingest.numeric import frame_numbers
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


class KernelEstimator(CallbackSupport, ImportancesMixin, SavingMixin, BaseEstimator):  # type: ignore[misc]
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

        An error or an interrupt leaves the estimator unchanged. With `run_dir`, an interrupt gives
        it the model that the run has saved, if there is one, as `load` returns it.

        Parameters
        ----------
        X : (n, d) or (n, h, w, channels) array, dense or sparse; a data frame of any library, whose
            words, dates and gaps are encoded; arrays and frames of zarr, Dask and xarray, which are
            read in pieces; paths of files; or a store or source, which includes the targets.
        y : (n,) or (n, c) values; for a classifier (n,) labels, numbers or words, or (n, L), at
            least two columns of 0 or 1, one for each of the labels that a row may have; or the
            name of a column of X, or a list of names for several targets; None if X includes the
            targets.
        sample_weight : (n,) finite numbers, 0 or above, or the name of a column of X; a store
            includes its weights. They are divided by their mean, so that `ridge` keeps its scale.
        test : test rows, which are evaluated during training: (X, y), or anything that X may be.
        client : a `distributed.Client`, whose workers run the `ranks`, or read the rows if there is
            one rank; it stays open, and is not stored in the estimator.

        Returns
        -------
        self : the fitted estimator. With `run_dir`, the same call resumes an interrupted fit, and
            returns the result of a finished one.

        Raises
        ------
        StreamkernError
            The class of the error says what is wrong, see "Raises" of the estimator.
        """
        self._fitted_ = self._snapshot()._fit_model(self, X, y, sample_weight, test, client)
        return self

    @files.remove_temporary_stores()
    def _fit_model(
        self, owner: KernelEstimator, X: Any, y: Any, sample_weight: Any, test: Any, client: Any
    ) -> FittedModel:
        """Return the result of `fit`. owner : the estimator, whose snapshot `self` is"""
        self._check_saved("centers", "loss", "metric", "transforms")
        previous = self._previous_fit()
        # With warm_start=True, the previous fit gives the features and the encoder.
        expected = None if previous is None else previous.schema
        source, schema = self._open_data(X, y, sample_weight, expected=expected)
        held_out = None
        if test is not None:
            held_out, _ = self._open_data(*files.resolve_test(test, y), expected=schema)
        centers, metric = self._array_of_centers(), self._array_of_metric()
        check_sparse_centers(self.centers, schema.n_features)
        with use_parameter_names():
            config = self._config(self.epochs, schema.labels)
            # The weights of the previous fit are valid only for features with the same scaling.
            scales = config.data.scale == "auto"
            scaling = previous.scaling if previous is not None and scales else []
            stream = self._apply_transforms(source, [*self._bind_transforms(source), *scaling])
            callbacks = list(check_callbacks(self.callbacks))
            tasks = None
            if ScikitLearnCallbacks.are_set(owner):
                metadata = None if sample_weight is None else {"sample_weight": sample_weight}
                tasks = ScikitLearnCallbacks(owner, schema, X=X, y=y, metadata=metadata)
                callbacks.append(tasks)
            try:
                result = train(
                    config, source=stream, test=held_out, centers=centers, metric=metric,
                    warm=None if previous is None else previous.warm, client=client,
                    facts=self._facts(schema), progress=self._progress(), callbacks=callbacks,
                )  # fmt: skip
            except (TrainingInterrupted, KeyboardInterrupt):
                owner._fitted_ = self._load_interrupted_fit(schema) or owner._fitted_
                raise
            fitted = self._to_fitted_model(
                result, schema, X, scaling=scaling or find_added_transforms(result, stream),
                settings=RunInputs(centers=centers, metric=metric).recorded_settings(config),
            )  # fmt: skip
        if tasks is not None:
            tasks.end_fit(fitted)
        return fitted

    def _load_interrupted_fit(self, schema: Schema) -> FittedModel | None:
        """Return the model that an interrupted fit has saved in its run_dir, if there is one."""
        if self.run_dir is None:
            return None
        # An error means that nothing was saved yet, or that a function of the user was not saved.
        with contextlib.suppress(StreamkernError):
            run, result = load_result(self.run_dir)
            with contextlib.closing(result.model.backend):
                saved = FittedModel.from_run(run, result, self._build_transforms(), None)
            if (saved.schema.row_shape, saved.schema.classes) == (
                schema.row_shape, schema.classes,
            ):  # fmt: skip
                return saved
        return None

    def _partial_fit(self, X: Any, y: Any, labels: Labels | None = None) -> Self:
        """Train on one more block. labels : all labels of the data, if the caller gave them"""
        with _PARTIAL_FIT_LOCKS.setdefault(self, threading.RLock()):
            self._fitted_ = self._snapshot()._fit_block(X, y, labels)
        return self

    @files.remove_temporary_stores()
    def _fit_block(self, X: Any, y: Any, labels: Labels | None) -> FittedModel:
        """Return the fit after training on one more block; see `_partial_fit`."""
        fitted = self._fitted_
        previous = None if fitted is None or fitted.online is None else fitted
        # Later calls do not use these two, because the model has its centers and its metric.
        first_only = ("centers", "metric") if previous is None else ()
        self._check_saved(*first_only, "loss", "transforms")
        expected = None if previous is None else previous.schema
        if expected is not None and labels is not None:
            _check_classes(labels, expected)
        self._check_unchanged(None if previous is None else previous.begun)
        source, schema = self._open_data(X, y, expected=expected, labels=labels)
        if fitted is not None and previous is None:
            _check_discarded_fit(fitted, source.n_rows)
        with use_parameter_names():
            if previous is None or previous.online is None:
                config = self._config(1 if self.epochs == "auto" else self.epochs)
                centers, metric = self._array_of_centers(), self._array_of_metric()
                run_inputs = RunInputs(centers=centers, metric=metric, facts=self._facts(schema))
                online: Online | SavedRun = Online(config, run_inputs)
                transforms, scaling = self._bind_transforms(source), []
            else:
                online, transforms = previous.online
                scaling = list(previous.scaling)
                check_same_rows(source, schema, "X has")
                if schema.labels is None:
                    targets.check_outputs(source, previous.n_targets)
            if isinstance(online, SavedRun):
                online = online.open(self._execution_settings())
            # `advance` changes its object, so it gets a copy, with the settings of this call.
            settings = online.config.with_overrides(self._execution_settings())
            online = replace(online, config=settings)
            stream = self._apply_transforms(source, transforms)
            result = online.advance(stream, self._progress())
            new_scaling = find_added_transforms(result, stream)
            return self._to_fitted_model(
                result, schema, X, scaling=[*scaling, *new_scaling],
                settings=online.inputs.recorded_settings(online.config),
                online=(online, [*transforms, *new_scaling]), begun=self._model_parameters(),
            )  # fmt: skip

    def _to_fitted_model(
        self, result: Result, schema: Schema, X: Any, **fields: Any
    ) -> FittedModel:
        """Return the record of a result, and close the backend of its model.

        fields : further fields of `FittedModel`
        """
        notes: dict[str, Any] = inputs.sparse_note(X)
        if encoder := column_notes(schema.encoder, "the model"):
            notes["encoder"] = encoder
        with contextlib.closing(result.model.backend):
            return FittedModel.from_result(result, schema, notes=notes, **fields)

    def _open_data(
        self, X: Any, y: Any, sample_weight: Any = None, *, expected: Schema | None = None,
        labels: Labels | None = None,
    ) -> tuple[BaseSource, Schema]:  # fmt: skip
        """Return checked training data and their schema.

        expected : schema of earlier data, which the new data must match
        labels : labels of a classifier, if they are known before its data are read
        """
        data = files.resolve_data(X, y, sample_weight, expected)
        X, y, sample_weight, names = data.X, data.y, data.sample_weight, data.names
        if files.is_files(X):
            X, y, sample_weight = self._ingest_files(X, y, sample_weight, expected), None, None
        # A frame with one column of labels is (n, 1); it means one class for each row.
        if is_classifier(self) and names is not None and target_shape(y)[1:] == (1,):
            y = y[:, 0]
        if expected is not None or is_indicator(y):
            labels = None if expected is None else expected.labels
        if y is None and (is_lazy(X) or not inputs.is_stream(X)):
            raise files.missing_targets_error(type(self).__name__, expected)
        if inputs.is_stream(X):
            X = X if expected is None else self._without_targets(X, expected)
            source, labels = self._open_stream(X, y, sample_weight, labels)
            if expected is not None:
                columns, encoder = expected.target_columns, expected.encoder
                return align_columns(source, expected.columns, "X", columns, encoder), expected
            flat = source.n_outputs == 1 if y is None else len(target_shape(y)) == 1
            schema = Schema.from_source(source, output_names=names, flat=flat, labels=labels)
            return source, schema.record_columns(source, data)
        if sample_weight is not None:
            min_rows = 2 if expected is None else 1
            X, y, sample_weight = targets.drop_negligible_rows(
                X, y, sample_weight, min_rows=min_rows
            )
        # The rest is for arrays and frames in memory.
        if expected is None:
            rows, schema = self._check_first_rows(X, y)
        else:
            rows, schema = self._check_rows(X, expected), expected
        weights = targets.checked_weights(sample_weight, rows)
        source, labels = self._open_arrays(rows, y, weights, labels)
        source.columns = schema.columns if rows.ndim == 2 else None
        source.encoder = schema.encoder
        if expected is None:
            flat = len(target_shape(y)) == 1
            schema = replace(schema, output_names=names, flat=flat, labels=labels)
            schema = schema.record_columns(source, data)
        return source, schema

    def _evaluate(self, X: Any, y: Any = None, sample_weight: Any = None) -> dict[str, float]:
        """Return the figures of rows with targets, by name; see `KernelModel.evaluate`."""
        fitted = self._state
        if files.is_files(X):
            file_rows = files.open_file_rows(X, fitted.schema, y, sample_weight, targets=True)
            with self._model() as model, file_rows as rows:
                return with_defined_r2(model.evaluate(rows), getattr(rows, "n_rows", None))
        source, _ = self._open_data(X, y, sample_weight, expected=fitted.schema)
        if fitted.schema.labels is None:
            targets.check_outputs(source, fitted.n_targets)
        with self._model() as model:
            return with_defined_r2(model.evaluate(source), source.n_rows)

    def _ingest_files(
        self, X: Any, y: Any, sample_weight: Any, expected: Schema | None
    ) -> BaseSource:
        """Return a source of the rows of files, in a temporary store."""
        classes = is_classifier(self) and not files.have_several_labels(y, expected)
        return files.ingest_temporarily(
            X, y, sample_weight, targets="classes" if classes else "values",
            seed=int(self._config(1).run.random_state), memory=self.memory, expected=expected,
        )  # fmt: skip

    def _check_first_rows(self, X: Any, y: Any) -> tuple[Any, Schema]:
        """Return checked rows, encoded if necessary, and the schema that they determine."""
        numbers = frame_numbers(X, "X") if is_frame(X) else None
        needs_encoder = is_frame(X) and numbers is None and inputs.check_text_names(X)
        if not needs_encoder:
            estimator = self._copy_for_checks()
            rows = inputs.checked_rows(estimator, X, reset=True, numbers=numbers)
            names = getattr(estimator, "feature_names_in_", None)
            columns = None if names is None else tuple(map(str, names))
            rows, form = inputs.pack_long_rows(rows)
            return rows, Schema(rows.shape[1:], columns, file_form=form)
        one_class_each = is_classifier(self) and np.ndim(y) == 1
        y = checked_labels(y, len(X)) if one_class_each else targets.checked_values(y, len(X))
        seed = int(self._config(1).run.random_state)
        rows, encoder = inputs.fit_encoder(X, y, seed, classes=one_class_each)
        return rows, Schema(rows.shape[1:], encoder.columns, encoder.json())

    def _previous_fit(self) -> FittedModel | None:
        """Return the fit that `warm_start=True` starts from; None without it, or before a fit."""
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

    def _open_stream(
        self, X: Any, y: Any, sample_weight: Any, labels: Labels | None
    ) -> tuple[BaseSource, Labels | None]:
        """Return the source of streamed data, and the labels of a classifier.

        labels : labels of the classifier, if they are known; None for a regression
        """
        raise NotImplementedError

    def _open_arrays(
        self, X: Any, y: Any, w: Any, labels: Labels | None
    ) -> tuple[ArraySource, Labels | None]:
        """Return the source of checked rows in memory, and the labels of a classifier.

        X : (n, d) or (n, h, w, channels) checked rows
        y : targets, not checked yet
        w : (n,) sample weights; None for equal ones
        labels : as in `_open_stream`
        """
        raise NotImplementedError

    def _build_transforms(self) -> list[Any]:
        """Return the parameter `transforms` as functions and transform objects."""
        transforms = checked_list("transforms", self.transforms)
        return list(from_config(transforms))

    def _bind_transforms(self, source: BaseSource) -> list[Any]:
        """Return the transforms; a scaling among them uses the statistics of this source."""
        return [bind_transform(t, source) for t in self._build_transforms()]

    @staticmethod
    def _apply_transforms(source: BaseSource, transforms: list[Any]) -> BaseSource:
        """Return a source that applies the transforms to the rows of `source`."""
        return AugmentedSource(source, 1, transforms) if transforms else source


def _check_classes(labels: Labels, expected: Schema) -> None:
    """Raise ConfigError if `classes` differs between calls of `partial_fit`.

    labels : the labels in this call
    expected : schema of the first call
    """
    first_classes = None if expected.labels is None else expected.labels.classes
    if first_classes is not None and not np.array_equal(labels.classes, first_classes):
        raise ConfigError(
            f"classes={labels.classes.tolist()} differ from the classes of the first call, "
            f"{first_classes.tolist()}",
            "give all classes in the first call",
        )


def _check_discarded_fit(fitted: FittedModel, n_rows: int) -> None:
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
