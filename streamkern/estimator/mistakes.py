"""Suggest keywords in errors about unknown ones, and hide inner tracebacks of wrong usage."""

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
"""Name of a parameter in other libraries -> the parameter of streamkern; units may differ."""

RUN_ONLY_SETTINGS = ("center_ranks", "min_ranks", "cluster")
"""Settings in [run] for several ranks that are no parameters of an estimator."""

FOREIGN_ARGUMENTS = {
    **dict.fromkeys(
        ("eval_set", "validation_data", "valid_sets", "X_val", "X_valid", "eval_data"),
        "give held-out rows as test=(X, y)",
    ),
    **dict.fromkeys(("sample_weights", "weights", "w"), "give sample_weight="),
    "target": "give y=", "targets": "give y=", "label": "give y=", "labels": "give y=",
}  # fmt: skip
"""Names of arguments of `fit` and similar methods in other libraries -> the remedy."""


def hide_traceback(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a public function or method: errors for wrong usage have no inner traceback.

    The message of such an error is sufficient. For an unknown keyword, a TypeError suggests one
    that exists.
    """
    names = list(inspect.signature(method).parameters)

    @functools.wraps(method)
    def call(*args: _P.args, **values: _P.kwargs) -> _T:
        unknown = next((name for name in values if name not in names), None)
        if unknown is not None:
            raise TypeError(_unknown_keyword_text(method.__qualname__, args[:1], unknown, names))
        try:
            return method(*args, **values)
        except StreamkernError as error:
            if error.exit_code != EXIT_USAGE:
                raise
            mistake = error
        raise mistake.with_traceback(None) from None

    return call


def _unknown_keyword_text(method: str, owner: Any, keyword: str, names: list[str]) -> str:
    """Return the error message for an unknown keyword of a function or method.

    method : its qualified name
    owner : (self,) of a method
    keyword : the unknown keyword
    names : names of the arguments that the function or method has
    """
    is_method = "." in method
    caller = f"{type(owner[0]).__name__}.{method.rpartition('.')[2]}" if is_method else method
    similar = difflib.get_close_matches(keyword, [name for name in names if name != "self"])
    hint = FOREIGN_ARGUMENTS.get(keyword)
    if hint is not None and hint.partition("=")[0].split()[-1] not in names:
        hint = None  # the method lacks the argument that the hint names
    if hint is None and is_method and hasattr(owner[0], keyword) and not keyword.startswith("_"):
        hint = f"it is a parameter of {type(owner[0]).__name__}({keyword}=...)"
    if hint is None:
        hint = f"did you mean {similar[0]!r}?" if similar else f"it has {', '.join(names[1:])}"
    return f"{caller} has no argument {keyword!r}; {hint}"


def suggest_keywords(cls: C) -> C:
    """Decorate a class so that its constructor suggests a parameter for a wrong keyword."""
    init: Any = cls.__init__  # type: ignore[misc]  # on the class, not on an object
    names = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def constructor(self: Any, *args: Any, **values: Any) -> None:
        for name in values:
            if name not in names:
                class_name = type(self).__name__
                raise TypeError(f"{class_name} has no parameter {name!r}; {suggest(name)}")
        init(self, *args, **values)

    def suggest(name: str) -> str:
        """Return the hint for an unknown keyword."""
        if name in RUN_ONLY_SETTINGS:
            return f"it is a setting of runs: run.{name} in streamkern.train_model"
        if name in FOREIGN_PARAMETERS:
            return f"did you mean {FOREIGN_PARAMETERS[name]!r}?"
        if similar := difflib.get_close_matches(name, names):
            return f"did you mean {similar[0]!r}?"
        return f"help({cls.__name__}) lists the parameters"

    cls.__init__ = constructor  # type: ignore[misc]
    return cls
