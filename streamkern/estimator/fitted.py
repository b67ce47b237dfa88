"""The result of a fit and the form of its data: one record, which an estimator takes in one step.

It holds host arrays and plain values only, so that estimators can be pickled, copied and sent to
other processes. Code that predicts from a record, or trains further from it, reads it once.
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
from streamkern.ingest.columns import USUAL, RecordedArrays
from streamkern.ingest.encoding_options import Like
from streamkern.ingest.received import Received
from streamkern.ingest.tables.encoder import Encoder
from streamkern.kernels.fourier import FourierFeatures
from streamkern.kernels.points import Grid
from streamkern.losses.losses import loss_for_figures
from streamkern.planning.sizes import own_sizes
from streamkern.predict.calibration import Calibration
from streamkern.rundir.checkpoint_format import Saved
from streamkern.solver.posterior import Posterior
from streamkern.solver.precondition.step_rule import StepRule, max_over_blocks
from streamkern.store.sparse_rows import as_csr, packed, sparse_features
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
    """An attribute of the present fit of an estimator; it does not exist before the first fit.

    Arrays are read-only: predictions use copies, prepared on the device, which a write would miss.
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
    """The rows and targets that a model was trained on, to which later rows are compared.

    row_shape : of a row in training, (d,) or (h, w, channels).
    given_columns : names of the columns as they were given, if all are text; None without names.
    encoder, weight_column, file_form : as in `StoreSpec`.
    named_by_store : whether the names are those of a store, so that arrays need none.
    target_columns : names of the targets in a store.
    output_names : names of the columns of y.
    flat : whether y was (n,).
    labels : of a classifier.
    arrays : names of arrays in the settings of a run.
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
    arrays: RecordedArrays = USUAL

    @classmethod
    def of_source(
        cls, source: BaseSource | KernelModel, where: str = "the store", **others: Any
    ) -> Self:
        """Return the schema of a store or another source, or of a model."""
        columns = source.columns
        if source.encoder is not None:
            columns = Encoder.from_json(source.encoder, where).columns
        arrays = RecordedArrays.from_form(source.file_form)
        return cls(
            tuple(source.row_shape), columns, source.encoder, True, source.target_columns,
            **{"weight_column": source.weight_column, "arrays": arrays} | others,
            file_form=source.file_form,
        )  # fmt: skip

    @classmethod
    def of_model(cls, model: KernelModel, facts: Mapping[str, Any], where: str) -> Self:
        """Return the schema of a trained run.

        facts : see the method; empty for a run of `train`
        """
        indicator, names, labels = facts.get("indicator"), facts.get("outputs"), None
        if indicator is not None:
            labels = Labels(np.arange(model.n_outputs), indicator=indicator)
        elif model.classes is not None:
            labels = Labels.from_names(model.classes, facts.get("labels"))
        return cls.of_source(
            model, where, output_names=None if names is None else tuple(names), labels=labels,
            flat=facts.get("flat", model.n_outputs == 1), weight_column=facts.get("weight_column"),
            arrays=model.arrays,
        )  # fmt: skip

    def of_columns(self, source: BaseSource, data: Received) -> Self:
        """Return the schema with the columns that targets and weights came from.

        `source` gets these names as well.
        """
        if data.of_columns:
            source.target_columns = tuple(map(str, data.names or ()))
        elif data.weight_column is None:
            return self
        source.weight_column = data.weight_column
        targets = source.target_columns
        return replace(self, target_columns=targets, weight_column=source.weight_column)

    @property
    def named_arrays(self) -> RecordedArrays:
        """Names by which arrays of later data are read."""
        return self.arrays.with_columns(self.target_columns, self.weight_column)

    def of_tables(self) -> Like:
        """Return the form in which files of the same table are ingested."""
        encoder = None if self.encoder is None else Encoder.from_json(self.encoder, "the model")
        form = self.named_arrays.added(self.file_form)
        return Like(encoder, self.given_columns, self.target_columns, self.weight_column, form)

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
    def sparse(self) -> bool:
        """True if rows are packed sparse rows, which their shape (2, k) alone does not say."""
        return sparse_features(self.file_form) is not None

    @property
    def n_features(self) -> int:
        """Number of features of a row, encoded if it is of a table."""
        return sparse_features(self.file_form) or math.prod(self.row_shape)

    @property
    def attributes(self) -> dict[str, Any]:
        """The public attributes of an estimator that was trained on such data, by name."""
        encoded = self.encoder is not None and self.given_columns is not None
        n_features = len(self.given_columns or ()) if encoded else self.n_features
        attributes: dict[str, Any] = {"n_features_in_": n_features}
        if self.given_columns is not None:
            attributes["feature_names_in_"] = np.array(self.given_columns, dtype=object)
        if self.labels is not None:
            attributes["classes_"] = self.labels.classes
        return attributes

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Names of the features trained on: those of the encoder, if there is one."""
        if self.encoder is not None:
            return Encoder.from_json(self.encoder, "the model").features
        return self.given_columns

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes in the order of the outputs; None for values."""
        return None if self.labels is None else self.labels.names

    @property
    def label_dtype(self) -> str | None:
        """The dtype of the labels, as in `StoreSpec`; None for values."""
        return None if self.labels is None else self.labels.dtype


@dataclass(frozen=True)
class FittedModel:
    """A trained model, and the state from which training can continue.

    schema : of the data trained on.
    attributes : the public ones of the estimator, by name. Centers are in the order in which they
        were chosen.
    targets : the mean and scale that predictions are transformed back to.
    warm : weights for `warm_start=True`.
    precision, grid : of the kernel's products.
    fixed : transforms of every row, including the scaling.
    meta : of the setup, JSON.
    calibration, posterior : for intervals and probabilities; None if there are none.
    order : (p,) center i of the run, in whose order sums are computed, is row order[i] of
        `centers_`: so predictions are those of the run to the last bit.
    shift : (d,) that the run subtracts from all points; None for kernels without one.
    scaling : scaling that the run chose itself.
    settings : of the run, by table.
    online : the state that `partial_fit` continues, and the transforms of its rows; None after
        `fit`.
    wide : whether predictions are summed in float64, see `wide_sum`.
    begun : the parameters at the first `partial_fit`, see `Parameters._model_parameters`.
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
    def prepared(self) -> dict[tuple[Any, ...], Any]:
        """Centers prepared for calls of few rows, by the device; see `Predicting`."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "prepared"}

    @property
    def levels(self) -> Sequence[float] | None:
        """The quantiles of the outputs if a single target has several; else None."""
        loss = loss_for_figures(self.meta)
        return None if loss is None else loss.levels

    @property
    def n_targets(self) -> int:
        """The number of targets, which is that of outputs but for several quantiles of one."""
        return len(self.targets.mean) if self.levels is None else 1

    @property
    def flat(self) -> bool:
        """True if predictions are (n,): those of one value for each row, of a y that was (n,)."""
        return self.schema.flat and self.levels is None

    @property
    def centers(self) -> npt.NDArray[Any]:
        """(p, d) the centers in the order of the run; sparse ones packed, (p, 2 k)."""
        in_order: Any = self.attributes["centers_"][self.order]
        if self.schema.sparse:
            in_order = packed(in_order, dtype=in_order.dtype).reshape(len(self.order), -1)
        centers: npt.NDArray[Any] = in_order
        return centers

    @classmethod
    def of_result(
        cls, result: Result, schema: Schema, *, notes: Mapping[str, Any] = {}, **others: Any
    ) -> Self:
        """Return the record of a run, with copies of its arrays, as the run may continue.

        notes : for the report
        """
        model, meta = result.model, result.meta
        chosen = np.argsort(result.order)
        centers, kernel = np.asarray(result.Z)[chosen], model.op.kernel
        alpha, scale = model.backend.to_host(model.weights)[chosen], model.targets.scale
        # Fourier features have the bandwidth of the kernel that they approximate.
        described = kernel.of if isinstance(kernel, FourierFeatures) else {}
        ridge = others.get("settings", {}).get("solver", {}).get("ridge")
        if ridge in (None, "auto"):  # it was found, or the solver takes none
            ridge = result.ridge
        arrays = model.targets.arrays() | save_scaling(model.fixed)[0]
        if kernel.metric is not None:
            arrays["metric"] = kernel.metric
        setup = Saved(0, arrays, meta)
        warm = ParentRun("True", setup, None, centers, alpha, samples=result.samples)
        attributes = schema.attributes | {
            "centers_": as_csr(centers, schema.n_features) if schema.sparse else centers,
            # Powers of two: nothing is rounded, and float64 holds values that float32 may not.
            "dual_coef_": alpha * (scale.astype(alpha.dtype) if model.classes else scale),
            "intercept_": _intercept(model),
            "kernel_": kernel,
            "bandwidth_": described.get("bandwidth", kernel.bandwidth),
            "n_centers_": 0 if described else len(centers),
            "ridge_": ridge,
            "solver_": meta["sizes"]["solver"],
            **({} if result.ridges is None else {"ridge_": np.asarray(result.ridges)}),
            "history_": result.history,
            "loss_curve_": result.losses,
            "validation_scores_": result.validation_scores or None,
            "n_iter_": result.epochs,
            "report_": _report(result) | {"ridge": ridge} | dict(notes),
        }
        return cls(
            schema, attributes, model.targets, warm, model.op.precision, model.op.grid,
            model.fixed, meta, model.calibration, model.posterior, np.asarray(result.order),
            model.op.origin,
            wide=may_be_wide(others.get("settings", {})) and rounding_shows(
                KernelSum(model.op, model.Z, model.weights), np.asarray(result.Z)
            ),
            **others,
        )  # fmt: skip

    @classmethod
    def of_run(
        cls, run: RunSnapshot, result: Result, transforms: Sequence[Any] | None, options: Any
    ) -> Self:
        """Return the record of a run directory, from which `partial_fit` continues.

        transforms : the parameter, as objects; None if the run does not keep them
        options : storage options of the place
        """
        model = result.model
        built, fixed = list(transforms or ()), list(model.fixed)
        # What the run found by itself; a scaling that was given is among the transforms.
        has_scale = any(isinstance(t, Scale) for t in built)
        scaling: list[Transform] = [t for t in fixed if isinstance(t, Scale) and not has_scale]
        scaling += [t for t in fixed if isinstance(t, PatchFeatures)]
        # For later rows: the model's own transforms unchanged, the others between them.
        bound = [fixed.pop(0) if is_deterministic(t) else t for t in built]
        bound = [] if transforms is None else [*bound, *fixed]
        return cls.of_result(
            result, Schema.of_model(model, run.facts, run.place), scaling=scaling,
            settings=run.record["identity"]["settings"],
            online=(SavedRun(run.place, run.saved.step, options), bound),
        )  # fmt: skip

    def to_predict(self) -> Self:
        """Return the record without the state that only further training needs."""
        history = ("history_", "loss_curve_")
        attributes = {k: v for k, v in self.attributes.items() if k not in history}
        return replace(self, attributes=attributes, warm=None, scaling=(), online=None)


def _intercept(model: KernelModel) -> npt.NDArray[np.float64]:
    """Return what is added to the sums of kernels, (c,): the mean, and the shifts of quantiles."""
    calibration, mean = model.calibration, model.targets.mean
    if calibration is None or calibration.shifts is None:
        return mean
    shifted: npt.NDArray[np.float64] = mean + calibration.shifts
    return shifted


def found_scaling(result: Result, stream: BaseSource) -> list[Transform]:
    """Return the scaling that a run put behind the transforms of its source."""
    return list(result.model.fixed[sum(map(is_deterministic, stream.feed_transforms)) :])


def _report(result: Result) -> dict[str, Any]:
    """Return choices, measurements and results in one flat table."""
    report = _of_setup(result.meta) | {"samples": result.samples} | result.metrics
    if result.model.calibration is not None and result.model.calibration.n_rows:
        report["calibration"] = result.model.calibration.describe()
    if result.model.posterior is not None:
        report["posterior"] = result.model.posterior.describe(result.model.targets.scale)
    if result.ridges is not None:
        report["ridges"] = np.asarray(result.ridges).tolist()
    if result.ended:
        report["ended"] = result.ended
    if result.skipped:
        report["skipped"] = list(result.skipped)
    return report


def _of_setup(meta: Mapping[str, Any]) -> dict[str, Any]:
    setup, sizes = meta["setup"], meta["sizes"]
    rules = [StepRule(**rule) for rule in setup["rules"]]
    return {
        "solver": sizes["solver"],
        **own_sizes(sizes),
        "scale": meta["scale"],
        **max_over_blocks(setup["rules"]),
        **({"step_size": min(rule.eta(setup["batch_size"]) for rule in rules)} if rules else {}),
        **{k: v for k, v in setup.items() if k not in ("rules", "projection_rule", "jitters")},
    }
