"""Write the docstrings of the estimators, with parameters described as the settings of a run."""

from __future__ import annotations

import json
import textwrap
from dataclasses import fields

from streamkern.config.names import OTHER_PARAMETERS, PARAMETER_SETTINGS
from streamkern.config.rules import allowed_values
from streamkern.config.run_config import RunConfig
from streamkern.estimator.parameters import Parameters

_SECTIONS = {section: type(table) for section, table in RunConfig()}
_MEANINGS = {
    f"{section}.{name}": meaning
    for section, table in _SECTIONS.items()
    for name, meaning in table.meanings().items()
}
_OWN_MEANINGS = {
    "callbacks": "objects of subclasses of `streamkern.Callback`, such as `streamkern.TensorBoard` "
    "and `streamkern.MLflow`, which are called during `fit` and may end it. Those of scikit-learn "
    "1.9 and newer are for `set_callbacks`.",
    "transforms": "transforms of the training rows, in order, before they are scaled: tables as in "
    'a run file, {"kind": "noise", "sigma": 0.5}, or functions (X, Y, rng) -> (X, Y). Random ones '
    'are augmentation. They get rows in the units of X, unless {"kind": "scale"} is first.',
    "verbose": "0: silent. 1: `fit` and `partial_fit` show on stderr the progress of the setup, "
    "the steps, the training loss, and the time left: in a line that is redrawn on a terminal and "
    'in a notebook, in a new line every 30 s in a pipe. "auto": the same, if it takes more than '
    "3 s.",
    "warm_start": "True: `fit` starts from the weights of the previous fit. The centers must be "
    "the same, because rows and random_state are the same, or because `centers` are given; other "
    "centers raise a `ConfigError`. The run_dir of another fit: `fit` starts from its weights, on "
    'the same centers. False: `fit` starts anew. For "block", "eigenpro3", "eigenpro4" and '
    '"falkon".',
}
"""Parameters that are not settings of a run, or differ from them."""
_ADDITIONS = {
    "calibrate": "`predict_proba` returns the probabilities, and `predict(X, interval=0.9)` the "
    "intervals or sets of classes. Not for `partial_fit`.",
    "class_sampling": "Not for `partial_fit`.",
    "class_weight": "Not for `partial_fit`.",
    "early_stopping": "Not for `partial_fit`.",
    "epochs": 'In `partial_fit`, the epochs on each block; "auto": one.',
    "loss": "Or an object, or a class, that derives from `streamkern.Loss`.",
    "memory": "On a GPU, it also limits the memory of the GPU.",
    "posterior": '`predict(X, return_std=True)` uses it; `report_["posterior"]` has the standard '
    "deviation of the noise (on a log scale, of the logarithms).",
    "random_state": "Or None or a RandomState, as in scikit-learn.",
    "ranks": "They need the extra `ranks` and a `run_dir`; see the page on ranks.",
    "ridge": 'The estimate is in `report_["ridge"]`; several are in `report_["ridges"]`.',
    "target_transform": '`report_["target_transform"]` describes a log scale in use: its unit, the '
    "factor of the predictions (gain), and the ratio of the squared errors of left-out rows with "
    "and without it; the largest errors are capped.",
}
"""Sentences that follow the meaning of a setting."""


