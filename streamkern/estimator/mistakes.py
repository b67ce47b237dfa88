"""Errors for wrong arguments, as users see them."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from streamkern.basics.errors import EXIT_USAGE, StreamkernError

_P = ParamSpec("_P")
_T = TypeVar("_T")
C = TypeVar("C", bound=type)

FOREIGN_PARAMETERS = {
    "gamma": "bandwidth", "length_scale": "bandwidth", "sigma": "bandwidth", "alpha": "ridge",
    "penalty": "ridge", "reg": "ridge", "C": "ridge", "n_components": "n_centers",
    "max_iter": "epochs", "n_epochs": "epochs", "n_jobs": "threads", "seed": "random_state",
    "learning_rate": "step_scale", "intercept": "fit_intercept",
}  # fmt: skip
"""Names of our parameters in other libraries, which may use other units."""

OF_RUNS = ("center_ranks", "min_ranks", "cluster")
"""Settings of `run` for several ranks; an estimator has only `ranks`."""


IN_CALLS = {
    **dict.fromkeys(
        ("eval_set", "validation_data", "valid_sets", "X_val", "X_valid", "eval_data"),
        "give held-out rows as test=(X, y)",
    ),
    **dict.fromkeys(("sample_weights", "weights", "w"), "give sample_weight="),
    "target": "give y=", "targets": "give y=", "label": "give y=", "labels": "give y=",
}  # fmt: skip
"""Names that other libraries give to arguments of `fit` and similar methods -> the remedy."""


def hide_traceback(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a public method so that errors by mistakes of the caller have no inner traceback.

    The message alone is enough. For a wrong keyword the error suggests the intended one.
    """
    names = list(inspect.signature(method).parameters)

    @functools.wraps(method)
    def called(*args: _P.args, **values: _P.kwargs) -> _T:
        wrong = next((name for name in values if name not in names), None)
        if wrong is not None:
            raise TypeError(_no_argument(method.__qualname__, args[:1], wrong, names))
        try:
            return method(*args, **values)
        except StreamkernError as error:
            if error.exit_code != EXIT_USAGE:
                raise
            mistake = error
        raise mistake.with_traceback(None) from None

    return called


def _no_argument(method: str, owner: Any, wrong: str, names: list[str]) -> str:
    """Return the error message for an unknown keyword of a method. owner : (self,), or ()"""
    of_itself = "." in method and hasattr(owner[0], wrong) and not wrong.startswith("_")
    called = f"{type(owner[0]).__name__}.{method.rpartition('.')[2]}" if "." in method else method
    close = difflib.get_close_matches(wrong, [name for name in names if name != "self"])
    hint = IN_CALLS.get(wrong)
    if hint is not None and hint.partition("=")[0].split()[-1] not in names:
        hint = None  # it names an argument that the method lacks
    if hint is None and of_itself:
        hint = f"it is a parameter of {type(owner[0]).__name__}({wrong}=...)"
    if hint is None:
        hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(names[1:])}"
    return f"{called} has no argument {wrong!r}; {hint}"


def suggest_keywords(cls: C) -> C:
    """Return the class with a constructor that suggests a parameter for a wrong keyword."""
    init: Any = cls.__init__  # type: ignore[misc]  # on the class, not on an object
    names = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **values: Any) -> None:
        for name in values:
            if name not in names:
                raise TypeError(f"{type(self).__name__} has no parameter {name!r}; {_meant(name)}")
        init(self, *args, **values)

    def _meant(name: str) -> str:
        if name in OF_RUNS:
            return f"it is a setting of runs: run.{name} in streamkern.train_model"
        close = (
            [FOREIGN_PARAMETERS[name]]
            if name in FOREIGN_PARAMETERS
            else difflib.get_close_matches(name, names)
        )
        return f"did you mean {close[0]!r}?" if close else f"help({cls.__name__}) lists them"

    cls.__init__ = checked  # type: ignore[misc]
    return cls
