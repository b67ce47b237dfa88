"""User-defined losses: given as a setting, and found again for a saved model.

A setting is a loss, a class of one, "module:Class", or a table {kind = "module:Class", ...} with
its parameters. Of a saved model, the class must be defined already, see `basics.own_class`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.own_class import imported_class, subclasses, undefined_class
from streamkern.losses.base import Loss

PACKAGE: Final = "streamkern."
RESERVED: Final = ("kind", "values")
"""Keys of a description that are not parameters."""


def is_own(loss: object) -> bool:
    """Return whether an object is a user-defined loss, or the class of one."""
    kind = loss if isinstance(loss, type) else type(loss)
    return issubclass(kind, Loss) and not kind.__module__.startswith(PACKAGE)


def given_loss(value: object) -> object:
    """Return the loss of a setting, with its module imported; names of built-in ones as they are.

    Raises
    ------
    ConfigError
        There is no such class, or it cannot be made with these parameters.
    """
    if isinstance(value, Mapping):
        kind = value.get("kind")
        if not isinstance(kind, str) or ":" not in kind:
            raise ConfigError(
                f"{mention('model.loss', dict(value))} names no class of a loss",
                'give kind = "module:Class" and its parameters, or the name of a loss alone',
            )
        parameters = {k: v for k, v in value.items() if k not in RESERVED}
        return _made(_imported(kind), parameters)
    if isinstance(value, str) and ":" in value:
        return _made(_imported(value), {})
    if isinstance(value, type) and issubclass(value, Loss):
        value = _made(value, {})
    if isinstance(value, Loss) and not is_own(value):
        raise ConfigError(
            f"{mention('model.loss', value)} is a loss of streamkern's",
            f"give its name, {value.name!r}",
        )
    return value


def _imported(reference: str) -> type[Loss]:
    """Return the class of a reference, whose module is imported unless the class is defined."""
    return defined_class(reference) or imported_class(reference, Loss, "model.loss")


def _made(kind: type[Loss], parameters: Mapping[str, Any]) -> Loss:
    """Return a loss of the class, or raise ConfigError with what its constructor says."""
    try:
        return kind(**parameters)
    except Exception as error:  # whatever a constructor of the user raises
        given = ", ".join(parameters) if parameters else "no parameters"
        raise ConfigError(
            f"{mention('model.loss', kind.name)} cannot be made with {given} "
            f"({type(error).__name__}: {error})",
            'give the parameters that it takes, in a table with kind = "module:Class", or give a '
            "loss in Python",
        ) from error


def defined_class(reference: str) -> type[Loss] | None:
    """Return the class of this name that the process has defined last, or None."""
    return next((kind for kind in reversed([*subclasses(Loss)]) if kind.name == reference), None)


# -- as JSON values --------------------------------------------------------------------------------


def loss_name(loss: str | Loss | Mapping[str, Any]) -> str:
    """Return the name of a loss, or of a description of one: one of ours, or "module:Class"."""
    if isinstance(loss, Mapping):
        return str(loss["kind"])
    return loss if isinstance(loss, str) else loss.name


def described_loss(loss: str | Loss) -> str | dict[str, Any]:
    """Return the loss as in a run file: its name, or a table with parameters that are not open."""
    if isinstance(loss, str):
        return loss
    given = {name: value for name, value in loss.parameters().items() if value is not None}
    return {"kind": loss.name, **given} if given else loss.name


def recorded_loss(loss: str | Loss, n_outputs: int) -> str | dict[str, Any]:
    """Return the loss as a setup records it; its own one with values by which it is recognised."""
    described = described_loss(loss)
    if isinstance(loss, str):
        return described
    table = {"kind": described} if isinstance(described, str) else described
    return table | {"values": _sample_values(loss, n_outputs)}


def recorded_class(recorded: Mapping[str, Any], n_outputs: int) -> type[Loss]:
    """Return the class of a loss that `recorded_loss` described.

    Raises
    ------
    ConfigError
        The process has not defined it, or it has other values now.
    """
    name = recorded["kind"]
    kind = _known_class(name)
    loss = _made(kind, {k: v for k, v in recorded.items() if k not in RESERVED})
    if not np.allclose(_sample_values(loss, n_outputs), recorded["values"], rtol=1e-4, atol=1e-6):
        raise ConfigError(
            f"{mention('model.loss', name)} has other values than the class of this name with "
            "which the model was trained",
            "define the class as it was then",
        )
    return kind


def loss_of_run(described: str | Mapping[str, Any]) -> object:
    """Return the loss of the recorded settings of a run, for which no module is imported.

    Raises ConfigError if its class is user-defined, and this process has not defined it.
    """
    name = loss_name(described)
    if ":" not in name:
        return described
    _known_class(name)
    return given_loss(described)


def _known_class(name: str) -> type[Loss]:
    """Return the class of a recorded loss, or raise ConfigError."""
    kind = defined_class(name)
    if kind is None:
        raise undefined_class("loss", name)
    return kind


def _sample_values(loss: Loss, n_outputs: int) -> list[float]:
    """Return gradients at a few errors, to 6 digits, of the loss fitted to these errors."""
    column = np.array([-20.0, -3.0, -1.0, -0.3, -0.05, 0.0, 0.05, 0.3, 1.0, 3.0, 20.0])
    errors: npt.NDArray[np.float64] = np.repeat(column[:, None], n_outputs, axis=1)
    fitted = loss.fitted(errors.copy(), np.ones(n_outputs))
    gradient = fitted.gradient(np, errors, None)
    return [float(f"{value:.6g}") for value in np.ravel(gradient)]
