"""The base class of a loss.

A loss l(z, y) is a convex function of the outputs z of a row. A solver minimises the mean of l over
rows. It uses two properties of l:

    gradient    dl/dz
    curvature   L, an upper bound of the Hessian of l with respect to z

With them, l is majorised by a squared error with another target:

    l(z', y) <= const + L / 2 |z' - (z - dl/dz / L)|^2,    with equality at z' = z.

A step on a full batch that is computed for the mean squared error, with the residual dl/dz / L in
place of z - y, therefore does not raise the mean of l.

The gradient of every loss here is a function of the target y and of the error of the prediction,
e = predict(z) - y. A step and the training log therefore use the same errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt


class Loss:
    """A loss of outputs z (m, c) for targets Y (m, c), arrays of the module `xp`.

    A subclass defines `gradient` and `values`, and overrides other members as needed. Its
    parameters are attributes with the names of the constructor's arguments. A parameter that
    is estimated from the data, as by `fitted`, is None before. To write your own::

        class LogCosh(streamkern.Loss):
            def gradient(self, xp, errors, Y):
                return xp.tanh(errors, out=errors)

            def values(self, xp, F, Y):
                size = xp.abs(F.astype("float64") - Y)
                return (size + xp.log1p(xp.exp(-2 * size)) - np.log(2)).sum(axis=1)

    `checks.check_user_loss` checks it before a run.
    """

    name: ClassVar[str]
    """The name in `model.loss`; "module:Class" unless the class sets it."""
    figure: ClassVar[str] = "loss"
    """The name of the mean loss in evaluations and logs."""
    for_classes: ClassVar[bool] = False
    """Whether the targets are one-hot rows of classes instead of values."""
    identity_link: ClassVar[bool] = True
    """Whether z is the prediction, so that targets are scaled as for the squared error."""
    log_link: ClassVar[bool] = False
    """Whether the prediction is exp(z), and the loss a `LogLink`."""
    shift_invariant: ClassVar[bool] = False
    """Whether adding the same number to all outputs of a row does not change the loss."""
    robust: ClassVar[bool] = False
    """Whether the gradient is bounded. The choice of the kernel then limits outliers as well."""
    takes_quantile: ClassVar[bool] = False
    """Whether the constructor takes `model.quantile`."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Name a class "module:Class" unless it sets its name."""
        super().__init_subclass__(**options)
        if "name" not in vars(cls):
            cls.name = f"{cls.__module__}:{cls.__qualname__}"

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.parameters().items())
        return f"{type(self).__name__}({arguments})"

    @property
    def quantiles(self) -> Sequence[float] | None:
        """The quantiles that the outputs estimate, one for all or one each; None if none."""
        return None

    @property
    def levels(self) -> Sequence[float] | None:
        """The quantiles of the outputs if all outputs are for one target; else None."""
        return None

    @property
    def curvature(self) -> Any:
        """The bound L of the Hessian: a number, or (c,) float64 with one for each output."""
        return 1.0

    def at(self, rows_per_center: float) -> Loss:
        """Return the loss to minimise after this number of rows per center.

        A loss may change in the course of a run, for example from a smooth one to a sharper one.
        """
        return self

    def fitted(self, errors: npt.NDArray[np.float64], scale: npt.NDArray[np.float64]) -> Self:
        """Return the loss with the parameters that are estimated from the data.

        errors : (n, c) predictions minus targets of a least-squares model on held-out rows.
        scale : (c,) scale of the targets.
        """
        return self

    def parameters(self) -> dict[str, Any]:
        """Return the constructor's arguments as JSON values."""
        return dict(vars(self))

    def predict(self, xp: Any, z: Any) -> Any:
        """Return the predictions (m, c) for outputs z (m, c), which may be overwritten.

        They are in the units of the targets.
        """
        return z

    def output_names(self, names: Sequence[Any] | None) -> tuple[Any, ...] | None:
        """Return the names of the outputs, given the names of the targets; None without names."""
        return None if names is None else tuple(names)

    def ordered(self, xp: Any, F: Any) -> Any:
        """Return the predictions F (m, c), in place; several quantiles of a row are sorted."""
        return F

    def output(self, means: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the outputs z (c,) whose predictions are the means (c,) of the targets."""
        return means

    def gradient(self, xp: Any, errors: Any, Y: Any) -> Any:
        """Return dl/dz (m, c), which may overwrite the errors (m, c).

        With an identity link the result must not depend on Y otherwise, and Y may be None.
        """
        raise NotImplementedError

    def curvatures(self, xp: Any, errors: Any, Y: Any) -> Any:
        """Return second derivatives divided by L, (m, c) in [0, 1], for Newton steps.

        A diagonal matrix of them, times L, is at least the Hessian at z. The default is 1. The
        errors (m, c) are not changed.
        """
        return xp.ones_like(errors)

    def values(self, xp: Any, F: Any, Y: Any) -> Any:
        """Return the losses of the rows, summed over outputs: (m,) float64.

        F : (m, c) predictions, or for classes the outputs z.
        Y : (m, c) targets. Neither is changed.
        """
        raise NotImplementedError
