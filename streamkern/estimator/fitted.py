"""The result of a fit and the schema of its data, in one record that an estimator replaces at once.

The record holds only host arrays and plain values, so that estimators can be pickled, copied and
sent to other processes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from streamkern.estimator.labels import Labels
from streamkern.estimator.parameter_values import ParameterValue
from streamkern.estimator.report import fit_report
from streamkern.ingest.columns import DEFAULT_ARRAYS, RecordedArrays
from streamkern.ingest.convert_data import ConvertedData
from streamkern.ingest.encoding_options import ReferenceData
from streamkern.ingest.tables.encoder import Encoder
from streamkern.kernels.fourier import FourierFeatures
from streamkern.kernels.points import Grid
from streamkern.losses.losses import loss_for_figures
from streamkern.predict.calibration import Calibration
from streamkern.rundir.checkpoint_format import SavedGroup
from streamkern.solver.posterior import Posterior
from streamkern.store.sparse_rows import as_csr, pack_rows, sparse_features
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.patch_features import PatchFeatures
from streamkern.stream.sources.transforms import Scale, Transform, is_deterministic
from streamkern.stream.target_scale import TargetScale
from streamkern.train.loop.step_loop import Result
from streamkern.train.model.kernel_model import KernelModel
from streamkern.train.model.wide_sum import KernelSum, may_be_wide, rounding_shows
from streamkern.train.online import Online, SavedRun
from streamkern.train.restart.parent_run import ParentRun
from streamkern.train.restart.run_snapshot import RunSnapshot
from streamkern.train.restart.scaling import save_scaling


class FittedAttribute:
    """Descriptor of a public attribute that an estimator has after its first fit.

    Arrays are read-only, because predictions use copies on the device that a write would not reach.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, estimator: Any, owner: type | None = None) -> Any:
        if estimator is None:
            return self
        fitted = estimator._fitted_
        if fitted is None or self._name not in fitted.attributes:
            kind = type(estimator).__name__
            raise AttributeError(f"{kind!r} object has no attribute {self._name!r}")
        value = fitted.attributes[self._name]
        if isinstance(value, np.ndarray):
            value = value.view()
            value.flags.writeable = False
        return value


