"""Suggest keywords in errors about unknown ones, shorten errors of scikit-learn, and hide inner
tracebacks of wrong usage."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import numpy as np

from streamkern.basics.errors import EXIT_USAGE, DataError, RowShapeError, StreamkernError
from streamkern.ingest.numeric import is_sparse

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
    """Decorate a class so that its TypeError for a wrong keyword suggests a parameter."""
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


@contextlib.contextmanager
def shorten_errors(values: Any, name: str, *, encodable: bool = False) -> Iterator[None]:
    """Convert ValueErrors of scikit-learn, which may have several lines, to DataErrors of one line.

    Its error for another number of features becomes a RowShapeError.

    values, name : the argument that is checked in the block, and its name
    encodable : whether a data frame with the same values, and with names, would be encoded
    """
    try:
        yield
    except StreamkernError:
        raise
    except ValueError as error:
        problem, *other_lines = str(error).splitlines()
        remedies = ["r" + line[1:] for line in other_lines if line.startswith("Reshape")]
        if "contains NaN" in problem or "contains infinity" in problem:
            problem = f"{problem.rstrip('.')}{_nonfinite_row(values)}"
            remedies = ["correct such rows, or leave them out"]
            if encodable and "contains NaN" in problem and not is_sparse(values):
                remedies.append("or encode them, in a frame: DataFrame(X).add_prefix('x')")
        if problem.startswith("could not convert string to float: "):
            text = problem.partition(": ")[2].removeprefix("np.str_(").removesuffix(")")
            problem, remedies = f"{name} holds {text}, which is not a number", ["give numbers"]
        if "feature names" in problem:  # followed by lists of names, one name a line
            lists = " ".join(other_lines).replace(": - ", ": ").replace(" - ", ", ")
            remedies = [lists.replace(" Feature names", "; Feature names")]
        if "features, but" in problem and "is expecting" in problem:
            raise RowShapeError(
                problem.rstrip("."), "give the features of the training data"
            ) from None
        raise DataError("; ".join([problem.rstrip(".:"), *filter(None, remedies)])) from None


def _nonfinite_row(values: Any) -> str:
    """Return " in row k" for the first row with NaN or infinity; "" if unknown."""
    with contextlib.suppress(TypeError, ValueError):
        if is_sparse(values):
            entries = values.tocoo()
            rows = entries.row[~np.isfinite(entries.data)]
        else:
            rows = np.nonzero(~np.isfinite(np.asarray(values, np.float64)))[0]
        if len(rows):
            return f" in row {rows.min()}"
    return ""
