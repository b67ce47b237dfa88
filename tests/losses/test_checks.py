"""Check that valid user losses pass, and that each invalid one is refused with one sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import streamkern
from streamkern.basics.errors import ConfigError
from streamkern.losses.base import Loss
from streamkern.losses.checks import check_user_loss
from streamkern.losses.errors import Expectile, Huber
from tests.losses.own_losses import Distance, LogCosh, Renamed


class Squares(Loss):
    """e^2 / 2; the invalid losses change one of its members."""

    def gradient(self, xp: Any, errors: Any, Y: Any) -> Any:
        return errors

    def values(self, xp: Any, F: Any, Y: Any) -> Any:
        e = F.astype(np.float64) - Y
        return (e * e).sum(axis=1) / 2


@pytest.mark.parametrize("n_outputs", [1, 2, 30])
@pytest.mark.parametrize(
    "loss", [Squares(), LogCosh(), Distance(), Huber(), Expectile(0.9)], ids=repr
)
def test_valid_losses_pass_check(loss: Loss, n_outputs: int) -> None:
    for spread in (1e-4, 1.0, 1e5):
        check_user_loss(loss, n_outputs, spread)


@pytest.mark.parametrize("width", [1e-3, 1e3])
def test_losses_with_rounding_errors_pass_check(width: float) -> None:
    """Check small errors of a wide loss, whose values are mostly rounding errors."""
    for spread in (1e-3, 1.0, 1e3):
        check_user_loss(LogCosh(width), 1, spread)


def loss_with(base: type[Loss] = Squares, **members: Any) -> Loss:
    """Return a loss of a class with other members."""
    loss: Loss = type("Wrong", (base,), members)()
    return loss


def raise_error(self: Any, *arguments: Any) -> Any:
    raise ZeroDivisionError("of mine")


def with_attribute(name: str, value: Any) -> Loss:
    """Return a loss with another attribute, which is taken for a parameter."""

    def init(self: Any) -> None:
        setattr(self, name, value)

    return loss_with(__init__=init)


INVALID: dict[str, tuple[Loss, str]] = {
    "no gradient": (loss_with(Loss, values=Squares.values), "its class has no gradient"),
    "no values": (loss_with(Loss, gradient=Squares.gradient), "its class has no values"),
    "classes": (loss_with(for_classes=True), "must be its predictions, which are values"),
    "link": (loss_with(predict=lambda self, xp, z: xp.exp(z)), "must be its predictions"),
    "figure": (loss_with(figure="mse"), "figure 'mse' must be an identifier that no other"),
    "raises": (loss_with(gradient=raise_error), "gradient raises ZeroDivisionError: of mine"),
    "needs Y": (
        loss_with(gradient=lambda self, xp, errors, Y: errors / Y),
        "gradient raises TypeError",
    ),
    "fitted": (loss_with(fitted=lambda self, errors, scale: None), "fitted must return a loss"),
    "shape": (
        loss_with(gradient=lambda self, xp, errors, Y: errors.sum(axis=1)),
        r"gradient returns shape \(\d+,\) and dtype float64 for errors of shape \(\d+, 2\)",
    ),
    "dtype": (
        loss_with(gradient=lambda self, xp, errors, Y: np.float64(1) * errors),
        r"dtype float64 for errors of shape \(\d+, 2\) and dtype float32",
    ),
    "overflow": (
        loss_with(gradient=lambda self, xp, errors, Y: xp.sinh(errors) / xp.cosh(errors)),
        r"gradient is not finite at an error of 7\d\d in float64",
    ),
    "overflow of values": (
        loss_with(LogCosh, values=lambda self, xp, F, Y:
                xp.log(xp.cosh(F.astype(np.float64) - Y)).sum(axis=1)),
        r"values is not finite at an error of 7\d\d",
    ),
    "float32": (
        loss_with(gradient=lambda self, xp, errors, Y: (errors + 1e6) - 1e6),
        "gradient differs between float32 and float64",
    ),
    "sign": (loss_with(gradient=lambda self, xp, errors, Y: -errors), "it has no minimum"),
    "linear": (
        loss_with(gradient=lambda self, xp, errors, Y: xp.ones_like(errors)),
        "it has no minimum, as gradient is 1 at an error of -1e.03 and 1 at 1e.03",
    ),
    "not convex": (
        loss_with(gradient=lambda self, xp, errors, Y: errors / (1 + errors * errors)),
        "it is not convex, as gradient falls from an error of",
    ),
    "curvature": (
        loss_with(gradient=lambda self, xp, errors, Y: 1.01 * errors),
        r"curvature=1 is not a bound, as gradient has the slope 1\.01",
    ),
    "steep at zero": (
        loss_with(gradient=lambda self, xp, errors, Y: xp.clip(500 * errors, -0.5, 0.5)),
        "curvature=1 is not a bound",
    ),
    "curvatures of rows": (
        loss_with(curvatures=lambda self, xp, errors, Y: xp.ones(len(errors), errors.dtype)),
        r"curvatures returns shape \(\d+,\)",
    ),
    "curvatures above 1": (
        loss_with(curvatures=lambda self, xp, errors, Y: 50 * xp.ones_like(errors)),
        "curvatures are between 50 and 50",
    ),
    "curvatures of NaN": (
        loss_with(curvatures=lambda self, xp, errors, Y: xp.nan * errors), "curvatures are between",
    ),
    "curvatures in place": (
        loss_with(curvatures=lambda self, xp, errors, Y: xp.divide(errors, errors, out=errors)),
        "or changes the errors",
    ),
    "curvature of 0": (
        loss_with(curvature=0.0),
        "curvature is 0.0; return a finite number above 0",
    ),
    "curvature of text": (loss_with(curvature="one"), "curvature is 'one'; return a finite number"),
    "values of rows and outputs": (
        loss_with(values=lambda self, xp, F, Y: np.square(F - Y, dtype=np.float64) / 2),
        r"values returns shape \(\d+, 2\)",
    ),
    "values of float32": (
        loss_with(values=lambda self, xp, F, Y: np.square(F - Y).sum(axis=1) / 2),
        "and dtype float32 for",
    ),
    "values in place": (
        loss_with(values=lambda self, xp, F, Y: np.square(np.subtract(F, Y, out=F),
                                                       dtype=np.float64).sum(axis=1) / 2),
        "values changes its arguments",
    ),
    "another loss": (
        loss_with(values=lambda self, xp, F, Y: np.square(F - Y, dtype=np.float64).sum(axis=1)),
        "where differences of values give",
    ),
    "values that jump": (
        loss_with(values=lambda self, xp, F, Y:
                (np.abs(F.astype(np.float64) - Y) > 1).sum(axis=1).astype(np.float64)),
        "where differences of values give",
    ),
    "values without the end": (
        loss_with(values=lambda self, xp, F, Y: np.minimum(
            np.square(F - Y, dtype=np.float64) / 2, 5e3).sum(axis=1)),
        "where differences of values give 0",
    ),
    "values of the target": (
        loss_with(values=lambda self, xp, F, Y:
                np.square((F - Y) * (1 + 0.1 * Y * Y), dtype=np.float64).sum(axis=1) / 2),
        "where differences of values give",
    ),
    "parameters": (with_attribute("table", {1: 2}), "must be finite JSON values"),
    "parameter of NumPy": (with_attribute("weights", np.ones(2)), "must be finite JSON values"),
    "parameter of infinity": (with_attribute("end", np.inf), "must be finite JSON values"),
    "reserved": (with_attribute("kind", "steep"), "none may be called kind"),
    "not an argument": (with_attribute("extra", 1), "must make an equal loss from its parameters"),
    "another name": (Renamed(2.0), "must make an equal loss from its parameters"),
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID)
def test_each_broken_rule_is_reported(case: str) -> None:
    loss, message = INVALID[case]
    with pytest.raises(ConfigError, match=message) as raised:
        check_user_loss(loss, 2)
    assert "\n" not in str(raised.value)


def test_check_does_not_modify_loss() -> None:
    loss = Distance()
    check_user_loss(loss, 1)
    assert loss.unit is None
    assert streamkern.Loss is Loss
