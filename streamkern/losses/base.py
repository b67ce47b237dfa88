"""The base class of a loss.

A loss l(z, y) is a convex function of the outputs z of a row. A solver minimises the mean of l over
rows; it needs no more of l than

    gradient    dl/dz
    curvature   L, so that the Hessian of l in z is at most L

By the second, l is at most a square with another target:

    l(z', y) <= const + L / 2 |z' - (z - dl/dz / L)|^2,    with equality at z' = z.

So a step that is right for squares, with the residual dl/dz / L in place of z - y, does not raise
the mean loss of a full batch either (majorisation).

Every loss here has a gradient that is a function of the error e of the prediction, e = predict(z) -
y, and of the target, so that one pass over the errors serves the step and the training log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt


class Loss:
    """A loss of outputs z (m, c) for targets Y (m, c), arrays of the module `xp`.

    A subclass has `gradient` and `values`, and changes what else differs from the defaults. Its
    parameters are attributes, each with the name of the constructor's argument. Open parameters,
    which are found from the data, are None before `fitted`. To write your own::

        class LogCosh(streamkern.Loss):
            def gradient(self, xp, errors, Y):
                return xp.tanh(errors, out=errors)

            def values(self, xp, F, Y):
                size = xp.abs(F.astype("float64") - Y)
                return (size + xp.log1p(xp.exp(-2 * size)) - np.log(2)).sum(axis=1)

    It is checked before a run (`checks.check_own_loss`).
    """

    name: ClassVar[str]
    """The value of model.loss; "module:Class" unless a class has a name of its own."""
    figure: ClassVar[str] = "loss"
    """The name of the mean loss in evaluations."""
    for_classes: ClassVar[bool] = False
    """Whether the targets are one-hot rows of classes, rather than values."""
    identity_link: ClassVar[bool] = True
    """Whether z is the prediction, so that targets are scaled as for squares."""
    log_link: ClassVar[bool] = False
    """Whether the prediction is exp(z), and the loss a `LogLink`."""
    shift_invariant: ClassVar[bool] = False
    """Whether an equal change of all outputs of a row leaves the loss as it is."""
    robust: ClassVar[bool] = False
    """Whether a row's gradient is bounded, and outliers shall not rule the choice of the kernel."""
    takes_quantile: ClassVar[bool] = False
    """Whether it is made with model.quantile."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Name a class that has no name of its own by its module."""
        super().__init_subclass__(**options)
        if "name" not in vars(cls):
            cls.name = f"{cls.__module__}:{cls.__qualname__}"

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.parameters().items())
        return f"{type(self).__name__}({shown})"

    @property
    def quantiles(self) -> Sequence[float] | None:
        """The quantiles that predictions are, one or one an output; None if they are none."""
        return None

    @property
    def levels(self) -> Sequence[float] | None:
        """The quantiles of the outputs if a single target has several of them; else None."""
        return None

    @property
    def curvature(self) -> Any:
        """The bound L of the Hessian in z: a number, or (c,) float64 by output."""
        return 1.0

    def at(self, rows_per_center: float) -> Loss:
        """Return the loss to minimise after so many rows per center; others come earlier."""
        return self

    def fitted(self, errors: npt.NDArray[np.float64], scale: npt.NDArray[np.float64]) -> Self:
        """Return the loss with its open parameters.

        errors : (n, c), predictions less targets of rows that a fit by squares has not seen
        scale : (c,), the scale of the targets
        """
        return self

    def parameters(self) -> dict[str, Any]:
        """Return the parameters as JSON values, with which the class makes an equal loss."""
        return dict(vars(self))

    def predict(self, xp: Any, z: Any) -> Any:
        """Return the prediction in the unit of the targets (m, c), in place of z."""
        return z

    def output_names(self, names: Sequence[Any] | None) -> tuple[Any, ...] | None:
        """Return the names of the outputs, given those of the targets; None without names."""
        return None if names is None else tuple(names)

    def ordered(self, xp: Any, F: Any) -> Any:
        """Return predictions (m, c) that do not contradict each other, in place of F."""
        return F

    def output(self, means: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the z whose prediction is the means of the targets, (c,)."""
        return means

    def gradient(self, xp: Any, errors: Any, Y: Any) -> Any:
        """Return dl/dz (m, c), in place of the errors. Y is None for an identity link."""
        raise NotImplementedError

    def curvatures(self, xp: Any, errors: Any, Y: Any) -> Any:
        """Return curvatures (m, c) over L, in [0, 1], that a Newton step takes at the errors.

        Their diagonal is at least the Hessian at z. The default, 1, is that of the bound.
        """
        return xp.ones_like(errors)

    def values(self, xp: Any, F: Any, Y: Any) -> Any:
        """Return the losses of the rows, (m,) float64: the sum over outputs.

        F : (m, c), predictions; for classes the outputs
        """
        raise NotImplementedError