@dataclass(frozen=True)
class Schema:
    """The form of the rows and targets of the training data, which later data must have.

    row_shape : shape of an encoded row, (d,) or (h, w, channels); (2, k) for packed sparse rows.
    given_columns : names of the columns before encoding, if all are text; None without names.
    encoder : the fitted encoder of a table as JSON; None if the rows were numbers.
    named_by_store : whether the names come from a store; arrays are then accepted without names.
    target_columns : names of the targets in a store; None without names.
    output_names : names of the columns of y, a data frame or a series; None without names.
    flat : whether y was (n,), not (n, n_targets).
    labels : labels of a classifier, in the order of the outputs; None for a regression.
    weight_column : name of the column of sample weights; None without one.
    file_form : how files of such rows are read, as in `StoreSpec`; None for the default.
    arrays : names of the arrays for X, y and the sample weights in the settings of a run.
    """

    row_shape: tuple[int, ...]
    given_columns: tuple[str, ...] | None = None
    encoder: Mapping[str, Any] | None = None
    named_by_store: bool = False
    target_columns: tuple[str, ...] | None = None
    output_names: tuple[Any, ...] | None = None
    flat: bool = True
    labels: Labels | None = None
    weight_column: str | None = None
    file_form: Mapping[str, Any] | None = None
    arrays: RecordedArrays = DEFAULT_ARRAYS

    @classmethod
    def from_source(
        cls, source: BaseSource | KernelModel, location: str = "the store", **fields: Any
    ) -> Self:
        """Return the schema of a source or model.

        location : name of the source, for errors.
        fields : further fields of the schema.
        """
        columns = source.columns
        if source.encoder is not None:
            columns = Encoder.from_json(source.encoder, location).columns
        arrays = RecordedArrays.from_form(source.file_form)
        return cls(
            tuple(source.row_shape), columns, source.encoder, named_by_store=True,
            target_columns=source.target_columns, file_form=source.file_form,
            **{"weight_column": source.weight_column, "arrays": arrays} | fields,
        )  # fmt: skip

    @classmethod
    def from_model(cls, model: KernelModel, facts: Mapping[str, Any], location: str) -> Self:
        """Return the schema of a trained run.

        facts : result of `Schema.facts`, as recorded by the run; empty for a run of `train`.
        location : path of the run, for errors.
        """
        indicator = facts.get("indicator")
        names = facts.get("outputs")
        labels = None
        if indicator is not None:
            labels = Labels(np.arange(model.n_outputs), indicator=indicator)
        elif model.classes is not None:
            labels = Labels.from_names(model.classes, facts.get("labels"))
        return cls.from_source(
            model, location, output_names=None if names is None else tuple(names), labels=labels,
            flat=facts.get("flat", model.n_outputs == 1), weight_column=facts.get("weight_column"),
            arrays=model.arrays,
        )  # fmt: skip

    def record_columns(self, source: BaseSource, data: ConvertedData) -> Self:
        """Return a schema with the names of the columns of targets and weights in `data`.

        The names are also set on `source`, which a run records.
        """
        if data.targets_are_columns:
            source.target_columns = tuple(map(str, data.names or ()))
        elif data.weight_column is None:
            return self
        source.weight_column = data.weight_column
        targets = source.target_columns
        return replace(self, target_columns=targets, weight_column=source.weight_column)

    @property
    def target_names(self) -> list[Any]:
        """Names of the targets; empty if they had none."""
        return [*(self.target_columns or self.output_names or ())]

    def in_trained_order(self, y: Any) -> Any:
        """Return `target_names` if y is a list of the same names in any order; otherwise y.

        Several targets are numbers, so that a list of their names cannot be values.
        """
        names = self.target_names
        is_list = isinstance(y, list | tuple) and all(isinstance(name, str) for name in y)
        return names if is_list and len(y) == len(names) > 1 and {*y} == {*names} else y

    @property
    def named_arrays(self) -> RecordedArrays:
        """Names of the arrays and columns to read from later data."""
        return self.arrays.with_columns(self.target_columns, self.weight_column)

    def to_like(self) -> ReferenceData:
        """Return the encoder, names and file form with which files of the same table are read."""
        encoder = None if self.encoder is None else Encoder.from_json(self.encoder, "the model")
        form = self.named_arrays.add_to_record(self.file_form)
        names = self.given_columns, self.target_columns, self.weight_column
        return ReferenceData(encoder, *names, form)

    def facts(self) -> dict[str, Any]:
        """Return the facts of the schema that a run directory records beside the model, as JSON."""
        names, labels = self.output_names, self.labels
        outputs = list(names) if names and all(isinstance(name, str) for name in names) else None
        facts: dict[str, Any] = {"flat": self.flat, "outputs": outputs}
        if self.weight_column is not None:
            facts["weight_column"] = self.weight_column
        if labels is not None:
            facts |= {"labels": labels.dtype, "indicator": labels.indicator}
        return facts

    @property
    def sparse(self) -> bool:
        """True if rows are packed sparse rows; an image may also have the shape (2, k)."""
        return sparse_features(self.file_form) is not None

    @property
    def n_features(self) -> int:
        """Number of features of a row, after the encoding of a table."""
        return sparse_features(self.file_form) or math.prod(self.row_shape)

    @property
    def attributes(self) -> dict[str, Any]:
        """The public attributes that describe the data, by name, such as `n_features_in_`."""
        is_encoded = self.encoder is not None and self.given_columns is not None
        n_features = len(self.given_columns or ()) if is_encoded else self.n_features
        attributes: dict[str, Any] = {"n_features_in_": n_features}
        if self.given_columns is not None:
            attributes["feature_names_in_"] = np.array(self.given_columns, dtype=object)
        if self.labels is not None:
            attributes["classes_"] = self.labels.classes
        return attributes

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Names of the features after encoding; None without names."""
        if self.encoder is not None:
            return Encoder.from_json(self.encoder, "the model").features
        return self.given_columns

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes in the order of the outputs; None for a regression."""
        return None if self.labels is None else self.labels.names

    @property
    def label_dtype(self) -> str | None:
        """The dtype of the labels, as in `StoreSpec`; None for a regression."""
        return None if self.labels is None else self.labels.dtype


