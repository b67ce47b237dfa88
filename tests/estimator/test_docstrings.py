"""`help` of an estimator says all there is to know, and its example is true."""

from __future__ import annotations

import doctest
import inspect
import re

import numpy as np
import pytest

from streamkern import KernelClassifier, KernelRegressor

ESTIMATORS = [KernelClassifier, KernelRegressor]


def entries(kind: type, section: str) -> dict[str, str]:
    """Name -> text, of a section of a docstring."""
    text = inspect.getdoc(kind) or ""
    body = re.split(r"^\w+\n-+\n", text, flags=re.MULTILINE)
    titles = re.findall(r"^(\w+)\n-+\n", text, flags=re.MULTILINE)
    said = dict(zip(titles, body[1:], strict=True))[section]
    parts = re.split(r"^(\w+) : ", said, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_every_parameter_is_described_with_its_default(kind: type) -> None:
    said, defaults = entries(kind, "Parameters"), kind().get_params()
    assert said.keys() == defaults.keys()
    for name, default in defaults.items():
        assert f'"{default}"' in said[name] or str(default) in said[name] or default == (), name


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_every_fitted_attribute_is_described(kind: type) -> None:
    X = np.random.default_rng(0).standard_normal((60, 3))
    model = kind().fit(X, X[:, 0] > 0)
    public = {name for name in dir(kind) if name.endswith("_") and not name.startswith("_")}
    assert entries(kind, "Attributes").keys() == public
    absent = {"feature_importances_", "metric_importances_", "feature_names_in_"}
    absent |= {"encoded_features_"}
    assert {name for name in public if not hasattr(model, name)} == absent


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_the_example_is_true(kind: type) -> None:
    (test,) = (t for t in doctest.DocTestFinder(recurse=False).find(kind) if t.examples)
    assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_every_public_method_is_described(kind: type) -> None:
    methods = [n for n, value in vars(kind).items() if callable(value) and n[0] != "_"]
    assert not [name for name in methods if not inspect.getdoc(getattr(kind, name))]
