"""The fitted model of an estimator on its device, for the time of a call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from sklearn.utils.validation import check_is_fitted

from streamkern.backend.base import Array, Backend
from streamkern.backend.devices import get_backend
from streamkern.estimator.fitted import FittedModel
from streamkern.estimator.parameters import Parameters, own_names
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.losses.losses import loss_for_figures
from streamkern.predict.calibration import no_calibration_text
from streamkern.train.model.kernel_model import KernelModel
from streamkern.train.setup.assemble import accelerator_of

FEW_VALUES, FEW_NUMBERS = 1 << 17, 1 << 22
"""Kernel values that one thread computes in about the time of starting others; and the numbers of
the centers that are kept prepared for such calls."""


class OpeningModel(Parameters):
    """The present fit of an estimator, and its model on the device of the parameters."""

    _fitted_: FittedModel | None = None
    """The fit, always replaced as a unit. Its name ends in _ so that scikit-learn detects a fit."""

    @property
    def _state(self) -> FittedModel:
        """The fit; NotFittedError if there is none."""
        fitted = self._fitted_
        if fitted is None:
            check_is_fitted(self)
        assert fitted is not None
        return fitted

    @contextlib.contextmanager
    def _model(self, n_rows: int | None = None) -> Iterator[KernelModel]:
        """Yield the fitted model on its device, for the time of a call.

        n_rows : of the call, if known. With few rows most of the time would go to threads that are
            started and centers that are prepared: on the CPU one thread computes then, with
            centers that were prepared once. The answers are the same to the last bit.
        """
        threads = None if isinstance(self.threads, str) else self.threads
        with own_names():
            kept = self._kept() if self._is_small(n_rows) else None
            if kept is not None:
                with kept[0].backend.single_threaded_blas():
                    yield self._kernel_model(*kept)
                return
            with get_backend(self.device, threads, self._accelerator) as backend:
                yield self._kernel_model(*self._prepared(backend))

    @property
    def _accelerator(self) -> str:
        auto = self.accelerator == "auto"
        return accelerator_of(self._state.meta) if auto else self.accelerator

    def _is_small(self, n_rows: int | None) -> bool:
        """Return whether one thread predicts so many rows in about the time of starting others."""
        p = len(self._state.order)
        size = self._state.attributes["centers_"].size
        few = n_rows is not None and n_rows * p <= FEW_VALUES and n_rows * size <= 8 * FEW_NUMBERS
        return few and size <= FEW_NUMBERS

    def _kept(self) -> tuple[KernelOperator, Points, Array] | None:
        """Return the prepared centers on one thread of the CPU; None on a GPU."""
        prepared, key = self._state.prepared, (self.device, self.threads, self.accelerator)
        if key not in prepared:
            backend = get_backend(self.device, 1, self._accelerator)  # it has nothing to close
            prepared[key] = self._prepared(backend) if backend.name == "cpu" else None
        kept: tuple[KernelOperator, Points, Array] | None = prepared[key]
        return kept

    def _prepared(self, backend: Backend) -> tuple[KernelOperator, Points, Array]:
        """Return the kernel, and the centers and weights as it takes them, on a device."""
        fitted = self._state
        attributes = fitted.attributes
        op = KernelOperator(
            attributes["kernel_"], backend, fitted.precision, fitted.shift, fitted.grid
        )
        with backend.active():
            points = op.points(backend.asarray(fitted.centers), right=True)
        alpha = attributes["dual_coef_"][fitted.order] / fitted.targets.scale
        return op, points, backend.asarray(alpha, op.dtype)

    def _kernel_model(self, op: KernelOperator, points: Points, weights: Array) -> KernelModel:
        fitted = self._state
        schema = fitted.schema
        return KernelModel(
            op, points, weights, schema.classes, schema.row_shape, fitted.fixed, fitted.targets,
            columns=schema.columns, target_columns=schema.target_columns,
            encoder=schema.encoder, label_dtype=schema.label_dtype,
            weight_column=schema.weight_column, file_form=schema.file_form,
            calibration=fitted.calibration,
            posterior=fitted.posterior, lacking=self._lacking,
            loss=loss_for_figures(fitted.meta),
            centers=fitted.centers if fitted.wide else None, wide=fitted.wide,
        )  # fmt: skip

    @property
    def _lacking(self) -> str:
        """Requirement of probabilities and intervals that the model lacks, with the reason."""
        return no_calibration_text(self._state.meta)
