"""Check that `help` of an estimator is complete and that its example runs."""

from __future__ import annotations

import doctest
import inspect
import re

import numpy as np
import pytest

from streamkern import KernelClassifier, KernelRegressor

ESTIMATORS = [KernelClassifier, KernelRegressor]


def entries(kind: type, section: str) -> dict[str, str]:
    """Return the entries of a section of a docstring, as name -> text."""
    text = inspect.getdoc(kind) or ""
    body = re.split(r"^\w+\n-+\n", text, flags=re.MULTILINE)
    titles = re.findall(r"^(\w+)\n-+\n", text, flags=re.MULTILINE)
    section_text = dict(zip(titles, body[1:], strict=True))[section]
    parts = re.split(r"^(\w+) : ", section_text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_every_parameter_is_documented_with_its_default(kind: type) -> None:
    texts, defaults = entries(kind, "Parameters"), kind().get_params()
    assert texts.keys() == defaults.keys()
    for name, default in defaults.items():
        assert f'"{default}"' in texts[name] or str(default) in texts[name] or default == (), name


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_every_fitted_attribute_is_documented(kind: type) -> None:
    X = np.random.default_rng(0).standard_normal((60, 3))
    model = kind().fit(X, X[:, 0] > 0)
    public = {name for name in dir(kind) if name.endswith("_") and not name.startswith("_")}
    assert entries(kind, "Attributes").keys() == public
    absent = {"feature_importances_", "metric_importances_", "feature_names_in_"}
    absent |= {"encoded_features_"}
    assert {name for name in public if not hasattr(model, name)} == absent


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_docstring_example_runs(kind: type) -> None:
    (test,) = (t for t in doctest.DocTestFinder(recurse=False).find(kind) if t.examples)
    assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_every_public_method_is_documented(kind: type) -> None:
    methods = [n for n, value in vars(kind).items() if callable(value) and n[0] != "_"]
    assert not [name for name in methods if not inspect.getdoc(getattr(kind, name))]
