"""What a wrong argument looks like: which parameter was meant, and no traceback below the call."""

from __future__ import annotations

import inspect
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone

from streamkern import KernelClassifier, KernelRegressor, load
from streamkern.basics.errors import DataError, DivergenceError, StoreNotFoundError
from streamkern.config.names import PARAMETER_SETTINGS
from streamkern.config.run_config import FREE_AT_RESUME
from streamkern.estimator.mistakes import FOREIGN_PARAMETERS, OF_RUNS, hide_traceback

X = np.random.default_rng(0).random((20, 3))


@pytest.mark.parametrize("kind", [KernelRegressor, KernelClassifier])
@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("bandwith", "bandwidth"), ("n_center", "n_centers"), ("gamma", "bandwidth"), ("C", "ridge")],
)
def test_a_wrong_parameter_names_the_one_that_was_meant(kind: Any, wrong: str, meant: str) -> None:
    with pytest.raises(
        TypeError, match=f"^{kind.__name__} has no parameter '{wrong}'; did you mean '{meant}'"
    ):
        kind(**{wrong: 2})


def test_a_parameter_like_no_other_is_refused() -> None:
    with pytest.raises(TypeError, match=r"no parameter 'xyz'; help\(KernelRegressor\) lists them"):
        KernelRegressor(xyz=1)
    with pytest.raises(TypeError, match="class_weight"):
        KernelRegressor(class_weight="balanced")  # that of the classifier


@pytest.mark.parametrize("name", OF_RUNS)
def test_a_setting_of_runs_alone_names_where_it_is_one(name: str) -> None:
    assert f"run.{name}" in FREE_AT_RESUME
    words = rf"no parameter '{name}'; it is a setting of runs: run\.{name} in streamkern\.train_m"
    with pytest.raises(TypeError, match=words):
        KernelRegressor(**{name: 2})


@pytest.mark.parametrize("wrong", [None, 7])
def test_labels_are_of_one_kind(wrong: object) -> None:
    y = np.array(["a", "b", wrong, "b"], dtype=object)
    with pytest.raises(
        ValueError, match=f"label (of row 2 is {wrong}|{wrong} of row 2 of y is of type)"
    ):
        KernelClassifier(n_centers=2).fit(np.zeros((4, 2)), y)


def test_words_from_elsewhere_mean_parameters() -> None:
    assert set(FOREIGN_PARAMETERS.values()) <= PARAMETER_SETTINGS.keys()
    assert not FOREIGN_PARAMETERS.keys() & PARAMETER_SETTINGS.keys()


def test_estimators_are_what_they_were() -> None:
    """To scikit-learn, which reads the signature, and to pickle."""
    names = list(inspect.signature(KernelClassifier).parameters)
    assert names[0] == "kernel"
    assert "class_weight" in names
    model = KernelClassifier("laplace", bandwidth=2)
    for other in (clone(model), pickle.loads(pickle.dumps(model))):
        assert other.get_params() == model.get_params()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: KernelRegressor("rbv").fit(X, X[:, 0]),
        lambda: KernelRegressor().fit("nothing.zarr"),
        lambda: KernelClassifier().fit("nothing.zarr"),
        lambda: load("nothing"),
    ],
    ids=["kernel", "store", "store of classes", "run"],
)
def test_a_mistake_has_at_most_five_lines_of_ours(
    wrong: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        wrong()
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert sum("streamkern" in Path(frame.filename).parts for frame in frames[1:]) <= 2
    text = "".join(traceback.format_exception(caught.value))
    assert "another exception" not in text
    assert "direct cause" not in text


def test_a_failure_keeps_its_traceback() -> None:
    @hide_traceback
    def failing() -> None:
        def inner() -> None:
            raise DivergenceError("too far")

        inner()

    with pytest.raises(DivergenceError) as caught:
        failing()
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "inner"


def test_a_missing_store_is_said_without_zarr(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError) as caught:
        KernelRegressor().fit(tmp_path / "no.zarr")
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("eval_set", r"fit has no argument 'eval_set'; give held-out rows as test=\(X, y\)"),
        ("validation_data", r"test=\(X, y\)"),
        ("epochs", r"it is a parameter of KernelRegressor\(epochs=...\)"),
        ("sample_weights", "give sample_weight="),
        ("tests", "did you mean 'test'"),
    ],
)
def test_a_wrong_argument_of_fit_names_the_one_that_was_meant(wrong: str, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        KernelRegressor().fit(X, X[:, 0], **{wrong: X})


def test_a_hint_names_an_argument_that_the_method_has() -> None:
    """`partial_fit` takes no sample weights, so none are suggested."""
    with pytest.raises(TypeError, match=r"has no argument 'w'; it has X, y$"):
        KernelRegressor().partial_fit(np.eye(3), np.zeros(3), w=np.ones(3))  # type: ignore[call-arg]


def test_what_has_no_rows_is_said_by_its_value() -> None:
    model = KernelRegressor(n_centers=2, ridge=1e-3).fit(np.eye(5), np.arange(5.0))
    rows = "give rows: an array, a data frame, a path or a store"
    for wrong, words in (
        (None, f"X is None; {rows}"), (3.0, f"X=3.0 has no rows; {rows}"),
        ({1}, "X is a set, which has no order"),
        (True, "X=True has no rows"), (object(), "X=<object .* has no rows"), ([], "X is empty"),
        (range(5), "X has the shape .5,.*Reshape"), ((np.eye(5), np.zeros(5)), "X is a tuple of 2"),
        ({"a": [1.0]}, "X is a dict with the keys a"),
    ):  # fmt: skip
        for ask in (model.predict, lambda X: KernelRegressor().fit(X, np.zeros(5))):
            with pytest.raises(DataError, match=words):
                ask(wrong)


def test_rows_to_test_on_need_targets() -> None:
    with pytest.raises(ValueError, match=r"have no targets y; .*test=\(X, y\)"):
        KernelRegressor(n_centers=2).fit(X, X[:, 0], test=X)
    with pytest.raises(ValueError, match=r"test is a tuple of 3; give test=\(X, y\)"):
        KernelRegressor(n_centers=2).fit(X, X[:, 0], test=(X, X, X))


def test_images_without_channels_are_told_to_have_one() -> None:
    images = np.zeros((20, 4, 4))
    with pytest.raises(ValueError, match=r"give them a channel: X\[\.\.\., None\]"):
        KernelRegressor().fit(images, X[:, 0])
    KernelRegressor(n_centers=2, bandwidth=1.0).fit(images[..., None], X[:, 0])