@dataclass(frozen=True)
class FittedModel:
    """A trained model, and the state from which training can continue.

    schema : schema of the training data.
    attributes : the public attributes of the estimator, by name; centers as they were selected.
    targets : mean and scale, (c,), that convert outputs to the units of the user.
    warm : centers and weights for `warm_start=True`.
    precision : precision of kernel values, as in `KernelOperator`.
    grid : the grid of integer features, as in `KernelOperator`; None for other features.
    fixed : transforms that are applied to every row, in this order, including the scaling.
    meta : metadata of the setup, JSON.
    calibration : the calibration of intervals and probabilities; None without one.
    posterior : the posterior, for standard deviations; None without one.
    order : (p,) int64: center i of the run is row order[i] of `centers_`. Predictions sum over the
        centers in the order of the run, and are therefore bit-identical to those of the run.
    shift : (d,) on the host, subtracted from all points; None for kernels without a shift.
    scaling : the transforms in `fixed` that the run has determined, such as a scaling.
    settings : settings of the run, by table and name.
    online : the state and the transforms with which `partial_fit` continues; None after `fit`.
    begun : the parameters at the first `partial_fit`, see `Parameters._model_parameters`.
    wide : whether predictions are summed in float64, see `wide_sum`.
    """

    schema: Schema
    attributes: Mapping[str, Any]
    targets: TargetScale
    warm: ParentRun | None
    precision: str
    grid: Grid | None
    fixed: tuple[Transform, ...]
    meta: Mapping[str, Any]
    calibration: Calibration | None
    posterior: Posterior | None
    order: npt.NDArray[np.int64]
    shift: npt.NDArray[Any] | None
    scaling: Sequence[Transform] = ()
    settings: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    online: tuple[Online | SavedRun, list[Any]] | None = None
    begun: Mapping[str, ParameterValue] | None = None
    wide: bool = False

    @functools.cached_property
    def center_cache(self) -> dict[tuple[Any, ...], Any]:
        """Cache of prepared centers for calls with few rows; see `ModelOpeningMixin`."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "center_cache"}

    @property
    def levels(self) -> Sequence[float] | None:
        """The quantiles of the outputs if a single target has several; else None."""
        loss = loss_for_figures(self.meta)
        return None if loss is None else loss.levels

    @property
    def n_targets(self) -> int:
        """The number of targets: the number of outputs, or 1 with several quantiles."""
        return len(self.targets.mean) if self.levels is None else 1

    @property
    def flat(self) -> bool:
        """True if predictions have the shape (n,), because y had it and each row has one value."""
        return self.schema.flat and self.levels is None

    @property
    def centers(self) -> npt.NDArray[Any]:
        """The scaled centers (p, d) in the order of the run; sparse ones are packed, (p, 2 k)."""
        in_order: Any = self.attributes["centers_"][self.order]
        if self.schema.sparse:
            in_order = pack_rows(in_order, dtype=in_order.dtype).reshape(len(self.order), -1)
        centers: npt.NDArray[Any] = in_order
        return centers

    @classmethod
    def from_result(
        cls, result: Result, schema: Schema, *, notes: Mapping[str, Any] = {}, **fields: Any
    ) -> Self:
        """Return the record of a result, with copies of its arrays, because training may continue.

        notes : additional entries of `report_`.
        fields : further fields of the record.
        """
        model, meta = result.model, result.meta
        # The attributes have the centers in the order of their selection, not in storage order.
        selection = np.argsort(result.order)
        centers, kernel = np.asarray(result.Z)[selection], model.op.kernel
        alpha, scale = model.backend.to_host(model.weights)[selection], model.targets.scale
        # Fourier features have the bandwidth of the kernel that they approximate.
        approximated = kernel.of if isinstance(kernel, FourierFeatures) else {}
        settings = fields.get("settings", {})
        ridge = settings.get("solver", {}).get("ridge")
        if ridge in (None, "auto"):  # it was estimated, or the solver has none
            ridge = result.ridge
        arrays = model.targets.arrays() | save_scaling(model.fixed_transforms)[0]
        arrays |= kernel.arrays()
        setup = SavedGroup(0, arrays, meta)
        warm = ParentRun("True", setup, None, centers, alpha, samples=result.samples)
        attributes = schema.attributes | {
            "centers_": as_csr(centers, schema.n_features) if schema.sparse else centers,
            # Scales are powers of two, so nothing is rounded; the product may overflow float32.
            "dual_coef_": alpha * (scale.astype(alpha.dtype) if model.classes else scale),
            "intercept_": _intercept(model),
            "kernel_": kernel,
            "bandwidth_": approximated.get("bandwidth", kernel.bandwidth),
            "n_centers_": 0 if approximated else len(centers),
            "ridge_": ridge,
            "solver_": meta["sizes"]["solver"],
            **({} if result.ridges is None else {"ridge_": np.asarray(result.ridges)}),
            "history_": result.history,
            "loss_curve_": result.losses,
            "validation_scores_": result.validation_scores or None,
            "n_iter_": result.epochs,
            "report_": fit_report(result) | {"ridge": ridge} | dict(notes),
        }
        return cls(
            schema, attributes, model.targets, warm, model.op.precision, model.op.grid,
            model.fixed_transforms, meta, model.calibration, model.posterior,
            np.asarray(result.order), model.op.origin,
            wide=may_be_wide(settings) and rounding_shows(
                KernelSum(model.op, model.Z, model.weights), np.asarray(result.Z)
            ),
            **fields,
        )  # fmt: skip

    @classmethod
    def from_run(
        cls, run: RunSnapshot, result: Result, transforms: Sequence[Any] | None, options: Any
    ) -> Self:
        """Return the record of a run directory, from which `partial_fit` can continue.

        transforms : the parameter `transforms`, as objects; None if the run does not record it.
        options : storage options of the run directory.
        """
        model = result.model
        user_transforms, fixed = list(transforms or ()), list(model.fixed_transforms)
        # The run has determined the scaling, unless the user's transforms have one.
        has_scale = any(isinstance(t, Scale) for t in user_transforms)
        scaling: list[Transform] = [t for t in fixed if isinstance(t, Scale) and not has_scale]
        scaling += [t for t in fixed if isinstance(t, PatchFeatures)]
        # Later rows pass the user's transforms in order, deterministic ones with the statistics
        # that the model has, and then the transforms that the run has determined.
        online_transforms = [fixed.pop(0) if is_deterministic(t) else t for t in user_transforms]
        online_transforms = [] if transforms is None else [*online_transforms, *fixed]
        return cls.from_result(
            result, Schema.from_model(model, run.facts, run.location), scaling=scaling,
            settings=run.record["identity"]["settings"],
            online=(SavedRun(run.location, run.loaded_checkpoint.step, options), online_transforms),
        )  # fmt: skip

    def without_training_state(self) -> Self:
        """Return a copy without the state that only further training needs."""
        unused = ("history_", "loss_curve_")
        attributes = {k: v for k, v in self.attributes.items() if k not in unused}
        return replace(self, attributes=attributes, warm=None, scaling=(), online=None)


def _intercept(model: KernelModel) -> npt.NDArray[np.float64]:
    """Return the intercept (c,), in units of the user: the mean plus the shifts of quantiles."""
    calibration, mean = model.calibration, model.targets.mean
    if calibration is None or calibration.shifts is None:
        return mean
    intercept: npt.NDArray[np.float64] = mean + calibration.shifts
    return intercept


def find_added_transforms(result: Result, stream: BaseSource) -> list[Transform]:
    """Return the transforms, such as a scaling, that a run added to its source's transforms."""
    n_of_source = sum(map(is_deterministic, stream.feed_transforms))
    return list(result.model.fixed_transforms[n_of_source:])
