"""The form of the data that a model was trained on, to which later rows are compared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from streamkern.estimator.labels import Labels
from streamkern.ingest.encoding_options import Like
from streamkern.ingest.given import Received
from streamkern.ingest.recorded_arrays import USUAL, RecordedArrays
from streamkern.ingest.tables.encoder import Encoder
from streamkern.stream.sources.base import BaseSource
from streamkern.train.model import KernelModel


@dataclass(frozen=True)
class Schema:
    """The rows and targets that a model was trained on.

    row_shape : of a row in training, (d,) or (h, w, channels).
    columns : names of the columns as they were given, if all are text; None without names.
    file_form : form in which files are read, as in `StoreSpec`.
    encoder : of a table with words, dates or gaps, as in `StoreSpec`.
    named_by_store : whether the names are those of a store, so that arrays need none.
    target_columns : names of the targets in a store.
    output_names : names of the columns of y.
    flat : whether y was (n,).
    labels : of a classifier.
    weight_column : name of the column of the table that the sample weights came from.
    arrays : names of arrays in the settings of a run.
    """

    row_shape: tuple[int, ...]
    columns: tuple[str, ...] | None = None
    encoder: Mapping[str, Any] | None = None
    named_by_store: bool = False
    target_columns: tuple[str, ...] | None = None
    output_names: tuple[Any, ...] | None = None
    flat: bool = True
    labels: Labels | None = None
    weight_column: str | None = None
    file_form: Mapping[str, Any] | None = None
    arrays: RecordedArrays = USUAL

    @classmethod
    def of_source(cls, source: BaseSource, **others: Any) -> Self:
        """Return the schema of a store, or of another source that is read in pieces."""
        columns = source.columns
        if source.encoder is not None:
            columns = Encoder.of(source.encoder, "the store").columns
        return cls(
            tuple(source.row_shape),
            columns,
            source.encoder,
            True,
            source.target_columns,
            weight_column=source.weight_column,
            file_form=source.file_form,
            arrays=RecordedArrays.of_form(source.file_form),
            **others,
        )

    @classmethod
    def of_model(cls, model: KernelModel, facts: Mapping[str, Any], place: str) -> Self:
        """Return the schema of a trained run.

        facts : see the method; empty for a run of `train`
        place : of the run, for errors
        """
        several, names = facts.get("indicator"), facts.get("outputs")
        labels = None
        if several is not None:
            labels = Labels(np.arange(model.n_outputs), indicator=several)
        elif model.classes is not None:
            labels = Labels.from_names(model.classes, facts.get("labels"))
        columns = model.columns
        if model.encoder is not None:
            columns = Encoder.of(model.encoder, place).columns
        return cls(
            model.row_shape, columns, model.encoder, True, model.target_columns,
            None if names is None else tuple(names), facts.get("flat", model.n_outputs == 1),
            labels, facts.get("weight_column"), model.file_form, model.arrays,
        )  # fmt: skip

    def of_columns(self, source: BaseSource, given: Received) -> Self:
        """Return the schema with the columns that targets and weights came from.

        `source` gets these names as well.
        """
        if given.of_columns:
            source.target_columns = tuple(map(str, given.names or ()))
        elif given.weight_column is None:
            return self
        source.weight_column = given.weight_column
        targets = source.target_columns
        return replace(self, target_columns=targets, weight_column=source.weight_column)

    @property
    def named_arrays(self) -> RecordedArrays:
        """Names by which arrays of later data are read."""
        return self.arrays.with_columns(self.target_columns, self.weight_column)

    def of_tables(self) -> Like:
        """Return the form in which files of the same table are ingested."""
        encoder = None if self.encoder is None else Encoder.of(self.encoder, "the model")
        form = self.named_arrays.added(self.file_form)
        return Like(encoder, self.columns, self.target_columns, self.weight_column, form)

    def facts(self) -> dict[str, Any]:
        """Return the facts that a run directory keeps of it beside the model, as JSON."""
        names, labels = self.output_names, self.labels
        outputs = list(names) if names and all(isinstance(name, str) for name in names) else None
        facts: dict[str, Any] = {"flat": self.flat, "outputs": outputs}
        if self.weight_column is not None:
            facts["weight_column"] = self.weight_column
        if labels is not None:
            facts |= {"labels": labels.dtype, "indicator": labels.indicator}
        return facts

    @property
    def attributes(self) -> dict[str, Any]:
        """The public attributes of an estimator that was trained on such data, by name."""
        encoded = self.encoder is not None and self.columns is not None
        n_features = len(self.columns or ()) if encoded else math.prod(self.row_shape)
        found: dict[str, Any] = {"n_features_in_": n_features}
        if self.columns is not None:
            found["feature_names_in_"] = np.array(self.columns, dtype=object)
        if self.labels is not None:
            found["classes_"] = self.labels.classes
        return found

    @property
    def features(self) -> tuple[str, ...] | None:
        """Names of the features trained on: those of the encoder, if there is one."""
        if self.encoder is not None:
            return Encoder.of(self.encoder, "the model").features
        return self.columns

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the classes in the order of the outputs; None for values."""
        return None if self.labels is None else self.labels.names

    @property
    def label_dtype(self) -> str | None:
        """The dtype of the labels, as in `StoreSpec`; None for values."""
        return None if self.labels is None else self.labels.dtype
