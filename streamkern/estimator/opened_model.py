"""Put the fitted model of an estimator on its device, for the duration of a call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from sklearn.utils.validation import check_is_fitted

from streamkern.backend.base import Array, Backend
from streamkern.backend.devices import get_backend
from streamkern.estimator.fitted import FittedModel
from streamkern.estimator.parameters import Parameters, use_parameter_names
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.losses.losses import loss_for_figures
from streamkern.predict.calibration import no_calibration_text
from streamkern.train.model.kernel_model import KernelModel
from streamkern.train.setup.assemble import recorded_accelerator

MAX_SMALL_KERNEL_VALUES = 1 << 17
"""Kernel values that one thread computes in about the time in which threads are started."""
MAX_CACHED_SIZE = 1 << 22
"""Size of `centers_` up to which prepared centers are kept."""


class ModelOpeningMixin(Parameters):
    """Mixin of estimators: the fit, and its model on the device that the parameters name."""

    _fitted_: FittedModel | None = None
    """The fit, which is only replaced as a whole. scikit-learn detects it by the final _."""

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
        """Yield the fitted model on its device.

        n_rows : number of rows of the call, if known. For few rows, most of the time would be spent
            on starting threads and preparing centers. On the CPU a single thread then predicts
            them, with centers that were prepared once. The predictions are bit-identical.
        """
        threads = None if isinstance(self.threads, str) else self.threads
        with use_parameter_names():
            cached = self._cached_centers() if self._is_small(n_rows) else None
            if cached is not None:
                with cached[0].backend.single_threaded_blas():
                    yield self._kernel_model(*cached)
                return
            with get_backend(self.device, threads, self._accelerator) as backend:
                yield self._kernel_model(*self._prepare_centers(backend))

    @property
    def _accelerator(self) -> str:
        """The parameter `accelerator`; for "auto" the accelerator of the training."""
        auto = self.accelerator == "auto"
        return recorded_accelerator(self._state.meta) if auto else self.accelerator

    def _is_small(self, n_rows: int | None) -> bool:
        """Return whether one thread predicts `n_rows` rows, with centers from the cache."""
        p = len(self._state.order)
        size = self._state.attributes["centers_"].size
        # The second bound limits the multiplications of a kernel with many features.
        has_few_values = (
            n_rows is not None
            and n_rows * p <= MAX_SMALL_KERNEL_VALUES
            and n_rows * size <= 8 * MAX_CACHED_SIZE
        )
        return has_few_values and size <= MAX_CACHED_SIZE

    def _cached_centers(self) -> tuple[KernelOperator, Points, Array] | None:
        """Return the result of `_prepare_centers` on one thread, computed once; None on a GPU.

        The cache belongs to the fit, so a new fit has an empty one.
        """
        cache, key = self._state.center_cache, (self.device, self.threads, self.accelerator)
        if key not in cache:
            backend = get_backend(self.device, 1, self._accelerator)  # one thread: no pool to close
            cache[key] = self._prepare_centers(backend) if backend.name == "cpu" else None
        cached: tuple[KernelOperator, Points, Array] | None = cache[key]
        return cached

    def _prepare_centers(self, backend: Backend) -> tuple[KernelOperator, Points, Array]:
        """Return the kernel operator, the prepared centers and the weights, on a device."""
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
        """Return the model of the fit, from the results of `_prepare_centers`."""
        fitted = self._state
        schema = fitted.schema
        return KernelModel(
            op, points, weights, schema.classes, schema.row_shape, fitted.fixed, fitted.targets,
            columns=schema.columns, target_columns=schema.target_columns,
            encoder=schema.encoder, label_dtype=schema.label_dtype,
            weight_column=schema.weight_column, file_form=schema.file_form,
            calibration=fitted.calibration,
            posterior=fitted.posterior, lacking=self._needed_calibration_text,
            loss=loss_for_figures(fitted.meta),
            centers=fitted.centers if fitted.wide else None, wide=fitted.wide,
        )  # fmt: skip

    @property
    def _needed_calibration_text(self) -> str:
        """The text after "needs" in errors for a missing calibration, with the reason."""
        return no_calibration_text(self._state.meta)