ATTRIBUTES = """\
centers_ : (p, d) the centers, in the order given or drawn, after the scaling of X. With Fourier
    features (p, d + 1), their frequencies and phases; for rows that stay sparse, a sparse array of
    SciPy.
dual_coef_ : (p, c) the weights of the centers, read-only:
    f(X) = K(scaled X, centers_) @ dual_coef_ + intercept_.
    float64, but for classes in the precision of the training. On a log scale (`target_transform`)
    this sum s is log(1 + y / unit), and f(X) = gain * unit * (exp(s) - 1).
intercept_ : (c,) float64; zeros without `fit_intercept`.
feature_importances_ : (n_features_in_,) for a model with a metric: the share of each column in the
    mean squared gradients from which the metric is made; they sum to 1.
    `permutation_importances` measures how much a column lowers the error.
metric_importances_ : (d,) the same shares for the features that the columns were encoded as.
kernel_ : the kernel with its bandwidth, a `Kernel`.
ridge_ : the ridge, set or estimated; 0.0 without one; (c,) if several targets have their own.
solver_ : the name of the solver, set or chosen.
n_centers_ : p, the number of centers; 0 with Fourier features.
bandwidth_ : the bandwidth of the kernel; 1 if it has none, and the largest one in a sum or product
    of kernels.
n_features_in_ : d, or the number of columns of the table that was encoded.
feature_names_in_ : names of the columns, if a DataFrame or a store had them: names of the d
    features, or of the columns of the table that they were encoded from.
encoded_features_ : (d,) names of the features, for a table with words, dates or missing values.
report_ : choices and measurements: solver, sizes, ridge, leverage, step size, samples, metrics; the
    reason why it took fewer epochs than allowed (`ended`); for sparse rows their density.
n_iter_ : number of complete epochs; in `partial_fit` over all blocks so far.
loss_curve_ : (n_iter_,) the training loss of each epoch, oldest first: the mean squared error
    over rows and outputs, each row before the step that learned from it, in squared units of y, or
    of its logarithm on a log scale (`target_transform`). With the solvers "direct" and "falkon",
    which change the model at the end of an epoch, it is the loss of that model; after the last
    epoch it is computed on up to 512 rows. Steps that the divergence guard discards do not count.
    NaN if an epoch has no other steps, or if an older version began the run and did not record it.
    The curve includes the epochs before a resume from `run_dir`.
history_ : the evaluations on `test`, oldest first: `test_mse` in squared units of y, as the mean
    over rows and outputs, and `test_r2` or, for classes, `test_accuracy`; with `early_stopping`
    also `validation_mse` and so on, for the validation rows. The evaluation of the final weights is
    in report_ as well. With several labels for a row, they are evaluated as values.
validation_scores_ : with `early_stopping` the score of each epoch on the validation rows, oldest
    first: accuracy or R2, or the negative metric of a loss other than the squared error; else None.
"""

CLASSES_ATTRIBUTE = """\
classes_ : (c,) sorted labels. For a store they are its class names, converted to whole numbers if
    all names are whole numbers; with several labels for a row, the numbers of the columns.
    Predictions have their columns in this order, `dual_coef_` and `intercept_` in the order of the
    store's classes.
"""

RAISES = """\
ConfigError
    A parameter is wrong; the message names it, the rule and the remedy. `MemoryBudgetError` is a
    `ConfigError` for sizes that do not fit into `memory`.
DataError
    The data cannot be used: NaN or infinity, rows of another shape, a damaged store.
ResumeMismatchError
    `run_dir` holds a run of other data or settings.
TrainingInterrupted
    A signal stopped `fit` with a `run_dir`; the same call resumes it.
"""


def docstring(summary: str, example: str, own_parameters: dict[str, object]) -> str:
    """Return the docstring of an estimator.

    summary : its first paragraphs
    example : its section "Examples"
    own_parameters : parameters that only this estimator has, with their defaults
    """
    has_classes = "class_weight" in own_parameters
    defaults = {field.name: field.default for field in fields(Parameters)} | own_parameters
    parts = (
        ("Parameters", "".join(_entry(name, value) for name, value in defaults.items())),
        ("Attributes", (CLASSES_ATTRIBUTE if has_classes else "") + ATTRIBUTES),
        ("Raises", RAISES),
        ("Examples", example),
    )
    sections = (f"{title}\n{'-' * len(title)}\n{text}" for title, text in parts)
    return "\n".join((summary, *sections))


def _with_parameter_names(meaning: str) -> str:
    """Return a text in which the paths of settings are replaced by the names of parameters."""
    # The longest paths first, because one may be the beginning of another
    for name, path in sorted(PARAMETER_SETTINGS.items(), key=lambda item: -len(item[1])):
        meaning = meaning.replace(path, name)
    return meaning


def _entry(name: str, default: object) -> str:
    """Return the entry of a parameter: its meaning, its values and its default."""
    path = (PARAMETER_SETTINGS | OTHER_PARAMETERS).get(name, name)
    meaning = _OWN_MEANINGS.get(name)
    if meaning is None:
        section, _, key = path.partition(".")
        values = allowed_values(_SECTIONS[section].model_fields[key]).partition(", without a ")[0]
        meaning = f"{_with_parameter_names(_MEANINGS[path])} {_ADDITIONS.get(name, '')}"
        meaning = f"{meaning.rstrip()} Values: {values.replace('true or false', 'True or False')}."
    default_text = json.dumps(default) if isinstance(default, str) else repr(default)
    text = f"{name} : {meaning} Default: {default_text}."
    return textwrap.fill(text, 100, subsequent_indent="    ", break_long_words=False) + "\n"
