"""Check suggestions for wrong arguments, and that their tracebacks end at the call."""

from __future__ import annotations

import inspect
import pickle
import traceback
from pathlib import Path

import numpy as np
import pytest
from sklearn.base import clone

from streamkern import KernelClassifier, KernelRegressor, load
from streamkern.basics.errors import DataError, DivergenceError, StoreNotFoundError
from streamkern.config.names import PARAMETER_SETTINGS
from streamkern.config.run_config import FREE_AT_RESUME
from streamkern.estimator.mistakes import FOREIGN_PARAMETERS, RUN_ONLY_SETTINGS, hide_traceback

X = np.random.default_rng(0).random((20, 3))


def test_unknown_parameter_suggests_intended_one() -> None:
    runs = {
        name: rf"it is a setting of runs: run\.{name} in streamkern\.train_m"
        for name in RUN_ONLY_SETTINGS
    }
    assert {f"run.{name}" for name in runs} <= FREE_AT_RESUME
    hints = {
        "bandwith": "did you mean 'bandwidth'", "n_center": "did you mean 'n_centers'",
        "gamma": "did you mean 'bandwidth'", "C": "did you mean 'ridge'",
        "xyz": r"help\(Kernel\w+\) lists the parameters", **runs,
    }  # fmt: skip
    for kind in (KernelRegressor, KernelClassifier):
        for keyword, hint in hints.items():
            with pytest.raises(
                TypeError, match=f"^{kind.__name__} has no parameter '{keyword}'; {hint}"
            ):
                kind(**{keyword: 2})
    with pytest.raises(TypeError, match="class_weight"):
        KernelRegressor(class_weight="balanced")  # a parameter of the classifier
    assert set(FOREIGN_PARAMETERS.values()) <= PARAMETER_SETTINGS.keys()
    assert not FOREIGN_PARAMETERS.keys() & PARAMETER_SETTINGS.keys()


def test_unknown_method_argument_suggests_intended_one() -> None:
    for keyword, hint in {
        "eval_set": r"fit has no argument 'eval_set'; give held-out rows as test=\(X, y\)",
        "validation_data": r"test=\(X, y\)",
        "epochs": r"it is a parameter of KernelRegressor\(epochs=...\)",
        "sample_weights": "give sample_weight=",
        "tests": "did you mean 'test'",
    }.items():
        with pytest.raises(TypeError, match=hint):
            KernelRegressor().fit(X, X[:, 0], **{keyword: X})
    # `partial_fit` takes no sample weights, so none are suggested.
    with pytest.raises(TypeError, match=r"has no argument 'w'; it has X, y$"):
        KernelRegressor().partial_fit(np.eye(3), np.zeros(3), w=np.ones(3))  # type: ignore[call-arg]


def test_invalid_data_error_names_valid_input() -> None:
    y, images, few = X[:, 0], np.zeros((20, 4, 4)), {"n_centers": 2, "bandwidth": 1.0}
    mixed = [np.array(["a", "b", keyword, "b"], dtype=object) for keyword in (None, 7)]
    for call, message in (
        (lambda: KernelClassifier(**few).fit(np.zeros((4, 2)), mixed[0]), "label of row 2 is None"),
        (lambda: KernelClassifier(**few).fit(np.zeros((4, 2)), mixed[1]), "label 7 of row 2 of y"),
        (lambda: KernelRegressor(**few).fit(X, y, test=X), r"these have none; .*test=\(X, y\)"),
        (lambda: KernelRegressor(**few).fit(X, y, test=(X, X, X)), r"tuple of 3; give test=\(X, y"),
        (lambda: KernelRegressor().fit(images, y), r"give them a channel: X\[\.\.\., None\]"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()
    KernelRegressor(**few).fit(images[..., None], y)
    model = KernelRegressor(n_centers=2, ridge=1e-3).fit(np.eye(5), np.arange(5.0))
    rows = "give rows: an array, a data frame, a path or a store"
    for keyword, message in (
        (None, f"X is None; {rows}"), (3.0, f"X=3.0 has no rows; {rows}"),
        ({1}, "X is a set, whose entries have no order"),
        (True, "X=True has no rows"), (object(), "X=<object .* has no rows"), ([], "X is empty"),
        (range(5), "X has the shape .5,.*Reshape"), ((np.eye(5), np.zeros(5)), "X is a tuple of 2"),
        ({"a": [1.0]}, "X is a dict with the keys a"),
    ):  # fmt: skip
        for request in (model.predict, lambda X: KernelRegressor().fit(X, np.zeros(5))):
            with pytest.raises(DataError, match=message):
                request(keyword)


def test_estimators_keep_signature_and_pickle() -> None:
    """Check the signature, which scikit-learn reads, and pickle."""
    names = list(inspect.signature(KernelClassifier).parameters)
    assert (names[0], "class_weight" in names) == ("kernel", True)
    model = KernelClassifier("laplace", bandwidth=2)
    for copy in (clone(model), pickle.loads(pickle.dumps(model))):
        assert copy.get_params() == model.get_params()


def test_usage_error_has_short_traceback_and_failure_full_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: KernelRegressor("rbv").fit(X, X[:, 0]),
        lambda: KernelRegressor().fit("nothing.zarr"),
        lambda: KernelClassifier().fit("nothing.zarr"),
        lambda: load("nothing"),
    ):
        with pytest.raises((ValueError, RuntimeError)) as mistake:
            call()
        frames = traceback.extract_tb(mistake.value.__traceback__)
        assert sum("streamkern" in Path(frame.filename).parts for frame in frames[1:]) <= 2
        text = "".join(traceback.format_exception(mistake.value))
        assert "another exception" not in text
        assert "direct cause" not in text
    with pytest.raises(StoreNotFoundError) as caught:
        KernelRegressor().fit(tmp_path / "no.zarr")
    assert caught.value.__cause__ is None

    @hide_traceback
    def call_inner() -> None:
        def inner() -> None:
            raise DivergenceError("too far")

        inner()

    with pytest.raises(DivergenceError) as failure:
        call_inner()
    assert traceback.extract_tb(failure.value.__traceback__)[-1].name == "inner"


def test_warnings_name_estimator_parameters() -> None:
    rng = np.random.default_rng(0)
    rows = np.repeat(rng.normal(size=(100, 3)), 2, axis=0)
    equivalent = KernelRegressor(kernel="laplace", solver="direct", ridge=0.0, bandwidth=2.0)
    with pytest.warns(UserWarning, match="give ridge, such as"):
        equivalent.fit(rows, np.sin(rows[:, 0]) + 0.1 * rng.normal(size=200))
    rows[::50, 1] = 9999.0  # a code for missing values
    plain = KernelRegressor(kernel="laplace", n_centers=20, metric="none")
    with pytest.warns(UserWarning, match="or else set scale='quantiles'"):
        plain.fit(rows, rows[:, 0])
