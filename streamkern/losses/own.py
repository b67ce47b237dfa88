"""User-defined losses in settings and in records of runs.

A setting is a `Loss`, a subclass of it, "module:Class", or a table {kind = "module:Class", ...}
with its parameters; the module is imported. A record imports nothing: this process must have
defined the class, see `basics.user_class`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.user_class import import_user_class, subclasses, undefined_class
from streamkern.losses.base import Loss

PACKAGE: Final = "streamkern."
"""Beginning of the names of modules whose losses are built in."""
RESERVED: Final = ("kind", "values")
"""Keys of a description that are not parameters of the loss."""


def is_own(loss: object) -> bool:
    """Return whether an object is a user-defined loss, or its class."""
    loss_class = loss if isinstance(loss, type) else type(loss)
    return issubclass(loss_class, Loss) and not loss_class.__module__.startswith(PACKAGE)


def given_loss(value: object) -> object:
    """Return the `Loss` that a setting names, importing its module; any other value unchanged.

    Raises
    ------
    ConfigError
        There is no such class, its constructor does not accept the parameters, a table does not
        name a class, or the value is an object of a built-in loss.
    """
    if isinstance(value, Mapping):
        kind = value.get("kind")
        if not isinstance(kind, str) or ":" not in kind:
            raise ConfigError(
                f'{mention("model.loss", dict(value))} must have a kind, "module:Class"',
                'give kind = "module:Class" and its parameters, or only the name of a loss',
            )
        parameters = {k: v for k, v in value.items() if k not in RESERVED}
        return _instance(_find_class(kind), parameters)
    if isinstance(value, str) and ":" in value:
        return _instance(_find_class(value), {})
    if isinstance(value, type) and issubclass(value, Loss):
        value = _instance(value, {})
    if isinstance(value, Loss) and not is_own(value):
        raise ConfigError(
            f"{mention('model.loss', value)} is an object of a built-in loss",
            f"give its name, {value.name!r}",
        )
    return value


def _find_class(reference: str) -> type[Loss]:
    """Return the class "module:Class", importing the module unless the class is defined."""
    return defined_class(reference) or import_user_class(reference, Loss, "model.loss")


def _instance(loss_class: type[Loss], parameters: Mapping[str, Any]) -> Loss:
    """Return a loss of the class. Raises ConfigError if its constructor raises an error."""
    try:
        return loss_class(**parameters)
    except Exception as error:  # a user's constructor may raise anything
        names = ", ".join(parameters) if parameters else "no parameters"
        raise ConfigError(
            f"{mention('model.loss', loss_class.name)} cannot be constructed with {names} "
            f"({type(error).__name__}: {error})",
            'give the parameters that it takes, in a table with kind = "module:Class", or give a '
            "loss in Python",
        ) from error


def defined_class(reference: str) -> type[Loss] | None:
    """Return the last class "module:Class" that this process has defined, or None."""
    return next((cls for cls in reversed([*subclasses(Loss)]) if cls.name == reference), None)


# -- as JSON values --------------------------------------------------------------------------------


def loss_name(loss: str | Loss | Mapping[str, Any]) -> str:
    """Return the name of a loss or of its description; "module:Class" if it is user-defined."""
    if isinstance(loss, Mapping):
        return str(loss["kind"])
    return loss if isinstance(loss, str) else loss.name


def described_loss(loss: str | Loss) -> str | dict[str, Any]:
    """Return the loss as in a run file: its name, or a table with its parameters.

    Parameters that have not been estimated yet are left out.
    """
    if isinstance(loss, str):
        return loss
    parameters = {name: value for name, value in loss.parameters().items() if value is not None}
    return {"kind": loss.name, **parameters} if parameters else loss.name


def recorded_loss(loss: str | Loss, n_outputs: int) -> str | dict[str, Any]:
    """Return the description of a loss for a setup's metadata.

    The description of a user-defined loss has some values, by which a changed class is recognised.
    """
    described = described_loss(loss)
    if isinstance(loss, str):
        return described
    table = {"kind": described} if isinstance(described, str) else described
    return table | {"values": _sample_values(loss, n_outputs)}


def recorded_class(record: Mapping[str, Any], n_outputs: int) -> type[Loss]:
    """Return the class of a user-defined loss from the result of `recorded_loss`.

    Raises
    ------
    ConfigError
        This process has not defined the class, or the class has changed.
    """
    name = record["kind"]
    loss_class = _require_class(name)
    loss = _instance(loss_class, {k: v for k, v in record.items() if k not in RESERVED})
    if not np.allclose(_sample_values(loss, n_outputs), record["values"], rtol=1e-4, atol=1e-6):
        raise ConfigError(
            f"the class of {mention('model.loss', name)} has changed since the model was trained: "
            "its values are different",
            "define the class as it was in training",
        )
    return loss_class


def loss_of_run(described: str | Mapping[str, Any]) -> object:
    """Return the loss of the recorded settings of a run. No module is imported.

    Raises
    ------
    ConfigError
        The class is user-defined, and this process has not defined it, or its constructor does not
        accept the recorded parameters.
    """
    name = loss_name(described)
    if ":" not in name:
        return described
    _require_class(name)
    return given_loss(described)


def _require_class(name: str) -> type[Loss]:
    """Return the class of a recorded loss. Raises ConfigError if it is not defined."""
    loss_class = defined_class(name)
    if loss_class is None:
        raise undefined_class("loss", name)
    return loss_class


def _sample_values(loss: Loss, n_outputs: int) -> list[float]:
    """Return the gradients of the loss at a few errors, to 6 digits, after fitting it to them."""
    column = np.array([-20.0, -3.0, -1.0, -0.3, -0.05, 0.0, 0.05, 0.3, 1.0, 3.0, 20.0])
    errors: npt.NDArray[np.float64] = np.repeat(column[:, None], n_outputs, axis=1)
    fitted = loss.fitted(errors.copy(), np.ones(n_outputs))
    gradient = fitted.gradient(np, errors, None)
    return [float(f"{value:.6g}") for value in np.ravel(gradient)]
