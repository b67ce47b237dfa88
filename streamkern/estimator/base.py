"""What the estimators share: parameters into a run, a run into fitted attributes, and back.

A fitted estimator holds host arrays and plain values only; the backend is opened for a call and
closed after it, so estimators can be pickled, cloned and sent to other processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, is_classifier
from sklearn.utils.validation import check_is_fitted

from streamkern.basics.errors import ConfigError, DataError
from streamkern.estimator import inputs
from streamkern.estimator.callbacks import CallbackSupport, ScikitLearnCallbacks, with_callbacks
from streamkern.estimator.facts import transform_tables
from streamkern.estimator.fitted import attributes_of, found_scaling
from streamkern.estimator.foreign import arrived, names_of_targets
from streamkern.estimator.mistakes import brief
from streamkern.estimator.parameters import own_names
from streamkern.estimator.predicting import Predicting
from streamkern.estimator.tables import fitted_rows, needs_encoder
from streamkern.ingest.tables.encoder import Encoder, column_notes
from streamkern.solver.methods import METHODS, options_of
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.column_order import in_columns
from streamkern.stream.sources.transforms import (
    Transform,
    bind_transform,
    from_config,
)
from streamkern.train.callbacks import check_callbacks
from streamkern.train.online import Online, SavedRun
from streamkern.train.opened import Given
from streamkern.train.saved_model import Whole, model_only, save_model
from streamkern.train.train import Result, train
from streamkern.train.training_data import check_same_rows
from streamkern.train.warm_start import WarmStart


class KernelEstimator(CallbackSupport, Predicting, BaseEstimator):  # type: ignore[misc]
    """What both estimators share; `docstrings` says what the parameters are."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    # -- fitting ---------------------------------------------------------------------------

    @brief
    @with_callbacks  # type: ignore[untyped-decorator]
    def fit(
        self, X: Any, y: Any = None, sample_weight: Any = None, *, test: Any = None,
        client: Any = None,
    ) -> Self:  # fmt: skip
        """Train on all of the data.

        Parameters
        ----------
        X : (n, d) or (n, h, w, channels) array, or a data frame, whose words, dates and gaps are
            encoded; a zarr or Dask array, a Dask data
            frame or an array of xarray, read in pieces; one of SciPy's sparse arrays, made dense in
            pieces; or a store, its URL, a zarr group or a source, which bring their targets along.
        y : (n,) or (n, c) values; None where X brings it along.
        sample_weight : (n,) finite numbers, 0 or above, beside arrays; a store brings its own.
            They are divided by their mean, so that `ridge` keeps its scale: see `sample_weights`.
        test : held-out data evaluated during training: (X, y), or what X may be.
        client : a `distributed.Client`, on whose workers the `ranks` are placed, or with one rank
            the rows are read; it stays open, and is no part of the estimator.

        Returns
        -------
        self : the fitted estimator. With `run_dir`, the same call goes on where an earlier one was
            interrupted, and returns at once after it has finished.
        """
        self._check_kept("centers", "metric", "transforms")
        if hasattr(self, "_online"):
            del self._online
        source = self._source(X, y, sample_weight, first=True)
        held_out = None
        if test is not None:
            pair = test if isinstance(test, tuple) else (test, None)
            held_out = self._source(pair[0], pair[1], None, first=False)
        centers, metric = self._given_centers(), self._given_metric()
        with own_names():
            config, warm = self._config(self.epochs), self._last_fit()
            # Weights mean something in the scale they were fitted in.
            kept = self._found if warm is not None and config.data.scale == "auto" else []
            stream = self._transformed(source, [*self._transforms(source), *kept])
            told, tasks = list(check_callbacks(self.callbacks)), None
            if ScikitLearnCallbacks.wanted(self):
                metadata = None if sample_weight is None else {"sample_weight": sample_weight}
                told.append(tasks := ScikitLearnCallbacks(self, X=X, y=y, metadata=metadata))
            result = train(
                config, source=stream, test=held_out, centers=centers, metric=metric, warm=warm,
                client=client, facts=self._facts(), progress=self._progress(), callbacks=told,
            )  # fmt: skip
            self._keep(result, inputs.sparse_note(X) | self._encoder_note())
            self._found = kept or found_scaling(result, stream)
            self._settings = Given(centers=centers, metric=metric).recorded(config)
        if tasks is not None:
            tasks.fitted()
        return self

    def _partial_fit(self, X: Any, y: Any) -> Self:
        first = not hasattr(self, "_online")
        self._check_kept(*(("centers", "metric") if first else ()), "transforms")
        source = self._source(X, y, None, first=first)
        with own_names():
            if first:
                config = self._config(1 if self.epochs == "auto" else self.epochs)
                centers, metric = self._given_centers(), self._given_metric()
                given = Given(centers=centers, metric=metric, facts=self._facts())
                online: Online | SavedRun = Online(config, given)
                bound = self._transforms(source)
            else:
                online, bound = self._online
                check_same_rows(source, self._row_shape, "X")
            if isinstance(online, SavedRun):
                online = online.open(self._execution())
            stream = self._transformed(source, bound)
            result = online.advance(stream, self._progress())
            self._keep(result, inputs.sparse_note(X))
            found = found_scaling(result, stream)
            bound += found
            self._found = found if first else [*self._found, *found]
            self._settings = online.given.recorded(online.config)
        self._online = online, bound
        return self

    def _facts(self) -> dict[str, Any]:
        """See `facts`."""
        tables, not_kept = transform_tables(self.transforms)
        names = self._output_names
        outputs = list(names) if names and all(isinstance(name, str) for name in names) else None
        own = {"flat": self._flat, "outputs": outputs}
        return own | {"transforms": tables, "not_kept": not_kept}

    def _execution(self) -> dict[str, Any]:
        """Settings that a run goes on with: they do not belong to what it has computed."""
        config = self._config(1 if self.epochs == "auto" else self.epochs)
        names = ("device", "accelerator", "memory", "device_memory", "threads")
        return {f"run.{name}": getattr(config.run, name) for name in names} | {
            "data.epochs": config.data.epochs,
            "run.early_stopping": config.run.early_stopping,
        }

    def _source(self, X: Any, y: Any, sample_weight: Any, *, first: bool) -> BaseSource:
        """Checked training data; `first` : it decides features and classes."""
        table, X, y = y, arrived(X, "X"), arrived(y, "y")
        if first:
            self._output_names = names_of_targets(table)
        sample_weight = arrived(sample_weight, "sample_weight")
        if inputs.is_stream(X):
            source = self._stream(X, y, sample_weight)
            if not first:
                return in_columns(source, self._columns(), "X", self._target_columns, self._encoder)
            self._encoder = source.encoder
            self.n_features_in_ = int(np.prod(source.row_shape))
            self._row_shape = tuple(source.row_shape)
            self._flat = np.ndim(y) == 1 if y is not None else source.n_outputs == 1
            if hasattr(self, "feature_names_in_"):
                del self.feature_names_in_
            if source.columns is not None:
                self.feature_names_in_ = np.array(source.columns, dtype=object)
            if self._encoder is not None:
                self._name_columns(Encoder.of(self._encoder, "the store"))
            self._target_columns = source.target_columns
            self._named_by_store = True
            return source
        if y is None:
            raise DataError(
                f"{type(self).__name__} requires y to be passed, but the target y is None; give "
                "targets, or a store that holds them"
            )
        if first:
            self._encoder = None
            rows = self._first_rows(X, y)
            self._row_shape = rows.shape[1:]
        else:
            rows = self._rows(X)
        rows = self._shaped(rows)
        weights = inputs.checked_weights(sample_weight, rows)
        given = self._array_source(rows, y, weights, first)
        given.columns = self._columns() if rows.ndim == 2 else None
        given.encoder = self._encoder
        if first:
            self._target_columns = None
            self._named_by_store = False
        return given

    def _first_rows(self, X: Any, y: Any) -> Any:
        """Rows that decide the features; of a data frame with more than numbers encoded ones."""
        if not needs_encoder(X):
            return inputs.checked_rows(self, X, reset=True, nameless=self._named_by_store)
        seed = int(self._config(1).run.random_state)
        rows, encoder = fitted_rows(X, y, seed, classes=is_classifier(self))
        self._encoder = encoder.json()
        self._name_columns(encoder)
        return rows

    def _name_columns(self, encoder: Encoder) -> None:
        """Take the columns of the table for the features, as scikit-learn means them."""
        self.n_features_in_ = len(encoder.columns)
        self.feature_names_in_ = np.array(encoder.columns, dtype=object)

    def _last_fit(self) -> WarmStart | None:
        """The weights that `warm_start=True` stands for; None where nothing was fitted yet."""
        if isinstance(self.warm_start, str | os.PathLike) or not self.warm_start:
            return None
        if self.solver in METHODS and "warm_start" not in options_of(self.solver):
            raise ConfigError(
                f"warm_start=True is not defined for solver {self.solver!r}, which has no start; "
                "leave it out, or use another solver"
            )
        if self.run_dir is not None:
            raise ConfigError(
                "warm_start=True can not be used with run_dir, which does not keep the start; give "
                "warm_start the run_dir of the fit to start from"
            )
        return self._warm

    history_: list[dict[str, Any]]
    loss_curve_: list[float]
    validation_scores_: list[float] | None
    n_iter_: int
    report_: dict[str, Any]
    _warm: WarmStart | None = None
    _found: list[Transform]
    _online: tuple[Online | SavedRun, list[Any]]
    _indicator: str | None = None  # dtype of the targets, where they are several labels
    _settings: dict[str, dict[str, Any]]

    def _stream(self, X: Any, y: Any, sample_weight: Any = None) -> BaseSource:
        raise NotImplementedError

    def _array_source(self, X: Any, y: Any, w: Any, first: bool) -> ArraySource:
        raise NotImplementedError

    def _transforms(self, source: BaseSource) -> list[Any]:
        """The transforms, scaling bound to the statistics of this source."""
        built = [from_config([t])[0] if isinstance(t, Mapping) else t for t in self.transforms]
        return [bind_transform(t, source) for t in built]

    @staticmethod
    def _transformed(source: BaseSource, transforms: list[Any]) -> BaseSource:
        return AugmentedSource(source, 1, transforms) if transforms else source

    def _keep(self, result: Result, notes: Mapping[str, Any] = {}) -> None:
        """The fitted attributes, and no device. notes : for the report."""
        for name, value in attributes_of(result).items():
            setattr(self, name, value)
        self.report_.update(notes)
        result.model.backend.close()

    @brief
    def save(
        self, place: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        """Write the fitted model to a new directory, from which `streamkern.load` makes it again.

        It is laid out like a run directory, so that `streamkern predict`, `evaluate` and `info`
        read it as well, and holds no code. After `partial_fit` the state of the solver is there
        too, to go on with; after `fit` it is not: use `run_dir` for a run that can be gone on with.
        Of a model that was loaded it stays where that was loaded from.

        Parameters
        ----------
        place : path or URL of a directory in which nothing else was trained or saved.
        storage_options : of a remote place, as fsspec takes them.

        Raises
        ------
        ConfigError
            The model has a function or a kernel of the user's, which are not kept on disk.
        RunError
            Another model or run is there, or files of somebody else under the names of a run's.
        """
        check_is_fitted(self)
        with own_names():
            save_model(self._whole(), place, storage_options)

    def _encoder_note(self) -> dict[str, Any]:
        """What a report says of a table that was encoded; nothing of others."""
        notes = column_notes(self._encoder, "the model")
        return {"encoder": notes} if notes else {}

    def _whole(self) -> Whole:
        """What `save` writes."""
        report = self.report_
        of_data = ("test_", "validation_")
        metrics = {name: report[name] for name in report if name.startswith(of_data)}
        facts = self._meta.get("facts", {}) | self._facts()
        online = self._online[0] if hasattr(self, "_online") else None
        if isinstance(online, Online) and online.setup is not None and online.kept is not None:
            setup, (arrays, meta) = online.setup, online.kept
            # No command goes on with it: it has no data.
            state = arrays, meta | {"position": meta["position"] | {"done": True}}
        else:
            with self._model() as model:
                setup, state = model_only(
                    model, self.centers_, self._meta, epochs=self.n_iter_,
                    samples=report["samples"], ridge=report.get("ridge", 0.0),
                    ridges=report.get("ridges"),
                )  # fmt: skip
        setup = setup[0], setup[1] | {"facts": facts}
        ended = report.get("ended")
        return Whole(
            self._settings, setup, state, metrics, self.history_, self.loss_curve_, ended,
            self.validation_scores_ or (),
        )  # fmt: skip
