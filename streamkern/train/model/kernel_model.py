"""A trained model: f(x) = mean + scale sum_j alpha_j k(x, z_j), with the transforms of training.

If the targets were learned on a log scale, f(x) is an increasing function of the sum, see
`TargetScale`. Rows are evaluated as they are streamed, in constant memory.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, Backend, tiles
from streamkern.backend.devices import on_its_backend
from streamkern.basics.errors import ConfigError, DataError
from streamkern.basics.message import mention
from streamkern.basics.progress import Progress
from streamkern.ingest.columns import DEFAULT_ARRAYS, RecordedArrays
from streamkern.ingest.numeric import is_sparse
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.losses.base import Loss
from streamkern.losses.log_link import LogLink
from streamkern.planning.memory import EVALUATED_ROWS, rows_at_once
from streamkern.predict.calibration import Calibration, no_calibration_text
from streamkern.predict.evaluation import CalibratedFigures, EvaluationMetrics
from streamkern.predict.input_rows import FileRows
from streamkern.predict.prediction_table import OutputFormat, PredictionTable, output_labels
from streamkern.predict.predictions import write_predictions
from streamkern.solver.posterior import Posterior
from streamkern.store.row_block import RowBlock
from streamkern.stream.feed import prepare
from streamkern.stream.sources.alignment import align_classes, align_columns, check_row_shape
from streamkern.stream.sources.arrays import read_dense_rows
from streamkern.stream.sources.base import BaseSource, Source
from streamkern.stream.sources.stores import stores_in
from streamkern.stream.sources.transforms import Transform, describe_transform
from streamkern.stream.sources.user import as_source
from streamkern.stream.target_scale import TargetScale
from streamkern.train.model.model_facts import ShownFacts, model_facts
from streamkern.train.model.residual_scales import ResidualScaleEvaluator
from streamkern.train.model.unseen_values import UnseenValues
from streamkern.train.model.wide_sum import KernelSum, rounding_shows, wide_sum
from streamkern.train.resolve.training_data import check_evaluable, targets_text


@dataclass(repr=False)
class KernelModel(ShownFacts):
    """Centers, weights, and the transforms from a stored row to features.

    op : products with kernel matrices
    Z : (p,) prepared centers on the device, right side only
    weights : (p, c) on the device, in the dtype of `op`
    classes : names of the c classes, sorted; None for numeric targets
    row_shape : shape of a stored row, (d,) or (h, w, channels)
    fixed_transforms : transforms that are applied to every row, in this order
    targets : (c,) mean and scale of the targets: in the user's units, as float64, for numeric
        targets; in the dtype of the weights for classes
    damaged_checkpoints : a sentence for each damaged checkpoint newer than the loaded one
    columns, target_columns : names of the d encoded features and of the targets, or None
    encoder, file_form, label_dtype, weight_column : as in `StoreSpec`
    origin : description of the run that trained the model, as JSON values
    calibration, posterior : for intervals, probabilities and standard deviations, or None
    arrays : names of the arrays of a file with rows, from the settings of the run
    lacking : sentence that explains how to get a calibration, for errors
    loss : loss that was minimised; None for squares
    centers : (p, d) scaled centers on the host, if f(X) may be summed in float64; else None
    wide : whether f(X) is summed in float64; None: `rounding_shows` decides
    """

    op: KernelOperator
    Z: Points
    weights: Array
    classes: tuple[str, ...] | None
    row_shape: tuple[int, ...]
    fixed_transforms: tuple[Transform, ...]
    targets: TargetScale
    damaged_checkpoints: tuple[str, ...] = ()
    columns: tuple[str, ...] | None = None
    target_columns: tuple[str, ...] | None = None
    encoder: Mapping[str, Any] | None = None
    file_form: Mapping[str, Any] | None = None
    label_dtype: str | None = None
    weight_column: str | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)
    calibration: Calibration | None = None
    posterior: Posterior | None = None
    arrays: RecordedArrays = DEFAULT_ARRAYS
    lacking: str = field(default_factory=lambda: no_calibration_text({}))
    loss: Loss | None = None
    centers: npt.NDArray[Any] | None = None
    wide: bool | None = None

    def facts(self) -> dict[str, Any]:
        return model_facts(self)

    @property
    def backend(self) -> Backend:
        """The backend on which the model is evaluated."""
        return self.op.backend

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of f(X)."""
        return np.dtype(np.float64) if self.classes is None else self.op.dtype

    @property
    def n_outputs(self) -> int:
        """The number of outputs c."""
        return int(self.weights.shape[1])

    @property
    def levels(self) -> Sequence[float] | None:
        """The quantiles of the outputs if a single target has several; else None."""
        return None if self.loss is None else self.loss.levels

    @property
    def n_targets(self) -> int:
        """The number of targets: 1 if the outputs are several quantiles, else `n_outputs`."""
        return self.n_outputs if self.levels is None else 1

    def _tiles(self, n: int) -> list[slice]:
        return tiles(n, min(EVALUATED_ROWS, rows_at_once(self.n_outputs)))

    @on_its_backend
    def values(self, X: Any, *, std: bool = False, spread: bool = False) -> npt.NDArray[Any]:
        """Return f(X) on the host, (n, c).

        X : (n, *row_shape) stored rows, or flat; sparse rows are made dense one tile at a time
        std, spread : append standard deviations, or else the residual scale of each row: (n, 2 c)

        Raises RowShapeError if the shape of X does not fit, and DataError if f(X) overflows.
        """
        is_sparse_kernel, expected = self.op.kernel.sparse, "the model was trained on"
        check_row_shape("X has", X.shape[1:], expected, self.row_shape, sparse=is_sparse_kernel)
        X = X.tocsr() if is_sparse(X) else X  # not all sparse formats can slice rows
        out = np.empty((X.shape[0], (1 + std + spread) * self.n_outputs), self.dtype)
        for rows in self._tiles(X.shape[0]):
            row_ids = np.arange(rows.start, rows.stop, dtype=np.int64)
            y = np.empty((len(row_ids), 0))
            block = RowBlock(read_dense_rows(X, rows.start, rows.stop), y, None, row_ids)
            out[rows] = self._host_values(block, std, spread)
        return out

    def stream(self, source: Source | FileRows) -> Iterator[tuple[RowBlock, Array, Array]]:
        """Yield (block, f(X), Y) for all rows in order.

        f(X) and Y are (m, c) on the device, to be used inside `backend.active()`.
        """
        aligned = self.align_source(source, with_targets=True)
        n_classes = None if aligned.classes is None else aligned.n_outputs
        for block in aligned.blocks():
            for rows in self._tiles(len(block.row_ids)):
                rows_part = block.take(rows)
                if isinstance(self.loss, LogLink):
                    self.loss.check_targets(rows_part.y, rows_part.row_ids)
                F, Y = self._block_values(rows_part, n_classes)
                yield rows_part, F, self.backend.xp.broadcast_to(Y, F.shape)

    def align_source(self, source: Any, *, with_targets: bool = False) -> Any:
        """Return the source with its columns (and, `with_targets`, classes) in training order."""
        source = source if isinstance(source, FileRows) else as_source(source)
        names = self.target_columns if with_targets else None
        source = align_columns(source, self.columns, "the data", names, self.encoder)
        if with_targets:
            source = align_classes(source, self.classes, self.label_dtype, "the data")
        check_evaluable(source, self, "the data")
        return source

    @on_its_backend
    def _block_values(self, block: RowBlock, n_classes: int | None) -> tuple[Array, Array]:
        with np.errstate(over="ignore", invalid="ignore"):  # the result is checked
            X, Y = self._prepare_block(block, n_classes)
            self.warn_of_unseen(X)
            F = self.function(X)
        self._check_finite(F, block)
        F = self.targets.in_target_units(self.backend.xp, F, self.dtype)
        if self.calibration is not None and self.calibration.shifts is not None:
            F += self.backend.asarray(self.calibration.shifts)
        if self.loss is not None and not self.loss.for_classes:
            F = self.loss.ordered(self.backend.xp, self.loss.predict(self.backend.xp, F))
        return F, Y

    def function(self, X: Array) -> Array:
        """Return K(X, Z) weights, (n, c) on the device. X : (n, d) on the device, scaled."""
        return self.kernel_sum(X)

    @functools.cached_property
    def kernel_sum(self) -> KernelSum:
        """The function f(X) before `targets` are applied, in the precision of predictions."""
        in_op_dtype = KernelSum(self.op, self.Z, self.weights)
        if self.centers is None or self.wide is False:
            return in_op_dtype
        in_float64 = self.wide or rounding_shows(in_op_dtype, self.centers)
        return wide_sum(in_op_dtype, self.centers) if in_float64 else in_op_dtype

    def _prepare_block(self, block: RowBlock, n_classes: int | None) -> tuple[Array, Array]:
        # Transforms need the row shape of training; rows may be given flat.
        if not self.op.kernel.sparse:
            block = block._replace(X=block.X.reshape(len(block.X), *self.row_shape))
        return prepare(
            self.backend, block, transforms=self.fixed_transforms, dtype=self.op.dtype,
            seed=0, epoch=0, n_classes=n_classes,
        )[:2]  # fmt: skip

    def _check_finite(self, F: Array, block: RowBlock) -> None:
        """Raise DataError for a row whose distances overflow, so that f(X) is not finite."""
        xp = self.backend.xp
        if bool(xp.isfinite(F).all()) or not bool(xp.isfinite(self.weights).all()):
            return  # weights that are not finite are no fault of a row: the run diverged
        is_finite = np.isfinite(self.backend.to_host(F)).all(axis=1)
        raise DataError(
            f"row {block.row_ids[np.argmin(is_finite)]} is too large for {self.op.dtype}",
            f"correct its values, or train with {mention('precision', 'float64')}",
        )

    @functools.cached_property
    def _sigma(self) -> ResidualScaleEvaluator:
        assert self.calibration is not None
        assert self.calibration.residual_scale is not None
        return ResidualScaleEvaluator(self.op, self.calibration.residual_scale)

    def warn_of_unseen(self, X: Array) -> None:
        """Warn if most rows X (n, d) have values that no center has, see `UnseenValues`."""
        if columns := self.op.categorical_columns:
            self._unseen_values.warn_of(self.backend.to_host(X[:, columns]))

    @functools.cached_property
    def _unseen_values(self) -> UnseenValues:
        return UnseenValues(self.op, self.Z, self.columns or ())

    def transformed_rows(self, block: RowBlock) -> Array:
        """Return the transformed rows (k, d) of a block, on the device, in the dtype of `op`."""
        return self._prepare_block(block, None)[0]

    @on_its_backend
    def evaluate(self, source: Source | FileRows) -> dict[str, float]:
        """Return the figures of the model on rows with targets, by name.

        These are `EvaluationMetrics` and `CalibratedFigures`. Sample weights of `source` count, but
        class weights of the run do not. Raises ConfigError or DataError if the data does not fit.
        """
        source = self.align_source(source, with_targets=True)
        if source.classes != self.classes or source.n_outputs != self.n_targets:
            data_targets = targets_text(source.classes, source.n_outputs)
            model_targets = targets_text(self.classes, self.n_targets)
            problem = f"the data has {data_targets}, the model was trained on {model_targets}"
            raise ConfigError(problem, "use data with the same targets")
        figures = EvaluationMetrics(self.backend, self.n_outputs, bool(self.classes), self.loss)
        calibrated = None if self.calibration is None else CalibratedFigures(self.calibration)
        for block, F, Y in self.stream(source):
            figures.add(F, Y, block.w)
            if calibrated is not None:
                arrays = self.backend.to_host(F), self.backend.to_host(Y), block.w
                X = self.transformed_rows(block) if calibrated.needs_scale else None
                calibrated.add(*arrays, None if X is None else self._sigma(X))
        return figures.result() | ({} if calibrated is None else calibrated.result())

    def predicted_tiles(
        self, source: Source | FileRows, start: int = 0, *, std: bool = False, spread: bool = False
    ) -> Iterator[tuple[int, npt.NDArray[Any], npt.NDArray[Any]]]:
        """Yield (position, row numbers (k,), f(X) (k, c) on the host) in the order of reading.

        Begins at position `start`. std, spread : as in `values`
        """
        for position, block in self.align_source(source).numbered_blocks(start):
            for rows in self._tiles(len(block.row_ids)):
                if position + rows.stop > start:
                    part = block.take(rows)
                    yield position + rows.start, part.row_ids, self._host_values(part, std, spread)

    @on_its_backend
    def _host_values(self, block: RowBlock, std: bool, spread: bool) -> npt.NDArray[Any]:
        F = np.array(self.backend.to_host(self._block_values(block, None)[0]))
        if spread:
            return np.concatenate((F, self._sigma(self.transformed_rows(block))), axis=1)
        if not std:
            return F
        assert self.posterior is not None
        deviations = self.posterior.deviations(self.op, self.Z, self.transformed_rows(block))
        slopes = self.targets.slopes(F)
        return np.concatenate((F, self.backend.to_host(deviations) * slopes), axis=1)

    def predict(
        self, source: Source, *, std: bool = False, spread: bool = False
    ) -> npt.NDArray[Any]:
        """Return f(X) of every row of `source`, (n, c), in the order of its original data.

        For a store this is the order of the ingested files; several stores follow each other.
        Raises ConfigError or DataError if the rows do not fit, or if row numbers are missing.
        """
        n, width = source.n_rows, (1 + std + spread) * self.n_outputs
        out, has_value = np.empty((n, width), self.dtype), np.zeros(n, bool)
        for _, rows, F in self.predicted_tiles(source, std=std, spread=spread):
            in_range = rows[rows < n]
            has_value[in_range] = True
            out[in_range] = F[rows < n]
        if not has_value.all():
            raise DataError(
                f"row {int(np.argmin(has_value))} of {n} is not in the data, so its row numbers "
                "are damaged", "ingest the data again",
            )  # fmt: skip
        return out

    def predict_to(
        self, source: Source | FileRows, url: str | os.PathLike[str], *, order: str = "source",
        values: bool = False, proba: bool = False, interval: float | None = None,
        normalised: bool = False, std: bool = False, overwrite: bool = False,
        escape_formulas: bool = False, storage_options: Any = None,
        progress: Progress | None = None,
    ) -> int:  # fmt: skip
        """Write f(x), and labels of classes, of every row of `source`; return the number of rows.

        If a call is killed, the same call resumes it. Values computed so far are kept until the end
        in a folder next to the output, which has the size of the values.

        Parameters
        ----------
        source : rows to predict. If `open_rows` has opened them with their input columns, these are
            written unchanged before the predictions, in ``.csv`` and ``.parquet`` files; there is
            then no column ``row``, and the names of targets begin with ``predicted_``.
        url : path or URL of the output; its ending determines the format. ``.zarr`` or none: a
            group of `values` (n, c) and, for classes, `labels` (n,), whose attribute ``streamkern``
            records their provenance and that they are complete. ``.npy``: labels (n,), or values
            (n, c), or (n,) for one target. ``.csv`` and ``.parquet``: a column ``row``, then the
            label and a score for each class, or the targets by name. Files must be local.
        order : "source": row k belongs to row k of the files or arrays that the data was made from,
            as in `predict`. "store": the order of reading, with the number of each row in `row`.
        values : in ``.npy``, scores of classes and not labels. proba : probabilities, not scores.
        interval : for numeric targets, append the lower ends of intervals with this coverage, and
            then the upper ends: (n, 3 c). normalised : scale them by the residual scale of a row.
        std : for numeric targets, append standard deviations: (n, 2 c); see `Posterior`.
        overwrite : replace predictions that streamkern wrote. CSV and .npy files are never
            replaced, because they carry no mark.
        escape_formulas : in a CSV, write "'" before text that begins with =, +, - or @.

        Raises
        ------
        ConfigError, DataError
            The output exists already, or the rows do not match the training rows.
        OSError
            The output cannot be written, for example because the disk is full.
        """
        aligned = self.align_source(source)
        labels = None if self.classes is None else output_labels(self.classes, self.label_dtype)
        output_format = OutputFormat.from_request(
            self.calibration, self.classes, proba, interval, self.lacking, normalised, self.loss
        )
        if std:
            output_format = output_format.with_std(self.posterior is not None)
        original = source.original_columns if isinstance(source, FileRows) else None
        names, loss = self.target_columns, self.loss
        names = names if loss is None else loss.output_names(names)
        if original is not None and names is not None:  # names that the input may have too
            names = tuple(f"predicted_{name}" for name in names)
        table = PredictionTable(
            aligned.n_rows or 0, self.dtype, self.n_outputs, labels, names,
            record=self._provenance(aligned), input_columns=original,
            escapes_formulas=escape_formulas,
        )  # fmt: skip

        def compute(start: int) -> Iterator[tuple[int, npt.NDArray[Any], npt.NDArray[Any]]]:
            parts = self.predicted_tiles(aligned, start, std=std, spread=normalised)
            return ((position, rows, output_format(F)) for position, rows, F in parts)

        return write_predictions(
            output_format.apply_to(table), compute, url, order=order, values=values or proba,
            overwrite=overwrite, storage_options=storage_options, progress=progress,
        )  # fmt: skip

    def _provenance(self, source: BaseSource | FileRows) -> dict[str, Any]:
        """Return JSON values that describe the model and the rows that it predicts."""
        parts = [source] if isinstance(source, FileRows) else [s.spec for s in stores_in(source)]
        files = [list(file) for part in parts for file in part.files]
        return {
            "model": {**self.origin, "sha256": self.digest()},
            "data": {"fingerprint": source.fingerprint, "files": files},
            "classes": None if self.classes is None else list(self.classes),
        }

    @on_its_backend
    def digest(self) -> str:
        """Return the SHA-256 of everything but centers and device that determines predictions."""
        descriptions = [self.op.kernel.describe(), *map(describe_transform, self.fixed_transforms)]
        descriptions += [] if self.encoder is None else [dict(self.encoder)]
        digest = hashlib.sha256(json.dumps([descriptions, self.op.precision], default=str).encode())
        arrays = [self.backend.to_host(self.weights), *self.targets.arrays().values()]
        arrays += [] if self.calibration is None else self.calibration.arrays().values()
        if self.posterior is not None:  # the basis follows from the model and these
            arrays += [self.posterior.lam, self.posterior.noise, self.posterior.prior]
        for a in arrays:
            digest.update(np.ascontiguousarray(a).tobytes())
        return digest.hexdigest()
