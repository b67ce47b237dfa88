"""Targets that a loss cannot have, and mistakes in a user-defined loss.

The latter are in how it is given, what its class has, and what it computes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import streamkern as sk
from streamkern.losses.checks import check_user_loss
from streamkern.losses.errors import Huber
from streamkern.losses.losses import saved_loss
from streamkern.losses.own import given_loss, recorded_loss
from tests.losses.own_losses import LogCosh
from tests.remedies import Case, X, Y, fit_values, regressor

COVERED = ("losses",)
PLACE = "tests.losses.own_losses"


class Halves(sk.Loss):
    """e^2 / 2, of the values e^2 or other curvatures in wrong ones."""

    def __init__(self, twice: bool = False, curved: float = 0.0) -> None:
        self.twice, self.curved = twice, curved

    def curvatures(self, xp: Any, errors: Any, Y: Any) -> Any:
        """Return ones, or wrong ones: in place, or too large."""
        if self.curved == 1:
            errors[...] = 1
            return errors
        return max(self.curved, 1) * xp.ones_like(errors)

    def gradient(self, xp: Any, errors: Any, Y: Any) -> Any:
        """Return the errors."""
        return errors

    def values(self, xp: Any, F: Any, Y: Any) -> Any:
        """Return the losses of the rows."""
        e = F.astype(np.float64) - Y
        return (e * e).sum(axis=1) / (1 if self.twice else 2)


def saved(**changes: Any) -> dict[str, Any]:
    """Return the metadata of a setup with a loss, some entries of which are changed."""
    recorded = recorded_loss(LogCosh(2.0), 1)
    assert isinstance(recorded, dict)
    return {"loss": recorded | changes, "n_outputs": 1, "setup": {"loss": {"width": 2.0}}}


def loss_cases() -> list[Case]:
    """Return mistakes in targets and in a user's own loss."""
    kind = f"{PLACE}:LogCosh"
    return [
        ('give kind = "module:Class" and its parameters, or only the name of a loss',
               fit_values(X, Y, loss={"kind": "huber"}),
               lambda: (regressor(loss={"kind": kind, "width": 2.0}).fit(X, Y),
                        regressor(loss="huber").fit(X, Y))),
        ("is an object of a built-in loss; give its name, 'huber'", lambda: given_loss(Huber()),
         lambda: given_loss("huber")),
        ("cannot be imported .ModuleNotFoundError.*correct it, or add its folder to PYTHONP",
         lambda: given_loss("losses_of_nobody:LogCosh"), lambda: given_loss(kind)),
        ('is not a subclass of streamkern.Loss; give the "module:Class" of a subclass',
         lambda: given_loss(f"{PLACE}:NOT_A_LOSS"), lambda: given_loss(kind)),
        ('in a table with kind = "module:Class", or give a loss in Python',
         lambda: given_loss(f"{PLACE}:NeedsWidth"),
         lambda: given_loss({"kind": f"{PLACE}:NeedsWidth", "width": 2.0})),
        ("that this process has not defined; import its module first, or define the class",
         lambda: saved_loss(saved(kind="losses_of_nobody:LogCosh")), lambda: saved_loss(saved())),
        ("since the model was trained: .*; define the class as it was in training",
         lambda: saved_loss(saved(width=3.0)), lambda: saved_loss(saved())),
        ("return as gradient the derivative of values with respect to the prediction",
         lambda: check_user_loss(Halves(True), 1), lambda: check_user_loss(Halves(), 1)),
        ("return a new array like the errors, or do not define curvatures",
         lambda: check_user_loss(Halves(curved=1.0), 1), lambda: check_user_loss(Halves(), 1)),
        ("which are from 0 to 1, or do not define curvatures",
         lambda: check_user_loss(Halves(curved=9.0), 1), lambda: check_user_loss(Halves(), 1)),
        ("needs targets of at least 0 .*correct the targets, or use loss='squared_error'",
               fit_values(X, -np.square(Y), loss="poisson"),
               lambda: (regressor(loss="poisson").fit(X, np.square(Y)),
                        regressor(loss="squared_error").fit(X, -np.square(Y)))),
    ]  # fmt: skip


TABLES = (loss_cases,)
